"""Find, from the host, the page-table entries that a kernel would have to treat as invisible."""

from typing import Any, NamedTuple

import numpy as np

from ctm_rt.memory import to_host
from ctm_rt.paged_kv import TOKENS_PER_PAGE


class Fault(NamedTuple):
    """One needed page-table entry that lies outside the pool."""

    sequence: int
    row: int  # 0: K, 1: V
    entry: int  # along the page table's last axis


def validate(
    page_table: Any,
    seq_lens: Any,
    num_pages: int,
    *,
    sliding_window: int = 0,
    query_len: int = 1,
) -> list[Fault]:
    """Return the needed entries of ``page_table`` outside [0, 2 * num_pages), if any.

    Parameters
    ----------
    page_table : (batch, 2, max_pages), int32, on the host or a device
    seq_lens : (batch,), int32, in tokens; likewise
    num_pages : int; K pages, half of the pool's
    sliding_window : int; entries of pages left of every window are not needed, 0 means all are
    query_len : int
        Tokens whose windows count: those of a tree whose rows have an edge each
        (``contiguous_query_swa``). A shared edge is that of the last token: 1.
    """
    table = _host(page_table)
    index = np.arange(table.shape[2])
    lengths = _host(seq_lens).astype(np.int64)[:, None]
    lengths = lengths.clip(0, len(index) * TOKENS_PER_PAGE)
    needed = index * TOKENS_PER_PAGE < lengths
    if sliding_window:
        left = lengths - sliding_window - (query_len - 1)
        needed &= (index + 1) * TOKENS_PER_PAGE > left
    faults = needed[:, None] & ((table < 0) | (table >= 2 * num_pages))
    return [Fault(*map(int, fault)) for fault in np.argwhere(faults)]


def _host(array: Any) -> np.ndarray[Any, Any]:
    return array if isinstance(array, np.ndarray) else to_host(array)
