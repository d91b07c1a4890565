"""ctm_rt.memory against the fake driver."""

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda.bindings import driver as cu

from ctm_rt import dlpack, driver, memory
from ctm_rt.errors import ArgumentError, DriverError
from ctm_rt.memory import (
    DeviceArray,
    Workspace,
    hold_until_done,
    release_done,
    to_device,
    to_host,
)
from ctm_rt.tensor import HOST, DType, view
from tests.dlpack_producer import Producer, consume, release


class Owner:
    """Something whose end can be seen."""


@pytest.fixture(autouse=True)
def _level(fake: ModuleType) -> Iterator[None]:
    """No test may leave device memory or held owners behind."""
    release_done()
    gc.collect()
    before = fake.live_allocations()
    yield
    fake.reset()
    release_done()
    gc.collect()
    assert fake.live_allocations() == before
    assert not any(memory._held.values())


@pytest.fixture
def streams(fake: ModuleType) -> Iterator[list[int]]:
    with driver.current(0):
        handles = [int(cu.cuStreamCreate(1)[1]) for _ in range(2)]
    yield handles
    fake.reset()
    release_done()
    for handle in handles:
        cu.cuStreamDestroy(handle)


def host_bytes(ptr: int, nbytes: int) -> bytes:
    """Read device memory, which is host memory here."""
    return ctypes.string_at(ptr, nbytes)


# ---- DeviceArray -------------------------------------------------------------------------------


def test_a_device_array_says_what_it_is(fake: ModuleType) -> None:
    fake.set_devices(2)
    array = DeviceArray.empty((2, 3), "e4m3", device=1)
    assert (array.shape, array.dtype, array.device, array.nbytes) == ((2, 3), DType.E4M3, 1, 6)
    assert driver.pointer_device(array.ptr) == 1
    assert repr(array) == "DeviceArray((2, 3), e4m3, device=1)"
    assert view(array) is array.tensor_view
    assert view(array).strides == (3, 1)
    with pytest.raises(ArgumentError, match=r"^shape: expected extents of 0 or more"):
        DeviceArray.empty((2, -1), "f16")


def test_memory_goes_with_the_last_owner(fake: ModuleType) -> None:
    before = fake.live_allocations()
    array = DeviceArray.empty((4,), "f32")
    borrowed = view(array)
    assert fake.live_allocations() == before + 1
    del array
    assert fake.live_allocations() == before + 1
    del borrowed
    assert fake.live_allocations() == before  # at once: no cycle


def test_memory_goes_on_its_own_device(fake: ModuleType) -> None:
    fake.set_devices(2)
    array = DeviceArray.empty((4,), "f32", device=1)
    with driver.current(0):
        del array
    assert [a for a, _ in fake.calls("cuCtxPushCurrent")][-1] == driver.primary_context(1)


def test_a_refused_allocation_leaves_nothing(fake: ModuleType) -> None:
    fake.fail("cuMemAlloc", 2)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        DeviceArray.empty((4,), "f32")


def test_an_end_that_the_driver_refuses_is_quiet(fake: ModuleType) -> None:
    array = DeviceArray.empty((4,), "f32")
    ptr = array.ptr
    fake.fail("cuMemFree", 700)  # a kernel has broken the context: told already
    del array
    driver.free(ptr, 0)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_dlpack_round_trip(dtype: DType, max_version: tuple[int, int] | None) -> None:
    array = DeviceArray.empty((2, 1, 3), dtype)
    capsule = array.__dlpack__(stream=-1, max_version=max_version)
    tensor = dlpack.managed_tensor(capsule)
    assert isinstance(tensor, dlpack.DLManagedTensorVersioned) == (
        max_version is not None and max_version[0] >= 1
    )
    assert (tensor.device_type, tensor.device_id) == array.__dlpack_device__() == (2, 0)

    class Foreign:
        """What another library makes of it."""

        __dlpack__ = staticmethod(array.__dlpack__)
        __dlpack_device__ = staticmethod(array.__dlpack_device__)

    found = view(Foreign())
    assert found[:5] == view(array)[:5]
    assert not found.readonly


