"""The merge of kernels/common/merge.py for trees: its heads are (token, head) rows.

There are up to sixteen times as many as in single-token decode. The CTAs of a cluster own rows, not
dimensions, in turn, so that each owner gets a row's (m, l) once; and what they push is normalised
and in f16, half the bytes. The relative error of random inputs grows from 3.0e-4 to 3.6e-4 by that.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr

from ctm_rt.decode.plan import MAX_GROUPS
from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.merge import Merge, finite

VECTOR = 8  # dimensions that a thread takes at a time


class Rows(NamedTuple):
    """The rows of a CTA: of one KV head, token by token, the heads of a token together."""

    first: Any
    count: Any
    ratio: Any  # query heads of the KV head
    magic: Any

    def token_and_head(self, row):
        """Return the token, and the head among those of the KV head, of the CTA's ``row``."""
        return ptx.divmod_by_magic(self.first + row, self.ratio, self.magic)


class TreeCta(NamedTuple):
    """What the merging steps need to know of one CTA at run time; addresses in bytes."""

    smem: Any
    tid: Any
    heads: Any  # rows
    rank: Any  # in the cluster
    rows: Rows
    q_head: Any  # the first of the KV head
    sink_address: Any  # 0: none
    v_scale: Any
    out_address: Any  # of the sequence's first token and the KV head's first query head
    out_token_nbytes: Any
    out_head_nbytes: Any


