"""Static configuration of the decode kernels: a pure function of (KV dtype, head_dim, gpu arch)."""

import re
from dataclasses import dataclass, replace

from ctm_rt.decode.plan import HEADS_PER_TILE, MAX_GROUPS

MMA_TOKENS = 16
MAX_DIMS_PER_WARP = 128  # more accumulators than 64 a thread spill, with 16 heads


@dataclass(frozen=True)
class KernelShape:
    """One kernel of a module: which calls it serves and how it is laid out."""

    cluster: int  # CTAs that share a group's tiles and merge through distributed shared memory
    warps: int
    token_tiles: int  # 16-token tiles that a warp takes at a time
    stages: int
    tensor_copy: bool = False  # K and V come by tensor copies, else by cp.async
    max_tokens: int = 0  # planned for up to so many tokens a CTA; 0: for any number
    load_only: bool = False  # bring every visible byte and compute nothing: the memory's ceiling
    head_tiles: int = 1  # 8 * head_tiles query heads per CTA


@dataclass(frozen=True)
class DecodeConfig:
    kv_dtype: str  # f16 or e4m3
    head_dim: int
    has_clusters: bool  # sm_90 and later; also programmatic dependent launch
    kernels: tuple[KernelShape, ...]

    @property
    def kv_nbytes(self) -> int:
        return 1 if self.kv_dtype == "e4m3" else 2

    @property
    def dims(self) -> int:
        """Dimensions per warp; ``dim_split`` warps share a token."""
        return min(self.head_dim, MAX_DIMS_PER_WARP)

    @property
    def dim_split(self) -> int:
        return self.head_dim // self.dims


@dataclass(frozen=True)
class SmemLayout:
    """Where things lie in a CTA's shared memory, in bytes.

    From 0: the warps' rings, whose place the warps' states take when the last tile is read, and
    then the weights of the groups.
    """

    inbox: int  # what the CTAs of the cluster push here: accumulators, then (m, l)
    exchange: int  # partial scores of warps that share tokens, twice
    exchange_nbytes: int  # of one warp
    q: int
    q_row_nbytes: int
    barrier: int  # counts the inbox's bytes; a ticket follows, then the rings' barriers
    nbytes: int

    @property
    def lets_two_share_an_sm(self) -> bool:
        return 2 * (self.nbytes + 1024) <= 233_472


