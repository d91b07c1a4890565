"""Decode modules whose clusters of 16 do not share an SM: ``python -m tests.unshared OUT``.

For synccheck, as CONTRIBUTING.md says: a CTA of theirs takes so much shared memory that no second
one fits beside it. Modules without such clusters are not exported.
"""

import sys
from pathlib import Path
from unittest.mock import patch

from ctm_rt.modules.manifest import HOST
from kernels.export import export
from kernels.fmha_decode_ctm.config import decode_config
from kernels.fmha_decode_ctm.layout import KernelLayout
from kernels.variants import VARIANTS, Variant

ARCH = "sm_90a"
ALONE_NBYTES = 150_000  # of the 233,472 of an SM

_needed_nbytes = KernelLayout.smem_nbytes.fget


def shared(variant: Variant) -> list[KernelLayout]:
    """Return which of its kernels have clusters of 16 whose CTAs share SMs."""
    config = decode_config(variant.kv_dtype, variant.head_dim, ARCH)
    layouts = [KernelLayout(config, shape) for shape in config.kernels]
    return [each for each in layouts if each.shape.cluster == 16 and each.ctas_per_sm > 1]


def concerned() -> dict[Variant, list[KernelLayout]]:
    """Return those kernels of each module that has any."""
    found = {v: shared(v) for v in VARIANTS if v.family == "fmha_decode"}
    return {variant: layouts for variant, layouts in found.items() if layouts}


def main(out: Path) -> None:
    modules = concerned()
    alone = {layout for layouts in modules.values() for layout in layouts}

    def nbytes(layout: KernelLayout) -> int:
        return ALONE_NBYTES if layout in alone else _needed_nbytes(layout)

    with patch.object(KernelLayout, "smem_nbytes", property(nbytes)):
        for variant in modules:
            result = export(variant, ARCH, HOST, out)
            if not result.ok:
                sys.exit(f"{variant.name}: {result.report}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