def test_dlpack_names_the_device(fake: ModuleType) -> None:
    fake.set_devices(2)
    array = DeviceArray.empty((4,), "f16", device=1)
    for version in (None, (1, 0)):
        tensor = dlpack.managed_tensor(array.__dlpack__(max_version=version))
        assert (tensor.device_type, tensor.device_id) == array.__dlpack_device__() == (2, 1)


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_consumer_keeps_the_memory(fake: ModuleType, max_version: Any) -> None:
    before = fake.live_allocations()
    array = DeviceArray.empty((4,), "bf16")
    ptr = array.ptr
    first = consume(array.__dlpack__(max_version=max_version))
    second = consume(array.__dlpack__(max_version=max_version))
    del array
    gc.collect()
    assert fake.live_allocations() == before + 1
    release(first)
    assert fake.live_allocations() == before + 1
    assert second.data == ptr
    release(second)
    assert fake.live_allocations() == before


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_that_nobody_took_lets_go(fake: ModuleType, max_version: Any) -> None:
    before = fake.live_allocations()
    capsule = DeviceArray.empty((4,), "f16").__dlpack__(max_version=max_version)
    assert fake.live_allocations() == before + 1
    with contextlib.suppress(KeyError):
        dropped_by_an_exception(capsule)
    del capsule
    assert fake.live_allocations() == before


def dropped_by_an_exception(capsule: object) -> None:
    raise KeyError(capsule)


def test_an_empty_array_travels_too() -> None:
    array = DeviceArray.empty((0, 4), "f16")
    assert array.ptr == 0
    capsule = array.__dlpack__(max_version=(1, 0))
    assert dlpack.managed_tensor(capsule).data == 0
    assert to_host(array).shape == (0, 4)
    assert to_device(np.zeros((3, 0))).shape == (3, 0)


def test_dlpack_never_copies() -> None:
    array = DeviceArray.empty((4,), "f16")
    assert array.__dlpack__(dl_device=(2, 0), copy=False)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(1, 0))


@pytest.mark.parametrize(("dtype", "typestr"), [("f16", "<f2"), ("e4m3", "|u1"), ("bf16", "<u2")])
def test_the_cuda_array_interface(dtype: str, typestr: str) -> None:
    array = DeviceArray.empty((2, 3), dtype)
    interface = array.__cuda_array_interface__
    assert interface["typestr"] == typestr

    class Foreign:
        __cuda_array_interface__ = interface

    assert view(Foreign(), dtype=dtype)[:5] == view(array)[:5]


# ---- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numpy",
    ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c16", ml_dtypes.bfloat16,
     ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_there_and_back(numpy: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(numpy)
    there = to_device(array)
    assert there.shape == shape
    assert host_bytes(there.ptr, there.nbytes) == array.tobytes()
    back = to_host(there)
    assert back.dtype == array.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", ["e4m3", "bf16"])
def test_without_ml_dtypes_integers_come_back(monkeypatch: Any, dtype: str) -> None:
    size = DType(dtype).itemsize
    array = np.arange(4, dtype=f"u{size}")
    there = to_device(array, dtype=dtype)
    assert there.dtype is DType(dtype)
    assert str(to_host(there).dtype) == {"e4m3": "float8_e4m3fn", "bf16": "bfloat16"}[dtype]
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    np.testing.assert_array_equal(to_host(there), array)


def test_strided_host_arrays_are_packed() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for part in (array[::2, 1:], array.T, array[::-1], np.broadcast_to(array[:, :1], (4, 3))):
        there = to_device(part)
        assert view(there).strides == (part.shape[1], 1)
        np.testing.assert_array_equal(to_host(there), part)
        np.testing.assert_array_equal(to_host(part), part)


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6), (24, 4, 2), (0, 4, 1), (-12, 4, -1)])
def test_strided_device_arrays_come_back(strides: tuple[int, int, int]) -> None:
    memory_ = np.arange(64, dtype=np.float16)
    base = to_device(memory_)
    start, shape = 20, (2, 3, 2)
    there = view(base)._replace(ptr=base.ptr + 2 * start, shape=shape, strides=strides)
    expected = np.lib.stride_tricks.as_strided(memory_[start:], shape, [2 * s for s in strides])
    np.testing.assert_array_equal(to_host(there), expected)


def test_a_strided_copy_stays_inside_the_allocation() -> None:
    base = to_device(np.arange(10, dtype=np.int32))
    part = view(base)._replace(ptr=base.ptr + 4, shape=(3,), strides=(4,))  # 1, 5, 9
    np.testing.assert_array_equal(to_host(part), [1, 5, 9])


