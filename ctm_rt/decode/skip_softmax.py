"""The table of skip-softmax and the counter of what it dropped: checked, and on the device."""

import math
from itertools import pairwise
from typing import Any

import numpy as np

from ctm_rt import driver
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import to_device, to_host
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.tensor import HOST, DType, TensorView, is_packed, view

I32 = DType("i32")

_PAIRS = "pairs (length bin, S), as (n, 2) or one after the other"
_MAX_TABLES = 256
# Tables that came from the host, by device and entries. They stay: a captured graph may read one
# long after its call. What comes after so many is uploaded for its call alone.
_uploaded: dict[tuple[int, tuple[int, ...]], TensorView] = {}
# (device, address, entries) of the callers' tables whose values were looked at.
_read: set[tuple[int, int, int]] = set()


def table_on_device(
    table: Any, device: int, stream: int, *, name: str = "skip_softmax", entries: int | None = None
) -> TensorView | None:
    """Return the table as the kernel takes it; None where it is empty, so every page counts.

    Parameters
    ----------
    table : sequence or host array of pairs, or array on ``device``
        A host table is uploaded when it is first seen. A device table is read back when its
        address is: later calls trust what is there, and the kernel is safe with any values.
    name : str
        How errors call it.
    entries : int, optional
        Integers to take, two to a pair; by default all.

    Raises
    ------
    ArgumentError
        It is no such table, or would have to be uploaded or read back while ``stream`` captures.
    """
    if isinstance(table, (list, tuple)) and not isinstance(table, TensorView):
        found = _as_array(table, name)
    else:
        array = view(table, name)
        if array.dtype is not I32:
            raise ArgumentError(name, "dtype i32", array.dtype)
        if array.device != HOST:
            return _on_device(array, device, stream, name, entries)
        found = to_host(array)
    if _num_entries(found.shape, name, entries) == 0:
        return None
    values = tuple(found.reshape(-1)[:entries].tolist())
    known = _uploaded.get((device, values))
    if known is None:
        _check_values(values, name)
        _refuse_capture(stream, device, name)
        known = view(to_device(np.array(values, np.int32), device=device, stream=stream))
        if len(_uploaded) < _MAX_TABLES:
            known = _uploaded.setdefault((device, values), known)
    return known


def counter_on_device(stats: TensorView, device: int) -> TensorView:
    """Return the counter as the kernel takes it: one i32 that the kernel may write."""
    if stats.dtype is not I32 or math.prod(stats.shape) != 1:
        raise ArgumentError("stats", "one i32 element", f"{stats.dtype} {stats.shape}")
    _require_device("stats", stats.device, device)
    if stats.readonly:
        raise ArgumentError("stats", "a writable array", "a read-only one")
    return stats._replace(shape=(1,), strides=(1,))


def _as_array(table: list[Any] | tuple[Any, ...], name: str) -> np.ndarray[Any, Any]:
    try:
        array = np.array(table) if len(table) else np.empty(0, np.int32)
    except ValueError as error:  # rows of several lengths
        raise ArgumentError(name, _PAIRS, error) from error
    if array.dtype.kind not in "iu":
        raise ArgumentError(name, f"integers in {_PAIRS}", array.dtype)
    return array


def _num_entries(shape: tuple[int, ...], name: str, entries: int | None) -> int:
    """Return how many integers of a table of ``shape`` to take."""
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 2 and 0 not in shape):
        raise ArgumentError(name, _PAIRS, shape)
    held = math.prod(shape)
    wanted = held if entries is None else entries
    if wanted % 2 or wanted < 0:
        raise ArgumentError(name, "an even number of entries, two to a pair", wanted)
    if wanted > held:
        raise ArgumentError(name, f"{wanted} entries", held)
    return wanted


def _on_device(
    array: TensorView, device: int, stream: int, name: str, entries: int | None
) -> TensorView | None:
    _require_device(name, array.device, device)
    if not is_packed(array):
        raise ArgumentError(name, "a packed array", f"strides {array.strides}")
    wanted = _num_entries(array.shape, name, entries)
    if wanted == 0:
        return None
    array = array._replace(shape=(wanted,), strides=(1,))
    place = device, array.ptr, wanted
    if place not in _read:
        _refuse_capture(stream, device, name)
        _check_values(tuple(to_host(array, stream).tolist()), name)
        if len(_read) >= _MAX_TABLES:
            _read.clear()
        _read.add(place)
    return array


def _check_values(values: tuple[int, ...], name: str) -> None:
    for value in values:
        if not 0 <= value <= INT32_MAX:
            raise ArgumentError(name, f"bins and S of 0 to {INT32_MAX}", value)
    bins = values[::2]
    if any(low >= high for low, high in pairwise(bins)):
        raise ArgumentError(name, "strictly ascending bins", bins)


def _require_device(name: str, on: int, device: int) -> None:
    if on != device:
        got = "host memory" if on == HOST else f"device {on}"
        raise ArgumentError(name, f"an array on CUDA device {device}, like q", got)


def _refuse_capture(stream: int, device: int, name: str) -> None:
    if driver.is_capturing(stream, device):
        wanted = "a table that an earlier call took: bind, or call once, before the capture begins"
        raise ArgumentError(name, wanted, "a new one")
