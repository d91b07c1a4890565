"""Two ways to multiply, with one interface and one register layout.

A warp keeps 16 rows. Q is the A operand, S = Q K^T and O += P V come as C fragments: a lane has, of
rows lane / 4 and that + 8, elements 2 * (lane % 4) and the next of each 8 tokens or dimensions
(e4m3 by ``WarpMma``: of each 16 dimensions, 4 * (lane % 4) and the next three). P becomes the A
operand where it is.
"""

from typing import NamedTuple

from cutlass import Float32, Uint32, cute

from kernels.common import ptx, wgmma


class Encoding(NamedTuple):
    """How the elements of a word of V tell that they are not finite."""

    exponents: int  # all ones where one is not; in e4m3 the mantissa must be so too
    ones: int  # carries into the sign
    signs: int
    width: int

    def flaws(self, word):
        """Return the word's signs of elements that are not finite."""
        return ((word & Uint32(self.exponents)) + Uint32(self.ones)) & Uint32(self.signs)

    def without(self, word, flaws):
        """Return the word with zeros in the place of ``flaws``."""
        return word & ~((flaws >> Uint32(self.width - 1)) * Uint32((1 << self.width) - 1))


F16 = Encoding(0x7C007C00, 0x04000400, 0x80008000, 16)
E4M3 = Encoding(0x7F7F7F7F, 0x01010101, 0x80808080, 8)


