"""Sizes and places in shared memory; integers alone, the addresses may be traced values."""

from dataclasses import dataclass

# Of an SM of sm_90 or sm_100; smaller SMs hold less shared memory.
SM_SMEM_NBYTES, SM_REGISTERS = 233_472, 65_536
_SMEM_NBYTES_BESIDE = 1024  # each CTA takes so much more than it asks for


def log2(power: int) -> int:
    return power.bit_length() - 1


def ctas_per_sm(smem_nbytes: int, threads: int, registers: int) -> int:
    """Return how many CTAs find room on an SM, at least one; ``registers`` are a thread's.

    Launch bounds tell ptxas, which does not know how much shared memory a CTA takes. Left alone it
    aims at more CTAs and saves registers: f16 decode, heads of 128, batch 1 of 4,096 tokens, took
    7.4 us on an H200 in 127 registers and 8.0 in 96, from one order of the same source to another.
    """
    by_smem = SM_SMEM_NBYTES // (smem_nbytes + _SMEM_NBYTES_BESIDE)
    return max(1, min(by_smem, SM_REGISTERS // (threads * registers)))


@dataclass(frozen=True)
class SlotLayout:
    """One warp's ring of slots: K rows, then V rows, as kernels/common/ring.py says."""

    rows: int  # tokens
    row_nbytes: int
    stages: int

    @property
    def block_nbytes(self) -> int:
        return min(128, self.row_nbytes)

    @property
    def blocks(self) -> int:
        return self.row_nbytes // self.block_nbytes

    @property
    def block_chunks(self) -> int:
        return self.block_nbytes // 16

    @property
    def half_nbytes(self) -> int:
        return self.rows * self.row_nbytes

    @property
    def slot_nbytes(self) -> int:
        return 2 * self.half_nbytes

    @property
    def ring_nbytes(self) -> int:
        return self.stages * self.slot_nbytes

    def half(self, ring, stage, half):
        """Return where the K rows of a slot lie, or, of ``half`` 1, its V rows."""
        return ring + stage * self.slot_nbytes + half * self.half_nbytes

    def swizzle(self, row):
        """Return by what a row's chunks are rotated; rows below 128 bytes share a line of banks."""
        return (row >> (3 - log2(self.block_chunks))) & (self.block_chunks - 1)

    def matrix_address(self, half, row, odd):
        """Return where this lane's row of an 8x8 matrix lies, in chunk 0 or, if ``odd``, 1."""
        return half + row * self.block_nbytes + ((odd ^ self.swizzle(row)) << 4)

    def chunk_pair(self, address, pair):
        """Move ``matrix_address`` on to chunks 2 * pair and 2 * pair + 1."""
        block, within = divmod(pair, self.block_chunks // 2)
        return (address ^ (within << 5)) + block * (self.rows * self.block_nbytes)
