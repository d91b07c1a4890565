"""The definitions of what writes and moves a cache, by other formulas."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctm_rt import reference
from ctm_rt.paged_kv import INT32_MAX, MAX_KV_CACHE_CAPACITY
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE

E4M3 = ml_dtypes.float8_e4m3fn
F16 = np.arange(65_536, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("scale", [1.0, 0.37, 1e-3, 65504 / 448, 2.0**-14])
def test_e4m3_of_every_f16(scale):
    """The bits that ml_dtypes gives, but for its NaN of what is too large."""
    with np.errstate(invalid="ignore"):  # NaN
        quotients = F16.astype(np.float32) / np.float32(scale)
        expected = np.clip(quotients, -448, 448).astype(E4M3).view(np.uint8)
    got = reference.float_to_e4m3(quotients)
    nan = np.isnan(quotients)
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert (got[nan] == 0x7F).all()
    assert nan.sum() == 2046


def test_e4m3_between_two_numbers():
    """A middle goes to the even code, what lies an ulp of f32 beside it to the nearer number."""
    codes = np.arange(126, dtype=np.uint8)
    low, high = (reference.e4m3_to_float(codes + i) for i in (0, 1))
    middle = (low + high) / 2
    even = codes + codes % 2
    for sign in (1, -1):
        bit = np.uint8(0 if sign > 0 else 128)
        for values, expected in (
            (middle, even),
            (np.nextafter(middle, np.float32(0)), codes),
            (np.nextafter(middle, np.float32(1e9)), codes + 1),
            (low, codes),
        ):
            np.testing.assert_array_equal(reference.float_to_e4m3(sign * values), expected | bit)
    extremes = np.array([464, 465, 1e30, np.inf, 0.0, -0.0, -np.inf], np.float32)
    got = reference.float_to_e4m3(extremes)
    assert got.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0, 0x80, 0xFE]


def paged(batch, max_pages, heads=2, head_dim=8, dtype=np.float16):
    """Return a pool of known values and a table of shuffled pages."""
    rng = np.random.default_rng(batch)
    num_pages = batch * max_pages + 2
    pool = rng.standard_normal((2 * num_pages, PAGE, heads, head_dim)).astype(dtype)
    ids = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages)
    return pool, np.stack([ids, ids + num_pages], axis=1).astype(np.int32)


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.integers(0, 150), max_size=4), start=st.integers(0, 130), fp8=st.booleans()
)
def test_what_was_appended_is_gathered(pieces, start, fp8):
    """In pieces or at once, each sequence of its own length."""
    pool, table = paged(2, 6, dtype=E4M3 if fp8 else np.float16)
    before = pool.copy()
    lengths = np.array([start, 0], np.int32)
    rng = np.random.default_rng(1)
    kv = rng.standard_normal((2, 2, sum(pieces), 2, 8)).astype(np.float16)
    at = 0
    for piece in pieces:
        reference.advance(lengths, piece)
        reference.append(*kv[:, :, at : at + piece], pool, table, lengths, k_scale=1, v_scale=1)
        at += piece
    dense = reference.gather(pool, table, lengths).swapaxes(2, 3)
    expected = kv.astype(np.float32).astype(pool.dtype)
    for half, b in np.ndindex(2, 2):
        first = start if b == 0 else 0
        got = dense[b, half]
        np.testing.assert_array_equal(got[first : first + at], expected[half, b])
        assert not got[first + at :].astype(float).any()
    listed = {int(page) for page in table.ravel()}
    for page in set(range(len(pool))) - listed:
        np.testing.assert_array_equal(pool[page], before[page])


def test_appended_by_hand():
    """Two of three tokens over a page's edge, one row that has no place, scales not swapped."""
    pool = np.zeros((4, PAGE, 1, 1), E4M3)
    table = np.array([[[1, 0], [3, 2]], [[-1, 9], [2, -5]]], np.int32)
    k = np.array([[2, 3, 4], [5, 6, 7]], np.float16)[..., None, None]
    lengths, counts = np.array([129, 128]), np.array([2, 3])
    reference.append(k, 8 * k, pool, table, lengths, num_tokens=counts, k_scale=0.5, v_scale=2.0)
    found = {tuple(map(int, at[:2])): float(pool[tuple(at)]) for at in np.argwhere(pool != 0)}
    assert found == {
        (1, 127): 4.0,
        (0, 0): 6.0,
        (3, 127): 8.0,
        (2, 0): 12.0,
        (2, 125): 20.0,  # K has no page there, V has
        (2, 126): 24.0,
        (2, 127): 28.0,
    }


def test_an_append_has_no_place_before_the_start_or_past_the_table():
    pool, table = paged(3, 1)
    before = pool.copy()
    k = np.ones((3, 4, 2, 8), np.float16)
    reference.append(k, k, pool, table, np.array([-7, 2, 130]))
    changed = np.argwhere((pool != before).any(axis=(2, 3)))
    expected = [(page, t) for page in table[1, :, 0] for t in (0, 1)]
    expected += [(page, t) for page in table[2, :, 0] for t in (126, 127)]
    assert sorted(map(tuple, changed)) == sorted(expected)


def test_lengths_stay_in_bounds():
    lengths = np.array([0, 5, -3, MAX_KV_CACHE_CAPACITY - 1, INT32_MAX], np.int32)
    reference.advance(lengths, 2)
    assert lengths.tolist() == [2, 7, 2, MAX_KV_CACHE_CAPACITY, MAX_KV_CACHE_CAPACITY]
    reference.advance(lengths, np.array([-1, -8, 0, -INT32_MAX, INT32_MAX], np.int32))
    assert lengths.tolist() == [1, 0, 2, 0, MAX_KV_CACHE_CAPACITY]


def test_copies_by_rows():
    pool, _ = paged(1, 4)
    before, num_pages = pool.copy(), len(pool) // 2
    moves = np.array([[0, 3], [1, 4], [2, 5], [-1, 2], [2, num_pages]])
    reference.copy_pages(pool, moves, num_tokens=np.array([PAGE, 5, -1, PAGE, PAGE]))
    for first in (0, num_pages):
        np.testing.assert_array_equal(pool[first + 3], before[first])
        np.testing.assert_array_equal(pool[first + 4, :5], before[first + 1, :5])
        np.testing.assert_array_equal(pool[first + 4, 5:], before[first + 4, 5:])
        for page in (0, 1, 2, 5):
            np.testing.assert_array_equal(pool[first + page], before[first + page])


def test_gathered_by_hand():
    pool, table = paged(2, 2)
    table[0, 0, 1], table[1, 1, 0] = len(pool), -1
    dense = reference.gather(pool, table, np.array([200, 300]), capacity=260)
    assert dense.shape == (2, 2, 2, 260, 8)
    np.testing.assert_array_equal(dense[0, 0, 1, :128], pool[table[0, 0, 0], :, 1])
    np.testing.assert_array_equal(dense[0, 1, 1, 128:200], pool[table[0, 1, 1], :72, 1])
    assert not dense[0, 0, :, 128:].any()
    assert not dense[0, 1, :, 200:].any()
    assert not dense[1, 1, :, :128].any()
    np.testing.assert_array_equal(dense[1, 1, 0, 128:256], pool[table[1, 1, 1], :, 0])
    assert not dense[1, :, :, 256:].any()
