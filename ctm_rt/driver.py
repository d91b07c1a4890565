"""The one door to the CUDA driver: plain integers in, plain integers out, one ``check``.

Functions that take ``device`` make its primary context current for themselves. The others work on
what is current: call them inside ``current(device)``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from ctm_rt.errors import ArgumentError, DriverError

_EVENT_FLAGS = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
_RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_NOT_CAPTURING = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
_Attribute = cu.CUdevice_attribute
_Result = cu.CUresult
_SUCCESS = _Result.CUDA_SUCCESS
_NOT_READY = _Result.CUDA_ERROR_NOT_READY
_init_lock = threading.Lock()


def check(call: str, result: tuple[Any, ...]) -> Any:
    """Return what the driver returned beside its status; raise DriverError if it refused."""
    if result[0] is not _SUCCESS:
        raise error(call, result[0])
    return result[1] if len(result) == 2 else result[1:] or None


def error(call: str, status: int) -> DriverError:
    """Return the error that says what ``status`` of ``call`` means, for calls made elsewhere."""
    try:
        known = _Result(status)
    except ValueError:
        return DriverError(call, str(status), "an error that this cuda-python does not know")
    _, text = cu.cuGetErrorString(known)
    return DriverError(call, known.name, text.decode() if text else "no text")


@functools.cache
def init() -> None:
    """Initialise the driver; a failure is not remembered.

    Raises
    ------
    DriverError
        There is no driver on this machine, it is too old, or it has no device.
    """
    with _init_lock:
        try:
            check("cuInit", cu.cuInit(0))
        except DriverError:
            raise
        except RuntimeError as missing:  # cuda-python's own errors for libcuda.so.1
            raise DriverError(
                "cuInit", "no usable libcuda.so.1", "install an NVIDIA driver of CUDA 12 or newer"
            ) from missing


def driver_version() -> int:
    """Return the newest CUDA that the driver serves, as it says it: 13000 is 13.0."""
    init()
    return int(check("cuDriverGetVersion", cu.cuDriverGetVersion()))


def device_count() -> int:
    """Return the number of visible devices."""
    init()
    return int(check("cuDeviceGetCount", cu.cuDeviceGetCount()))


def device_name(device: int) -> str:
    """Return the marketing name."""
    init()
    raw: bytes = check("cuDeviceGetName", cu.cuDeviceGetName(256, device))
    return raw.split(b"\0")[0].decode()


@functools.cache
def compute_capability(device: int) -> tuple[int, int]:
    """Return (major, minor)."""
    return (
        _attribute(_Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
        _attribute(_Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
    )


@functools.cache
def num_sms(device: int) -> int:
    """Return the number of streaming multiprocessors."""
    return _attribute(_Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)


def _attribute(attribute: Any, device: int) -> int:
    init()
    return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute, device)))


@functools.cache
def primary_context(device: int) -> int:
    """Return the handle of the primary context; retained once, for the life of the process."""
    init()
    return int(check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(device)))


class current:
    """Context manager: the device's primary context is current inside; then what was before.

    Costs one driver call where it is current already.
    """

    __slots__ = ("_context", "_pushed")

    def __init__(self, device: int) -> None:
        self._context = primary_context(device)

    def __enter__(self) -> None:
        self._pushed = int(check("cuCtxGetCurrent", cu.cuCtxGetCurrent())) != self._context
        if self._pushed:
            check("cuCtxPushCurrent", cu.cuCtxPushCurrent(self._context))

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            check("cuCtxPopCurrent", cu.cuCtxPopCurrent())


class housekeeping:
    """Context manager: allocating, freeing, asking and waiting inside spoil no capture elsewhere.

    While any stream of the process captures in the default (global) mode, the driver refuses such
    calls from every thread and invalidates the capture, unless the thread says that they are
    unrelated.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = _exchange(_RELAXED)

    def __exit__(self, *_: object) -> None:
        _exchange(self._mode)


def _exchange(mode: Any) -> Any:
    result = cu.cuThreadExchangeStreamCaptureMode(mode)
    return check("cuThreadExchangeStreamCaptureMode", result)


