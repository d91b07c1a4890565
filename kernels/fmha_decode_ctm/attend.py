"""A CTA's way through its tiles, with skip-softmax or without."""

from typing import Any, NamedTuple

from cutlass import Boolean, Int32, const_expr, cute, range_constexpr

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.ring import KEYS, VALUES, AsyncCopy, TensorCopy, Tile
from kernels.common.schedule import TILES_PER_FETCH, Schedule
from kernels.fmha_decode_ctm.skip import SkipSoftmax
from kernels.fmha_decode_ctm.tile import TileMath

# Of one an SM. On an H200 at batch 1, 4,096 tokens: 32 CTAs of f16 d256 9.5 -> 9.1 us, of d512 11.7
# -> 11.2; but 64 of e4m3 d128, 65,536 tokens, 36 -> 53.
FEW_CTAS = 32


class Keys(NamedTuple):
    """What the loops need to know of a sequence."""

    table: Any  # its K page ids
    v_row_nbytes: Any  # from there to its V page ids
    max_pages: Any
    pool_pages: Any
    left: Any  # the first visible key
    length: Any
    end_tile: Any
    scale_log2: Any


class Pages(NamedTuple):
    """A tile of each lane, and its pages."""

    tile: Any
    k_ids: Any
    v_ids: Any


class Following(NamedTuple):
    """The tile that is asked for next."""

    index: Any  # among the CTA's tiles
    tile: Any
    ids: Any  # of K and V pages, one tile a lane


