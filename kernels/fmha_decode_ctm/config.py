"""Static configuration of the decode kernels: a pure function of (KV dtype, head_dim, gpu arch)."""

import re
from dataclasses import replace

from kernels.fmha_decode_ctm.layout import DecodeConfig, KernelLayout, KernelShape

# Measured on an H200 at batch 1, 2 to 5, 8 and 32 (docs/measurements.md). cp.async wins where few
# CTAs wait for their first bytes; where there are many, one slot a warp is often enough, and rows
# of d128 and longer come by tensor copies. 16 CTAs a cluster pay with at most four clusters, one to
# a GPC: few KV heads and long rows. Many short sequences want smaller CTAs, all at once: e4m3 heads
# of 64, batch 64 of 2,048 tokens, took 33.7 us in CTAs of four warps, 39.1 in those of eight.
_T = {"tensor_copy": True}
_WIDE = {"warp_dims": 256}
_SHORT = {"max_tokens": 2048, "min_ctas": 384}
_SHORT_ROWS = [KernelShape(c, 4, 2, 3) for c in (8, 4, 2)]  # of 64 bytes or less
_LARGE_SMEM = {
    ("f16", 32): [
        *_SHORT_ROWS,
        KernelShape(1, 4, 2, 1, **_SHORT),
        KernelShape(1, 8, 2, 1),
    ],
    ("f16", 64): [
        KernelShape(8, 4, 1, 4),
        KernelShape(4, 4, 1, 4),
        KernelShape(2, 4, 1, 3),
        KernelShape(1, 4, 1, 1, **_SHORT),
        KernelShape(1, 8, 1, 1),
    ],
    ("f16", 128): [
        KernelShape(8, 4, 1, 3),
        KernelShape(4, 4, 1, 2),
        KernelShape(2, 4, 1, 2),
        KernelShape(1, 8, 1, 1, **_T),
    ],
    ("f16", 256): [
        KernelShape(8, 4, 1, 3, **_WIDE, **_T),
        KernelShape(4, 8, 1, 2, **_T),
        KernelShape(2, 8, 1, 2, **_T),
        KernelShape(1, 8, 1, 2, **_T),
    ],
    ("f16", 512): [KernelShape(c, 8, 1, 2, **_T) for c in (16, 8, 4, 2, 1)],
    ("e4m3", 32): [
        *_SHORT_ROWS,
        KernelShape(1, 4, 2, 1, **_SHORT),
        KernelShape(1, 8, 2, 1),
    ],
    ("e4m3", 64): [
        *_SHORT_ROWS,
        KernelShape(1, 4, 2, 1, **_SHORT),
        KernelShape(1, 8, 2, 1),
    ],
    ("e4m3", 128): [
        KernelShape(8, 4, 2, 2, max_tokens=1024),
        KernelShape(8, 8, 2, 2),
        KernelShape(4, 4, 1, 4),
        KernelShape(2, 4, 1, 4),
        KernelShape(1, 2, 1, 1, max_tokens=1024, min_ctas=768, **_T),
        KernelShape(1, 4, 1, 1, **_SHORT, **_T),
        KernelShape(1, 8, 1, 1, **_T),
    ],
    ("e4m3", 256): [
        KernelShape(16, 4, 1, 2, **_WIDE),
        KernelShape(8, 8, 1, 2, **_WIDE),
        KernelShape(4, 4, 1, 3, **_WIDE),
        KernelShape(2, 8, 1, 2, **_WIDE),
        KernelShape(1, 8, 2, 2, **_T),
    ],
    ("e4m3", 512): [
        *(KernelShape(c, 8, 1, 2, **_WIDE) for c in (16, 8, 4, 2)),
        KernelShape(1, 8, 1, 2, **_WIDE, **_T),
    ],
}
# For 9 to 16 query heads per KV head, where that differs.
_LARGE_SMEM_16_HEADS = {
    ("f16", 128): [
        *(KernelShape(c, 4, 1, 3) for c in (16, 8, 4, 2)),
        KernelShape(1, 8, 1, 1, **_T),
    ],
    ("f16", 256): [KernelShape(c, 8, 1, 2, **_T) for c in (8, 4, 2, 1)],
    ("e4m3", 32): [
        *_SHORT_ROWS,
        KernelShape(1, 4, 2, 2),
    ],
    ("e4m3", 64): [
        *_SHORT_ROWS,
        KernelShape(1, 4, 2, 1),
    ],
    ("e4m3", 128): [
        KernelShape(8, 4, 2, 2, max_tokens=1024),
        KernelShape(8, 8, 2, 2),
        KernelShape(4, 8, 1, 2),
        KernelShape(2, 4, 2, 2),
        KernelShape(1, 4, 2, 2, **_T),
    ],
    ("e4m3", 256): [
        KernelShape(16, 8, 1, 2),
        KernelShape(8, 8, 2, 2),
        KernelShape(4, 8, 1, 2),
        KernelShape(2, 8, 1, 2),
        KernelShape(1, 8, 2, 1, **_T),
    ],
    ("e4m3", 512): [KernelShape(c, 8, 2, 2, **_T) for c in (16, 8, 4, 2, 1)],
}

# Bytes of shared memory one CTA may have, where not 227 KB of an SM's 228 (CUDA programming guide,
# compute capabilities table); each CTA takes 1 KB more.
SMEM_NBYTES = {80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 120: 101_376, 121: 101_376}


def decode_config(kv_dtype: str, head_dim: int, gpu_arch: str) -> DecodeConfig:
    number = int(re.fullmatch(r"sm_(\d+)[af]?", gpu_arch)[1])
    key, smem_nbytes = (kv_dtype, head_dim), SMEM_NBYTES.get(number)
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
    # Those that skip need more registers, and so have fewer warps on an SM to load beside each
    # other: f16 d128, batch 32 of 16,384 tokens, all kept, took 506 us with two stages, not 593.
    least = 1 if smem_nbytes else 2
    for shape in tuple(shapes):
        shapes.append(replace(shape, skips=True, stages=max(shape.stages, least)))
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
                    warp_dims=128,
                )
                if KernelLayout(config, fitting).smem_nbytes <= smem_nbytes:
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
    if number in SMEM_NBYTES:
        config = replace(config, kernels=(_fit(config, SMEM_NBYTES[number]),))
    return config
