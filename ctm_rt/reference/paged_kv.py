"""What the kernels that write and move a paged cache do, on NumPy arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ctm_rt.paged_kv import MAX_KV_CACHE_CAPACITY, TOKENS_PER_PAGE
from ctm_rt.reference.decode import e4m3_to_float

Array = npt.NDArray[Any]

_NAN = 0x7F


def float_to_e4m3(values: Array) -> npt.NDArray[np.uint8]:
    """Round to the nearest e4m3 number, to the even code between two.

    What is larger than 448, the largest, becomes 448, infinities too; NaN becomes 0x7f, of any
    sign. Zeros keep their sign.
    """
    magnitudes = e4m3_to_float(np.arange(_NAN, dtype=np.uint8)).astype(np.float64)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(values.astype(np.float64))
    below, above = (np.searchsorted(middles, size, side) for side in ("left", "right"))
    codes = np.where(below % 2 == 0, below, above)  # they differ in the middle of two
    codes = np.where(np.signbit(values), codes + 128, codes)
    return np.where(np.isnan(values), _NAN, codes).astype(np.uint8)


def append(
    k: Array,
    v: Array,
    kv_pool: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    num_tokens: Array | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write new keys and values into the pages of ``kv_pool``; see ``ctm_rt.paged_kv.append``.

    Parameters
    ----------
    k, v : (batch, num_kv_heads, head_dim) or (batch, tokens, num_kv_heads, head_dim), f16
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), f16 or e4m3 (``ml_dtypes`` or uint8)
        e4m3 is ``float_to_e4m3`` of value / scale, both f32.
    page_table : (batch, 2, max_pages), int32
    seq_lens : (batch,), int32; the new tokens included
    num_tokens : (batch,), int32, optional; clamped to 0..tokens
    """
    for half, (new, scale) in enumerate(((k, k_scale), (v, v_scale))):
        rows = new[:, None] if new.ndim == 3 else new
        for b in range(len(rows)):
            count = rows.shape[1] if num_tokens is None else min(num_tokens[b], rows.shape[1])
            for t in range(count):
                position = max(int(seq_lens[b]), 0) - count + t
                page = _page(page_table[b, half], position, len(kv_pool))
                if page is not None:
                    place = kv_pool[page, position % TOKENS_PER_PAGE]
                    place[...] = _stored(rows[b, t], scale, kv_pool.dtype)


def advance(seq_lens: Array, num_tokens: Array | int = 1) -> None:
    """Add ``num_tokens`` to ``seq_lens``; a negative length counts as 0."""
    lengths = np.maximum(seq_lens.astype(np.int64), 0) + num_tokens
    seq_lens[...] = np.clip(lengths, 0, MAX_KV_CACHE_CAPACITY)


def copy_pages(kv_pool: Array, moves: Array, *, num_tokens: Array | None = None) -> None:
    """Copy K page source to destination, and the V page of each likewise.

    Parameters
    ----------
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim)
    moves : (num_moves, 2); those with an id outside of 0..num_pages - 1 are skipped
    num_tokens : (num_moves,), optional; how many rows of each page, clamped to 0..128
    """
    num_pages = len(kv_pool) // 2
    for i, (source, destination) in enumerate(moves):
        if not (0 <= source < num_pages and 0 <= destination < num_pages):
            continue
        rows = slice(TOKENS_PER_PAGE if num_tokens is None else max(int(num_tokens[i]), 0))
        for first in (0, num_pages):
            kv_pool[first + destination, rows] = kv_pool[first + source, rows]


def gather(
    kv_pool: Array, page_table: Array, seq_lens: Array, *, capacity: int | None = None
) -> Array:
    """Return each sequence's K and V in order of its tokens, zeros where there is none.

    Returns
    -------
    out : (batch, 2, num_kv_heads, capacity, head_dim), of the pool's dtype
    """
    batch, _, max_pages = page_table.shape
    capacity = max_pages * TOKENS_PER_PAGE if capacity is None else capacity
    out = np.zeros((batch, 2, kv_pool.shape[2], capacity, kv_pool.shape[3]), kv_pool.dtype)
    for b, half in np.ndindex(batch, 2):
        for token in range(min(int(seq_lens[b]), capacity)):
            page = _page(page_table[b, half], token, len(kv_pool))
            if page is not None:
                out[b, half, :, token] = kv_pool[page, token % TOKENS_PER_PAGE]
    return out


def _page(row: Array, position: int, pool_pages: int) -> int | None:
    """Return the page of a position, if the table has one and it is in the pool."""
    if not 0 <= position < len(row) * TOKENS_PER_PAGE:
        return None
    page = int(row[position // TOKENS_PER_PAGE])
    return page if 0 <= page < pool_pages else None


def _stored(values: Array, scale: float, dtype: np.dtype[Any]) -> Array:
    if dtype == np.float16:
        return values
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        quotients = values.astype(np.float32) / np.float32(scale)
    return float_to_e4m3(quotients).view(dtype)
