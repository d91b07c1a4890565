"""What a warp does with the keys and values of one tile: scores, weights, sums.

K is the A operand (16 tokens), q the B operand (8 heads): S^T = K q^T, O^T = V^T P^T, so a head's
statistics sit on the lanes that hold its accumulators.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int64, Uint32, cute, range_constexpr

from ctm_rt.decode.plan import HEADS_PER_TILE
from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.merge import SLACK
from kernels.fmha_decode_ctm.layout import MMA_TOKENS


class Thread(NamedTuple):
    smem: Any
    warp: Any
    lane: Any
    token_group: Any


class OtherHalf(NamedTuple):
    """The query heads of the KV head that another CTA takes, if ``there`` is not 0."""

    there: Any
    q_address: Any  # of the first head's row
    head_nbytes: Any
    heads: Any


# The first base, below every score. Unlike -inf it can be subtracted from itself, as the merge does
# where no key is visible.
LOWEST = -3.4028234663852886e38


class State(NamedTuple):
    """A warp's partial result, in registers."""

    acc: Any  # [16-dimension tile][head tile][C register]
    row_base: Any  # [head tile][column]: no score is more than SLACK above
    row_sum: Any  # what the lane has seen


class TileMath:
    def __init__(self, layout):
        self.layout, self.config, self.shape = layout, layout.config, layout.shape
        self.slot = layout.slot

    def state(self):
        """Return the partial result of no tile."""
        acc, row_base, row_sum = (
            cute.make_rmem_tensor((count,), Float32)
            for count in (
                self.shape.head_tiles * self.layout.dims // 4,
                self.shape.head_tiles * 2,
                self.shape.head_tiles * 2,
            )
        )
        acc.fill(0.0)
        row_base.fill(LOWEST)
        row_sum.fill(0.0)
        return State(acc, row_base, row_sum)

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

    def scores(self, thread, k_slot, q_frags, phase):
        scores = self.warp_scores(k_slot, q_frags, thread.lane)
        if self.layout.dim_split > 1:
            scores = self.exchange_scores(scores, thread.smem, thread.warp, thread.lane, phase)
        return scores

    def warp_scores(self, k_slot, q_frags, lane):
        """Return S^T = K q^T: C fragments [token tile][head tile] of (16 tokens, 8 heads)."""
        slots = self.slot
        base = slots.matrix_address(k_slot, lane & 15, lane >> 4)
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

    def softmax(self, state, scores, tile, scale_log2, lane):
        """Return P^T as B fragments [head tile][token tile], and add it to the sums."""
        x = self.visible_scores(scores, tile, scale_log2, lane)
        tops, rose = [], None
        for at, column in enumerate(x):
            top = column[0]
            for value in column[1:]:
                top = cute.arch.fmax(top, value)
            tops.append(top)
            rises = top - state.row_base[at] > Float32(SLACK)
            rose = rises if rose is None else rose | rises
        self.scale_down(state, tops, cute.arch.vote_any_sync(rose))
        weights = [
            [ptx.exp2(value - state.row_base[at]) for value in column]
            for at, column in enumerate(x)
        ]
        for at, column in enumerate(weights):
            total = column[0]
            for value in column[1:]:
                total = total + value
            state.row_sum[at] = state.row_sum[at] + total
        return [
            [
                tuple(
                    ptx.movmatrix_trans(ptx.pack_f16x2(left[i], right[i]))
                    for i in (2 * t, 2 * t + 1)
                )
                for t in range(self.shape.token_tiles)
            ]
            for left, right in zip(weights[::2], weights[1::2], strict=True)
        ]

    def visible_scores(self, scores, tile, scale_log2, lane):
        """Return a lane's scaled scores [head tile, column][8-token half]; -inf if not visible."""
        first = tile.first + (lane >> 2)
        halves = range(2 * self.shape.token_tiles)
        visible = [Uint32(first + 8 * i) < Uint32(tile.span) for i in halves]
        return [
            [
                ptx.select(
                    visible[i],
                    scores[i // 2][n][2 * (i % 2) + c] * scale_log2,
                    Float32(ptx.NEG_INF),
                )
                for i in halves
            ]
            for n in range(self.shape.head_tiles)
            for c in range(2)
        ]

    @cute.jit
    def scale_down(self, state, tops, rose):
        """Let bases follow the lanes' maxima if a score rose by more than SLACK.

        Only then do lanes ask the others of their head for a maximum: on an H200 e4m3 d128, batch
        1 of 4,096 tokens, 6.1 us, not 6.3.
        """
        if rose:
            corrections = []
            for at, top in enumerate(tops):
                top = ptx.warp_reduce(top, cute.arch.fmax, lane_masks=(16, 8, 4))
                old = state.row_base[at]
                new = ptx.select(top - old > Float32(SLACK), top, old)
                correction = ptx.exp2(old - new)
                state.row_base[at] = new
                state.row_sum[at] = state.row_sum[at] * correction
                corrections.append(correction)
            heads = self.shape.head_tiles
            for i in range_constexpr(heads * self.layout.dims // 4):
                state.acc[i] = state.acc[i] * corrections[2 * ((i >> 2) % heads) + (i & 1)]

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