class Attend:
    """``halves_heads``: two CTAs may take half of a KV head's query heads each."""

    def __init__(self, layout, *, halves_heads: bool):
        self.layout, self.shape, self.slot = layout, layout.shape, layout.slot
        self.halves_heads = halves_heads
        copy = TensorCopy if self.shape.tensor_copy else AsyncCopy
        self.loads = copy(self.slot, apart=layout.asks_apart)
        self.math = TileMath(layout)
        self.schedule = Schedule(layout.tile_tokens, self.slot.rows)
        self.skip = SkipSoftmax(layout, halves=halves_heads)

    @cute.jit
    def attend(self, thread, keys, source, state, tile, stride, k_ids, v_ids):
        """Take up every ``stride``-th tile from ``tile`` on; a lane has the page ids of its own."""
        shape, parts = self.shape, self.loads.parts
        ahead = Int32(0)  # how many tiles have been asked for
        ahead_tile = tile
        live = Int32(0)  # bit i % 32: tile i's page ids are valid
        fetched = tile + TILES_PER_FETCH * stride
        next_k_ids, next_v_ids = self.fetch_pages(thread, keys, fetched + thread.lane * stride)
        for stage in range_constexpr(shape.stages):
            following = Following(ahead, ahead_tile, (k_ids, v_ids))
            for part in parts:
                live = self.ask_next(thread, keys, source, Int32(stage), following, part, live)
            ahead += 1
            ahead_tile += stride
        if const_expr(shape.cluster > 1):
            self.let_next_in()
        self.loads.await_others()
        cute.arch.sync_threads()
        q_frags = self.math.load_q(thread)

        seen = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        while tile < keys.end_tile:
            self.loads.wait(source, stage, phase)
            here = self.tile_of(thread, keys, tile, (live >> (seen & 31)) & 1 != 0)
            scores = None
            if const_expr(not shape.load_only):
                k_slot = self.slot.half(source.ring, stage, KEYS)
                scores = self.math.scores(thread, k_slot, q_frags, seen & 1)
            self.loads.release(source, stage)
            if (ahead & (TILES_PER_FETCH - 1)) == 0:
                k_ids = next_k_ids
                v_ids = next_v_ids
                fetched += TILES_PER_FETCH * stride
                next_k_ids, next_v_ids = self.fetch_pages(
                    thread, keys, fetched + thread.lane * stride
                )
            following = Following(ahead, ahead_tile, (k_ids, v_ids))
            live = self.ask_next(thread, keys, source, stage, following, parts[0], live)
            if const_expr(not shape.load_only):
                self.take_up(thread, keys, source, state, scores, here, stage, phase)
                self.loads.release(source, stage)
                self.ask_next(thread, keys, source, stage, following, parts[1], live)
            ahead += 1
            ahead_tile += stride
            tile += stride
            seen += 1
            stage += 1
            if stage == shape.stages:
                stage = Int32(0)
                phase = phase ^ 1

    def take_up(self, thread, keys, source, state, scores, tile, stage, phase):
        """Add a tile's weights and, when they are there, weighted values to the warp's state."""
        p_frags = self.math.softmax(state, scores, tile, keys.scale_log2, thread.lane)
        self.loads.wait(source, stage, phase, VALUES)
        self.loads.hide(source, stage, tile, thread.lane)
        v_slot = self.slot.half(source.ring, stage, VALUES)
        self.math.accumulate(v_slot, p_frags, state.acc, thread.lane)

    @cute.jit
    def let_next_in(self):
        """Let the next kernel's CTAs start where they find room beside this one's.

        Where they would not, they crowd onto the SMs that are idle now and stay there; and many
        CTAs gain nothing (docs/lost_experiments.md).
        """
        there_is_room = Boolean(self.layout.ctas_per_sm >= 2)
        if const_expr(self.layout.ctas_per_sm < 2):
            x, y, _ = cute.arch.grid_dim()
            there_is_room = x * y <= FEW_CTAS
        if there_is_room:
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def attend_kept(self, thread, keys, source, state, first_tile, index, stride, skip_scale,
                    dropped_address, other):  # fmt: skip
        """Do as ``attend`` where ``skip_scale`` is 0; else deal out units and drop pages."""
        skips = skip_scale > 0
        shift = ptx.select(skips, Int32(log2(self.skip.unit_tiles)), Int32(0))
        at_once = ptx.select(skips, Int32(self.skip.units), Int32(TILES_PER_FETCH))
        threshold = self.skip.threshold(skip_scale, keys.length)
        running = self.skip.no_maxima()
        ptx.cp_async_wait(0)  # q
        unit = (first_tile >> shift) + index
        next_pages = self.fetch_units(thread, keys, unit, stride, shift)
        stage = Int32(0)
        phase = Int32(0)
        while unit << shift < keys.end_tile:
            pages = next_pages
            next_pages = self.fetch_units(thread, keys, unit + at_once * stride, stride, shift)
            # q is there; later, all have read the scores that they exchanged.
            cute.arch.sync_threads()
            there = self.token(thread, pages.tile) < keys.length
            there = there & (thread.lane >> shift < at_once) & (pages.k_ids >= 0)
            tiles = cute.arch.vote_ballot_sync(there)
            if skips:
                maxima = self.skip.no_maxima()
                stage, phase = self.walk(
                    thread, keys, source, state, pages, tiles, stage, phase, maxima, other
                )
                self.loads.finish()  # tiles that nobody asked for arrive as zeros
                dropped = there & self.skip.dropped(
                    thread.smem, thread.warp, thread.lane, maxima, running, threshold, other.there
                )
                self.skip.count(dropped_address, dropped, thread.warp, thread.lane)
                tiles = tiles & ~cute.arch.vote_ballot_sync(dropped)
            stage, phase = self.walk(
                thread, keys, source, state, pages, tiles, stage, phase, None, other
            )
            unit += at_once * stride

    def fetch_units(self, thread, keys, unit, stride, shift):
        """Return the lanes' tiles, those of every ``stride``-th unit from ``unit`` on."""
        tile = (unit + (thread.lane >> shift) * stride) << shift
        tile += thread.lane & ((1 << shift) - 1)
        return Pages(tile, *self.fetch_pages(thread, keys, tile))

    @cute.jit
    def walk(self, thread, keys, source, state, pages, tiles, stage, phase, maxima, other):
        """Go through the ``tiles``, the lanes whose bits are set; return the next stage and phase.

        With ``maxima`` take up the maxima of their pages from the keys alone, without it all.
        """
        shape = self.shape
        q_frags = self.math.load_q(thread)
        ahead = tiles
        ahead_stage = stage
        for _ in range_constexpr(shape.stages):
            self.ask_first(thread, keys, source, ahead_stage, pages, ahead, KEYS)
            self.ask_values(thread, keys, source, ahead_stage, pages, ahead, maxima)
            ahead = ahead & (ahead - 1)
            ahead_stage += 1
            if ahead_stage == shape.stages:
                ahead_stage = Int32(0)
        parity = Int32(0)
        while tiles != 0:
            self.loads.wait(source, stage, phase)
            owner = self.first_bit(tiles)
            tile = cute.arch.shuffle_sync(pages.tile, owner)
            here = self.tile_of(thread, keys, tile, tiles != 0)
            k_slot = self.slot.half(source.ring, stage, KEYS)
            scores = self.math.scores(thread, k_slot, q_frags, parity)
            if const_expr(maxima is not None):
                self.skip.page_maxima(
                    scores, here, keys.scale_log2, owner >> log2(self.skip.unit_tiles), maxima,
                    thread.lane,
                )  # fmt: skip
                if const_expr(self.halves_heads):
                    self.other_maxima(thread, keys, k_slot, here, owner, maxima, parity ^ 1, other)
                    parity = parity ^ other.there  # two exchanges of scores
            self.loads.release(source, stage)
            self.ask_first(thread, keys, source, stage, pages, ahead, KEYS)
            if const_expr(maxima is None):
                self.take_up(thread, keys, source, state, scores, here, stage, phase)
                self.loads.release(source, stage)
            self.ask_values(thread, keys, source, stage, pages, ahead, maxima)
            ahead = ahead & (ahead - 1)
            tiles = tiles & (tiles - 1)
            parity = parity ^ 1
            stage += 1
            if stage == shape.stages:
                stage = Int32(0)
                phase = phase ^ 1
        return stage, phase

    @cute.jit
    def other_maxima(self, thread, keys, k_slot, tile, owner, maxima, parity, other):
        """Take up the maxima of the other half of the heads, from the same keys."""
        if other.there != 0:
            q_frags = self.math.load_other_q(thread, other)
            scores = self.math.scores(thread, k_slot, q_frags, parity)
            unit = owner >> log2(self.skip.unit_tiles)
            self.skip.page_maxima(
                scores, tile, keys.scale_log2, unit, maxima, thread.lane, self.shape.head_tiles
            )

    # --- the ring's two ends ----------------------------------------------------------------------

    def token(self, thread, tile):
        """Return the first of this warp's tokens of ``tile``."""
        return tile * self.layout.tile_tokens + thread.token_group * self.slot.rows

    def tile_of(self, thread, keys, tile, valid, pages=None):
        token = self.token(thread, tile)
        span = ptx.select(valid, keys.length - keys.left, Int32(0))
        return Tile(token, pages, token - keys.left, span)

    def fetch_pages(self, thread, keys, tile):
        return self.schedule.fetch_pages(
            keys.table, keys.v_row_nbytes, keys.max_pages, keys.pool_pages, thread.token_group, tile
        )

    def ask(self, thread, keys, source, stage, tile, valid, wanted, pages, halves):
        there = self.tile_of(thread, keys, tile, valid, pages)
        page_token = there.token & (TOKENS_PER_PAGE - 1)
        self.loads.ask(source, stage, there, page_token, wanted, halves)

    def ask_next(self, thread, keys, source, stage, following, part, live):
        """Ask for a part of this warp's tokens of a tile; return ``live`` with its bit."""
        index, tile, ids = following
        lane = index & (TILES_PER_FETCH - 1)
        pages = [cute.arch.shuffle_sync(ids[half], lane) for half in part]
        valid = pages[0] >= 0
        if KEYS in part:
            bit = index & 31
            live = (live & ~(Int32(1) << bit)) | (ptx.select(valid, Int32(1), Int32(0)) << bit)
        self.ask(thread, keys, source, stage, tile, valid, tile < keys.end_tile, pages, part)
        return live

    def ask_first(self, thread, keys, source, stage, pages, tiles, half):
        """Ask for a half of the tile of the first set bit, if there is one."""
        first = self.first_bit(tiles)
        tile = cute.arch.shuffle_sync(pages.tile, first)
        page = cute.arch.shuffle_sync((pages.k_ids, pages.v_ids)[half], first)
        wanted = tiles != 0
        self.ask(thread, keys, source, stage, tile, wanted, wanted, (page,), (half,))

    def ask_values(self, thread, keys, source, stage, pages, tiles, maxima):
        """Ask for the values of that tile; with ``maxima`` leave them out."""
        if maxima is None:
            self.ask_first(thread, keys, source, stage, pages, tiles, VALUES)
        else:
            self.loads.leave_out(source, stage, VALUES, tiles != 0)

    def first_bit(self, bits):
        return Int32(cute.arch.clz(cute.arch.brev(bits))) & 31
