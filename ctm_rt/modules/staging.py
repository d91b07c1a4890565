"""Launch a kernel once, with host arrays where it wants device arrays."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ctm_rt import dlpack, driver
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import DeviceArray, hold_until_done, to_device, to_host
from ctm_rt.modules.kernel import Kernel, load
from ctm_rt.modules.strangers import Slots
from ctm_rt.tensor import HOST, TensorView, view

_ARRAY_KINDS = ("tensor", "tensor_list", "pointer")


def launch(
    name_or_path: str | Path,
    /,
    *,
    stream: object = None,
    outputs: Iterable[str] | None = None,
    store: str | Path | None = None,
    device: int = 0,
    **arguments: Any,
) -> None:
    """Load, bind and launch a kernel once; temporaries may be dropped at once.

    Parameters
    ----------
    name_or_path, store
        As in ``load``.
    stream : int, object with ``__cuda_stream__`` or None
        The call returns before the work on it is done, unless something is copied back.
    outputs : names, optional
        The arguments that the kernel writes; by default what its manifest says. To be given for a
        kernel without one that gets host arrays, even if empty. Host arrays among them are
        overwritten with the result.
    device : int
        Where host arrays go if all arrays are host arrays; else to the others.
    **arguments
        As in ``Kernel.bind``; arrays may be in host memory.

    Raises
    ------
    ArgumentError, ModuleError, DriverError
        As in ``load`` and ``Kernel.bind``.
    """
    handle = driver.stream_handle(stream)
    kernel = load(name_or_path, store=store, device=device, stream=handle)
    names = [p.name for p in kernel.wrapper.parameters if p.kind in _ARRAY_KINDS]
    written = _outputs(kernel, outputs, names)
    found: list[TensorView] = []
    back: list[tuple[TensorView, DeviceArray]] = []

    def borrow(name: str, array: Any) -> TensorView:
        found.append(view(array, name))
        return found[-1]

    def stage(name: str, tensor: TensorView) -> TensorView | DeviceArray:
        if tensor.device != HOST:
            return tensor
        if written is None:
            raise ArgumentError("outputs", "the names of the arrays to copy back", None)
        staged = to_device(tensor, device=device, stream=handle)
        if name.partition("[")[0] in written:
            if tensor.readonly:
                raise ArgumentError(name, "a writable array", "a read-only one")
            back.append((tensor, staged))
        return staged

    for each in (borrow, stage):
        for name in arguments.keys() & names:
            arguments[name] = _map(each, name, arguments[name])
        device = next((tensor.device for tensor in found if tensor.device != HOST), device)
    run = kernel.bind(**arguments)
    run(handle)
    hold_until_done((run,), device, handle)
    for host, staged in back:
        raw = f"|V{host.dtype.itemsize}"
        target = dlpack.numpy_over(host.ptr, host.shape, host.strides, raw, host.owner)
        target[...] = to_host(staged, handle).view(raw)


def _outputs(
    kernel: Kernel, outputs: Iterable[str] | None, names: list[str]
) -> frozenset[str] | None:
    """Return what the kernel writes; None where nobody says."""
    if outputs is None:
        if kernel.manifest is None:
            return None
        return frozenset(spec.name for spec in kernel.manifest.parameters if spec.role == "out")
    written = frozenset([outputs] if isinstance(outputs, str) else outputs)
    if unknown := sorted(written - set(names)):
        raise ArgumentError("outputs", f"names among {', '.join(names)}", ", ".join(unknown))
    return written


def _map(function: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    """Replace each array that an argument holds; an address or None holds none."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Slots):
        return value._replace(array=function(name, value.array))
    if isinstance(value, (list, tuple)) and not isinstance(value, TensorView):
        return [_map(function, f"{name}[{i}]", item) for i, item in enumerate(value)]
    return function(name, value)
