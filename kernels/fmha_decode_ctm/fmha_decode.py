"""Single-token decode attention over a paged KV cache, partial results merged in the same launch.

out[b, h] = v_scale * softmax(scale * q[b, h] . K[b, h // ratio]) V[b, h // ratio]

The tokens of one (sequence, kv head) are dealt out in tiles to ``groups`` clusters of ``cluster``
CTAs. Inside a CTA each warp owns its tokens of a tile, its own ring of shared-memory slots and its
own running maximum, so no CTA barrier stands in the loop. K is the A operand (16 tokens), q the B
operand (8 heads): S^T = K q^T, O^T = V^T P^T, so a head's statistics sit on the lanes that hold its
accumulators. Partial results meet in three steps: the warps of a CTA in shared memory; the CTAs of
a cluster by pushing to the one that owns a slice of the dimensions; the groups of a sequence in the
workspace, where the last to arrive merges in the order of groups.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.experimental.cuda import TensorMap

from ctm_rt.decode.plan import HEADS_PER_TILE, max_gqa_ratio
from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import launch, ptx
from kernels.common.layout import log2
from kernels.common.merge import Cta, Groups, Merge, finite
from kernels.common.ring import AsyncCopy, TensorCopy, Tile
from kernels.common.schedule import TILES_PER_FETCH, Schedule
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.fmha_decode_ctm.layout import MMA_TOKENS, DecodeConfig, KernelLayout, KernelShape
from kernels.fmha_decode_ctm.skip import SkipSoftmax

# Of one an SM. On an H200 at batch 1, 4,096 tokens: 32 CTAs of f16 d256 9.5 -> 9.1 us, of d512 11.7
# -> 11.2; but 64 of e4m3 d128, 65,536 tokens, 36 -> 53.
FEW_CTAS = 32


def parameters(kv_dtype: str, head_dim: int):
    pool_axes = ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", head_dim)
    return (
        TensorParameter("q", "in", "f16", ("batch", "num_q_heads", head_dim)),
        TensorParameter("kv_pool", "in", kv_dtype, pool_axes),
        TensorParameter("page_table", "in", "i32", ("batch", 2, "max_pages"), alignment=4),
        TensorParameter("seq_lens", "in", "i32", ("batch",), alignment=4),
        TensorParameter("sinks", "in", "f32", ("num_q_heads",), alignment=4, optional=True),
        TensorParameter("skip_table", "in", "i32", ("skip_entries",), alignment=4, optional=True),
        # Counts what it dropped, (page, KV head) pairs: added to, never reset.
        TensorParameter("skip_dropped", "out", "i32", (1,), alignment=4, optional=True),
        TensorParameter("out", "out", "f16", ("batch", "num_q_heads", head_dim)),
        TensorParameter("workspace", "workspace", "f32", ("workspace_elems",)),
        TensorParameter("semaphores", "semaphore", "i32", ("semaphore_elems",), alignment=4),
        ScalarParameter("scale_log2", "f32"),  # scale * k_scale * log2(e)
        ScalarParameter("v_scale", "f32"),
        ScalarParameter("sliding_window", "i32"),  # 0: every key
        ScalarParameter("kernel", "i32"),  # which of the module's kernels
        ScalarParameter("num_groups", "i32"),
        ScalarParameter("spare_groups", "i32"),
        StreamParameter(),
    )


class Thread(NamedTuple):
    smem: Any
    warp: Any
    lane: Any
    token_group: Any


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


class OtherHalf(NamedTuple):
    """The query heads of the KV head that another CTA takes, if ``there`` is not 0."""

    there: Any
    q_address: Any  # of the first head's row
    head_nbytes: Any
    heads: Any


class State(NamedTuple):
    """A warp's partial result, in registers."""

    acc: Any  # [16-dimension tile][head tile][C register]
    row_max: Any  # [head tile][column]
    row_sum: Any


