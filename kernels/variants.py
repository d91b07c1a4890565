"""What is exported: one table, and the row is the key."""

import re
from typing import Any, NamedTuple

FP8_SINCE = 89  # cvt.rn.f16x2.e4m3x2


class Variant(NamedTuple):
    family: str
    kv_dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.family}_{self.kv_dtype}_d{self.head_dim}"

    @property
    def key(self) -> dict[str, Any]:
        return {"tree": False, "kv_dtype": self.kv_dtype, "head_dim": self.head_dim}

    def supports(self, gpu_arch: str) -> bool:
        return self.kv_dtype != "e4m3" or int(re.sub(r"\D", "", gpu_arch)) >= FP8_SINCE

    @property
    def parameters(self) -> list[dict[str, Any]]:
        from kernels.fmha_decode_ctm.fmha_decode import parameters

        return [parameter.row() for parameter in parameters(self.kv_dtype, self.head_dim)]

    def config(self, gpu_arch: str) -> dict[str, Any]:
        from kernels.fmha_decode_ctm.config import MAX_SPLITS, decode_config

        config = decode_config(self.kv_dtype, self.head_dim, gpu_arch)
        return {
            "tile_tokens": config.tile_tokens,
            "stages": config.stages,
            "max_splits": MAX_SPLITS,
            "block": config.threads,
            "kernels": [
                {**shape._asdict(), "smem_nbytes": config.smem_nbytes(shape.head_tiles)}
                for shape in config.kernels
            ],
        }

    def compile(self, gpu_arch: str, options: str) -> Any:
        """Trace and compile with symbolic shapes; no tensor and no GPU is needed."""
        from cutlass import cute

        from kernels.fmha_decode_ctm.config import decode_config
        from kernels.fmha_decode_ctm.fmha_decode import FmhaDecode, parameters

        kernel = FmhaDecode(decode_config(self.kv_dtype, self.head_dim, gpu_arch))
        fakes = [parameter.fake() for parameter in parameters(self.kv_dtype, self.head_dim)]
        return cute.compile(kernel, *fakes, options=options)


VARIANTS = tuple(Variant("fmha_decode", "f16", head_dim) for head_dim in (64, 128))