def test_copies_go_to_the_stream_and_wait_for_it(fake: ModuleType, streams: list[int]) -> None:
    there = to_device(np.zeros(3), stream=streams[0])
    to_host(there, streams[1])
    assert [b for _, b in fake.calls("cuMemcpyHtoDAsync")] == streams[:1]
    assert [b for _, b in fake.calls("cuMemcpyDtoHAsync")] == streams[1:]
    assert [a for a, _ in fake.calls("cuStreamSynchronize")] == streams


def test_copies_spoil_no_capture_elsewhere(fake: ModuleType, streams: list[int]) -> None:
    fake.set_capturing(streams[0], True)
    to_host(to_device(np.zeros(3), stream=streams[1]), streams[1])
    assert fake.capture_status(streams[0]) == 1


def test_to_device_takes_host_arrays_of_any_library() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    foreign = Producer(array.ctypes.data, (3, 2), (1, 3), bits=32)
    np.testing.assert_array_equal(to_host(to_device(foreign)), array.T)
    with pytest.raises(ArgumentError, match=r"^array: expected a host array, got one on device 0"):
        to_device(to_device(array))


def test_to_host_of_a_host_array_is_a_copy() -> None:
    array = np.arange(3)
    back = to_host(array)
    np.testing.assert_array_equal(back, array)
    assert not np.shares_memory(back, array)
    assert view(array).device == HOST


def test_read_only_arrays_can_be_copied() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    np.testing.assert_array_equal(to_host(to_device(array)), array)


# ---- hold_until_done ----------------------------------------------------------------------------


def held(stream: int, device: int = 0, workspace: Workspace | None = None) -> "weakref.ref[Owner]":
    """Hold a temporary that nobody else has."""
    owner = Owner()
    hold_until_done((owner,), device, stream, workspace=workspace)
    return weakref.ref(owner)


def pending(stream: int, device: int = 0) -> list[int]:
    """How many calls each event of the stream stands for."""
    return [len(owners) for _, owners, _ in memory._held[device, stream]]


def test_owners_live_until_the_work_is_done(fake: ModuleType, streams: list[int]) -> None:
    fake.set_paused(streams[0], True)
    waiting = held(streams[0])
    gc.collect()
    assert waiting() is not None
    for _ in range(20):  # later calls, also on a stream that is done
        held(streams[1])
    release_done()
    assert waiting() is not None
    fake.set_paused(streams[0], False)
    release_done()
    assert waiting() is None


def test_owners_go_in_the_order_of_their_work(fake: ModuleType, streams: list[int]) -> None:
    first = held(streams[0])
    fake.set_paused(streams[0], True)
    second = held(streams[0])
    release_done()
    assert first() is None
    assert second() is not None


def test_later_calls_let_go(streams: list[int]) -> None:
    owners = [held(streams[0]) for _ in range(memory._SWEEP_EVERY)]
    assert [owner() for owner in owners] == [None] * len(owners)


def test_an_allocation_lets_go(streams: list[int]) -> None:
    owner = held(streams[0])
    DeviceArray.empty((1,), "f32")
    assert owner() is None


def test_the_legacy_stream_of_each_device(fake: ModuleType) -> None:
    fake.set_devices(2)
    owners = [held(0, device) for device in (0, 1, 0)]
    release_done()
    assert [owner() for owner in owners] == [None] * 3


def test_nothing_is_held_while_the_stream_captures(fake: ModuleType, streams: list[int]) -> None:
    fake.set_capturing(streams[0], True)
    assert held(streams[0])() is None
    assert fake.capture_status(streams[0]) == 1


def test_holding_spoils_no_capture_elsewhere(fake: ModuleType, streams: list[int]) -> None:
    fake.set_capturing(streams[0], True)
    owner = held(streams[1])
    release_done()
    assert owner() is None
    assert fake.capture_status(streams[0]) == 1


def test_a_destroyed_stream_is_forgotten(fake: ModuleType) -> None:
    with driver.current(0):
        stream = int(cu.cuStreamCreate(1)[1])
    fake.set_paused(stream, True)
    owner = held(stream)
    cu.cuStreamDestroy(stream)
    release_done()
    assert owner() is None


