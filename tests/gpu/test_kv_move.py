"""Copying pages and gathering them: every byte as the reference leaves it."""

import numpy as np
import pytest

import ctm_rt
from ctm_rt import paged_kv, reference
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from tests.gpu.caches import Cache, assert_same_bits, kv_dtypes, on_device, random_bits
from tests.gpu.device import capture, new_stream, place, write

SHAPES = [(1, 32), (8, 128), (3, 64), (5, 256), (2, 512), (7, 48)]


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", kv_dtypes())
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
def test_copies(kv_dtype: str, heads: int, head_dim: int, head_major: bool) -> None:
    """Some rows of some pages; ids outside of 0..num_pages - 1 are skipped, V ids too."""
    cache = Cache(kv_dtype, heads, head_dim, 4, 5, head_major=head_major)
    num_pages = len(cache.pool) // 2
    moves = [[0, num_pages - 1], [3, 7], [4, 8], [5, 9], [6, 10], [2, 11], [1, 12]]
    moves += [[-1, 13], [1, -1], [num_pages, 14], [1, num_pages], [INT32_MAX, 15], [1, -(2**31)]]
    moves = np.array(moves, np.int32)
    counts = np.full(len(moves), PAGE, np.int32)
    counts[:7] = 128, 1, 0, 77, -5, INT32_MAX, 127
    for num_tokens in (None, counts):
        launch = paged_kv.bind_copy_pages(
            cache.device_pool, on_device(moves), num_tokens=on_device(num_tokens)
        )
        for _ in range(2):
            launch()
            reference.copy_pages(cache.pool, moves, num_tokens=num_tokens)
            cache.check()


def test_many_copies_in_a_graph() -> None:
    """What is in the moves may change between replays; unused ones are -1."""
    cache = Cache("f16", 2, 64, 1, 400)
    num_pages = len(cache.pool) // 2
    moves = on_device(np.full((200, 2), -1, np.int32))
    launch = paged_kv.bind_copy_pages(cache.device_pool, moves)
    rng = np.random.default_rng(0)
    with new_stream() as stream:
        replay = capture(stream, launch)
        for used in (200, 1, 0, 37):
            now = np.full((200, 2), -1, np.int32)
            now[:used] = rng.permutation(num_pages)[: 2 * used].reshape(used, 2)
            write(moves, now)
            replay()
            reference.copy_pages(cache.pool, now)
            cache.check()


def test_a_fork_diverges() -> None:
    """Two sequences of a PagedKvCache share a page until one of them writes."""
    cache = paged_kv.PagedKvCache(2, 300)
    pools = [cache.add_layer(2, 64), cache.add_layer(1, 32)]
    tokens = [random_bits((2, 200, *pool.shape[2:]), np.float16, 3) for pool in pools]
    first = cache.admit(150)

    def step(slot: int, begin: int, end: int) -> None:
        cache.copy_pages(cache.extend(slot, end - begin))
        cache.advance(slot, end - begin)
        cache.upload()
        counts = np.zeros(2, np.int32)
        counts[slot] = end - begin
        for pool, new in zip(pools, tokens, strict=True):
            padded = np.zeros((2, end - begin, *new.shape[2:]), np.float16)
            padded[slot] = new[slot, begin:end]
            arrays = on_device(padded), on_device(padded)
            paged_kv.append(
                *arrays, pool, cache.table.device_array, cache.seq_lens_device_array,
                num_tokens=on_device(counts),
            )  # fmt: skip

    step(first, 0, 150)
    second = cache.fork(first)
    step(second, 150, 170)
    step(first, 150, 160)
    for pool, new in zip(pools, tokens, strict=True):
        got = paged_kv.gather(pool, cache.table.device_array, cache.seq_lens_device_array)
        dense = ctm_rt.to_host(got).swapaxes(2, 3)  # tokens before heads
        for half in range(2):
            assert_same_bits(dense[first, half, :160], new[first, :160])
            assert_same_bits(dense[second, half, :150], new[first, :150])
            assert_same_bits(dense[second, half, 150:170], new[second, 150:170])
            assert not dense[first, half, 160:].any()


# -- gathering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", kv_dtypes())
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("capacity", [1, 300, 512, 700])
def test_gathers(kv_dtype: str, heads: int, head_dim: int, head_major: bool, capacity: int) -> None:
    """Lengths below, at and past the table; entries outside of the pool give zeros."""
    lengths = np.array([0, 1, 128, 129, 511, 512, 513, INT32_MAX, -1, 400], np.int32)
    cache = Cache(kv_dtype, heads, head_dim, len(lengths), 4, head_major=head_major)
    cache.spoil([(9, 0, 1), (9, 1, 2), (9, 0, 3), (4, 1, 0)])
    shape = (len(lengths), 2, heads, capacity, head_dim)
    out = random_bits((shape[0] + 2, *shape[1:]), cache.pool.dtype.type, 5)
    guarded = place(out, kv_dtype)
    inner = guarded._replace(ptr=guarded.ptr + out.strides[0], shape=shape)
    launch = paged_kv.bind_gather(
        cache.device_pool, on_device(cache.table), on_device(lengths), out=inner
    )
    out[1:-1] = reference.gather(cache.pool, cache.table, lengths, capacity=capacity)
    for _ in range(2):
        launch()
        assert_same_bits(ctm_rt.to_host(guarded), out)
    cache.check()


def test_gather_into_rows_of_tokens() -> None:
    """``out`` may be strided: tokens before heads, of a wider array."""
    lengths = np.array([200, 70], np.int32)
    cache = Cache("f16", 3, 64, 2, 2)
    wide = random_bits((2, 2, 256, 4, 64), np.float16, 6)
    device = place(wide)
    strides = tuple(step // 2 for step in wide.strides)
    out = device._replace(
        shape=(2, 2, 3, 256, 64), strides=(*strides[:2], strides[3], strides[2], 1)
    )
    arrays = cache.device_pool, on_device(cache.table), on_device(lengths)
    assert paged_kv.gather(*arrays, out=out) is out
    wide[:, :, :, :3] = reference.gather(cache.pool, cache.table, lengths).swapaxes(2, 3)
    assert_same_bits(ctm_rt.to_host(device), wide)


def test_gather_of_a_large_batch() -> None:
    """More rows of ``out`` than a grid has in y and z."""
    cache = Cache("f16", 1, 32, 100, 1)
    rows = np.arange(40_000) % 100
    lengths = (rows + 1).astype(np.int32)
    arrays = cache.device_pool, on_device(cache.table[rows]), on_device(lengths)
    got = ctm_rt.to_host(paged_kv.gather(*arrays, capacity=8))
    expected = reference.gather(cache.pool, cache.table, lengths[:100], capacity=8)
    assert_same_bits(got, expected[rows])
