"""The driver shim, and objects linked with it."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctm_rt.errors import ModuleError
from ctm_rt.modules.link import SHIM, compiler, link
from ctm_rt.modules.manifest import HOST
from tests import tiny

CROSS = "aarch64-linux-gnu" if HOST != "aarch64-linux-gnu" else "x86_64-linux-gnu"
NEEDS_NO_DRIVER = """\
import ctypes, sys
call = ctypes.CDLL(sys.argv[1]).ctm_rt_call_v1
print(call(None, (ctypes.c_void_p * 1)(), 1, None, None, None))
"""


def needed(path: Path) -> set[str]:
    lines = subprocess.check_output(["readelf", "-dW", path], text=True).splitlines()
    return {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}


def symbols(path: Path, *options: str) -> set[str]:
    lines = subprocess.check_output(["nm", "-D", *options, path], text=True).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines}


def build(folder: Path, source: str) -> Path:
    """Compile C text to an object, as the exporter would leave one."""
    (folder / "entry.c").write_text(source)
    command = [*compiler(), "-c", "-fPIC", "-o", folder / "entry.o", folder / "entry.c"]
    subprocess.run(command, check=True)
    return folder / "entry.o"


@pytest.mark.parametrize("host", [HOST, CROSS])
def test_shim_compiles_without_a_warning_and_needs_libc_alone(tmp_path, host):
    if compiler(host) is None:
        pytest.skip(f"no compiler for {host}")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-c", "-fPIC"]
    subprocess.run([*compiler(host), *flags, "-o", tmp_path / "shim.o", SHIM], check=True)
    empty = tmp_path / "empty.c"
    empty.touch()
    assert needed(link(empty, tmp_path / "shim.so", host=host)) <= {"libc.so.6", "libdl.so.2"}


def test_library_needs_libc_alone_and_keeps_the_shim_to_itself():
    library = tiny.store() / tiny.ARCH / HOST / "tiny_a.so"
    assert needed(library) <= {"libc.so.6", "libdl.so.2"}
    exported = symbols(library, "--defined-only")
    assert {"ctm_rt_call_v1", "_mlir_tiny_a_cuda_init"} <= exported
    assert not any(name.startswith(("_cu", "cuda_dialect")) for name in exported)
    assert not any(name.startswith(("cu", "_cu")) for name in symbols(library, "--undefined-only"))


def test_symbols_that_the_shim_lacks_are_named_and_nothing_is_left(tmp_path):
    source = "void _cudaMemsetAsync(void), _cudaFree(void);"
    source += "void entry(void) { _cudaMemsetAsync(); _cudaFree(); }"
    entry = build(tmp_path, source)
    before = set(tmp_path.iterdir())
    with pytest.raises(ModuleError, match=r"entry\.o: it needs _cudaFree, _cudaMemsetAsync, which"):
        link(entry, tmp_path / "entry.so")
    assert set(tmp_path.iterdir()) == before


def test_a_failure_leaves_the_old_library(tmp_path):
    old = tmp_path / "entry.so"
    old.write_text("old")
    with pytest.raises(ModuleError, match=r"absent\.o"):
        link(tmp_path / "absent.o", old)
    assert old.read_text() == "old"


def test_missing_compiler_is_named(tmp_path, monkeypatch):
    with pytest.raises(ModuleError, match="no C compiler for riscv64-linux-gnu"):
        link(tmp_path / "x.o", tmp_path / "x.so", host="riscv64-linux-gnu")
    monkeypatch.setenv("CC", "/absent/cc")
    assert compiler() is None
    monkeypatch.setenv("CC", f"{shutil.which('cc')} -O1")
    assert compiler() == [shutil.which("cc"), "-O1"]


def in_child(library: Path, **environment: str) -> int:
    command = [sys.executable, "-c", NEEDS_NO_DRIVER, library]
    return int(subprocess.check_output(command, text=True, env=os.environ | environment))


def test_without_a_driver_a_status_comes_back(tmp_path):
    library = tiny.store() / tiny.ARCH / HOST / "tiny_a.so"
    probe = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        assert in_child(library) == -1
    stub = tmp_path / "stub.c"
    stub.touch()
    command = [*compiler(), "-shared", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*command, stub], check=True)
    assert in_child(library, LD_LIBRARY_PATH=str(tmp_path)) == -2


ENTRY = """
#include <stdint.h>
#include <stddef.h>
void cuda_dialect_assert_success(int);
int _cudaLaunchKernelEx(const void *, void *, void **);
void *seen_stream, *seen_other;
int launched;
void entry(void **args, int32_t num_args) {
    char c[64] = {0};
    seen_stream = *(void **)args[1];
    seen_other = args[0];
    cuda_dialect_assert_success(*(int *)args[0]);
    cuda_dialect_assert_success(9);
    launched = _cudaLaunchKernelEx(c, NULL, NULL);
    *(int *)args[num_args - 1] = 0;
}
"""


@pytest.fixture
def entry(tmp_path, fake):
    """Return a caller of a C entry that asserts, and its library."""
    from ctm_rt import driver

    library = ctypes.CDLL(str(link(build(tmp_path, ENTRY), tmp_path / "entry.so")))
    context = driver.primary_context(0)

    def call(status: int, stream: int = 0) -> int:
        value, cell = ctypes.c_int(status), ctypes.c_void_p(0)
        args = (ctypes.c_void_p * 3)(ctypes.addressof(value), ctypes.addressof(cell), None)
        return library.ctm_rt_call_v1(
            library.entry,
            args,
            3,
            ctypes.byref(cell),
            ctypes.c_void_p(context),
            ctypes.c_void_p(stream),
        )

    return call, library


def test_a_failed_assertion_is_the_status_and_nothing_is_launched(entry, fake):
    call, library = entry
    assert call(7) == 7
    assert ctypes.c_int.in_dll(library, "launched").value == 7
    assert call(0) == 9  # the first failure of this call, not of the one before
    assert fake.calls("cuLaunchKernelEx") == []


def test_the_stream_travels_with_the_call(entry):
    call, library = entry
    call(0, stream=0xABCD)
    assert ctypes.c_void_p.in_dll(library, "seen_stream").value == 0xABCD
    call(0)
    assert ctypes.c_void_p.in_dll(library, "seen_stream").value is None


def test_the_context_is_current_inside_and_restored_after(entry, fake):
    from ctm_rt import driver

    call, _ = entry
    library = fake.library()
    before = ctypes.c_void_p()
    library.cuCtxGetCurrent(ctypes.byref(before))
    pushes = len(fake.calls("cuCtxPushCurrent"))
    call(0)
    after = ctypes.c_void_p()
    library.cuCtxGetCurrent(ctypes.byref(after))
    assert after.value == before.value
    assert len(fake.calls("cuCtxPushCurrent")) == pushes + 1
    assert len(fake.calls("cuCtxPopCurrent")) >= 1
    with driver.current(0):
        pushes = len(fake.calls("cuCtxPushCurrent"))
        call(0)
        assert len(fake.calls("cuCtxPushCurrent")) == pushes


def test_a_context_that_cannot_be_made_current_is_the_status(entry, fake):
    call, library = entry
    fake.fail("cuCtxPushCurrent", 201)
    launched = ctypes.c_int.in_dll(library, "launched")
    launched.value = -5
    assert call(0) == 201
    assert launched.value == -5  # the entry was not called
