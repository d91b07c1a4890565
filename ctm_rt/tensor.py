"""One record for every buffer, whatever library made it; the only file that knows those libraries.

NumPy, DLPack and the CUDA array interface come in; a ``TensorView`` comes out. No library is
imported for it: objects are asked, never recognised. Nothing is synchronised either: work that
fills a buffer on another stream is for the caller to order.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import numpy as np

from ctm_rt import dlpack, driver
from ctm_rt.errors import ArgumentError

HOST = -1


class DType(enum.Enum):
    """An element type; ``DType("f16")`` finds it by its name."""

    BOOL = "bool"
    I8 = "i8"
    U8 = "u8"
    I16 = "i16"
    U16 = "u16"
    I32 = "i32"
    U32 = "u32"
    I64 = "i64"
    U64 = "u64"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    C64 = "c64"
    C128 = "c128"

    def __init__(self, name: str) -> None:
        one_byte = name in ("bool", "e4m3", "e5m2")
        self.itemsize = 1 if one_byte else int(name.lstrip("bfiuc")) // 8

    def __str__(self) -> str:
        return self.value

    __hash__ = object.__hash__  # Enum's own is Python code


def as_dtype(dtype: DType | str) -> DType:
    """Return the element type that ``dtype`` names."""
    try:
        return DType(dtype)  # type: ignore[arg-type]  # a member stands for itself
    except ValueError:
        raise ArgumentError("dtype", f"one of {_names()}", repr(dtype)) from None


class TensorView(NamedTuple):
    """Where a tensor is and how it is laid out; keeps its exporter alive."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements, not bytes; of an axis of extent 1: the packed value
    dtype: DType
    device: int  # CUDA ordinal or HOST
    readonly: bool
    owner: object  # keeps the memory alive; never touched; [:-1] says all without keeping it


def view(array: object, name: str = "array", *, dtype: DType | str | None = None) -> TensorView:
    """Borrow ``array`` and say where it is.

    Parameters
    ----------
    array : TensorView, DeviceArray, NumPy array, or object with DLPack or CUDA array interface
        DLPack is asked first, without synchronisation (stream -1 for device memory).
    name : str
        How errors call it.
    dtype : DType or str, optional
        What the bytes are, where the library has no word for it: an e4m3, e5m2 or bf16 tensor in
        an integer (or void) array of the same item size. With a type that the array has already,
        nothing happens.

    Raises
    ------
    ArgumentError
        Not an array, of an element type outside DType (sub-byte and vector types are), with
        strides that are no multiple of the item size, misaligned, or not exported by its library.
    """
    said = None if dtype is None else as_dtype(dtype)
    found = getattr(array, "tensor_view", array)
    if not isinstance(found, TensorView):
        found = _from_library(array, name, said)
    if said is not None and found.dtype is not said:
        found = found._replace(dtype=_accept(found.dtype, said, name))
    if found.ptr % found.dtype.itemsize:
        raise ArgumentError(
            name, f"an address aligned to {found.dtype.itemsize} bytes", hex(found.ptr)
        )
    return found


