import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt import reference, tree
from ctm_rt.decode.plan import MAX_TREE_QUERY_SEQ_LEN
from ctm_rt.errors import ArgumentError

QUERY_LENS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128]))


def line(parents, i):
    """Token i and its ancestors, youngest first."""
    return [i, *line(parents, parents[i])] if i >= 0 else []


def bit(tree_mask, b, i, j):
    """What a C program reads: a bit of an unsigned word."""
    return (int(tree_mask[b, i, j // 32]) % 2**32) // 2 ** (j % 32) % 2 == 1


def with_garbage(tree_mask, seed=0):
    """Set every bit at or past ``query_len`` by chance."""
    noisy, query_len = tree_mask.copy(), tree_mask.shape[1]
    rng = np.random.default_rng(seed)
    for b, i, word in np.ndindex(noisy.shape):
        spare = sum(1 << j for j in range(32) if word * 32 + j >= query_len)
        noise = (int(rng.integers(2**32)) & spare) | int(noisy[b, i, word]) % 2**32
        noisy[b, i, word] = noise - (noise >> 31 << 32)
    return noisy


@st.composite
def forests(draw, query_lens=QUERY_LENS, num_roots=None):
    """Parents of a batch of trees whose tokens are in no order."""
    query_len, batch = draw(query_lens), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parents = np.empty((batch, query_len), np.int64)
    for row in parents:
        order = rng.permutation(query_len)
        for n, token in enumerate(order):
            grows = n >= (num_roots or 1 + (rng.random() < 0.2) * query_len)
            row[token] = order[rng.integers(n)] if grows else -1
    return parents


# -- masks ----------------------------------------------------------------------------------------


@given(parents=forests(), spare_words=st.integers(0, 2))
def test_tokens_see_themselves_and_their_ancestors(parents, spare_words):
    batch, query_len = parents.shape
    words = -(-query_len // 32) + spare_words
    tree_mask = tree.mask(parents, mask_words=words)
    assert (tree_mask.shape, tree_mask.dtype) == ((batch, query_len, words), np.int32)
    visible = tree.ancestors(parents)
    np.testing.assert_array_equal(tree_mask, tree.pack(visible, mask_words=words))
    for b in range(batch):
        for i in range(query_len):
            seen = {j for j in range(words * 32) if bit(tree_mask, b, i, j)}
            assert seen == set(line(parents[b], i)) == set(np.flatnonzero(visible[b, i]))


@given(query_len=QUERY_LENS, batch=st.integers(0, 3), spare_words=st.integers(0, 2))
def test_any_matrix_survives_packing(query_len, batch, spare_words):
    visible = np.random.default_rng(query_len).random((batch, query_len, query_len)) < 0.5
    tree_mask = tree.pack(visible, mask_words=-(-query_len // 32) + spare_words)
    for b, i, j in np.ndindex(visible.shape):
        assert bit(tree_mask, b, i, j) == visible[b, i, j]
    for packed in (tree_mask, with_garbage(tree_mask), np.asfortranarray(tree_mask)):
        unpacked = tree.unpack(packed)
        assert unpacked.dtype == bool
        np.testing.assert_array_equal(unpacked, visible)


@pytest.mark.parametrize(("query_len", "words"), [(1, 1), (32, 1), (33, 2), (64, 2), (128, 4)])
def test_as_few_words_as_hold_the_tokens(query_len, words):
    assert tree.mask([tree.chain(query_len)]).shape == (1, query_len, words)


def test_the_top_bit_of_a_word_is_its_sign():
    assert (tree.mask([tree.chain(32)])[0, 30:, 0] == [2**31 - 1, -1]).all()


def test_a_batch_of_different_trees():
    tree_mask = tree.mask([tree.chain(4), tree.star(4), [-1, 0, 0, 1], [1, 3, -1, -1]])
    expected = [
        [0b0001, 0b0011, 0b0111, 0b1111],
        [0b0001, 0b0011, 0b0101, 0b1001],
        [0b0001, 0b0011, 0b0101, 0b1011],
        [0b1011, 0b1010, 0b0100, 0b1000],
    ]
    np.testing.assert_array_equal(tree_mask[:, :, 0], expected)


# -- masks as the reference reads them ------------------------------------------------------------


def cache(length, seed=0):
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((4, 128, 1, 8)).astype(np.float16)
    return pool, np.array([[[1, 0], [3, 2]]], np.int32), np.array([length], np.int32)


def attend_single(q, pool, page_table, keys):
    """Attention of one token to some cache positions, moved to the front of a pool of their own."""
    rows = pool[page_table[0]].reshape(2, 256, 1, 8)[:, keys]
    own = np.full((2, 128, 1, 8), np.nan, np.float16)
    own[:, : len(keys)] = rows
    table, length = np.array([[[0], [1]]], np.int32), np.array([len(keys)], np.int32)
    return reference.decode_attention(q[None], own, table, length, scale=0.5)[0]


@pytest.mark.parametrize("query_len", [1, 5, 33, 128])
@pytest.mark.parametrize("past", [0, 1, 100])
@pytest.mark.parametrize("window", [0, 3])
def test_a_chain_is_causal_attention(window, past, query_len):
    """Row i gives what plain decode gives when the cache ends with it."""
    options = {"scale": 0.5, "sliding_window": window}
    pool, page_table, seq_lens = cache(past + query_len)
    q = np.random.default_rng(1).standard_normal((1, query_len, 2, 8)).astype(np.float16)
    tree_mask = with_garbage(tree.mask([tree.chain(query_len)], mask_words=5))
    out = reference.decode_attention(
        q, pool, page_table, seq_lens, tree_mask=tree_mask, contiguous_query_swa=True, **options
    )
    for i in range(query_len):
        ends_here = np.array([past + i + 1], np.int32)
        expected = reference.decode_attention(q[:, i], pool, page_table, ends_here, **options)
        np.testing.assert_array_equal(out[:, i], expected)


@pytest.mark.parametrize("parents", [tree.star(7), [-1, 0, 0, 1, 1, 2, -1], [3, 0, 0, -1, 1, 3, 5]])
def test_a_path_is_attended_as_if_it_were_the_sequence(parents):
    past, query_len = 60, 7
    pool, page_table, seq_lens = cache(past + query_len)
    q = np.random.default_rng(1).standard_normal((1, query_len, 2, 8)).astype(np.float16)
    tree_mask = with_garbage(tree.mask([parents], mask_words=2))
    out = reference.decode_attention(q, pool, page_table, seq_lens, scale=0.5, tree_mask=tree_mask)
    for i in range(query_len):
        keys = [*range(past), *(past + j for j in sorted(line(parents, i)))]
        expected = attend_single(q[0, i], pool, page_table, keys)
        np.testing.assert_allclose(out[0, i], expected, rtol=1e-12)


# -- accepted paths -------------------------------------------------------------------------------


def slow_accept(parents, draft, target, past):
    """Walk down from the past: the longest walk, and of those the one with the lowest end."""

    def walks(path, wanted):
        yield path
        for child, parent in enumerate(parents):
            if parent == (path[-1] if path else -1) and draft[child] == wanted:
                yield from walks([*path, child], target[child])

    return max(walks([], past), key=lambda path: (len(path), -path[-1] if path else 0))


@given(parents=forests(st.integers(1, 12)), vocabulary=st.integers(1, 4), seed=st.integers(0, 999))
def test_the_longest_walk_is_accepted(parents, vocabulary, seed):
    """Few tokens, so that long walks are common and siblings are equal."""
    rng = np.random.default_rng(seed)
    draft, target = rng.integers(vocabulary, size=(2, *parents.shape))
    past = rng.integers(vocabulary, size=len(parents))
    accepted = tree.accept(parents, draft.astype(np.int32), target.astype(np.uint16), past)
    assert len(accepted) == len(parents)
    for b, (nodes, tokens, next_token) in enumerate(accepted):
        expected = slow_accept(parents[b], draft[b], target[b], past[b])
        assert nodes.tolist() == expected
        assert tokens.tolist() == draft[b][expected].tolist()
        assert next_token == (target[b, expected[-1]] if expected else past[b])


@given(parents=forests(st.integers(1, 9), num_roots=1), seed=st.integers(0, 999))
def test_without_past_tokens_the_root_is_accepted(parents, seed):
    rng = np.random.default_rng(seed)
    draft, target = rng.integers(2, size=(2, *parents.shape))
    roots = draft[parents == -1]
    for got, expected in zip(
        tree.accept(parents, draft, target),
        tree.accept(parents, draft, target, roots),
        strict=True,
    ):
        assert got.nodes.size
        assert [part.tolist() for part in got[:2]] == [part.tolist() for part in expected[:2]]
        assert got.next_token == expected.next_token


def test_accepted_by_hand():
    """Token 5 is drafted twice after the root; the second has the right child, out of order."""
    parents, draft = [4, -1, 1, 1, 1, 2], [8, 3, 5, 6, 5, 9]
    target = [7, 5, 0, 0, 8, 0]
    (path,) = tree.accept([parents], [draft], [target])
    assert path.nodes.tolist() == [1, 4, 0]
    assert path.tokens.tolist() == [3, 5, 8]
    assert path.next_token == 7


def test_nothing_accepted():
    (path,) = tree.accept([[-1, -1, 0]], [[3, 4, 5]], [[5, 0, 0]], [6])
    assert (path.nodes.size, path.tokens.size, path.next_token) == (0, 0, 6)


# -- refusals -------------------------------------------------------------------------------------

REFUSED = {
    "no token": ("query_len", "1 to 128 tokens, got 0", lambda: tree.chain(0)),
    "long star": ("query_len", "1 to 128 tokens, got 129", lambda: tree.star(129)),
    "long tree": ("parents", "1 to 128 tokens", lambda: tree.mask([np.arange(129) - 1])),
    "empty tree": ("parents", "1 to 128 tokens", lambda: tree.mask(np.empty((1, 0), int))),
    "one axis": (
        "parents",
        r"\(batch, query_len\), got shape \(3,\)",
        lambda: tree.mask([-1, 0, 1]),
    ),
    "sizes": ("parents", r"\(batch, query_len\)", lambda: tree.mask([[-1, 0], [-1]])),
    "float": ("parents", "integers .*, got float64", lambda: tree.mask([[-1.0, 0.0]])),
    "bool": ("parents", "integers .*, got bool", lambda: tree.mask([[True]])),
    "uint64": ("parents", "integers .*, got uint64", lambda: tree.mask(np.zeros((1, 2), "u8"))),
    "low": ("parents", "-1 to 1, got -2", lambda: tree.mask([[-1, 0], [-2, 0]])),
    "high": ("parents", "-1 to 1, got 2", lambda: tree.mask([[-1, 2]])),
    "itself": ("parents", "cycle through token 1 of sequence 0", lambda: tree.mask([[-1, 1]])),
    "cycle": (
        "parents",
        "a tree, got a cycle through token [23] of sequence 1",
        lambda: tree.mask([[-1, 0, 1, 2], [2, -1, 3, 2]]),
    ),
    "not bool": ("visible", "bool, got int64", lambda: tree.pack(np.ones((1, 2, 2), np.int64))),
    "not square": ("visible", "2 draft keys, got 3", lambda: tree.pack(np.ones((1, 2, 3), bool))),
    "one matrix": ("visible", r"got shape \(2, 2\)", lambda: tree.pack(np.ones((2, 2), bool))),
    "few words": (
        "mask_words",
        "at least 2 for 33 tokens, got 1",
        lambda: tree.mask([tree.chain(33)], mask_words=1),
    ),
    "no words": ("mask_words", "at least 1", lambda: tree.mask([[-1]], mask_words=0)),
    "unsigned": ("tree_mask", "int32, got uint32", lambda: tree.unpack(np.ones((1, 1, 1), "u4"))),
    "short": (
        "tree_mask",
        "at least 2 words for 33 tokens, got 1",
        lambda: tree.unpack(np.ones((1, 33, 1), np.int32)),
    ),
    "long": ("tree_mask", "tokens", lambda: tree.unpack(np.ones((1, 129, 5), np.int32))),
    "draft": (
        "draft_tokens",
        r"shape \(1, 2\), got \(1, 3\)",
        lambda: tree.accept([[-1, 0]], [[1, 2, 3]], [[1, 2]]),
    ),
    "target": (
        "target_tokens",
        "integers .*, got float64",
        lambda: tree.accept([[-1, 0]], [[1, 2]], [[1.0, 2.0]]),
    ),
    "past": (
        "past_tokens",
        r"shape \(1,\), got \(2,\)",
        lambda: tree.accept([[-1, 0]], [[1, 2]], [[1, 2]], [1, 2]),
    ),
    "roots": (
        "past_tokens",
        "among several roots, got None",
        lambda: tree.accept([[-1, 0], [-1, -1]], [[1, 2]] * 2, [[1, 2]] * 2),
    ),
}


@pytest.mark.parametrize(("name", "message", "call"), REFUSED.values(), ids=REFUSED)
def test_refused(name, message, call):
    with pytest.raises(ArgumentError, match=message) as refusal:
        call()
    assert refusal.value.name == name


def test_the_longest_tree_is_served():
    assert tree.unpack(tree.mask([tree.chain(MAX_TREE_QUERY_SEQ_LEN)])).sum() == 128 * 129 // 2