def stream_handle(stream: object) -> int:
    """Return the handle of a stream as callers say it.

    Parameters
    ----------
    stream : int, None or an object with ``__cuda_stream__``
        None is the legacy default stream.
    """
    if isinstance(stream, int) and type(stream) is not bool and stream >= 0:
        return stream
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise ArgumentError(
            "stream", "None, a handle, or an object with __cuda_stream__", repr(stream)
        )
    version, handle = protocol()
    if version != 0:
        raise ArgumentError("stream", "version 0 of __cuda_stream__", version)
    return int(handle)


def stream_id(stream: int, device: int) -> int | None:
    """Return a number that no other stream of the process has or will have.

    None while the stream captures: to ask then is forbidden, and spoils the capture.
    """
    if stream <= 1:
        return _legacy_stream_id(device)
    if stream > 2:  # knows its context
        return _stream_id(stream)
    with current(device):  # the calling thread's own
        return _stream_id(stream)


def _stream_id(stream: int) -> int | None:
    if is_capturing(stream):
        return None
    return int(check("cuStreamGetId", cu.cuStreamGetId(stream)))


@functools.cache
def _legacy_stream_id(device: int) -> int:
    with current(device):
        return int(check("cuStreamGetId", cu.cuStreamGetId(0)))


def is_capturing(stream: int, device: int | None = None) -> bool:
    """Say whether work queued on the stream would go into a graph, or spoil one.

    The latter is the legacy stream while a stream that synchronises with it captures. ``device``
    says whose legacy stream is meant; without it, the current context's.
    """
    if device is None:
        result = cu.cuStreamIsCapturing(stream)
    else:
        with current(device):
            result = cu.cuStreamIsCapturing(stream)
    if result[0] is _SUCCESS:
        return result[1] is not _NOT_CAPTURING
    if result[0] is _Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    raise error("cuStreamIsCapturing", result[0])


def synchronize(stream: int, device: int) -> None:
    """Wait for the work queued on the stream."""
    with current(device), housekeeping():
        check("cuStreamSynchronize", cu.cuStreamSynchronize(stream))


def alloc(nbytes: int, device: int) -> int:
    """Return the address of ``nbytes`` of device memory, aligned to 256; 0 for 0 bytes."""
    if nbytes == 0:
        return 0
    with current(device), housekeeping():
        return int(check("cuMemAlloc", cu.cuMemAlloc(nbytes)))


def free(ptr: int, device: int) -> None:
    """Give back what ``alloc`` returned; the driver waits for work that may use it."""
    if ptr:
        with current(device), housekeeping():
            check("cuMemFree", cu.cuMemFree(ptr))


def alloc_pinned(nbytes: int, device: int) -> int:
    """Return the address of ``nbytes`` (not 0) of host memory that the device copies from."""
    with current(device), housekeeping():
        return int(check("cuMemHostAlloc", cu.cuMemHostAlloc(nbytes, 0)))


def free_pinned(ptr: int, device: int) -> None:
    """Give back what ``alloc_pinned`` returned; no copy may be using it."""
    with current(device), housekeeping():
        check("cuMemFreeHost", cu.cuMemFreeHost(ptr))


def copy_to_device(dst: int, host_ptr: int, nbytes: int, stream: int) -> None:
    """Queue a copy; the host memory must live until the stream was synchronised with."""
    check("cuMemcpyHtoDAsync", cu.cuMemcpyHtoDAsync(dst, host_ptr, nbytes, stream))


def copy_to_host(host_ptr: int, src: int, nbytes: int, stream: int) -> None:
    """Queue a copy; the bytes are there once the stream was synchronised with."""
    check("cuMemcpyDtoHAsync", cu.cuMemcpyDtoHAsync(host_ptr, src, nbytes, stream))


