"""ctm_rt.driver against the fake driver."""

import contextlib
import ctypes.util
import os
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from cuda.bindings import driver as cu

from ctm_rt import driver
from ctm_rt.errors import ArgumentError, DriverError


def current_context() -> int:
    return int(cu.cuCtxGetCurrent()[1])


@pytest.fixture
def stream(fake: ModuleType):
    with driver.current(0):
        handle = int(driver.check("cuStreamCreate", cu.cuStreamCreate(1)))
    yield handle
    fake.reset()
    cu.cuStreamDestroy(handle)


def test_facts_about_the_device(fake: ModuleType) -> None:
    fake.set_devices(2, cc=(8, 6))
    fake.set_compute_capability(1, (9, 0))
    assert driver.device_count() == 2
    assert [driver.compute_capability(i) for i in (0, 1)] == [(8, 6), (9, 0)]
    assert driver.num_sms(1) == 132
    assert driver.device_name(1) == "Fake GPU 9.0"
    assert driver.driver_version() == 13000


def test_a_refusal_names_the_call_the_code_and_the_reason(fake: ModuleType) -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGetAttribute .*_INVALID_DEVICE \(invalid dev"):
        driver.num_sms(5)
    fake.fail("cuMemAlloc", 2)
    with pytest.raises(DriverError) as caught:
        driver.alloc(16, 0)
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY"
    assert driver.error("entry", 123456).code == "123456"


def test_current_restores_none(fake: ModuleType) -> None:
    assert current_context() == 0
    with driver.current(0):
        assert current_context() == driver.primary_context(0)
        with driver.current(0):
            pass
    assert current_context() == 0
    assert len(fake.calls("cuCtxPushCurrent")) == 1  # nested: already current


def test_current_restores_another_device_also_after_an_error(fake: ModuleType) -> None:
    fake.set_devices(2)
    with driver.current(1):
        before = current_context()
        with contextlib.suppress(KeyError), driver.current(0):
            assert current_context() == driver.primary_context(0) != before
            raise KeyError
        assert current_context() == before


def test_current_restores_a_context_that_is_not_primary(fake: ModuleType) -> None:
    driver.init()
    own = int(driver.check("cuCtxCreate", cu.cuCtxCreate(None, 0, 0)))
    with driver.current(0):
        assert current_context() == driver.primary_context(0) != own
    assert current_context() == own
    driver.check("cuCtxDestroy", cu.cuCtxDestroy(own))


def test_alloc_and_free_leave_the_context_alone(fake: ModuleType) -> None:
    fake.set_devices(2)
    before = fake.live_allocations()
    ptr = driver.alloc(1000, 1)
    assert fake.live_allocations() == before + 1
    assert driver.pointer_device(ptr + 999) == 1
    assert driver.pointer_device(ptr + (1 << 40)) is None
    driver.free(ptr, 1)
    assert fake.live_allocations() == before
    assert current_context() == 0
    with pytest.raises(DriverError, match="cuMemFree failed: CUDA_ERROR_INVALID_VALUE"):
        driver.free(ptr, 1)


def test_nothing_is_not_allocated(fake: ModuleType) -> None:
    assert driver.alloc(0, 0) == 0
    driver.free(0, 0)
    assert not fake.calls("cuMemAlloc")


@pytest.mark.parametrize(
    ("given", "handle"),
    [
        (None, 0),
        (0, 0),
        (7, 7),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 0x1234)), 0x1234),
        (cu.CUstream(0x55), 0x55),
    ],
)
def test_streams_in_every_spelling(given: object, handle: int) -> None:
    assert driver.stream_handle(given) == handle


@pytest.mark.parametrize(
    "given",
    [True, False, -1, 1.0, "0", object(), SimpleNamespace(__cuda_stream__=lambda: (1, 5))],
)
def test_what_is_not_a_stream_is_refused_by_name(given: object) -> None:
    with pytest.raises(ArgumentError, match=r"^stream: expected") as caught:
        driver.stream_handle(given)
    assert caught.value.name == "stream"


def test_stream_ids_are_not_handles(fake: ModuleType, stream: int) -> None:
    fake.set_devices(2)
    ids = [driver.stream_id(s, d) for s, d in ((0, 0), (1, 0), (0, 1), (stream, 0), (2, 0))]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4
    assert current_context() == 0


def test_capture_is_seen_on_the_stream_and_on_the_legacy_stream(fake: ModuleType) -> None:
    with driver.current(0):
        blocking, free = (int(cu.cuStreamCreate(flags)[1]) for flags in (0, 1))
        assert not driver.is_capturing(0)
    assert not driver.is_capturing(0, 0)
    fake.set_capturing(free, True)
    assert driver.is_capturing(free)
    assert not driver.is_capturing(blocking)
    assert not driver.is_capturing(0, 0)
    fake.set_capturing(blocking, True)
    assert driver.is_capturing(0, 0)  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert driver.is_capturing(blocking)
    fake.reset()
    for handle in (blocking, free):
        cu.cuStreamDestroy(handle)


def test_housekeeping_does_not_spoil_a_capture(fake: ModuleType, stream: int) -> None:
    fake.set_capturing(stream, True)
    driver.free(driver.alloc(64, 0), 0)
    assert fake.capture_status(stream) == 1
    with driver.current(0):
        assert cu.cuMemAlloc(64)[0] == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert fake.capture_status(stream) == 2


def test_events_follow_the_stream(fake: ModuleType, stream: int) -> None:
    with driver.current(0):
        event = driver.event_create()
        assert driver.event_done(event)
        fake.set_paused(stream, True)
        driver.event_record(event, stream)
        assert not driver.event_done(event)
        driver.stream_wait_event(0, event)
        driver.synchronize(stream, 0)
        assert driver.event_done(event)
        driver.event_destroy(event)
        with pytest.raises(DriverError, match="INVALID_HANDLE"):
            driver.event_done(event)


def test_unknown_handles_are_refused(fake: ModuleType) -> None:
    with (
        driver.current(0),
        pytest.raises(DriverError, match=r"cuStreamIsCapturing.*INVALID_HANDLE"),
    ):
        driver.stream_id(0x7777, 0)
    with pytest.raises(DriverError, match=r"cuLibraryUnload.*INVALID_HANDLE"):
        driver.library_unload(0x7777)


def test_every_thread_has_its_own_current_context(fake: ModuleType) -> None:
    seen = []
    with driver.current(0):
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
    assert seen == [0]


def test_no_driver_is_a_typed_error_with_the_remedy() -> None:
    code = """
import ctm_rt
from ctm_rt import driver
for _ in range(2):
    try:
        driver.device_count()
    except ctm_rt.DriverError as error:
        print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver")
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout.count("install an NVIDIA driver") == 2


def test_a_child_process_finds_the_fake_by_its_soname(fake: ModuleType) -> None:
    code = "from ctm_rt import driver; print(driver.device_name(0))"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=fake.environment(), check=True
    )
    assert ran.stdout == b"Fake GPU 9.0\n"
