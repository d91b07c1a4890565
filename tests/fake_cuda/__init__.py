"""A ``libcuda.so.1`` for tests, and the handles to steer it and to read what it saw."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SONAME = "libcuda.so.1"

_U3 = ctypes.c_uint * 3
_lib: ctypes.CDLL | None = None
_keep: object = None  # the callback that the library may call


class Launch(NamedTuple):
    """One launch that the fake driver accepted."""

    call: str  # "cuLaunchKernelEx" or "cuLaunchKernel"
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    stream: int
    device: int
    captured: bool
    params: tuple[bytes, ...]  # one per kernel parameter, cut by the cubin's own sizes
    attributes: dict[int, int]  # the first word of each, by CUlaunchAttributeID


class _Launch(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("grid", _U3),
        ("block", _U3),
        ("cluster", _U3),
        ("dynamic_smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int),
        ("captured", ctypes.c_int),
        ("num_params", ctypes.c_int),
        ("num_attributes", ctypes.c_int),
        ("sizes", ctypes.POINTER(ctypes.c_int)),
        ("attributes", ctypes.POINTER(ctypes.c_int)),
        ("params", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    _fields_ = (("call", ctypes.c_char * 48), ("a", ctypes.c_size_t), ("b", ctypes.c_size_t))


def build(folder: Path) -> Path:
    """Compile the fake driver into ``folder``."""
    library = folder / SONAME
    sources = sorted(Path(__file__).parent.glob("*.c"))
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
    command = [os.environ.get("CC", "cc"), *flags, f"-Wl,-soname,{SONAME}", "-o", library]
    subprocess.run([*command, *sources, "-ldl"], check=True)
    return library


def load(library: Path) -> None:
    """Load it for the process, before anything else has asked for a ``libcuda.so.1``."""
    global _lib
    _lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _lib.fake_launch.restype = ctypes.POINTER(_Launch)
    _lib.fake_launch.argtypes = [ctypes.c_size_t]
    _lib.fake_call.restype = ctypes.POINTER(_Call)
    _lib.fake_call.argtypes = [ctypes.c_size_t]
    for name in ("fake_num_launches", "fake_num_calls", "fake_live_allocations"):
        getattr(_lib, name).restype = ctypes.c_size_t
    _lib.fake_live_objects.restype = ctypes.c_size_t


def library() -> ctypes.CDLL:
    """Return the loaded fake, for calls that have no Python side."""
    if _lib is None:
        raise RuntimeError("the fake driver is not loaded: see tests/conftest.py")
    return _lib


def environment() -> dict[str, str]:
    """Return the environment in which a child process finds the fake by its soname."""
    return os.environ | {"LD_LIBRARY_PATH": str(Path(library()._name).parent)}


def reset() -> None:
    """Forget launches, calls, faults, captures and pauses; one device of 9.0. Memory stays."""
    library().fake_reset()


def launches() -> list[Launch]:
    """Return the accepted launches since the last reset."""
    return [_read(i) for i in range(library().fake_num_launches())]


def _read(index: int) -> Launch:
    raw = library().fake_launch(index).contents
    sizes, params, at = raw.sizes[: raw.num_params], [], raw.params
    for size in sizes:
        params.append(ctypes.string_at(at, size))
        at += size
    return Launch(
        raw.call.decode(),
        raw.kernel.decode(),
        tuple(raw.grid),
        tuple(raw.block),
        tuple(raw.cluster),
        raw.dynamic_smem,
        raw.stream or 0,
        raw.device,
        bool(raw.captured),
        tuple(params),
        dict(zip(*[iter(raw.attributes[: 2 * raw.num_attributes])] * 2, strict=True)),
    )


def on_launch(act: Callable[[Launch], None]) -> None:
    """Call ``act`` after each accepted launch: what the kernel would do to (host) memory."""
    global _keep
    _keep = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(lambda index: act(_read(index)))
    library().fake_on_launch(_keep)


def calls(call: str) -> list[tuple[int, int]]:
    """Return the first two arguments of each ``call`` (without its _v2), accepted or not."""
    records = (library().fake_call(i).contents for i in range(library().fake_num_calls()))
    return [(record.a, record.b) for record in records if record.call == call.encode()]


def fail(call: str, code: int, times: int = 1) -> None:
    """Make the driver function ``call`` (without its _v2) return ``code`` the next ``times``."""
    library().fake_fail(call.encode(), int(code), times)


def set_capturing(stream: int, capturing: bool) -> None:
    """Let a created stream capture, or end that."""
    assert library().fake_set_capturing(ctypes.c_void_p(stream), int(capturing)) == 0


def capture_status(stream: int) -> int:
    """Return 0, 1 (capturing) or 2 (spoilt by a call that a capture forbids)."""
    status = ctypes.c_int()
    assert library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) == 0
    return status.value


def set_paused(stream: int, paused: bool) -> None:
    """Keep events on the stream from completing, until resumed or synchronised with."""
    assert library().fake_set_paused(ctypes.c_void_p(stream), int(paused)) == 0


def set_devices(count: int, cc: tuple[int, int] = (9, 0)) -> None:
    """Have ``count`` devices (up to 8) of compute capability ``cc``."""
    library().fake_set_num_devices(count)
    for device in range(8):
        set_compute_capability(device, cc)


def set_compute_capability(device: int, cc: tuple[int, int]) -> None:
    """Change one device."""
    library().fake_set_device(device, cc[0] * 10 + cc[1])


def live_allocations() -> int:
    """Return how many device allocations there are."""
    return int(library().fake_live_allocations(0))


def live_pinned() -> int:
    """Return how many allocations of pinned host memory there are."""
    return int(library().fake_live_allocations(1))


def live_events() -> int:
    """Return how many events there are."""
    return int(library().fake_live_objects(3))
