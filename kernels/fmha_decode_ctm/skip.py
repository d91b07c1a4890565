"""Skip-softmax: which pages of a sequence add so little that their values need not be loaded.

Of a sequence that skips, a CTA takes whole pages, a few at a time: it reads their keys, keeps the
maximum of each page and query head, and then runs the dense loop over the pages that it keeps,
whose keys come a second time, from L2. A page is dropped where, for every query head, its maximum
lies below the maximum of the pages before it, and by more than log2(L / S). What a dropped page
could add to the running maximum is therefore nothing, and which pages are dropped depends on keys
alone.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.schedule import TILES_PER_FETCH

UNITS_AT_ONCE = 8  # a group of four lanes keeps the maxima of one


class SkipSoftmax:
    """A unit is what a CTA takes at a time: a page, or a tile where tiles are larger.

    Warps on different pages of a tile decide each for theirs, and so are partial results apart. A
    CTA that ``halves`` the heads of a KV head with another goes by the maxima of all.
    """

    def __init__(self, layout, *, halves: bool):
        self.layout, self.shape = layout, layout.shape
        self.halves = halves
        self.head_tiles = layout.shape.head_tiles * (2 if halves else 1)
        self.unit_tiles = max(1, TOKENS_PER_PAGE // layout.tile_tokens)
        self.unit_pages = max(1, layout.tile_tokens // TOKENS_PER_PAGE)
        # What is kept should still be in L2, which holds the keys of few CTAs longer: of half the
        # pages kept, batch 32, 16,384 tokens, f16 d128 on an H200 422 us by fours, 488 by eights;
        # batch 1, 65,536 tokens in clusters, 95 and 78.
        at_once = UNITS_AT_ONCE if self.shape.cluster > 1 else UNITS_AT_ONCE // 2
        self.units = min(at_once, TILES_PER_FETCH // self.unit_tiles)

    def unit(self, tile):
        return tile >> log2(self.unit_tiles)

    @cute.jit
    def scale_of(self, table, length, lane):
        """Return S of the last (bin, S) pair whose bin is not above ``length``; 0 means dense."""
        pairs = table.iterator.toint()
        count = table.shape[0] >> 1
        bins = Int32(0)
        for first in cutlass.range(0, count, 32):
            below = Int32(0)
            if first + lane < count:
                bin = ptx.ld_global_i32(pairs + Int64(first + lane) * 8)
                below = ptx.select(bin <= length, Int32(1), Int32(0))
            bins += ptx.warp_reduce(below, ptx.add)
        scale = Int32(0)
        if bins > 0:
            scale = ptx.ld_global_i32(pairs + Int64(bins - 1) * 8 + 4)
        return scale

    def threshold(self, scale, length):
        return ptx.log2(Float32(scale)) - ptx.log2(Float32(length))

    def no_maxima(self):
        maxima = cute.make_rmem_tensor((2 * self.head_tiles,), Float32)
        maxima.fill(ptx.NEG_INF)
        return maxima

    def page_maxima(self, scores, tile, scale_log2, unit, maxima, lane, first_tile=0):
        """Let the lanes of ``unit`` take up the maxima of a tile's scores.

        The scores are of the tiles of heads from ``first_tile`` on.
        """
        first = tile.first + (lane >> 2)
        for n in range(self.shape.head_tiles):
            for c in range(2):
                top = Float32(ptx.NEG_INF)
                for i in range(2 * self.shape.token_tiles):
                    seen = cutlass.Uint32(first + 8 * i) < cutlass.Uint32(tile.span)
                    score = scores[i // 2][n][2 * (i % 2) + c] * scale_log2
                    top = ptx.max_nan(top, ptx.select(seen, score, Float32(ptx.NEG_INF)))
                top = ptx.warp_reduce(top, ptx.max_nan, lane_masks=(16, 8, 4))
                at = 2 * (first_tile + n) + c
                higher = ptx.max_nan(maxima[at], top)
                maxima[at] = ptx.select((lane >> 2) == unit, higher, maxima[at])

    def dropped(self, smem, warp, lane, maxima, running, threshold, halved):
        """Return whether the page of this lane's tile is dropped.

        The maxima of the other half of the heads count where they are ``halved``. Raises
        ``running`` to the maxima of all. Every thread of the CTA calls it; the start of the rings
        is overwritten.
        """
        layout = self.layout
        token_group = warp >> log2(layout.dim_split)
        unit, quad = lane >> 2, lane & 3
        same_page = layout.token_groups // self.unit_pages  # token groups
        first_group = token_group & ~(same_page - 1)
        cute.arch.sync_threads()  # the rings are read
        for n in range(self.head_tiles):
            for c in range(2):
                at = self._address(smem, token_group, unit, 8 * n + 2 * quad + c)
                ptx.st_shared_f32(at, maxima[2 * n + c])
        cute.arch.sync_threads()
        drop = Int32(1)
        for n in range(self.head_tiles):
            for c in range(2):
                top = Float32(ptx.NEG_INF)
                for i in range(same_page):
                    at = self._address(smem, first_group + i, unit, 8 * n + 2 * quad + c)
                    top = ptx.max_nan(top, ptx.ld_shared_f32(at))
                upto = top
                for distance in (4, 8, 16):
                    up = cute.arch.shuffle_sync_up(upto, distance, mask_and_clamp=0)
                    upto = ptx.select(lane >= distance, ptx.max_nan(upto, up), upto)
                before = cute.arch.shuffle_sync_up(upto, 4, mask_and_clamp=0)
                before = ptx.select(lane >= 4, before, Float32(ptx.NEG_INF))
                before = ptx.max_nan(before, running[2 * n + c])
                everything = cute.arch.shuffle_sync(upto, 28 + quad)
                running[2 * n + c] = ptx.max_nan(running[2 * n + c], everything)
                # A NaN compares false: its page stays.
                less = (top < before) & (top - before < threshold)
                if n >= self.shape.head_tiles:
                    less = less | (halved == 0)
                drop = drop & ptx.select(less, Int32(1), Int32(0))
        drop = ptx.warp_reduce(drop, lambda a, b: a & b, lane_masks=(1, 2))
        if self.shape.tensor_copy:
            ptx.fence_proxy_async()  # the next copies into the rings come after these accesses
        cute.arch.sync_threads()
        units = cute.arch.vote_ballot_sync(drop != 0)  # bit 4 * unit
        return ((units >> ((self.unit(lane) * 4) & 31)) & 1) != 0

    def _address(self, smem, token_group, unit, head):
        row = token_group * UNITS_AT_ONCE + unit
        return smem + (row * (8 * self.head_tiles) + head) * 4

    @cute.jit
    def count(self, address, dropped, warp, lane):
        """Add how many pages are ``dropped``, a flag for each lane's tile; 0 is no address."""
        if address != Int64(0):
            # Of a page's tiles the first counts, in the first of the warps that share the page.
            first = dropped & ((lane & (self.unit_tiles - 1)) == 0)
            pages = cute.arch.popc(cute.arch.vote_ballot_sync(first))
            chosen = (warp & (self.shape.warps // self.unit_pages - 1)) == 0
            ptx.reduce_add_i32(address, Int32(pages), chosen & (lane == 0) & (pages != 0))
