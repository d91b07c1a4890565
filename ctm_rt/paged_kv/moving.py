"""Copy pages of a paged cache, and gather them into dense arrays, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ctm_rt.errors import ArgumentError
from ctm_rt.memory import DeviceArray, to_device
from ctm_rt.modules.kernel import Launch, load
from ctm_rt.paged_kv.launching import (
    CHUNK_NBYTES,
    launch_once,
    on_device,
    pool_words,
    require_small,
    words,
)
from ctm_rt.paged_kv.layout import TOKENS_PER_PAGE
from ctm_rt.paged_kv.pages import Move
from ctm_rt.tensor import view

_OUT = "(batch, 2, num_kv_heads, capacity, head_dim)"


def copy_pages(kv_pool: Any, moves: Any, *, num_tokens: Any = None, stream: Any = None) -> None:
    """Copy pages within a pool; see ``bind_copy_pages``. Temporaries may be dropped at once.

    ``moves`` may also be a list, as ``PagedKvCache.extend`` and ``compact`` return it. It is
    uploaded first, which waits for the stream; an empty one launches nothing.
    """
    if isinstance(moves, list):
        if not moves:
            return
        moves = upload_moves(moves, view(kv_pool, "kv_pool").device, stream)
    launch = bind_copy_pages(kv_pool, moves, num_tokens=num_tokens, stream=stream)
    launch_once(launch, kv_pool, stream)


def bind_copy_pages(
    kv_pool: Any, moves: Any, *, num_tokens: Any = None, stream: Any = None
) -> Launch:
    """Check and fill once; the result copies K pages and the V pages that go with them.

    Parameters
    ----------
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), of any type; written
        Rows are whole 16 bytes; the innermost axis is contiguous, others may be strided.
    moves : (num_moves, 2), i32 on the device; source and destination K page of each
        Those with an id outside of 0..num_pages - 1 are skipped. No destination may be a source or
        another destination.
    num_tokens : (num_moves,), i32 on the device, optional
        How many rows of a page are copied, the first ones; all without it.
    stream : int, object with ``__cuda_stream__`` or None
        Asked only whether it captures, before the module is loaded.

    Raises
    ------
    ArgumentError
        An argument is outside this contract. Nothing was launched.
    ModuleError
        The module is not in the store.
    """
    pool = view(kv_pool, "kv_pool")
    device = on_device("kv_pool", pool)
    rows = pool_words(pool)
    if pool.shape[0] % 2:
        raise ArgumentError("kv_pool", "as many V pages as K pages", f"{pool.shape[0]} pages")
    moves = view(moves, "moves")
    chunks = TOKENS_PER_PAGE * pool.shape[2] * rows.shape[3] // 4
    require_small("moves", moves.shape, chunks)
    kernel = load("kv_copy_pages", device=device, stream=stream)
    return kernel.bind(kv_pool=rows, moves=moves, num_tokens=num_tokens)


def upload_moves(moves: Sequence[Move], device: int, stream: Any) -> DeviceArray:
    """Return the moves as a device array."""
    return to_device(np.array(moves, np.int32), device=device, stream=stream)


def gather(
    kv_pool: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    out: Any = None,
    capacity: int | None = None,
    stream: Any = None,
) -> Any:
    """Gather each sequence's tokens into dense rows; write and return ``out``.

    ``out`` is allocated if left out, for ``capacity`` tokens a sequence or, without that, for all
    that the table can hold. Else see ``bind_gather``. Temporaries may be dropped at once.
    """
    if out is None:
        pool, table = view(kv_pool, "kv_pool"), view(page_table, "page_table")
        pool_words(pool)
        if len(table.shape) != 3:
            raise ArgumentError("page_table", "(batch, 2, max_pages)", table.shape)
        if capacity is None:
            capacity = table.shape[-1] * TOKENS_PER_PAGE
        shape = (table.shape[0], 2, pool.shape[2], capacity, pool.shape[3])
        out = DeviceArray.empty(shape, pool.dtype, on_device("kv_pool", pool))
    elif capacity is not None:
        raise ArgumentError("capacity", "None beside out, whose shape tells it", capacity)
    launch = bind_gather(kv_pool, page_table, seq_lens, out=out, stream=stream)
    launch_once(launch, out, stream)
    return out


def bind_gather(
    kv_pool: Any, page_table: Any, seq_lens: Any, *, out: Any, stream: Any = None
) -> Launch:
    """Check and fill once; the result writes each sequence's K and V in order of its tokens.

    Rows past the length or past the table are zeros, and so are those of a K or V page that is
    outside of the pool.

    Parameters
    ----------
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), of any type
    page_table : (batch, 2, max_pages), i32
    seq_lens : (batch,), i32, in tokens
    out : (batch, 2, num_kv_heads, capacity, head_dim), of the pool's type; K, then V; overwritten
        Of this and of the pool, rows are whole 16 bytes; the innermost axis is contiguous, others
        may be strided.
    stream : int, object with ``__cuda_stream__`` or None
        Asked only whether it captures, before the module is loaded.

    Raises
    ------
    ArgumentError
        An argument is outside this contract. Nothing was launched.
    ModuleError
        The module is not in the store.
    """
    pool, dense = view(kv_pool, "kv_pool"), view(out, "out")
    device = on_device("kv_pool", pool)
    rows = pool_words(pool)
    if len(dense.shape) != 5:
        raise ArgumentError("out", _OUT, dense.shape)
    for what, expected, got in (
        ("dtype", pool.dtype, dense.dtype),
        ("head_dim", pool.shape[3], dense.shape[4]),
    ):
        if got != expected:
            raise ArgumentError("out", f"{what} {expected}", got)
    _, _, num_kv_heads, capacity, head_dim = dense.shape
    chunks = capacity * num_kv_heads * head_dim * dense.dtype.itemsize // CHUNK_NBYTES
    require_small("out", dense.shape, chunks)
    kernel = load("kv_gather", device=device, stream=stream)
    return kernel.bind(
        kv_pool=rows, page_table=page_table, seq_lens=seq_lens, out=words("out", dense)
    )
