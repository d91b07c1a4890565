"""Gather the pages of each sequence into dense rows, [batch, K or V, head, token]; zeros elsewhere.

A pool is looked at as 32-bit words, so one kernel serves every element type.
"""

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, Uint32, const_expr, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.signature import StreamParameter, TensorParameter
from kernels.kv_cache.chunks import (
    CHUNK_NBYTES,
    CHUNK_WORDS,
    WORD_NBYTES,
    Divisors,
    Rows,
    launch_options,
    page_id,
    page_rows,
    table_row,
)
from kernels.kv_cache.dealing import Dealing


def parameters():
    pool = ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", "row_words")
    return (
        TensorParameter("kv_pool", "in", "i32", pool),
        TensorParameter("page_table", "in", "i32", ("batch", 2, "max_pages"), alignment=4),
        TensorParameter("seq_lens", "in", "i32", ("batch",), alignment=4),
        TensorParameter("out", "out", "i32", ("batch", 2, "num_kv_heads", "capacity", "row_words")),
        StreamParameter(),
    )


class KvGather:
    def __init__(self, dealing: Dealing, *, overlaps: bool):
        self.dealing, self.overlaps = dealing, overlaps

    @cute.jit
    def __call__(
        self,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ):
        heads, row_chunks = out.shape[2], out.shape[4] // CHUNK_WORDS
        ctas = self.dealing.ctas(out.shape[3] * heads * row_chunks)
        grid = 2 * out.shape[0] * ctas
        if grid > 0:
            divisors = Divisors.of(ctas, heads, row_chunks)
            self.kernel(kv_pool, page_table, seq_lens, out, divisors).launch(
                **launch_options(self.dealing, grid, stream, self.overlaps)
            )

    @cute.kernel
    def kernel(
        self,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        out: cute.Tensor,
        divisors: Divisors,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.overlaps):
            cute.arch.griddepcontrol_wait()  # whatever came before may have written our inputs
        sequence, half, part = divisors.share(block)
        length = ptx.ld_global_i32(seq_lens.iterator.toint() + Int64(sequence) * 4)
        batch_nbytes, half_nbytes, head_nbytes, token_nbytes = (
            Int64(step) * WORD_NBYTES for step in out.stride[:4]
        )
        rows = Rows(
            out.iterator.toint() + Int64(sequence) * batch_nbytes + Int64(half) * half_nbytes,
            token_nbytes,
            head_nbytes,
        )

        # All entries of a thread are on their way before it waits for one, then all chunks.
        table = table_row(page_table, sequence, half)
        places = []
        for index in self.dealing.chunks(part, tid):
            token, head, chunk = divisors.place(index)
            inside = token < out.shape[3]
            position = ptx.select(inside & (token < length), token, Int32(-1))
            page = page_id(table, position, page_table.shape[2], kv_pool.shape[0])
            places.append((token, head, chunk * CHUNK_NBYTES, inside, page))
        copies = []
        for token, head, offset, inside, page in places:
            source = page_rows(kv_pool, page, WORD_NBYTES).at(
                token & (TOKENS_PER_PAGE - 1), head, offset
            )
            words = ptx.ld_relaxed_u32x4(source, page >= 0)
            copies.append((rows.at(token, head, offset), words, inside, page))
        for target, words, inside, page in copies:
            words = [ptx.select(page >= 0, word, Uint32(0)) for word in words]
            ptx.st_global_u32x4(target, words, inside)
