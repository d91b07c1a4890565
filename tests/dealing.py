"""What the decode kernels do with a plan on the device, in plain Python: who gets which tiles."""

from collections.abc import Iterator
from typing import NamedTuple

from ctm_rt.decode.plan import MAX_GROUPS, MAX_SPARE_GROUPS_PER_SM, DecodePlan
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div


class Unit(NamedTuple):
    """One group at work on one sequence, for each KV head alike."""

    sequence: int
    row: int  # of the workspace
    first: int  # tile
    end: int
    cluster: int
    stride: int

    def tiles(self, rank: int) -> range:
        """The tiles of one CTA of the cluster."""
        return range(self.first + rank, self.end, self.stride)


class Dealing(NamedTuple):
    """A launch as the lengths make it."""

    plan: DecodePlan
    tile_tokens: int
    lengths: list[int]
    max_pages: int
    window: int = 0
    tree: bool = False  # whose long sequences are split, however long the others are

    def visible_tiles(self, sequence: int) -> range:
        """Tiles that hold a visible key."""
        length = min(max(self.lengths[sequence], 0), self.max_pages * TOKENS_PER_PAGE)
        left = max(length - self.window, 0) if self.window else 0
        return range(left // self.tile_tokens, ceil_div(length, self.tile_tokens))

    def units(self) -> Iterator[Unit]:
        """The groups that have something to do; of an empty sequence the first."""
        cluster = self.plan.cluster
        row = 0
        for sequence, groups in enumerate(self._groups()):
            tiles = self.visible_tiles(sequence)
            busy = max(1, ceil_div(len(tiles), cluster))
            for group in range(min(groups, busy)):
                first = tiles.start + group * cluster
                yield Unit(sequence, row + group, first, tiles.stop, cluster, groups * cluster)
            row += groups

    def partials(self) -> list[int]:
        """Into how many partial results skip-softmax deals the pages of each sequence."""
        pages = max(1, self.tile_tokens // TOKENS_PER_PAGE)  # of a tile, one to some of its warps
        return [groups * self.plan.cluster * pages for groups in self._groups()]

    def _groups(self) -> list[int]:
        if not self.plan.spare_groups:
            return [self.plan.num_groups] * len(self.lengths)
        tiles = [len(self.visible_tiles(b)) for b in range(len(self.lengths))]
        mean = sum(tiles) // len(tiles)
        budget = max(1, ceil_div(sum(tiles), self.plan.spare_groups))  # tiles of a group
        wanted = [min(max(1, (2 * n + budget) // (2 * budget)), MAX_GROUPS) for n in tiles]
        if self.tree or MAX_SPARE_GROUPS_PER_SM * len(tiles) < self.plan.spare_groups:
            return wanted
        return [w if n > mean + mean // 2 else 1 for n, w in zip(tiles, wanted, strict=True)]
