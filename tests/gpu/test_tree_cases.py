"""What has gone wrong for users of tree decode, each reduced to its smallest input.

Exact answers first: with q = 0 every key that a row sees weighs the same, so its output is the mean
of their values, and a wrong bit, edge or split moves a number with a name.
"""

from dataclasses import replace

import numpy as np
import pytest

from ctm_rt import tree
from ctm_rt.reference import e4m3_to_float
from tests.gpu.device import assert_same
from tests.gpu.inputs import INT32_MAX, PAGE, POISON, Module, number, rising_keys
from tests.gpu.trees import (
    TreeCall,
    TreeInputs,
    assert_tree_matches,
    decode_tree,
    exact,
    make_tree,
    tree_reference,
)

EDGES = [7, 33, 127, 128, 129, 130, 257, 1000]


def zero_q(inputs: TreeInputs) -> TreeInputs:
    inputs.q[:] = 0
    return inputs


def positions(inputs: TreeInputs) -> np.ndarray:
    """The position of every token that ``make`` writes, sequence by sequence."""
    return np.concatenate([np.arange(max(0, length)) for length in inputs.seq_lens])


def marked(
    module: Module, lengths: list[int], query_len: int, first: float, **options: object
) -> TreeInputs:
    """q = 0; draft j has its value in dimension j % head_dim alone, the past ``first`` in all."""
    tokens = np.concatenate([np.arange(length) - (length - query_len) for length in lengths])
    one_hot = tokens[:, None] % module.head_dim == np.arange(module.head_dim)
    values = np.where((tokens[:, None] < 0) | one_hot, number(module, first), number(module, 0))
    return zero_q(make_tree(module, lengths, query_len, values=values[:, None], **options))


@pytest.mark.parametrize("query_len", [1, 5, 33, 100])
@pytest.mark.parametrize("tail", [None, 448])
def test_every_bit_has_its_place(tree_module: Module, query_len: int, tail: float | None) -> None:
    """Each dimension tells of one draft key or a few. A finite poison would move the mean."""
    poison = None if tail is None else number(tree_module, tail)
    lengths = sorted({max(query_len, length) for length in EDGES})
    inputs = marked(tree_module, lengths, query_len, 1.0, poison=poison, hidden=poison, ratio=3)
    np.testing.assert_allclose(decode_tree(tree_module, inputs), exact(inputs), rtol=2**-10)


def test_star(tree_module: Module) -> None:
    """Case 20. Siblings of 448 beside a past and a root of 2: each sees itself, no other."""
    query_len, past = 9, 130
    values = np.full((past + query_len, 1, tree_module.head_dim), number(tree_module, 2))
    values[past + 1 :] = number(tree_module, 448)
    visible = tree.ancestors([tree.star(query_len)])
    inputs = make_tree(
        tree_module, [past + query_len], query_len, visible=visible, values=values, ratio=5
    )
    expected = np.full(query_len, (2 * (past + 1) + 448) / (past + 2))
    expected[0] = 2
    got = decode_tree(tree_module, zero_q(inputs))
    np.testing.assert_allclose(
        got, np.broadcast_to(expected[None, :, None, None], got.shape), rtol=2**-10
    )


def test_nothing_is_causal(tree_module: Module) -> None:
    """Case 20. A row that sees a later draft alone, one that sees itself alone, one that sees no
    draft: without a past it is zeros.
    """
    visible = np.zeros((2, 3, 3), bool)
    visible[:, 0, 2] = visible[:, 1, 1] = True
    inputs = marked(tree_module, [3, 40], 3, 1.0, visible=visible, ratio=16)
    got = decode_tree(tree_module, inputs)
    expected = np.zeros((2, 3, tree_module.head_dim))
    expected[0, 0, 2] = expected[0, 1, 1] = 1
    expected[1] = 37
    expected[1, 0, 2] += 1
    expected[1, 1, 1] += 1
    expected[1] /= np.array([38, 38, 37])[:, None]
    np.testing.assert_allclose(
        got, np.broadcast_to(expected[:, :, None], got.shape), rtol=2**-10, atol=0
    )


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("query_len", [4, 70])
def test_rows_that_see_nothing(tree_module: Module, query_len: int, sinks: bool) -> None:
    """Case 20. Zeros, with a sink too, whatever their neighbours see."""
    visible = np.ones((1, query_len, query_len), bool)
    visible[:, ::2] = False
    inputs = make_tree(
        tree_module, [query_len, 0, -3, 130 + query_len], query_len, visible=visible, sinks=sinks
    )
    got = decode_tree(tree_module, inputs)
    assert not got[0, ::2].any()
    assert not got[1:3].any()
    assert_tree_matches(got, inputs)