def smem_layout(config: DecodeConfig, shape: KernelShape) -> SmemLayout:
    heads = HEADS_PER_TILE * shape.head_tiles
    token_groups = shape.warps // config.dim_split
    slot = 2 * MMA_TOKENS * shape.token_tiles * config.dims * config.kv_nbytes
    states = token_groups * heads * (8 + 4 * (config.head_dim + 4))
    inbox = _align(max(shape.warps * shape.stages * slot, states, heads * MAX_GROUPS * 4))
    pushed = shape.cluster * heads * (4 * config.head_dim // shape.cluster + 8)
    exchange = inbox + (pushed if shape.cluster > 1 else 0)
    exchange_nbytes = 128 * 4 * shape.token_tiles * shape.head_tiles
    q = _align(exchange + (2 * shape.warps * exchange_nbytes if config.dim_split > 1 else 0))
    # Padded, so that eight rows of one chunk fall into different banks.
    q_row_nbytes = 2 * config.head_dim + (32 if config.kv_dtype == "e4m3" else 16)
    barrier = q + heads * q_row_nbytes
    rings = 8 * shape.warps * shape.stages if shape.tensor_copy else 0
    return SmemLayout(
        inbox, exchange, exchange_nbytes, q, q_row_nbytes, barrier, barrier + 16 + rings
    )


def _align(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


# Measured on an H200 at batch 1, 8 and 32 (docs/measurements.md). cp.async wins where few CTAs wait
# for their first bytes, the tensor copy where warps compute most of the time. 16 CTAs a cluster pay
# with at most four clusters, one to a GPC: few KV heads and long rows.
_T = {"tensor_copy": True}
_LARGE_SMEM = {
    ("f16", 32): [
        KernelShape(8, 8, 2, 2),
        KernelShape(4, 8, 2, 2),
        KernelShape(2, 8, 2, 3, **_T),
        KernelShape(1, 8, 2, 3, **_T),
    ],
    ("f16", 64): [
        KernelShape(8, 4, 2, 3),
        KernelShape(4, 4, 2, 3),
        KernelShape(2, 8, 2, 3, **_T),
        KernelShape(1, 4, 2, 3, **_T),
    ],
    ("f16", 128): [
        KernelShape(8, 4, 1, 3),
        KernelShape(4, 4, 1, 3),
        KernelShape(2, 4, 1, 3, **_T),
        KernelShape(1, 4, 1, 3, **_T),
    ],
    ("f16", 256): [
        KernelShape(8, 8, 1, 3, **_T),
        KernelShape(4, 8, 1, 2, **_T),
        KernelShape(2, 8, 1, 2, **_T),
        KernelShape(1, 8, 1, 2, **_T),
    ],
    ("f16", 512): [
        KernelShape(16, 8, 1, 3, **_T),
        KernelShape(8, 8, 1, 3, **_T),
        KernelShape(4, 8, 1, 3, **_T),
        KernelShape(2, 8, 1, 3, **_T),
        KernelShape(1, 8, 1, 2, **_T),
    ],
    ("e4m3", 32): [
        KernelShape(8, 8, 2, 2),
        KernelShape(4, 4, 2, 3),
        KernelShape(2, 8, 2, 2, **_T),
        KernelShape(1, 4, 2, 4, **_T),
    ],
    ("e4m3", 64): [
        KernelShape(8, 8, 2, 3),
        KernelShape(4, 8, 2, 3),
        KernelShape(2, 8, 2, 3, **_T),
        KernelShape(1, 8, 2, 2, **_T),
    ],
    ("e4m3", 128): [
        KernelShape(8, 8, 1, 3, max_tokens=1024),
        KernelShape(8, 8, 2, 3, **_T),
        KernelShape(4, 8, 1, 3),
        KernelShape(2, 8, 1, 3, **_T),
        KernelShape(1, 8, 1, 2, **_T),
    ],
    ("e4m3", 256): [
        KernelShape(16, 8, 1, 3),
        KernelShape(8, 8, 2, 2, **_T),
        KernelShape(4, 8, 1, 3, **_T),
        KernelShape(2, 8, 2, 2, **_T),
        KernelShape(1, 8, 2, 2, **_T),
    ],
    ("e4m3", 512): [
        KernelShape(16, 8, 1, 3),
        KernelShape(8, 8, 1, 3),
        KernelShape(4, 8, 1, 3, **_T),
        KernelShape(2, 8, 1, 3, **_T),
        KernelShape(1, 8, 1, 3, **_T),
    ],
}
# For 9 to 16 query heads per KV head, where that differs.
_LARGE_SMEM_16_HEADS = {
    ("f16", 128): [
        KernelShape(16, 4, 1, 3, **_T),
        KernelShape(8, 8, 1, 2, **_T),
        KernelShape(4, 8, 1, 2, **_T),
        KernelShape(2, 8, 1, 2, **_T),
        KernelShape(1, 8, 1, 2, **_T),
    ],
    ("f16", 256): [KernelShape(c, 8, 1, 2, **_T) for c in (8, 4, 2, 1)],
    ("f16", 512): [KernelShape(c, 8, 1, 2, **_T) for c in (16, 8, 4, 2, 1)],
    ("e4m3", 128): [
        KernelShape(8, 8, 1, 3, max_tokens=1024),
        KernelShape(8, 8, 2, 3, **_T),
        KernelShape(4, 8, 1, 3),
        KernelShape(2, 8, 1, 3, **_T),
        KernelShape(1, 4, 2, 3, **_T),
    ],
}

# Bytes of shared memory one CTA may have, where not 227 KB of an SM's 228 (CUDA programming guide,
# compute capabilities table); each CTA takes 1 KB more.
_SMEM_NBYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 120: 101_376, 121: 101_376}


def decode_config(kv_dtype: str, head_dim: int, gpu_arch: str) -> DecodeConfig:
    number = int(re.fullmatch(r"sm_(\d+)[af]?", gpu_arch)[1])
    key, smem_nbytes = (kv_dtype, head_dim), _SMEM_NBYTES.get(number)
    config = DecodeConfig(kv_dtype, head_dim, number >= 90, ())
    shapes = list(_LARGE_SMEM[key])
    if kv_dtype == "e4m3" or head_dim >= 128:  # ratios up to 16
        shapes += [replace(shape, head_tiles=2) for shape in _LARGE_SMEM_16_HEADS.get(key, shapes)]
    if smem_nbytes is not None:
        clusters = (8, 4, 2, 1) if config.has_clusters else (1,)
        shapes = [
            _fit(replace(config, kernels=(shape,)), smem_nbytes)
            for shape in shapes
            if shape.cluster in clusters and not shape.max_tokens
        ]
    return replace(config, kernels=tuple(shapes))


def _fit(config: DecodeConfig, smem_nbytes: int) -> KernelShape:
    """Return the one kernel's shape with as many warps, then tokens, then stages as fit."""
    (shape,) = config.kernels
    for warps in (shape.warps, 4):
        for token_tiles in (shape.token_tiles, 1):
            for stages in (3, 2):
                fitting = replace(
                    shape,
                    warps=warps,
                    token_tiles=token_tiles,
                    stages=stages,
                    tensor_copy=shape.tensor_copy and config.has_clusters,
                )
                if smem_layout(config, fitting).nbytes <= smem_nbytes:
                    return fitting
    return replace(fitting, stages=1)  # 16 heads of 512 dimensions in 99 KB


def load_config(kv_dtype: str, head_dim: int, gpu_arch: str) -> DecodeConfig:
    """Return the one kernel that only loads: what the benchmark takes for the memory's ceiling."""
    token_tiles = 1 if kv_dtype == "f16" and head_dim >= 128 else 2
    # Short rows need more of them in flight.
    stages = 6 if head_dim == 32 else 4 if (kv_dtype, head_dim) == ("e4m3", 64) else 3
    shape = KernelShape(1, 4, token_tiles, stages, load_only=True)
    config = replace(decode_config(kv_dtype, head_dim, gpu_arch), kernels=(shape,))
    number = int(re.sub(r"\D", "", gpu_arch))
    if number in _SMEM_NBYTES:
        config = replace(config, kernels=(_fit(config, _SMEM_NBYTES[number]),))
    return config
