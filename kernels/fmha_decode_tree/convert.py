"""K and V of e4m3, converted to f16 in shared memory: tensor cores of sm_90a multiply one type."""

from kernels.common import ptx
from kernels.common.layout import log2


class Conversion:
    """What the warps of a ring convert, each its part."""

    def __init__(self, layout):
        self.layout, self.slot = layout, layout.slot

    def tile_address(self, thread):
        """Return where the warps' converted K lies; V follows it."""
        place = thread.token_group * self.layout.converted_nbytes
        return thread.smem + (self.layout.converted + place)

    def convert(self, raw, tile, thread):
        """Convert the warp's part of K or V.

        Eight lanes take rows r and r ^ 5 of eight, and 64 elements of each: their 16-byte loads,
        and then their stores, fall into different banks in both layouts.
        """
        source, target = self.slot, self.layout.tile
        lane = thread.lane
        chunk, row = lane & 3, (lane >> 3) ^ (((lane >> 2) & 1) * 5)
        per_block = source.block_chunks // 4  # of 64 elements
        loaded = []
        # All loads first: the compiler keeps them behind earlier stores.
        for block, group in self.conversions(thread):
            at = row + group * 8
            address = source.matrix_address(raw, at, chunk + 4 * (block & (per_block - 1)))
            address += (block >> log2(per_block)) * (source.rows * source.block_nbytes)
            loaded.append((block, at, ptx.ld_shared_u32x4(address)))
        for block, at, words in loaded:
            pairs = [pair for word in words for pair in ptx.e4m3x4_to_f16x2x2(word)]
            for i in range(2):
                into = target.matrix_address(tile, at, 2 * chunk + i)
                into += block * (target.rows * target.block_nbytes)
                ptx.st_shared_u32x4(into, pairs[4 * i : 4 * i + 4])

    def conversions(self, thread):
        """Yield the warp's (64-element block, group of eight rows)."""
        warps, groups = self.layout.group_warps, self.slot.rows // 8
        warp = thread.warp & (warps - 1)
        for first in range(0, groups * self.layout.tile.blocks, warps):
            if warps <= groups:
                yield first // groups, first % groups + warp
            else:
                yield first // groups + (warp >> log2(groups)), warp & (groups - 1)
