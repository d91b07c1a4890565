"""Decode attention of a tree of query tokens over a paged KV cache, merged in the same launch.

out[b, i, h] = v_scale * softmax(scale * q[b, i, h] . K[b, h // ratio]) V[b, h // ratio]

over the keys that token i sees: all before the tree, and of the tree those of its row of the mask.

Of one (sequence, KV head), the (token, query head) pairs are the rows of a matrix and a CTA takes a
block of them, so K and V are read once for up to 128 rows. Tokens are dealt out and partial results
meet as in single-token decode (kernels/fmha_decode_ctm). Inside a CTA a set of warps shares a ring
of slots, each warp with 16 rows; a second set takes the other half of a tile's tokens.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr
from cutlass.experimental.cuda import TensorMap

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import launch, ptx
from kernels.common.layout import log2
from kernels.common.merge import Groups
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.fmha_decode_tree import masks
from kernels.fmha_decode_tree.attend import Attend, Keys
from kernels.fmha_decode_tree.layout import (
    MAX_DIMS_PER_WARPGROUP,
    MMA_ROWS,
    TreeConfig,
    TreeLayout,
    TreeShape,
)
from kernels.fmha_decode_tree.masks import Edges, Sight
from kernels.fmha_decode_tree.merge import Rows, TreeCta, TreeMerge
from kernels.fmha_decode_tree.tile import LEAST_SCALE, Thread


def parameters(kv_dtype: str, head_dim: int):
    pool_axes = ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", head_dim)
    q_axes = ("batch", "query_len", "num_q_heads", head_dim)
    mask_axes = ("batch", "query_len", "mask_words")
    return (
        TensorParameter("q", "in", "f16", q_axes),
        TensorParameter("kv_pool", "in", kv_dtype, pool_axes),
        TensorParameter("page_table", "in", "i32", ("batch", 2, "max_pages"), alignment=4),
        TensorParameter("seq_lens", "in", "i32", ("batch",), alignment=4),
        TensorParameter("tree_mask", "in", "i32", mask_axes, alignment=4),
        TensorParameter("sinks", "in", "f32", ("num_q_heads",), alignment=4, optional=True),
        TensorParameter("out", "out", "f16", q_axes),
        TensorParameter("workspace", "workspace", "f32", ("workspace_elems",)),
        TensorParameter("semaphores", "semaphore", "i32", ("semaphore_elems",), alignment=4),
        ScalarParameter("scale_log2", "f32"),  # scale * k_scale * log2(e)
        ScalarParameter("v_scale", "f32"),
        ScalarParameter("sliding_window", "i32"),  # 0: every key
        ScalarParameter("contiguous_query_swa", "i32"),  # not 0: a window for each row
        ScalarParameter("kernel", "i32"),  # which of the module's kernels
        ScalarParameter("num_groups", "i32"),
        ScalarParameter("spare_groups", "i32"),
        StreamParameter(),
    )


class FmhaDecodeTree:
    """The exported entry: runs the kernel that the plan has chosen."""

    def __init__(self, config: TreeConfig):
        self.kernels = [TreeKernel(config, shape) for shape in config.kernels]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        tree_mask: cute.Tensor,
        sinks: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_scale: Float32,
        sliding_window: Int32,
        contiguous_query_swa: Int32,
        kernel: Int32,
        num_groups: Int32,
        spare_groups: Int32,
        stream: cuda.CUstream,
    ):
        for i in range_constexpr(len(self.kernels)):
            if kernel == i:
                self.kernels[i].launch(
                    q, kv_pool, page_table, seq_lens, tree_mask, sinks, out, workspace, semaphores,
                    scale_log2, v_scale, sliding_window, contiguous_query_swa, num_groups,
                    spare_groups, stream,
                )  # fmt: skip


class TreeKernel:
    def __init__(self, config: TreeConfig, shape: TreeShape):
        self.config, self.shape = config, shape
        self.layout = TreeLayout(config, shape)
        self.attend = Attend(self.layout)
        self.merge = TreeMerge(self.layout)

        # 256 dimensions a warpgroup take every register as it is: told so, ptxas spills.
        full = self.layout.dims >= MAX_DIMS_PER_WARPGROUP
        self.launch_options = launch.options(
            overlaps=config.has_clusters,
            cluster=shape.cluster,
            ctas_per_sm=0 if full else self.layout.ctas_per_sm,
        )

    def launch(
        self, q, kv_pool, page_table, seq_lens, tree_mask, sinks, out, workspace, semaphores,
        scale_log2, v_scale, sliding_window, contiguous_query_swa, num_groups, spare_groups, stream,
    ):  # fmt: skip
        num_kv_heads = kv_pool.shape[2]
        ratio = q.shape[2] // num_kv_heads
        blocks = (q.shape[1] * ratio + (self.layout.rows - 1)) // self.layout.rows
        magics = [ptx.magic(n) for n in (num_kv_heads * blocks, blocks, ratio)]
        kv_map = self.attend.loads.map_pool(kv_pool, self.config.kv_nbytes, TOKENS_PER_PAGE)
        self.kernel(
            kv_map, q, kv_pool, page_table, seq_lens, tree_mask, sinks, out, workspace, semaphores,
            scale_log2, v_scale, sliding_window, contiguous_query_swa, num_groups, spare_groups,
            ratio, blocks, *magics,
        ).launch(
            # x alone may pass 65,535, and the batch may.
            grid=(
                (q.shape[0] + spare_groups) * num_kv_heads * blocks * self.shape.cluster,
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
        tree_mask: cute.Tensor,
        sinks: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        semaphores: cute.Tensor,
        scale_log2: Float32,
        v_scale: Float32,
        sliding_window: Int32,
        contiguous_query_swa: Int32,
        num_groups: Int32,
        spare_groups: Int32,
        ratio: Int32,
        blocks: Int32,
        units_magic: Uint32,
        blocks_magic: Uint32,
        ratio_magic: Uint32,
    ):
        config, shape, layout = self.config, self.shape, self.layout
        tid, _, _ = cute.arch.thread_idx()
        cta_index, group, _ = cute.arch.block_idx()
        lane = tid & 31
        warp = cute.arch.make_warp_uniform(tid >> 5)
        smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()
        token_group = warp >> log2(layout.group_warps)
        if const_expr(layout.keeps_addresses):
            smem = cute.arch.make_warp_uniform(smem)
            token_group = token_group if shape.token_groups > 1 else Int32(0)
        thread = Thread(smem, warp, lane, token_group, *self.row_and_slice(warp))

        rank = Int32(0)
        if const_expr(shape.cluster > 1):
            cta_index, _, _ = cute.arch.cluster_idx()
            rank = cute.arch.block_idx_in_cluster()
        num_kv_heads = kv_pool.shape[2]
        work, unit = ptx.divmod_by_magic(cta_index, num_kv_heads * blocks, units_magic)
        kv_head, block = ptx.divmod_by_magic(unit, blocks, blocks_magic)
        query_len = q.shape[1]
        first_row = block * layout.rows
        rows = Rows(
            first_row,
            cutlass.min(query_len * ratio - first_row, Int32(layout.rows)),
            ratio,
            ratio_magic,
        )
        if const_expr(shape.cluster > 1):
            ptx.mbarrier_init(smem + layout.barrier, tid == 0)
            ptx.fence_mbarrier_init()
        source = self.attend.loads.start(
            kv_pool, kv_map, config.kv_nbytes, kv_head,
            smem + thread.token_group * layout.slot.ring_nbytes,
            smem + layout.ring_barriers + thread.token_group * layout.ring_barrier_nbytes,
            thread.token_group, tid & (32 * layout.group_warps - 1),
        )  # fmt: skip
        if const_expr(config.has_clusters):
            cute.arch.griddepcontrol_wait()  # whatever came before may have written our inputs

        # --- which tiles are this CTA's ---
        batch = q.shape[0]
        max_pages = page_table.shape[2]
        lengths = seq_lens.iterator.toint()
        window = cutlass.min(sliding_window, max_pages * TOKENS_PER_PAGE)
        edges = Edges(query_len, window, contiguous_query_swa != 0)
        sequence = work
        groups = num_groups
        first_work = work * num_groups
        # No plan has spare groups for clusters. Without this branch in theirs ptxas takes uniform
        # registers for what comes before the loop, and others for the addresses in it: f16 heads of
        # 64, 128 tokens, batch 1 16.5 us on an H200 instead of 14.3.
        if spare_groups > 0:
            sequence, group, groups = self.attend.schedule.balance(
                lengths, batch, max_pages, edges.widest(), spare_groups, work, lane
            )
            first_work = work - group
        # What the first KV load waits for is asked for at once: the length, the page ids (whose
        # place does not depend on the length unless there is a window), q and the mask.
        first_token, _ = rows.token_and_head(Int32(0))
        last_token, _ = rows.token_and_head(rows.count - 1)
        left = Int32(0)
        if sliding_window > 0:
            left = ptx.ld_global_i32(lengths + Int64(sequence) * 4)
            left = edges.left(self.attend.schedule.clamp_length(left, max_pages), first_token)
        first_tile = left >> log2(layout.tile_tokens)
        tile = first_tile + group * shape.cluster + rank
        stride = groups * shape.cluster
        table = page_table.iterator.toint() + Int64(sequence) * page_table.stride[0] * 4
        v_row_nbytes = Int64(page_table.stride[1]) * 4
        pool_pages = kv_pool.shape[0]
        k_ids, v_ids = self.attend.schedule.fetch_pages(
            table, v_row_nbytes, max_pages, pool_pages, thread.token_group, tile + lane * stride
        )
        self.ask_q(q, sequence, kv_head * ratio, rows, smem, tid)
        my_row = thread.row + (lane >> 2)
        my_tokens = [
            rows.token_and_head(cutlass.min(my_row + 8 * i, rows.count - 1))[0] for i in range(2)
        ]
        words = masks.load_words(tree_mask, sequence, my_tokens, query_len, lane)
        length = self.attend.schedule.clamp_length(
            ptx.ld_global_i32(lengths + Int64(sequence) * 4), max_pages
        )
        end_tile = (length + (layout.tile_tokens - 1)) >> log2(layout.tile_tokens)
        # A group past the sequence's tiles has nothing to do and is not waited for. (Its tiles'
        # stride may stay: where groups are fewer than planned, no CTA has a second tile.)
        busy = (end_tile - first_tile + (shape.cluster - 1)) // shape.cluster
        groups_used = cutlass.min(groups, cutlass.max(busy, Int32(1)))

        if group < groups_used:
            # The maximum is taken before scaling, so the scale's sign goes into q.
            flip = ptx.select(scale_log2 < 0.0, Uint32(0x80008000), Uint32(0))
            scale = cute.arch.fmax(cute.arch.fmax(scale_log2, -scale_log2), Float32(LEAST_SCALE))
            keys = Keys(
                table, v_row_nbytes, max_pages, pool_pages, left, length, end_tile, stride, scale,
            )  # fmt: skip
            state = self.attend.math.state()
            ahead = self.attend.fill(source, thread, keys, tile, k_ids, v_ids)
            if const_expr(shape.cluster > 1):
                self.let_next_in(blocks)
            sight = Sight(
                masks.clear_words(words, query_len, lane),
                tuple(edges.left(length, token) for token in my_tokens),
                length - query_len,
                edges.left(length, last_token),
            )
            self.attend.loads.await_others()
            cute.arch.sync_threads()
            q_frags = self.attend.mma.load_q(smem + layout.q, thread.row, thread.dim_slice, lane)
            if const_expr(layout.q_stays):
                self.flip_q(flip, smem, tid)
            else:
                q_frags = [tuple(word ^ flip for word in fragment) for fragment in q_frags]
            # What other CTAs push, or the exchange of scores, takes the place of q.
            if const_expr((shape.cluster > 1 and not layout.q_stays) or layout.exchanges):
                cute.arch.sync_threads()
            if const_expr(shape.cluster > 1 and not layout.q_stays):
                ptx.cluster_arrive()
            self.attend.attend(source, thread, keys, sight, state, q_frags, tile, ahead)

            # --- the merge ---
            q_head = kv_head * ratio
            cta = TreeCta(
                smem, tid, rows.count, rank, rows, q_head, sinks.iterator.toint(), v_scale,
                out.iterator.toint()
                + (Int64(sequence) * out.stride[0] + Int64(q_head) * out.stride[2]) * 2,
                Int64(out.stride[1]) * 2,
                Int64(out.stride[2]) * 2,
            )  # fmt: skip
            cute.arch.sync_threads()  # the rings are read; their memory becomes the merge's
            if const_expr(shape.cluster > 1 and layout.q_stays):
                ptx.cluster_arrive()
            self.merge.store_rows(thread, state)
            cute.arch.sync_threads()
            if const_expr(shape.cluster > 1):
                owned = (rows.count - rank + (shape.cluster - 1)) // shape.cluster
                self.merge.exchange(cta, layout.pushed_nbytes(owned))
            if groups_used == 1:
                self.merge.parts_to_out(cta)
            else:
                all_rows = query_len * (ratio * num_kv_heads)  # of a sequence
                # Places for partial results: of balanced sequences only those with several groups
                # have any, and more than there are: twice the extra groups before, and on.
                places = Int64(batch) * num_groups
                place = first_work
                if spare_groups > 0:
                    places = Int64(2 * spare_groups)
                    place = 2 * (first_work - sequence)
                partials = workspace.iterator.toint()
                counter = Int64(sequence) * (num_kv_heads * blocks) + unit
                meeting = Groups(
                    partials,
                    partials + places * all_rows * (config.head_dim * 4),
                    semaphores.iterator.toint() + (counter * shape.cluster + rank) * 4,
                    Int64(place) * all_rows + (kv_head * (query_len * ratio) + first_row),
                    group,
                    groups_used,
                    all_rows,
                )
                self.merge.meet(cta, meeting)
        else:
            if const_expr(shape.cluster > 1):
                ptx.cluster_arrive()
                ptx.cluster_wait()

    # --- start-up ---------------------------------------------------------------------------------

    @cute.jit
    def let_next_in(self, blocks):
        """Let the next kernel's CTAs start where they find room, unless the memory is the limit.

        Then they would crowd into the GPCs that are idle now (see kernels/fmha_decode_ctm). It is
        where each K and V is read once and not converted. On an H200, 32/8 heads of 128, batch 1 of
        4,096 tokens: f16 trees of 64 tokens 16.5 us instead of 17.0, but of 16 tokens 11.1 instead
        of 10.1; e4m3 trees of 16 tokens 11.3 instead of 12.2.
        """
        there_is_room = blocks > 1
        if const_expr(self.layout.ctas_per_sm >= 2 or self.config.kv_dtype == "e4m3"):
            there_is_room = Boolean(True)
        if there_is_room:
            cute.arch.griddepcontrol_launch_dependents()

    def ask_q(self, q, sequence, q_head, rows, smem, tid):
        """Ask for the CTA's rows of q; those past the last arrive as zeros."""
        slot, row_chunks = self.layout.q_slot, self.config.head_dim // 8
        base = (
            q.iterator.toint() + (Int64(sequence) * q.stride[0] + Int64(q_head) * q.stride[2]) * 2
        )
        for i in range(-(-self.layout.rows * row_chunks // self.layout.threads)):
            index = tid + i * self.layout.threads
            row, chunk = index >> log2(row_chunks), index & (row_chunks - 1)
            inside = row < rows.count
            token, head = rows.token_and_head(ptx.select(inside, row, Int32(0)))
            source = (
                base
                + (Int64(token) * q.stride[1] + Int64(head) * q.stride[2] + Int64(chunk * 8)) * 2
            )
            block, within = chunk >> log2(slot.block_chunks), chunk & (slot.block_chunks - 1)
            into = slot.matrix_address(smem + self.layout.q, row, within)
            into += block * (slot.rows * slot.block_nbytes)
            ptx.cp_async_16(into, source, ptx.select(inside, Int32(16), Int32(0)))
        ptx.cp_async_commit()

    def row_and_slice(self, warp):
        """Return a warp's first row, and which of the dimensions of the values are its own."""
        layout = self.layout
        index = warp & (layout.group_warps - 1)
        if self.shape.warpgroup:  # four warps of 64 rows in turn share all else
            row_warp, dim_slice = (
                index & (self.shape.row_warps - 1),
                index >> log2(self.shape.row_warps),
            )
        else:
            row_warp, dim_slice = index >> log2(layout.dim_split), index & (layout.dim_split - 1)
        return row_warp * MMA_ROWS, dim_slice

    @cute.jit
    def flip_q(self, flip, smem, tid):
        """Change the sign of q where it stays in shared memory, and let the MMA see it."""
        if flip != 0:
            for i in cutlass.range(self.layout.q_slot.half_nbytes // (16 * self.layout.threads)):
                address = smem + self.layout.q + (i * self.layout.threads + tid) * 16
                words = ptx.ld_shared_u32x4(address)
                ptx.st_shared_u32x4(address, [word ^ flip for word in words])
        ptx.fence_proxy_async()
        cute.arch.sync_threads()
