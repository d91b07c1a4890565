"""What a module's header cannot say: where it runs, what its parameters mean, its sources."""

import dataclasses
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from ctm_rt.errors import ModuleError
from ctm_rt.tensor import DType

FORMAT = 1
DSL_VERSION = "4.8.1"  # the export format is its; pyproject pins it
HOST = f"{platform.machine()}-linux-gnu"  # as compilers for another host are named

_KINDS = ("tensor", "scalar", "stream")
_DTYPES = tuple(dtype.value for dtype in DType)
_ROLES = ("in", "out", "workspace", "semaphore")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a kernel, in the order of the wrapper's signature.

    Attributes
    ----------
    name, kind : str
        As in the header; a module of ours has tensors, scalars and one stream.
    role : str
        ``in``, ``out``, ``workspace`` or ``semaphore``; what the kernel does with a tensor.
    dtype : str
        A ``ctm_rt.tensor.DType`` value; empty for the stream.
    axes : tuple of int or str
        An int is an extent that the kernel fixes, a str names one that it reads; the same name has
        the same extent in all tensors. All strides but the innermost, which is 1, are read too.
    alignment : int
        Bytes that divide the address and every stride but the innermost.
    optional : bool
        None is accepted, and reaches the kernel as a null address.
    """

    name: str
    kind: str
    role: str = "in"
    dtype: str = ""
    axes: tuple[int | str, ...] = ()
    alignment: int = 1
    optional: bool = False

    def __post_init__(self) -> None:
        for label, value, allowed in (
            ("kind", self.kind, _KINDS),
            ("role", self.role, _ROLES),
            ("dtype", self.dtype, ("",) if self.kind == "stream" else _DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{self.name}: {label} {value!r} is none of {', '.join(allowed)}")
        if (self.kind == "tensor") != bool(self.axes):
            raise ValueError(f"{self.name}: a {self.kind} with {len(self.axes)} axes")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"{self.name}: alignment {self.alignment} is no power of two")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The ``.json`` of a module; written last, it says that the module is whole.

    Attributes
    ----------
    sha256 : dict
        Of the ``so`` and of the ``h``.
    source_sha256 : str
        Of the sources that the kernel was compiled from.
    key, config : dict
        The variant, and what was settled at compile time (tile, stages, shared memory, registers).
    """

    format: int
    name: str
    family: str
    key: dict[str, Any]
    gpu_arch: str
    host: str
    dsl_version: str
    ctm_rt_version: str
    sha256: dict[str, str]
    source_sha256: str
    config: dict[str, Any]
    parameters: tuple[ParameterSpec, ...]

    def __post_init__(self) -> None:
        for label, value, wanted in (
            ("format", self.format, FORMAT),
            ("dsl_version", self.dsl_version, DSL_VERSION),
            ("sha256", sorted(self.sha256), ["h", "so"]),
        ):
            if value != wanted:
                raise ValueError(f"{label} is {value!r}, this ctm_rt reads {wanted!r}")

    def as_json(self) -> str:
        """Return the document that ``read_manifest`` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read_manifest(path: Path) -> Manifest:
    """Read and check ``path``.

    Raises
    ------
    ModuleError
        It is not there, not a manifest, or for another version of the format; names what and why,
        and the command that repairs it.
    """
    try:
        document = json.loads(path.read_text())
        rows = [_build(ParameterSpec, row) for row in document.pop("parameters")]
        manifest: Manifest = _build(Manifest, {**document, "parameters": rows})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModuleError(f"cannot use {path}: {_reason(error)}; {repair(path)}") from error
    return manifest


def repair(path: Path) -> str:
    """Say how to make the module again whose file ``path`` is, from its place in a store."""
    folder = path.absolute().parent
    arch, host = folder.parent.name, folder.name
    if not arch.startswith("sm_"):
        return f"export {path.stem} again with `python -m kernels.export`"
    other = "" if host == HOST else f" --host {host}"
    where = f"--only {path.stem} --out {folder.parents[1]}"
    return f"run `python -m kernels.export --arch {arch}{other} {where}`"


def _build(record: Any, row: dict[str, Any]) -> Any:
    """Make a ``record`` from ``row``, whose values must have the types that it declares."""
    values = {name: tuple(v) if name in ("axes", "parameters") else v for name, v in row.items()}
    for declared in dataclasses.fields(record):
        wanted: Any = get_origin(declared.type) or declared.type
        if declared.name in values and type(values[declared.name]) is not wanted:
            raise TypeError(f"{declared.name} is {values[declared.name]!r}, no {wanted.__name__}")
    if not all(type(axis) in (int, str) for axis in values.get("axes", ())):
        raise TypeError(f"axes are {row['axes']}, not integers and names")
    return record(**values)


def _reason(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
