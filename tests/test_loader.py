"""Loading: once, on every device that can, never during capture, and again after a failure."""

import gc
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.descriptors import read_header
from ctm_rt.errors import ArgumentError, DriverError, ModuleError
from ctm_rt.modules import loader
from ctm_rt.modules.link import compiler
from ctm_rt.modules.manifest import HOST
from tests import tiny

INVALID_VALUE, NO_BINARY, UNKNOWN = 1, 209, 999


@pytest.fixture
def path(tmp_path, fake) -> Path:
    """Return a module that this process has not loaded."""
    return tiny.copy("tiny_a", tmp_path)


def loads(fake) -> int:
    return len(fake.calls("cuLibraryLoadData"))


def test_threads_load_it_once(path, fake):
    barrier, kernels = threading.Barrier(16), []

    def work():
        barrier.wait()
        kernels.append(ctm_rt.load(path))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads(fake) == 1
    assert len(kernels) == 16
    assert len(set(map(id, kernels))) == 1


def test_loaded_by_name_path_and_link_it_is_one(path, fake, tmp_path):
    link = tmp_path / "elsewhere.so"
    link.symlink_to(path.with_suffix(".so"))
    link.with_suffix(".h").symlink_to(path.with_suffix(".h"))
    for what in (path, str(path), path.with_suffix(".so"), path.with_suffix(".h"), link):
        ctm_rt.load(what)
    ctm_rt.load("tiny_a", store=tmp_path)
    assert loads(fake) == 1


def test_a_copy_is_another_module_and_so_is_a_new_version(path, fake, tmp_path):
    first = ctm_rt.load(path)
    second = ctm_rt.load(tiny.copy("tiny_a", tmp_path / "other"))
    assert first is not second
    path.with_suffix(".so").unlink()
    shutil.copy(tiny.store() / tiny.ARCH / HOST / "tiny_a.so", path.with_suffix(".so"))
    assert ctm_rt.load(path) is not first
    assert loads(fake) == 3


def test_it_stays_when_nobody_holds_it(path, fake):
    kernel = ctm_rt.load(path)
    del kernel
    gc.collect()
    assert fake.calls("cuLibraryUnload") == []
    ctm_rt.load(path)
    assert loads(fake) == 1


def test_the_first_call_needs_no_context(path, fake):
    context = driver.cu.cuCtxGetCurrent()
    ctm_rt.load(path)
    assert driver.cu.cuCtxGetCurrent() == context


def test_capture_is_refused_with_the_remedy_and_loading_before_it_helps(path, fake):
    with driver.current(0):
        stream = int(driver.check("cuStreamCreate", driver.cu.cuStreamCreate(1)))
    fake.set_capturing(stream, True)
    with pytest.raises(ModuleError, match=r'call ctm_rt\.load\("tiny_a"\) before the capture'):
        ctm_rt.load(path, stream=stream)
    assert loads(fake) == 0
    assert fake.capture_status(stream) == 1  # not spoilt
    fake.set_capturing(stream, False)
    kernel = ctm_rt.load(path, stream=stream)
    fake.set_capturing(stream, True)
    assert ctm_rt.load(path, stream=stream) is kernel
    assert fake.capture_status(stream) == 1


@pytest.mark.parametrize(
    ("call", "unloads"),
    [
        ("cuLibraryLoadData", 0),
        ("cuLibraryGetKernel", 1),
        ("cuKernelGetAttribute", 1),
        ("cuKernelSetAttribute", 1),
        ("cuDeviceGetAttribute", 1),
        ("cuStreamIsCapturing", 0),
    ],
)
def test_after_a_failure_the_next_call_tries_again(path, fake, call, unloads):
    driver.compute_capability(0)
    fake.fail(call, UNKNOWN)
    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        ctm_rt.load(path)
    assert len(fake.calls("cuLibraryUnload")) == unloads
    ctm_rt.load(path)
    assert len(fake.calls("cuLibraryUnload")) == unloads


