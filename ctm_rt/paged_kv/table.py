"""The page table: which pool page holds each logical page of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ctm_rt.errors import ArgumentError
from ctm_rt.memory import DeviceArray
from ctm_rt.paged_kv.layout import MAX_KV_POOL_PAGES, UNUSED_PAGE_ENTRY, require_count
from ctm_rt.paged_kv.upload import DeviceRows


class PageTable:
    """(batch, 2, max_pages) int32 on the host and, after ``upload``, on the device.

    Callers speak of K pages. The V page of K page ``id`` is ``id + num_pages``; -1, unused, is -1
    in both rows. All entries are unused at first.

    Parameters
    ----------
    batch, max_pages : int
        Slots, and logical pages of each.
    num_pages : int
        K pages of the pool.
    device : int
        CUDA ordinal; the driver is not touched before ``device_array`` or ``upload`` is.
    """

    def __init__(self, batch: int, max_pages: int, num_pages: int, *, device: int = 0) -> None:
        require_count("batch", batch, least=1)
        require_count("max_pages", max_pages, least=1)
        self.num_pages = require_count("num_pages", num_pages, least=1, most=MAX_KV_POOL_PAGES)
        self._table = np.full((batch, 2, max_pages), UNUSED_PAGE_ENTRY, np.int32)
        self._rows = DeviceRows(self._table, device)

    @property
    def host(self) -> np.ndarray[Any, Any]:
        """The table as it is on the host; a read-only view."""
        table = self._table.view()
        table.flags.writeable = False
        return table

    @property
    def device_array(self) -> DeviceArray:
        """The device's copy, as of the last ``upload``: the ``page_table`` of decode_attention."""
        return self._rows.device_array

    def update(self, rows: Iterable[tuple[int, Sequence[int]]], *, holes: bool = False) -> None:
        """Replace the rows of some slots; either all of them or, after an error, none.

        Parameters
        ----------
        rows : (slot, pages) pairs; no slot twice
            ``pages`` are K ids, in order of the logical pages, each once in a row (rows may share
            them). What follows them is unused.
        holes : bool
            Let used entries follow unused ones, as where only a window's pages are kept.

        Raises
        ------
        ArgumentError
            A slot or an id is out of range or repeated, there are more than ``max_pages`` ids, or
            there is a hole.
        """
        checked: dict[int, np.ndarray[Any, Any]] = {}
        for slot, pages in rows:
            require_count("slot", slot, most=len(self._table) - 1)
            if slot in checked:
                raise ArgumentError("slot", "each slot once", f"{slot} twice")
            checked[slot] = self._checked(slot, pages, holes)
        for slot, ids in checked.items():
            self._write(slot, ids)
        self._rows.touch(checked)

    def map_identity(self) -> None:
        """Give slot ``b`` the pages ``b * max_pages`` to ``(b + 1) * max_pages - 1``.

        Raises
        ------
        ArgumentError
            The pool has fewer than ``batch * max_pages`` pages; it may have more.
        """
        batch, _, max_pages = self._table.shape
        if batch * max_pages > self.num_pages:
            raise ArgumentError("num_pages", f"at least {batch * max_pages}", self.num_pages)
        for slot in range(batch):
            self._write(slot, np.arange(slot * max_pages, (slot + 1) * max_pages))
        self._rows.touch(range(batch))

    def upload(self, stream: object = None) -> None:
        """Queue copies of the rows that changed since the last call to ``device_array``.

        The table may be changed again at once. What was queued on the stream before still sees the
        old rows; other streams are for the caller to order.

        Raises
        ------
        ArgumentError
            The stream captures, and there is something to copy: replays would repeat it.
        """
        self._rows.upload(stream)

    def _checked(self, slot: int, pages: Sequence[int], holes: bool) -> np.ndarray[Any, Any]:
        ids, name, max_pages = np.asarray(pages), f"pages of slot {slot}", self._table.shape[2]
        if ids.size == 0:
            return np.empty(0, np.int32)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ArgumentError(name, "integers along one axis", f"{ids.dtype} {ids.shape}")
        if len(ids) > max_pages:
            raise ArgumentError(name, f"at most {max_pages}", len(ids))
        outside = ids[(ids < UNUSED_PAGE_ENTRY) | (ids >= self.num_pages)]
        if len(outside):
            raise ArgumentError(name, f"-1 to {self.num_pages - 1}", outside[0])
        used = ids != UNUSED_PAGE_ENTRY
        found, times = np.unique(ids[used], return_counts=True)
        if (times > 1).any():
            raise ArgumentError(name, "each page once", f"{found[times > 1][0]} repeated")
        if not holes and (used[1:] > used[:-1]).any():
            raise ArgumentError(name, "unused entries after all used ones", "a hole")
        return ids

    def _write(self, slot: int, ids: np.ndarray[Any, Any]) -> None:
        k_row, v_row = self._table[slot]
        k_row[: len(ids)] = ids
        k_row[len(ids) :] = UNUSED_PAGE_ENTRY
        v_row[:] = np.where(k_row == UNUSED_PAGE_ENTRY, k_row, k_row + self.num_pages)
