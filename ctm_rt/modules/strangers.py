"""From what the caller passes to packed arguments where only the header is known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cffi import FFI

from ctm_rt.descriptors import fill
from ctm_rt.descriptors.header import Parameter, Wrapper
from ctm_rt.errors import ArgumentError
from ctm_rt.modules.arguments import Packed, check_device, unknown
from ctm_rt.tensor import TensorView, is_packed, view


class Slots(NamedTuple):
    """A tensor for a kernel that fixes some of its extents or strides, and the axes it reads.

    Only the kernel's author knows which those are: the header has their number alone.
    """

    array: Any
    shape: tuple[int, ...]  # axes that fill the shape slots, in order
    strides: tuple[int, ...]  # axes that fill the stride slots, in order


class StrangerArguments:
    """The arguments of a kernel of which only the header is known."""

    def __init__(self, ffi: FFI, wrapper: Wrapper) -> None:
        self._ffi, self._wrapper = ffi, wrapper

    def pack(self, arguments: dict[str, Any]) -> Packed:
        """Check ``arguments``, which is emptied, and lay them out."""
        tensors: dict[str, TensorView] = {}
        values = {}
        for parameter in self._wrapper.parameters:
            if parameter.kind == "stream":
                continue
            name = parameter.name
            if name not in arguments:
                if parameter.kind == "int_tuple" and parameter.length == 0:
                    continue  # all in the kernel
                raise ArgumentError(name, f"a {parameter.kind} ({parameter.ctype})", "nothing")
            values[name] = self._value(parameter, arguments.pop(name), tensors)
        if arguments:
            names = [p.name for p in self._wrapper.parameters if p.kind != "stream"]
            raise unknown(arguments, names)
        device, first = None, ""
        for name, tensor in tensors.items():
            if tensor.device != device:
                check_device(name, tensor.device, device, first)
                device, first = tensor.device, name
        packed = fill.pack(self._ffi, self._wrapper, values)
        args, cell = (int(self._ffi.cast("uintptr_t", p)) for p in (packed.args, packed.stream))
        return Packed(args, packed.num_args, cell, device, (packed, *tensors.values()))

    def _value(self, parameter: Parameter, given: Any, tensors: dict[str, TensorView]) -> Any:
        name = parameter.name
        match parameter.kind:
            case "tensor":
                return fill.strided(self._ffi, parameter, *_slots(parameter, name, given, tensors))
            case "tensor_list":
                items = _items(parameter, given, "arrays")
                slots = [
                    _slots(parameter, f"{name}[{i}]", item, tensors) for i, item in enumerate(items)
                ]
                return fill.tensor_list(self._ffi, parameter, slots)
            case "int_tuple":
                return fill.int_tuple(self._ffi, parameter, _items(parameter, given, "integers"))
            case "pointer":
                if isinstance(given, bool) or not isinstance(given, int):
                    given = tensors.setdefault(name, view(given, name)).ptr
                return fill.pointer(self._ffi, parameter, given)
            case _:
                return fill.scalar(self._ffi, parameter, given)


def _slots(
    parameter: Parameter, name: str, given: Any, tensors: dict[str, TensorView]
) -> tuple[int, list[int], list[int]]:
    """Return address, extents and strides for the slots of one tensor of a stranger's kernel."""
    explicit = isinstance(given, Slots)
    tensor = tensors[name] = view(given.array if explicit else given, name)
    wanted = parameter.shape_slots, parameter.stride_slots
    shape_axes, stride_axes = given[1:] if explicit else _usual_axes(tensor, *wanted)
    rank = len(tensor.shape)
    if (len(shape_axes), len(stride_axes)) != wanted or not all(
        0 <= axis < rank for axis in (*shape_axes, *stride_axes)
    ):
        raise ArgumentError(
            name,
            f"{wanted[0]} shape and {wanted[1]} stride slots filled from {rank} axes, "
            "by ctm_rt.Slots(array, shape=axes, strides=axes)",
            (*shape_axes, *stride_axes) if explicit else f"strides {tensor.strides}, no Slots",
        )
    return (
        tensor.ptr,
        [tensor.shape[axis] for axis in shape_axes],
        [tensor.strides[axis] for axis in stride_axes],
    )


def _items(parameter: Parameter, given: Any, what: str) -> tuple[Any, ...]:
    """Return the items of a list or tuple, as many as the header has."""
    wanted = f"a sequence of {parameter.length} {what}"
    try:
        items = tuple(given)
    except TypeError:
        raise ArgumentError(parameter.name, wanted, type(given).__name__) from None
    if len(items) != parameter.length:
        raise ArgumentError(parameter.name, wanted, f"{len(items)} of them")
    return items


def _usual_axes(
    tensor: TensorView, shape_slots: int, stride_slots: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the axes that fill the slots where all of them or none do; else too few."""
    axes = range(len(tensor.shape))
    unit = [axis for axis in axes if tensor.strides[axis] == 1]
    outer: Sequence[int] = ()
    if stride_slots == len(axes):
        outer = axes
    elif stride_slots:
        # The axis of stride 1 never has a slot: the last one where it could be several.
        inner = unit[-1] if unit and (len(unit) == 1 or unit[-1] == axes[-1]) else None
        outer = [axis for axis in axes if axis != inner]
    elif not is_packed(tensor):
        return (), axes  # static strides, and not these: the kernel's author must say
    return (axes if shape_slots == len(axes) else ()), outer
