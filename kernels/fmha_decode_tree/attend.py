"""A CTA's way through its tiles."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, const_expr, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.ring import Tile
from kernels.common.schedule import TILES_PER_FETCH, Schedule
from kernels.fmha_decode_tree import masks
from kernels.fmha_decode_tree.convert import Conversion
from kernels.fmha_decode_tree.mma import WarpgroupMma, WarpMma
from kernels.fmha_decode_tree.non_finite import NonFinite
from kernels.fmha_decode_tree.ring import LastWarpCopies, SharedAsyncCopy, SharedTensorCopy
from kernels.fmha_decode_tree.tile import HIDDEN, TileMath

FIRST_TURN = 2  # the first of two barriers of the CTA; it and the only ring have those before


class Keys(NamedTuple):
    """What the loops need to know of a sequence."""

    table: Any  # its K page ids
    v_row_nbytes: Any  # from there to its V page ids
    max_pages: Any
    pool_pages: Any
    left: Any  # the first key that a row of the CTA sees
    length: Any
    end_tile: Any
    stride: Any  # from one of the CTA's tiles to the next
    scale: Any  # above 0


class Ahead(NamedTuple):
    """What the copies have come to."""

    live: Any  # bit i % 32: tile i's page ids are valid
    k_ids: Any  # of a tile a lane
    v_ids: Any
    next_k_ids: Any
    next_v_ids: Any


class Attend:
    def __init__(self, layout):
        self.layout, self.shape, self.slot = layout, layout.shape, layout.slot
        ring, mma = SharedAsyncCopy, WarpMma
        if self.shape.warpgroup:
            ring, mma = SharedTensorCopy if layout.converts else LastWarpCopies, WarpgroupMma
        self.loads, self.mma = ring(self.slot, layout.group_warps), mma(layout)
        self.math, self.conversion = TileMath(layout), Conversion(layout)
        self.non_finite = NonFinite(layout, self.mma, self.loads)
        self.schedule = Schedule(layout.tile_tokens, self.shape.tokens, split_equal=True)

    # --- the ring's filling end -------------------------------------------------------------------

    def fetch_pages(self, keys, thread, first):
        """Return the page ids of 32 of the CTA's tiles, one a lane."""
        return self.schedule.fetch_pages(
            keys.table, keys.v_row_nbytes, keys.max_pages, keys.pool_pages, thread.token_group,
            first + thread.lane * keys.stride,
        )  # fmt: skip

    def fill(self, source, thread, keys, tile, k_ids, v_ids):
        """Ask for as many tiles as there are slots."""
        following = self.fetch_pages(keys, thread, tile + TILES_PER_FETCH * keys.stride)
        ahead = Ahead(Int32(0), k_ids, v_ids, *following)
        mine = self.loads.asks_first(source)
        for i in range(self.shape.stages):
            ahead = self.ask(
                source, Int32(i), ahead, Int32(i), tile + i * keys.stride, thread, keys, mine
            )
        return ahead

    @cute.jit
    def turn_pages(self, ahead, seen, tile, thread, keys):
        """Have the page ids of what takes the place of ``tile``, the one after ``seen`` others.

        Once for each tile, somewhere before ``ask_next`` leaves it.
        """
        index = seen + self.shape.stages
        tile = tile + self.shape.stages * keys.stride
        k_ids = ahead.k_ids
        v_ids = ahead.v_ids
        next_k_ids = ahead.next_k_ids
        next_v_ids = ahead.next_v_ids
        if (index & (TILES_PER_FETCH - 1)) == 0:
            k_ids = next_k_ids
            v_ids = next_v_ids
            next_k_ids, next_v_ids = self.fetch_pages(
                keys, thread, tile + TILES_PER_FETCH * keys.stride
            )
        return Ahead(ahead.live, k_ids, v_ids, next_k_ids, next_v_ids)

    def ask_next(self, source, stage, ahead, seen, tile, thread, keys):
        """Leave ``tile`` and ask for what takes its place."""
        mine = self.loads.release(source, stage)
        index, tile = seen + self.shape.stages, tile + self.shape.stages * keys.stride
        return self.ask(source, stage, ahead, index, tile, thread, keys, mine)

    def ask(self, source, stage, ahead, index, tile, thread, keys, mine):
        k_page = cute.arch.shuffle_sync(ahead.k_ids, index & (TILES_PER_FETCH - 1))
        v_page = cute.arch.shuffle_sync(ahead.v_ids, index & (TILES_PER_FETCH - 1))
        valid = k_page >= 0
        bit = index & 31
        live = (ahead.live & ~(Int32(1) << bit)) | (ptx.select(valid, Int32(1), Int32(0)) << bit)
        token = self.first_token(tile, thread)
        span = ptx.select(valid, keys.length - keys.left, Int32(0))
        there = Tile(token, (k_page, v_page), token - keys.left, span)
        page_token = token & (TOKENS_PER_PAGE - 1)
        wanted = mine & (tile < keys.end_tile)
        self.loads.ask(source, stage, there, page_token, wanted)
        return ahead._replace(live=live)

    def first_token(self, tile, thread):
        """Return the first token of the part of a tile that the warp's set takes."""
        return tile * self.layout.tile_tokens + thread.token_group * self.shape.tokens

    # --- the ring's reading end -------------------------------------------------------------------

    @cute.jit
    def attend(self, source, thread, keys, sight, state, q_frags, tile, ahead):
        """Take the CTA's tiles in turn.

        Each step of the chain from a tile's arrival to its last product counts: pages are turned
        before the wait, and what is converted is asked for beside that product. e4m3 trees of 16
        tokens, 32/8 heads of 128, batch 32 of 4,096 keys take 88 us on an H200; with the pages
        turned behind the softmax 93, and asked for before the product, too, 98.
        """
        seen = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        places = None
        if const_expr(self.layout.converts):
            places = self.conversion.places(thread)
        if const_expr(self.layout.takes_turns):
            self.give_first_turn(thread)
        while tile < keys.end_tile:
            ahead = self.turn_pages(ahead, seen, tile, thread, keys)
            token = self.first_token(tile, thread)
            valid = self.is_valid(ahead, seen)
            clear = self.is_clear(sight, token, valid)
            bits = masks.all_bits(self.shape.tokens)
            if not clear:
                bits = masks.visible_bits(sight, self.shape.tokens, token, valid, thread.lane)
            k_slot = self.k_half(source, stage)
            v_slot = self.v_half(source, stage)
            k_tile = k_slot
            v_tile = v_slot
            if const_expr(self.layout.converts):
                k_tile = self.conversion.tile_address(thread)
            self.loads.wait(source, stage, phase)
            if const_expr(self.layout.converts):
                self.conversion.convert(k_slot, k_tile, places)
                self.loads.publish(source)
            self.mma.issue_scores(k_tile, thread.dim_slice, q_frags, state.scores, thread.lane)
            if const_expr(self.layout.converts):
                v_tile = k_tile + self.layout.tile.half_nbytes
                self.conversion.convert(v_slot, v_tile, places)
            self.mma.await_scores(state.scores)
            if const_expr(self.layout.exchanges):
                self.math.exchange_scores(state.scores, thread, seen & 1)
            if not clear:
                masks.hide(state.scores, self.shape.tokens, bits, Float32(HIDDEN), thread.lane)
            weights = self.math.softmax_and_rescale(state, keys.scale)
            self.math.keep(state, weights)
            if const_expr(self.layout.converts):
                self.loads.publish(source)
            if not clear:
                self.non_finite.part(source, v_tile, token, bits, thread, keys, state.acc)
            if const_expr(self.shape.overlap):
                tile, seen, stage, phase, ahead = self.overlap(
                    source, thread, keys, sight, state, q_frags, tile, seen, stage, phase, ahead
                )
                v_tile = self.v_half(source, stage)
            next_stage, next_phase = self.next_slot(stage, phase)
            self.mma.issue_accumulate(
                v_tile, thread.dim_slice, self.math.fragments(state), state.acc, thread.lane
            )
            if const_expr(self.layout.converts):
                ahead = self.ask_next(source, stage, ahead, seen, tile, thread, keys)
            self.mma.await_accumulate(state.acc, state.weights)
            if const_expr(not self.layout.converts):
                ahead = self.ask_next(source, stage, ahead, seen, tile, thread, keys)
            tile += keys.stride
            seen += 1
            stage = next_stage
            phase = next_phase
        self.loads.finish()

    @cute.jit
    def overlap(self, source, thread, keys, sight, state, q_frags, tile, seen, stage, phase, ahead):
        """As long as every row sees all of the next tile: add this one's values meanwhile.

        Return where that ends, with the values of that tile still to be added. Between the issue of
        a warpgroup's products and the wait for them there may be no branch: ptxas would wait for
        each at once.
        """
        going = self.is_clear_at(thread, keys, sight, tile + keys.stride, seen + 1, ahead)
        while going:
            next_stage, next_phase = self.next_slot(stage, phase)
            self.loads.wait(source, next_stage, next_phase)
            if const_expr(self.layout.takes_turns):
                ptx.barrier(self.turn(thread), 32 * self.layout.warps)
            self.mma.issue_scores(
                self.k_half(source, next_stage), thread.dim_slice, q_frags, state.scores,
                thread.lane,
            )  # fmt: skip
            self.mma.issue_accumulate(
                self.v_half(source, stage), thread.dim_slice, self.math.fragments(state), state.acc,
                thread.lane,
            )  # fmt: skip
            if const_expr(self.layout.takes_turns):
                ptx.barrier_arrive(self.turn(thread) ^ 1, 32 * self.layout.warps)
            self.mma.await_scores(state.scores, pending=1)
            weights, corrections, moved = self.math.softmax(state, keys.scale)
            # ptxas would move the wait up, into the softmax; it keeps the order of this store,
            # which needs every weight, and of the wait. 32 query tokens of 32/8 heads, batch 32,
            # on an H200: 145 us instead of 158.
            self.hold(thread, state.row_sum[0] + state.row_sum[1])
            self.mma.await_accumulate(state.acc, state.weights)
            self.math.keep(state, weights)
            self.math.rescale(state, corrections, moved)
            ahead = self.ask_next(source, stage, ahead, seen, tile, thread, keys)
            tile += keys.stride
            seen += 1
            stage = next_stage
            phase = next_phase
            ahead = self.turn_pages(ahead, seen, tile, thread, keys)
            going = self.is_clear_at(thread, keys, sight, tile + keys.stride, seen + 1, ahead)
        return tile, seen, stage, phase, ahead

    def turn(self, thread):
        """Return at which of the CTA's barriers a warpgroup waits for its turn to issue.

        So that the other's products keep the tensor cores busy while one is at its softmax: trees
        of 32 tokens, batch 8, 40.0 us instead of 40.7; of 128, 119 instead of 121.
        """
        return FIRST_TURN + (thread.warp >> 2)

    @cute.jit
    def give_first_turn(self, thread):
        if thread.warp >= 4:
            ptx.barrier_arrive(Int32(FIRST_TURN), 32 * self.layout.warps)

    def hold(self, thread, value):
        """Store in a place of the thread's own that nobody reads."""
        into = thread.smem + self.layout.unread + (thread.warp * 32 + thread.lane) * 4
        ptx.st_shared_f32(into, value)

    def next_slot(self, stage, phase):
        last = stage == self.shape.stages - 1
        return ptx.select(last, Int32(0), stage + 1), ptx.select(last, phase ^ 1, phase)

    def k_half(self, source, stage):
        return source.own.ring + stage * self.slot.slot_nbytes

    def v_half(self, source, stage):
        return self.k_half(source, stage) + self.slot.half_nbytes

    # --- what is visible --------------------------------------------------------------------------

    def is_valid(self, ahead, seen):
        return (ahead.live >> (seen & 31)) & 1 != 0

    def is_clear(self, sight, token, valid):
        """Return whether every row of the CTA sees each of the tokens from ``token`` on."""
        return (token >= sight.clear) & (token + self.shape.tokens <= sight.first_query) & valid

    def is_clear_at(self, thread, keys, sight, tile, seen, ahead):
        token = self.first_token(tile, thread)
        clear = self.is_clear(sight, token, self.is_valid(ahead, seen))
        return cute.arch.vote_all_sync((tile < keys.end_tile) & clear)
