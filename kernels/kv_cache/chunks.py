"""What the cache's kernels share: rows of K or V, in chunks of 16 bytes, one after the other."""

from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute

from ctm_rt.paged_kv import TOKENS_PER_PAGE
from kernels.common import launch, ptx
from kernels.common.layout import log2

CHUNK_NBYTES = 16
WORD_NBYTES = 4  # what a pool of any type is looked at in
CHUNK_WORDS = CHUNK_NBYTES // WORD_NBYTES
PAGE_SHIFT = log2(TOKENS_PER_PAGE)


class Rows(NamedTuple):
    """Where the rows of one K or V lie; in bytes."""

    address: Any  # of token 0 of head 0
    token_nbytes: Any
    head_nbytes: Any

    def at(self, token, head, offset):
        return (
            self.address
            + Int64(token) * self.token_nbytes
            + Int64(head) * self.head_nbytes
            + Int64(offset)
        )


class Share(NamedTuple):
    """A CTA's part of one item: the K (half 0) or the V rows of a sequence, or of a page."""

    item: Any
    half: Any
    part: Any


class Divisors(NamedTuple):
    """How a CTA finds its share, and a thread its rows; the host works them out, none is 0."""

    ctas: Any  # of an item
    ctas_magic: Any
    heads: Any
    heads_magic: Any
    row_chunks: Any
    row_magic: Any

    @classmethod
    def of(cls, ctas, heads, row_chunks):
        return cls(
            ctas, ptx.magic(ctas), heads, ptx.magic(heads), row_chunks, ptx.magic(row_chunks)
        )

    def share(self, block):
        item, part = ptx.divmod_by_magic(block, self.ctas, self.ctas_magic)
        return Share(item >> 1, item & 1, part)

    def place(self, index):
        """Return token, head and chunk of the row: the order in which a page holds them."""
        row, chunk = ptx.divmod_by_magic(index, self.row_chunks, self.row_magic)
        return *ptx.divmod_by_magic(row, self.heads, self.heads_magic), chunk


def launch_options(dealing, ctas, stream, overlaps):
    """Return how to launch; with ``overlaps`` the launch begins before the last kernel's end.

    x alone may pass 65,535 CTAs, and a batch may.
    """
    options = {"grid": (ctas, 1, 1), "block": (dealing.threads, 1, 1), "stream": stream}
    return options | launch.options(overlaps=overlaps)


def page_rows(kv_pool, page, nbytes):
    """Return the rows of a page of the pool, whose elements have ``nbytes``."""
    page_nbytes, token_nbytes, head_nbytes = (Int64(step) * nbytes for step in kv_pool.stride[:3])
    return Rows(kv_pool.iterator.toint() + Int64(page) * page_nbytes, token_nbytes, head_nbytes)


def table_row(page_table, sequence, half):
    """Return the address of a sequence's K or V page ids."""
    step = Int64(sequence) * page_table.stride[0] + Int64(half) * page_table.stride[1]
    return page_table.iterator.toint() + step * 4


@cute.jit
def page_id(row_address, token, max_pages, pool_pages):
    """Return the entry that ``row_address`` lists for a token; -1 if there is no such page."""
    found = Int32(-1)
    page = token >> PAGE_SHIFT
    if (token >= 0) & (page < max_pages):
        found = ptx.ld_relaxed_i32(row_address + Int64(page) * 4)
    return ptx.select((found >= 0) & (found < pool_pages), found, Int32(-1))
