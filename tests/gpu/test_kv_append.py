"""Appending to a paged cache: every byte of the pool as the reference leaves it."""

import cuda.bindings.driver as cu
import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver, paged_kv, reference
from ctm_rt.memory import DeviceArray
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from ctm_rt.tensor import DType, view
from tests.gpu.caches import DTYPES, Cache, assert_same_bits, kv_dtypes, on_device, random_bits
from tests.gpu.device import DEVICE, capture, fill_nan, new_stream, write

pytestmark = pytest.mark.parametrize("kv_dtype", kv_dtypes())


def scales(kv_dtype: str) -> dict[str, float]:
    return {"k_scale": 0.37, "v_scale": 12.5} if kv_dtype == "e4m3" else {}


def append_both(
    cache: Cache,
    k: np.ndarray,
    v: np.ndarray,
    lengths: list[int] | np.ndarray,
    counts: list[int] | None = None,
    **options: float,
) -> None:
    """Append on the device and on the host; what is in k and v, strides too, is uploaded."""
    seq_lens = np.array(lengths, np.int32)
    num_tokens = None if counts is None else np.array(counts, np.int32)
    device = [on_device(array) for array in (k, v)]
    rest = [on_device(array) for array in (cache.table, seq_lens)]
    launch = paged_kv.bind_append(
        *device, cache.device_pool, *rest, num_tokens=on_device(num_tokens), **options
    )
    reference.append(k, v, cache.pool, cache.table, seq_lens, num_tokens=num_tokens, **options)
    for _ in range(2):  # the second one writes the same
        launch()
        cache.check()


def new_tokens(*shape: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return random_bits(shape, np.float16, seed), random_bits(shape, np.float16, seed + 1)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [(1, 32), (8, 128), (3, 64), (5, 256), (2, 512), (7, 48)]
)
def test_every_shape(
    kv_dtype: str, heads: int, head_dim: int, tokens: int, head_major: bool
) -> None:
    """Lengths that end before, at and after a page's edge."""
    lengths = [tokens, tokens + 1, 2 * PAGE, 3 * PAGE - 1, 2 * PAGE + 1, 400]
    cache = Cache(kv_dtype, heads, head_dim, len(lengths), 4, head_major=head_major)
    k, v = new_tokens(len(lengths), tokens, heads, head_dim)
    append_both(cache, k, v, lengths, **scales(kv_dtype))


def test_ragged(kv_dtype: str) -> None:
    """Each sequence gets its own count, clamped to 0..tokens."""
    counts = [0, 1, 7, 199, 200, 201, INT32_MAX, -1, -(2**31), 64]
    cache = Cache(kv_dtype, 4, 64, len(counts), 4)
    k, v = new_tokens(len(counts), 200, 4, 64)
    lengths = [300, 1, 200, 512, 500, 200, 201, 300, 300, 128]
    append_both(cache, k, v, lengths, counts, **scales(kv_dtype))


def test_what_has_no_place_is_dropped(kv_dtype: str) -> None:
    """Positions below 0 and past the table; K or V entries outside of the pool."""
    lengths = [0, 3, -1, -(2**31), 514, INT32_MAX, 400, 400, 400, 400]
    cache = Cache(kv_dtype, 2, 128, len(lengths), 4)
    cache.spoil([(b, b % 2, page) for b in range(6, 10) for page in (1, 2, 3)])
    k, v = new_tokens(len(lengths), 290, 2, 128)
    append_both(cache, k, v, lengths, **scales(kv_dtype))


def test_slices_of_wider_arrays(kv_dtype: str) -> None:
    """K is columns of [batch, tokens, q + k heads, head_dim], V is not; the table's rows are wide.

    Then one token a sequence, without an axis for it, both from fused rows.
    """
    fused = random_bits((3, 10, 8 + 2 + 2, 64), np.float16, 1)
    cache = Cache(kv_dtype, 2, 64, 3, 2)
    wide = np.full((3, 3, 5), -1, np.int32)
    wide[:, :2, :2] = cache.table
    cache.table = wide[:, :2, :2]
    v = random_bits((3, 10, 2, 64), np.float16, 2)
    append_both(cache, fused[:, :, 8:10], v, [10, 130, 256], **scales(kv_dtype))
    append_both(cache, fused[:, :, 8:10], fused[:, :, 10:], [12, 140, 250], **scales(kv_dtype))
    token = fused[:, 4]
    append_both(cache, token[:, 8:10], token[:, 10:], [11, 129, 255], **scales(kv_dtype))


