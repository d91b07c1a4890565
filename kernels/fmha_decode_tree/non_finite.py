"""Values that are not finite, of draft tokens that some rows see and others do not."""

import cutlass
from cutlass import Int32, Uint32, cute

from kernels.common import ptx
from kernels.fmha_decode_tree import masks


class NonFinite:
    """Keeps them from the rows that do not see them; the warps of a ring share the work."""

    def __init__(self, layout, mma, loads):
        self.layout, self.shape, self.mma, self.loads = layout, layout.shape, mma, loads

    @cute.jit
    def part(self, source, v_tile, token, bits, thread, keys, acc):
        """Add what of V is not finite to the rows that see it, and put 0 in its place.

        Of a key that is not visible P is 0, but 0 times NaN is NaN: it must not meet the MMA.
        """
        threads = 32 * self.layout.group_warps
        if ptx.barrier_any(source.barrier, threads, self.flaws(source, v_tile)) != 0:
            for at in cutlass.range(0, cutlass.min(keys.length - token, Int32(self.shape.tokens))):
                seen = [masks.bit(bits[0], at), masks.bit(bits[1], at)]
                self.mma.add_non_finite(v_tile, thread.dim_slice, at, seen, acc, thread.lane)
            self.loads.meet(source)
            self.clean(source, v_tile)
            self.loads.publish(source)

    def chunks(self, source, v_tile):
        """Return the addresses of a thread's part of V."""
        step = 16 * 32 * self.layout.group_warps
        first = v_tile + source.thread * 16
        return [first + at for at in range(0, self.layout.tile.half_nbytes, step)]

    def flaws(self, source, v_tile):
        """Return not 0 if a thread's part of V holds what is not finite."""
        flaws = Uint32(0)
        for address in self.chunks(source, v_tile):
            for word in ptx.ld_shared_u32x4(address):
                flaws = flaws | self.mma.encoding.flaws(word)
        return flaws

    def clean(self, source, v_tile):
        encoding = self.mma.encoding
        for address in self.chunks(source, v_tile):
            words = ptx.ld_shared_u32x4(address)
            words = [encoding.without(word, encoding.flaws(word)) for word in words]
            ptx.st_shared_u32x4(address, words)