def test_what_cannot_be_cleaned_up_is_not_tried_again(path, fake):
    fake.fail("cuKernelSetAttribute", UNKNOWN)
    fake.fail("cuLibraryUnload", INVALID_VALUE)
    with pytest.raises(DriverError, match="cuda_load_to_device on device 0 failed: CUDA_ERROR_UNK"):
        ctm_rt.load(path)
    with pytest.raises(ModuleError, match=r"INVALID_VALUE.*restart the process"):
        ctm_rt.load(path)
    assert loads(fake) == 1


def test_every_device_that_can_run_it_is_prepared(path, fake):
    fake.set_devices(3)
    fake.set_compute_capability(1, (8, 0))
    ctm_rt.load(path)
    queried = [device for _, device in fake.calls("cuKernelGetAttribute")]
    library = next(reversed(loader._libraries.values()))
    assert library.devices == {0, 2}
    assert len(queried) == 2


def test_no_device_that_can_run_it(path, fake):
    fake.set_devices(1, (10, 0))
    with pytest.raises(ModuleError, match=r"is for sm_90a, the devices here are sm_100a.*sm_100a"):
        ctm_rt.load(path)
    assert loads(fake) == 0
    with pytest.raises(ModuleError, match=r"no module tiny_a for sm_100a.*--arch sm_100a --only"):
        ctm_rt.load("tiny_a", store=path.parents[2])


@pytest.mark.parametrize("device", [-1, 1])
def test_a_device_that_is_not_there(path, fake, device):
    with pytest.raises(ArgumentError, match=f"device: expected 0 to 0, got {device}"):
        ctm_rt.load(path, device=device)


def strangers_copy(folder: Path) -> Path:
    for suffix in (".so", ".h"):
        shutil.copy(tiny.stranger().with_suffix(suffix), folder)
    return folder / "scaled_add.so"


def test_a_stranger_is_loaded_wherever_it_has_code(tmp_path, fake):
    fake.set_devices(2, (8, 0))
    fake.set_compute_capability(1, (9, 0))
    path = strangers_copy(tmp_path)
    ctm_rt.load(path)
    assert next(reversed(loader._libraries.values())).devices == {1}


def test_a_stranger_without_code_for_any_device(tmp_path, fake):
    fake.set_devices(2, (8, 0))
    path = strangers_copy(tmp_path)
    with pytest.raises(ModuleError, match=r"scaled_add\.so holds no code for a device"):
        ctm_rt.load(path)
    fake.set_devices(1)
    ctm_rt.load(path)


def test_files_that_do_not_belong_together(tmp_path, fake):
    path = strangers_copy(tmp_path)
    shutil.copy(tiny.store() / tiny.ARCH / HOST / "tiny_a.h", path.with_suffix(".h"))
    with pytest.raises(ModuleError, match=r"scaled_add\.so has no _mlir_tiny_a_cuda_init"):
        ctm_rt.load(path)


def test_a_library_that_was_linked_otherwise(tmp_path, fake):
    path = strangers_copy(tmp_path)
    wrapper = read_header(path.with_suffix(".h"))
    source = tmp_path / "other.c"
    symbols = (wrapper.init, wrapper.load_to_device, wrapper.entry)
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in symbols))
    path.unlink()
    subprocess.run([*compiler(), "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(ModuleError, match=r"ctm_rt_call_v1: .*this version of ctm_rt\.modules"):
        ctm_rt.load(path)


def test_several_modules_and_a_stranger_in_one_process(tmp_path, fake):
    kernels = [
        ctm_rt.load(tiny.copy("tiny_a", tmp_path)),
        ctm_rt.load(tiny.copy("tiny_b", tmp_path)),
        ctm_rt.load(tiny.copy("tiny_a", tmp_path / "second")),
        ctm_rt.load(strangers_copy(tmp_path)),
    ]
    prefixes = [kernel.wrapper.prefix for kernel in kernels]
    assert prefixes == ["tiny_a", "tiny_b", "tiny_a", "scaled_add"]
    assert loads(fake) == 4
