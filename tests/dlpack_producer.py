"""A DLPack producer that says whatever a test wants, and counts its deleter's calls."""

import ctypes
from collections.abc import Sequence

from ctm_rt.dlpack import CPU, DLManagedTensor, DLManagedTensorVersioned, dtype_word

_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)
_DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
NAMES = {DLManagedTensor: b"dltensor", DLManagedTensorVersioned: b"dltensor_versioned"}


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule: int) -> None:
    """Do what the standard asks: end the loan if no consumer has taken it over."""
    for kind, name in NAMES.items():
        if _valid(capsule, name):
            at = _get(capsule, name)
            _DELETER(kind.from_address(at).deleter)(at)


class Producer:
    """``legacy``: does not know ``max_version``. ``strides=None``: a NULL pointer.

    ``refuses``: streams for which it raises, as JAX does for -1.
    """

    def __init__(
        self,
        data: int,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        *,
        code: int = 2,
        bits: int = 16,
        lanes: int = 1,
        device: tuple[int, int] = (CPU, 0),
        byte_offset: int = 0,
        legacy: bool = False,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        refuses: Sequence[int | None] = (),
    ) -> None:
        self._device, self._refuses = device, refuses
        self.asked: list[dict[str, object]] = []
        self.deleted = 0
        tensor = DLManagedTensor() if legacy else DLManagedTensorVersioned()
        if isinstance(tensor, DLManagedTensorVersioned):
            (tensor.major, tensor.minor), tensor.flags = version, flags
        shape_array = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        tensor.data, tensor.ndim, tensor.byte_offset = data, len(shape), byte_offset
        tensor.device_type, tensor.device_id = device
        tensor.dtype = dtype_word(code, bits, lanes)
        tensor.shape = shape_array
        if strides is not None:
            tensor.strides = (ctypes.c_int64 * max(len(strides), 1))(*strides)

        def delete(_: int) -> None:
            self.deleted += 1

        self._deleter = _DELETER(delete)
        tensor.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        self._tensor = tensor
        if legacy:
            self.__dlpack__ = self._legacy
        else:
            self.__dlpack__ = self._versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def _legacy(self, stream: object = None) -> object:
        return self._capsule(stream=stream)

    def _versioned(self, *, stream: object = None, max_version: object = None) -> object:
        return self._capsule(stream=stream, max_version=max_version)

    def _capsule(self, **asked: object) -> object:
        self.asked.append(asked)
        if self._device[0] in (1, 3) and asked["stream"] is not None:
            raise BufferError("no stream on the host")
        if asked["stream"] in self._refuses:
            raise RuntimeError("invalid resource handle")
        name = NAMES[type(self._tensor)]
        destroy = ctypes.cast(_destroy, ctypes.c_void_p)
        return _new(ctypes.addressof(self._tensor), name, destroy)


def consume(capsule: object) -> DLManagedTensor | DLManagedTensorVersioned:
    """Take the tensor over, as a library does that keeps it beyond the capsule."""
    for kind, name in NAMES.items():
        if _valid(id(capsule), name):
            tensor = kind.from_address(_get(id(capsule), name))
            _set_name(
                capsule, {b"dltensor": b"used_dltensor"}.get(name, b"used_dltensor_versioned")
            )
            return tensor
    raise ValueError("consumed already")


def release(tensor: DLManagedTensor | DLManagedTensorVersioned) -> None:
    """Give back what ``consume`` took."""
    _DELETER(tensor.deleter)(ctypes.addressof(tensor))