class FmhaDecode:
    """The exported entry: picks the kernel of the plan's cluster size and of the GQA ratio."""

    def __init__(self, config: DecodeConfig):
        self.kernels = [DecodeKernel(config, shape) for shape in config.kernels]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        sinks: cute.Tensor,
        skip_table: cute.Tensor,
        skip_dropped: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_scale: Float32,
        sliding_window: Int32,
        kernel: Int32,
        num_groups: Int32,
        spare_groups: Int32,
        stream: cuda.CUstream,
    ):
        for i in range_constexpr(len(self.kernels)):
            if kernel == i:
                self.kernels[i].launch(
                    q, kv_pool, page_table, seq_lens, sinks, skip_table, skip_dropped, out,
                    workspace, semaphores, scale_log2, v_scale, sliding_window, num_groups,
                    spare_groups, stream,
                )  # fmt: skip


class DecodeKernel:
    def __init__(self, config: DecodeConfig, shape: KernelShape):
        self.config, self.shape = config, shape
        self.layout = KernelLayout(config, shape)
        self.slot = self.layout.slot
        self.loads = (TensorCopy if shape.tensor_copy else AsyncCopy)(self.slot)
        self.merge = Merge(self.layout)
        self.schedule = Schedule(self.layout.tile_tokens, self.slot.rows)
        # Of more query heads per KV head than a CTA serves, two take half of them each.
        most = max_gqa_ratio(config.head_dim, config.kv_dtype == "e4m3", tree=False)
        self.halves_heads = self.layout.max_heads < most and not shape.load_only
        self.skip = SkipSoftmax(self.layout, halves=self.halves_heads)

        self.launch_options = launch.options(overlaps=config.has_clusters, cluster=shape.cluster)
        if shape.skips:  # else ptxas aims at more CTAs an SM, and spills up to 32 bytes
            self.launch_options["min_blocks_per_mp"] = 1

    def launch(
        self, q, kv_pool, page_table, seq_lens, sinks, skip_table, skip_dropped, out, workspace,
        semaphores, scale_log2, v_scale, sliding_window, num_groups, spare_groups, stream,
    ):  # fmt: skip
        num_kv_heads = kv_pool.shape[2]
        ratio = q.shape[1] // num_kv_heads
        shards = Int32(1)
        if self.halves_heads:
            shards = (ratio + (self.layout.max_heads - 1)) // self.layout.max_heads
        magic = ptx.magic(num_kv_heads * shards)
        kv_map = self.loads.map_pool(kv_pool, self.config.kv_nbytes, TOKENS_PER_PAGE)
        self.kernel(
            kv_map, q, kv_pool, page_table, seq_lens, sinks, out, workspace, semaphores, scale_log2,
            v_scale, sliding_window, num_groups, spare_groups, ratio, magic,
            *((skip_table, skip_dropped) if self.shape.skips else (None, None)),
        ).launch(
            # x alone may pass 65,535, and the batch may.
            grid=(
                (q.shape[0] + spare_groups) * num_kv_heads * shards * self.shape.cluster,
                num_groups,
                1,
            ),
            block=(self.layout.threads, 1, 1),
            smem=self.layout.smem_nbytes,
            stream=stream,
            **self.launch_options,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        kv_map: cutlass.GridConstant[TensorMap],
        q: cute.Tensor,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        sinks: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_scale: Float32,
        sliding_window: Int32,
        num_groups: Int32,
        spare_groups: Int32,
        ratio: Int32,
        magic: Uint32,
        skip_table: cute.Tensor | None,
        skip_dropped: cute.Tensor | None,
    ):
        config, shape = self.config, self.shape
        tid, _, _ = cute.arch.thread_idx()
        block, group, _ = cute.arch.block_idx()
        lane = tid & 31
        warp = cute.arch.make_warp_uniform(tid >> 5)
        smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        token_group = warp >> log2(self.layout.dim_split)
        rank = block & (shape.cluster - 1)
        pairs = kv_pool.shape[2]
        heads = ratio
        halved = Int32(0)
        if const_expr(self.halves_heads):
            halved = ptx.select(ratio > self.layout.max_heads, Int32(1), Int32(0))
            pairs = pairs << halved
        work, pair = ptx.divmod_by_magic(block >> log2(shape.cluster), pairs, magic)
        kv_head = pair
        q_head = pair * ratio
        half = ratio
        if const_expr(self.halves_heads):
            kv_head = pair >> halved
            half = (ratio + halved) >> halved
            q_head = kv_head * ratio + ptx.select(pair & halved != 0, half, Int32(0))
            heads = ptx.select(pair & halved != 0, ratio - half, half)
        if const_expr(shape.cluster > 1):
            if tid == 0:
                ptx.mbarrier_init(smem + self.layout.barrier)
                ptx.fence_mbarrier_init()
                pushed = self.layout.pushed_nbytes(heads)
                ptx.mbarrier_expect(smem + self.layout.barrier, pushed)
            ptx.cluster_arrive()
        source = self.loads.start(
            kv_pool, kv_map, config.kv_nbytes, kv_head, self.first_dim(warp),
            smem + warp * self.slot.ring_nbytes,
            smem + self.layout.ring_barriers + warp * self.layout.ring_barrier_nbytes, lane,
        )  # fmt: skip
        if const_expr(config.has_clusters):
            cute.arch.griddepcontrol_wait()  # whatever came before may have written our inputs

        # --- which tiles are this CTA's ---
        batch = q.shape[0]
        max_pages = page_table.shape[2]
        lengths = seq_lens.iterator.toint()
        sequence = work
        groups = num_groups
        first_work = work * num_groups
        if spare_groups > 0:
            sequence, group, groups = self.schedule.balance(
                lengths, batch, max_pages, sliding_window, spare_groups, work, lane
            )
            first_work = work - group
        # What the first KV load waits for is asked for at once: the length, the page ids (whose
        # place does not depend on the length unless there is a window) and q.
        left = Int32(0)
        if sliding_window > 0:
            left = ptx.ld_global_i32(lengths + Int64(sequence) * 4)
            left = self.schedule.clamp_length(left, max_pages) - sliding_window
            left = cutlass.max(left, Int32(0))
        first_tile = left >> log2(self.layout.tile_tokens)
        tile = first_tile + group * shape.cluster + rank
        stride = groups * shape.cluster
        table = page_table.iterator.toint() + Int64(sequence) * page_table.stride[0] * 4
        v_row_nbytes = Int64(page_table.stride[1]) * 4
        pool_pages = kv_pool.shape[0]
        k_ids, v_ids = self.schedule.fetch_pages(
            table, v_row_nbytes, max_pages, pool_pages, token_group, tile + lane * stride
        )
        self.ask_q(q, sequence, q_head, heads, smem, tid)
        length = self.schedule.clamp_length(
            ptx.ld_global_i32(lengths + Int64(sequence) * 4), max_pages
        )
        end_tile = (length + (self.layout.tile_tokens - 1)) >> log2(self.layout.tile_tokens)
        units = end_tile - first_tile
        skip_scale = Int32(0)
        if const_expr(shape.skips):
            skip_scale = self.skip.scale_of(skip_table, length, lane)
            if skip_scale > 0:
                units = self.skip.unit(end_tile - 1) + 1 - self.skip.unit(first_tile)
        # A group past the sequence's tiles has nothing to do and is not waited for. (Its tiles'
        # stride may stay: where groups are fewer than planned, no CTA has a second tile.)
        busy = (units + (shape.cluster - 1)) >> log2(shape.cluster)
        groups_used = cutlass.min(groups, cutlass.max(busy, Int32(1)))

        if group < groups_used:
            acc = cute.make_rmem_tensor((shape.head_tiles * self.layout.dims // 4,), Float32)
            row_max = cute.make_rmem_tensor((shape.head_tiles * 2,), Float32)
            row_sum = cute.make_rmem_tensor((shape.head_tiles * 2,), Float32)
            acc.fill(0.0)
            row_max.fill(ptx.NEG_INF)
            row_sum.fill(0.0)
            state = State(acc, row_max, row_sum)
            thread = Thread(smem, warp, lane, token_group)
            keys = Keys(
                table, v_row_nbytes, max_pages, pool_pages, left, length, end_tile, scale_log2
            )
            if const_expr(shape.skips):
                second = pair & halved
                other_head = kv_head * ratio + ptx.select(second != 0, Int32(0), half)
                other = OtherHalf(
                    halved,
                    q.iterator.toint()
                    + (Int64(sequence) * q.stride[0] + Int64(other_head) * q.stride[1]) * 2,
                    Int64(q.stride[1]) * 2,
                    ratio - heads,
                )
                # Of two halves, which drop the same, one counts.
                dropped = ptx.select(second == 0, skip_dropped.iterator.toint(), Int64(0))
                self.attend_kept(
                    thread, keys, source, state, first_tile, tile - first_tile, stride, skip_scale,
                    dropped, other,
                )  # fmt: skip
            else:
                self.attend(thread, keys, source, state, tile, stride, k_ids, v_ids)
            self.loads.finish()

            if const_expr(not shape.load_only):
                cta = Cta(
                    smem, tid, heads, rank, q_head, sinks.iterator.toint(), v_scale,
                    out.iterator.toint()
                    + (Int64(sequence) * out.stride[0] + Int64(q_head) * out.stride[1]) * 2,
                    Int64(out.stride[1]) * 2,
                )  # fmt: skip
                cute.arch.sync_threads()  # the rings are read; their memory becomes the merge's
                self.merge.store_warp(smem, warp, lane, acc, row_max, row_sum)
                cute.arch.sync_threads()
                if const_expr(shape.cluster > 1):
                    self.merge.exchange(cta)
                if groups_used == 1:
                    self.merge.parts_to_out(cta)
                else:
                    q_heads = q.shape[1]
                    partials = workspace.iterator.toint()
                    rows = (Int64(batch) * num_groups + spare_groups) * q_heads
                    meeting = Groups(
                        partials,
                        partials + rows * (config.head_dim * 4),
                        semaphores.iterator.toint()
                        + (Int64(sequence * pairs + pair) * shape.cluster + rank) * 4,
                        Int64(first_work) * q_heads + q_head,
                        group,
                        groups_used,
                        q_heads,
                    )
                    self.merge.meet(cta, meeting)
        else:
            if const_expr(shape.cluster > 1):
                ptx.cluster_wait()

    # --- start-up ---------------------------------------------------------------------------------

    def ask_q(self, q, sequence, q_head, heads, smem, tid):
        """Ask for the CTA's rows of q; rows past ``heads`` repeat the last."""
        row_chunks = self.config.head_dim // 8
        for i in range(-(-self.layout.max_heads * row_chunks // self.layout.threads)):
            index = tid + i * self.layout.threads
            row, chunk = index >> log2(row_chunks), index & (row_chunks - 1)
            if self.layout.max_heads * row_chunks < self.layout.threads:
                row = cutlass.min(row, Int32(self.layout.max_heads - 1))
            head = q_head + cutlass.min(row, heads - 1)
            source = (
                q.iterator.toint()
                + (Int64(sequence) * q.stride[0] + Int64(head) * q.stride[1] + Int64(chunk * 8)) * 2
            )
            into = smem + self.layout.q + row * self.layout.q_row_nbytes + chunk * 16
            ptx.cp_async_16(into, source, Int32(16))
        ptx.cp_async_commit()

    def load_q(self, thread):
        """Return this warp's dimensions of q as B fragments [head tile][k step]."""
        config, (smem, warp, lane, _) = self.config, thread
        first = smem + self.layout.q + (self.first_dim(warp)) * 2
        frags = []
        for n in range(self.shape.head_tiles):
            tile = first + n * (HEADS_PER_TILE * self.layout.q_row_nbytes)
            steps = []
            if config.kv_dtype == "e4m3":
                # Converted K words hold dimensions 4 * quad + (0, 1 | 2, 3) of a step.
                address = tile + (lane >> 2) * self.layout.q_row_nbytes + (lane & 3) * 8
                for k in range(self.layout.dims // 16):
                    steps.append(ptx.ld_shared_u32x2(address + 32 * k))
            else:
                address = tile + (lane & 7) * self.layout.q_row_nbytes + (lane >> 3) * 16
                for k in range(0, self.layout.dims // 16, 2):
                    words = ptx.ldmatrix_x4(address + 32 * k)
                    steps += [(words[0], words[1]), (words[2], words[3])]
            frags.append(steps)
        return frags

    def load_other_q(self, thread, other):
        """Return what ``load_q`` does, of the other half's heads, from global memory."""
        head = cutlass.min(thread.lane >> 2, other.heads - 1)
        quad = thread.lane & 3
        row = other.q_address + Int64(head) * other.head_nbytes
        row += Int64(self.first_dim(thread.warp) * 2)
        steps = [row + 32 * k for k in range(self.layout.dims // 16)]
        if self.config.kv_dtype == "e4m3":
            return [[ptx.ld_global_u32x2(step + Int64(quad * 8)) for step in steps]]
        pairs = [step + Int64(quad * 4) for step in steps]
        return [[(ptx.ld_global_u32(at), ptx.ld_global_u32(at + 16)) for at in pairs]]

    def first_dim(self, warp):
        return (warp & (self.layout.dim_split - 1)) * self.layout.dims

    # --- the loops --------------------------------------------------------------------------------

    @cute.jit
    def attend(self, thread, keys, source, state, tile, stride, k_ids, v_ids):
        """Take up every ``stride``-th tile from ``tile`` on; a lane has the page ids of its own."""
        shape = self.shape
        ahead = Int32(0)  # how many tiles have been asked for
        ahead_tile = tile
        live = Int32(0)  # bit i % 32: tile i's page ids are valid
        fetched = tile + TILES_PER_FETCH * stride
        next_k_ids, next_v_ids = self.fetch_pages(thread, keys, fetched + thread.lane * stride)
        for stage in range_constexpr(shape.stages):
            live = self.ask_next(
                thread, keys, source, Int32(stage), ahead, ahead_tile, k_ids, v_ids, live
            )
            ahead += 1
            ahead_tile += stride
        if const_expr(shape.cluster > 1):
            self.let_next_in()
        self.loads.await_others()
        cute.arch.sync_threads()
        q_frags = self.load_q(thread)

        seen = Int32(0)
        stage = Int32(0)
        phase = Int32(0)
        while tile < keys.end_tile:
            self.loads.wait(source, stage, phase)
            if const_expr(not shape.load_only):
                here = self.tile_of(thread, keys, tile, (live >> (seen & 31)) & 1 != 0)
                slot = source.ring + stage * self.slot.slot_nbytes
                scores = self.scores(thread, slot, q_frags, seen & 1)
                self.loads.hide(source, stage, here, thread.lane)
                self.take_up(thread, keys, state, slot, scores, here)
            cute.arch.sync_warp()  # every lane has read the slot
            if (ahead & (TILES_PER_FETCH - 1)) == 0:
                k_ids = next_k_ids
                v_ids = next_v_ids
                fetched += TILES_PER_FETCH * stride
                next_k_ids, next_v_ids = self.fetch_pages(
                    thread, keys, fetched + thread.lane * stride
                )
            live = self.ask_next(thread, keys, source, stage, ahead, ahead_tile, k_ids, v_ids, live)
            ahead += 1
            ahead_tile += stride
            tile += stride
            seen += 1
            stage += 1
            if stage == shape.stages:
                stage = Int32(0)
                phase = phase ^ 1

    @cute.jit
    def let_next_in(self):
        """Let the next kernel's CTAs start where they find room beside this one's.

        Where they would not, they crowd onto the SMs that are idle now and stay there; and many
        CTAs gain nothing (docs/lost_experiments.md).
        """
        there_is_room = Boolean(self.layout.lets_two_share_an_sm)
        if const_expr(not self.layout.lets_two_share_an_sm):
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
        q_frags = self.load_q(thread)
        ahead = tiles
        ahead_stage = stage
        for _ in range_constexpr(shape.stages):
            self.ask_first(thread, keys, source, ahead_stage, pages, ahead, maxima is None)
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
            slot = source.ring + stage * self.slot.slot_nbytes
            scores = self.scores(thread, slot, q_frags, parity)
            if const_expr(maxima is not None):
                self.skip.page_maxima(
                    scores, here, keys.scale_log2, owner >> log2(self.skip.unit_tiles), maxima,
                    thread.lane,
                )  # fmt: skip
                if const_expr(self.halves_heads):
                    self.other_maxima(thread, keys, slot, here, owner, maxima, parity ^ 1, other)
                    parity = parity ^ other.there  # two exchanges of scores
            else:
                self.loads.hide(source, stage, here, thread.lane)
                self.take_up(thread, keys, state, slot, scores, here)
            cute.arch.sync_warp()  # every lane has read the slot
            self.ask_first(thread, keys, source, stage, pages, ahead, maxima is None)
            ahead = ahead & (ahead - 1)
            tiles = tiles & (tiles - 1)
            parity = parity ^ 1
            stage += 1
            if stage == shape.stages:
                stage = Int32(0)
                phase = phase ^ 1
        return stage, phase

    @cute.jit
    def other_maxima(self, thread, keys, slot, tile, owner, maxima, parity, other):
        """Take up the maxima of the other half of the heads, from the same keys."""
        if other.there != 0:
            scores = self.scores(thread, slot, self.load_other_q(thread, other), parity)
            unit = owner >> log2(self.skip.unit_tiles)
            self.skip.page_maxima(
                scores, tile, keys.scale_log2, unit, maxima, thread.lane, self.shape.head_tiles
            )

    # --- the ring's two ends ----------------------------------------------------------------------

    def token(self, thread, tile):
        """Return the first of this warp's tokens of ``tile``."""
        return tile * self.layout.tile_tokens + thread.token_group * self.slot.rows

    def tile_of(self, thread, keys, tile, valid, k_page=None, v_page=None):
        token = self.token(thread, tile)
        span = ptx.select(valid, keys.length - keys.left, Int32(0))
        return Tile(token, k_page, v_page, token - keys.left, span)

    def fetch_pages(self, thread, keys, tile):
        return self.schedule.fetch_pages(
            keys.table, keys.v_row_nbytes, keys.max_pages, keys.pool_pages, thread.token_group, tile
        )

    def ask(self, thread, keys, source, stage, tile, valid, wanted, k_page, v_page, with_values):
        there = self.tile_of(thread, keys, tile, valid, k_page, v_page)
        page_token = there.token & (TOKENS_PER_PAGE - 1)
        self.loads.ask(source, stage, there, page_token, wanted, thread.lane, with_values)

    def ask_next(self, thread, keys, source, stage, index, tile, k_ids, v_ids, live):
        """Ask for this warp's tokens of ``tile``; return ``live`` with its bit."""
        k_page = cute.arch.shuffle_sync(k_ids, index & (TILES_PER_FETCH - 1))
        v_page = cute.arch.shuffle_sync(v_ids, index & (TILES_PER_FETCH - 1))
        valid = k_page >= 0
        bit = index & 31
        live = (live & ~(Int32(1) << bit)) | (ptx.select(valid, Int32(1), Int32(0)) << bit)
        self.ask(
            thread, keys, source, stage, tile, valid, tile < keys.end_tile, k_page, v_page, True
        )
        return live

    def ask_first(self, thread, keys, source, stage, pages, tiles, with_values):
        """Ask for the tile of the first set bit, if there is one."""
        tile, k_page, v_page = (cute.arch.shuffle_sync(ids, self.first_bit(tiles)) for ids in pages)
        wanted = tiles != 0
        self.ask(thread, keys, source, stage, tile, wanted, wanted, k_page, v_page, with_values)

    def first_bit(self, bits):
        return Int32(cute.arch.clz(cute.arch.brev(bits))) & 31

    def take_up(self, thread, keys, state, slot, scores, tile):
        """Add a tile's weights and weighted values to the warp's state."""
        p_frags, corrections, moved = self.softmax(
            scores, tile, keys.scale_log2, state.row_max, state.row_sum, thread.lane
        )
        self.correct(state.acc, corrections, moved)
        self.accumulate(slot + self.slot.half_nbytes, p_frags, state.acc, thread.lane)

    @cute.jit
    def correct(self, acc, corrections, moved):
        if moved:
            for i in range_constexpr(self.shape.head_tiles * self.layout.dims // 4):
                acc[i] = acc[i] * corrections[(i >> 2) % self.shape.head_tiles][i & 1]

    def scores(self, thread, slot, q_frags, phase):
        scores = self.warp_scores(slot, q_frags, thread.lane)
        if self.layout.dim_split > 1:
            scores = self.exchange_scores(scores, thread.smem, thread.warp, thread.lane, phase)
        return scores

    def warp_scores(self, slot, q_frags, lane):
        """Return S^T = K q^T: C fragments [token tile][head tile] of (16 tokens, 8 heads)."""
        slots = self.slot
        base = slots.matrix_address(slot, lane & 15, lane >> 4)
        fragments = []
        for t in range(self.shape.token_tiles):
            address = base + t * (MMA_TOKENS * slots.block_nbytes)
            # Two chains of accumulators: an MMA need not wait for the one before it.
            chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in q_frags]
            for pair in range(slots.row_nbytes // 32):
                words = ptx.ldmatrix_x4(slots.chunk_pair(address, pair))
                for k, a in self.k_operands(pair, words):
                    for chain, frags in zip(chains, q_frags, strict=True):
                        chain[k % 2] = ptx.mma_m16n8k16(a, frags[k], chain[k % 2])
            fragments.append(
                [[even + odd for even, odd in zip(*pair, strict=True)] for pair in chains]
            )
        return fragments

    def k_operands(self, pair, words):
        """Return [(k step, A registers)] of two 16-byte chunks of K."""
        if self.config.kv_dtype != "e4m3":
            return [(pair, words)]
        steps = []
        for i in (0, 1):
            top, bottom = (ptx.e4m3x4_to_f16x2x2(word) for word in words[2 * i : 2 * i + 2])
            steps.append((2 * pair + i, (top[0], bottom[0], top[1], bottom[1])))
        return steps

    def exchange_scores(self, scores, smem, warp, lane, phase):
        """Add the partial scores of the warps that hold other dimensions of the same tokens."""
        split, threads = self.layout.dim_split, 32 * self.layout.dim_split
        area = (
            smem + self.layout.exchange + phase * (self.shape.warps * self.layout.exchange_nbytes)
        )
        mine = area + warp * self.layout.exchange_nbytes + lane * 16
        count = 0
        for tile in scores:
            for values in tile:
                ptx.st_shared_f32x4(mine + 512 * count, values)
                count += 1
        token_group = warp >> log2(split)
        ptx.barrier(token_group + 1, threads)
        sums = []
        for i in range(count):
            total = [Float32(0.0)] * 4
            for w in range(split):
                theirs = area + (token_group * split + w) * self.layout.exchange_nbytes + lane * 16
                part = ptx.ld_shared_f32x4(theirs + 512 * i)
                total = [a + b for a, b in zip(total, part, strict=True)]
            sums.append(total)
        heads = self.shape.head_tiles
        return [sums[i : i + heads] for i in range(0, count, heads)]

    def softmax(self, scores, tile, scale_log2, row_max, row_sum, lane):
        """Return P^T as B fragments [head tile][token tile], corrections, and if any is not 1."""
        first = tile.first + (lane >> 2)
        minus_inf = Float32(ptx.NEG_INF)
        visible = [
            Uint32(first + 8 * i) < Uint32(tile.span) for i in range(2 * self.shape.token_tiles)
        ]
        p_frags, corrections = [], []
        moved = None
        for n in range(self.shape.head_tiles):
            columns = []
            for c in range(2):
                x = [
                    ptx.select(
                        visible[i], scores[i // 2][n][2 * (i % 2) + c] * scale_log2, minus_inf
                    )
                    for i in range(2 * self.shape.token_tiles)
                ]
                tile_max = x[0]
                for value in x[1:]:
                    tile_max = cute.arch.fmax(tile_max, value)
                tile_max = ptx.warp_reduce(tile_max, cute.arch.fmax, lane_masks=(16, 8, 4))
                old = row_max[2 * n + c]
                new = cute.arch.fmax(old, tile_max)
                base = finite(new)
                correction = ptx.exp2(old - base)
                p = [ptx.exp2(value - base) for value in x]
                total = p[0]
                for value in p[1:]:
                    total = total + value
                row_max[2 * n + c] = new
                row_sum[2 * n + c] = row_sum[2 * n + c] * correction + total
                columns.append((p, correction))
                rose = new > old
                moved = rose if moved is None else moved | rose
            p_frags.append(
                [
                    tuple(
                        ptx.movmatrix_trans(
                            ptx.pack_f16x2(columns[0][0][2 * t + half], columns[1][0][2 * t + half])
                        )
                        for half in (0, 1)
                    )
                    for t in range(self.shape.token_tiles)
                ]
            )
            corrections.append([columns[0][1], columns[1][1]])
        return p_frags, corrections, cute.arch.vote_any_sync(moved)

    def accumulate(self, v_slot, p_frags, acc, lane):
        """Add V^T P^T; ``acc`` is [16-dimension tile][head tile][C register]."""
        slots = self.slot
        if self.config.kv_dtype == "e4m3":  # two 16-dimension chunks, both token halves
            base = slots.matrix_address(v_slot, lane & 15, lane >> 4)
        else:  # one 16-dimension tile: two chunks, both token halves
            row = (lane & 7) + ((lane >> 4) << 3)
            base = slots.matrix_address(v_slot, row, (lane >> 3) & 1)
        for pair in range(slots.row_nbytes // 32):
            for t in range(self.shape.token_tiles):
                address = base + t * (MMA_TOKENS * slots.block_nbytes)
                words = ptx.ldmatrix_x4(slots.chunk_pair(address, pair), transpose=True)
                for m, a in self.v_operands(pair, words):
                    for n in range(self.shape.head_tiles):
                        at = (m * self.shape.head_tiles + n) * 4
                        result = ptx.mma_m16n8k16(a, p_frags[n][t], [acc[at + c] for c in range(4)])
                        for c in range(4):
                            acc[at + c] = result[c]

    def v_operands(self, pair, words):
        """Return [(16-dimension tile, A registers)] of two transposed 16-byte chunks of V."""
        if self.config.kv_dtype != "e4m3":
            return [(pair, words)]
        tiles = []
        for i in (0, 1):
            # A transposed word holds (token, token + 1) x (dim 2g, 2g + 1): bring the two tokens
            # of a dimension together, so MMA rows g and g + 8 are dimensions 2g and 2g + 1.
            first, second = (
                ptx.e4m3x4_to_f16x2x2(ptx.byte_permute(word, 0x3120))
                for word in words[2 * i : 2 * i + 2]
            )
            tiles.append((2 * pair + i, (first[0], first[1], second[0], second[1])))
        return tiles
