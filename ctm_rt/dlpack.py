"""DLPack as it lies in memory: reading a capsule, and making one for device memory."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY_OR_COPY = 3  # flags: what a kernel writes into a copy would be lost as well

_DL_TENSOR: list[tuple[str, Any]] = [
    ("data", ctypes.c_size_t),
    ("device_type", ctypes.c_int32),
    ("device_id", ctypes.c_int32),
    ("ndim", ctypes.c_int32),
    ("dtype", ctypes.c_uint32),  # a DLDataType; see dtype_word
    ("shape", ctypes.POINTER(ctypes.c_int64)),
    ("strides", ctypes.POINTER(ctypes.c_int64)),
    ("byte_offset", ctypes.c_uint64),
]


class DLManagedTensor(ctypes.Structure):
    """What a capsule named ``dltensor`` points at."""

    _fields_ = [*_DL_TENSOR, ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """What a capsule named ``dltensor_versioned`` points at."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        *_DL_TENSOR,
    ]


def dtype_word(code: int, bits: int, lanes: int = 1) -> int:
    """Return a DLDataType (u8 code, u8 bits, u16 lanes) as one little-endian word."""
    return code | bits << 8 | lanes << 16


# ctypes, not cffi: this call needs the interpreter lock, which cffi gives up (0.24 us; cffi 0.28).
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def managed_tensor(capsule: object) -> DLManagedTensor | DLManagedTensorVersioned:
    """Return the structure in a fresh capsule, in place; it lives as long as the capsule.

    The capsule is not renamed: its own destructor then ends the loan, once, when it goes.
    """
    try:
        return DLManagedTensorVersioned.from_address(_pointer(capsule, b"dltensor_versioned"))
    except ValueError:
        return DLManagedTensor.from_address(_pointer(capsule, b"dltensor"))


class _Memory:
    """Memory that NumPy may describe, and keeps the owner of."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def numpy_over(
    ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], typestr: str, owner: object
) -> np.ndarray[Any, Any]:
    """Return a NumPy array over any memory, also a device's, as long as nobody looks into it.

    ``strides`` are in elements.
    """
    itemsize = np.dtype(typestr).itemsize
    return np.asarray(
        _Memory(
            {
                "version": 3,
                "shape": shape,
                "typestr": typestr,
                "data": (ptr, False),
                "strides": tuple([stride * itemsize for stride in strides]),
            },
            owner,
        )
    )


def lend(ptr: int, array: np.ndarray[Any, Any], word: int, device: int, versioned: bool) -> object:
    """Return a capsule for ``array``, ``numpy_over`` device memory, of element type ``word``.

    NumPy makes it, versioned where both sides know that, with a deleter and a destructor in C that
    are safe in any thread, under any exception and after the interpreter's end, which none written
    in Python would be. What it says of the place and the element type is then replaced.
    """
    try:
        capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    except TypeError:  # NumPy before 2.1; an older version than asked for may be given
        capsule = array.__dlpack__()
    tensor = managed_tensor(capsule)
    tensor.data, tensor.dtype = ptr, word  # NumPy moves what is empty
    tensor.device_type, tensor.device_id = CUDA, device
    return capsule
