"""Where a launch gets its scratch and counters."""

from typing import Protocol

from ctm_rt import driver
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import Workspace
from ctm_rt.tensor import TensorView


class Scratch(Protocol):
    """A ``Workspace``, or what the runner's caller allocated."""

    def scratch(self, elems: int, *, stream: int) -> TensorView:
        """Return ``elems`` f32."""

    def semaphores(self, elems: int, *, stream: int) -> TensorView:
        """Return ``elems`` i32, zero unless a launch is under way."""


_shared: dict[tuple[int, int], Workspace] = {}  # by device and stream id


def shared_workspace(device: int, stream: int) -> Workspace:
    """Return the workspace of all calls on ``stream`` that name none.

    Raises
    ------
    ArgumentError
        The stream captures: the graph would outlive what this module knows of it.
    """
    number = driver.stream_id(stream, device)
    if number is None:
        raise ArgumentError("workspace", "one to keep as long as the captured graph", None)
    key = device, number
    return _shared.get(key) or _shared.setdefault(key, Workspace(device))


def forget_workspace(device: int, stream: int) -> None:
    """Let the next call on ``stream`` have a new one."""
    number = driver.stream_id(stream, device)
    if number is not None:
        _shared.pop((device, number), None)