def copy_on_device(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Queue a copy between places on one device."""
    check("cuMemcpyDtoDAsync", cu.cuMemcpyDtoDAsync(dst, src, nbytes, stream))


def fill_zero(ptr: int, nbytes: int, stream: int) -> None:
    """Queue zeroing."""
    check("cuMemsetD8Async", cu.cuMemsetD8Async(ptr, 0, nbytes, stream))


def pointer_device(ptr: int) -> int | None:
    """Return the device that owns the memory at ``ptr``; None where the driver knows none."""
    init()
    ordinal = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    result = cu.cuPointerGetAttribute(ordinal, ptr)
    if result[0] == _Result.CUDA_ERROR_INVALID_VALUE:
        return None
    return int(check("cuPointerGetAttribute", result))


def event_create(*, timing: bool = False) -> int:
    """Return an event of the current context."""
    return int(check("cuEventCreate", cu.cuEventCreate(0 if timing else _EVENT_FLAGS)))


def event_record(event: int, stream: int) -> None:
    """Let the event stand for what is queued on the stream now."""
    status = cu.cuEventRecord(event, stream)[0]
    if status is not _SUCCESS:
        raise error("cuEventRecord", status)


def event_done(event: int) -> bool:
    """Say whether the work that the event stands for is done."""
    status = cu.cuEventQuery(event)[0]
    if status is not _SUCCESS and status is not _NOT_READY:
        raise error("cuEventQuery", status)
    return status is _SUCCESS


def event_wait(event: int) -> None:
    """Wait for the work that the event stands for; none if it was never recorded."""
    with housekeeping():
        check("cuEventSynchronize", cu.cuEventSynchronize(event))


def event_elapsed_us(start: int, stop: int) -> float:
    """Return the time between two events with timing; waits for the later."""
    check("cuEventSynchronize", cu.cuEventSynchronize(stop))
    milliseconds: float = check("cuEventElapsedTime", cu.cuEventElapsedTime(start, stop))
    return 1e3 * milliseconds


def event_destroy(event: int) -> None:
    """Give the event back."""
    check("cuEventDestroy", cu.cuEventDestroy(event))


def stream_wait_event(stream: int, event: int) -> None:
    """Let work queued on the stream from now on wait for the event."""
    check("cuStreamWaitEvent", cu.cuStreamWaitEvent(stream, event, 0))


def library_unload(handle: int) -> None:
    """Unload a library; its kernels are gone."""
    check("cuLibraryUnload", cu.cuLibraryUnload(handle))


def stream_create() -> int:
    """Return a stream of the current context that does not wait for the legacy stream."""
    flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
    return int(check("cuStreamCreate", cu.cuStreamCreate(flags)))


def stream_destroy(stream: int) -> None:
    """Give the stream back; what is queued on it still runs."""
    check("cuStreamDestroy", cu.cuStreamDestroy(stream))


def graph_create(queue: Callable[[], object], stream: int) -> int:
    """Return a graph, ready to launch, of the work that ``queue()`` puts on the stream."""
    check("cuStreamBeginCapture", cu.cuStreamBeginCapture(stream, _RELAXED))
    try:
        queue()
    finally:
        result = cu.cuStreamEndCapture(stream)
    graph = check("cuStreamEndCapture", result)
    executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    check("cuGraphDestroy", cu.cuGraphDestroy(graph))
    return int(executable)


def graph_launch(graph: int, stream: int) -> None:
    """Queue the work of the graph."""
    check("cuGraphLaunch", cu.cuGraphLaunch(graph, stream))


def graph_destroy(graph: int) -> None:
    """Give the graph back."""
    check("cuGraphExecDestroy", cu.cuGraphExecDestroy(graph))


def profiler_start() -> None:
    """Let a profiler that waits for this look at what the current context launches from now on."""
    check("cuProfilerStart", cu.cuProfilerStart())


def profiler_stop() -> None:
    """Let it look away again."""
    check("cuProfilerStop", cu.cuProfilerStop())


def bare_launch(stream: int) -> Callable[[], object]:
    """Return a call that launches an empty kernel: the least that a launch from Python costs."""
    ptx = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\0"
    module = check("cuModuleLoadData", cu.cuModuleLoadData(ptx))
    kernel = check("cuModuleGetFunction", cu.cuModuleGetFunction(module, b"empty"))
    return lambda: cu.cuLaunchKernel(kernel, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0)
