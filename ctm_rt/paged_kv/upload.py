"""A device copy of a host array, brought up to date row by row through pinned memory."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ctm_rt import dlpack, driver
from ctm_rt.errors import ArgumentError, DriverError
from ctm_rt.memory import DeviceArray
from ctm_rt.tensor import DType, packed_strides

# A host that runs ahead of the device waits only if it is more than this many uploads ahead.
_NUM_STAGINGS = 2


class _Staging:
    """Pinned memory for an int32 array, and the event after which it may be overwritten."""

    __slots__ = ("array", "device", "event", "ptr")

    def __init__(self, shape: tuple[int, ...], nbytes: int, device: int) -> None:
        self.ptr, self.event, self.device = 0, 0, device  # in case that a line below raises
        self.ptr = driver.alloc_pinned(nbytes, device)
        with driver.current(device):
            self.event = driver.event_create()
        self.array = dlpack.numpy_over(self.ptr, shape, packed_strides(shape), "<i4", None)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not self.ptr or _finalizing():
            return
        with contextlib.suppress(DriverError):  # a dead context: told to whoever killed it
            if self.event:
                driver.event_wait(self.event)
                driver.event_destroy(self.event)
            driver.free_pinned(self.ptr, self.device)


class DeviceRows:
    """A device copy of ``host``; rows lie along the first axis, and all are stale at first.

    Parameters
    ----------
    host : int32, packed, not empty
        The caller writes it, and says where with ``touch``.
    device : int
        CUDA ordinal. The driver is not touched before ``device_array`` or ``upload`` is.
    """

    def __init__(self, host: np.ndarray[Any, Any], device: int) -> None:
        self._host, self._device = host, device
        self._stale = set(range(len(host)))
        self._stagings: list[_Staging] = []  # the one that was used last comes last

    @functools.cached_property
    def device_array(self) -> DeviceArray:
        """The copy, at one address for good; undefined before the first ``upload``."""
        return DeviceArray.empty(self._host.shape, DType.I32, self._device)

    def touch(self, rows: Iterable[int]) -> None:
        """Say that these rows of ``host`` have changed."""
        self._stale.update(rows)

    def upload(self, stream: object = None) -> None:
        """Queue copies of the rows that changed since the last call; ``host`` is free on return.

        What was queued on the stream before still sees the old rows. Other streams, and uploads on
        them, are for the caller to order.

        Raises
        ------
        ArgumentError
            The stream captures, and there is something to copy: replays would repeat it.
        DriverError
            The rows stay stale.
        """
        if not self._stale:
            return
        handle, array = driver.stream_handle(stream), self.device_array
        if driver.is_capturing(handle, self._device):
            raise ArgumentError("stream", "one that does not capture", "a capturing stream")
        staging = self._idle_staging()
        row_nbytes = self._host[0].nbytes
        with driver.current(self._device):
            try:
                for start, stop in _runs(self._stale):
                    staging.array[start:stop] = self._host[start:stop]
                    at, nbytes = start * row_nbytes, (stop - start) * row_nbytes
                    driver.copy_to_device(array.ptr + at, staging.ptr + at, nbytes, handle)
            finally:  # also for those copies that were queued before one failed
                driver.event_record(staging.event, handle)
        self._stale.clear()

    def _idle_staging(self) -> _Staging:
        """Return a staging that no copy reads any more, and count it as the last used one."""
        if len(self._stagings) < _NUM_STAGINGS:
            self._stagings.append(_Staging(self._host.shape, self._host.nbytes, self._device))
        else:
            self._stagings.append(self._stagings.pop(0))
            driver.event_wait(self._stagings[-1].event)
        return self._stagings[-1]


def _runs(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of consecutive rows."""
    ordered = sorted(rows)
    start = previous = ordered[0]
    for row in ordered[1:]:
        if row != previous + 1:
            yield start, previous + 1
            start = row
        previous = row
    yield start, previous + 1
