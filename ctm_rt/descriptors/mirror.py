"""``ctypes`` mirrors of a wrapper's descriptors, for hosts that fill them without cffi."""

import ctypes
from collections.abc import Iterator
from typing import Any, Final

from cffi import FFI

from ctm_rt.descriptors.header import Parameter, Wrapper, make_ffi
from ctm_rt.errors import HeaderError

_INTEGER: Final[dict[int, Any]] = {32: ctypes.c_int32, 64: ctypes.c_int64}


def ctypes_mirror(wrapper: Wrapper) -> dict[str, type[ctypes.Structure]]:
    """Return a ``ctypes.Structure`` for each tensor and each list of tensors, by parameter name.

    The fields are the header's: ``data``, then ``dynamic_shapes`` and ``dynamic_strides`` where
    there are slots; a list has ``elements`` and ``count``.

    Raises
    ------
    HeaderError
        A mirror differs from cffi's layout of the same type in size, offset or width.
    """
    ffi = make_ffi(wrapper)
    mirrors = {}
    for parameter in wrapper.parameters:
        if parameter.kind in ("tensor", "tensor_list"):
            mirrors[parameter.name] = mirror = _structure(parameter)
            check_mirror(ffi, parameter.base, mirror)
    return mirrors


def check_mirror(ffi: FFI, ctype: str, mirror: type[ctypes.Structure]) -> None:
    """Raise HeaderError unless every part of ``mirror`` lies where cffi lays it in ``ctype``."""
    theirs, ours = list(_cffi_parts(ffi, ffi.typeof(ctype))), list(_ctypes_parts(mirror))
    if theirs != ours:
        differing = sorted(set(theirs) ^ set(ours))
        raise HeaderError(f"{ctype}: mirror differs in (part, offset, size): {differing}")


def _structure(parameter: Parameter) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [("data", ctypes.c_void_p)]
    if parameter.shape_slots:
        fields.append(("dynamic_shapes", _INTEGER[parameter.shape_bits] * parameter.shape_slots))
    if parameter.stride_slots:
        fields.append(("dynamic_strides", _INTEGER[parameter.stride_bits] * parameter.stride_slots))
    if parameter.kind == "tensor":
        return type(parameter.base, (ctypes.Structure,), {"_fields_": fields})
    element: Any = type(f"{parameter.base}_element", (ctypes.Structure,), {"_fields_": fields})
    listed = [("elements", element * parameter.length), ("count", ctypes.c_int32)]
    return type(parameter.base, (ctypes.Structure,), {"_fields_": listed})


def _cffi_parts(
    ffi: FFI, ctype: Any, path: str = "", offset: int = 0
) -> Iterator[tuple[str, int, int]]:
    """Yield (path, offset, size) of a type and of everything in it, in order."""
    yield path, offset, ffi.sizeof(ctype)
    if ctype.kind == "struct":
        for name, field in ctype.fields:
            yield from _cffi_parts(ffi, field.type, f"{path}.{name}", offset + field.offset)
    elif ctype.kind == "array":
        for i in range(ctype.length):
            at = offset + i * ffi.sizeof(ctype.item)
            yield from _cffi_parts(ffi, ctype.item, f"{path}[{i}]", at)


def _ctypes_parts(ctype: Any, path: str = "", offset: int = 0) -> Iterator[tuple[str, int, int]]:
    yield path, offset, ctypes.sizeof(ctype)
    if issubclass(ctype, ctypes.Structure):
        for name, field in ctype._fields_:
            at = offset + getattr(ctype, name).offset
            yield from _ctypes_parts(field, f"{path}.{name}", at)
    elif issubclass(ctype, ctypes.Array):
        for i in range(ctype._length_):
            at = offset + i * ctypes.sizeof(ctype._type_)
            yield from _ctypes_parts(ctype._type_, f"{path}[{i}]", at)