def packed_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides in elements; an extent of 0 counts as 1."""
    strides, run = [1] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = run
        run *= shape[axis] or 1
    return tuple(strides)


def is_packed(tensor: TensorView) -> bool:
    """Say whether the elements lie row-major without gaps."""
    return tensor.strides == packed_strides(tensor.shape) or 0 in tensor.shape


def with_axis(tensor: TensorView, axis: int) -> TensorView:
    """Insert an axis of extent 1 behind another; ``axis`` is at least 1."""
    shape, strides = tensor.shape, tensor.strides
    return tensor._replace(
        shape=(*shape[:axis], 1, *shape[axis:]),
        strides=(*strides[:axis], strides[axis - 1], *strides[axis:]),
    )


def without_axis(tensor: TensorView, axis: int) -> TensorView:
    """Take what comes first along an axis, which is gone then."""
    shape, strides = tensor.shape, tensor.strides
    return tensor._replace(
        shape=shape[:axis] + shape[axis + 1 :], strides=strides[:axis] + strides[axis + 1 :]
    )


def nbytes(tensor: TensorView) -> int:
    """Return the bytes of all elements, gaps not counted."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _from_library(array: Any, name: str, said: DType | None) -> TensorView:
    if isinstance(array, np.ndarray):
        return _from_numpy(array, name, said)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, name)
    if (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        return _from_interface(array, interface, name, said)
    wanted = "an array (NumPy, DLPack or CUDA array interface)"
    raise ArgumentError(name, wanted, type(array).__name__)


def _settle(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Give axes of extent 1 the packed stride: libraries leave anything there."""
    if 1 not in shape:
        return strides
    settled, run = list(strides), 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            settled[axis] = run
        run *= shape[axis] or 1
    return tuple(settled)


# ---- DLPack ------------------------------------------------------------------------------------

_DLPACK_DTYPES = {
    dlpack.dtype_word(code, 8 * dtype.itemsize): dtype
    for code, dtypes in {
        0: (DType.I8, DType.I16, DType.I32, DType.I64),
        1: (DType.U8, DType.U16, DType.U32, DType.U64),
        2: (DType.F16, DType.F32, DType.F64),
        4: (DType.BF16,),
        5: (DType.C64, DType.C128),
        6: (DType.BOOL,),
        10: (DType.E4M3,),  # kDLFloat8_e4m3fn
        12: (DType.E5M2,),
    }.items()
    for dtype in dtypes
}
DLPACK_WORDS = {dtype: word for word, dtype in _DLPACK_DTYPES.items()}


def _capsule(array: Any, stream: int | None) -> Any:
    try:
        return array.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:  # older than versioned DLPack
        return array.__dlpack__(stream=stream)


def _from_dlpack(array: Any, name: str) -> TensorView:
    try:
        kind, ordinal = array.__dlpack_device__()
        if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            stream, device = -1, int(ordinal)
        elif kind in (dlpack.CPU, dlpack.CUDA_HOST):
            stream, device = None, HOST  # NumPy and others raise for any stream on the host
        else:
            raise ArgumentError(name, "CUDA or host memory", f"DLPack device type {int(kind)}")
        try:
            capsule = _capsule(array, stream)
        except RuntimeError:
            if stream is None:
                raise
            capsule = _capsule(array, None)  # JAX takes -1 for a handle, and CUDA refuses it
        tensor = dlpack.managed_tensor(capsule)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(name, "an array that its library exports", error) from error
    readonly = False
    if isinstance(tensor, dlpack.DLManagedTensorVersioned):
        if tensor.major != 1:
            raise ArgumentError(name, "DLPack 1", f"{tensor.major}.{tensor.minor}")
        readonly = bool(tensor.flags & dlpack.READ_ONLY_OR_COPY)
    word, ndim, data = tensor.dtype, tensor.ndim, tensor.data + tensor.byte_offset
    dtype = _DLPACK_DTYPES.get(word)
    if dtype is None:
        code, bits, lanes = word & 0xFF, word >> 8 & 0xFF, word >> 16
        got = f"DLPack type code {code}, {bits} bits, {lanes} lanes"
        raise ArgumentError(name, f"an element type of {_names()}", got)
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    strides = tensor.strides
    strides = _settle(shape, tuple(strides[:ndim])) if strides else packed_strides(shape)
    # The capsule is never renamed, so its own destructor ends the loan, once, when the view goes.
    return TensorView(data, shape, strides, dtype, device, readonly, capsule)


# ---- NumPy and the CUDA array interface --------------------------------------------------------

NUMPY_DTYPES = {
    dtype: np.dtype(name)
    for dtype, name in {
        DType.BOOL: "?",
        DType.I8: "i1",
        DType.U8: "u1",
        DType.I16: "i2",
        DType.U16: "u2",
        DType.I32: "i4",
        DType.U32: "u4",
        DType.I64: "i8",
        DType.U64: "u8",
        DType.F16: "f2",
        DType.F32: "f4",
        DType.F64: "f8",
        DType.C64: "c8",
        DType.C128: "c16",
    }.items()
}
_FROM_NUMPY = {numpy: dtype for dtype, numpy in NUMPY_DTYPES.items()}
_BY_CLASS = {"bfloat16": DType.BF16, "float8_e4m3fn": DType.E4M3, "float8_e5m2": DType.E5M2}
_NOT_IN_NUMPY = frozenset(_BY_CLASS.values())
_CARRIERS = frozenset({DType.I8, DType.U8, DType.I16, DType.U16})


def _from_numpy(array: np.ndarray[Any, Any], name: str, said: DType | None) -> TensorView:
    found = _element_type(array.dtype, name, said)
    ptr = array.__array_interface__["data"][0]
    strides = _element_strides(array.shape, array.strides, found, name)
    return TensorView(ptr, array.shape, strides, found, HOST, not array.flags.writeable, array)


def _from_interface(
    array: object, interface: dict[str, Any], name: str, said: DType | None
) -> TensorView:
    try:
        shape = tuple(map(int, interface["shape"]))
        numpy = np.dtype(interface["typestr"])
        ptr, readonly = interface["data"]
        strides, mask = interface.get("strides"), interface.get("mask")
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(name, "a CUDA array interface", f"{interface} ({error})") from error
    if mask is not None:
        raise ArgumentError(name, "an array without mask", "a masked array")
    found = _element_type(numpy, name, said)
    # An empty array may have no address that the driver could be asked about.
    device = driver.pointer_device(ptr) if ptr else 0
    if device is None:
        raise ArgumentError(name, "device memory", hex(ptr))
    elements = (
        packed_strides(shape) if strides is None else _element_strides(shape, strides, found, name)
    )
    return TensorView(ptr or 0, shape, elements, found, device, bool(readonly), array)


def _element_type(numpy: np.dtype[Any], name: str, said: DType | None) -> DType:
    found = _FROM_NUMPY.get(numpy) or _BY_CLASS.get(numpy.type.__name__)
    if found is not None:
        return found
    if said in _NOT_IN_NUMPY and numpy.kind == "V" and numpy.itemsize == said.itemsize:
        return said
    raise ArgumentError(name, f"an element type of {_names()}", numpy)


def _element_strides(
    shape: tuple[int, ...], in_bytes: tuple[int, ...], dtype: DType, name: str
) -> tuple[int, ...]:
    itemsize = dtype.itemsize
    odd = [stride % itemsize for stride in in_bytes]
    if any(odd) and any(rest for rest, extent in zip(odd, shape, strict=True) if extent > 1):
        raise ArgumentError(name, f"strides that are multiples of {itemsize} bytes", in_bytes)
    return _settle(shape, tuple([stride // itemsize for stride in in_bytes]))


def _accept(found: DType, wanted: DType, name: str) -> DType:
    """Return ``wanted`` where an array of ``found`` is a usual way to carry it."""
    carried = wanted in _NOT_IN_NUMPY and found in _CARRIERS and found.itemsize == wanted.itemsize
    if found is wanted or carried:
        return wanted
    raise ArgumentError(name, f"dtype {wanted}, or integers of its size that carry it", found)


def _names() -> str:
    return ", ".join(str(dtype) for dtype in DType)
