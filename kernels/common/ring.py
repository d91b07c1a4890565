"""How K and V rows reach a warp's ring of shared-memory slots: two ways with one interface.

A slot holds the K rows, then the V rows, of one warp's tokens and dimensions, in blocks of at most
128 bytes a row: [block][row][16-byte chunk]. Chunks are rotated by the row, as the tensor copy's
swizzle modes do, so that eight rows of one chunk fall into different banks.
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

_SWIZZLE = {32: TensorMapSwizzle.s32b, 64: TensorMapSwizzle.s64b, 128: TensorMapSwizzle.s128b}


class Tile(NamedTuple):
    """The tokens of one slot."""

    token: Any  # the first, in the sequence
    k_page: Any  # -1: nothing is visible
    v_page: Any
    first: Any  # the first, from the sequence's first visible key
    span: Any  # visible keys from there


class AsyncCopy:
    """16 bytes a lane by cp.async: every architecture from sm_80."""

    def __init__(self, layout: SlotLayout, lanes: int = 32):
        self.layout, self.lanes = layout, lanes
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

    def ask(self, source, stage, tile, page_token, wanted, with_values=True):
        """Ask for a tile; what is not visible arrives as zeros."""
        layout = self.layout
        in_page = source.address + Int64(page_token) * source.token_nbytes
        k_address = in_page + Int64(tile.k_page) * source.page_nbytes
        v_address = in_page + Int64(tile.v_page) * source.page_nbytes
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
            ptx.cp_async_16(into, k_address + away, nbytes)
            if with_values:
                ptx.cp_async_16(into + layout.half_nbytes, v_address + away, nbytes)
        ptx.cp_async_commit()

    def await_others(self):
        """Wait for the copies that the thread asked for before the first tile."""
        ptx.cp_async_wait(self.layout.stages)

    def wait(self, source, stage, phase):
        ptx.cp_async_wait(self.layout.stages - 1)
        cute.arch.sync_warp()  # the other lanes' copies

    def hide(self, source, stage, tile, lane):
        pass

    def finish(self):
        ptx.cp_async_wait(0)


class TensorCopy:
    """One instruction for all K rows of a slot and one for V: sm_90 and later."""

    def __init__(self, layout: SlotLayout):
        self.layout = layout

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
        for stage in range(self.layout.stages):
            ptx.mbarrier_init(barriers + 8 * stage, lane == 0)
        ptx.fence_mbarrier_init()
        cute.arch.sync_warp()
        return self.Source(
            ring=ring,
            barriers=barriers,
            kv_map=kv_map.get_ptr().toint(),
            kv_head=kv_head,
            block=dim >> log2(self.layout.block_nbytes // kv_nbytes),
        )

    def ask(self, source, stage, tile, page_token, wanted, with_values=True):
        """Ask for a tile; rows past the page arrive as they are, page -1 as zeros."""
        layout = self.layout
        slot = source.ring + stage * layout.slot_nbytes
        barrier = source.barriers + stage * 8
        chosen = ptx.elect_one() & wanted
        halves = ((0, tile.k_page), (layout.half_nbytes, tile.v_page))[: 1 + with_values]
        ptx.mbarrier_expect(barrier, len(halves) * layout.half_nbytes, chosen)
        for half, page in halves:
            ptx.tensor_copy_5d(
                slot + half,
                source.kv_map,
                (Int32(0), page_token, source.block, source.kv_head, page),
                barrier,
                chosen,
            )

    def await_others(self):
        ptx.cp_async_wait(0)

    def wait(self, source, stage, phase):
        ptx.mbarrier_wait(source.barriers + stage * 8, phase)

    @cute.jit
    def hide(self, source, stage, tile, lane):
        """Zero the V rows that are not visible: a masked key's P is 0, and 0 times NaN is NaN."""
        layout = self.layout
        last = Uint32(tile.first + (layout.rows - 1)) < Uint32(tile.span)
        if not (last & (Uint32(tile.first) < Uint32(tile.span))):
            row = source.ring + stage * layout.slot_nbytes + layout.half_nbytes
            row += lane * layout.block_nbytes
            zero = Float32(0.0)
            seen = ptx.select(Uint32(tile.first + lane) < Uint32(tile.span), Int32(1), Int32(0))
            hidden = (lane < layout.rows) & (seen == 0)
            for block in cutlass.range_constexpr(layout.blocks):
                for chunk in cutlass.range_constexpr(layout.block_chunks):
                    ptx.st_shared_f32x4(
                        row + (block * layout.rows * layout.block_nbytes + 16 * chunk),
                        (zero, zero, zero, zero),
                        hidden,
                    )
            ptx.fence_proxy_async()  # the next copy into this slot comes after these stores
            cute.arch.sync_warp()

    def finish(self):
        pass
