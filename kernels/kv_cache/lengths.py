"""Count new tokens in the lengths on the device, so that a captured loop needs no host."""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, const_expr, cute

from ctm_rt.paged_kv import MAX_KV_CACHE_CAPACITY
from kernels.common import ptx
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.kv_cache.chunks import launch_options
from kernels.kv_cache.dealing import Dealing


def parameters():
    return (
        TensorParameter("seq_lens", "out", "i32", ("batch",), alignment=4),
        TensorParameter("num_tokens", "in", "i32", ("batch",), alignment=4, optional=True),
        ScalarParameter("tokens", "i32"),  # of each sequence, where there is no num_tokens
        StreamParameter(),
    )


class KvLengths:
    def __init__(self, dealing: Dealing, *, overlaps: bool):
        self.dealing, self.overlaps = dealing, overlaps

    @cute.jit
    def __call__(
        self,
        seq_lens: cute.Tensor,
        num_tokens: cute.Tensor,
        tokens: Int32,
        stream: cuda.CUstream,
    ):
        ctas = self.dealing.ctas(seq_lens.shape[0])
        if ctas > 0:
            self.kernel(seq_lens, num_tokens, tokens).launch(
                **launch_options(self.dealing, ctas, stream, self.overlaps)
            )

    @cute.kernel
    def kernel(self, seq_lens: cute.Tensor, num_tokens: cute.Tensor, tokens: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.overlaps):
            cute.arch.griddepcontrol_wait()  # whatever came before may have read the lengths
        counts = num_tokens.iterator.toint()
        for sequence in self.dealing.chunks(block, tid):
            if sequence < seq_lens.shape[0]:
                address = seq_lens.iterator.toint() + Int64(sequence) * 4
                added = tokens
                if counts != 0:
                    added = ptx.ld_global_i32(counts + Int64(sequence) * 4)
                length = Int64(cutlass.max(ptx.ld_relaxed_i32(address), Int32(0))) + Int64(added)
                length = cutlass.min(cutlass.max(length, Int64(0)), Int64(MAX_KV_CACHE_CAPACITY))
                ptx.st_global_i32(address, Int32(length))
