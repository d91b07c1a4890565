import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt.errors import ArgumentError
from ctm_rt.reference import (
    decode_attention,
    decode_attention_plain,
    dropped_pages,
    e4m3_to_float,
)

P = 128


class Cache:
    """A random paged cache whose keys and values are also kept flat: ``k[b][position, head]``."""

    def __init__(self, lengths, num_kv_heads=1, head_dim=8, max_pages=4, seed=0):
        rng = np.random.default_rng(seed)
        batch, num_pages = len(lengths), len(lengths) * max_pages
        self.seq_lens = np.array(lengths, np.int32)
        self.pool = np.full((2 * num_pages, P, num_kv_heads, head_dim), np.nan, np.float16)
        ids = rng.permutation(num_pages).reshape(batch, max_pages).astype(np.int32)
        self.page_table = np.stack([ids, ids + num_pages], axis=1)
        self.k, self.v = [], []
        for b, length in enumerate(lengths):
            length = min(max(length, 0), max_pages * P)
            kv = rng.standard_normal((2, length, num_kv_heads, head_dim)).astype(np.float16)
            self.k.append(kv[0].astype(float))
            self.v.append(kv[1].astype(float))
            for j in range(length):
                self.pool[self.page_table[b, :, j // P], j % P] = kv[:, j]
            self.page_table[b, :, -(-length // P) :] = 2_147_480_000

    @property
    def arrays(self):
        return self.pool, self.page_table, self.seq_lens


def queries(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def both(q, cache, **options):
    """The definition, after a check that the plain run, merged from 1 and from 3, agrees."""
    options.setdefault("scale", 0.5)
    exact = decode_attention(q, *cache.arrays, **options)
    for num_partials in (1, 3):
        plain = decode_attention_plain(q, *cache.arrays, num_partials=num_partials, **options)
        assert plain.dtype == np.float16
        np.testing.assert_array_equal(np.isnan(plain), np.isnan(exact))
        np.testing.assert_allclose(plain, exact, rtol=4e-3, atol=4e-3)
    return exact


def softmax_attention(q, k, v, scale, sink=None):
    """Textbook form through log-sum-exp, for one row."""
    scores = np.array([scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in k])
    lse = np.logaddexp.reduce([*scores, -np.inf if sink is None else sink])
    return np.exp(scores - lse) @ v


def test_random_against_textbook():
    cache = Cache([1, 127, 128, 129, 300], num_kv_heads=2)
    q, sinks = queries(5, 6, 8), np.linspace(-2, 3, 6, dtype=np.float32)
    for sink in (None, sinks):
        out = both(q, cache, scale=0.37, sinks=sink)
        for b in range(5):
            for h in range(6):
                k, v = cache.k[b][:, h // 3], cache.v[b][:, h // 3]
                row = q[b, h].astype(float)
                expected = softmax_attention(row, k, v, 0.37, None if sink is None else sink[h])
                np.testing.assert_allclose(out[b, h], expected, rtol=1e-12)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 512])
def test_zero_query_is_the_mean(length):
    cache = Cache([length], num_kv_heads=2)
    mean = cache.v[0].mean(axis=0).repeat(2, axis=0)[None]
    q = np.zeros((1, 4, 8), np.float16)
    np.testing.assert_allclose(both(q, cache), mean, atol=1e-12)
    zero_sink = np.zeros(4, np.float32)
    share = length / (length + 1)
    np.testing.assert_allclose(both(q, cache, sinks=zero_sink), share * mean, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 127, 128, 129, 299, 300, 301, 10**9])
def test_window_counts_the_current_token(window):
    cache = Cache([300])
    cache.page_table[0, :, : max(0, 300 - window) // P] = -1
    q = np.zeros((1, 1, 8), np.float16)
    expected = cache.v[0][-window:].mean(axis=0)
    np.testing.assert_allclose(both(q, cache, sliding_window=window)[0], expected, atol=1e-12)


def test_one_key_is_its_value():
    cache = Cache([1])
    np.testing.assert_array_equal(both(queries(1, 2, 8), cache)[0], [cache.v[0][0, 0]] * 2)


@pytest.mark.parametrize("key", [-4096.0, 4096.0])
def test_scores_far_from_any_sentinel(key):
    cache = Cache([200])
    cache.pool[cache.page_table[0, 0, :2]] = key
    expected = cache.v[0].mean(axis=0)
    q = np.ones((1, 1, 8), np.float16)
    np.testing.assert_allclose(both(q, cache, scale=16.0)[0], expected, atol=1e-12)


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
@pytest.mark.parametrize("sinks", [None, np.zeros(2, np.float32)])
def test_no_key_is_zeros(length, sinks):
    out = both(queries(2, 2, 8), Cache([length, 5]), sinks=sinks)
    assert not out[0].any()
    assert out[1].all()


def test_length_is_clamped_to_the_table():
    short, long = Cache([512]), Cache([512])
    long.seq_lens[:] = 2**31 - 1
    q = queries(1, 1, 8)
    np.testing.assert_array_equal(both(q, long), both(q, short))


@pytest.mark.parametrize("bad", [-1, 16, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("row", [0, 1])
def test_invalid_pages_are_invisible(bad, row):
    """Whether the K or the V page is bad, the keys of that page are not seen."""
    cache = Cache([300, 300], max_pages=4)
    assert len(cache.pool) == 16
    cache.page_table[0, row, 1] = bad
    q = np.zeros((2, 1, 8), np.float16)
    out = both(q, cache)
    seen = np.delete(cache.v[0], np.s_[P : 2 * P], axis=0)
    np.testing.assert_allclose(out[0], seen.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(out[1], cache.v[1].mean(axis=0), atol=1e-12)


def test_nan_stays_in_its_row():
    clean = Cache([200, 200], num_kv_heads=2)
    q = queries(2, 4, 8)
    expected = decode_attention(q, *clean.arrays, scale=0.5)

    q[0, 1, 3] = np.nan
    out = both(q, clean)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(out).sum() == 8

    q = queries(2, 4, 8)
    poisoned = Cache([200, 200], num_kv_heads=2)
    poisoned.pool[poisoned.page_table[1, 0, 1], 3, 0, 0] = np.nan  # key 131, KV head 0
    poisoned.pool[poisoned.page_table[0, 1, 0], 9, 1, 2] = np.nan  # value 9, KV head 1, dim 2
    out = both(q, poisoned)
    wrong = np.isnan(out)
    assert wrong[1, :2].all()
    assert wrong[0, 2:, 2].all()
    assert wrong.sum() == 16 + 2
    np.testing.assert_array_equal(out[~wrong], expected[~wrong])


def test_extreme_sinks():
    cache, q = Cache([200]), queries(1, 4, 8)
    plain = both(q, cache)
    sinks = np.array([-np.inf, -1e4, 1e4, 100], np.float32)
    out = both(q, cache, sinks=sinks)
    np.testing.assert_array_equal(out[0, :2], plain[0, :2])
    np.testing.assert_allclose(out[0, 2:], 0, atol=1e-30)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 8))
def test_how_keys_are_dealt_changes_nothing(length, window, num_partials):
    cache, q = Cache([length], head_dim=2), queries(1, 1, 2)
    options = {"scale": 1.0, "sliding_window": window}
    exact = decode_attention(q, *cache.arrays, **options)
    plain = decode_attention_plain(q, *cache.arrays, num_partials=num_partials, **options)
    np.testing.assert_allclose(plain, exact, rtol=2e-3, atol=2e-3)


def test_e4m3_table_is_that_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3_to_float(codes), expected)
    np.testing.assert_array_equal(np.signbit(e4m3_to_float(codes)), np.signbit(expected))
    assert (e4m3_to_float(codes)[[0x7E, 0x01, 0x80]] == [448, 2**-9, 0]).all()


@pytest.mark.parametrize("spelling", [np.uint8, ml_dtypes.float8_e4m3fn])
def test_e4m3_pool_and_its_scales(spelling):
    cache = Cache([256])
    cache.pool = cache.pool.astype(ml_dtypes.float8_e4m3fn)
    k, v = (
        cache.pool[cache.page_table[0, row, :2]].reshape(256, 8).astype(float) for row in range(2)
    )
    cache.pool = cache.pool.view(spelling)
    q = queries(1, 1, 8)
    out = both(q, cache, scale=0.25, k_scale=3.0, v_scale=0.5)
    expected = 0.5 * softmax_attention(q[0, 0].astype(float), k, v, 0.75)
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-12)


def test_other_pools_are_refused():
    cache = Cache([4])
    cache.pool = cache.pool.astype(np.float32)
    with pytest.raises(ArgumentError, match="kv_pool: expected float16 or e4m3, got float32"):
        decode_attention(queries(1, 1, 8), *cache.arrays, scale=1.0)


# -- skip-softmax ---------------------------------------------------------------------------------


def ladder(*levels, length=None, heads=1):
    """A cache of one page for each level: a key of page p scores ``levels[p]`` (of each head).

    With ``queries_of(heads)`` at scale 1.
    """
    length = len(levels) * P if length is None else length
    cache = Cache([length], max_pages=len(levels))
    for p, level in enumerate(levels):
        page = cache.pool[cache.page_table[0, 0, p]]
        page[...] = 0
        page[: length - p * P, 0, :heads] = level
        page[max(0, length - p * P) :] = np.nan
    return cache


def queries_of(heads):
    return np.eye(heads, 8, dtype=np.float16)[None]


def skipped(cache, heads=1, num_partials=1, **options):
    """The definition and how many pages it drops, after a check that the plain run agrees."""
    options = {"scale": 1.0, "num_partials": num_partials} | options
    q = options.pop("q", queries_of(heads))
    exact = decode_attention(q, *cache.arrays, **options)
    plain = decode_attention_plain(q, *cache.arrays, **options)
    np.testing.assert_array_equal(np.isnan(plain), np.isnan(exact))
    np.testing.assert_allclose(plain, exact, rtol=4e-3, atol=4e-3)
    options.pop("sinks", None)
    return exact, int(dropped_pages(q, *cache.arrays, **options).sum())


def attended(cache, levels, pages):
    """The answer for the first head over whole ``pages``, from their levels alone."""
    weights = np.exp(np.array(levels, float)[pages] - max(levels[p] for p in pages))
    sums = [cache.v[0][p * P : (p + 1) * P, 0].sum(axis=0) for p in pages]
    counts = [len(cache.v[0][p * P : (p + 1) * P]) for p in pages]
    return weights @ sums / (weights @ counts)


@pytest.mark.parametrize(
    ("levels", "num_partials", "scale", "kept"),
    [
        # log(1 / 640) = -6.5: the first page stays, one that raises the maximum, one just below it
        ((0, -60, -60, 1, 0), 1, 1, [0, 3, 4]),
        # S above the length: whatever does not raise or equal the maximum goes
        ((0, -60, 0, 1, 0), 1, 10**6, [0, 2, 3]),
        ((3, 2, 1, 0, 3), 1, 10**6, [0, 4]),
        # the first page of each partial result stays, and its maximum is its own
        ((0, -60, -60, -61, -70), 2, 640, [0, 1]),
        ((0, -60, -60, -60, -70), 2, 640, [0, 1, 3]),
        ((0, -60, -60, -61, -70), 5, 10**6, [0, 1, 2, 3, 4]),
        ((0, -60, -60, -61, -70), 9, 10**6, [0, 1, 2, 3, 4]),
        # a maximum that falls is no new one
        ((5, -60, 4, -60, 5), 1, 640, [0, 4]),
    ],
)
def test_pages_are_dropped(levels, num_partials, scale, kept):
    cache = ladder(*levels)
    out, dropped = skipped(cache, num_partials=num_partials, skip_softmax=[(0, scale)])
    np.testing.assert_allclose(out[0, 0], attended(cache, levels, kept), rtol=1e-9)
    assert dropped == len(levels) - len(kept)


def test_the_threshold_is_of_the_whole_length():
    """10 pages: log(8 / 1280) = -5.08. A window of two pages changes nothing about that."""
    for level, dropped in ((-5, 0), (-5.125, 1)):
        cache = ladder(*[9] * 8, 0, level)
        options = {"skip_softmax": [(0, 8)], "sliding_window": 2 * P}
        out, count = skipped(cache, **options)
        assert count == dropped
        expected = attended(cache, [9] * 8 + [0, level], [8, 9][: 2 - dropped])
        np.testing.assert_allclose(out[0, 0], expected, rtol=1e-9)


def test_a_partly_visible_page_goes_by_its_visible_keys():
    """The last page ends in the tail's NaN, the first has a key of 40 left of the window."""
    cache = ladder(0, 1, -60, length=2 * P + 5)
    first = cache.pool[cache.page_table[0, 0, 0]]
    first[:100, 0, 0] = 40
    options = {"skip_softmax": [(0, 10**6)], "sliding_window": P + 5 + 28}
    out, dropped = skipped(cache, **options)
    assert dropped == 1
    expected = decode_attention(
        queries_of(1),
        cache.pool,
        cache.page_table,
        np.array([2 * P], np.int32),
        scale=1.0,
        sliding_window=P + 28,
    )
    np.testing.assert_allclose(out, expected, rtol=1e-12)


def test_every_head_of_the_group_must_agree():
    low, high = [-60] * 8, [-60] * 7 + [3]
    cache = ladder([0] * 8, low, high, low, heads=8)
    out, dropped = skipped(cache, heads=8, skip_softmax=[(0, 1)])
    assert dropped == 2
    for h in range(8):
        levels = [0, -60, high[h], -60]
        np.testing.assert_allclose(out[0, h], attended(cache, levels, [0, 2]), rtol=1e-9)


@pytest.mark.parametrize(
    ("table", "dropped"),
    [
        ([(0, 1)], 1),
        ([(256, 1)], 1),
        ([(255, 1), (257, 0)], 1),
        ([(257, 1)], 0),
        ([(0, 1), (256, 0)], 0),
        ([(0, 0)], 0),
        ([(0, 0), (100, 1), (256, 1)], 1),
        ([(0, 1), (100, 0)], 0),
        ([], 0),
    ],
)
@pytest.mark.parametrize("form", [list, np.array, lambda table: np.array(table).reshape(-1)])
def test_the_last_bin_that_is_reached_counts(table, dropped, form):
    """Length 256. Without a bin, or with S = 0, it is dense in every bit."""
    cache = ladder(0, -60)
    out, count = skipped(cache, skip_softmax=form(table))
    assert count == dropped
    if not dropped:
        np.testing.assert_array_equal(out, both(queries_of(1), cache, scale=1.0))


def test_a_sink_takes_no_part():
    cache, sinks = ladder(0, -1, -60), np.array([50], np.float32)
    out, dropped = skipped(cache, skip_softmax=[(0, 10)], sinks=sinks)
    assert dropped == 1
    share = 128 * (1 + np.exp(-1)) / (128 * (1 + np.exp(-1)) + np.exp(50))
    expected = share * attended(cache, [0, -1], [0, 1])
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-9)


def test_a_nan_keeps_its_page_and_those_after():
    """In the partial result whose it is; what is dropped may hold any value."""
    cache = ladder(0, 0, -60, -60, -60, -60, -60)
    cache.pool[cache.page_table[0, 0, 3], 5, 0, 0] = np.nan
    cache.pool[cache.page_table[0, 1, 2]] = np.nan
    out, dropped = skipped(cache, num_partials=2, skip_softmax=[(0, 1)])
    assert dropped == 3  # 2, 4 and 6; not 3 and 5
    assert np.isnan(out).all()
    whole = ladder(0, 0, -60, -60, -60, -60, -60)
    whole.pool[whole.page_table[0, 1, 2]] = np.nan
    out, dropped = skipped(whole, num_partials=2, skip_softmax=[(0, 1)])
    assert dropped == 5
    np.testing.assert_allclose(out[0, 0], attended(whole, [0, 0], [0, 1]), rtol=1e-9)


def test_a_page_outside_the_pool_is_not_counted():
    cache = ladder(-60, 0, -60)
    cache.page_table[0, 0, 0] = -1
    out, dropped = skipped(cache, skip_softmax=[(0, 1)])
    assert dropped == 1
    np.testing.assert_allclose(out[0, 0], attended(cache, [-60, 0, -60], [1]), rtol=1e-9)


def test_partial_results_of_each_sequence():
    cache = Cache([512, 512])
    k_pages = cache.page_table[:, 0]
    cache.pool[k_pages] = 0
    cache.pool[k_pages[:, 0], :, 0, 0] = 60
    options = {"scale": 1.0, "skip_softmax": [(0, 1)]}
    q = queries_of(1).repeat(2, axis=0)
    counts = dropped_pages(q, *cache.arrays, **options, num_partials=[1, 3])
    np.testing.assert_array_equal(counts, [[3], [1]])
    out = decode_attention(q, *cache.arrays, **options, num_partials=[1, 3])
    for b, pages in enumerate(([0], [0, 1, 2])):
        expected = attended(Flat(cache.v[b]), [60, 0, 0, 0], pages)
        np.testing.assert_allclose(out[b, 0], expected, rtol=1e-9)


class Flat:
    """Values alone, as ``attended`` looks at them."""

    def __init__(self, values):
        self.v = [values]


@given(st.integers(1, 512), st.integers(1, 2000), st.integers(1, 5), st.integers(0, 3))
def test_what_is_dropped_weighs_less_than_said(length, scale, num_partials, seed):
    """Each dropped key weighs less than S / length of the largest; with S = 1 all weigh < 1."""
    cache, q = Cache([length], head_dim=2, seed=seed), queries(1, 2, 2, seed=seed)
    options = {"scale": 3.0, "num_partials": num_partials}
    dense = decode_attention(q, *cache.arrays, **options)
    out = decode_attention(q, *cache.arrays, **options, skip_softmax=[(0, scale)])
    counts = dropped_pages(q, *cache.arrays, **options, skip_softmax=[(0, scale)])
    bound = 2 * np.abs(cache.v[0]).max() * counts.sum() * P * scale / length
    assert np.abs(out - dense).max() <= bound + 1e-12
    assert counts.sum() <= max(0, -(-length // P) - num_partials)


@pytest.mark.parametrize("table", [[1], [(0, 1), (0, 2)], [(5, 1), (4, 1)], [(0, -1)], [(-1, 1)]])
def test_wrong_tables_are_refused(table):
    with pytest.raises(ArgumentError, match="skip_softmax: expected pairs"):
        decode_attention(queries_of(1), *Cache([4]).arrays, scale=1.0, skip_softmax=table)


def test_no_table_with_a_tree():
    mask = np.full((1, 1, 1), -1, np.int32)
    options = {"scale": 1.0, "skip_softmax": [(0, 1)], "tree_mask": mask}
    for definition in (decode_attention, decode_attention_plain):
        with pytest.raises(ArgumentError, match="skip_softmax: expected None with a tree"):
            definition(queries_of(1), *Cache([4]).arrays, **options)


# -- trees ----------------------------------------------------------------------------------------


def pack(rows, words):
    """Pack ``rows[batch][i][j]`` into mask words whose spare bits are garbage."""
    rows = np.asarray(rows, bool)
    batch, query_len, _ = rows.shape
    mask = np.full((batch, query_len, words), -1, np.int32)
    for b, i, j in np.ndindex(rows.shape):
        if not rows[b, i, j]:
            mask[b, i, j // 32] &= np.int32(~(1 << j % 32) if j % 32 < 31 else 0x7FFFFFFF)
    return mask


def tree_mean(cache, b, keys):
    return cache.v[b][sorted(keys), 0].mean(axis=0) if keys else np.zeros(cache.pool.shape[-1])


@pytest.mark.parametrize("words", [2, 4])
@pytest.mark.parametrize("query_len", [1, 31, 33, 45])
def test_tree_rows_see_the_past_and_their_bits(query_len, words):
    cache = Cache([query_len, 130, 300])  # no past at all; a page edge in the draft
    rng = np.random.default_rng(3)
    rows = rng.random((3, query_len, query_len)) < 0.4
    rows[1, 0] = False
    q = np.zeros((3, query_len, 1, 8), np.float16)
    out = both(q, cache, tree_mask=pack(rows, words))
    for b, length in enumerate(cache.seq_lens):
        past = length - query_len
        for i in range(query_len):
            seen = {*range(past), *(past + np.flatnonzero(rows[b, i]))}
            np.testing.assert_allclose(out[b, i, 0], tree_mean(cache, b, seen), atol=1e-12)


def test_tree_has_no_causality_of_its_own():
    cache = Cache([10])
    later = np.zeros((1, 3, 3), bool)
    later[0, 0, 2] = True  # a row that sees a later draft, and two that see no draft
    out = both(np.zeros((1, 3, 1, 8), np.float16), cache, tree_mask=pack(later, 1))
    np.testing.assert_allclose(out[0, 0, 0], tree_mean(cache, 0, {*range(7), 9}), atol=1e-12)
    np.testing.assert_allclose(out[0, 1, 0], tree_mean(cache, 0, {*range(7)}), atol=1e-12)


def test_window_edge_shared_and_per_row():
    """Length 10, draft 4, window 3: the shared edge is 7, the edges of the rows are 4, 5, 6, 7."""
    cache, q = Cache([10]), np.zeros((1, 4, 1, 8), np.float16)
    options = {"tree_mask": pack(np.ones((1, 4, 4)), 1), "sliding_window": 3}
    shared = both(q, cache, **options)
    per_row = both(q, cache, contiguous_query_swa=True, **options)
    for i in range(4):
        np.testing.assert_allclose(shared[0, i, 0], tree_mean(cache, 0, {7, 8, 9}), atol=1e-12)
        seen = {*range(4 + i, 10)}
        np.testing.assert_allclose(per_row[0, i, 0], tree_mean(cache, 0, seen), atol=1e-12)


def test_draft_before_the_first_position_does_not_exist():
    """Length 2 of a draft of 3: draft 0 would sit at -1, draft 2 at 1."""
    cache, q = Cache([2, 0]), np.zeros((2, 3, 1, 8), np.float16)
    rows = np.ones((2, 3, 3))
    rows[0, 1, 2] = False
    out = both(q, cache, tree_mask=pack(rows, 1))
    np.testing.assert_allclose(out[0, 0, 0], tree_mean(cache, 0, {0, 1}), atol=1e-12)
    np.testing.assert_allclose(out[0, 1, 0], tree_mean(cache, 0, {0}), atol=1e-12)
    assert not out[1].any()


def test_tree_of_one_row_with_a_set_bit_is_plain_decode():
    cache, q = Cache([1, 200, 129]), queries(3, 4, 8)
    mask = np.full((3, 1, 1), -1, np.int32)
    tree = both(q[:, None], cache, tree_mask=mask)
    np.testing.assert_array_equal(tree[:, 0], both(q, cache))


def test_several_tokens_need_a_mask():
    with pytest.raises(ArgumentError, match="tree_mask: expected a mask for 2 query tokens"):
        decode_attention(queries(1, 2, 1, 8), *Cache([4]).arrays, scale=1.0)


def test_negative_window_is_refused():
    with pytest.raises(ArgumentError, match="sliding_window"):
        decode_attention(queries(1, 1, 8), *Cache([4]).arrays, scale=1.0, sliding_window=-1)
