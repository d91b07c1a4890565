"""Export kernels ahead of time: ``python -m kernels.export --arch sm_90a --out DIR``.

No GPU is needed. Writes ``DIR/<arch>/<host>/<name>.{o,h,so,json}``; the ``.json`` last, so that a
module is whole where there is one.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

import ctm_rt
from ctm_rt.decode import plan
from ctm_rt.modules import link, manifest
from ctm_rt.paged_kv import layout
from kernels.cubin import kernel_usage

# Without a fixed target the host code holds AVX of the machine that exports, and dies elsewhere.
HOST_TARGETS = {
    "x86_64-linux-gnu": "'llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2'",
    "aarch64-linux-gnu": "linux-aarch64",
}


class Result(NamedTuple):
    name: str
    ok: bool
    report: str


def main(argv: Sequence[str] | None = None, variants: Sequence[Any] | None = None) -> int:
    """Export the chosen rows of ``variants``, by default the project's; 0 if all went well."""
    if variants is None:
        from kernels.variants import VARIANTS as variants
    args = _arguments(argv, [variant.name for variant in variants])
    console = Console(highlight=False, markup=False, soft_wrap=True)
    chosen = [v for v in variants if not args.only or v.name in args.only]
    wanted = [v for v in chosen if v.supports(args.arch)]
    for variant in chosen:
        if variant not in wanted:
            console.print(f"skipped {variant.name}: not for {args.arch}")
    if link.compiler(args.host) is None:
        console.print(f"no C compiler for {args.host}: objects and headers only, link them there")

    failed = not wanted
    with (
        ProcessPoolExecutor(
            max(1, min(len(wanted), os.cpu_count() or 1)), mp_context=get_context("spawn")
        ) as pool,
        Progress(console=console) as progress,
    ):
        task = progress.add_task(f"{args.arch} {args.host}", total=len(wanted))
        jobs = {pool.submit(export, v, args.arch, args.host, args.out): v.name for v in wanted}
        for job in as_completed(jobs):
            error = job.exception()  # the worker itself died; its own errors are results
            result = job.result() if error is None else Result(jobs[job], False, repr(error))
            failed |= not result.ok
            console.print(f"{'exported' if result.ok else 'FAILED'} {result.name}: {result.report}")
            progress.advance(task)
    return int(failed)


def export(variant: Any, gpu_arch: str, host: str, out: Path) -> Result:
    """Compile, link and commit one module; an error becomes the report."""
    start = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="ctm_rt-") as staging:
            built = _build(variant, gpu_arch, host, Path(staging))
        _commit(built, out / gpu_arch / host)
    except Exception as error:
        return Result(variant.name, False, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    sizes = ", ".join(f"{Path(name).suffix} {len(data)}" for name, data in built.items())
    return Result(variant.name, True, f"{seconds:.1f} s; bytes: {sizes}")


def _build(variant: Any, gpu_arch: str, host: str, staging: Path) -> dict[str, bytes]:
    """Return the module's files by name, the manifest last; none where the host has no compiler."""
    name = variant.name
    options = f"--gpu-arch {gpu_arch} --host-target {HOST_TARGETS[host]}"
    compiled = variant.compile(gpu_arch, options)
    compiled.export_to_c(file_path=str(staging), file_name=name, function_prefix=name)
    files = {file: (staging / file).read_bytes() for file in (f"{name}.o", f"{name}.h")}
    if link.compiler(host) is None:
        return files
    so = link.link(staging / f"{name}.o", staging / f"{name}.so", host=host)
    files[so.name] = so.read_bytes()
    document = manifest.Manifest(
        format=manifest.FORMAT,
        name=name,
        family=variant.family,
        key=variant.key,
        gpu_arch=gpu_arch,
        host=host,
        dsl_version=version("nvidia-cutlass-dsl"),
        ctm_rt_version=ctm_rt.__version__,
        sha256={s: hashlib.sha256(files[f"{name}.{s}"]).hexdigest() for s in ("so", "h")},
        source_sha256=source_sha256(),
        config=_config(variant.config(gpu_arch), files[f"{name}.o"], gpu_arch),
        parameters=tuple(manifest.ParameterSpec(**row) for row in variant.parameters),
    )
    files[f"{name}.json"] = document.as_json().encode()
    return files


def _config(config: dict[str, Any], image: bytes, gpu_arch: str) -> dict[str, Any]:
    """Add to the variant's own account what each kernel, in order of tracing, turned out to use."""
    used = kernel_usage(image, gpu_arch)
    given = config.get("kernels", [{}] * len(used))
    if len(given) != len(used):
        raise ValueError(f"the variant tells of {len(given)} kernels, the object holds {len(used)}")
    if slow := [i for i, kernel in enumerate(used) if kernel.is_serialised]:
        raise ValueError(f"ptxas waits for every single multiply of a warpgroup in kernels {slow}")
    multiplying = (i for i, kernel in enumerate(used) if kernel.instructions["HGMMA"])
    if spilling := [i for i in multiplying if used[i].spill_bytes]:
        raise ValueError(f"the registers of a warpgroup do not suffice for kernels {spilling}")
    rows = [{**kernel._asdict(), **row} for kernel, row in zip(used, given, strict=True)]
    return {**config, "kernels": rows}


def _commit(files: dict[str, bytes], folder: Path) -> None:
    """Put ``files`` in place one by one, each the old or the new one; the last is the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    if not any(name.endswith(".json") for name in files):  # what is there is of another build
        for stale in {folder / f"{Path(name).stem}{s}" for name in files for s in (".json", ".so")}:
            stale.unlink(missing_ok=True)
    for name, data in files.items():
        aside = folder / f".{name}.{os.getpid()}"
        try:
            aside.write_bytes(data)
            aside.replace(folder / name)
        finally:
            aside.unlink(missing_ok=True)


def source_sha256() -> str:
    """Digest what modules are made from: the kernels, the constants they share, the driver shim."""
    root = Path(__file__).parent.parent
    shared = (link.SHIM, Path(plan.__file__), Path(layout.__file__))
    digest = hashlib.sha256()
    for path in sorted([*(root / "kernels").rglob("*.py"), *shared]):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _arguments(argv: Sequence[str] | None, names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kernels.export", description=__doc__)
    parser.add_argument("--arch", required=True, help="GPU architecture, as in sm_90a")
    parser.add_argument(
        "--host",
        default=manifest.HOST,
        choices=HOST_TARGETS,
        help="triple of the machine that runs it (default: this one, %(default)s)",
    )
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME", help="default: all")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="root of the store")
    args = parser.parse_args(argv)
    if not re.fullmatch(r"sm_\d{2,3}[af]?", args.arch):
        parser.error(f"--arch: expected an architecture as in sm_90a, got {args.arch}")
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(names)}")
    try:
        found = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        found = "none"
    if found != manifest.DSL_VERSION:
        wanted = f"nvidia-cutlass-dsl=={manifest.DSL_VERSION}"
        parser.error(f"needs {wanted}, got {found}; run `pip install {wanted}`")
    return args


if __name__ == "__main__":
    sys.exit(main())