class TreeMerge(Merge):
    def __init__(self, layout):
        super().__init__(layout)
        self.row_vectors = layout.config.head_dim // VECTOR

    def state_address(self, smem, token_group, head, dim):
        base = smem + self.layout.token_groups * self.layout.rows * 8
        row = token_group * self.layout.rows + head
        return base + (row * self.layout.state_row_elems + dim) * 4

    def store_rows(self, thread, state):
        """Store a warp's state; call it between two barriers of the CTA."""
        smem, lane, quad, acc = thread.smem, thread.lane, thread.lane & 3, state.acc
        for half in range(2):
            row = thread.row + (lane >> 2) + 8 * half
            total = ptx.warp_reduce(state.row_sum[half], ptx.add, lane_masks=(2, 1))
            # Lanes and warps that share a row store the same numbers.
            stats = self.stats_address(smem, thread.token_group, row)
            ptx.st_shared_f32x2(stats, (state.maximum(half), total))
            first_dim = thread.dim_slice * self.layout.dims
            into = self.state_address(smem, thread.token_group, row, first_dim)
            if self.config.kv_dtype == "e4m3" and not self.shape.warpgroup:
                for m in range(self.layout.dims // 16):
                    even, odd = 8 * m + 2 * half, 8 * m + 4 + 2 * half
                    values = acc[even], acc[odd], acc[even + 1], acc[odd + 1]
                    ptx.st_shared_f32x4(into + (16 * m + 4 * quad) * 4, values)
            else:
                for n in range(self.layout.dims // 8):
                    at = 4 * n + 2 * half
                    ptx.st_shared_f32x2(into + (8 * n + 2 * quad) * 4, (acc[at], acc[at + 1]))

    # --- what a thread takes ----------------------------------------------------------------------

    def count(self, rows):
        """Return how many vectors of ``rows`` rows a thread takes."""
        return -(-rows * self.row_vectors // self.layout.threads)

    def item(self, cta, i):
        """Return a thread's ``i``-th vector of all rows: row, dimension, whether there is such."""
        index = cta.tid + i * self.layout.threads
        row = index >> log2(self.row_vectors)
        inside = row < cta.heads
        dim = (index & (self.row_vectors - 1)) * VECTOR
        return ptx.select(inside, row, Int32(0)), dim, inside

    def owned_item(self, cta, i):
        """Return a thread's ``i``-th vector of the rows that the CTA owns."""
        index = cta.tid + i * self.layout.threads
        row = (index >> log2(self.row_vectors)) * self.shape.cluster + cta.rank
        inside = row < cta.heads
        dim = (index & (self.row_vectors - 1)) * VECTOR
        return ptx.select(inside, row, Int32(0)), dim, inside

    def add_states(self, cta, row, dim, floor):
        """Return (maximum, sum, values) of what the CTA's warps left of a row."""
        sources = range(self.layout.token_groups)
        stats = [ptx.ld_shared_f32x2(self.stats_address(cta.smem, g, row)) for g in sources]
        parts = []
        for g in sources:
            first = self.state_address(cta.smem, g, row, dim)
            parts.append(
                [x for at in range(0, VECTOR, 4) for x in ptx.ld_shared_f32x4(first + 4 * at)]
            )
        maximum = floor
        for m, _ in stats:
            maximum = cute.arch.fmax(maximum, m)
        weights = [ptx.exp2(m - finite(maximum)) for m, _ in stats]
        return maximum, *self.weighted(weights, [l for _, l in stats], parts)

    def add_inbox(self, cta, row, dim, floor):
        """Return (maximum, sum, values) of what the cluster's CTAs pushed of an owned row."""
        ranks, line = range(self.shape.cluster), row // self.shape.cluster
        stats = [ptx.ld_shared_f32x2(self.inbox_stats_address(cta.smem, r, line)) for r in ranks]
        words = [ptx.ld_shared_u32x4(self.inbox_address(cta.smem, r, line, dim)) for r in ranks]
        maximum = floor
        for m, _ in stats:
            maximum = cute.arch.fmax(maximum, m)
        weights = [l * ptx.exp2(m - finite(maximum)) for m, l in stats]
        parts = [[x for word in part for x in ptx.f16x2_to_f32x2(word)] for part in words]
        return maximum, *self.weighted(weights, [Float32(1.0)] * len(weights), parts)

    def weighted(self, weights, sums, parts):
        total = Float32(0.0)
        values = [Float32(0.0)] * VECTOR
        for weight, l, part in zip(weights, sums, parts, strict=True):
            total = total + l * weight
            values = [v + p * weight for v, p in zip(values, part, strict=True)]
        return total, values

    def part(self, cta, row, dim, with_sink):
        """Return (maximum, sum, values, sink) of a vector of an owned row."""
        sink = self.sink_log2(cta, row) if with_sink else Float32(ptx.NEG_INF)
        add = self.add_inbox if self.shape.cluster > 1 else self.add_states
        return *add(cta, row, dim, sink), sink

    def sink_log2(self, cta, head):
        present = cta.sink_address != 0
        _, q_head = cta.rows.token_and_head(head)
        sink = ptx.ld_global_f32(cta.sink_address + Int64(cta.q_head + q_head) * 4, present)
        return ptx.select(present, sink * Float32(ptx.LOG2_E), Float32(ptx.NEG_INF))

    def store_out(self, cta, row, dim, values, inside):
        token, q_head = cta.rows.token_and_head(row)
        address = (
            cta.out_address
            + Int64(token) * cta.out_token_nbytes
            + Int64(q_head) * cta.out_head_nbytes
            + Int64(dim) * 2
        )
        ptx.st_global_u32x4(address, self.pack(values), inside)

    def inverse(self, total, scale):
        """Return scale / total; 0 where no key was visible. A NaN stays."""
        inverse = scale * ptx.reciprocal_approx(total)
        return ptx.select(total == Float32(0.0), Float32(0.0), inverse)

    def first_owned_dim(self, cta):
        return 0

    def pack(self, values):
        return [ptx.pack_f16x2(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]

    # --- cluster ----------------------------------------------------------------------------------

    def inbox_address(self, smem, rank, line, dim):
        """Return where CTA ``rank`` leaves a vector of the ``line``-th row that is owned."""
        at = (rank * self.layout.owned_rows + line) * self.config.head_dim + dim
        return smem + self.layout.inbox + at * 2

    def inbox_stats_address(self, smem, rank, line):
        lines = self.shape.cluster * self.layout.owned_rows
        stats = self.layout.inbox + lines * self.config.head_dim * 2
        return smem + stats + (rank * self.layout.owned_rows + line) * 8

    def push(self, cta):
        """Send every row to the CTA of the cluster that owns it."""
        for i in range(self.count(self.layout.rows)):
            row, dim, inside = self.item(cta, i)
            maximum, total, values = self.add_states(cta, row, dim, Float32(ptx.NEG_INF))
            factor = self.inverse(total, Float32(1.0))
            line = row // self.shape.cluster
            owner = row - line * self.shape.cluster
            barrier = ptx.peer_address(cta.smem + self.layout.barrier, owner)
            ptx.st_async_u32x4(
                ptx.peer_address(self.inbox_address(cta.smem, cta.rank, line, dim), owner),
                self.pack([v * factor for v in values]), barrier, inside,
            )  # fmt: skip
            ptx.st_async_f32x2(
                ptx.peer_address(self.inbox_stats_address(cta.smem, cta.rank, line), owner),
                (maximum, total), barrier, inside & (dim == 0),
            )  # fmt: skip

    def parts_to_out(self, cta):
        for i in range(self.count(self.layout.owned_rows)):
            row, dim, inside = self.owned_item(cta, i)
            maximum, total, values, sink = self.part(cta, row, dim, with_sink=True)
            factor = self.inverse(total + ptx.exp2(sink - finite(maximum)), cta.v_scale)
            self.store_out(cta, row, dim, [v * factor for v in values], inside)

    # --- groups: few launches have any, so no loop is unrolled ------------------------------------

    @cute.jit
    def parts_to_workspace(self, cta, groups):
        first = groups.row + Int64(groups.group) * groups.q_heads
        for i in cutlass.range(self.count(self.layout.owned_rows)):
            row, dim, inside = self.owned_item(cta, i)
            maximum, total, values, _ = self.part(cta, row, dim, with_sink=False)
            into = self.partial_address(cta, groups, first + Int64(row), dim)
            for at in range_constexpr(0, VECTOR, 4):
                ptx.st_global_f32x4(into + 4 * at, values[at : at + 4], inside)
            stats = self.group_stats_address(cta, groups, first + Int64(row))
            ptx.st_global_f32x2(stats, (maximum, total), inside & (dim == 0))

    @cute.jit
    def weigh(self, cta, groups):
        """Leave in shared memory what each group's accumulators count: a warp a row."""
        lane, warp = cta.tid & 31, cute.arch.make_warp_uniform(cta.tid >> 5)
        first, step = warp * self.shape.cluster + cta.rank, self.layout.warps * self.shape.cluster
        for row in cutlass.range(first, cta.heads, step):
            maxima, sums = [], []
            for j in range_constexpr(MAX_GROUPS // 32):
                inside = lane + 32 * j < groups.count
                group = cutlass.min(lane + 32 * j, groups.count - 1)
                place = groups.row + Int64(group) * groups.q_heads + row
                m, l = ptx.ld_l2_f32x2(self.group_stats_address(cta, groups, place))
                maxima.append(ptx.select(inside, m, Float32(ptx.NEG_INF)))
                sums.append(ptx.select(inside, l, Float32(0.0)))
            sink = self.sink_log2(cta, row)
            top = cute.arch.fmax(maxima[0], maxima[1])
            top = cute.arch.fmax(ptx.warp_reduce(top, cute.arch.fmax), sink)
            base = finite(top)
            weights = [ptx.exp2(maxima[0] - base), ptx.exp2(maxima[1] - base)]
            whole = ptx.warp_reduce(sums[0] * weights[0] + sums[1] * weights[1], ptx.add)
            factor = self.inverse(whole + ptx.exp2(sink - base), cta.v_scale)
            for j in range_constexpr(MAX_GROUPS // 32):
                at = self.weight_address(cta, row, lane + 32 * j)
                ptx.st_shared_f32(at, weights[j] * factor)

    @cute.jit
    def groups_to_out(self, cta, groups):
        step = Int64(groups.q_heads) * (self.config.head_dim * 4)
        for i in cutlass.range(self.count(self.layout.owned_rows)):
            row, dim, inside = self.owned_item(cta, i)
            source = self.partial_address(cta, groups, groups.row + Int64(row), dim)
            weights = self.weight_address(cta, row, 0)
            values = []
            for at in range_constexpr(0, VECTOR, 4):
                values += self.weighted_sum(source + 4 * at, step, weights, groups.count)
            self.store_out(cta, row, dim, values, inside)
