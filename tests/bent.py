"""Decode kernels that are not what they should be: ``python -m tests.bent OUT`` exports them.

Each is the kernel without clusters of ``fmha_decode_f16_d128``, for 16 heads, with one thing bent;
``straight`` has none. What became of two tree kernels is in ``serialised.txt`` and ``spilt.txt``.
"""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cutlass import Boolean, Float32

from ctm_rt.modules.manifest import HOST
from kernels.common import ptx
from kernels.export import export
from kernels.fmha_decode_ctm.config import decode_config
from kernels.fmha_decode_ctm.layout import DecodeConfig, KernelShape
from kernels.fmha_decode_tree import config as tree_config
from kernels.fmha_decode_tree.layout import TreeShape
from kernels.fmha_decode_tree.tile import TileMath
from kernels.variants import TreeVariant, Variant

ARCH = "sm_90a"


class Bent(Variant):
    """One kernel; ``family`` is what was done to it."""

    @property
    def token_tiles(self) -> int:
        return 8 if self.family == "crowded" else 1  # scores of 128 tokens and 16 heads a warp

    def _config(self, gpu_arch: str) -> DecodeConfig:
        config = decode_config(self.kv_dtype, self.head_dim, gpu_arch)
        shape = KernelShape(1, 4, self.token_tiles, 3, head_tiles=2)
        return replace(config, kernels=(shape,))


def _copy_8(smem: Any, gmem: Any, nbytes: Any) -> None:
    ptx.asm("cp.async.ca.shared.global [{$r0}], [{$r1}], 8;", inputs=(smem, gmem))


# What is done in place of which function of kernels/common/ptx.py.
BENDS = {
    "straight": {},
    "crowded": {},
    "no_mma": {"mma_m16n8k16": lambda a, b, c: c},
    "narrow": {"cp_async_16": _copy_8},
}


def _softmax_with_a_branch(self: TileMath, state: Any, scale: Any) -> Any:
    """Scale sums down while the multiply that they are of is in flight."""
    weights = self.softmax_and_rescale(state, scale)
    return weights, [Float32(1.0)] * 2, Boolean(False)


def serialise(out: Path) -> str:
    """Return how the export of a tree kernel whose multiplies ptxas serialises is refused."""
    shape = TreeShape(1, 8, 1, 64, 4, warpgroup=True, overlap=True)
    with patch.object(TileMath, "softmax", _softmax_with_a_branch):
        return _refusal(shape, 128, out)


def spill(out: Path) -> str:
    """Return how that of one is refused whose scores and sums are more than its registers."""
    return _refusal(TreeShape(1, 4, 1, 128, 2, warpgroup=True), 256, out)


def _refusal(shape: TreeShape, head_dim: int, out: Path) -> str:
    with patch.dict(tree_config._WARPGROUP, {("f16", head_dim): [shape]}):
        return export(TreeVariant("refused", "f16", head_dim), ARCH, HOST, out).report


def main(out: Path) -> None:
    for name, functions in BENDS.items():
        with ExitStack() as stack:
            for replaced, function in functions.items():
                stack.enter_context(patch.object(ptx, replaced, function))
            result = export(Bent(name, "f16", 128), ARCH, HOST, out)
        if not result.ok:
            sys.exit(f"{name}: {result.report}")
    (out / "serialised.txt").write_text(serialise(out))
    (out / "spilt.txt").write_text(spill(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
