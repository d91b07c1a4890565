"""How partial results meet: the warps of a CTA, the CTAs of a cluster, the groups of a sequence.

A partial result of a head is a base m (of scores to base 2, none of which is more than SLACK above
it; below any score, or -inf, where no key was visible), a sum l of exp2(x - m), and unnormalised
accumulators. The warps meet in shared memory; the CTAs of a cluster push to the one that owns a
slice of the dimensions; the groups meet in the workspace, where the last to arrive merges in the
order of groups and sets the counter back to zero. All fp32.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute, range_constexpr

from ctm_rt.decode.plan import HEADS_PER_TILE, MAX_GROUPS
from kernels.common import ptx
from kernels.common.layout import log2

# Exponents may be so far above 0 before a row's sums are scaled down, which after the first tiles
# hardly ever happens then. Weights stay far from the largest f16, and as exact as below 1.
SLACK = 8.0
GROUPS_IN_FLIGHT = 8  # partials that a merging thread asks for before it waits


class Cta(NamedTuple):
    """What the merging steps need to know of one CTA at run time; addresses in bytes."""

    smem: Any
    tid: Any
    heads: Any  # query heads of its KV head
    rank: Any  # in the cluster
    q_head: Any  # the first
    sink_address: Any  # 0: none
    v_scale: Any
    out_address: Any  # of the first head's row
    out_head_nbytes: Any


class Groups(NamedTuple):
    """Where the groups of one sequence and KV head meet."""

    partials: Any  # accumulators [work][query head][dimension]
    stats: Any  # (m, l) [work][query head][rank]
    semaphore: Any
    row: Any  # of the first group's first head
    group: Any
    count: Any
    q_heads: Any  # rows from one group to the next


class Merge:
    """Static sizes, and the steps. ``dim_split`` warps share their tokens, a slice of dims each."""

    def __init__(self, layout):
        self.layout, self.config, self.shape = layout, layout.config, layout.shape

    # --- warps ------------------------------------------------------------------------------------

    def state_address(self, smem, token_group, head, dim):
        # A head's row is padded by 16 bytes, so the four heads that a quad stores at once fall
        # into different banks.
        base = smem + self.layout.token_groups * self.layout.max_heads * 8
        row = token_group * self.layout.max_heads + head
        return base + (row * (self.config.head_dim + 4) + dim) * 4

    def stats_address(self, smem, token_group, head):
        return smem + (token_group * self.layout.max_heads + head) * 8

    def store_warp(self, smem, warp, lane, acc, row_base, row_sum):
        """Store a warp's state; call it between two barriers of the CTA."""
        layout, head_tiles = self.layout, self.shape.head_tiles
        group, quad = lane >> 2, lane & 3
        token_group = warp >> log2(layout.dim_split)
        first_dim = (warp & (layout.dim_split - 1)) * layout.dims
        for n in range(head_tiles):
            for c in range(2):
                head = HEADS_PER_TILE * n + 2 * quad + c
                total = ptx.warp_reduce(row_sum[2 * n + c], ptx.add, lane_masks=(16, 8, 4))
                # Warps that share tokens, and lanes that share a head, store the same numbers.
                ptx.st_shared_f32x2(
                    self.stats_address(smem, token_group, head), (row_base[2 * n + c], total)
                )
                for m in range(layout.dims // 16):
                    for half in range(2):
                        if self.config.kv_dtype == "e4m3":
                            dim = 16 * m + 2 * group + half
                        else:
                            dim = 16 * m + group + 8 * half
                        ptx.st_shared_f32(
                            self.state_address(smem, token_group, head, first_dim + dim),
                            acc[(m * head_tiles + n) * 4 + 2 * half + c],
                        )

    def combine(self, sources, floor):
        """Return (maximum, sum, 4 accumulators) over (stats, accumulators) addresses.

        The maximum is at least ``floor``.
        """
        stats = [ptx.ld_shared_f32x2(address) for address, _ in sources]
        maximum = floor
        for m, _ in stats:
            maximum = cute.arch.fmax(maximum, m)
        base = finite(maximum)
        total = Float32(0.0)
        values = [Float32(0.0)] * 4
        for (m, l), (_, address) in zip(stats, sources, strict=True):
            weight = ptx.exp2(m - base)
            total = total + l * weight
            part = ptx.ld_shared_f32x4(address)
            values = [v + p * weight for v, p in zip(values, part, strict=True)]
        return maximum, total, values

    def warp_sources(self, smem, head, dim):
        return [
            (self.stats_address(smem, g, head), self.state_address(smem, g, head, dim))
            for g in range(self.layout.token_groups)
        ]

    # --- cluster ----------------------------------------------------------------------------------

    def inbox_address(self, smem, rank, head, dim):
        """Return where CTA ``rank`` leaves 4 accumulators of an owned dimension."""
        row = rank * self.layout.max_heads + head
        return smem + self.layout.inbox + (row * self.layout.owned_dims + dim) * 4

    def inbox_stats_address(self, smem, rank, head):
        base = (
            self.layout.inbox
            + self.shape.cluster * self.layout.max_heads * self.layout.owned_dims * 4
        )
        return smem + base + (rank * self.layout.max_heads + head) * 8

    def items(self, cta, dims):
        """Yield (head, dimension, whether there is such an item): four dimensions of one head."""
        per_head = dims // 4
        for i in range(-(-self.layout.max_heads * per_head // self.layout.threads)):
            index = cta.tid + i * self.layout.threads
            head = index >> log2(per_head)
            # A thread with nothing to do reads what the first head's reader reads.
            inside = head < cta.heads
            yield ptx.select(inside, head, Int32(0)), (index & (per_head - 1)) * 4, inside

    @cute.jit
    def exchange(self, cta, nbytes):
        """Push every dimension's sums to their owner; wait for the ``nbytes`` that come here."""
        ptx.mbarrier_expect(cta.smem + self.layout.barrier, nbytes, cta.tid == 0)
        ptx.cluster_wait()  # every CTA's barrier stands
        self.push(cta)
        ptx.mbarrier_wait(cta.smem + self.layout.barrier, Int32(0), "cluster")

    def push(self, cta):
        """Send every dimension's sums to the CTA of the cluster that owns it."""
        for head, dim, inside in self.items(cta, self.config.head_dim):
            maximum, total, values = self.combine(
                self.warp_sources(cta.smem, head, dim), Float32(ptx.NEG_INF)
            )
            owner = dim >> log2(self.layout.owned_dims)
            owned = dim & (self.layout.owned_dims - 1)
            barrier = ptx.peer_address(cta.smem + self.layout.barrier, owner)
            ptx.st_async_f32x4(
                ptx.peer_address(self.inbox_address(cta.smem, cta.rank, head, owned), owner),
                values, barrier, inside,
            )  # fmt: skip
            ptx.st_async_f32x2(
                ptx.peer_address(self.inbox_stats_address(cta.smem, cta.rank, head), owner),
                (maximum, total), barrier, inside & (owned == 0),
            )  # fmt: skip

    def parts(self, cta, with_sink):
        """Yield (head, owned dimension, inside, maximum, sum, 4 accumulators, sink)."""
        for head, dim, inside in self.items(cta, self.layout.owned_dims):
            if self.shape.cluster > 1:
                sources = [
                    (
                        self.inbox_stats_address(cta.smem, rank, head),
                        self.inbox_address(cta.smem, rank, head, dim),
                    )
                    for rank in range(self.shape.cluster)
                ]
            else:
                sources = self.warp_sources(cta.smem, head, dim)
            sink = self.sink_log2(cta, head) if with_sink else Float32(ptx.NEG_INF)
            yield (head, dim, inside, *self.combine(sources, sink), sink)

    def first_owned_dim(self, cta):
        return cta.rank * self.layout.owned_dims

    @cute.jit
    def sink_log2(self, cta, head):
        sink = Float32(ptx.NEG_INF)
        if cta.sink_address != 0:
            address = cta.sink_address + Int64(cta.q_head + head) * 4
            sink = ptx.ld_global_f32(address) * Float32(ptx.LOG2_E)
        return sink

    def inverse(self, total, v_scale):
        """Return v_scale / total; 0 where no key was visible. A NaN stays."""
        return ptx.select(total == Float32(0.0), Float32(0.0), v_scale / total)

    def store_out(self, cta, head, dim, values, inside):
        address = (
            cta.out_address
            + Int64(head) * cta.out_head_nbytes
            + Int64(self.first_owned_dim(cta) + dim) * 2
        )
        packed = (ptx.pack_f16x2(values[0], values[1]), ptx.pack_f16x2(values[2], values[3]))
        ptx.st_global_u32x2(address, packed, inside)

    def parts_to_out(self, cta):
        for head, dim, inside, maximum, total, values, sink in self.parts(cta, with_sink=True):
            whole = total + ptx.exp2(sink - finite(maximum))
            factor = self.inverse(whole, cta.v_scale)
            self.store_out(cta, head, dim, [v * factor for v in values], inside)

    # --- groups -----------------------------------------------------------------------------------

    @cute.jit
    def meet(self, cta, groups):
        """Leave this group's partial result; the last group to do so stores the sequence's."""
        self.parts_to_workspace(cta, groups)
        cute.arch.sync_threads()
        ticket = cta.smem + (self.layout.barrier + 8)
        if cta.tid == 0:
            # The barrier orders the CTA's stores before this release, and what the other CTAs
            # released before the loads that follow the next barrier.
            ptx.st_shared_i32(ticket, ptx.atomic_add_acq_rel(groups.semaphore, Int32(1)))
        cute.arch.sync_threads()
        if ptx.ld_shared_i32(ticket) == groups.count - 1:
            if cta.tid == 0:
                ptx.st_global_i32(groups.semaphore, Int32(0))
            self.weigh(cta, groups)
            cute.arch.sync_threads()
            self.groups_to_out(cta, groups)

    def partial_address(self, cta, groups, row, dim):
        column = Int64(self.first_owned_dim(cta) + dim)
        return groups.partials + (row * self.config.head_dim + column) * 4

    def group_stats_address(self, cta, groups, row):
        return groups.stats + (row * self.shape.cluster + Int64(cta.rank)) * 8

    def weight_address(self, cta, head, group):
        return cta.smem + (head * MAX_GROUPS + group) * 4

    def parts_to_workspace(self, cta, groups):
        first = groups.row + Int64(groups.group) * groups.q_heads
        for head, dim, inside, maximum, total, values, _ in self.parts(cta, with_sink=False):
            row = first + Int64(head)
            ptx.st_global_f32x4(self.partial_address(cta, groups, row, dim), values, inside)
            # Every rank stores its own copy, which its own arrival releases.
            stats = self.group_stats_address(cta, groups, row)
            ptx.st_global_f32x2(stats, (maximum, total), inside & (dim == 0))

    @cute.jit
    def weigh(self, cta, groups):
        """Leave in shared memory what each group's accumulators count: a warp a head."""
        lane, warp = cta.tid & 31, cute.arch.make_warp_uniform(cta.tid >> 5)
        warps = self.layout.threads // 32
        for i in range_constexpr(-(-self.layout.max_heads // warps)):
            head = warp + i * warps
            if head < cta.heads:
                maxima = [Float32(ptx.NEG_INF), Float32(ptx.NEG_INF)]
                sums = [Float32(0.0), Float32(0.0)]
                for j in range_constexpr(MAX_GROUPS // 32):
                    m = Float32(ptx.NEG_INF)
                    l = Float32(0.0)
                    if lane + 32 * j < groups.count:
                        row = groups.row + Int64(lane + 32 * j) * groups.q_heads + head
                        m, l = ptx.ld_l2_f32x2(self.group_stats_address(cta, groups, row))
                    maxima[j] = m
                    sums[j] = l
                sink = self.sink_log2(cta, head)
                top = cute.arch.fmax(maxima[0], maxima[1])
                top = cute.arch.fmax(ptx.warp_reduce(top, cute.arch.fmax), sink)
                base = finite(top)
                weights = [ptx.exp2(maxima[0] - base), ptx.exp2(maxima[1] - base)]
                whole = ptx.warp_reduce(sums[0] * weights[0] + sums[1] * weights[1], ptx.add)
                factor = self.inverse(whole + ptx.exp2(sink - base), cta.v_scale)
                for j in range_constexpr(MAX_GROUPS // 32):
                    at = self.weight_address(cta, head, lane + 32 * j)
                    ptx.st_shared_f32(at, weights[j] * factor)

    def groups_to_out(self, cta, groups):
        step = Int64(groups.q_heads) * (self.config.head_dim * 4)
        for head, dim, inside in self.items(cta, self.layout.owned_dims):
            source = self.partial_address(cta, groups, groups.row + Int64(head), dim)
            weights = self.weight_address(cta, head, 0)
            values = self.weighted_sum(source, step, weights, groups.count)
            self.store_out(cta, head, dim, values, inside)

    @cute.jit
    def weighted_sum(self, source, step, weights, count):
        sums = [Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0)]
        for first in cutlass.range(0, count, GROUPS_IN_FLIGHT):
            sums = self.add_groups(sums, source, step, weights, first, count)
        return sums

    def add_groups(self, sums, source, step, weights, first, count):
        """Add ``GROUPS_IN_FLIGHT`` partials; past the last group its own is read, not added."""
        index = [cutlass.min(first + j, count - 1) for j in range(GROUPS_IN_FLIGHT)]
        parts = [ptx.ld_l2_f32x4(source + Int64(i) * step) for i in index]
        for j, part in enumerate(parts):
            weight = ptx.ld_shared_f32(weights + index[j] * 4)
            inside = first + j < count
            sums = [
                s + ptx.select(inside, p * weight, Float32(0.0))
                for s, p in zip(sums, part, strict=True)
            ]
        return sums


def finite(maximum):
    """Return the maximum, or 0 where no key was visible: -inf - -inf must not be formed."""
    return ptx.select(maximum == Float32(ptx.NEG_INF), Float32(0.0), maximum)