def test_words_past_those_needed(tree_module: Module) -> None:
    """Case 21. 33 tokens in two words and in four, garbage in the rest: equal in every bit."""
    visible = np.random.default_rng(1).random((2, 33, 33)) < 0.5
    few, many = (
        make_tree(tree_module, [33, 300], 33, visible=visible, mask_words=words) for words in (2, 4)
    )
    got = decode_tree(tree_module, few)
    assert_tree_matches(got, few)
    assert_same(got, decode_tree(tree_module, many))
    other_garbage = few.tree_mask ^ (np.arange(2) == 1) * np.int32(-2)
    assert_same(got, decode_tree(tree_module, replace(few, tree_mask=other_garbage)))


@pytest.mark.parametrize("per_row", [False, True])
def test_a_window_shorter_than_the_draft(tree_module: Module, per_row: bool) -> None:
    """Case 22. Length 10, draft 4, window 3: the edge is 7, or 4, 5, 6 and 7."""
    options = {"sliding_window": 3, "contiguous_query_swa": per_row}
    inputs = make_tree(tree_module, [10], 4, visible=True, ratio=2, **options)
    inputs.kv_pool[inputs.page_table[0, 1, 0], 4:10] = np.reshape(
        [number(tree_module, 2.0**j) for j in range(6)], (6, 1, 1)
    )
    got = decode_tree(tree_module, zero_q(inputs))
    lefts = (4, 5, 6, 7) if per_row else (7, 7, 7, 7)
    expected = [np.mean(2.0 ** (np.arange(left, 10) - 4)) for left in lefts]
    np.testing.assert_allclose(
        got, np.broadcast_to(np.reshape(expected, (1, 4, 1, 1)), got.shape), rtol=2**-10
    )


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("query_len", [1, 16, 100])
def test_windows(tree_module: Module, query_len: int, per_row: bool) -> None:
    """Cases 10, 22. Below, at and above the draft; left of it -1 in the table, NaN in the pool."""
    lengths = [query_len, 129 + query_len, 700]
    for window in sorted({1, 2, query_len, query_len + 1, 127, 128, 129, 699, 700, INT32_MAX}):
        inputs = make_tree(
            tree_module,
            lengths,
            query_len,
            sliding_window=window,
            contiguous_query_swa=per_row,
            seed=window % 1000,
        )
        got = decode_tree(tree_module, inputs)
        assert_tree_matches(got, inputs, what=f"window {window}")
        if window >= 700:
            assert_same(got, decode_tree(tree_module, replace(inputs, sliding_window=0)))


