"""What is exported: one table, and the row is the key."""

import re
from dataclasses import asdict
from typing import Any, NamedTuple

from kernels.fmha_decode_ctm.config import decode_config, load_config
from kernels.fmha_decode_ctm.layout import DecodeConfig, KernelLayout
from kernels.fmha_decode_tree.config import tree_config
from kernels.fmha_decode_tree.layout import TreeLayout
from kernels.kv_cache.dealing import dealing

FP8_SINCE = 89  # cvt.rn.f16x2.e4m3x2, and cvt.rn.satfinite.e4m3x2.f32


def supports_dtype(kv_dtype: str, gpu_arch: str) -> bool:
    return kv_dtype != "e4m3" or int(re.sub(r"\D", "", gpu_arch)) >= FP8_SINCE


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
        return supports_dtype(self.kv_dtype, gpu_arch)

    @property
    def parameters(self) -> list[dict[str, Any]]:
        from kernels.fmha_decode_ctm.fmha_decode import parameters

        return [parameter.row() for parameter in parameters(self.kv_dtype, self.head_dim)]

    def config(self, gpu_arch: str) -> dict[str, Any]:
        """Return what a plan needs: the module's kernels, in the order of its ``kernel`` scalar."""
        config = self._config(gpu_arch)
        return {
            "kernels": [
                {
                    **asdict(layout.shape),
                    "tile_tokens": layout.tile_tokens,
                    "block": layout.threads,
                    "smem_nbytes": layout.smem_nbytes,
                }
                for layout in (KernelLayout(config, shape) for shape in config.kernels)
            ]
        }

    def compile(self, gpu_arch: str, options: str) -> Any:
        """Trace and compile with symbolic shapes; no tensor and no GPU is needed."""
        from cutlass import cute

        from kernels.fmha_decode_ctm.fmha_decode import FmhaDecode, parameters

        fakes = [parameter.fake() for parameter in parameters(self.kv_dtype, self.head_dim)]
        return cute.compile(FmhaDecode(self._config(gpu_arch)), *fakes, options=options)

    def _config(self, gpu_arch: str) -> DecodeConfig:
        configure = load_config if self.family == "kv_load" else decode_config
        return configure(self.kv_dtype, self.head_dim, gpu_arch)


class TreeVariant(Variant):
    """Decode of several query tokens with a mask; ``family`` is fmha_decode_tree."""

    @property
    def key(self) -> dict[str, Any]:
        return {**super().key, "tree": True}

    @property
    def parameters(self) -> list[dict[str, Any]]:
        from kernels.fmha_decode_tree.fmha_decode_tree import parameters

        return [parameter.row() for parameter in parameters(self.kv_dtype, self.head_dim)]

    def config(self, gpu_arch: str) -> dict[str, Any]:
        """Return what a plan needs: the module's kernels, in the order of its ``kernel`` scalar."""
        config = tree_config(self.kv_dtype, self.head_dim, gpu_arch)
        return {
            "kernels": [
                {
                    **asdict(layout.shape),
                    "rows": layout.rows,
                    "tile_tokens": layout.tile_tokens,
                    "block": layout.threads,
                    "smem_nbytes": layout.smem_nbytes,
                }
                for layout in (TreeLayout(config, shape) for shape in config.kernels)
            ]
        }

    def compile(self, gpu_arch: str, options: str) -> Any:
        """Trace and compile with symbolic shapes; no tensor and no GPU is needed."""
        from cutlass import cute

        from kernels.fmha_decode_tree.fmha_decode_tree import FmhaDecodeTree, parameters

        config = tree_config(self.kv_dtype, self.head_dim, gpu_arch)
        fakes = [parameter.fake() for parameter in parameters(self.kv_dtype, self.head_dim)]
        return cute.compile(FmhaDecodeTree(config), *fakes, options=options)


class CacheVariant(NamedTuple):
    """A kernel that writes or moves a cache, of any head_dim; of any type if none is named."""

    family: str
    kv_dtype: str = ""

    @property
    def name(self) -> str:
        return f"{self.family}_{self.kv_dtype}" if self.kv_dtype else self.family

    @property
    def key(self) -> dict[str, Any]:
        return {"kv_dtype": self.kv_dtype} if self.kv_dtype else {}

    def supports(self, gpu_arch: str) -> bool:
        return supports_dtype(self.kv_dtype, gpu_arch)

    @property
    def parameters(self) -> list[dict[str, Any]]:
        from kernels.kv_cache.kernels import parameters

        return [parameter.row() for parameter in parameters(*self)]

    def config(self, gpu_arch: str) -> dict[str, Any]:
        """Return how chunks are dealt."""
        return {"kernels": [{"per_thread": dealing(*self).per_thread}]}

    def compile(self, gpu_arch: str, options: str) -> Any:
        """Trace and compile with symbolic shapes; no tensor and no GPU is needed."""
        from cutlass import cute

        from kernels.kv_cache.kernels import entry, parameters

        fakes = [parameter.fake() for parameter in parameters(*self)]
        return cute.compile(entry(*self, gpu_arch), *fakes, options=options)


VARIANTS = (
    *(
        Variant(family, kv_dtype, head_dim)
        for family in ("fmha_decode", "kv_load")  # the latter for the benchmark
        for kv_dtype in ("f16", "e4m3")
        for head_dim in (32, 64, 128, 256, 512)
    ),
    *(
        TreeVariant("fmha_decode_tree", kv_dtype, head_dim)
        for kv_dtype, head_dims in (("f16", (32, 64, 128, 256, 512)), ("e4m3", (64, 128, 256, 512)))
        for head_dim in head_dims
    ),
    CacheVariant("kv_append", "f16"),
    CacheVariant("kv_append", "e4m3"),
    CacheVariant("kv_append_lengths"),
    CacheVariant("kv_copy_pages"),
    CacheVariant("kv_gather"),
)
