"""What this machine has of what ctm_rt needs: the GPUs, the modules, the tools to export them."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ctm_rt import driver
from ctm_rt.descriptors.header import make_ffi, read_header
from ctm_rt.errors import DriverError, HeaderError
from ctm_rt.modules.link import compiler
from ctm_rt.modules.manifest import DSL_VERSION, HOST
from ctm_rt.modules.store import Entry, list_modules, native_arch, runnable_archs, store_roots


class Finding(NamedTuple):
    """One line of ``doctor``; what is not needed may be missing."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = True


class Gpu(NamedTuple):
    """A visible device."""

    name: str
    capability: tuple[int, int]


def visible_gpus() -> tuple[list[Gpu], str]:
    """Return the visible GPUs, and where there is none the reason."""
    try:
        devices = range(driver.device_count())
        gpus = [Gpu(driver.device_name(d), driver.compute_capability(d)) for d in devices]
    except DriverError as error:
        return [], f"no GPU ({error.code})"
    return gpus, "" if gpus else "no GPU is visible"


def findings(store: Path | None) -> Iterator[Finding]:
    """Yield a line for the driver, each GPU, the modules of each, and the tools to export more."""
    yield from _driver_findings()
    yield from _module_findings(store)
    yield from _export_findings()


def _driver_findings() -> Iterator[Finding]:
    gpus, why = visible_gpus()
    try:
        version = driver.driver_version()
    except DriverError as error:
        yield Finding("driver", False, error.code, "install an NVIDIA driver of CUDA 12 or newer")
        return
    yield Finding("driver", True, f"serves CUDA {version // 1000}.{version % 1000 // 10}")
    for device, gpu in enumerate(gpus):
        yield Finding(f"GPU {device}", True, f"{gpu.name}, {native_arch(gpu.capability)}")
    if not gpus:
        yield Finding(
            "GPU", False, why, "make one visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def _module_findings(store: Path | None) -> Iterator[Finding]:
    entries = list(list_modules(store_roots(store)))
    for entry in entries:
        if entry.error is not None and entry.path.parts[-2] == HOST:
            problem, _, remedy = str(entry.error).rpartition("; ")
            yield Finding(f"module {entry.path.stem}", False, problem, remedy)
    archs = [entry.manifest.gpu_arch for entry in entries if entry.manifest]
    gpus, _ = visible_gpus()
    wanted = {gpu.capability for gpu in gpus} or {(9, 0)}
    for capability in sorted(wanted):
        arch = native_arch(capability)
        count = sum(a in runnable_archs(capability) for a in archs)
        remedy = f"run `python -m kernels.export --arch {arch} --out {store_roots(store)[-1]}`"
        what = f"modules for {arch}"
        yield Finding(what, count > 0, f"{count} in the store", "" if count else remedy)


def _export_findings() -> Iterator[Finding]:
    package = "nvidia-cutlass-dsl"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "not installed"
    exact = version == DSL_VERSION
    remedy = "" if exact else f"to export: pip install {package}=={DSL_VERSION}"
    yield Finding("exporter", exact, f"{package} {version}", remedy, needed=False)
    command = compiler()
    remedy = "" if command else "to export: install gcc or clang, or name one in $CC"
    found = " ".join(command or ["none"])
    yield Finding("C compiler", command is not None, found, remedy, needed=False)


def links(entry: Entry) -> bool:
    """Say whether a sound module's header parses and its library opens, with the entry in it."""
    if entry.manifest is None:
        return False
    try:
        wrapper = read_header(entry.path.with_suffix(".h"))
        library = make_ffi(wrapper).dlopen(str(entry.path.with_suffix(".so")))
        return bool(getattr(library, wrapper.entry))
    except (HeaderError, OSError, AttributeError):
        return False
