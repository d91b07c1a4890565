"""Copy pages of a pool onto others: K page source to destination, and the V page of each likewise.

A pool is looked at as 32-bit words, so one kernel serves every element type.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, const_expr, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.signature import StreamParameter, TensorParameter
from kernels.kv_cache.chunks import (
    CHUNK_NBYTES,
    CHUNK_WORDS,
    WORD_NBYTES,
    Divisors,
    launch_options,
    page_rows,
)
from kernels.kv_cache.dealing import Dealing


def parameters():
    pool = ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", "row_words")
    return (
        TensorParameter("kv_pool", "out", "i32", pool),
        TensorParameter("moves", "in", "i32", ("num_moves", 2), alignment=4),
        TensorParameter("num_tokens", "in", "i32", ("num_moves",), alignment=4, optional=True),
        StreamParameter(),
    )


class KvCopyPages:
    def __init__(self, dealing: Dealing, *, overlaps: bool):
        self.dealing, self.overlaps = dealing, overlaps

    @cute.jit
    def __call__(
        self,
        kv_pool: cute.Tensor,
        moves: cute.Tensor,
        num_tokens: cute.Tensor,
        stream: cuda.CUstream,
    ):
        heads, row_chunks = kv_pool.shape[2], kv_pool.shape[3] // CHUNK_WORDS
        ctas = self.dealing.ctas(TOKENS_PER_PAGE * heads * row_chunks)
        grid = 2 * moves.shape[0] * ctas
        if grid > 0:
            divisors = Divisors.of(ctas, heads, row_chunks)
            self.kernel(kv_pool, moves, num_tokens, divisors).launch(
                **launch_options(self.dealing, grid, stream, self.overlaps)
            )

    @cute.kernel
    def kernel(
        self, kv_pool: cute.Tensor, moves: cute.Tensor, num_tokens: cute.Tensor, divisors: Divisors
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.overlaps):
            cute.arch.griddepcontrol_wait()  # whatever came before may have written our inputs
        move, half, part = divisors.share(block)
        pair = moves.iterator.toint() + Int64(move) * moves.stride[0] * 4
        source, destination = ptx.ld_global_i32(pair), ptx.ld_global_i32(pair + 4)
        count = Int32(TOKENS_PER_PAGE)
        counts = num_tokens.iterator.toint()
        if counts != 0:
            count = ptx.ld_global_i32(counts + Int64(move) * 4)
            count = cutlass.min(count, Int32(TOKENS_PER_PAGE))
        num_pages = kv_pool.shape[0] >> 1
        known = (cutlass.min(source, destination) >= 0) & (
            cutlass.max(source, destination) < num_pages
        )
        count = ptx.select(known, count, Int32(0))

        first = half * num_pages
        from_rows, to_rows = (
            page_rows(kv_pool, first + page, WORD_NBYTES) for page in (source, destination)
        )
        copies = []
        for index in self.dealing.chunks(part, tid):
            token, head, chunk = divisors.place(index)
            place, wanted = (token, head, chunk * CHUNK_NBYTES), token < count
            words = ptx.ld_relaxed_u32x4(from_rows.at(*place), wanted)
            copies.append((to_rows.at(*place), words, wanted))
        for copy in copies:
            ptx.st_global_u32x4(*copy)
