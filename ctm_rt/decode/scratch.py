"""Where a launch gets its scratch and counters."""

from typing import Protocol

from ctm_rt import driver
from ctm_rt.memory import Workspace
from ctm_rt.tensor import TensorView


class Scratch(Protocol):
    """A ``Workspace``, or what the runner's caller allocated."""

    def scratch(self, elems: int, *, stream: int) -> TensorView:
        """Return ``elems`` f32."""

    def semaphores(self, elems: int, *, stream: int) -> TensorView:
        """Return ``elems`` i32, zero unless a launch is under way."""


class _SharedWorkspace(Workspace):
    """Keeps the scratch that it has outgrown: a captured graph may still use it."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._kept: set[object] = set()

    def scratch(self, elems: int, *, stream: object = None) -> TensorView:
        buffer = super().scratch(elems, stream=stream)
        self._kept.add(buffer.owner)
        return buffer


_shared: dict[tuple[int, int], _SharedWorkspace] = {}  # by device and stream id


def shared_workspace(device: int, stream: int) -> Workspace:
    """Return the workspace of all calls on ``stream`` that name none."""
    key = device, driver.stream_id(stream, device)
    return _shared.get(key) or _shared.setdefault(key, _SharedWorkspace(device))


def forget_workspace(device: int, stream: int) -> None:
    """Let the next call on ``stream`` have a new one."""
    _shared.pop((device, driver.stream_id(stream, device)), None)