class WarpMma:
    """mma.sync: every architecture from sm_80. Warps that share rows take 128 dimensions each."""

    def __init__(self, layout):
        self.layout, self.slot = layout, layout.tile
        self.e4m3 = layout.config.kv_dtype == "e4m3" and not layout.converts
        self.pairs = layout.dims * (1 if self.e4m3 else 2) // 32  # of 16-byte chunks
        self.encoding = E4M3 if self.e4m3 else F16

    def load_q(self, q, row, dim_slice, lane):
        """Return A fragments of each 16 dimensions of the warp's, of 16 rows from ``row`` on."""
        slot = self.layout.q_slot
        q = self.slice_of(slot, q, dim_slice, 2)
        steps = range(self.layout.dims // 16)
        if self.e4m3:
            # Converted K words hold dimensions 4 * quad + (0, 1 | 2, 3) of a step.
            quad = lane & 3
            top, bottom = (
                slot.matrix_address(q, row + (lane >> 2) + 8 * i, quad >> 1) + (quad & 1) * 8
                for i in (0, 1)
            )
            pairs = [
                [ptx.ld_shared_u32x2(slot.chunk_pair(half, step)) for half in (top, bottom)]
                for step in steps
            ]
            return [(top[0], bottom[0], top[1], bottom[1]) for top, bottom in pairs]
        address = slot.matrix_address(q, row + (lane & 15), lane >> 4)
        return [ptx.ldmatrix_x4(slot.chunk_pair(address, step)) for step in steps]

    def slice_of(self, slot, half, dim_slice, nbytes):
        """Return where a warp's dimensions, of ``nbytes`` each, begin in K, V or q at ``half``."""
        blocks = self.layout.dims * nbytes // slot.block_nbytes
        return half + dim_slice * (blocks * slot.rows * slot.block_nbytes)

    def slice_address(self, half, dim_slice):
        return self.slice_of(self.slot, half, dim_slice, 1 if self.e4m3 else 2)

    def issue_scores(self, k_half, dim_slice, q_frags, scores, lane):
        """Set ``scores``, over this warp's dimensions, of every token."""
        slots = self.slot
        row, odd = (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1
        base = slots.matrix_address(self.slice_address(k_half, dim_slice), row, odd)
        for t in range(slots.rows // 16):
            address = base + t * (16 * slots.block_nbytes)
            sums = [[Float32(0.0)] * 4 for _ in range(2)]
            for pair in range(self.pairs):
                words = ptx.ldmatrix_x4(slots.chunk_pair(address, pair))
                for n in range(2):
                    for step, b in self._k_operands(pair, words[2 * n : 2 * n + 2]):
                        sums[n] = ptx.mma_m16n8k16(q_frags[step], b, sums[n])
            for n in range(2):
                for c in range(4):
                    scores[(2 * t + n) * 4 + c] = sums[n][c]

    def _k_operands(self, pair, words):
        """Return [(step, B registers)] of two 16-byte chunks of 8 tokens."""
        if not self.e4m3:
            return [(pair, words)]
        return [(2 * pair + i, ptx.e4m3x4_to_f16x2x2(words[i])) for i in (0, 1)]

    def await_scores(self, scores, pending=0):
        pass

    def issue_accumulate(self, half, dim_slice, p_frags, acc, lane):
        """Add P V to ``acc``, over this warp's dimensions."""
        slots = self.slot
        base = slots.matrix_address(self.slice_address(half, dim_slice), lane & 15, lane >> 4)
        for t, a in enumerate(p_frags):
            address = base + t * (16 * slots.block_nbytes)
            for pair in range(self.pairs):
                words = ptx.ldmatrix_x4(slots.chunk_pair(address, pair), transpose=True)
                for n, b in self._v_operands(pair, words):
                    sums = ptx.mma_m16n8k16(a, b, [acc[4 * n + c] for c in range(4)])
                    for c in range(4):
                        acc[4 * n + c] = sums[c]

    def await_accumulate(self, acc, weights):
        pass

    def _v_operands(self, pair, words):
        """Return [(8-dimension tile, B registers)] of two transposed chunks of 16 tokens."""
        if not self.e4m3:
            return [(2 * pair, words[:2]), (2 * pair + 1, words[2:])]
        tiles = []
        for i in (0, 1):
            # A transposed word holds (token, token + 1) x (dim 2g, 2g + 1): bring the two tokens
            # of a dimension together. One tile has the even dimensions of a chunk, one the odd.
            first, second = (
                ptx.e4m3x4_to_f16x2x2(ptx.byte_permute(word, 0x3120))
                for word in words[2 * i : 2 * i + 2]
            )
            tiles += [(2 * (2 * pair + i) + odd, (first[odd], second[odd])) for odd in (0, 1)]
        return tiles

    def add_non_finite(self, half, dim_slice, token, seen, acc, lane):
        """Add what of V's row ``token`` is not finite to the sums of the two rows, if they see it.

        Its weight would not change it.
        """
        slots = self.slot
        for odd in (0, 1):
            row = slots.matrix_address(self.slice_address(half, dim_slice), token, odd)
            for pair in range(self.pairs):
                word = ptx.ld_shared_u32(slots.chunk_pair(row, pair) + (lane & 3) * 4)
                flaws = self.encoding.flaws(word)
                chunk = 2 * pair + odd
                for i, (value, at) in enumerate(self._elements(word, chunk)):
                    flaw = (flaws >> Uint32(self.encoding.width * (i + 1) - 1)) & 1 != 0
                    for r in range(2):
                        more = ptx.select(flaw & seen[r], value, Float32(0.0))
                        acc[at + 2 * r] = acc[at + 2 * r] + more

    def _elements(self, word, chunk):
        """Return [(value, place of the first row's sum)] of a lane's word of a 16-byte chunk."""
        if not self.e4m3:
            low, high = ptx.f16x2_to_f32x2(word)
            return [(low, 4 * chunk), (high, 4 * chunk + 1)]
        first, second = (ptx.f16x2_to_f32x2(pair) for pair in ptx.e4m3x4_to_f16x2x2(word))
        even, odd = 8 * chunk, 8 * chunk + 4
        return [(first[0], even), (first[1], odd), (second[0], even + 1), (second[1], odd + 1)]


class WarpgroupMma(WarpMma):
    """wgmma, sm_90a: four warps together, K and V straight from shared memory.

    Warps that share rows take 256 dimensions of V each, and all of them compute the scores.
    """

    def __init__(self, layout):
        super().__init__(layout)
        self.tile, self.q_tile = wgmma.Tile(layout.shape.tokens), wgmma.Tile(layout.rows)

    def load_q(self, q, row, dim_slice, lane):
        if not self.layout.q_stays:
            return super().load_q(q, row, dim_slice, lane)
        first = q + (row & ~63) * wgmma.BLOCK_NBYTES  # of the four warps' rows
        return self.q_tile, first, self.layout.config.head_dim // 16

    def issue_scores(self, k_half, dim_slice, q_frags, scores, lane):
        put(scores, wgmma.scores(q_frags, self.tile, k_half, values_of(scores)))

    def await_scores(self, scores, pending=0):
        """Wait for the scores; ``pending`` later products may go on."""
        put(scores, wgmma.wait(pending, values_of(scores)))

    def issue_accumulate(self, v_half, dim_slice, p_frags, acc, lane):
        v = self.slice_address(v_half, dim_slice)
        put(acc, wgmma.accumulate(p_frags, self.tile, v, values_of(acc)))

    def await_accumulate(self, acc, weights):
        """Wait for the sums, to which ``weights`` were an operand until now."""
        put(acc, wgmma.wait(0, [*values_of(acc), *values_of(weights)]))


def values_of(registers):
    return [registers[i] for i in range(cute.size(registers))]


def put(registers, values):
    for i in range(cute.size(registers)):
        registers[i] = values[i]
