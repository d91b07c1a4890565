"""A tile's arithmetic between the two products: scores, weights, and what was summed before."""

from typing import Any, NamedTuple

from cutlass import Float32, Uint32, cute

from kernels.common import ptx
from kernels.common.layout import log2
from kernels.common.merge import SLACK

# A score that is not visible: below every finite one, whose magnitude f16 factors keep under 1e13.
# Unlike -inf it can be multiplied by the scale, whose magnitude is kept above LEAST_SCALE.
HIDDEN = -3.0e38
LEAST_SCALE = 1e-30


class Thread(NamedTuple):
    smem: Any
    warp: Any
    lane: Any
    token_group: Any  # sets of warps that take different tokens
    row: Any  # the warp's first
    dim_slice: Any


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


class TileMath:
    def __init__(self, layout):
        self.layout, self.shape = layout, layout.shape

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

    def softmax_and_rescale(self, state, scale):
        """Return P, with what was summed before scaled down if scores rose.

        That is a branch, and only in it do lanes ask the others of their row for a maximum: e4m3
        trees of 16 tokens, 32/8 heads of 128, batch 32 of 4,096 keys 91 us on an H200, not 98.
        """
        tops = [pairwise(self.row_of(state.scores, half), cute.arch.fmax) for half in range(2)]
        rose = [(tops[i] - state.row_max[i]) * scale > Float32(SLACK) for i in range(2)]
        self.scale_down(state, *tops, scale, cute.arch.vote_any_sync(rose[0] | rose[1]))
        return self.weigh(state, scale)

    @cute.jit
    def scale_down(self, state, top, other_top, scale, rose):
        if rose:
            corrections, _ = self.move_bases(state, (top, other_top), scale)
            self._scale(state.acc, corrections)

    def softmax(self, state, scale):
        """Return P, each row's correction of ``acc``, and if any is not 1; without a branch."""
        tops = [pairwise(self.row_of(state.scores, half), cute.arch.fmax) for half in range(2)]
        corrections, rose = self.move_bases(state, tops, scale)
        weights = self.weigh(state, scale)
        return weights, corrections, cute.arch.vote_any_sync(rose)

    def row_of(self, scores, half):
        return [scores[at] for at in self.places(half)]

    def places(self, half):
        """Return where a lane's scores of the first or the second of its rows are."""
        return [4 * n + 2 * half + c for n in range(self.shape.tokens // 8) for c in range(2)]

    def move_bases(self, state, tops, scale):
        """Let bases and sums follow the lanes' maxima.

        Return each row's correction, which ``acc`` still needs, and if any is not 1.
        """
        corrections, moved = [], None
        for half in range(2):
            tile_max = ptx.warp_reduce(tops[half], cute.arch.fmax, lane_masks=(2, 1))
            old = state.row_max[half]
            top = cute.arch.fmax(old, tile_max)
            rose = (top - old) * scale > Float32(SLACK)
            new = ptx.select(rose, top, old)
            base = ptx.select(new == Float32(HIDDEN), Float32(0.0), ptx.mul_rn(new, scale))
            correction = ptx.exp2(state.row_base[half] - base)
            # Nothing has been summed that 0 would lose, and the base may have come down from 0.
            correction = ptx.select(old == Float32(HIDDEN), Float32(0.0), correction)
            state.row_max[half] = new
            state.row_base[half] = base
            state.row_sum[half] = state.row_sum[half] * correction
            corrections.append(correction)
            moved = rose if moved is None else moved | rose
        return corrections, moved

    def weigh(self, state, scale):
        """Return P, and add it up."""
        weights = {}
        for half in range(2):
            places = self.places(half)
            for at in places:
                weights[at] = ptx.exp2_scaled(state.scores[at], scale, -state.row_base[half])
            total = pairwise([weights[at] for at in places], ptx.add)
            state.row_sum[half] = state.row_sum[half] + total
        return weights

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
            self._scale(state.acc, corrections)

    def _scale(self, acc, corrections):
        for i in range(self.layout.dims // 2):
            acc[i] = acc[i] * corrections[(i >> 1) & 1]


def pairwise(values, combine):
    """Combine neighbours, then their results, and so on: short chains."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
