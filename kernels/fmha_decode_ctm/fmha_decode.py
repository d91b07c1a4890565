"""Single-token decode attention over a paged KV cache, partial results merged in the same launch.

out[b, h] = v_scale * softmax(scale * q[b, h] . K[b, h // ratio]) V[b, h // ratio]

The tokens of one (sequence, kv head) are dealt out in tiles to ``groups`` clusters of ``cluster``
CTAs. Inside a CTA each warp owns its tokens of a tile, its own ring of shared-memory slots and its
own running maximum, so no CTA barrier stands in the loop. Partial results meet in three steps: the
warps of a CTA in shared memory; the CTAs of a cluster by pushing to the one that owns a slice of
the dimensions; the groups of a sequence in the workspace, where the last to arrive merges in the
order of groups.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.experimental.cuda import TensorMap

from ctm_rt.decode.plan import max_gqa_ratio
from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import launch, ptx
from kernels.common.layout import log2
from kernels.common.merge import Cta, Groups, Merge
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.fmha_decode_ctm.attend import Attend, Keys
from kernels.fmha_decode_ctm.layout import DecodeConfig, KernelLayout, KernelShape
from kernels.fmha_decode_ctm.tile import OtherHalf, Thread


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
        self.merge = Merge(self.layout)
        # Of more query heads per KV head than a CTA serves, two take half of them each.
        most = max_gqa_ratio(config.head_dim, config.kv_dtype == "e4m3", tree=False)
        self.halves_heads = self.layout.max_heads < most and not shape.load_only
        self.attend = Attend(self.layout, halves_heads=self.halves_heads)

        self.launch_options = launch.options(
            overlaps=config.has_clusters,
            cluster=shape.cluster,
            # Those that skip have more to hold, and would spill up to 104 bytes.
            ctas_per_sm=1 if shape.skips else self.layout.ctas_per_sm,
        )

    def launch(
        self, q, kv_pool, page_table, seq_lens, sinks, skip_table, skip_dropped, out, workspace,
        semaphores, scale_log2, v_scale, sliding_window, num_groups, spare_groups, stream,
    ):  # fmt: skip
        num_kv_heads = kv_pool.shape[2]
        ratio = q.shape[1] // num_kv_heads
        shards = Int32(1)
        if self.halves_heads:
            shards = (ratio + (self.layout.max_heads - 1)) // self.layout.max_heads
        alone = self.shape.cluster == 1  # only then there are spare groups
        works = q.shape[0] + spare_groups if alone else q.shape[0]
        magic = ptx.magic(num_kv_heads * shards if alone else works)
        kv_map = self.attend.loads.map_pool(kv_pool, self.config.kv_nbytes, TOKENS_PER_PAGE)
        self.kernel(
            kv_map, q, kv_pool, page_table, seq_lens, sinks, out, workspace, semaphores, scale_log2,
            v_scale, sliding_window, num_groups, spare_groups, ratio, magic,
            *((skip_table, skip_dropped) if self.shape.skips else (None, None)),
        ).launch(
            # x alone may pass 65,535, and the batch may.
            grid=(works * num_kv_heads * shards * self.shape.cluster, num_groups, 1),
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
        if const_expr(shape.cluster == 1):
            work, pair = ptx.divmod_by_magic(block, pairs, magic)
        else:
            # Clusters are dealt to the GPCs in turn, so that the heads of a sequence, a batch apart
            # and not side by side, meet on fewer of them, which then read fewer pages at a time:
            # batch 8 of 4,096 tokens, 32/8 f16 heads of 32, on an H200 11.5 us instead of 12.4.
            pair, work = ptx.divmod_by_magic(block >> log2(shape.cluster), q.shape[0], magic)
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
            ptx.cluster_arrive()
        source = self.attend.loads.start(
            kv_pool, kv_map, config.kv_nbytes, kv_head, self.attend.math.first_dim(warp),
            smem + warp * self.layout.slot.ring_nbytes,
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
        if const_expr(shape.cluster == 1):  # noqa: SIM102 - known when it is compiled
            if spare_groups > 0:
                sequence, group, groups = self.attend.schedule.balance(
                    lengths, batch, max_pages, sliding_window, spare_groups, work, lane
                )
                first_work = work - group
        # What the first KV load waits for is asked for at once: the length, the page ids (whose
        # place does not depend on the length unless there is a window) and q.
        left = Int32(0)
        if sliding_window > 0:
            left = ptx.ld_global_i32(lengths + Int64(sequence) * 4)
            left = self.attend.schedule.clamp_length(left, max_pages) - sliding_window
            left = cutlass.max(left, Int32(0))
        first_tile = left >> log2(self.layout.tile_tokens)
        tile = first_tile + group * shape.cluster + rank
        stride = groups * shape.cluster
        table = page_table.iterator.toint() + Int64(sequence) * page_table.stride[0] * 4
        v_row_nbytes = Int64(page_table.stride[1]) * 4
        pool_pages = kv_pool.shape[0]
        k_ids, v_ids = self.attend.schedule.fetch_pages(
            table, v_row_nbytes, max_pages, pool_pages, token_group, tile + lane * stride
        )
        self.ask_q(q, sequence, q_head, heads, smem, tid)
        length = self.attend.schedule.clamp_length(
            ptx.ld_global_i32(lengths + Int64(sequence) * 4), max_pages
        )
        end_tile = (length + (self.layout.tile_tokens - 1)) >> log2(self.layout.tile_tokens)
        units = end_tile - first_tile
        skip_scale = Int32(0)
        if const_expr(shape.skips):
            skip_scale = self.attend.skip.scale_of(skip_table, length, lane)
            if skip_scale > 0:
                units = self.attend.skip.unit(end_tile - 1) + 1 - self.attend.skip.unit(first_tile)
        # A group past the sequence's tiles has nothing to do and is not waited for. (Its tiles'
        # stride may stay: where groups are fewer than planned, no CTA has a second tile.)
        busy = (units + (shape.cluster - 1)) >> log2(shape.cluster)
        groups_used = cutlass.min(groups, cutlass.max(busy, Int32(1)))

        if group < groups_used:
            state = self.attend.math.state()
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
                self.attend.attend_kept(
                    thread, keys, source, state, first_tile, tile - first_tile, stride, skip_scale,
                    dropped, other,
                )  # fmt: skip
            else:
                self.attend.attend(thread, keys, source, state, tile, stride, k_ids, v_ids)
            self.attend.loads.finish()

            if const_expr(not shape.load_only):
                cta = Cta(
                    smem, tid, heads, rank, q_head, sinks.iterator.toint(), v_scale,
                    out.iterator.toint()
                    + (Int64(sequence) * out.stride[0] + Int64(q_head) * out.stride[1]) * 2,
                    Int64(out.stride[1]) * 2,
                )  # fmt: skip
                cute.arch.sync_threads()  # the rings are read; their memory becomes the merge's
                self.merge.store_warp(smem, warp, lane, *state)
                cute.arch.sync_threads()
                if const_expr(shape.cluster > 1):
                    self.merge.exchange(cta, self.layout.pushed_nbytes(heads))
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