@pytest.mark.parametrize("query_len", [5, 64])
def test_where_the_draft_lies(tree_module: Module, query_len: int) -> None:
    """Case 23. No past; a page edge inside the draft; a draft that CTAs and groups share."""
    lengths = [query_len, PAGE + 2, PAGE + query_len, 2 * PAGE + query_len // 2, 1000]
    inputs = make_tree(tree_module, lengths, query_len, ratio=2, sinks=True)
    expected = exact(inputs)
    for what, got in TreeCall(tree_module, inputs).run_kernels():
        assert_tree_matches(got, inputs, expected, what)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("per_row", [False, True])
def test_fewer_tokens_than_queries(tree_module: Module, window: int, per_row: bool) -> None:
    """Draft positions below 0 do not exist; their rows see what their bits say of the rest."""
    options = {"sliding_window": window, "contiguous_query_swa": per_row}
    inputs = make_tree(tree_module, [1, 2, 30, 0, 40, 39], 40, **options)
    assert_tree_matches(decode_tree(tree_module, inputs), inputs)


def test_lengths_outside_of_the_table(tree_module: Module) -> None:
    """A negative length counts as 0; one past the table as the whole table."""
    inputs = make_tree(tree_module, [0, 256, 9], 6, max_pages=2)
    lengths = np.array([-5, 10_000, 9], np.int32)
    got = decode_tree(tree_module, replace(inputs, seq_lens=lengths))
    assert_same(got, decode_tree(tree_module, inputs))
    assert_tree_matches(got, inputs)


@pytest.mark.parametrize("sinks", [False, True])
def test_pages_outside_the_pool(tree_module: Module, sinks: bool) -> None:
    """Keys behind such an entry are invisible, in the draft too; it is not followed."""
    inputs = make_tree(tree_module, [300, 300, 300], 20, sinks=sinks)
    inputs.page_table[0, 0, 0] = INT32_MAX
    inputs.page_table[0, 1, 2] = -1  # of all drafts
    inputs.page_table[1] = len(inputs.kv_pool)
    got = decode_tree(tree_module, inputs)
    assert_tree_matches(got, inputs)
    assert not got[1].any()


def test_batch_padding(tree_module: Module) -> None:
    """Case 5. Sequences of length 0 are zeros and change nothing beside them."""
    padded = make_tree(tree_module, [9, 0, 40, 0], 7, max_pages=2)
    padded.page_table[[1, 3]] = -1
    got = decode_tree(tree_module, padded)
    assert not got[[1, 3]].any()
    assert_tree_matches(got, padded)
    calls = [TreeCall(tree_module, inputs) for inputs in (padded, padded.take([0, 2]))]
    for (_, with_padding), (_, without) in zip(*(c.run_kernels() for c in calls), strict=True):
        assert_same(with_padding[[0, 2]], without)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_beyond_any_sentinel(tree_module: Module, sign: int) -> None:
    """Case 3. Equal scores of +-524,288 at D = 128 beside keys that are hidden.

    To a rounding: where a score is not the f32 number that its product with the scale is, weights
    are not 1, and are rounded to f16.
    """
    key = number(tree_module, sign * (4096 if tree_module.kv_dtype == "f16" else 448))
    values = np.full(tree_module.head_dim, number(tree_module, 2))
    values[::3] = number(tree_module, -0.5)
    inputs = make_tree(tree_module, [9, 64, 129, 600], 9, keys=key, values=values, scale=1.0)
    inputs.q[:] = 1
    np.testing.assert_allclose(decode_tree(tree_module, inputs), exact(inputs), rtol=2**-10)


@pytest.mark.parametrize("query_len", [4, 70])
def test_scores_that_rise_and_fall(tree_module: Module, query_len: int) -> None:
    """In steps of 46 octaves, for every other head up: what is summed is scaled for that alone."""
    keys = rising_keys(tree_module)
    inputs = make_tree(tree_module, [len(keys)], query_len, visible=True, keys=keys, scale=1.0)
    inputs.q[:] = 0
    inputs.q[..., ::2, 0], inputs.q[..., 1::2, 0] = 16, -16
    expected = exact(inputs)
    for what, got in TreeCall(tree_module, inputs).run_kernels([(1, 0), (3, 0)]):
        assert_tree_matches(got, inputs, expected, what)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_positive(tree_module: Module, scale: float) -> None:
    """The smallest score weighs most, or all weigh the same; hidden keys nothing."""
    inputs = make_tree(tree_module, [9, 300], 9, scale=scale, sinks=True)
    assert_tree_matches(decode_tree(tree_module, inputs), inputs)


# -- what is not finite ---------------------------------------------------------------------------


def test_nan_in_one_query(tree_module: Module) -> None:
    """Case 6. It stays in its row: one head of one token."""
    inputs = make_tree(tree_module, [9, 200, 129], 9)
    clean = decode_tree(tree_module, inputs)
    inputs.q[1, 4, 5, 7] = np.nan
    got = decode_tree(tree_module, inputs)
    assert np.isnan(got[1, 4, 5]).all()
    got[1, 4, 5] = clean[1, 4, 5]
    assert_same(got, clean)


FLAWS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


@pytest.mark.parametrize("flaw", FLAWS)
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("query_len", [9, 70])
def test_a_flaw_in_a_draft_token(tree_module: Module, query_len: int, row: int, flaw: str) -> None:
    """Case 6. It shows in the rows that see the token; the others are as without it, bit by bit."""
    if tree_module.kv_dtype == "e4m3" and flaw != "nan":
        pytest.skip("e4m3 has no infinity")
    bad = POISON[tree_module.kv_dtype] if flaw == "nan" else np.float16(FLAWS[flaw])
    inputs = make_tree(tree_module, [query_len, 200 + query_len], query_len, ratio=3)
    clean = decode_tree(tree_module, inputs)
    draft = tree.unpack(np.ascontiguousarray(inputs.tree_mask))[1, :, query_len // 2]
    assert 0 < draft.sum() < query_len
    at = 200 + query_len // 2
    inputs.kv_pool[inputs.page_table[1, row, at // PAGE], at % PAGE, 1, 9] = bad
    got, expected = decode_tree(tree_module, inputs), tree_reference(inputs)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(got[infinite], expected[infinite])
    seen = np.broadcast_to(draft[:, None] & (np.arange(6) >= 3), (query_len, 6))
    assert not np.isfinite(got[1, seen, 9]).any() or row == 0
    assert_same(got[0], clean[0])
    assert_same(got[1, ~seen], clean[1, ~seen])


@pytest.mark.parametrize("row", [0, 1])
def test_a_flaw_left_of_some_windows(tree_module: Module, row: int) -> None:
    """A NaN that the first rows' windows still hold and the last rows' do not."""
    inputs = make_tree(
        tree_module, [300], 20, visible=True, sliding_window=100, contiguous_query_swa=True
    )
    clean = decode_tree(tree_module, inputs)
    at = 300 - 20 + 10 + 1 - 100  # the left edge of token 10
    inputs.kv_pool[inputs.page_table[0, row, at // PAGE], at % PAGE, :, 3] = POISON[
        tree_module.kv_dtype
    ]
    got = decode_tree(tree_module, inputs)
    assert np.isnan(got[:, :11, :, 3]).all()
    assert_same(got[:, 11:], clean[:, 11:])


def test_a_flaw_in_the_past(tree_module: Module) -> None:
    """Every row of the tree sees it; those of the other KV head, and dimension, do not."""
    inputs = make_tree(tree_module, [100, 200], 9)
    clean = decode_tree(tree_module, inputs)
    inputs.kv_pool[inputs.page_table[1, 1, 0], 11, 1, 2] = POISON[tree_module.kv_dtype]
    got = decode_tree(tree_module, inputs)
    assert np.isnan(got[1, :, 4:, 2]).all()
    got[1, :, 4:, 2] = clean[1, :, 4:, 2]
    assert_same(got, clean)


# -- sinks, heads, e4m3 ---------------------------------------------------------------------------


def test_sinks_of_each_head(tree_module: Module) -> None:
    """Case 9. None, all and none of the mass by turns: of a head, in every token of the tree."""
    inputs = make_tree(tree_module, [33, 129, 300], 33, ratio=3)
    clean = decode_tree(tree_module, inputs)
    sinks = np.tile(np.array([-np.inf, 1e4, -1e4], np.float32), inputs.num_q_heads // 3)
    got = decode_tree(tree_module, replace(inputs, sinks=sinks))
    assert not got[:, :, 1::3].any()
    for head in (0, 2):
        assert_same(got[:, :, head::3], clean[:, :, head::3])


def test_sink_of_zero_is_one_more_key(tree_module: Module) -> None:
    """With q = 0 the mean shrinks by n / (n + 1), whatever the scale, at most once a row."""
    values = np.broadcast_to(number(tree_module, 1), tree_module.head_dim)
    inputs = zero_q(make_tree(tree_module, EDGES, 7, values=values, scale=0.37))
    inputs = replace(inputs, sinks=np.zeros(inputs.num_q_heads, np.float32))
    drafts = tree.unpack(np.ascontiguousarray(inputs.tree_mask)).sum(axis=2)
    n = inputs.seq_lens[:, None] - 7 + drafts
    expected = exact(inputs)
    np.testing.assert_allclose(expected[..., 0, 0], n / (n + 1))
    for what, got in TreeCall(tree_module, inputs).run_kernels([(1, 0), (3, 0), (1, 5)]):
        np.testing.assert_allclose(got, expected, rtol=2**-10, err_msg=what)


def test_head_reads_its_own_kv_head(tree_module: Module) -> None:
    """Case 17. The values of KV head g are 2**g, so head h answers 2 ** (h // ratio)."""
    for ratio in range(1, 17):
        marks = [number(tree_module, 2.0**g) for g in range(3)]
        values = np.repeat(np.array(marks)[:, None], tree_module.head_dim, 1)
        inputs = make_tree(
            tree_module, [5, 77, 300], 5, ratio=ratio, num_kv_heads=3, values=values, visible=True
        )
        expected = 2.0 ** (np.arange(3 * ratio) // ratio)
        got = decode_tree(tree_module, zero_q(inputs))
        np.testing.assert_array_equal(got, np.broadcast_to(expected[:, None], got.shape))


def test_every_byte_as_value(tree_module: Module) -> None:
    """Case 7. A tree of 128 tokens that see themselves alone answers with each code, exactly."""
    if tree_module.kv_dtype != "e4m3":
        pytest.skip("f16 values are not converted")
    codes = np.arange(256, dtype=np.uint8)
    values = np.broadcast_to(codes[:, None, None], (256, 1, tree_module.head_dim))
    inputs = make_tree(
        tree_module, [128, 128], 128, values=values, visible=np.eye(128, dtype=bool), num_kv_heads=1
    )
    expected = e4m3_to_float(codes).reshape(2, 128, 1, 1)
    got = decode_tree(tree_module, zero_q(inputs))
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


def test_every_byte_as_key(tree_module: Module) -> None:
    """Beside a past of one key of zeros, so that its weight tells its value; NaN tells itself."""
    if tree_module.kv_dtype != "e4m3":
        pytest.skip("f16 keys are not converted")
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    keys, values = (np.zeros((2, 129, 1, tree_module.head_dim), np.uint8) for _ in range(2))
    keys[:, 1:] = codes[..., None, None]
    values[:, 0] = number(tree_module, 1)
    options = {"visible": np.eye(128, dtype=bool), "num_kv_heads": 1}
    tokens = {"keys": keys.reshape(258, 1, -1), "values": values.reshape(258, 1, -1)}
    inputs = make_tree(tree_module, [129, 129], 128, **options, **tokens)
    inputs.q[:] = 1
    for scale in (1 / 64, 1.0, 64.0):  # for the large values, the middle and the small ones
        scaled = replace(inputs, scale=scale / tree_module.head_dim)
        np.testing.assert_allclose(
            decode_tree(tree_module, scaled), tree_reference(scaled), rtol=2**-10, atol=2**-24
        )


def test_a_chain_is_causal_decode(tree_module: Module) -> None:
    """Row i of a chain is what a tree of one token gives when the cache ends with it."""
    chain = tree.ancestors([tree.chain(6)])
    inputs = make_tree(tree_module, [6, 131, 300], 6, visible=chain, ratio=3)
    got = decode_tree(tree_module, inputs)
    assert_tree_matches(got, inputs)
    for i in range(6):
        alone = replace(
            inputs,
            q=inputs.q[:, i : i + 1],
            tree_mask=np.full((3, 1, 1), -1, np.int32),
            seq_lens=inputs.seq_lens - 5 + i,
        )
        assert_tree_matches(got[:, i : i + 1], alone)
        assert_tree_matches(decode_tree(tree_module, alone), alone)
