"""Which tiles of which sequence are a CTA's, and on which pages they lie."""

import cutlass
from cutlass import Int32, Int64, const_expr, cute, range_constexpr

from ctm_rt.decode.plan import MAX_GROUPS, MAX_SPARE_GROUPS_PER_SM
from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.layout import log2

TILES_PER_FETCH = 32  # page ids are fetched one tile a lane


class Schedule:
    """``split_equal``: few sequences get several groups each, though none is longer than others."""

    def __init__(self, tile_tokens: int, warp_tokens: int, split_equal: bool = False):
        self.tile_tokens, self.warp_tokens = tile_tokens, warp_tokens
        self.split_equal = split_equal

    def clamp_length(self, length, max_pages):
        return cutlass.min(cutlass.max(length, Int32(0)), max_pages * TOKENS_PER_PAGE)

    @cute.jit
    def count_tiles(self, lengths, sequence, batch, max_pages, sliding_window):
        """Return how many tiles of the sequence hold visible keys; 0 past the batch."""
        tiles = Int32(0)
        if sequence < batch:
            length = self.clamp_length(ptx.ld_global_i32(lengths + Int64(sequence) * 4), max_pages)
            left = Int32(0)
            if sliding_window > 0:
                left = cutlass.max(length - sliding_window, Int32(0))
            shift = log2(self.tile_tokens)
            tiles = ((length + (self.tile_tokens - 1)) >> shift) - (left >> shift)
        return tiles

    @cute.jit
    def balance(self, lengths, batch, max_pages, sliding_window, spare_groups, work, lane):
        """Return (sequence, group, groups) of the ``work``-th group of the batch.

        A sequence gets groups in proportion to its tiles, at least one: with ``budget`` tiles a
        group, rounded, they are at most batch + spare_groups. Past the last, group is not below
        groups. Unless ``split_equal``, and where the batch alone fills the GPU (``plan_decode``),
        one that is not longer than 1.5 times the mean gets one.
        """
        total = Int32(0)
        for first in cutlass.range(0, batch, 32):
            total += self.count_tiles(lengths, first + lane, batch, max_pages, sliding_window)
        total = ptx.warp_reduce(total, ptx.add)
        mean = total // batch
        full = MAX_SPARE_GROUPS_PER_SM * batch >= spare_groups
        budget = cutlass.max((total + spare_groups - 1) // spare_groups, Int32(1))
        sequence = Int32(0)
        group = Int32(MAX_GROUPS)
        groups = Int32(0)
        before = Int32(0)
        first = Int32(0)
        while (first < batch) & (groups == 0):
            tiles = self.count_tiles(lengths, first + lane, batch, max_pages, sliding_window)
            wanted = cutlass.max((2 * tiles + budget) // (2 * budget), Int32(1))
            if const_expr(not self.split_equal):
                # Splitting what is no longer than the others costs a merge: 64/4 heads, batch 32 of
                # 4,096 tokens 72 us in two groups each, 65 in one.
                one = full & (tiles <= mean + (mean >> 1))
                wanted = ptx.select(one, Int32(1), wanted)
            mine = ptx.select(
                first + lane < batch, cutlass.min(wanted, Int32(MAX_GROUPS)), Int32(0)
            )
            end = mine
            for distance in range_constexpr(5):
                up = cute.arch.shuffle_sync_up(end, 1 << distance, mask_and_clamp=0)
                end += ptx.select(lane >= (1 << distance), up, Int32(0))
            end += before
            beyond = cute.arch.vote_ballot_sync(end > work)
            if beyond != 0:
                owner = Int32(cute.arch.clz(cute.arch.brev(beyond)))
                groups = cute.arch.shuffle_sync(mine, owner)
                group = work - (cute.arch.shuffle_sync(end, owner) - groups)
                sequence = first + owner
            before = cute.arch.shuffle_sync(end, 31)
            first += 32
        return sequence, group, groups

    @cute.jit
    def fetch_pages(self, table, v_row_nbytes, max_pages, pool_pages, token_group, tile):
        """Return the K and V page id of this lane's tile; -1 for both where either is invalid."""
        page = tile >> log2(max(1, TOKENS_PER_PAGE // self.tile_tokens))
        if const_expr(self.tile_tokens > TOKENS_PER_PAGE):  # the tile spans several pages
            page = tile * (self.tile_tokens // TOKENS_PER_PAGE) + (
                (token_group * self.warp_tokens) >> log2(TOKENS_PER_PAGE)
            )
        k_id = Int32(-1)
        v_id = Int32(-1)
        if page < max_pages:
            address = table + Int64(page) * 4
            k_id = ptx.ld_global_i32(address)
            v_id = ptx.ld_global_i32(address + v_row_nbytes)
        good = (cutlass.min(k_id, v_id) >= 0) & (cutlass.max(k_id, v_id) < pool_pages)
        return ptx.select(good, k_id, Int32(-1)), ptx.select(good, v_id, Int32(-1))
