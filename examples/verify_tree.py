"""Speculative decoding with token trees: draft a tree, verify it in one call, keep what is right.

``python -m examples.verify_tree`` lets a language model of one attention layer and random weights
write, once token by token and once with trees: the texts are equal, the steps are fewer. Attention
runs on the GPU if there is one, else by the definition on the host.
"""

from collections.abc import Iterator

import numpy as np

import ctm_rt
from ctm_rt import tree

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 64, 8, 2, 64
TOKENS_PER_PAGE = ctm_rt.paged_kv.TOKENS_PER_PAGE
MAX_PAGES = 3
# Each token of a draft has two children, its two likeliest successors: 15 tokens, four deep.
PARENTS = (np.arange(15) - 1) // 2

rng = np.random.default_rng(0)
embedding = rng.standard_normal((VOCABULARY, HEADS, HEAD_DIM)).astype(np.float16)
keys = embedding.reshape(VOCABULARY, KV_HEADS, -1, HEAD_DIM).mean(2).astype(np.float16)
values = rng.standard_normal((VOCABULARY, KV_HEADS, HEAD_DIM)).astype(np.float16)
# What attention to one token alone gives in all heads. It points at the token's successor in some
# order of the tokens, and a little anywhere.
alone = values.repeat(HEADS // KV_HEADS, axis=1).reshape(VOCABULARY, -1).astype(np.float32)
order = rng.permutation(VOCABULARY)
unembedding = rng.standard_normal((HEADS * HEAD_DIM, VOCABULARY), np.float32)
unembedding[:, np.roll(order, -1)] += alone[order].T


def has_gpu() -> bool:
    """Return whether a GPU is visible."""
    try:
        return ctm_rt.driver.device_count() > 0
    except ctm_rt.DriverError:
        return False


def attend(*arrays: np.ndarray, tree_mask: np.ndarray | None = None) -> np.ndarray:
    """Attend on the GPU or on the host."""
    if not has_gpu():
        return ctm_rt.reference.decode_attention(*arrays, scale=0.1, tree_mask=tree_mask)
    mask = None if tree_mask is None else ctm_rt.to_device(tree_mask)
    out = ctm_rt.decode_attention(*map(ctm_rt.to_device, arrays), scale=0.1, tree_mask=mask)
    return ctm_rt.to_host(out)


class Text:
    """One sequence: its tokens, and the cache of their keys and values."""

    def __init__(self, prompt: list[int]) -> None:
        self.length = 0
        shape = (2 * MAX_PAGES, TOKENS_PER_PAGE, KV_HEADS, HEAD_DIM)
        self.pool = np.zeros(shape, np.float16)
        self.page_table = np.arange(2 * MAX_PAGES, dtype=np.int32).reshape(1, 2, MAX_PAGES)
        self.append(prompt)

    def append(self, tokens: list[int]) -> None:
        """Write the tokens' keys and values at the end of the cache."""
        position = self.length + np.arange(len(tokens))
        page, slot = position // TOKENS_PER_PAGE, position % TOKENS_PER_PAGE
        self.pool[page, slot] = keys[tokens]
        self.pool[MAX_PAGES + page, slot] = values[tokens]
        self.length += len(tokens)

    def next_tokens(self, tokens: list[int], tree_mask: np.ndarray | None = None) -> np.ndarray:
        """Return what the model writes after each of ``tokens``, the last ones of the cache."""
        length = np.array([self.length], np.int32)
        q = embedding[tokens][None]
        out = attend(q, self.pool, self.page_table, length, tree_mask=tree_mask)
        return (out.reshape(len(tokens), -1).astype(np.float32) @ unembedding).argmax(axis=1)


def write_one_by_one(prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation."""
    text, token, written = Text(prompt[:-1]), prompt[-1], []
    while len(written) < count:
        text.append([token])
        token = int(text.next_tokens([token])[0])
        written.append(token)
    return written


def draft(root: int) -> list[int]:
    """Return a tree of guesses: the successors that a token would have by itself."""
    tokens = [root]
    for parent in PARENTS[1:]:
        likeliest = (alone[tokens[parent]] @ unembedding).argsort()[::-1]
        tokens.append(int(likeliest[(len(tokens) - 1) % 2]))
    return tokens


def write_by_trees(prompt: list[int], count: int) -> Iterator[list[int]]:
    """Yield the greedy continuation, as many tokens at a time as one call has verified."""
    text, root, written = Text(prompt[:-1]), prompt[-1], 0
    tree_mask = tree.mask([PARENTS])
    while written < count:
        tokens, past = draft(root), text.length
        text.append(tokens)
        target = text.next_tokens(tokens, tree_mask)
        (accepted,) = tree.accept([PARENTS], [tokens], [target])
        # The cache goes on after the accepted path, whose keys and values follow the past's.
        text.length = past
        text.append(list(accepted.tokens))
        root = accepted.next_token
        new = [*map(int, accepted.tokens[1:]), root]
        written += len(new)
        yield new


if __name__ == "__main__":
    start = [int(token) for token in rng.integers(VOCABULARY, size=150)]
    steps = list(write_by_trees(start, 64))
    by_trees = [token for step in steps for token in step]
    one_by_one = write_one_by_one(start, len(by_trees))
    print(f"attention on the {'GPU' if has_gpu() else 'host'}")
    print(f"{len(by_trees)} tokens in {len(steps)} calls of {len(PARENTS)} query tokens")
    print("the text of single-token decode:", "equal" if by_trees == one_by_one else "different")
