"""Write new keys and values into the pages of a cache, at the end of each sequence.

``seq_lens`` counts the new tokens already, as decode attention takes it: token t of the ``count``
new ones of sequence b goes to position seq_lens[b] - count + t. What has no place is dropped:
positions below 0 or past the table, and page ids outside of the pool.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import ptx
from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter
from kernels.kv_cache.chunks import (
    CHUNK_NBYTES,
    Divisors,
    Rows,
    launch_options,
    page_id,
    page_rows,
    table_row,
)
from kernels.kv_cache.dealing import Dealing
from kernels.kv_cache.quantise import Scale, to_e4m3


def parameters(kv_dtype: str):
    new = ("batch", "tokens", "num_kv_heads", "head_dim")
    pool = ("pool_pages", TOKENS_PER_PAGE, "num_kv_heads", "head_dim")
    return (
        TensorParameter("k", "in", "f16", new),
        TensorParameter("v", "in", "f16", new),
        TensorParameter("kv_pool", "out", kv_dtype, pool),
        TensorParameter("page_table", "in", "i32", ("batch", 2, "max_pages"), alignment=4),
        TensorParameter("seq_lens", "in", "i32", ("batch",), alignment=4),
        TensorParameter("num_tokens", "in", "i32", ("batch",), alignment=4, optional=True),
        ScalarParameter("k_scale", "f32"),
        ScalarParameter("v_scale", "f32"),
        StreamParameter(),
    )


class KvAppend:
    """head_dim is a multiple of 16 for e4m3 and of 8 for f16: a chunk of 16 bytes in the pool."""

    def __init__(self, kv_dtype: str, dealing: Dealing, *, overlaps: bool):
        self.fp8 = kv_dtype == "e4m3"
        self.kv_nbytes = 1 if self.fp8 else 2
        self.chunk_elems = CHUNK_NBYTES // self.kv_nbytes
        self.dealing, self.overlaps = dealing, overlaps

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        num_tokens: cute.Tensor,
        k_scale: Float32,
        v_scale: Float32,
        stream: cuda.CUstream,
    ):
        heads, row_chunks = k.shape[2], k.shape[3] // self.chunk_elems
        ctas = self.dealing.ctas(k.shape[1] * heads * row_chunks)
        grid = 2 * k.shape[0] * ctas
        if grid > 0:
            divisors = Divisors.of(ctas, heads, row_chunks)
            self.kernel(
                k, v, kv_pool, page_table, seq_lens, num_tokens, k_scale, v_scale, divisors
            ).launch(**launch_options(self.dealing, grid, stream, self.overlaps))

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        kv_pool: cute.Tensor,
        page_table: cute.Tensor,
        seq_lens: cute.Tensor,
        num_tokens: cute.Tensor,
        k_scale: Float32,
        v_scale: Float32,
        divisors: Divisors,
    ):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.overlaps):
            cute.arch.griddepcontrol_wait()  # whatever came before may have written our inputs
        sequence, half, part = divisors.share(block)
        length = ptx.ld_global_i32(seq_lens.iterator.toint() + Int64(sequence) * 4)
        count = k.shape[1]
        counts = num_tokens.iterator.toint()
        if counts != 0:
            count = ptx.ld_global_i32(counts + Int64(sequence) * 4)
            count = cutlass.min(count, k.shape[1])

        # All loads of a thread are on their way before it waits for the length, then for page ids.
        rows = self.new_rows(k, v, sequence, half)
        loaded = []
        for index in self.dealing.chunks(part, tid):
            token, head, chunk = divisors.place(index)
            source = rows.at(token, head, chunk * (2 * self.chunk_elems))
            loaded.append((token, head, chunk, self.load(source, token < count)))

        first = cutlass.max(length, Int32(0)) - count
        table = table_row(page_table, sequence, half)
        placed = []
        for token, head, chunk, words in loaded:
            position = ptx.select(token < count, first + token, Int32(-1))
            page = page_id(table, position, page_table.shape[2], kv_pool.shape[0])
            target = page_rows(kv_pool, page, self.kv_nbytes).at(
                position & (TOKENS_PER_PAGE - 1), head, chunk * CHUNK_NBYTES
            )
            placed.append((target, page >= 0, words))

        scale = Scale.of(ptx.select(half == 0, k_scale, v_scale)) if self.fp8 else None
        for target, there, words in placed:
            ptx.st_global_u32x4(target, self.stored(words, scale), there)

    def new_rows(self, k, v, sequence, half):
        """Return the rows of the sequence's new keys or values, 2 bytes an element."""
        address = ptx.select(half == 0, k.iterator.toint(), v.iterator.toint())
        batch_nbytes, token_nbytes, head_nbytes = (
            2 * ptx.select(half == 0, Int64(k_step), Int64(v_step))
            for k_step, v_step in zip(k.stride[:3], v.stride[:3], strict=True)
        )
        return Rows(address + Int64(sequence) * batch_nbytes, token_nbytes, head_nbytes)

    def load(self, address, wanted):
        """Ask for the f16 elements of a chunk; one word holds two."""
        words = []
        for at in range(0, 2 * self.chunk_elems, CHUNK_NBYTES):
            words += ptx.ld_relaxed_u32x4(address + at, wanted)
        return words

    def stored(self, words, scale):
        """Return the chunk as the pool holds it."""
        if not self.fp8:
            return words
        return to_e4m3(words[:4], scale) + to_e4m3(words[4:], scale)
