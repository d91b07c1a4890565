"""Find modules: ``<root>/<gpu arch>/<host triple>/<name>.{so,h,json}``."""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ctm_rt.errors import ModuleError
from ctm_rt.modules.manifest import HOST, Manifest, read_manifest, repair

PREBUILT = Path(__file__).with_name("prebuilt")
USER = Path("~/.local/share/ctm_rt/modules")

_ELF_MACHINES = {"x86_64-linux-gnu": 62, "aarch64-linux-gnu": 183}


class Module(NamedTuple):
    """The files of one module; ``manifest`` is None for a kernel of another project."""

    so: Path
    header: Path
    manifest: Manifest | None


class Entry(NamedTuple):
    """One module of a listing: its manifest, or why it cannot be used."""

    path: Path
    manifest: Manifest | None
    error: ModuleError | None


def store_roots(store: str | Path | None = None) -> tuple[Path, ...]:
    """Return the one root that the caller names, else the packaged and the user's."""
    return (Path(store),) if store is not None else (PREBUILT, USER.expanduser())


def runnable_archs(capability: tuple[int, int]) -> list[str]:
    """Return the archs whose code runs on a device of ``capability``, best first.

    Code for ``sm_90a`` runs on 9.0 alone, for ``sm_100f`` on 10.0 and later minors that have the
    family's features, plain ``sm_80`` on 8.0 and every later minor.
    """
    major, minor = capability
    lower = [f"sm_{major}{m}{suffix}" for m in range(minor, -1, -1) for suffix in ("f", "")]
    return [f"sm_{major}{minor}a", *lower]


def native_arch(capability: tuple[int, int]) -> str:
    """Return the arch to export for: the one with every feature of the device, from 9.0 on."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''}"


def find(name: str, capability: tuple[int, int], roots: Iterable[Path]) -> Path:
    """Return the ``.json`` of the best module called ``name`` for a device of ``capability``.

    The better arch wins, then the earlier root. Nothing is opened.

    Raises
    ------
    ModuleError
        None is there for this device and host, or an export of it was never finished.
    """
    roots = tuple(roots)
    for arch in runnable_archs(capability):
        for root in roots:
            path = root / arch / HOST / f"{name}.json"
            if path.is_file():
                return path
            if path.with_suffix(".so").exists():
                raise ModuleError(f"{path} is missing: its export did not end; {repair(path)}")
    places = ", ".join(map(str, roots))
    others = sorted({str(path) for root in roots for path in root.glob(f"*/*/{name}.json")})
    hint = f"; there is {', '.join(others)}" if others else ""
    arch = native_arch(capability)
    wanted = roots[-1] / arch / HOST / f"{name}.json"
    raise ModuleError(f"no module {name} for {arch} on {HOST} in {places}{hint}; {repair(wanted)}")


def read_module(path: Path) -> Module:
    """Check the files of the module at ``path``: its ``.json``, or its ``.so`` or ``.h``.

    Without a ``.json`` beside them, ``.so`` and ``.h`` are a stranger's kernel.

    Raises
    ------
    ModuleError
        A file is missing, damaged, not what the manifest says, or for another host.
    """
    so, header, document = (path.with_suffix(suffix) for suffix in (".so", ".h", ".json"))
    ours = document.exists() or path == document
    advice = repair(path) if ours else "link it with ctm_rt.modules.link.link()"
    manifest = read_manifest(document) if ours else None
    for file in (so, header):
        if not file.is_file():
            raise ModuleError(f"{file} is missing; {advice}")
    if manifest is not None:
        if manifest.host != HOST:
            raise ModuleError(f"{document} is for {manifest.host}, this host is {HOST}; {advice}")
        for file in (so, header):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest != manifest.sha256[file.suffix[1:]]:
                raise ModuleError(f"{file} does not match {document.name}; {advice}")
    _check_elf(so, advice)
    return Module(so, header, manifest)


def list_modules(roots: Iterable[Path]) -> Iterator[Entry]:
    """Yield every module under ``roots``, what this host cannot use with the reason."""
    for root in roots:
        files = [*root.glob("*/*/*.so"), *root.glob("*/*/*.json")]
        for path in sorted({file.with_suffix(".json") for file in files}):
            try:
                yield Entry(path, read_module(path).manifest, None)
            except ModuleError as error:
                yield Entry(path, None, error)


def _check_elf(so: Path, advice: str) -> None:
    """Refuse what the dynamic loader might only trip over: half a file, or another machine's."""
    with so.open("rb") as file:
        head, nbytes = file.read(64), so.stat().st_size
    if len(head) < 64 or head[:4] != b"\x7fELF":
        raise ModuleError(f"{so} is no shared library; {advice}")
    machine, sections_at, section_nbytes, num_sections = struct.unpack("<18xH20xQ10xHH2x", head)
    if nbytes < sections_at + section_nbytes * num_sections:
        raise ModuleError(f"{so} is cut short at {nbytes} bytes; {advice}")
    if machine != _ELF_MACHINES.get(HOST, machine):
        raise ModuleError(f"{so} is for another machine (ELF {machine}) than {HOST}; {advice}")
