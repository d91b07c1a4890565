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

    def ask(self, source, stage, tile, page_token, wanted):
        super().ask(source.own, stage, tile, page_token, wanted)

    def wait(self, source, stage, phase):
        ptx.cp_async_wait(self.layout.stages - 1)
        self.meet(source)  # the other threads' copies

    def asks_first(self, source):
        """Return whether this thread asks for the first tiles: each does, for its part."""
        return Boolean(True)

    def release(self, source, stage):
        """Wait until every warp has read the slot; return whether this thread asks for the next."""
        self.meet(source)
        return Boolean(True)

    def meet(self, source):
        ptx.barrier(source.barrier, self.lanes)

    def publish(self, source):
        """Let every warp see what the others stored."""
        self.meet(source)


class SharedTensorCopy(TensorCopy):
    """The first warp copies: where tiles are converted, who has met to publish one has read it."""

    def __init__(self, layout: SlotLayout, warps: int):
        super().__init__(layout)
        self.warps = warps

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread):
        ptx.prefetch_tensor_map(kv_map.get_ptr().toint(), thread == 0)
        # The other warps use the barriers after the CTA has met.
        source = super().start(
            kv_pool, kv_map, kv_nbytes, kv_head, Int32(0), ring, barriers, thread
        )
        return SharedSource(source, group + 1, thread)

    def asks_first(self, source):
        """Return whether this thread's warp asks for the first tiles."""
        return source.thread < 32

    def ask(self, source, stage, tile, page_token, wanted):
        super().ask(source.own, stage, tile, page_token, wanted)

    def wait(self, source, stage, phase):
        ptx.mbarrier_wait(source.own.barriers + stage * 8, phase)

    def release(self, source, stage):
        """Leave a slot that every warp has read; return whether this thread's warp asks next."""
        return self.asks_first(source)

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

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread):
        for stage in range(self.layout.stages):
            ptx.st_shared_i32(self.readers(barriers, stage), Int32(0), thread == 0)
        return super().start(kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread)

    def readers(self, barriers, stage):
        """Return where it is counted which warps have read a slot."""
        return barriers + (self.layout.stages + stage) * 8

    def release(self, source, stage):
        """Count the slot as read; return, to the elected lane, whether its warp is the last."""
        cute.arch.sync_warp()
        # Relaxed: what was read has arrived in registers, and what was written was published. An
        # order with other memory would cost 0.1 us of the 9.8 that a tree of four tokens takes.
        readers = self.readers(source.own.barriers, stage)
        before = ptx.atomic_add_shared(readers, Int32(1), ptx.elect_one())
        return (before & (self.warps - 1)) == self.warps - 1


class SharedSource(NamedTuple):
    own: Any  # the copy's own
    barrier: Any  # of the CTA's sixteen, at which the warps meet
    thread: Any  # among the warps'
