"""A kernel loaded from its module, and a launch of it with its arguments filled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ctm_rt import driver
from ctm_rt.descriptors.header import Wrapper, read_header
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import Workspace
from ctm_rt.modules.arguments import KnownArguments
from ctm_rt.modules.loader import Library, load_library, status_error
from ctm_rt.modules.manifest import Manifest
from ctm_rt.modules.store import Module, find, read_module, store_roots
from ctm_rt.modules.strangers import StrangerArguments

_SUFFIXES = (".json", ".so", ".h")
_kernels: dict[tuple[object, ...], "Kernel"] = {}


def load(
    name_or_path: str | Path,
    *,
    store: str | Path | None = None,
    device: int = 0,
    stream: object = None,
) -> "Kernel":
    """Return the kernel of a module; the first call loads it on every device that can run it.

    Parameters
    ----------
    name_or_path : str or Path
        A name, looked up in the store: the best module for ``device``. Or the path of a module's
        ``.json``, or of any exported kernel's ``.so`` or ``.h``, the other beside it.
    store : path, optional
        Root of the store; by default the packaged one, then the user's.
    device : int
    stream : int, object with ``__cuda_stream__`` or None
        Asked only whether it captures.

    Returns
    -------
    Kernel
        The same one for the same file, for the life of the process.

    Raises
    ------
    ModuleError
        No such module, or it is damaged, stale, or for another arch or host; or ``stream`` captures
        and the module is not loaded yet. Names the file and the remedy.
    DriverError
        The driver refused; the next call tries again.
    """
    named = isinstance(name_or_path, str) and not name_or_path.endswith(_SUFFIXES)
    # A name stands for one module for the life of the process; a path for the file that is there.
    key: tuple[object, ...] = (name_or_path, store, device)
    if not named:
        path = Path(name_or_path)
        key = (*key, _file_id(path.with_suffix(".so")))
    kernel = _kernels.get(key)
    if kernel is None:
        if not 0 <= device < driver.device_count():
            raise ArgumentError("device", f"0 to {driver.device_count() - 1}", device)
        if named:
            capability = driver.compute_capability(device)
            path = find(str(name_or_path), capability, store_roots(store))
        module = read_module(path)
        wrapper = read_header(module.header)
        handle = driver.stream_handle(stream)
        library = load_library(module, wrapper, device=device, stream=handle)
        kernel = _kernels.setdefault(key, Kernel(module, wrapper, library))
    return kernel


class Kernel:
    """An exported kernel in this process.

    Attributes
    ----------
    wrapper : Wrapper
        Its ordered parameters: name, kind, C type, shape and stride slots.
    manifest : Manifest or None
        What the parameters mean; None for a kernel that this project did not export.
    """

    def __init__(self, module: Module, wrapper: Wrapper, library: Library) -> None:
        self.wrapper: Wrapper = wrapper
        self.manifest: Manifest | None = module.manifest
        self._library = library
        self._takes_stream = any(p.kind == "stream" for p in wrapper.parameters)
        self._arguments = (
            StrangerArguments(library.ffi, wrapper)
            if module.manifest is None
            else KnownArguments(library.ffi, wrapper, module.manifest)
        )

    def __repr__(self) -> str:
        return f"<Kernel {self.wrapper.prefix}: {', '.join(self.wrapper.names)}>"

    def bind(self, /, *, workspace_owner: Workspace | None = None, **arguments: Any) -> "Launch":
        """Check and lay out every argument but the stream; the result launches again and again.

        Parameters
        ----------
        workspace_owner : Workspace, optional
            Lends the workspace arguments; asked before each launch, told of a failure.
        **arguments
            By the names of ``wrapper.parameters``: arrays for tensors, on one CUDA device, numbers
            for scalars, an address or an array for a pointer, integers for a tuple, arrays for a
            list. With a manifest all of dtype, axes, alignment and writability is checked, and an
            optional tensor may be left out. Without one, a tensor of which the kernel fixes some
            extents or strides is given as ``Slots``.

        Raises
        ------
        ArgumentError
            An argument is missing, unknown, or not what the kernel takes. Nothing was launched.
        """
        packed = self._arguments.pack(arguments)
        devices = self._library.devices
        device = min(devices) if packed.device is None else packed.device
        if device not in devices:
            able = ", ".join(map(str, sorted(devices)))
            raise ArgumentError("device", f"one that {self.wrapper.prefix} runs on: {able}", device)
        call = None
        if not packed.empty:
            call = partial(
                self._library.call,
                self._library.entry,
                packed.args,
                packed.num_args,
                packed.stream_cell,
                driver.primary_context(device),
            )
        return Launch(self.wrapper.name, call, packed.owners, workspace_owner, self._takes_stream)


class Launch:
    """One kernel with its arguments filled; call it with a stream.

    It keeps every array alive, and is to be kept until its last launch is done. What is *in* the
    arrays may change between launches. Threads may call it at once, as far as the kernel's own
    workspace allows.
    """

    __slots__ = ("_call", "_name", "_owners", "_takes_stream", "_workspace")

    def __init__(
        self,
        name: str,
        call: Callable[[int], int] | None,
        owners: tuple[object, ...],
        workspace: Workspace | None,
        takes_stream: bool = True,
    ) -> None:
        self._name, self._call = name, call
        self._owners, self._workspace = owners, workspace
        self._takes_stream = takes_stream

    def keeping(self, owners: tuple[object, ...], workspace: Workspace | None) -> "Launch":
        """Return the same launch, but it keeps ``owners`` alive too and claims ``workspace``."""
        kept = self._owners, owners
        return Launch(self._name, self._call, kept, workspace, self._takes_stream)

    def __call__(self, stream: object = None) -> None:
        """Queue the kernel on ``stream``; does nothing where an output has no element.

        Raises
        ------
        ArgumentError
            ``stream`` is none, or not the default one of a kernel that takes none, or the
            workspace is in use on another one.
        DriverError
            The driver refused; the workspace, if any, is marked dirty.
        """
        call = self._call
        if call is None:
            return
        handle = stream if type(stream) is int and stream > 0 else driver.stream_handle(stream)
        if handle > 1 and not self._takes_stream:  # 0 and 1 are the legacy default stream
            wanted = f"the default stream, as {self._name} takes none"
            raise ArgumentError("stream", wanted, hex(handle))
        if self._workspace is not None:
            self._workspace.claim(handle)
        status = call(handle)
        if status:
            if self._workspace is not None:
                self._workspace.mark_dirty()
            raise status_error(self._name, status)


def _file_id(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
