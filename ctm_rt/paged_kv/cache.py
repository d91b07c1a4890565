"""Bookkeeping of a paged KV cache: which sequence is where, and which pages it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ctm_rt.errors import ArgumentError, CapacityError
from ctm_rt.memory import DeviceArray
from ctm_rt.paged_kv.layout import (
    MAX_KV_CACHE_CAPACITY,
    MAX_KV_POOL_PAGES,
    TOKENS_PER_PAGE,
    UNUSED_PAGE_ENTRY,
    ceil_div,
    compute_max_pages_per_seq,
    compute_minimum_kv_pool_pages,
    compute_minimum_swa_pool_pages,
    require_count,
    resolve_kv_cache_capacity,
    retained_pages,
)
from ctm_rt.paged_kv.moving import copy_pages, upload_moves
from ctm_rt.paged_kv.pages import Move, PagePool
from ctm_rt.paged_kv.table import PageTable
from ctm_rt.paged_kv.upload import DeviceRows
from ctm_rt.tensor import DType


@dataclass(slots=True)
class _Sequence:
    """Tokens 0..length are held and may be shared; length..end is room, and never shared."""

    length: int = 0
    end: int = 0
    pages: list[int] = field(default_factory=list)  # one entry per logical page of 0..end


class PagedKvCache:
    """Slots for ``batch`` sequences over pools that share page ids, one pool per layer.

    A step is ``extend`` (makes room), ``copy_pages`` of the moves that it returned, ``advance``
    (counts the tokens) and ``upload``; then, for each layer, ``append`` of the new tokens' keys and
    values, and attention. Whatever raises has changed nothing. For one thread at a time.

    With a reduced ``kv_cache_capacity`` each sequence keeps only the pages of its last so many
    tokens (a sliding window); the table's entries left of it are unused. Layers of different
    capacities need a cache each.

    Parameters
    ----------
    batch : int
        Slots.
    max_kv_cache_capacity : int
        The most tokens of a sequence; sets the width of the table, also with a window.
    kv_cache_capacity : int
        Tokens that a sequence keeps; 0 is all. What is less than the maximum is the window.
    num_pages : int, optional
        K pages of a pool. Default: what always suffices. Without a window it may be less, and
        ``CapacityError`` comes when pages run out; with one it may not, and pages never do.
    device : int
        CUDA ordinal; the driver is not touched before a pool, a device array or ``upload`` is.

    Attributes
    ----------
    sliding_window : int
        To give to decode_attention, or less; 0 is none.
    table : PageTable
        To read. ``table.device_array`` is the ``page_table`` of decode_attention.
    pools : list of DeviceArray
        One per ``add_layer``.
    """

    def __init__(
        self,
        batch: int,
        max_kv_cache_capacity: int,
        *,
        kv_cache_capacity: int = 0,
        num_pages: int | None = None,
        device: int = 0,
    ) -> None:
        require_count("batch", batch, least=1)
        require_count(
            "max_kv_cache_capacity", max_kv_cache_capacity, least=1, most=MAX_KV_CACHE_CAPACITY
        )
        kept = resolve_kv_cache_capacity(kv_cache_capacity, max_kv_cache_capacity)
        self.sliding_window = kept if kept < max_kv_cache_capacity else 0
        self.max_kv_cache_capacity, self.device = max_kv_cache_capacity, device
        if self.sliding_window:
            enough = least = compute_minimum_swa_pool_pages(batch, kept)
        else:
            enough, least = compute_minimum_kv_pool_pages(batch, kept), 1
        self.num_pages = enough if num_pages is None else num_pages
        require_count("num_pages", self.num_pages, least=least, most=MAX_KV_POOL_PAGES)
        max_pages = compute_max_pages_per_seq(max_kv_cache_capacity)
        self.table = PageTable(batch, max_pages, self.num_pages, device=device)
        self.pools: list[DeviceArray] = []
        self._pages = PagePool(self.num_pages)
        self._sequences: dict[int, _Sequence] = {}
        self._free_slots = list(range(batch - 1, -1, -1))
        self._lengths = np.zeros(batch, np.int32)
        self._length_rows = DeviceRows(self._lengths, device)

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def slots(self) -> list[int]:
        """Slots in use."""
        return sorted(self._sequences)

    @property
    def num_free_pages(self) -> int:
        """K pages that no sequence holds."""
        return self._pages.num_free

    @property
    def seq_lens(self) -> np.ndarray[Any, Any]:
        """(batch,) int32, tokens of each slot, 0 for a free one; a read-only view."""
        lengths = self._lengths.view()
        lengths.flags.writeable = False
        return lengths

    @property
    def seq_lens_device_array(self) -> DeviceArray:
        """``seq_lens`` on the device, as of the last ``upload``."""
        return self._length_rows.device_array

    def room(self, slot: int) -> int:
        """Return how many tokens the slot may take before the next ``extend``."""
        sequence = self._sequence(slot)
        return sequence.end - sequence.length

    def holders(self, page: int) -> int:
        """Return how many sequences hold a K page."""
        return self._pages.holders(require_count("page", page, most=self.num_pages - 1))

    def add_layer(
        self, num_kv_heads: int, head_dim: int, dtype: DType | str = DType.F16
    ) -> DeviceArray:
        """Allocate a layer's pool, [2 * num_pages, 128, num_kv_heads, head_dim]; undefined."""
        shape = (2 * self.num_pages, TOKENS_PER_PAGE, num_kv_heads, head_dim)
        self.pools.append(DeviceArray.empty(shape, dtype, self.device))
        return self.pools[-1]

    def upload(self, stream: object = None) -> None:
        """Queue what changed of the table and of the lengths; see ``PageTable.upload``."""
        self.table.upload(stream)
        self._length_rows.upload(stream)

    def copy_pages(self, moves: list[Move], stream: object = None) -> None:
        """Queue the copies of ``moves`` in every pool; any wait for what is on the stream."""
        if moves:
            on_device = upload_moves(moves, self.device, stream)
            for pool in self.pools:
                copy_pages(pool, on_device, stream=stream)

    # ---- what changes it -------------------------------------------------------------------------

    def admit(self, num_tokens: int = 0) -> int:
        """Take a slot for a new, empty sequence with room for ``num_tokens``; return it.

        Raises
        ------
        CapacityError
            All slots are in use, or pages have run out.
        ArgumentError
            ``num_tokens`` is outside 0..max_kv_cache_capacity.
        """
        slot = self._free_slot()
        self._sequences[slot] = _Sequence()
        try:
            self.extend(slot, num_tokens)
        except Exception:
            del self._sequences[slot]
            raise
        self._free_slots.pop()
        return slot

    def extend(self, slot: int, num_tokens: int) -> list[Move]:
        """Make room for ``num_tokens`` after the slot's last token; return the copies to queue.

        The copy, if any, is of a page that is shared and about to be written. With a window, new
        tokens that no later token than the last new one can see get no page: their entries are
        unused, and ``advance`` then takes all of the room at once.

        Raises
        ------
        CapacityError
            Pages have run out.
        ArgumentError
            The slot is not in use, or the sequence would pass ``max_kv_cache_capacity``.
        """
        sequence = self._sequence(slot)
        length, pages = sequence.length, sequence.pages
        most = self.max_kv_cache_capacity - length
        end = length + require_count("num_tokens", num_tokens, most=most)
        if end <= sequence.end:
            return []
        filled = ceil_div(length, TOKENS_PER_PAGE)
        image = retained_pages(end, self.sliding_window)
        first = max(filled, image.start)  # of the logical pages that are all new
        missing = image.stop - max(first, len(pages))  # >= 0: all pages so far end before ``end``
        replaced = length % TOKENS_PER_PAGE > 0 and self._pages.holders(pages[filled - 1]) > 1
        # Room of before that the window has left is as good as free: nothing was counted in it.
        left = [page for page in pages[filled:first] if page != UNUSED_PAGE_ENTRY]
        wanted = missing + replaced
        taken = left[:wanted] + self._pages.take(max(0, wanted - len(left)))
        self._pages.release(left[wanted:])

        moves = []
        if replaced:
            moves.append(Move(pages[filled - 1], taken.pop(0)))
            self._pages.release([moves[0].source])
            pages[filled - 1] = moves[0].destination
        pages[filled:first] = [UNUSED_PAGE_ENTRY] * (first - filled)
        pages += taken
        sequence.end = end
        if left or taken or moves:
            self._describe(slot)
        return moves

    def advance(self, slot: int, num_tokens: int) -> None:
        """Count ``num_tokens`` that were written into the slot's room; let go what the window left.

        Raises
        ------
        ArgumentError
            The slot is not in use, has less room, or ``extend`` gave no page to tokens that would
            now be inside the window.
        """
        sequence = self._sequence(slot)
        old, most = sequence.length, sequence.end - sequence.length
        length = old + require_count("num_tokens", num_tokens, most=most)
        self._require_kept(sequence, length, "num_tokens")
        left = range(*(retained_pages(n, self.sliding_window).start for n in (old, length)))
        self._drop(slot, left)
        self._set_length(slot, length)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the first ``length`` tokens, and no room.

        Raises
        ------
        ArgumentError
            The slot is not in use, has fewer tokens, or its window has moved past the pages that
            the last of these tokens see.
        """
        sequence = self._sequence(slot)
        require_count("length", length, most=sequence.length)
        self._require_kept(sequence, length, "length")
        kept = ceil_div(length, TOKENS_PER_PAGE)
        self._drop(slot, range(kept, len(sequence.pages)))
        del sequence.pages[kept:]
        sequence.end = length
        self._set_length(slot, length)

    def fork(self, slot: int) -> int:
        """Take a slot for a sequence with the same tokens, on the same pages; return it.

        Neither has room then: the first ``extend`` of one gives it its own copy of a last page that
        is not full.

        Raises
        ------
        CapacityError
            All slots are in use.
        ArgumentError
            The slot is not in use.
        """
        sequence = self._sequence(slot)
        other = self._free_slot()
        length = sequence.length
        self.truncate(slot, length)
        self._free_slots.pop()
        self._pages.share(page for page in sequence.pages if page != UNUSED_PAGE_ENTRY)
        self._sequences[other] = _Sequence(length, length, sequence.pages.copy())
        self._describe(other)
        self._set_length(other, length)
        return other

    def evict(self, slot: int) -> None:
        """Free the slot, and its pages that no other holds.

        Raises
        ------
        ArgumentError
            The slot is not in use.
        """
        self.truncate(slot, 0)
        del self._sequences[slot]
        self._free_slots.append(slot)

    def compact(self) -> list[Move]:
        """Renumber the pages in use to the lowest ids; return the copies to queue."""
        moves = self._pages.compact()
        moved = dict(moves)
        for slot, sequence in self._sequences.items():
            if not moved.keys().isdisjoint(sequence.pages):
                sequence.pages = [moved.get(page, page) for page in sequence.pages]
                self._describe(slot)
        return moves

    # ---- helpers ---------------------------------------------------------------------------------

    def _sequence(self, slot: int) -> _Sequence:
        sequence = self._sequences.get(slot)
        if sequence is None:
            raise ArgumentError("slot", f"one of {self.slots}", slot)
        return sequence

    def _free_slot(self) -> int:
        if not self._free_slots:
            raise CapacityError("slots", 1, 0)
        return self._free_slots[-1]

    def _require_kept(self, sequence: _Sequence, length: int, name: str) -> None:
        image = retained_pages(length, self.sliding_window)
        if self.sliding_window and UNUSED_PAGE_ENTRY in sequence.pages[image.start : image.stop]:
            kept = "a length whose window is kept"
            raise ArgumentError(name, kept, f"one that gives length {length}")

    def _drop(self, slot: int, logical: Iterable[int]) -> None:
        pages = self._sequence(slot).pages
        dropped = [index for index in logical if pages[index] != UNUSED_PAGE_ENTRY]
        if dropped:
            self._pages.release(pages[index] for index in dropped)
            for index in dropped:
                pages[index] = UNUSED_PAGE_ENTRY
            self._describe(slot)

    def _describe(self, slot: int) -> None:
        """Write the slot's row of the table."""
        self.table.update([(slot, self._sequences[slot].pages)], holes=True)

    def _set_length(self, slot: int, length: int) -> None:
        self._sequences[slot].length = self._lengths[slot] = length
        self._length_rows.touch([slot])
