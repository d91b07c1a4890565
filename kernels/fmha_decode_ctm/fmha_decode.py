"""Single-token decode attention over a paged KV cache, split-K merged in the same launch.

out[b, h] = v_scale * softmax(scale * q[b, h] . K[b, h // ratio]) V[b, h // ratio]

One CTA takes ``tile_tokens`` tokens at a time of one (sequence, kv head), every ``num_splits``-th
tile of it. Inside the CTA each warp owns 16 tokens of a tile, its own ring of shared-memory slots
and its own running maximum, so no barrier stands in the loop; the warps meet once, at the end. K is
the A operand (16 tokens), q the B operand (8 heads): S^T = K q^T, O^T = V^T P^T, so the softmax
statistics of a head sit on the lanes that hold its accumulators.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from kernels.common import ptx
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.fmha_decode_ctm.config import (
    HEADS_PER_TILE,
    MAX_SPLITS,
    MMA_TOKENS,
    TOKENS_PER_PAGE,
    DecodeConfig,
)

PAGES_PER_FETCH = 32  # one page-table entry a lane
SPLITS_IN_FLIGHT = 8  # partials that a merging thread asks for before it waits


def parameters(kv_dtype: str, head_dim: int):
    return (
        TensorParameter("q", "in", "f16", ("batch", "num_q_heads", head_dim)),
        TensorParameter(
            "kv_pool",
            "in",
            kv_dtype,
            ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", head_dim),
        ),
        TensorParameter("page_table", "in", "i32", ("batch", 2, "max_pages"), alignment=4),
        TensorParameter("seq_lens", "in", "i32", ("batch",), alignment=4),
        TensorParameter("sinks", "in", "f32", ("num_q_heads",), alignment=4, optional=True),
        TensorParameter("out", "out", "f16", ("batch", "num_q_heads", head_dim)),
        TensorParameter("workspace", "workspace", "f32", ("workspace_elems",)),
        TensorParameter("semaphores", "semaphore", "i32", ("semaphore_elems",), alignment=4),
        ScalarParameter("scale_log2", "f32"),  # scale * k_scale * log2(e)
        ScalarParameter("v_scale", "f32"),
        ScalarParameter("sliding_window", "i32"),  # 0: every key
        ScalarParameter("num_splits", "i32"),
        StreamParameter(),
    )


class FmhaDecode:
    def __init__(self, config: DecodeConfig):
        self.config = config
        self.row_chunks = config.row_nbytes // 16
        self.row_chunks_log2 = self.row_chunks.bit_length() - 1
        # Rows of at least 128 bytes rotate their 16-byte chunks by row mod 8; shorter rows share a
        # 128-byte line of banks, so the rotation moves once a line.
        self.swizzle_shift = max(0, 3 - self.row_chunks_log2)
        self.swizzle_mask = min(8, self.row_chunks) - 1

    @cute.jit
    def __call__(
        self,
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
        num_splits: Int32,
        stream: cuda.CUstream,
    ):
        arguments = (
            q,
            kv_pool,
            page_table,
            seq_lens,
            sinks,
            out,
            workspace,
            semaphores,
            scale_log2,
            v_scale,
            sliding_window,
            num_splits,
            q.shape[1] // kv_pool.shape[2],
            stream,
        )
        if const_expr(len(self.config.kernels) == 1):
            self.launch(*arguments, *self.config.kernels[0])
        elif q.shape[1] <= HEADS_PER_TILE * kv_pool.shape[2]:
            self.launch(*arguments, *self.config.kernels[0])
        else:
            self.launch(*arguments, *self.config.kernels[1])

    def launch(
        self,
        q,
        kv_pool,
        page_table,
        seq_lens,
        sinks,
        out,
        workspace,
        semaphores,
        scale_log2,
        v_scale,
        sliding_window,
        num_splits,
        ratio,
        stream,
        head_tiles,
        head_shards,
    ):
        units_per_sequence = kv_pool.shape[2] * head_shards
        magic = Uint32(Int64(0xFFFFFFFF) // Int64(units_per_sequence))
        self.kernel(
            q,
            kv_pool,
            page_table,
            seq_lens,
            sinks,
            out,
            workspace,
            semaphores,
            scale_log2,
            v_scale,
            sliding_window,
            num_splits,
            ratio,
            magic,
            head_tiles,
            head_shards,
        ).launch(
            # x alone may pass 65,535, and the batch may.
            grid=(q.shape[0] * units_per_sequence, num_splits, 1),
            block=(self.config.threads, 1, 1),
            smem=self.config.smem_nbytes(head_tiles),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
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
        num_splits: Int32,
        ratio: Int32,
        magic: Uint32,
        head_tiles: cutlass.Constexpr,
        head_shards: cutlass.Constexpr,
    ):
        cfg = self.config
        tid, _, _ = cute.arch.thread_idx()
        unit, split, _ = cute.arch.block_idx()
        lane = tid & 31
        warp = cute.arch.make_warp_uniform(tid >> 5)
        smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024).toint()

        sequence, head_unit = ptx.divmod_by_magic(unit, kv_pool.shape[2] * head_shards, magic)
        kv_head = head_unit // head_shards
        first_head = (head_unit % head_shards) * (HEADS_PER_TILE * head_tiles)
        q_head = kv_head * ratio + first_head
        heads = cutlass.min(ratio - first_head, HEADS_PER_TILE * head_tiles)

        # Everything that the first KV load waits for is asked for at once: the length, the page
        # ids (whose place does not depend on the length unless there is a window) and q.
        max_pages = page_table.shape[2]
        length_address = seq_lens.iterator.toint() + Int64(sequence) * 4
        first_tile = Int32(0)
        left = Int32(0)
        if sliding_window > 0:
            windowed = self.clamp_length(ptx.ld_global_i32(length_address), max_pages)
            left = cutlass.max(windowed - sliding_window, Int32(0))
            first_tile = left // cfg.tile_tokens
        table = page_table.iterator.toint() + Int64(sequence) * page_table.stride[0] * 4
        v_row_nbytes = Int64(page_table.stride[1]) * 4
        pool_pages = kv_pool.shape[0]
        tile = first_tile + split
        k_ids, v_ids = self.fetch_pages(
            table, v_row_nbytes, max_pages, pool_pages, tile, num_splits, lane
        )
        q_frags = self.load_q(q, sequence, q_head, heads, lane, head_tiles)
        length = self.clamp_length(ptx.ld_global_i32(length_address), max_pages)
        end_tile = cute.ceil_div(length, cfg.tile_tokens)
        # A split past the sequence's tiles has nothing to do and is not waited for.
        splits_used = cutlass.min(num_splits, cutlass.max(end_tile - first_tile, Int32(1)))

        if split < splits_used:
            acc = cute.make_rmem_tensor((head_tiles * cfg.head_dim // 4,), Float32)
            row_max = cute.make_rmem_tensor((head_tiles * 2,), Float32)
            row_sum = cute.make_rmem_tensor((head_tiles * 2,), Float32)
            acc.fill(0.0)
            row_max.fill(ptx.NEG_INF)
            row_sum.fill(0.0)

            # --- the ring ---
            ring = smem + warp * (cfg.stages * cfg.slot_nbytes)
            source = self.copy_source(kv_pool, kv_head, lane)
            ahead = Int32(0)  # how many tiles of this split have been asked for
            ahead_tile = tile
            live = Int32(0)  # bit i % 32: tile i's page ids are valid
            next_k_ids, next_v_ids = self.fetch_pages(
                table,
                v_row_nbytes,
                max_pages,
                pool_pages,
                tile + PAGES_PER_FETCH * num_splits,
                num_splits,
                lane,
            )
            for stage in range_constexpr(cfg.stages):
                live = self.copy_tile(
                    ring + stage * cfg.slot_nbytes,
                    ahead,
                    ahead_tile,
                    k_ids,
                    v_ids,
                    live,
                    left,
                    length,
                    source,
                    warp,
                    lane,
                )
                ahead += 1
                ahead_tile += num_splits

            seen = Int32(0)
            slot = ring
            while tile < end_tile:
                ptx.cp_async_wait(cfg.stages - 1)
                cute.arch.sync_warp()  # the other lanes' copies
                self.attend(
                    slot,
                    tile * cfg.tile_tokens + warp * MMA_TOKENS,
                    left,
                    length,
                    (live >> (seen & 31)) & 1,
                    scale_log2,
                    q_frags,
                    acc,
                    row_max,
                    row_sum,
                    lane,
                    head_tiles,
                )
                cute.arch.sync_warp()  # every lane has read the slot
                if (ahead & (PAGES_PER_FETCH - 1)) == 0:
                    k_ids = next_k_ids
                    v_ids = next_v_ids
                    next_k_ids, next_v_ids = self.fetch_pages(
                        table,
                        v_row_nbytes,
                        max_pages,
                        pool_pages,
                        ahead_tile + PAGES_PER_FETCH * num_splits,
                        num_splits,
                        lane,
                    )
                live = self.copy_tile(
                    slot, ahead, ahead_tile, k_ids, v_ids, live, left, length, source, warp, lane
                )
                ahead += 1
                ahead_tile += num_splits
                tile += num_splits
                seen += 1
                slot += cfg.slot_nbytes
                if slot == ring + cfg.stages * cfg.slot_nbytes:
                    slot = ring
            ptx.cp_async_wait(0)

            # --- the warps meet ---
            self.store_warp_state(smem, warp, lane, acc, row_max, row_sum, head_tiles)
            cute.arch.sync_threads()
            partial_row = (Int64(sequence * kv_pool.shape[2] + kv_head) * num_splits) * ratio
            partial_row += first_head
            stats = workspace.iterator.toint() + (
                Int64(q.shape[0]) * q.shape[1] * num_splits * (cfg.head_dim * 4)
            )
            sink_address = sinks.iterator.toint()
            out_address = (
                out.iterator.toint()
                + (Int64(sequence) * out.stride[0] + Int64(q_head) * out.stride[1]) * 2
            )
            if splits_used == 1:
                self.merge_warps_to_out(
                    smem,
                    tid,
                    heads,
                    sink_address,
                    q_head,
                    v_scale,
                    out_address,
                    Int64(out.stride[1]) * 2,
                    head_tiles,
                )
            else:
                self.merge_warps_to_workspace(
                    smem,
                    tid,
                    heads,
                    workspace.iterator.toint(),
                    stats,
                    partial_row + Int64(split) * ratio,
                    head_tiles,
                )
                # --- the splits meet: the last CTA to arrive merges, in the order of splits ---
                cute.arch.sync_threads()
                ticket = smem + (cfg.smem_nbytes(head_tiles) - 16)
                semaphore = semaphores.iterator.toint() + Int64(unit) * 4
                if tid == 0:
                    # The barrier orders the CTA's stores before this release, and what the other
                    # CTAs released before the loads that follow the next barrier.
                    arrived = ptx.atomic_add_acq_rel(semaphore, Int32(1))
                    ptx.st_shared_i32(ticket, arrived)
                cute.arch.sync_threads()
                if ptx.ld_shared_i32(ticket) == splits_used - 1:
                    if tid == 0:
                        ptx.st_global_i32(semaphore, Int32(0))
                    self.weigh_splits(
                        smem,
                        warp,
                        lane,
                        heads,
                        stats,
                        partial_row,
                        ratio,
                        splits_used,
                        sink_address,
                        q_head,
                        v_scale,
                        head_tiles,
                    )
                    cute.arch.sync_threads()
                    self.merge_splits_to_out(
                        smem,
                        tid,
                        heads,
                        workspace.iterator.toint(),
                        partial_row,
                        ratio,
                        splits_used,
                        out_address,
                        Int64(out.stride[1]) * 2,
                        head_tiles,
                    )

    # --- start-up ---------------------------------------------------------------------------------

    def clamp_length(self, length, max_pages):
        return cutlass.min(cutlass.max(length, Int32(0)), max_pages * TOKENS_PER_PAGE)

    @cute.jit
    def fetch_pages(self, table, v_row_nbytes, max_pages, pool_pages, tile, num_splits, lane):
        """Return the K and V page id of this lane's tile; -1 for both where either is invalid."""
        page = (tile + lane * num_splits) >> self.config.tiles_per_page_log2
        k_id = Int32(-1)
        v_id = Int32(-1)
        if page < max_pages:
            address = table + Int64(page) * 4
            k_id = ptx.ld_global_i32(address)
            v_id = ptx.ld_global_i32(address + v_row_nbytes)
        good = (cutlass.min(k_id, v_id) >= 0) & (cutlass.max(k_id, v_id) < pool_pages)
        return ptx.select(good, k_id, Int32(-1)), ptx.select(good, v_id, Int32(-1))

    def load_q(self, q, sequence, q_head, heads, lane, head_tiles):
        """Return q as B fragments [head tile][k step]; columns past ``heads`` repeat the last head."""
        cfg = self.config
        group, quad = lane >> 2, lane & 3
        frags = []
        for n in range(head_tiles):
            head = cutlass.min(group + HEADS_PER_TILE * n, heads - 1)
            row = (
                q.iterator.toint()
                + (Int64(sequence) * q.stride[0] + Int64(q_head + head) * q.stride[1]) * 2
            )
            steps = []
            for k in range(cfg.head_dim // 16):
                if cfg.kv_dtype == "e4m3":
                    # Converted K words hold dimensions 4 * quad + (0, 1 | 2, 3) of the step.
                    steps.append(ptx.ld_global_u32x2(row + Int64(quad) * 8 + 32 * k))
                else:
                    address = row + Int64(quad) * 4 + 32 * k
                    steps.append((ptx.ld_global_u32(address), ptx.ld_global_u32(address + 16)))
            frags.append(steps)
        return frags

    # --- the ring's two ends ----------------------------------------------------------------------

    def copy_source(self, kv_pool, kv_head, lane):
        """Return (lane's address in page 0, page stride, token stride), in bytes."""
        cfg = self.config
        token_nbytes = Int64(kv_pool.stride[1]) * cfg.kv_nbytes
        base = (
            kv_pool.iterator.toint()
            + Int64(kv_head) * kv_pool.stride[2] * cfg.kv_nbytes
            + Int64(lane >> self.row_chunks_log2) * token_nbytes
            + Int64(lane & (self.row_chunks - 1)) * 16
        )
        return base, Int64(kv_pool.stride[0]) * cfg.kv_nbytes, token_nbytes

    def swizzle(self, row):
        return (row >> self.swizzle_shift) & self.swizzle_mask

    @cute.jit
    def copy_tile(self, slot, index, tile, k_ids, v_ids, live, left, length, source, warp, lane):
        """Ask for this warp's 16 tokens of ``tile``; what is not visible arrives as zeros.

        Zeros, because a masked key's P is 0 and 0 times a stale NaN in V is NaN.
        """
        cfg = self.config
        base, page_nbytes, token_nbytes = source
        k_id = cute.arch.shuffle_sync(k_ids, index & (PAGES_PER_FETCH - 1))
        v_id = cute.arch.shuffle_sync(v_ids, index & (PAGES_PER_FETCH - 1))
        valid = ptx.select(k_id >= 0, Int32(1), Int32(0))
        bit = index & 31
        live = (live & ~(Int32(1) << bit)) | (valid << bit)

        token = tile * cfg.tile_tokens + warp * MMA_TOKENS
        span = Uint32(ptx.select(k_id >= 0, length - left, Int32(0)))
        lane_row = lane >> self.row_chunks_log2
        first = lane_row + token - left
        in_page = Int64(token & (TOKENS_PER_PAGE - 1)) * token_nbytes
        k_address = base + Int64(k_id) * page_nbytes + in_page
        v_address = base + Int64(v_id) * page_nbytes + in_page
        lane_offset = lane_row * cfg.row_nbytes + (
            ((lane & (self.row_chunks - 1)) ^ self.swizzle(lane_row)) << 4
        )
        for j in range_constexpr(MMA_TOKENS * self.row_chunks // 32):
            row, chunk = divmod(32 * j, self.row_chunks)
            nbytes = ptx.select(Uint32(first + row) < span, Int32(16), Int32(0))
            away = Int64(row) * token_nbytes + 16 * chunk
            into = (
                slot
                + (lane_offset ^ (self.swizzle(row) << 4))
                + (row * cfg.row_nbytes + 16 * chunk)
            )
            ptx.cp_async_16(into, k_address + away, nbytes)
            ptx.cp_async_16(into + MMA_TOKENS * cfg.row_nbytes, v_address + away, nbytes)
        ptx.cp_async_commit()
        return live

    @cute.jit
    def attend(
        self,
        slot,
        token,
        left,
        length,
        valid,
        scale_log2,
        q_frags,
        acc,
        row_max,
        row_sum,
        lane,
        head_tiles: cutlass.Constexpr,
    ):
        """Fold the slot's 16 tokens into this warp's softmax state."""
        cfg = self.config
        group = lane >> 2
        scores = self.scores(slot, q_frags, lane, head_tiles)
        span = Uint32(ptx.select(valid != 0, length - left, Int32(0)))
        low_visible = Uint32(token + group - left) < span
        high_visible = Uint32(token + group + 8 - left) < span
        minus_inf = Float32(ptx.NEG_INF)
        p_frags = []
        for n in range_constexpr(head_tiles):
            columns = []
            for c in range_constexpr(2):
                low = ptx.select(low_visible, scores[n][c] * scale_log2, minus_inf)
                high = ptx.select(high_visible, scores[n][c + 2] * scale_log2, minus_inf)
                tile_max = ptx.warp_reduce(
                    cute.arch.fmax(low, high), cute.arch.fmax, lane_masks=(16, 8, 4)
                )
                old = row_max[2 * n + c]
                new = cute.arch.fmax(old, tile_max)
                base = self.finite(new)
                correction = ptx.exp2(old - base)
                p_low = ptx.exp2(low - base)
                p_high = ptx.exp2(high - base)
                row_max[2 * n + c] = new
                row_sum[2 * n + c] = row_sum[2 * n + c] * correction + (p_low + p_high)
                columns.append((p_low, p_high, correction))
            for m in range_constexpr(cfg.head_dim // 16):
                for c in range_constexpr(4):
                    i = (m * head_tiles + n) * 4 + c
                    acc[i] = acc[i] * columns[c % 2][2]
            p_frags.append(
                tuple(
                    ptx.movmatrix_trans(ptx.pack_f16x2(columns[0][half], columns[1][half]))
                    for half in (0, 1)
                )
            )
        self.accumulate(slot + MMA_TOKENS * cfg.row_nbytes, p_frags, acc, lane, head_tiles)

    def finite(self, maximum):
        """Return the maximum, or 0 where no key was visible: -inf - -inf must not be formed."""
        return ptx.select(maximum == Float32(ptx.NEG_INF), Float32(0.0), maximum)

    def scores(self, slot, q_frags, lane, head_tiles):
        """Return S^T = K q^T: per head tile the C fragment of (16 tokens, 8 heads)."""
        cfg = self.config
        row = lane & 15
        address = slot + row * cfg.row_nbytes + (((lane >> 4) ^ self.swizzle(row)) << 4)
        # Two chains of accumulators: an MMA need not wait for the one before it.
        chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(head_tiles)]
        for pair in range(self.row_chunks // 2):
            words = ptx.ldmatrix_x4(address ^ (pair << 5))
            if cfg.kv_dtype == "e4m3":
                low, high = (
                    [ptx.e4m3x4_to_f16x2x2(word) for word in words[2 * i : 2 * i + 2]]
                    for i in (0, 1)
                )
                steps = [
                    (2 * pair + i, (top[0], bottom[0], top[1], bottom[1]))
                    for i, (top, bottom) in enumerate((low, high))
                ]
            else:
                steps = [(pair, words)]
            for k, a in steps:
                for n in range(head_tiles):
                    chains[n][k % 2] = ptx.mma_m16n8k16(a, q_frags[n][k], chains[n][k % 2])
        return [[even + odd for even, odd in zip(*pair, strict=True)] for pair in chains]

    def accumulate(self, v_slot, p_frags, acc, lane, head_tiles):
        """Add V^T P^T; ``acc`` is [16-dimension tile][head tile][C register]."""
        cfg = self.config
        e4m3 = cfg.kv_dtype == "e4m3"
        if e4m3:  # two 16-dimension chunks, both token halves
            row, high_chunk = lane & 15, lane >> 4
        else:  # one 16-dimension tile: two chunks, both token halves
            row, high_chunk = (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1
        address = v_slot + row * cfg.row_nbytes + ((high_chunk ^ self.swizzle(row)) << 4)
        for pair in range(self.row_chunks // 2):
            words = ptx.ldmatrix_x4(address ^ (pair << 5), transpose=True)
            if e4m3:
                tiles = []
                for i in (0, 1):
                    # A transposed word holds (token, token + 1) x (dim 2g, 2g + 1): bring the
                    # two tokens of a dimension together, so MMA rows g and g + 8 are 2g, 2g + 1.
                    first, second = (
                        ptx.e4m3x4_to_f16x2x2(ptx.byte_permute(word, 0x3120))
                        for word in words[2 * i : 2 * i + 2]
                    )
                    tiles.append((2 * pair + i, (first[0], first[1], second[0], second[1])))
            else:
                tiles = [(pair, words)]
            for m, a in tiles:
                for n in range(head_tiles):
                    at = (m * head_tiles + n) * 4
                    result = ptx.mma_m16n8k16(a, p_frags[n], [acc[at + c] for c in range(4)])
                    for c in range(4):
                        acc[at + c] = result[c]

    # --- merging ----------------------------------------------------------------------------------

    def stats_address(self, smem, warp, head, head_tiles):
        return smem + (warp * (HEADS_PER_TILE * head_tiles) + head) * 8

    def acc_address(self, smem, warp, head, dim, head_tiles):
        # A head's row is padded by 16 bytes, so the four heads that a quad stores at once fall
        # into different banks.
        rows = HEADS_PER_TILE * head_tiles
        base = smem + self.config.warps * rows * 8
        return base + ((warp * rows + head) * (self.config.head_dim + 4) + dim) * 4

    def store_warp_state(self, smem, warp, lane, acc, row_max, row_sum, head_tiles):
        cfg = self.config
        group, quad = lane >> 2, lane & 3
        cute.arch.sync_threads()  # the ring is read; its memory becomes the merge's
        for n in range(head_tiles):
            for c in range(2):
                head = HEADS_PER_TILE * n + 2 * quad + c
                total = ptx.warp_reduce(row_sum[2 * n + c], ptx.add, lane_masks=(16, 8, 4))
                address = self.stats_address(smem, warp, head, head_tiles)
                ptx.st_shared_f32(address, row_max[2 * n + c])
                ptx.st_shared_f32(address + 4, total)
                for m in range(cfg.head_dim // 16):
                    for half in range(2):
                        if cfg.kv_dtype == "e4m3":
                            dim = 16 * m + 2 * group + half
                        else:
                            dim = 16 * m + group + 8 * half
                        ptx.st_shared_f32(
                            self.acc_address(smem, warp, head, dim, head_tiles),
                            acc[(m * head_tiles + n) * 4 + 2 * half + c],
                        )

    def combine_warps(self, smem, head, dim, floor, head_tiles):
        """Return (maximum, sum, 4 accumulators) over the warps, the maximum at least ``floor``."""
        warps = range(self.config.warps)
        stats = [self.stats_address(smem, warp, head, head_tiles) for warp in warps]
        maxima = [ptx.ld_shared_f32(address) for address in stats]
        maximum = floor
        for m in maxima:
            maximum = cute.arch.fmax(maximum, m)
        base = self.finite(maximum)
        total = Float32(0.0)
        values = [Float32(0.0)] * 4
        for warp in warps:
            weight = ptx.exp2(maxima[warp] - base)
            total = total + ptx.ld_shared_f32(stats[warp] + 4) * weight
            part = ptx.ld_shared_f32x4(self.acc_address(smem, warp, head, dim, head_tiles))
            values = [v + p * weight for v, p in zip(values, part, strict=True)]
        return maximum, total, values

    @cute.jit
    def sink_log2(self, sink_address, head):
        sink = Float32(ptx.NEG_INF)
        if sink_address != 0:
            sink = ptx.ld_global_f32(sink_address + Int64(head) * 4) * Float32(ptx.LOG2_E)
        return sink

    def inverse(self, total, v_scale):
        """Return v_scale / total; 0 where no key was visible. A NaN stays."""
        return ptx.select(total == Float32(0.0), Float32(0.0), v_scale / total)

    def store_out(self, address, values):
        ptx.st_global_u32x2(
            address, (ptx.pack_f16x2(values[0], values[1]), ptx.pack_f16x2(values[2], values[3]))
        )

    def items(self, head_tiles):
        """Return how often every thread takes four dimensions of one head."""
        return -(-HEADS_PER_TILE * head_tiles * self.config.head_dim // 4 // self.config.threads)

    def item(self, tid, i):
        """Return (head, first dimension) of this thread's ``i``-th item."""
        index = tid + i * self.config.threads
        per_head = self.config.head_dim // 4
        return index // per_head, (index % per_head) * 4

    @cute.jit
    def merge_warps_to_out(
        self,
        smem,
        tid,
        heads,
        sink_address,
        q_head,
        v_scale,
        out_address,
        head_nbytes,
        head_tiles: cutlass.Constexpr,
    ):
        for i in range_constexpr(self.items(head_tiles)):
            head, dim = self.item(tid, i)
            if head < heads:
                sink = self.sink_log2(sink_address, q_head + head)
                maximum, total, values = self.combine_warps(smem, head, dim, sink, head_tiles)
                total = total + ptx.exp2(sink - self.finite(maximum))
                factor = self.inverse(total, v_scale)
                address = out_address + Int64(head) * head_nbytes + Int64(dim) * 2
                self.store_out(address, [v * factor for v in values])

    @cute.jit
    def merge_warps_to_workspace(
        self, smem, tid, heads, partials, stats, row, head_tiles: cutlass.Constexpr
    ):
        """Store this split's unnormalised accumulators, and its (m, l), in fp32."""
        for i in range_constexpr(self.items(head_tiles)):
            head, dim = self.item(tid, i)
            if head < heads:
                minus_inf = Float32(ptx.NEG_INF)
                maximum, total, values = self.combine_warps(smem, head, dim, minus_inf, head_tiles)
                at = row + head
                ptx.st_global_f32x4(partials + (at * self.config.head_dim + dim) * 4, values)
                if dim == 0:
                    ptx.st_global_f32x2(stats + at * 8, (maximum, total))

    @cute.jit
    def weigh_splits(
        self,
        smem,
        warp,
        lane,
        heads,
        stats,
        row,
        ratio,
        splits_used,
        sink_address,
        q_head,
        v_scale,
        head_tiles: cutlass.Constexpr,
    ):
        """Leave in shared memory what each split's accumulators count: a warp a head, a lane a split."""
        warps = self.config.warps
        for i in range_constexpr(-(-HEADS_PER_TILE * head_tiles // warps)):
            head = warp + i * warps
            if head < heads:
                maximum = Float32(ptx.NEG_INF)
                total = Float32(0.0)
                if lane < splits_used:
                    at = row + Int64(lane) * ratio + head
                    maximum, total = ptx.ld_l2_f32x2(stats + at * 8)
                sink = self.sink_log2(sink_address, q_head + head)
                top = cute.arch.fmax(ptx.warp_reduce(maximum, cute.arch.fmax), sink)
                base = self.finite(top)
                weight = ptx.exp2(maximum - base)
                whole = ptx.warp_reduce(total * weight, ptx.add) + ptx.exp2(sink - base)
                ptx.st_shared_f32(
                    smem + (head * MAX_SPLITS + lane) * 4, weight * self.inverse(whole, v_scale)
                )

    @cute.jit
    def merge_splits_to_out(
        self,
        smem,
        tid,
        heads,
        partials,
        row,
        ratio,
        splits_used,
        out_address,
        head_nbytes,
        head_tiles: cutlass.Constexpr,
    ):
        split_nbytes = Int64(ratio) * (self.config.head_dim * 4)
        for i in range_constexpr(self.items(head_tiles)):
            head, dim = self.item(tid, i)
            if head < heads:
                source = partials + ((row + head) * self.config.head_dim + dim) * 4
                weights = smem + head * (MAX_SPLITS * 4)
                sums = cute.make_rmem_tensor((4,), Float32)
                sums.fill(0.0)
                for first in cutlass.range(0, splits_used, SPLITS_IN_FLIGHT):
                    parts = []
                    for j in range_constexpr(SPLITS_IN_FLIGHT):
                        # Past the last split its own partial is read again, and not added.
                        split = cutlass.min(first + j, splits_used - 1)
                        parts.append(ptx.ld_l2_f32x4(source + Int64(split) * split_nbytes))
                    for j in range_constexpr(SPLITS_IN_FLIGHT):
                        weight = ptx.ld_shared_f32(
                            weights + cutlass.min(first + j, MAX_SPLITS - 1) * 4
                        )
                        for c in range_constexpr(4):
                            added = parts[j][c] * weight
                            sums[c] = sums[c] + ptx.select(
                                first + j < splits_used, added, Float32(0.0)
                            )
                address = out_address + Int64(head) * head_nbytes + Int64(dim) * 2
                self.store_out(address, [sums[c] for c in range(4)])