def test_1e5_holds_leave_everything_level(fake: ModuleType, streams: list[int]) -> None:
    owner = Owner()
    hold_until_done(owner, 0, streams[0])
    release_done()
    count, events = sys.getrefcount(owner), fake.live_events()
    for _ in range(100_000):
        hold_until_done(owner, 0, streams[0])
    release_done()
    assert sys.getrefcount(owner) == count
    assert fake.live_events() <= events + memory._SWEEP_EVERY


def in_threads(work: Callable[[int], None], streams: list[int]) -> None:
    """Run ``work`` in a thread for each of ``streams``, all at once; none may raise."""
    with ThreadPoolExecutor(len(streams)) as pool:
        for done in [pool.submit(work, stream) for stream in streams]:
            done.result()


def test_holding_from_many_threads(fake: ModuleType, streams: list[int]) -> None:
    owner = Owner()
    count = sys.getrefcount(owner)

    def work(stream: int) -> None:
        for _ in range(2000):
            hold_until_done(owner, 0, stream)

    in_threads(work, [streams[i % 2] for i in range(8)])
    release_done()
    assert sys.getrefcount(owner) == count
    pooled = [event for idle in memory._idle_events.values() for event in idle]
    assert len(pooled) == len(set(pooled))


def test_holding_in_a_thread_without_a_context(fake: ModuleType, streams: list[int]) -> None:
    """A stream knows its own; an event needs one only when it is made."""
    found = []

    def work() -> None:
        for _ in range(2):  # with an event that is made, and with an idle one
            owner = held(streams[0])
            release_done()
            found.append(owner())
        found.append(int(driver.check("cuCtxGetCurrent", cu.cuCtxGetCurrent())))

    memory._idle_events.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, None, 0]


def test_who_has_asked_need_not_ask_again(fake: ModuleType, streams: list[int]) -> None:
    fake.set_paused(streams[0], True)
    asked = len(fake.calls("cuStreamIsCapturing"))
    owner = Owner()
    waiting = weakref.ref(owner)
    hold_until_done(owner, 0, streams[0], may_capture=False)
    del owner
    assert len(fake.calls("cuStreamIsCapturing")) == asked
    assert waiting() is not None
    fake.set_paused(streams[0], False)
    release_done()
    assert waiting() is None


def test_an_owner_whose_end_holds_and_allocates(streams: list[int]) -> None:
    class Restless:
        def __del__(self) -> None:
            held(streams[0])
            DeviceArray.empty((1,), "f32")

    for _ in range(3 * memory._SWEEP_EVERY):
        hold_until_done(Restless(), 0, streams[0])
    release_done()
    release_done()


@pytest.mark.parametrize("step", ["event_done", "event_record"])
def test_a_finaliser_may_come_in_between(
    monkeypatch: pytest.MonkeyPatch, streams: list[int], step: str
) -> None:
    real, owners = getattr(driver, step), [held(streams[0]) for _ in range(3)]

    def interrupted(*arguments: int) -> Any:
        monkeypatch.setattr(driver, step, real)
        owners.append(held(streams[0]))
        release_done()
        return real(*arguments)

    monkeypatch.setattr(driver, step, interrupted)
    owners.append(held(streams[0]))
    release_done()
    release_done()
    assert [owner() for owner in owners] == [None] * 5


def test_a_failed_query_is_told_and_loses_no_owner(fake: ModuleType, streams: list[int]) -> None:
    owners = [held(streams[0]) for _ in range(2)]
    fake.fail("cuEventQuery", 700)
    with pytest.raises(DriverError, match="cuEventQuery"):
        release_done()
    assert None not in [owner() for owner in owners]
    release_done()
    assert [owner() for owner in owners] == [None, None]


def test_threads_that_let_go_at_once(fake: ModuleType, streams: list[int]) -> None:
    """Each owner goes once, and each event is idle once."""
    owners = [held(streams[i % 2]) for i in range(7)]
    fake.set_paused(streams[1], True)
    waiting = held(streams[1])

    def work() -> None:
        for _ in range(300):
            held(streams[0])
            release_done()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [owner() for owner in owners] == [None] * 7
    assert waiting() is not None
    pooled = [*memory._idle_events[0], *(e for queue in memory._held.values() for e, *_ in queue)]
    assert len(pooled) == len(set(pooled))


