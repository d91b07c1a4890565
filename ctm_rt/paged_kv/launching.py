"""What the calls that launch the cache's kernels share."""

from __future__ import annotations

from typing import Any

from ctm_rt import driver
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import hold_until_done
from ctm_rt.modules.arguments import check_device
from ctm_rt.modules.kernel import Launch
from ctm_rt.paged_kv.layout import INT32_MAX, TOKENS_PER_PAGE, ceil_div
from ctm_rt.tensor import DType, TensorView, view

CHUNK_NBYTES = 16  # what a thread copies at once
_LEAST_CTA_CHUNKS = 128

POOL_AXES = f"(2 * num_pages, {TOKENS_PER_PAGE}, num_kv_heads, head_dim)"


def launch_once(launch: Launch, array: Any, stream: Any) -> None:
    """Launch, and keep the arrays alive until it is done; ``array`` says on which device."""
    handle = driver.stream_handle(stream)
    launch(handle)
    hold_until_done(launch, view(array).device, handle)


def on_device(name: str, array: TensorView) -> int:
    """Return the CUDA device that ``array`` is on."""
    check_device(name, array.device, None, "")
    return array.device


def words(name: str, array: TensorView) -> TensorView:
    """Look at rows of whole chunks as 32-bit words: what is only moved may be of any type."""
    itemsize, (*outer, row) = array.dtype.itemsize, array.shape
    (*strides, inner), row_nbytes = array.strides, row * itemsize
    if inner != 1:
        raise ArgumentError(name, "a contiguous innermost axis", f"strides {array.strides}")
    nbytes = [stride * itemsize for stride in strides]
    if any(n % CHUNK_NBYTES for n in (*nbytes, row_nbytes)):
        expected = f"rows and outer strides in multiples of {CHUNK_NBYTES} bytes"
        raise ArgumentError(name, expected, f"{row_nbytes} and {nbytes}")
    return array._replace(
        shape=(*outer, row_nbytes // 4), strides=(*[n // 4 for n in nbytes], 1), dtype=DType.I32
    )


def pool_words(kv_pool: TensorView) -> TensorView:
    """Return a pool as words; of its shape what an error should name is checked here."""
    if len(kv_pool.shape) != 4 or kv_pool.shape[1] != TOKENS_PER_PAGE:
        raise ArgumentError("kv_pool", POOL_AXES, kv_pool.shape)
    return words("kv_pool", kv_pool)


def require_small(name: str, shape: tuple[int, ...], chunks: int) -> None:
    """Refuse what 32-bit counts do not reach: of an item's chunks, and of the CTAs of all items.

    An item is the K or the V of one of ``shape[0]``.
    """
    ctas = 2 * shape[0] * ceil_div(chunks, _LEAST_CTA_CHUNKS)
    if max(chunks, ctas) > INT32_MAX - (1 << 16):
        raise ArgumentError(name, f"fewer than 2**31 chunks of {CHUNK_NBYTES} bytes", shape)
