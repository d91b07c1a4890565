"""A CTA's way through its tiles: scores, what each row sees of them, weights, sums of values."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute, range_constexpr

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.ring import Tile
from kernels.common.schedule import TILES_PER_FETCH, Schedule
from kernels.fmha_decode_tree import masks
from kernels.fmha_decode_tree.mma import WarpgroupMma, WarpMma
from kernels.fmha_decode_tree.ring import FirstWarpCopies, LastWarpCopies, SharedAsyncCopy

# A score that is not visible: below every finite one, whose magnitude f16 factors keep under 1e13.
# Unlike -inf it can be multiplied by the scale, whose magnitude is kept above LEAST_SCALE.
HIDDEN = -3.0e38
LEAST_SCALE = 1e-30
# Exponents may be so far above 0 before a row's sums are scaled down, which after the first tiles
# hardly ever happens then. Weights stay far from the largest f16, and as exact as below 1.
SLACK = 8.0
FIRST_TURN = 2  # the first of two barriers of the CTA; it and the only ring have those before


class Thread(NamedTuple):
    smem: Any
    warp: Any
    lane: Any
    token_group: Any  # sets of warps that take different tokens
    row: Any  # the warp's first
    dim_slice: Any


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


class State(NamedTuple):
    """A warp's partial result, and the tile that it is at, in registers."""

    acc: Any
    row_max: Any  # before scaling; no score is more than SLACK above, scaled
    row_base: Any  # what exponents are relative to
    row_sum: Any
    scores: Any
    weights: Any  # pairs of f16: A fragments of 16 tokens each

    def maximum(self, row):
        """Return what the merge takes for a row's maximum."""
        hidden = self.row_max[row] == Float32(HIDDEN)
        return ptx.select(hidden, Float32(ptx.NEG_INF), self.row_base[row])


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
            ring, mma = FirstWarpCopies if layout.converts else LastWarpCopies, WarpgroupMma
        self.loads, self.mma = ring(self.slot, layout.group_warps), mma(layout)
        self.schedule = Schedule(layout.tile_tokens, self.shape.tokens, split_equal=True)

    def state(self):
        shape, dims = self.shape, self.layout.dims
        acc, row_max, row_base, row_sum, scores = (
            cute.make_rmem_tensor((count,), Float32)
            for count in (dims // 2, 2, 2, 2, shape.tokens // 2)
        )
        weights = cute.make_rmem_tensor((shape.tokens // 4,), Uint32)
        acc.fill(0.0)
        row_max.fill(HIDDEN)
        row_base.fill(0.0)
        row_sum.fill(0.0)
        scores.fill(0.0)
        return State(acc, row_max, row_base, row_sum, scores, weights)

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
    def ask_next(self, source, stage, phase, ahead, seen, tile, thread, keys):
        """Leave ``tile``, the one after ``seen`` others, and ask for what takes its place."""
        mine = self.loads.release(source, stage, phase, thread.lane)
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
        ahead = Ahead(ahead.live, k_ids, v_ids, next_k_ids, next_v_ids)
        return self.ask(source, stage, ahead, index, tile, thread, keys, mine)

    def ask(self, source, stage, ahead, index, tile, thread, keys, mine):
        k_page = cute.arch.shuffle_sync(ahead.k_ids, index & (TILES_PER_FETCH - 1))
        v_page = cute.arch.shuffle_sync(ahead.v_ids, index & (TILES_PER_FETCH - 1))
        valid = k_page >= 0
        bit = index & 31
        live = (ahead.live & ~(Int32(1) << bit)) | (ptx.select(valid, Int32(1), Int32(0)) << bit)
        token = self.first_token(tile, thread)
        span = ptx.select(valid, keys.length - keys.left, Int32(0))
        there = Tile(token, k_page, v_page, token - keys.left, span)
        page_token = token & (TOKENS_PER_PAGE - 1)
        wanted = mine & (tile < keys.end_tile)
        self.loads.ask(source, stage, there, page_token, wanted, thread.lane)
        return ahead._replace(live=live)

    def first_token(self, tile, thread):
        """Return the first token of the part of a tile that the warp's set takes."""
        return tile * self.layout.tile_tokens + thread.token_group * self.shape.tokens

    # --- the ring's reading end -------------------------------------------------------------------

    @cute.jit
    def attend(self, source, thread, keys, sight, state, q_frags, tile, ahead):
        """Take the CTA's tiles in turn."""
        seen = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        if const_expr(self.layout.takes_turns):
            self.give_first_turn(thread)
        while tile < keys.end_tile:
            token = self.first_token(tile, thread)
            valid = self.is_valid(ahead, seen)
            clear = self.is_clear(sight, token, valid)
            bits = masks.all_bits(self.shape.tokens)
            if not clear:
                bits = masks.visible_bits(sight, self.shape.tokens, token, valid, thread.lane)
            # Addresses before the wait, and the next slot before the product: 16 tokens, e4m3, 32/8
            # heads of 128, batch 1 of 4,096 tokens on an H200 11.3 us instead of 11.9.
            k_slot = self.k_half(source, stage)
            v_slot = self.v_half(source, stage)
            k_tile = k_slot
            v_tile = v_slot
            if const_expr(self.layout.converts):
                k_tile = self.converted_half(thread)
            self.loads.wait(source, stage, phase)
            if const_expr(self.layout.converts):
                self.convert(k_slot, k_tile, thread)
                self.loads.publish(source)
            self.mma.issue_scores(k_tile, thread.dim_slice, q_frags, state.scores, thread.lane)
            if const_expr(self.layout.converts):
                v_tile = k_tile + self.layout.tile.half_nbytes
                self.convert(v_slot, v_tile, thread)
            self.mma.await_scores(state.scores)
            if const_expr(self.layout.converts):
                ahead = self.ask_next(source, stage, phase, ahead, seen, tile, thread, keys)
            if const_expr(self.layout.exchanges):
                self.exchange_scores(state.scores, thread, seen & 1)
            if not clear:
                masks.hide(state.scores, self.shape.tokens, bits, Float32(HIDDEN), thread.lane)
            weights, corrections, moved = self.softmax(state, keys.scale)
            self.keep(state, weights)
            self.rescale(state, corrections, moved)
            if const_expr(self.layout.converts):
                self.loads.publish(source)
            if not clear:
                self.part_non_finite(source, v_tile, token, bits, thread, keys, state.acc)
            if const_expr(self.shape.overlap):
                tile, seen, stage, phase, ahead = self.overlap(
                    source, thread, keys, sight, state, q_frags, tile, seen, stage, phase, ahead
                )
                v_tile = self.v_half(source, stage)
            next_stage, next_phase = self.next_slot(stage, phase)
            self.mma.issue_accumulate(
                v_tile, thread.dim_slice, self.fragments(state), state.acc, thread.lane
            )
            self.mma.await_accumulate(state.acc, state.weights)
            if const_expr(not self.layout.converts):
                ahead = self.ask_next(source, stage, phase, ahead, seen, tile, thread, keys)
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
                self.v_half(source, stage), thread.dim_slice, self.fragments(state), state.acc,
                thread.lane,
            )  # fmt: skip
            if const_expr(self.layout.takes_turns):
                ptx.barrier_arrive(self.turn(thread) ^ 1, 32 * self.layout.warps)
            self.mma.await_scores(state.scores, pending=1)
            weights, corrections, moved = self.softmax(state, keys.scale)
            # ptxas would move the wait up, into the softmax; it keeps the order of this store,
            # which needs every weight, and of the wait. 32 query tokens of 32/8 heads, batch 32,
            # on an H200: 145 us instead of 158.
            self.hold(thread, state.row_sum[0] + state.row_sum[1])
            self.mma.await_accumulate(state.acc, state.weights)
            self.keep(state, weights)
            self.rescale(state, corrections, moved)
            ahead = self.ask_next(source, stage, phase, ahead, seen, tile, thread, keys)
            tile += keys.stride
            seen += 1
            stage = next_stage
            phase = next_phase
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

    # --- e4m3 to f16 ------------------------------------------------------------------------------

    def converted_half(self, thread):
        place = thread.token_group * self.layout.converted_nbytes
        return thread.smem + (self.layout.converted + place)

    def convert(self, raw, tile, thread):
        """Convert the warp's part of K or V.

        Eight lanes take rows r and r ^ 5 of eight, and 64 elements of each: their 16-byte loads,
        and then their stores, fall into different banks in both layouts.
        """
        source, target = self.slot, self.layout.tile
        lane = thread.lane
        chunk, row = lane & 3, (lane >> 3) ^ (((lane >> 2) & 1) * 5)
        per_block = source.block_chunks // 4  # of 64 elements
        loaded = []
        # All loads first: the compiler keeps them behind earlier stores.
        for block, group in self.conversions(thread):
            at = row + group * 8
            address = source.matrix_address(raw, at, chunk + 4 * (block & (per_block - 1)))
            address += (block >> log2(per_block)) * (source.rows * source.block_nbytes)
            loaded.append((block, at, ptx.ld_shared_u32x4(address)))
        for block, at, words in loaded:
            pairs = [pair for word in words for pair in ptx.e4m3x4_to_f16x2x2(word)]
            for i in range(2):
                into = target.matrix_address(tile, at, 2 * chunk + i)
                into += block * (target.rows * target.block_nbytes)
                ptx.st_shared_u32x4(into, pairs[4 * i : 4 * i + 4])

    def conversions(self, thread):
        """Yield the warp's (64-element block, group of eight rows)."""
        warps, groups = self.layout.group_warps, self.slot.rows // 8
        warp = thread.warp & (warps - 1)
        for first in range(0, groups * self.layout.tile.blocks, warps):
            if warps <= groups:
                yield first // groups, first % groups + warp
            else:
                yield first // groups + (warp >> log2(groups)), warp & (groups - 1)

    # --- scores and weights -----------------------------------------------------------------------

    def is_valid(self, ahead, seen):
        return (ahead.live >> (seen & 31)) & 1 != 0

    def is_clear(self, sight, token, valid):
        """Return whether every row of the CTA sees each of the tokens from ``token`` on."""
        return (token >= sight.clear) & (token + self.shape.tokens <= sight.first_query) & valid

    def is_clear_at(self, thread, keys, sight, tile, seen, ahead):
        token = self.first_token(tile, thread)
        clear = self.is_clear(sight, token, self.is_valid(ahead, seen))
        return cute.arch.vote_all_sync((tile < keys.end_tile) & clear)

    def exchange_scores(self, scores, thread, phase):
        """Add the partial scores of the warps that hold other dimensions of the same rows."""
        layout, split = self.layout, self.layout.dim_split
        area = thread.smem + layout.q + phase * (layout.warps * layout.exchange_nbytes)
        mine = area + thread.warp * layout.exchange_nbytes + thread.lane * 16
        tiles = range(self.shape.tokens // 8)
        for n in tiles:
            ptx.st_shared_f32x4(mine + 512 * n, [scores[4 * n + c] for c in range(4)])
        rows = thread.warp >> log2(split)
        # The first barriers are the rings'.
        ptx.barrier(rows + (self.shape.token_groups + 1), 32 * split)
        for n in tiles:
            total = [Float32(0.0)] * 4
            for w in range(split):
                theirs = area + (rows * split + w) * layout.exchange_nbytes + thread.lane * 16
                part = ptx.ld_shared_f32x4(theirs + 512 * n)
                total = [a + b for a, b in zip(total, part, strict=True)]
            for c in range(4):
                scores[4 * n + c] = total[c]

    def softmax(self, state, scale):
        """Return P, each row's correction of what was summed, and if any is not 1."""
        scores, count = state.scores, self.shape.tokens // 8
        weights, corrections = {}, []
        moved = None
        for half in range(2):
            places = [4 * n + 2 * half + c for n in range(count) for c in range(2)]
            tile_max = pairwise([scores[at] for at in places], cute.arch.fmax)
            tile_max = ptx.warp_reduce(tile_max, cute.arch.fmax, lane_masks=(2, 1))
            old = state.row_max[half]
            top = cute.arch.fmax(old, tile_max)
            rose = (top - old) * scale > Float32(SLACK)
            new = ptx.select(rose, top, old)
            base = ptx.select(new == Float32(HIDDEN), Float32(0.0), ptx.mul_rn(new, scale))
            correction = ptx.exp2(state.row_base[half] - base)
            # Nothing has been summed that 0 would lose, and the base may have come down from 0.
            correction = ptx.select(old == Float32(HIDDEN), Float32(0.0), correction)
            for at in places:
                weights[at] = ptx.exp2_scaled(scores[at], scale, -base)
            total = pairwise([weights[at] for at in places], ptx.add)
            state.row_max[half] = new
            state.row_base[half] = base
            state.row_sum[half] = state.row_sum[half] * correction + total
            corrections.append(correction)
            moved = rose if moved is None else moved | rose
        return weights, corrections, cute.arch.vote_any_sync(moved)

    def keep(self, state, weights):
        """Keep P: a C fragment of 16 tokens is an A fragment, of rows g, g + 8, and 8 tokens on."""
        for at in range(0, len(weights), 2):
            state.weights[at // 2] = ptx.pack_f16x2(weights[at], weights[at + 1])

    def fragments(self, state):
        count = self.shape.tokens // 16
        return [tuple(state.weights[4 * t + i] for i in range(4)) for t in range(count)]

    @cute.jit
    def rescale(self, state, corrections, moved):
        if moved:
            for i in range_constexpr(self.layout.dims // 2):
                state.acc[i] = state.acc[i] * corrections[(i >> 1) & 1]

    @cute.jit
    def part_non_finite(self, source, v_tile, token, bits, thread, keys, acc):
        """Add what of V is not finite to the rows that see it, and put 0 in its place.

        Of a key that is not visible P is 0, but 0 times NaN is NaN: it must not meet the MMA.
        """
        threads = 32 * self.layout.group_warps
        if ptx.barrier_any(source.barrier, threads, self.flaws(source, v_tile)) != 0:
            for at in cutlass.range(0, cutlass.min(keys.length - token, Int32(self.shape.tokens))):
                seen = [masks.bit(bits[0], at), masks.bit(bits[1], at)]
                self.mma.add_non_finite(v_tile, thread.dim_slice, at, seen, acc, thread.lane)
            self.loads.meet(source)
            self.clean(source, v_tile)
            self.loads.publish(source)

    def chunks(self, source, v_tile):
        """Return the addresses of a thread's part of V."""
        step = 16 * 32 * self.layout.group_warps
        first = v_tile + source.thread * 16
        return [first + at for at in range(0, self.layout.tile.half_nbytes, step)]

    def flaws(self, source, v_tile):
        """Return not 0 if a thread's part of V holds what is not finite."""
        flaws = Uint32(0)
        for address in self.chunks(source, v_tile):
            for word in ptx.ld_shared_u32x4(address):
                flaws = flaws | self.mma.encoding.flaws(word)
        return flaws

    def clean(self, source, v_tile):
        encoding = self.mma.encoding
        for address in self.chunks(source, v_tile):
            words = ptx.ld_shared_u32x4(address)
            words = [encoding.without(word, encoding.flaws(word)) for word in words]
            ptx.st_shared_u32x4(address, words)


def pairwise(values, combine):
    """Combine neighbours, then their results, and so on: short chains."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
