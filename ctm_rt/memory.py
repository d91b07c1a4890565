"""Device memory for hosts that have no array library of their own, and how long it lives."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ctm_rt import dlpack, driver
from ctm_rt.errors import ArgumentError, DriverError
from ctm_rt.tensor import (
    DLPACK_WORDS,
    HOST,
    NUMPY_DTYPES,
    DType,
    TensorView,
    as_dtype,
    is_packed,
    nbytes,
    packed_strides,
    view,
)


class _Allocation:
    """Device memory that goes with its last owner."""

    __slots__ = ("device", "ptr")

    def __init__(self, size_nbytes: int, device: int) -> None:
        self.ptr = 0  # in case that the next line raises
        self.ptr, self.device = driver.alloc(size_nbytes, device), device

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        # At the interpreter's end the process gives all back, and the driver may be gone before.
        if self.ptr and not _finalizing():
            with contextlib.suppress(DriverError):  # a dead context: told to whoever killed it
                driver.free(self.ptr, self.device)


class DeviceArray:
    """A packed array in device memory; freed with its last owner.

    Exports DLPack and the CUDA array interface, both without synchronisation: to use it on another
    stream than the one that fills it is for the caller to order.

    Attributes
    ----------
    tensor_view : TensorView
        All that ``view()`` would say, its owner included.
    """

    __slots__ = ("__weakref__", "tensor_view")

    def __init__(self, tensor_view: TensorView) -> None:
        self.tensor_view = tensor_view

    @classmethod
    def empty(cls, shape: Iterable[int], dtype: DType | str, device: int = 0) -> DeviceArray:
        """Allocate; the content is undefined."""
        extents = tuple(map(operator.index, shape))
        if any(extent < 0 for extent in extents):
            raise ArgumentError("shape", "extents of 0 or more", extents)
        kind = as_dtype(dtype)
        release_done()  # what waits to be freed may make room
        owner = _Allocation(math.prod(extents) * kind.itemsize, device)
        strides = packed_strides(extents)
        return cls(TensorView(owner.ptr, extents, strides, kind, device, False, owner))

    @property
    def ptr(self) -> int:
        """Device address; 0 if empty."""
        return self.tensor_view.ptr

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.tensor_view.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.tensor_view.dtype

    @property
    def device(self) -> int:
        """CUDA ordinal."""
        return self.tensor_view.device

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return nbytes(self.tensor_view)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, device={self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.device

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray is exported where it is, without a copy")
        ptr, shape, strides, dtype, device, _, owner = self.tensor_view
        array = dlpack.numpy_over(ptr, shape, strides, _carrier(dtype).str, owner)
        versioned = max_version is not None and max_version[0] >= 1
        return dlpack.lend(ptr, array, DLPACK_WORDS[dtype], device, versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Element types without a NumPy name travel as unsigned integers."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": _carrier(self.dtype).str,
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
        }


def to_device(
    array: object, *, dtype: DType | str | None = None, device: int = 0, stream: object = None
) -> DeviceArray:
    """Copy a host array to the device, packed; done, and ``array`` free again, on return.

    Parameters
    ----------
    array : NumPy array, or another host array with DLPack
    dtype : DType or str, optional
        What the bytes are, as for ``view``.
    stream : int, object with ``__cuda_stream__`` or None
        Where the copy is queued.
    """
    source = view(array, "array", dtype=dtype)
    if source.device != HOST:
        raise ArgumentError("array", "a host array", f"one on device {source.device}")
    packed = np.ascontiguousarray(_host_bytes(source, source.ptr, source.owner))
    result = DeviceArray.empty(source.shape, source.dtype, device)
    if result.ptr:
        handle = driver.stream_handle(stream)
        with driver.current(device):
            driver.copy_to_device(result.ptr, packed.ctypes.data, packed.nbytes, handle)
            driver.synchronize(handle, device)
    return result


def to_host(array: object, stream: object = None) -> np.ndarray[Any, Any]:
    """Copy an array to a new packed NumPy array, after the work queued on ``stream``.

    Parameters
    ----------
    array : anything that ``view`` takes
        Of a strided one all bytes from its first to its last element are copied on the way.
    stream : int, object with ``__cuda_stream__`` or None
        Where the copy is queued, and what is waited for.

    Returns
    -------
    numpy.ndarray
        Of e4m3, e5m2 and bf16: as ml_dtypes has them if the process has imported that, else as
        unsigned integers of the same size.
    """
    source = view(array, "array")
    dtype = NUMPY_DTYPES.get(source.dtype) or _from_ml_dtypes(source.dtype)
    if 0 in source.shape:
        return np.empty(source.shape, dtype)
    if source.device == HOST:
        packed = _host_bytes(source, source.ptr, source.owner).copy(order="C")
        return packed.view(dtype).reshape(source.shape)
    reaches = [(n - 1) * stride for n, stride in zip(source.shape, source.strides, strict=True)]
    before, after = -sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0)
    size, itemsize = before + after + 1, source.dtype.itemsize
    span = np.empty(size, f"V{itemsize}")
    handle = driver.stream_handle(stream)
    with driver.current(source.device):
        start = source.ptr - before * itemsize
        driver.copy_to_host(span.ctypes.data, start, span.nbytes, handle)
        driver.synchronize(handle, source.device)
    if not is_packed(source):
        span = _host_bytes(source, span.ctypes.data + before * itemsize, span).copy(order="C")
    return span.view(dtype).reshape(source.shape)


def _host_bytes(source: TensorView, ptr: int, owner: object) -> np.ndarray[Any, Any]:
    """Return an array of nameless elements, laid out at ``ptr`` as ``source`` is."""
    typestr = f"|V{source.dtype.itemsize}"
    return dlpack.numpy_over(ptr, source.shape, source.strides, typestr, owner)


def _carrier(dtype: DType) -> np.dtype[Any]:
    return NUMPY_DTYPES.get(dtype) or np.dtype(f"u{dtype.itemsize}")


def _from_ml_dtypes(dtype: DType) -> np.dtype[Any]:
    names = {DType.BF16: "bfloat16", DType.E4M3: "float8_e4m3fn", DType.E5M2: "float8_e5m2"}
    known = getattr(sys.modules.get("ml_dtypes"), names[dtype], None)
    return _carrier(dtype) if known is None else np.dtype(known)


# ---- until the work is done --------------------------------------------------------------------

# Asking the driver takes time, so only every so many calls do; what is held for less stays held.
_SWEEP_EVERY = 8
# An event, the owners that wait for it, and the workspace that they share, if any. A plain tuple:
# every unbound call takes it apart.
_Entry = tuple[int, list[object], "Workspace | None"]
# No lock: threads, and finalisers that come in anywhere, share these through operations that are
# atomic. An entry is either in its queue or in the hands of one of them, so its event is too.
_held: dict[tuple[int, int], deque[_Entry]] = {}  # by device and stream
_idle_events: dict[int, deque[int]] = defaultdict(deque)


def hold_until_done(
    owners: object,
    device: int,
    stream: int,
    *,
    may_capture: bool = True,
    workspace: Workspace | None = None,
) -> None:
    """Keep ``owners`` alive until the work queued on the stream so far is done.

    They go with a later call of this, of ``release_done`` or of ``DeviceArray.empty``. On a
    capturing stream nothing is held: whoever keeps the graph keeps what it uses. ``may_capture``
    is False where the caller has just asked. What uses one ``workspace`` is done in the order of
    the calls, so that one event, the last, will do for several of them.
    """
    if stream > 2:  # knows its context, so that the thread needs none
        _hold(owners, device, stream, may_capture, workspace)
    else:  # 2 is a stream of its own in each thread, so an event does for one call only
        with driver.current(device):
            _hold(owners, device, stream, may_capture, None)


def _hold(
    owners: object, device: int, stream: int, may_capture: bool, workspace: Workspace | None
) -> None:
    if may_capture and driver.is_capturing(stream):
        return
    queue = _held.get((device, stream))
    if queue is None:
        queue = _held.setdefault((device, stream), deque())
    entry = None if workspace is None else _last(queue, workspace)
    if entry is None:
        entry = _event(device), [], workspace
    event, kept, _ = entry
    try:
        driver.event_record(event, stream)
        kept.append(owners)
    finally:
        if kept:
            queue.append(entry)
        else:
            _idle_events[device].append(event)
    count = len(kept)
    if count == _SWEEP_EVERY or (count == 1 and len(queue) % _SWEEP_EVERY == 0):
        release_done()


def _last(queue: deque[_Entry], workspace: Workspace) -> _Entry | None:
    """Take the last entry back, if what ``workspace`` is used for next may join it."""
    try:
        entry = queue.pop()
    except IndexError:
        return None
    if entry[2] is workspace and len(entry[1]) < _SWEEP_EVERY:
        return entry
    queue.append(entry)
    return None


def _event(device: int) -> int:
    """Return one that stands for nothing that is awaited."""
    try:
        return _idle_events[device].pop()
    except IndexError:
        with driver.current(device):
            return driver.event_create()


def release_done() -> None:
    """Let go of what ``hold_until_done`` held for work that is done by now."""
    queues = _held.copy()
    if not any(queues.values()):
        return
    done = []  # dropped at the very end: it may free memory, which waits for the device
    with driver.housekeeping():
        for (device, _), queue in queues.items():
            while queue:
                try:
                    entry = queue.popleft()
                except IndexError:  # another thread was faster
                    break
                is_done = False
                try:
                    is_done = driver.event_done(entry[0])
                finally:
                    if not is_done:
                        queue.appendleft(entry)
                if not is_done:
                    break
                done.append(entry)
                _idle_events[device].append(entry[0])


# ---- workspace ---------------------------------------------------------------------------------


class _Stream(NamedTuple):
    """Streams by id: the default ones have several handles, and one handle in several threads.

    While a stream captures its id is None: then the handle must do.
    """

    handle: int
    id: int | None

    def is_(self, other: _Stream) -> bool:
        if self.id is None or other.id is None:
            return self.handle == other.handle
        return self.id == other.id


class Workspace:
    """Scratch and counters for kernels that merge what their CTAs found; grows, never shrinks.

    One workspace serves one launch at a time, so one stream; a launch on a second stream is
    refused unless ``hand_over`` ordered the two. A replay of a captured graph uses it unseen.
    Wait for the stream's work before you destroy it: its handle may come again, for another.

    Parameters
    ----------
    device : int
        CUDA ordinal.
    """

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self._scratch = DeviceArray.empty((0,), DType.F32, device)
        # All of them: a launch that was bound before the growth still counts in an older one.
        self._semaphores = [DeviceArray.empty((0,), DType.I32, device)]
        self._stream: _Stream | None = None  # the last one
        # What was lent last: the next call mostly wants the same.
        self._lent_scratch = self._scratch.tensor_view
        self._lent_semaphores = self._semaphores[0].tensor_view
        self._dirty = False
        self._lock = threading.Lock()

    def scratch(self, elems: int, *, stream: object = None) -> TensorView:
        """Return (elems,) f32, undefined; valid as long as the view is held.

        Raises
        ------
        ArgumentError
            It would have to grow while ``stream`` captures.
        """
        lent = self._lent_scratch
        if lent.shape[0] != elems:
            with self._lock:
                self._scratch = self._grown(self._scratch, elems, driver.stream_handle(stream))
                lent = self._lent_scratch = _first(self._scratch, elems)
        return lent

    def semaphores(self, elems: int, *, stream: object = None) -> TensorView:
        """Return (elems,) i32; zero unless a launch is under way. Else like ``scratch``."""
        lent = self._lent_semaphores
        if lent.shape[0] != elems:
            with self._lock:
                handle, have = driver.stream_handle(stream), self._semaphores[-1]
                grown = self._grown(have, elems, handle)
                if grown is not have:
                    self._zero(grown, handle)
                    self._semaphores.append(grown)
                lent = self._lent_semaphores = _first(grown, elems)
        return lent

    def claim(self, stream: int) -> None:
        """Take it for a launch on the stream.

        Raises
        ------
        ArgumentError
            It was last used on another stream, or a launch with it failed.
        """
        last = self._stream
        if last is not None and stream == last.handle > 2 and not self._dirty:
            return  # the id would cost two driver calls a launch
        claimed = _Stream(stream, driver.stream_id(stream, self.device))
        with self._lock:
            if self._dirty:
                wanted = "one whose last launch succeeded (reset() cleans it)"
                raise ArgumentError("workspace", wanted, "a dirty one")
            if self._stream is None:
                self._stream = claimed
            self._require_last(claimed, "workspace")

    def hand_over(self, stream: object, event: object = None) -> None:
        """Let it be used on ``stream`` from now on.

        Parameters
        ----------
        stream : int, object with ``__cuda_stream__`` or None
        event : int or object with ``__int__``, optional
            A CUevent recorded on the old stream after its last launch; ``stream`` waits for it.
            Without one, the caller has ordered the two in another way.
        """
        handle = driver.stream_handle(stream)
        with self._lock, driver.current(self.device):
            if event is not None:
                driver.stream_wait_event(handle, int(event))  # type: ignore[call-overload]
            self._stream = _Stream(handle, driver.stream_id(handle, self.device))

    def mark_dirty(self) -> None:
        """Refuse launches until ``reset``: one failed, and may have left counters behind."""
        self._dirty = True

    def reset(self, stream: object = None) -> None:
        """Zero the counters after the work of the last stream; any stream may use it next.

        Parameters
        ----------
        stream : int, object with ``__cuda_stream__`` or None
            The one that it was last used on; None is just that one.
        """
        with self._lock:
            last = self._stream or _Stream(0, None)
            if stream is not None:
                handle = driver.stream_handle(stream)
                used = _Stream(handle, driver.stream_id(handle, self.device))
                self._require_last(used, "stream")
            if driver.is_capturing(last.handle, self.device):
                raise ArgumentError("stream", "one that does not capture", "a capturing stream")
            for semaphores in self._semaphores:
                self._zero(semaphores, last.handle)
            self._stream, self._dirty = None, False

    def _require_last(self, used: _Stream, name: str) -> None:
        if self._stream is not None and not self._stream.is_(used):
            expected = f"the stream of its last launch, {self._stream.handle:#x} (see hand_over)"
            raise ArgumentError(name, expected, f"{used.handle:#x}")

    def _grown(self, have: DeviceArray, elems: int, stream: int) -> DeviceArray:
        """Return ``have`` if it is large enough, else one that is, and twice as large."""
        if elems <= have.shape[0]:
            return have
        if driver.is_capturing(stream, self.device):
            wanted = f"{elems} elements of {have.dtype} before the capture begins"
            raise ArgumentError("workspace", wanted, have.shape[0])
        return DeviceArray.empty((max(elems, 2 * have.shape[0]),), have.dtype, self.device)

    def _zero(self, array: DeviceArray, stream: int) -> None:
        if array.ptr:
            with driver.current(self.device):
                driver.fill_zero(array.ptr, array.nbytes, stream)
                driver.synchronize(stream, self.device)


def _first(array: DeviceArray, elems: int) -> TensorView:
    return array.tensor_view._replace(shape=(elems,))
