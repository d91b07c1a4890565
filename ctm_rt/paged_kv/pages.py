"""Which pages of a pool are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ctm_rt.errors import CapacityError


class Move(NamedTuple):
    """Copy K page ``source`` to ``destination``, and the V page of each likewise, in every layer.

    No destination of one list is a source or another destination of it, so its copies may run in
    any order; those of a later list come after.
    """

    source: int
    destination: int


class PagePool:
    """Reference counts of ``num_pages`` pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders: dict[int, int] = {}  # of the pages in use
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest id goes first

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return ``count`` free pages, each with one holder; or raise CapacityError."""
        if count > len(self._free):
            raise CapacityError("pages", count, len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from each; the last one frees it."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)

    def holders(self, page: int) -> int:
        """Return how many sequences hold the page."""
        return self._holders.get(page, 0)

    def compact(self) -> list[Move]:
        """Renumber the pages in use to the lowest ids; return those whose id changes."""
        num_used = len(self._holders)
        gaps = (page for page in range(num_used) if page not in self._holders)
        beyond = sorted(page for page in self._holders if page >= num_used)
        moves = [Move(page, gap) for page, gap in zip(beyond, gaps, strict=True)]
        for source, destination in moves:
            self._holders[destination] = self._holders.pop(source)
        self._free = list(range(self.num_pages - 1, num_used - 1, -1))
        return moves
