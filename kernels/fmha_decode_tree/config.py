"""Static configuration of the tree kernels: a pure function of (KV dtype, head_dim, gpu arch)."""

import re
from dataclasses import replace

from kernels.fmha_decode_ctm.config import SMEM_NBYTES
from kernels.fmha_decode_tree.layout import TreeConfig, TreeLayout, TreeShape

# mma.sync, for every architecture. Clusters are for few units, where each warp's latency counts:
# there two sets of warps share a tile's tokens, if as many warps as that have registers.
_ANYWHERE = {
    ("f16", 32): (4, 2, 64),
    ("f16", 64): (4, 2, 64),
    ("f16", 128): (4, 2, 64),
    ("f16", 256): (4, 1, 32),
    ("f16", 512): (2, 1, 16),
    ("e4m3", 64): (4, 2, 64),
    ("e4m3", 128): (4, 2, 64),
    ("e4m3", 256): (4, 1, 32),
    ("e4m3", 512): (2, 1, 32),
}

# wgmma, sm_90a. The tokens of a tile differ from head_dim, or the products overlap: with both
# products of one instruction's shape ptxas of CUDA 12 and 13 gives P the registers of q.
_W = {"warpgroup": True}
# A slot is then held for two tiles, so there is a third. Batch 1 of 4,096 keys, 32/8 heads of 128,
# on an H200: trees of 64 tokens 17.9 us instead of 18.9, of 128 23.5 instead of 25.4.
_OVERLAP = {"warpgroup": True, "overlap": True}
# Of 3 and 6, where they are the largest that run all at once: trees of 64 tokens and 32/8 heads,
# batch 1, 4,096 keys on an H200 18.5 us in threes, 23.7 in pairs; of 32 tokens 12.8 in sixes, 14.5
# in fours. 128 rows a CTA halve what each row costs to read, and to convert: 64 tokens, batch 32,
# heads of 256 524 us instead of 713, of e4m3 652 instead of 876. With e4m3 heads of 128 eight warps
# that wait for each other twice a tile took 425 instead of 387, where two CTAs of four share an SM;
# where one has it alone, batch 8 of 32 tokens, 58 instead of 97.
_CLUSTERS = (8, 6, 4, 3, 2)
_WARPGROUP = {
    ("f16", 64): [
        *(TreeShape(cluster, 4, 2, 128, 3, **_OVERLAP) for cluster in _CLUSTERS),
        TreeShape(1, 4, 1, 128, 3, **_OVERLAP),
        TreeShape(2, 8, 1, 128, 4, **_OVERLAP),
        TreeShape(1, 8, 1, 128, 4, **_OVERLAP),
    ],
    ("f16", 128): [
        *(TreeShape(cluster, 4, 2, 64, 3, **_OVERLAP) for cluster in _CLUSTERS),
        TreeShape(1, 4, 1, 64, 3, **_W),
        TreeShape(2, 8, 1, 128, 3, **_OVERLAP),
        TreeShape(1, 8, 1, 128, 3, **_OVERLAP),
    ],
    ("f16", 256): [
        *(TreeShape(cluster, 4, 2, 32, 3, **_OVERLAP) for cluster in _CLUSTERS),
        TreeShape(1, 4, 2, 32, 3, **_OVERLAP),
        TreeShape(2, 8, 1, 32, 4, **_OVERLAP),
        TreeShape(1, 8, 1, 32, 4, **_OVERLAP),
    ],
    ("f16", 512): [TreeShape(cluster, 4, 1, 32, 2, **_W) for cluster in (*_CLUSTERS, 1)],
    ("e4m3", 64): [
        *(TreeShape(cluster, 4, 2, 128, 3, **_W) for cluster in _CLUSTERS),
        TreeShape(1, 4, 1, 128, 3, **_W),
        TreeShape(2, 8, 1, 128, 3, **_W),
    ],
    ("e4m3", 128): [
        *(TreeShape(cluster, 4, 2, 64, 4, **_W) for cluster in _CLUSTERS),
        TreeShape(1, 4, 1, 64, 3, **_W),
        TreeShape(2, 8, 1, 64, 3, **_W),
    ],
    ("e4m3", 256): [
        *(TreeShape(cluster, 4, 2, 32, 2, **_W) for cluster in _CLUSTERS),
        TreeShape(1, 4, 2, 32, 3, **_W),
        TreeShape(2, 8, 1, 64, 2, **_W),
        TreeShape(1, 8, 1, 64, 2, **_W),
    ],
    ("e4m3", 512): [TreeShape(cluster, 4, 1, 32, 2, **_W) for cluster in (*_CLUSTERS, 1)],
}

_ALL_SMEM_NBYTES = 232_448  # of a CTA on sm_90, sm_100, sm_103 and sm_110


def tree_config(kv_dtype: str, head_dim: int, gpu_arch: str) -> TreeConfig:
    number = int(re.fullmatch(r"sm_(\d+)[af]?", gpu_arch)[1])
    key = (kv_dtype, head_dim)
    config = TreeConfig(kv_dtype, head_dim, number >= 90, ())
    if gpu_arch == "sm_90a" and key in _WARPGROUP:
        return replace(config, kernels=tuple(_WARPGROUP[key]))
    row_warps, token_groups, tokens = _ANYWHERE[key]
    smem_nbytes = SMEM_NBYTES.get(number, _ALL_SMEM_NBYTES)
    shapes = []
    for cluster in (8, 4, 2, 1) if config.has_clusters else (1,):
        groups = token_groups if cluster > 1 else 1
        shape = _fit(config, TreeShape(cluster, row_warps, groups, tokens, 3), smem_nbytes)
        if shape is not None:
            shapes.append(shape)
    return replace(config, kernels=tuple(shapes))


def _fit(config: TreeConfig, shape: TreeShape, smem_nbytes: int) -> TreeShape | None:
    """Return the shape with as many tokens, then stages, as fit; None if it does not."""
    for tokens in (shape.tokens, shape.tokens // 2, 16):
        for stages in (shape.stages, 2):
            fitting = replace(shape, tokens=tokens, stages=stages)
            if TreeLayout(config, fitting).smem_nbytes <= smem_nbytes:
                return fitting
    return None
