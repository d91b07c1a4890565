"""How K and V rows reach a warp's ring of shared-memory slots: two ways with one interface.

A slot holds the K rows, then the V rows, of one warp's tokens and dimensions, in blocks of at most
128 bytes a row: [block][row][16-byte chunk]. Chunks are rotated by the row, as the tensor copy's
swizzle modes do, so that eight rows of one chunk fall into different banks.

The two halves of a slot are asked for and waited for at once, or ``apart``: then keys are
multiplied while values are on their way, and the next keys are while these are weighed.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute
from cutlass.experimental.cuda import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tensor_map_tiled,
)

from kernels.common import ptx
from kernels.common.layout import SlotLayout, log2

KEYS, VALUES = 0, 1  # the halves of a slot

_SWIZZLE = {32: TensorMapSwizzle.s32b, 64: TensorMapSwizzle.s64b, 128: TensorMapSwizzle.s128b}


class Tile(NamedTuple):
    """The tokens of one slot."""

    token: Any  # the first, in the sequence
    pages: Any  # of each half that is asked for; -1: nothing is visible
    first: Any  # the first, from the sequence's first visible key
    span: Any  # visible keys from there


class Copy:
    """What the two ways share: ``parts``, the halves of a slot that are asked for at once."""

    def __init__(self, layout: SlotLayout, apart: bool = False):
        self.layout = layout
        self.parts = ((KEYS,), (VALUES,)) if apart else ((KEYS, VALUES),)


class AsyncCopy(Copy):
    """16 bytes a lane by cp.async: every architecture from sm_80."""

    def __init__(self, layout: SlotLayout, apart: bool = False, lanes: int = 32):
        super().__init__(layout, apart)
        self.lanes = lanes
        self.row_chunks = layout.row_nbytes // 16

    def map_pool(self, kv_pool, kv_nbytes, page_tokens):
        return None

    class Source(NamedTuple):
        ring: Any
        address: Any  # of the lane's 16 bytes in row 0 of page 0
        page_nbytes: Any
        token_nbytes: Any
        lane_row: Any
        lane_offset: Any

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, dim, ring, barriers, lane):
        layout = self.layout
        token_nbytes = Int64(kv_pool.stride[1]) * kv_nbytes
        row = lane >> log2(self.row_chunks)
        chunk = lane & (self.row_chunks - 1)
        block, within = chunk >> log2(layout.block_chunks), chunk & (layout.block_chunks - 1)
        return self.Source(
            ring=ring,
            address=kv_pool.iterator.toint()
            + Int64(kv_head) * kv_pool.stride[2] * kv_nbytes
            + Int64(row) * token_nbytes
            + Int64(dim * kv_nbytes + chunk * 16),
            page_nbytes=Int64(kv_pool.stride[0]) * kv_nbytes,
            token_nbytes=token_nbytes,
            lane_row=row,
            lane_offset=block * (layout.rows * layout.block_nbytes)
            + layout.matrix_address(0, row, within),
        )

    def ask(self, source, stage, tile, page_token, wanted, halves=(KEYS, VALUES)):
        """Ask for a part of a slot; what is not visible arrives as zeros."""
        layout = self.layout
        in_page = source.address + Int64(page_token) * source.token_nbytes
        addresses = [in_page + Int64(page) * source.page_nbytes for page in tile.pages]
        first = source.lane_row + tile.first
        slot = source.ring + stage * layout.slot_nbytes
        rows_at_once = self.lanes // self.row_chunks
        for row in range(0, layout.rows, rows_at_once):
            nbytes = ptx.select(Uint32(first + row) < Uint32(tile.span), Int32(16), Int32(0))
            away = source.token_nbytes * row
            into = (
                slot
                + (source.lane_offset ^ (layout.swizzle(row) << 4))
                + (row * layout.block_nbytes)
            )
            for half, address in zip(halves, addresses, strict=True):
                ptx.cp_async_16(into + half * layout.half_nbytes, address + away, nbytes)
        ptx.cp_async_commit()

    def leave_out(self, source, stage, half, wanted):
        """Stand in for an ``ask`` that is not needed: those behind it are waited for by number."""
        ptx.cp_async_commit()

    def await_others(self):
        """Wait for the copies that the thread asked for before the first tile."""
        ptx.cp_async_wait(self.layout.stages * len(self.parts))

    def wait(self, source, stage, phase, half=KEYS):
        """Wait for the part of a slot that ``half`` comes first in."""
        ptx.cp_async_wait(self.layout.stages * len(self.parts) - 1)
        cute.arch.sync_warp()  # the other lanes' copies

    def hide(self, source, stage, tile, lane):
        pass

    def release(self, source, stage):
        """Let what every lane has read be overwritten by the next ``ask``."""
        cute.arch.sync_warp()

    def finish(self):
        ptx.cp_async_wait(0)


class TensorCopy(Copy):
    """One instruction for all K rows of a slot and one for V: sm_90 and later."""

    def map_pool(self, kv_pool, kv_nbytes, page_tokens):
        """Return the tensor map of [page, head, block, token, element], innermost last."""
        layout = self.layout
        elems = layout.block_nbytes // kv_nbytes
        head_dim = kv_pool.shape[3]
        step = 16 // kv_nbytes
        return create_tensor_map_tiled(
            kv_pool.iterator.toint(),
            cutlass.Uint8 if kv_nbytes == 1 else cutlass.Float16,
            [elems, page_tokens, head_dim // elems, kv_pool.shape[2], kv_pool.shape[0]],
            [
                Int64(kv_pool.stride[1]) // step,
                Int64(layout.block_nbytes // 16),
                Int64(kv_pool.stride[2]) // step,
                Int64(kv_pool.stride[0]) // step,
            ],
            [elems, layout.rows, layout.blocks, 1, 1],
            swizzle=_SWIZZLE[layout.block_nbytes],
            # 256 bytes cost a load-only kernel 8-10 %.
            l2_promotion=TensorMapL2Promotion.l2_128b,
        )

    class Source(NamedTuple):
        ring: Any
        barriers: Any
        kv_map: Any
        kv_head: Any
        block: Any

    def start(self, kv_pool, kv_map, kv_nbytes, kv_head, dim, ring, barriers, lane):
        for i in range(self.layout.stages * len(self.parts)):
            ptx.mbarrier_init(barriers + 8 * i, lane == 0)
        ptx.fence_mbarrier_init()
        cute.arch.sync_warp()
        return self.Source(
            ring=ring,
            barriers=barriers,
            kv_map=kv_map.get_ptr().toint(),
            kv_head=kv_head,
            block=dim >> log2(self.layout.block_nbytes // kv_nbytes),
        )

    def barrier(self, source, stage, half):
        """Return what counts the bytes of the part that ``half`` comes first in."""
        return source.barriers + (stage + half * self.layout.stages) * 8

    def ask(self, source, stage, tile, page_token, wanted, halves=(KEYS, VALUES)):
        """Ask for a part of a slot; rows past the page arrive as they are, page -1 as zeros."""
        layout = self.layout
        places = [layout.half(source.ring, stage, half) for half in halves]
        barrier = self.barrier(source, stage, halves[0])
        chosen = ptx.elect_one() & wanted
        ptx.mbarrier_expect(barrier, len(halves) * layout.half_nbytes, chosen)
        for place, page in zip(places, tile.pages, strict=True):
            ptx.tensor_copy_5d(
                place,
                source.kv_map,
                (Int32(0), page_token, source.block, source.kv_head, page),
                barrier,
                chosen,
            )

    def leave_out(self, source, stage, half, wanted):
        barrier = self.barrier(source, stage, half)
        ptx.mbarrier_expect(barrier, 0, ptx.elect_one() & wanted)

    def await_others(self):
        ptx.cp_async_wait(0)

    def wait(self, source, stage, phase, half=KEYS):
        ptx.mbarrier_wait(self.barrier(source, stage, half), phase)

    @cute.jit
    def hide(self, source, stage, tile, lane):
        """Zero the V rows that are not visible: a masked key's P is 0, and 0 times NaN is NaN."""
        layout = self.layout
        last = Uint32(tile.first + (layout.rows - 1)) < Uint32(tile.span)
        if not (last & (Uint32(tile.first) < Uint32(tile.span))):
            values = layout.half(source.ring, stage, VALUES)
            zero = Float32(0.0)
            for first in cutlass.range_constexpr(0, layout.rows, 32):
                row = first + lane
                seen = ptx.select(Uint32(tile.first + row) < Uint32(tile.span), Int32(1), Int32(0))
                hidden = (row < layout.rows) & (seen == 0)
                for block in cutlass.range_constexpr(layout.blocks):
                    for chunk in cutlass.range_constexpr(layout.block_chunks):
                        ptx.st_shared_f32x4(
                            values
                            + row * layout.block_nbytes
                            + (block * layout.rows * layout.block_nbytes + 16 * chunk),
                            (zero, zero, zero, zero),
                            hidden,
                        )
            cute.arch.sync_warp()

    def release(self, source, stage):
        # A tensor copy does not wait for reads, nor for stores, that the lanes have in flight.
        ptx.fence_proxy_async()
        cute.arch.sync_warp()

    def finish(self):
        pass
