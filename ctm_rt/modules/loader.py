"""Load a module's library: once per process, on every device that can run it, never unloaded."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cffi import FFI

from ctm_rt import driver
from ctm_rt.descriptors.header import Wrapper, make_ffi
from ctm_rt.errors import DriverError, ModuleError
from ctm_rt.modules.manifest import repair
from ctm_rt.modules.store import Module, native_arch, runnable_archs

# driver_shim.c; addresses travel as integers, which cffi converts fastest.
_CALL = """int32_t ctm_rt_call_v1(uintptr_t entry, uintptr_t args, int32_t num_args,
                               uintptr_t stream_cell, uintptr_t context, uintptr_t stream);"""
_NO_BINARY_FOR_GPU = 209
_SHIM_CODES = {
    -1: ("NO_DRIVER", "libcuda.so.1 cannot be opened; install the NVIDIA driver"),
    -2: ("OLD_DRIVER", "libcuda.so.1 lacks a function; install a newer NVIDIA driver"),
}

_lock = threading.Lock()  # one for all modules: the driver would serialise their loading anyway
_libraries: dict[tuple[int, int], "Library"] = {}
_poisoned: dict[tuple[int, int], str] = {}


@dataclass(frozen=True, slots=True)
class Library:
    """A module in this process.

    Attributes
    ----------
    ffi : FFI
        Knows the wrapper's types.
    call : function
        ``ctm_rt_call_v1`` of the driver shim.
    entry : int
        Address of the C entry.
    devices : frozenset of int
        The ordinals that it is loaded on.
    handles : tuple
        What must live as long as the process.
    """

    ffi: FFI
    call: Callable[[int, int, int, int, int, int], int]
    entry: int
    devices: frozenset[int]
    handles: tuple[object, ...]


def load_library(module: Module, wrapper: Wrapper, *, device: int, stream: int) -> Library:
    """Return the module's library, loaded by the first call that succeeds.

    Two paths to one file share it. Threads wait for the one that loads. After a failure the next
    call tries again.

    Raises
    ------
    ModuleError
        ``stream`` captures, no device can run the module, the files do not fit together, or an
        earlier failure could not be cleaned up.
    DriverError
        The driver refused; nothing is left behind.
    """
    status = module.so.stat()
    key = status.st_dev, status.st_ino
    if (library := _libraries.get(key)) is not None:
        return library
    with _lock:
        if (library := _libraries.get(key)) is not None:
            return library
        if key in _poisoned:
            raise ModuleError(
                f"{module.so} failed to load and to unload ({_poisoned[key]}); restart the process"
            )
        with driver.current(device), driver.housekeeping():
            if driver.is_capturing(stream, device):
                raise ModuleError(
                    f"{module.so} cannot be loaded while the stream captures; "
                    f'call ctm_rt.load("{module.so.stem}") before the capture begins'
                )
            library = _libraries[key] = _load(module, wrapper, key)
    return library


def status_error(call: str, status: int) -> DriverError:
    """Return the error for a ``status`` that a module's C entry or its driver shim gave."""
    shim = _SHIM_CODES.get(status)
    return DriverError(call, *shim) if shim else driver.error(call, status)


def _load(module: Module, wrapper: Wrapper, key: tuple[int, int]) -> Library:
    devices = _candidates(module)
    ffi = make_ffi(wrapper)
    ffi.cdef(_CALL)
    library = _open(module, ffi)
    init, load_to_device, entry, call = (
        _symbol(module, library, name)
        for name in (wrapper.init, wrapper.load_to_device, wrapper.entry, "ctm_rt_call_v1")
    )

    handle, ordinal, status = ffi.new("void **"), ffi.new("int32_t *"), ffi.new("int32_t *")
    place = ffi.new("void **", handle)  # the generated code takes the address of a pointer to it
    loaded = set()
    try:
        init(ffi.new("void *[]", [place, status]))
        if status[0]:
            raise status_error(wrapper.init, status[0])
        for device in devices:
            ordinal[0] = device
            load_to_device(ffi.new("void *[]", [place, ordinal, status]))
            if status[0] == 0:
                loaded.add(device)
            elif module.manifest or status[0] != _NO_BINARY_FOR_GPU:
                raise status_error(f"{wrapper.load_to_device} on device {device}", status[0])
        if not loaded:
            raise ModuleError(f"{module.so} holds no code for a device of this machine")
    except (DriverError, ModuleError) as error:
        if handle[0] != ffi.NULL:
            try:
                driver.library_unload(int(ffi.cast("uintptr_t", handle[0])))
            except DriverError as unload_error:
                _poisoned[key] = f"{error}; {unload_error}"
        raise
    address = int(ffi.cast("uintptr_t", entry))
    return Library(ffi, call, address, frozenset(loaded), (library, handle))


def _candidates(module: Module) -> list[int]:
    """Return the devices to load on: those the manifest fits, or all for a stranger's kernel."""
    devices = list(range(driver.device_count()))
    if module.manifest is None:
        return devices
    capabilities = {device: driver.compute_capability(device) for device in devices}
    arch = module.manifest.gpu_arch
    able = [device for device in devices if arch in runnable_archs(capabilities[device])]
    if not able:
        here = sorted({native_arch(capability) for capability in capabilities.values()})
        wanted = module.so.parents[2] / here[0] / module.so.parent.name / module.so.name
        raise ModuleError(
            f"{module.so} is for {arch}, the devices here are {', '.join(here)}; {repair(wanted)}"
        )
    return able


def _open(module: Module, ffi: FFI) -> Any:
    try:
        return ffi.dlopen(str(module.so))
    except OSError as error:
        raise ModuleError(f"{module.so} cannot be opened: {error}") from error


def _symbol(module: Module, library: Any, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise ModuleError(
            f"{module.so} has no {name}: it is not the library of {module.header.name}, "
            "or was not linked by this version of ctm_rt.modules.link"
        ) from error
