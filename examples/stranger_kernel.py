"""A kernel that ctm_rt did not write, exported with the DSL's own tools: out = a + scale * b.

It fixes the row length and every stride, so its descriptors have one slot, the number of rows.
``python -m examples.stranger_kernel DIR [ARCH]`` writes ``DIR/scaled_add.{h,o,so}``; it needs the
DSL and a C compiler, and no GPU. ``examples/stranger.py`` launches it.
"""

import platform
import sys
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import sym_int32

from ctm_rt.modules.link import link

ROW = 64


@cute.kernel
def scaled_add_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, scale: Float32):
    """One CTA a row, one thread an element."""
    row, _, _ = cute.arch.block_idx()
    column, _, _ = cute.arch.thread_idx()
    out[row, column] = a[row, column] + scale * b[row, column]


@cute.jit
def scaled_add(
    a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, scale: Float32, stream: cuda.CUstream
):
    """Launch over the rows of ``out``."""
    kernel = scaled_add_kernel(a, b, out, scale)
    kernel.launch(grid=(out.shape[0], 1, 1), block=(ROW, 1, 1), stream=stream)


def export(folder: Path, gpu_arch: str) -> Path:
    """Write ``scaled_add.{o,h,so}`` into ``folder``; return the library."""
    rows = sym_int32()
    fakes = [make_fake_tensor(cutlass.Float32, (rows, ROW), stride=(ROW, 1)) for _ in range(3)]
    # The DSL exports for another GPU than this machine's only with a host target beside it.
    target = f"llvm -mtriple={platform.machine()}-unknown-linux-gnu"
    options = f"--gpu-arch {gpu_arch} --host-target '{target}'"
    compiled = cute.compile(scaled_add, *fakes, Float32(0), make_fake_stream(), options=options)
    folder.mkdir(parents=True, exist_ok=True)
    compiled.export_to_c(str(folder), "scaled_add", function_prefix="scaled_add")
    return link(folder / "scaled_add.o", folder / "scaled_add.so")


if __name__ == "__main__":
    print(export(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sm_90a"))
