"""A ring of slots that several warps share; which of its two ways, kernels/common/ring.py says."""

from typing import Any, NamedTuple

from cutlass import Int32, cute

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

    def release(self, source, stage, phase, lane):
        """Wait until every warp has read the slot."""
        self.meet(source)

    def meet(self, source):
        ptx.barrier(source.barrier, self.lanes)

    def publish(self, source):
        """Let every warp see what the others stored."""
        self.meet(source)


class SharedTensorCopy(TensorCopy):
    """The first warp copies; what the warps have read they report to a barrier."""

    def __init__(self, layout: SlotLayout, warps: int):
        super().__init__(layout)
        self.warps = warps

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, ring, barriers, group, thread):
        ptx.prefetch_tensor_map(kv_map.get_ptr().toint(), thread == 0)
        empty = barriers + 8 * self.layout.stages
        for stage in range(self.layout.stages):
            ptx.mbarrier_init(empty + 8 * stage, thread == 0, arrivals=self.warps)
        # The fence, and the barriers that tell of full slots; the other warps use neither before
        # the CTA meets.
        source = super().start(
            kv_pool, kv_map, kv_nbytes, kv_head, Int32(0), ring, barriers, thread
        )
        return SharedSource(source, group + 1, thread)

    def ask(self, source, stage, tile, page_token, wanted, lane):
        first = source.thread < 32
        super().ask(source.own, stage, tile, page_token, wanted & first, lane)

    def wait(self, source, stage, phase):
        await_phase(source.own.barriers + stage * 8, phase)

    @cute.jit
    def release(self, source, stage, phase, lane):
        """Report the slot as read; in the first warp, wait until every warp has."""
        empty = source.own.barriers + (self.layout.stages + stage) * 8
        cute.arch.sync_warp()
        ptx.mbarrier_arrive(empty, lane == 0)
        if source.thread < 32:
            await_phase(empty, phase)

    def meet(self, source):
        ptx.barrier(source.barrier, 32 * self.warps)

    def publish(self, source):
        """Let every warp's MMA see what all stored, and order the next copies behind it."""
        ptx.fence_proxy_async()
        self.meet(source)


class SharedSource(NamedTuple):
    own: Any  # the copy's own
    barrier: Any  # of the CTA's sixteen, at which the warps meet
    thread: Any  # among the warps'


@cute.jit
def await_phase(barrier, phase):
    done = ptx.mbarrier_done(barrier, phase, scope="cta")
    while done == 0:
        done = ptx.mbarrier_done(barrier, phase, scope="cta")
