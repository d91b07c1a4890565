"""Static configuration of a decode kernel: a pure function of (KV dtype, head_dim, gpu arch)."""

import re
from dataclasses import dataclass
from typing import NamedTuple

TOKENS_PER_PAGE = 128
HEADS_PER_TILE = 8  # columns of one MMA
MAX_SPLITS = 32  # the last CTA weighs one split per lane
MMA_TOKENS = 16

# Bytes of shared memory one CTA may have (CUDA programming guide, compute capabilities table).
_SMEM_LIMIT = {
    "80": 166_912,
    "86": 101_376,
    "87": 166_912,
    "89": 101_376,
    "120": 101_376,
    "121": 101_376,
}
_SMEM_LIMIT_OTHER = 232_448

# Two CTAs per SM with 96 KB in flight each saturate an H200's memory; a third stage covers the
# turnover of CTAs, a fourth buys nothing (B64 S8192, D128: 2 stages 506 us, 3 stages 485 us).
_RING_TARGET = 98_304


class KernelShape(NamedTuple):
    head_tiles: int  # a CTA serves 8 * head_tiles query heads of one kv head
    head_shards: int  # CTAs that share a kv head's query heads


@dataclass(frozen=True)
class DecodeConfig:
    kv_dtype: str  # f16 or e4m3
    head_dim: int
    warps: int
    stages: int
    kernels: tuple[KernelShape, ...]  # for ratios up to 8, and where there is a second, up to 16

    @property
    def kv_nbytes(self) -> int:
        return 1 if self.kv_dtype == "e4m3" else 2

    @property
    def row_nbytes(self) -> int:
        return self.head_dim * self.kv_nbytes

    @property
    def tile_tokens(self) -> int:
        return MMA_TOKENS * self.warps

    @property
    def tiles_per_page_log2(self) -> int:
        return (TOKENS_PER_PAGE // self.tile_tokens).bit_length() - 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def slot_nbytes(self) -> int:
        """K and V of the 16 tokens that one warp takes at a time."""
        return 2 * MMA_TOKENS * self.row_nbytes

    def merge_nbytes(self, head_tiles: int) -> int:
        """One (m, l) per head, then fp32 accumulators of every warp, padded by 16 bytes a head."""
        heads = HEADS_PER_TILE * head_tiles
        return self.warps * heads * (8 + 4 * (self.head_dim + 4))

    def smem_nbytes(self, head_tiles: int) -> int:
        ring = self.warps * self.stages * self.slot_nbytes
        weights = HEADS_PER_TILE * head_tiles * MAX_SPLITS * 4
        return max(ring, self.merge_nbytes(head_tiles), weights) + 16  # 16: the arrival's ticket


def decode_config(kv_dtype: str, head_dim: int, gpu_arch: str) -> DecodeConfig:
    number = re.fullmatch(r"sm_(\d+)[af]?", gpu_arch)[1]
    limit = _SMEM_LIMIT.get(number, _SMEM_LIMIT_OTHER)
    kernels = (KernelShape(1, 1),)
    if kv_dtype == "e4m3" or head_dim >= 128:
        # 16 heads of 512 dimensions are 256 accumulators a thread: two CTAs share them.
        kernels += (KernelShape(2, 1) if head_dim < 512 else KernelShape(1, 2),)
    warps = 4 if head_dim <= 256 else 2
    slots = warps * 2 * MMA_TOKENS * head_dim * (1 if kv_dtype == "e4m3" else 2)
    stages = max(1, min(4, min(limit - 1024, max(_RING_TARGET, 2 * slots)) // slots))
    return DecodeConfig(kv_dtype, head_dim, warps, stages, kernels)