def test_a_failed_record_is_told_and_loses_no_event(fake: ModuleType, streams: list[int]) -> None:
    held(streams[0])
    release_done()
    while len(memory._idle_events[0]) > 1:
        driver.event_destroy(memory._idle_events[0].pop())
    events = fake.live_events()
    for _ in range(3):
        fake.fail("cuEventRecord", 400)
        with pytest.raises(DriverError, match="cuEventRecord"):
            held(streams[0])
    held(streams[0])
    assert fake.live_events() == events


# ---- calls that share a workspace: one event, the last, stands for several ----------------------


def test_calls_of_a_workspace_share_events(fake: ModuleType, streams: list[int]) -> None:
    """So that the driver is asked once about several; what waits behind a full one does not."""
    workspace, most = Workspace(), memory._SWEEP_EVERY
    fake.set_paused(streams[0], True)
    asked, owners = len(fake.calls("cuEventQuery")), []
    for count in range(1, 2 * most + 2):
        owners.append(held(streams[0], workspace=workspace))
        assert sum(pending(streams[0])) == count
    assert pending(streams[0]) == [most, most, 1]
    assert len(fake.calls("cuEventQuery")) - asked <= 2  # as the oldest is not done
    release_done()
    assert None not in [owner() for owner in owners]
    fake.set_paused(streams[0], False)
    release_done()
    assert [owner() for owner in owners] == [None] * len(owners)


