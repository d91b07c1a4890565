"""Small modules for tests: a table like kernels/variants.py, exported once per test run."""

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ctm_rt.modules.link import link
from ctm_rt.modules.manifest import HOST

ARCH = "sm_90a"
SMEM_NBYTES = 2048


class Tiny(NamedTuple):
    """out[n, k] = scale * x[n, k] + bias[k], with all kinds of parameter that our kernels have."""

    name: str
    only_arch: str = ""
    family: str = "tiny"

    @property
    def key(self) -> dict[str, Any]:
        return {"only_arch": self.only_arch}

    def supports(self, gpu_arch: str) -> bool:
        return self.only_arch in ("", gpu_arch)

    @property
    def parameters(self) -> list[dict[str, Any]]:
        return [parameter.row() for parameter in _parameters()]

    def config(self, gpu_arch: str) -> dict[str, Any]:
        return {"kernels": [{"smem_nbytes": SMEM_NBYTES}]}

    def compile(self, gpu_arch: str, options: str) -> Any:
        from cutlass import cute

        return cute.compile(_jit(), *[p.fake() for p in _parameters()], options=options)


class Broken(Tiny):
    """A kernel that does not compile."""

    def compile(self, gpu_arch: str, options: str) -> Any:
        raise RuntimeError("no such instruction")


class Ready(Tiny):
    """A kernel whose object and header are there already, in the folder called ``only_arch``."""

    def supports(self, gpu_arch: str) -> bool:
        return True

    def compile(self, gpu_arch: str, options: str) -> Any:
        return self

    def export_to_c(self, file_path: str, file_name: str, function_prefix: str) -> None:
        for suffix in (".o", ".h"):
            shutil.copy(Path(self.only_arch, file_name + suffix), file_path)


VARIANTS = (Tiny("tiny_a"), Tiny("tiny_b"))


def _parameters() -> tuple[Any, ...]:
    from kernels.common.signature import ScalarParameter, StreamParameter, TensorParameter

    return (
        TensorParameter("x", "in", "f16", ("n", "k", 64)),
        TensorParameter("bias", "in", "f32", ("k",), alignment=4, optional=True),
        TensorParameter("out", "out", "f16", ("n", "k", 64)),
        TensorParameter("counters", "semaphore", "i32", ("c",), alignment=4),
        ScalarParameter("scale", "f32"),
        ScalarParameter("count", "i32"),
        StreamParameter(),
    )


def _jit() -> Any:
    import cuda.bindings.driver as cu
    import cutlass
    from cutlass import Float32, Int32, cute

    @cute.kernel
    def tiny_kernel(x, bias, out, counters, scale: Float32, count: Int32):
        n, _, _ = cute.arch.block_idx()
        i, _, _ = cute.arch.thread_idx()
        for k in range(x.shape[1]):
            value = x[n, k, i].to(Float32) * scale + bias[k]
            out[n, k, i] = value.to(cutlass.Float16)
        if count == 0:
            counters[0] = 0

    @cute.jit
    def tiny(x, bias, out, counters, scale: Float32, count: Int32, stream: cu.CUstream):
        tiny_kernel(x, bias, out, counters, scale, count).launch(
            grid=(x.shape[0], count, 1), block=(64, 1, 1), smem=SMEM_NBYTES, stream=stream
        )

    return tiny


@functools.cache
def store() -> Path:
    """Return the root of a store with ``VARIANTS`` for ``ARCH`` and this host."""
    from kernels.export import main

    root = _scratch()
    assert main(["--arch", ARCH, "--out", str(root)], VARIANTS) == 0
    return root


@functools.cache
def stranger() -> Path:
    """Return the library of the kernel that examples/stranger_kernel.py exports."""
    from examples.stranger_kernel import export

    return export(_scratch(), ARCH)


@functools.cache
def zoo(name: str) -> Path:
    """Return the library of a kernel of tests/zoo.py."""
    return link(_zoo() / f"{name}.o", _zoo() / f"{name}.so")


@functools.cache
def _zoo() -> Path:
    folder = _scratch()
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "tests.zoo", folder], cwd=root, check=True)
    return folder


def copy(name: str, root: Path, arch: str = ARCH) -> Path:
    """Copy a module, as a new file, into the store at ``root``; return its ``.json``."""
    folder = root / arch / HOST
    folder.mkdir(parents=True, exist_ok=True)
    for file in (store() / ARCH / HOST).glob(f"{name}.*"):
        shutil.copy(file, folder)
    return folder / f"{name}.json"


def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="ctm_rt-tiny")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
