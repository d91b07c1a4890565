"""Fill the parameters of a wrapper and pack them for the C entry.

Every builder takes the wrapper's cffi instance (:func:`ctm_rt.descriptors.make_ffi`) and one of its
parameters. What has not the header's form (kind, number of slots) is a HeaderError; a value that
its slot cannot hold is an ArgumentError with the parameter's name. cffi alone would fill missing
slots with zeros, take None for 0 and truncate an extent of type ``numpy.float32``.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from operator import index, mul
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from cffi import FFI

from ctm_rt.descriptors.header import INTEGERS, Parameter, Wrapper
from ctm_rt.errors import ArgumentError, HeaderError

CData: TypeAlias = Any  # what cffi returns; its own annotations say less


class Packed(NamedTuple):
    """The arguments of one C entry, laid out once; a launch writes ``stream`` and reads ``status``.

    Attributes
    ----------
    args, num_args
        The two arguments of the C entry.
    stream : ``uintptr_t *``
        ``stream[0] = handle`` sets every stream parameter of the wrapper (a launch has one stream).
        Without a stream parameter nothing reads it.
    status : ``int32_t *``
        ``status[0]`` is the entry's result after a call; 0 is success.
    owners
        What ``args`` points to. Device memory is not among them.
    """

    args: CData
    num_args: int
    stream: CData
    status: CData
    owners: tuple[CData, ...]


def strided(
    ffi: FFI, parameter: Parameter, ptr: int, shape: Sequence[int], strides: Sequence[int]
) -> CData:
    """Return a tensor descriptor with every slot given.

    Parameters
    ----------
    ptr : int
        Address of the first element; 0 for an absent tensor.
    shape : one extent for each shape slot
    strides : in elements, one for each stride slot
        A row-major tensor of rank r with nothing static but the innermost stride has r and r - 1.
    """
    _require(parameter, "tensor")
    return _new(ffi, parameter, _fields(ffi, parameter, ptr, shape, strides), (shape, strides))


def packed(ffi: FFI, parameter: Parameter, ptr: int, shape: Sequence[int]) -> CData:
    """Return the descriptor of a packed row-major tensor; only its last stride has no slot."""
    return strided(ffi, parameter, ptr, shape, [*accumulate(shape[:0:-1], mul)][::-1])


def cu_seqlen(ffi: FFI, parameter: Parameter, ptr: int, length: int) -> CData:
    """Return the descriptor of a vector of ``length`` elements, such as cumulative lengths."""
    if (parameter.shape_slots, parameter.stride_slots) != (1, 0):
        raise HeaderError(f"{parameter.name}: not a vector: {_slots_of(parameter)}")
    return strided(ffi, parameter, ptr, (length,), ())


def tensor_list(
    ffi: FFI, parameter: Parameter, tensors: Sequence[tuple[int, Sequence[int], Sequence[int]]]
) -> CData:
    """Return the descriptor of a list of tensors, each given as (ptr, shape, strides)."""
    _require(parameter, "tensor_list", len(tensors))
    elements = [_fields(ffi, parameter, *tensor) for tensor in tensors]
    return _new(ffi, parameter, [elements, len(elements)], tensors)


def scalar(ffi: FFI, parameter: Parameter, value: Any) -> CData:
    """Return a cell with ``value`` in the parameter's type.

    Integers must fit and are never made from a float; a Boolean parameter is a ``uint8_t``. Floats
    are rounded to nearest even; one that is finite and would become infinite is refused.
    """
    _require(parameter, "scalar")
    return _new(ffi, parameter, _encode(parameter, value), value)


def pointer(ffi: FFI, parameter: Parameter, ptr: int) -> CData:
    """Return a cell with an address."""
    _require(parameter, "pointer")
    return ffi.new(parameter.cell, _address(ffi, parameter, ptr))


def int_tuple(ffi: FFI, parameter: Parameter, values: Iterable[int]) -> CData:
    """Return the dynamic integers of a tuple, in order; the static ones are in the kernel."""
    values = tuple(values)
    _require(parameter, "int_tuple", len(values))
    encoded = [_encode(parameter, value) for value in values]
    return _new(ffi, parameter, encoded, values)


def pack(ffi: FFI, wrapper: Wrapper, values: Mapping[str, CData]) -> Packed:
    """Lay out the array that the C entry takes.

    Parameters
    ----------
    values : mapping from parameter name to what a builder returned for it
        All parameters but the streams. They are referred to, not copied.

    Raises
    ------
    HeaderError
        A parameter is missing, a name is unknown, or a value is not of the parameter's own type
        (it was built for another parameter or another wrapper).
    """
    stream, status = ffi.new("uintptr_t *"), ffi.new("int32_t *")
    args: list[CData] = []
    num_values = 0
    for parameter in wrapper.parameters:
        if parameter.kind == "stream":
            args.append(stream)
            continue
        value = values.get(parameter.name)
        if value is None:
            if parameter.length == 0:
                continue
            raise HeaderError(f"{wrapper.name}: no value for '{parameter.name}'")
        num_values += 1
        if ffi.typeof(value) is not ffi.typeof(parameter.cell):
            raise HeaderError(
                f"{wrapper.name}: '{parameter.name}' takes '{parameter.cell}', "
                f"got '{ffi.typeof(value).cname}'"
            )
        if parameter.length == 1:  # a list of one lies where its element does
            args.append(value)
        else:
            first = value.elements if parameter.kind == "tensor_list" else value
            args += [first + i for i in range(parameter.length)]
    if num_values != len(values):
        takes = {parameter.name for parameter in wrapper.parameters if parameter.kind != "stream"}
        unknown = ", ".join(sorted(values.keys() - takes))
        raise HeaderError(f"{wrapper.name}: takes no value for '{unknown}'")
    args.append(status)
    owners = (*values.values(), stream, status)
    return Packed(ffi.new("void *[]", args), len(args), stream, status, owners)


def _require(parameter: Parameter, kind: str, length: int = 1) -> None:
    if parameter.kind != kind:
        raise HeaderError(f"{parameter.name}: header has a {parameter.kind}, not a {kind}")
    if parameter.length != length:
        raise HeaderError(f"{parameter.name}: header has {parameter.length} of them, got {length}")


def _slots_of(parameter: Parameter) -> str:
    return f"header has {parameter.shape_slots} shape and {parameter.stride_slots} stride slots"


def _fields(
    ffi: FFI, parameter: Parameter, ptr: int, shape: Sequence[int], strides: Sequence[int]
) -> list[Any]:
    """Return the initializer of one tensor struct: the arrays without slots are not in it."""
    if len(shape) != parameter.shape_slots or len(strides) != parameter.stride_slots:
        raise HeaderError(
            f"{parameter.name}: {_slots_of(parameter)}, got {len(shape)} and {len(strides)}"
        )
    fields = [_address(ffi, parameter, ptr)]
    try:
        if parameter.shape_slots:
            fields.append([*map(index, shape)])
        if parameter.stride_slots:
            fields.append([*map(index, strides)])
    except TypeError as error:
        raise _unfit(parameter, (shape, strides)) from error
    if parameter.shape_slots and min(shape) < 0:
        raise ArgumentError(parameter.name, "extents of at least 0", shape)
    return fields


def _address(ffi: FFI, parameter: Parameter, ptr: int) -> CData:
    try:
        if ptr >> 64 == 0:  # cffi takes any integer modulo 2**64
            return ffi.cast("void *", ptr)
    except TypeError:
        pass
    raise ArgumentError(parameter.name, "an address", ptr)


def _encode(parameter: Parameter, value: Any) -> int | float:
    try:
        return _ENCODERS[parameter.base](value)
    except (OverflowError, TypeError, struct.error) as error:
        raise _unfit(parameter, value) from error


def _new(ffi: FFI, parameter: Parameter, initializer: Any, got: object) -> CData:
    try:
        return ffi.new(parameter.cell, initializer)
    except OverflowError as error:
        raise _unfit(parameter, got) from error


def _unfit(parameter: Parameter, got: object) -> ArgumentError:
    return ArgumentError(parameter.name, f"a value that fits {parameter.base}", repr(got))


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, np.bool_) else index(value)


def _float64(value: Any) -> float:
    struct.pack("=d", value)  # takes what converts to a float, but no string and no None
    return float(value)


def _float32(value: Any) -> float:
    struct.pack("=f", value)  # also refuses a finite value that would become infinite
    return float(value)


def _float16(value: Any) -> int:
    (bits,) = struct.unpack("=H", struct.pack("=e", value))
    return int(bits)


def _bfloat16(value: Any) -> int:
    (bits,) = struct.unpack("=I", struct.pack("=f", value))
    if value != value:
        return 0x7FC0  # rounding could carry a NaN's payload into its sign
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if rounded & 0x7FFF == 0x7F80 and bits & 0x7FFFFFFF != 0x7F800000:
        raise OverflowError("float too large for bfloat16")
    return int(rounded)


_ENCODERS: Final[dict[str, Callable[[Any], int | float]]] = {
    **dict.fromkeys(INTEGERS, _integer),
    "float": _float32,
    "double": _float64,
    "__half_raw": _float16,
    "__nv_bfloat16": _bfloat16,
}
