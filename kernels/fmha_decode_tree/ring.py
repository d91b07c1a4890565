"""A ring of slots that several warps share; which of its two ways, kernels/common/ring.py says."""

from typing import Any, NamedTuple

from cutlass import Boolean, Int32, cute

from kernels.common import ptx
from kernels.common.layout import SlotLayout
from kernels.common.ring import AsyncCopy, TensorCopy


class SharedAsyncCopy(AsyncCopy):
    """Every thread of the warps copies its part."""

    def __init__(self, layout: SlotLayout, warps: int):
        super().__init__(layout, lanes=32 * warps)

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread):
        source = super().start(
            kv_pool, kv_map, kv_nbytes, kv_head, Int32(0), ring, barriers, thread
        )
        return SharedSource(source, group + 1, thread)

    def ask(self, source, stage, tile, page_token, wanted, lane):
        super().ask(source.own, stage, tile, page_token, wanted, source.thread)

    def wait(self, source, stage, phase):
        ptx.cp_async_wait(self.layout.stages - 1)
        self.meet(source)  # the other threads' copies

    def asks_first(self, source):
        """Return whether this thread asks for the first tiles: each does, for its part."""
        return Boolean(True)

    def release(self, source, stage, phase, lane):
        """Wait until every warp has read the slot; return whether this thread asks for the next."""
        self.meet(source)
        return Boolean(True)

    def meet(self, source):
        ptx.barrier(source.barrier, self.lanes)

    def publish(self, source):
        """Let every warp see what the others stored."""
        self.meet(source)


class SharedTensorCopy(TensorCopy):
    """One thread copies; which one, two kinds decide."""

    def __init__(self, layout: SlotLayout, warps: int):
        super().__init__(layout)
        self.warps = warps

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread):
        ptx.prefetch_tensor_map(kv_map.get_ptr().toint(), thread == 0)
        for stage in range(self.layout.stages):
            self.init_readers(self.readers(barriers, stage), thread == 0)
        # The fence, and the barriers that tell of full slots; the other warps use neither before
        # the CTA meets.
        source = super().start(
            kv_pool, kv_map, kv_nbytes, kv_head, Int32(0), ring, barriers, thread
        )
        return SharedSource(source, group + 1, thread)

    def readers(self, barriers, stage):
        """Return where it is counted which warps have read a slot."""
        return barriers + (self.layout.stages + stage) * 8

    def asks_first(self, source):
        """Return whether this thread, if its warp's first, asks for the first tiles."""
        return source.thread < 32

    def ask(self, source, stage, tile, page_token, wanted, lane):
        super().ask(source.own, stage, tile, page_token, wanted, lane)

    def wait(self, source, stage, phase):
        ptx.mbarrier_wait(source.own.barriers + stage * 8, phase)

    def meet(self, source):
        ptx.barrier(source.barrier, 32 * self.warps)

    def publish(self, source):
        """Let every warp's MMA see what all stored, and order the next copies behind it."""
        ptx.fence_proxy_async()
        self.meet(source)


class LastWarpCopies(SharedTensorCopy):
    """The last warp to have read a slot asks for its next tile, so that none waits for the others.

    Two warpgroups of one ring would keep step otherwise, both at their softmax while the tensor
    cores idle: trees of 64 tokens, 32/8 heads of 128, batch 8 of 4,096 tokens took 72 us on an
    H200, not 63.
    """

    def init_readers(self, readers, chosen):
        ptx.st_shared_i32(readers, Int32(0), chosen)

    def release(self, source, stage, phase, lane):
        """Count the slot as read; return whether this thread asks, if it is its warp's first."""
        cute.arch.sync_warp()
        # Relaxed: what was read has arrived in registers, and what was written was published. An
        # order with other memory would cost 0.1 us of the 9.8 that a tree of four tokens takes.
        readers = self.readers(source.own.barriers, stage)
        before = ptx.atomic_add_shared(readers, Int32(1), lane == 0)
        return (before & (self.warps - 1)) == self.warps - 1


class FirstWarpCopies(SharedTensorCopy):
    """The first warp waits for the others, and asks.

    It knows sooner than the sum of an atomic comes back. That pays where slots are free in the
    middle of a tile: e4m3 trees of 16 tokens, 32/8 heads of 128, batch 32 of 4,096 tokens 100 us
    on an H200; where the last warp asks, 106.
    """

    def init_readers(self, readers, chosen):
        ptx.mbarrier_init(readers, chosen, arrivals=self.warps)

    @cute.jit
    def release(self, source, stage, phase, lane):
        """Report the slot as read; wait for the others in the first warp, which asks."""
        readers = self.readers(source.own.barriers, stage)
        cute.arch.sync_warp()
        ptx.mbarrier_arrive(readers, lane == 0)
        if source.thread < 32:
            ptx.mbarrier_wait(readers, phase)
        return source.thread < 32


class SharedSource(NamedTuple):
    own: Any  # the copy's own
    barrier: Any  # of the CTA's sixteen, at which the warps meet
    thread: Any  # among the warps'