def test_who_was_done_alone_waits_for_who_joined(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    owners = [held(streams[0], workspace=workspace)]
    fake.set_paused(streams[0], True)
    owners.append(held(streams[0], workspace=workspace))
    release_done()
    assert None not in [owner() for owner in owners]
    fake.set_paused(streams[0], False)
    release_done()
    assert [owner() for owner in owners] == [None, None]


def test_each_workspace_has_its_own_events(fake: ModuleType, streams: list[int]) -> None:
    """As a handle may come again, for a stream that is not behind the other's work."""
    first, second = Workspace(), Workspace()
    owners = [held(streams[0], workspace=first)]
    fake.set_paused(streams[0], True)
    for workspace in (second, None, second, first):
        owners.append(held(streams[0], workspace=workspace))
    assert pending(streams[0]) == [1] * 5
    release_done()
    assert owners[0]() is None
    assert None not in [owner() for owner in owners[1:]]
    held(streams[1], workspace=first)
    assert pending(streams[1]) == [1]
    fake.set_paused(streams[0], False)


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_share_no_event(fake: ModuleType, stream: int) -> None:
    """One handle stands for the streams of several threads."""
    workspace = Workspace()
    owners = [held(stream, workspace=workspace) for _ in range(3)]
    assert pending(stream) == [1, 1, 1]
    release_done()
    assert [owner() for owner in owners] == [None] * 3


def test_later_calls_of_a_workspace_let_go(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    first = held(streams[0], workspace=workspace)
    events = fake.live_events()
    for _ in range(10_000):
        hold_until_done((), 0, streams[0], workspace=workspace)
    assert first() is None
    assert sum(pending(streams[0])) <= memory._SWEEP_EVERY
    assert fake.live_events() <= events + 1


def test_a_failed_record_takes_nobody_with_it(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    fake.set_paused(streams[0], True)
    first = held(streams[0], workspace=workspace)
    fake.fail("cuEventRecord", 400)
    with pytest.raises(DriverError, match="cuEventRecord"):
        held(streams[0], workspace=workspace)
    release_done()
    assert first() is not None
    assert pending(streams[0]) == [1]
    fake.set_paused(streams[0], False)
    release_done()
    assert first() is None


@pytest.mark.parametrize("step", ["event_done", "event_record"])
def test_a_finaliser_may_use_the_same_workspace(
    monkeypatch: pytest.MonkeyPatch, streams: list[int], step: str
) -> None:
    real, workspace = getattr(driver, step), Workspace()
    owners = [held(streams[0], workspace=workspace) for _ in range(3)]

    def interrupted(*arguments: int) -> Any:
        monkeypatch.setattr(driver, step, real)
        owners.append(held(streams[0], workspace=workspace))
        release_done()
        return real(*arguments)

    monkeypatch.setattr(driver, step, interrupted)
    owners.append(held(streams[0], workspace=workspace))
    release_done()
    release_done()
    assert [owner() for owner in owners] == [None] * 5


def test_threads_that_share_a_workspace(fake: ModuleType, streams: list[int]) -> None:
    workspace, owner = Workspace(), Owner()
    count = sys.getrefcount(owner)

    def work(stream: int) -> None:
        for i in range(2000):
            hold_until_done(owner, 0, stream, workspace=workspace)
            if i % 5 == 0:
                release_done()

    in_threads(work, [streams[0]] * 8)
    release_done()
    assert sys.getrefcount(owner) == count
    assert len(memory._idle_events[0]) == len(set(memory._idle_events[0]))


# ---- Workspace ---------------------------------------------------------------------------------


def test_a_workspace_grows_and_never_shrinks() -> None:
    workspace = Workspace()
    small = workspace.scratch(10)
    assert small[1:5] == ((10,), (1,), DType.F32, 0)
    assert workspace.scratch(4)[:2] == (small.ptr, (4,))
    large = workspace.scratch(11)
    assert large.ptr != small.ptr
    assert workspace.scratch(20).ptr == large.ptr  # twice as large at once
    assert driver.pointer_device(small.ptr) == 0  # as long as someone looks at it


def test_what_is_wanted_again_is_found_again(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    for lend in (workspace.scratch, workspace.semaphores):
        lent = lend(10)
        fake.set_capturing(streams[0], True)
        assert lend(10, stream=streams[0]) is lent
        fake.set_capturing(streams[0], False)
        assert lend(4)[:2] == (lent.ptr, (4,))
        assert lend(10) == lent


def test_old_scratch_goes_with_its_views(fake: ModuleType) -> None:
    workspace = Workspace()
    workspace.scratch(10)
    before = fake.live_allocations()
    workspace.scratch(100)
    assert fake.live_allocations() == before


def test_nothing_needs_no_memory(fake: ModuleType) -> None:
    before = fake.live_allocations()
    workspace = Workspace()
    assert workspace.scratch(0).shape == workspace.semaphores(0).shape == (0,)
    assert fake.live_allocations() == before


def test_semaphores_are_zero(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    for elems in (5, 1000):
        counters = workspace.semaphores(elems, stream=streams[0])
        assert counters[1:5] == ((elems,), (1,), DType.I32, 0)
        assert not any(host_bytes(counters.ptr, 4 * elems))
    assert {a for a, _ in fake.calls("cuStreamSynchronize")} == {streams[0]}


def test_no_growth_while_the_stream_captures(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    have = workspace.scratch(10)
    fake.set_capturing(streams[0], True)
    assert workspace.scratch(10, stream=streams[0]) == have
    with pytest.raises(ArgumentError, match=r"^workspace: .* 11 elements of f32 before the capt"):
        workspace.scratch(11, stream=streams[0])
    with pytest.raises(ArgumentError, match="workspace"):
        workspace.semaphores(1, stream=streams[0])
    assert workspace.scratch(11, stream=streams[1]).shape == (11,)
    assert fake.capture_status(streams[0]) == 1


def test_one_stream_at_a_time(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    for _ in range(2):
        workspace.claim(streams[0])
    with pytest.raises(ArgumentError, match=rf"^workspace: .*{streams[0]:#x}.*{streams[1]:#x}"):
        workspace.claim(streams[1])
    with pytest.raises(ArgumentError, match="workspace"):
        workspace.claim(0)
    workspace.claim(streams[0])


def test_spellings_of_the_legacy_stream_are_one(fake: ModuleType) -> None:
    workspace = Workspace()
    workspace.claim(0)
    workspace.claim(1)
    with pytest.raises(ArgumentError):
        workspace.claim(2)


def test_the_first_claim_wins_among_threads(streams: list[int]) -> None:
    for _ in range(50):
        workspace, won = Workspace(), []

        def claim(stream: int, workspace: Workspace = workspace, won: list[int] = won) -> None:
            with contextlib.suppress(ArgumentError):
                workspace.claim(stream)
                won.append(stream)

        threads = [threading.Thread(target=claim, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


def test_a_workspace_is_handed_over(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    workspace.claim(streams[0])
    with driver.current(0):
        event = cu.cuEventCreate(0)[1]
        driver.event_record(int(event), streams[0])
    workspace.hand_over(streams[1], event)
    assert fake.calls("cuStreamWaitEvent") == [(streams[1], int(event))]
    workspace.claim(streams[1])
    with pytest.raises(ArgumentError):
        workspace.claim(streams[0])
    workspace.hand_over(streams[0])  # ordered by the caller
    workspace.claim(streams[0])
    assert len(fake.calls("cuStreamWaitEvent")) == 1
    driver.event_destroy(int(event))


def test_a_refused_hand_over_changes_nothing(streams: list[int]) -> None:
    workspace = Workspace()
    workspace.claim(streams[0])
    with pytest.raises(DriverError, match="cuStreamWaitEvent"):
        workspace.hand_over(streams[1], 0x7777)
    workspace.claim(streams[0])


def test_a_dirty_workspace_is_refused_until_reset(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    old, new = workspace.semaphores(4), workspace.semaphores(400)
    workspace.claim(streams[0])
    for counters in (old, new):
        ctypes.memset(counters.ptr, 1, 16)
    workspace.mark_dirty()
    with pytest.raises(ArgumentError, match=r"^workspace: .*reset\(\)"):
        workspace.claim(streams[0])
    workspace.reset()
    assert {b for _, b in fake.calls("cuMemsetD8Async")[-2:]} == {streams[0]}
    for counters in (old, new):  # a launch bound before the growth counts in the old one
        assert not any(host_bytes(counters.ptr, 16))
    workspace.claim(streams[1])  # nobody's, after a reset


def test_reset_is_for_the_last_stream(fake: ModuleType, streams: list[int]) -> None:
    workspace = Workspace()
    workspace.semaphores(4)
    workspace.claim(streams[0])
    workspace.mark_dirty()
    with pytest.raises(ArgumentError, match=r"^stream: "):
        workspace.reset(streams[1])
    fake.set_capturing(streams[0], True)
    with pytest.raises(ArgumentError, match=r"^stream: .*does not capture"):
        workspace.reset(streams[0])
    assert fake.capture_status(streams[0]) == 1
    fake.set_capturing(streams[0], False)
    workspace.reset(streams[0])
    workspace.claim(streams[0])


def test_a_failed_reset_stays_dirty(fake: ModuleType) -> None:
    workspace = Workspace()
    workspace.semaphores(4)
    workspace.mark_dirty()
    fake.fail("cuMemsetD8Async", 999)
    with pytest.raises(DriverError):
        workspace.reset()
    with pytest.raises(ArgumentError, match="dirty"):
        workspace.claim(0)


def test_a_failed_growth_keeps_what_there_was(fake: ModuleType) -> None:
    workspace = Workspace()
    have = workspace.semaphores(4)
    fake.fail("cuMemsetD8Async", 999)
    with pytest.raises(DriverError):
        workspace.semaphores(100)
    assert workspace.semaphores(4).ptr == have.ptr
    counters = workspace.semaphores(100)
    assert not any(host_bytes(counters.ptr, 400))


# ---- the end of the interpreter ------------------------------------------------------------------


def test_the_interpreter_ends_quietly(fake: ModuleType) -> None:
    code = """
import atexit, ctypes, os, sys
import numpy as np
from ctm_rt import dlpack, driver, memory
array = memory.to_device(np.arange(4.0))
capsules = array.__dlpack__(), array.__dlpack__(max_version=(1, 0))
memory.hold_until_done((array, capsules), 0, 0)
workspace = memory.Workspace()
workspace.semaphores(10)
sys.forever = [array, capsules]
cycle = [array]; cycle.append(cycle)
atexit.register(lambda: memory.to_host(array))
# A library that drops what it took over after the end of Python, as C++ destructors do.
get, rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
late = array.__dlpack__()
tensor = dlpack.DLManagedTensor.from_address(get(late, b"dltensor"))
rename(late, b"used_dltensor")
at_exit = ctypes.CDLL(None).__cxa_atexit
at_exit.argtypes = [ctypes.c_void_p] * 3
assert at_exit(tensor.deleter, ctypes.addressof(tensor), None) == 0
driver.free = lambda *_: os._exit(3)  # the driver may be gone before
print("end", flush=True)
"""
    ran = subprocess.run(
        [sys.executable, "-Werror", "-c", code], capture_output=True, env=fake.environment()
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"end\n", b"")
