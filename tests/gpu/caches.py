"""A paged cache on the host and on the device, of which every byte is compared."""

import cuda.bindings.driver as cu
import numpy as np

import ctm_rt
from ctm_rt import driver
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from ctm_rt.tensor import TensorView, view
from tests.gpu.device import DEVICE, place

FP8_SINCE = (8, 9)
DTYPES = {"f16": np.float16, "e4m3": np.uint8}


def kv_dtypes() -> list[str]:
    """The element types of a pool that this GPU has modules for; all, where there is no GPU."""
    try:
        return list(DTYPES)[: 1 + (driver.compute_capability(DEVICE) >= FP8_SINCE)]
    except ctm_rt.DriverError:
        return list(DTYPES)


def random_bits(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    """Any bits: NaN of all kinds, infinities, subnormals."""
    bits = np.empty(shape, dtype)
    kind = bits.view(f"u{bits.itemsize}")
    rng = np.random.default_rng(seed)
    kind[...] = rng.integers(0, np.iinfo(kind.dtype).max, shape, kind.dtype, endpoint=True)
    return bits


class Cache:
    """A pool of random bits with a guard page at either end, and a table of shuffled pages.

    ``head_major`` has a page's heads before its tokens. A reference changes ``pool``; ``check``
    compares it, the guards too, with what a kernel made of ``device_pool``.
    """

    def __init__(
        self,
        kv_dtype: str,
        num_kv_heads: int,
        head_dim: int,
        batch: int,
        max_pages: int,
        *,
        head_major: bool = False,
        seed: int = 0,
    ) -> None:
        num_pages = batch * max_pages + 3
        tokens_and_heads = (num_kv_heads, PAGE) if head_major else (PAGE, num_kv_heads)
        shape = (2 * num_pages + 2, *tokens_and_heads, head_dim)
        self._buffer = random_bits(shape, DTYPES[kv_dtype], seed)
        self._device_buffer = view(ctm_rt.to_device(self._buffer, dtype=kv_dtype))
        pages = self._buffer.swapaxes(1, 2) if head_major else self._buffer
        self.pool = pages[1:-1]
        strides = tuple(step // self.pool.itemsize for step in self.pool.strides)
        ptr = self._device_buffer.ptr + self.pool.strides[0]
        self.device_pool = self._device_buffer._replace(
            ptr=ptr, shape=self.pool.shape, strides=strides
        )
        ids = np.random.default_rng(seed).permutation(num_pages)[: batch * max_pages]
        ids = ids.reshape(batch, max_pages)
        self.table = np.stack([ids, ids + num_pages], axis=1).astype(np.int32)

    def spoil(self, rows: list[tuple[int, int, int]]) -> None:
        """Put ids in these places of the table that no pool has."""
        bad = (-1, INT32_MAX, len(self.pool), -(2**31))
        for i, place_ in enumerate(rows):
            self.table[place_] = bad[i % len(bad)]

    def check(self) -> None:
        """The device's pool and its guards are the host's, in every bit."""
        driver.check("cuCtxSynchronize", cu.cuCtxSynchronize())
        got = ctm_rt.to_host(self._device_buffer)
        assert_same_bits(got, self._buffer)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal in every bit; if not, say how many are not and where the first one is."""
    kind = f"u{expected.dtype.itemsize}"
    different = got.view(kind) != expected.view(kind)
    if different.any():
        first = tuple(int(i) for i in np.argwhere(different)[0])
        at = got.view(kind)[first], expected.view(kind)[first]
        raise AssertionError(f"{different.sum()} elements differ, the first at {first}: {at}")


def on_device(array: np.ndarray | None) -> TensorView | None:
    """Upload, strides and all."""
    return None if array is None else place(array)