def test_every_value(kv_dtype: str) -> None:
    """All 65,536 f16 values, divided by scales of all kinds, also those with odd reciprocals."""
    values = np.empty((1, 128, 4, 128), np.float16)
    values.view(np.uint16)[...] = np.arange(65_536).reshape(values.shape)
    rng = np.random.default_rng(0)
    chosen = [1.0]
    if kv_dtype == "e4m3":
        chosen += [0.37, 1e-3, 146.2, 65504 / 448, 2.0**-126, 2.0**126, -0.5, 3.0, 2 - 2.0**-23]
        chosen += [float(s) for s in np.float32(2.0 ** rng.uniform(-14, 10, 40))]
    for scale, other in zip(chosen, chosen[::-1], strict=True):
        cache = Cache(kv_dtype, 4, 128, 1, 1)
        append_both(cache, values, values, [128], k_scale=scale, v_scale=other)


def test_batch_beyond_16_bits(kv_dtype: str) -> None:
    """More sequences than a grid has rows in y and z; each has a page entry of a few."""
    batch = 70_000
    cache = Cache(kv_dtype, 1, 32, 600, 1)
    rows = np.arange(batch)
    cache.table = cache.table[rows % 600]
    k, v = new_tokens(batch, 1, 32)
    append_both(cache, k, v, 1 + rows // 600, **scales(kv_dtype))


def test_pool_beyond_32_bits(kv_dtype: str) -> None:
    """Case 16. The pages lie past 2**32 elements, at the ends of their halves."""
    heads, head_dim = 8, 128
    num_pages = 2**32 // (PAGE * heads * head_dim) + 1
    dtype = DType(kv_dtype)
    page_nbytes = PAGE * heads * head_dim * dtype.itemsize
    free, _ = driver.check("cuMemGetInfo", cu.cuMemGetInfo())
    if free < 2 * num_pages * page_nbytes + 2**30:
        pytest.skip(f"{free / 1e9:.0f} GB of device memory are too few")
    shape = (2 * num_pages, PAGE, heads, head_dim)
    pool = view(DeviceArray.empty(shape, dtype, DEVICE))
    fill_nan(pool.ptr, 2 * num_pages * page_nbytes)
    small = np.full(page_nbytes, 0x7FFF, np.uint16)  # two pages, as fill_nan leaves them
    small = small.view(DTYPES[kv_dtype]).reshape(2, *shape[1:])
    k, v = new_tokens(1, 100, heads, head_dim)
    table, lengths = np.array([[[num_pages - 1], [2 * num_pages - 1]]]), np.array([110])
    arrays = [on_device(a.astype(np.int32)) for a in (table, lengths)]
    paged_kv.append(on_device(k), on_device(v), pool, *arrays, **scales(kv_dtype))
    reference.append(k, v, small, np.array([[[0], [1]]]), lengths, **scales(kv_dtype))
    for half, page in enumerate((num_pages - 1, 2 * num_pages - 1)):
        last = pool._replace(ptr=pool.ptr + page * page_nbytes, shape=(1, *shape[1:]))
        assert_same_bits(ctm_rt.to_host(last)[0], small[half])


@pytest.mark.parametrize("ragged", [False, True])
def test_a_loop_in_one_graph(kv_dtype: str, ragged: bool) -> None:
    """Replays count and write with no other work of the host; the lengths live on the device."""
    lengths = np.array([0, 100, 300, 511 - 150], np.int32)
    counts = np.array([1, 0, 2, 1], np.int32) if ragged else None
    cache = Cache(kv_dtype, 2, 64, 4, 4)
    k, v = new_tokens(4, 2 if ragged else 1, 2, 64)
    seq_lens, device_k, device_v = map(on_device, (lengths, k, v))
    added = on_device(counts) if ragged else 1
    append = paged_kv.bind_append(
        device_k, device_v, cache.device_pool, on_device(cache.table), seq_lens,
        num_tokens=added if ragged else None, **scales(kv_dtype),
    )  # fmt: skip
    advance = paged_kv.bind_advance(seq_lens, added)
    with new_stream() as stream:
        replay = capture(stream, advance, append)
        for step in range(150):
            k, v = new_tokens(*k.shape, seed=step)
            write(device_k, k)
            write(device_v, v)
            reference.advance(lengths, counts if ragged else 1)
            reference.append(
                k, v, cache.pool, cache.table, lengths, num_tokens=counts, **scales(kv_dtype)
            )
            replay()
            driver.synchronize(stream, DEVICE)
    np.testing.assert_array_equal(ctm_rt.to_host(seq_lens), lengths)
    cache.check()
