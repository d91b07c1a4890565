"""Token trees for speculative verification: who sees whom, and which path the target accepts.

A tree is its parents, one per draft token: ``parents[i]`` is the index of token i's parent, or
``PAST`` where token i follows the last token before the draft. Any order will do: a parent may come
after its children. A batch holds trees of one size, of any shapes. Arrays are on the host::

    tree_mask = to_device(tree.mask([tree.chain(4), tree.star(4), [-1, 0, 0, 1]]))
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctm_rt.decode.plan import MASK_WORD_BITS, MAX_TREE_QUERY_SEQ_LEN
from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import ceil_div

PAST = -1

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class Accepted(NamedTuple):
    """The longest path of one tree that the target agrees with."""

    nodes: Integers  # (n,), indices into the tree from the root on; may be empty
    tokens: Integers  # (n,), the draft's tokens there
    next_token: int  # the target's own token after the path


def chain(query_len: int) -> Integers:
    """Return the parents of a tree without branches: token i follows token i - 1."""
    _check_query_len("query_len", query_len)
    return np.arange(query_len) - 1


def star(query_len: int) -> Integers:
    """Return the parents of one root, token 0, and ``query_len - 1`` alternatives after it."""
    _check_query_len("query_len", query_len)
    return np.where(np.arange(query_len) == 0, PAST, 0)


def ancestors(parents: npt.ArrayLike) -> Bools:
    """Return what each token of a tree sees of it: itself and its ancestors.

    Parameters
    ----------
    parents : (batch, query_len), integers in -1..query_len-1; 1 to 128 tokens

    Returns
    -------
    visible : (batch, query_len, query_len), bool; token i sees token j

    Raises
    ------
    ArgumentError
        A parent is out of range, a token is its own ancestor, or ``parents`` has another shape or
        dtype.
    """
    parents = _integers("parents", parents, ("batch", "query_len"))
    batch, query_len = parents.shape
    _check_query_len("parents", query_len)
    wrong = parents[(parents < PAST) | (parents >= query_len)]
    if wrong.size:
        raise ArgumentError("parents", f"{PAST} to {query_len - 1}", wrong[0])
    # One more column stands for the past, its own parent; PAST, the index -1, finds it.
    above = np.pad(parents, ((0, 0), (0, 1)), constant_values=PAST)
    visible = np.zeros((batch, query_len, query_len + 1), bool)
    token = np.broadcast_to(np.arange(query_len), parents.shape)
    for _ in range(query_len + 1):
        if (token == PAST).all():
            return visible[:, :, :query_len]
        np.put_along_axis(visible, token[:, :, None], True, axis=2)
        token = np.take_along_axis(above, token, axis=1)
    sequence, row = np.argwhere(token != PAST)[0]
    got = f"a cycle through token {token[sequence, row]} of sequence {sequence}"
    raise ArgumentError("parents", "a tree", got)


def mask(parents: npt.ArrayLike, *, mask_words: int | None = None) -> npt.NDArray[np.int32]:
    """Return the ``tree_mask`` in which each token sees itself and its ancestors.

    As ``pack(ancestors(parents), mask_words=mask_words)``.
    """
    return pack(ancestors(parents), mask_words=mask_words)


def pack(visible: npt.ArrayLike, *, mask_words: int | None = None) -> npt.NDArray[np.int32]:
    """Return a boolean matrix as the ``tree_mask`` that decode attention takes.

    Parameters
    ----------
    visible : (batch, query_len, query_len), bool; query i sees draft key j
        Any matrix, not a tree's alone. 1 to 128 tokens.
    mask_words : int, at least ceil(query_len / 32), the default

    Returns
    -------
    tree_mask : (batch, query_len, mask_words), int32; bit j % 32 of word j // 32 of row i
        Bits at or past ``query_len`` are 0.

    Raises
    ------
    ArgumentError
        An argument is outside this contract.
    """
    visible = _array("visible", visible, ("batch", "query_len", "query_len"))
    batch, query_len, query_len_ = visible.shape
    _check_query_len("visible", query_len)
    if visible.dtype != np.bool_:
        raise ArgumentError("visible", "bool", visible.dtype)
    if query_len_ != query_len:
        raise ArgumentError("visible", f"{query_len} draft keys", query_len_)
    least = ceil_div(query_len, MASK_WORD_BITS)
    words = least if mask_words is None else mask_words
    if words < least:
        raise ArgumentError("mask_words", f"at least {least} for {query_len} tokens", words)
    bits = np.zeros((batch, query_len, words * MASK_WORD_BITS), bool)
    bits[:, :, :query_len] = visible
    return np.packbits(bits, axis=2, bitorder="little").view("<i4")


def unpack(tree_mask: npt.ArrayLike) -> Bools:
    """Return the boolean matrix of a ``tree_mask``; what ``pack`` was given.

    Parameters
    ----------
    tree_mask : (batch, query_len, mask_words), int32
        Bits at or past ``query_len`` may hold anything.

    Returns
    -------
    visible : (batch, query_len, query_len), bool

    Raises
    ------
    ArgumentError
        ``tree_mask`` has another dtype, too few words, or not 1 to 128 tokens.
    """
    tree_mask = _array("tree_mask", tree_mask, ("batch", "query_len", "mask_words"))
    _, query_len, words = tree_mask.shape
    _check_query_len("tree_mask", query_len)
    if tree_mask.dtype != np.int32:
        raise ArgumentError("tree_mask", "int32", tree_mask.dtype)
    least = ceil_div(query_len, MASK_WORD_BITS)
    if words < least:
        raise ArgumentError("tree_mask", f"at least {least} words for {query_len} tokens", words)
    octets = np.ascontiguousarray(tree_mask, "<i4").view(np.uint8)
    return np.unpackbits(octets, axis=2, count=query_len, bitorder="little").view(bool)


def accept(
    parents: npt.ArrayLike,
    draft_tokens: npt.ArrayLike,
    target_tokens: npt.ArrayLike,
    past_tokens: npt.ArrayLike | None = None,
) -> list[Accepted]:
    """Return, for each sequence, the longest path of its tree that a greedy target would write.

    A token is right if it is what the target gives after its parent; it is accepted if it and all
    its ancestors are right. The path ends at the deepest accepted token; of several, which takes
    siblings with equal tokens, at the one with the lowest index.

    Parameters
    ----------
    parents : (batch, query_len), integers; as in ``ancestors``
    draft_tokens : (batch, query_len), integers; the token ids that were the queries
    target_tokens : (batch, query_len), integers
        The target's most probable token after each draft token, as computed with ``mask(parents)``.
    past_tokens : (batch,), integers, optional
        The target's token after the past; decides among the children of the past. Without it each
        tree has one root, which the target chose in the step before and which is always accepted.

    Returns
    -------
    accepted : one per sequence
        ``tokens`` is ``draft_tokens`` at ``nodes``; ``next_token`` is the target's token after the
        last of them, or the past's token if there are none. New are ``tokens`` and ``next_token``,
        less the root where ``past_tokens`` is not given. The keys and values to keep are at cache
        positions ``seq_lens - query_len + nodes``.

    Raises
    ------
    ArgumentError
        An argument is outside this contract.
    """
    visible = ancestors(parents)
    parents = np.asarray(parents, np.int64)
    draft = _integers("draft_tokens", draft_tokens, ("batch", "query_len"), parents.shape)
    target = _integers("target_tokens", target_tokens, ("batch", "query_len"), parents.shape)
    if past_tokens is not None:
        past = _integers("past_tokens", past_tokens, ("batch",), parents.shape[:1])
    elif ((parents == PAST).sum(axis=1) > 1).any():
        raise ArgumentError("past_tokens", "tokens that decide among several roots", None)
    else:
        past = draft[parents == PAST]
    after = np.column_stack([target, past])  # PAST, the index -1, finds the past's
    right = draft == np.take_along_axis(after, parents, axis=1)
    accepted = (right[:, None] | ~visible).all(axis=2)
    depth = visible.sum(axis=2)
    ends = np.where(accepted, depth, 0).argmax(axis=1)
    paths = []
    for b, end in enumerate(ends):
        nodes = np.flatnonzero(visible[b, end] & accepted[b, end])
        nodes = nodes[depth[b, nodes].argsort()]
        last = nodes[-1] if nodes.size else PAST
        paths.append(Accepted(nodes, draft[b, nodes], int(after[b, last])))
    return paths


def _check_query_len(name: str, query_len: int) -> None:
    if not 1 <= query_len <= MAX_TREE_QUERY_SEQ_LEN:
        raise ArgumentError(name, f"1 to {MAX_TREE_QUERY_SEQ_LEN} tokens", query_len)


def _array(name: str, value: npt.ArrayLike, axes: tuple[str, ...]) -> npt.NDArray[Any]:
    expected = f"an array ({', '.join(axes)})"
    try:
        array = np.asarray(value)
    except ValueError as error:  # rows of different lengths
        raise ArgumentError(name, expected, error) from error
    if array.ndim != len(axes):
        raise ArgumentError(name, expected, f"shape {array.shape}")
    return array


def _integers(
    name: str, value: npt.ArrayLike, axes: tuple[str, ...], shape: tuple[int, ...] | None = None
) -> Integers:
    array = _array(name, value, axes)
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64):
        raise ArgumentError(name, "integers that an int64 holds", array.dtype)
    if shape is not None and array.shape != shape:
        raise ArgumentError(name, f"shape {shape}", array.shape)
    return array.astype(np.int64)
