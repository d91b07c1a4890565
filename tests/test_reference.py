import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt.errors import ArgumentError
from ctm_rt.reference import decode_attention, decode_attention_plain, e4m3_to_float

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
