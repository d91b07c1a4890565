"""The fake driver refuses what the real one refuses, and reads a cubin right."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from cuda.bindings import driver as cu

from ctm_rt import driver

INVALID_VALUE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE = 1, 200, 209, 400
OUT_OF_RESOURCES, UNSUPPORTED, IMPLICIT, INVALID_CLUSTER = 701, 900, 906, 912


def record(attribute: int, *words: int) -> bytes:
    return struct.pack("<BBH", 4, attribute, 4 * len(words)) + struct.pack(
        f"<{len(words)}I", *words
    )


def make_cubin(
    sizes: Sequence[int] = (8, 4),
    *,
    name: str = "k",
    registers: int = 32,
    static_smem: int = 0,
    block: Sequence[int] = (),
    arch: int = 90,
    specific: bool = True,
) -> bytes:
    """Return the parts of an ELF cubin that a driver reads before a launch."""
    parameters = [
        record(0x17, 0, ordinal | sum(sizes[:ordinal]) << 16, size << 18 | 0x1F000)
        for ordinal, size in enumerate(sizes)
    ]
    info = b"".join(reversed(parameters)) + struct.pack("<BBH", 3, 0x1B, 0xFF)
    if block:
        info += record(0x10, *block)
    sections = [
        ("", 0, b"", 0),
        (".nv.info", 1, record(0x2F, 6, registers), 0),
        (f".nv.info.{name}", 1, info, 0),
        (f".text.{name}", 1, bytes(16), 6 | registers << 24),
        (f".nv.shared.{name}", 8, static_smem + (1024 if arch >= 90 else 0), 0),
    ]
    names, at = b"", []
    for section in [*sections, (".shstrtab", 3, b"", 0)]:
        at.append(len(names))
        names += section[0].encode() + b"\0"
    sections.append((".shstrtab", 3, names, 0))
    body, headers = b"", b""
    for place, (_, kind, data, link) in zip(at, sections, strict=True):
        size = data if isinstance(data, int) else len(data)
        headers += struct.pack(
            "<IIQQQQIIQQ", place, kind, 0, 0, 64 + len(body), size, 0, link, 4, 0
        )
        body += b"" if isinstance(data, int) else data
    identity = b"\x7fELF\x02\x01\x01\x33\x07".ljust(16, b"\0")
    flags = arch | arch << 16 | (0x800 if specific else 0)
    fixed = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64,
                        len(sections), len(sections) - 1)  # fmt: skip
    return identity + fixed + body + headers


Load = Callable[..., int]


@pytest.fixture
def context(fake: ModuleType) -> Iterator[None]:
    with driver.current(0):
        yield


@pytest.fixture
def load(context: None) -> Iterator[Load]:
    """Return the kernel of a cubin made to measure."""
    libraries = []

    def load(**cubin: Any) -> int:
        image = make_cubin(**cubin)
        status, library = cu.cuLibraryLoadData(image, [], [], 0, [], [], 0)
        assert status == 0
        libraries.append(library)
        name = cubin.get("name", "k").encode()
        return int(driver.check("", cu.cuLibraryGetKernel(library, name)))

    yield load
    for library in libraries:
        assert cu.cuLibraryUnload(library)[0] == 0


@pytest.fixture
def stream(fake: ModuleType, context: None) -> Iterator[int]:
    handle = int(cu.cuStreamCreate(1)[1])
    yield handle
    fake.reset()
    cu.cuStreamDestroy(handle)


def launch(
    kernel: int,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (32, 1, 1),
    *,
    smem: int = 0,
    stream: int = 0,
    cluster: Sequence[int] = (),
) -> int:
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes, config.hStream = smem, cu.CUstream(stream)
    if cluster:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        (
            attribute.value.clusterDim.x,
            attribute.value.clusterDim.y,
            attribute.value.clusterDim.z,
        ) = cluster
        config.attrs, config.numAttrs = [attribute], 1
    values = (0x1122334455667788, 7), (ctypes.c_uint64, ctypes.c_int32)
    return int(cu.cuLaunchKernelEx(config, cu.CUkernel(kernel), values, 0)[0])


# ---- launches ------------------------------------------------------------------------------------


def test_a_launch_is_read_back(fake: ModuleType, load: Load, stream: int) -> None:
    kernel = load(name="kernel_x")
    assert launch(kernel, (6, 2, 1), (64, 2, 1), smem=1024, stream=stream, cluster=(2, 1, 1)) == 0
    (seen,) = fake.launches()
    assert seen == fake.Launch(
        call="cuLaunchKernelEx",
        kernel="kernel_x",
        grid=(6, 2, 1),
        block=(64, 2, 1),
        cluster=(2, 1, 1),
        dynamic_smem=1024,
        stream=stream,
        device=0,
        captured=False,
        params=(struct.pack("<Q", 0x1122334455667788), struct.pack("<i", 7)),
        attributes={4: 2},
    )
    fake.reset()
    assert fake.launches() == []


def test_a_plain_launch_is_logged_too(fake: ModuleType, load: Load) -> None:
    values = (1, 2), (ctypes.c_uint64, ctypes.c_int32)
    assert cu.cuLaunchKernel(load(), 3, 1, 1, 32, 1, 1, 0, 0, values, 0)[0] == 0
    (seen,) = fake.launches()
    assert (seen.call, seen.grid, seen.params[1]) == (
        "cuLaunchKernel",
        (3, 1, 1),
        bytes([2, 0, 0, 0]),
    )


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ({"grid": (1, 65535, 65535)}, 0),
        ({"grid": (2**31 - 1, 1, 1)}, 0),
        ({"grid": (2**31, 1, 1)}, INVALID_VALUE),
        ({"grid": (0, 1, 1)}, INVALID_VALUE),
        ({"grid": (1, 0, 1)}, INVALID_VALUE),
        ({"grid": (1, 65536, 1)}, INVALID_VALUE),
        ({"grid": (1, 1, 65536)}, INVALID_VALUE),
        ({"block": (1024, 1, 1)}, 0),
        ({"block": (1, 1, 64)}, 0),
        ({"block": (1, 1, 65)}, INVALID_VALUE),
        ({"block": (0, 1, 1)}, INVALID_VALUE),
        ({"block": (1025, 1, 1)}, INVALID_VALUE),
        ({"block": (65536, 65536, 1)}, INVALID_VALUE),
        ({"smem": 49152}, 0),
        ({"smem": 49153}, INVALID_VALUE),
        ({"grid": (8, 1, 1), "cluster": (8, 1, 1)}, 0),
        ({"grid": (6, 4, 2), "cluster": (2, 2, 2)}, 0),
        ({"grid": (16, 1, 1), "cluster": (16, 1, 1)}, INVALID_CLUSTER),
        ({"grid": (9, 1, 1), "cluster": (2, 1, 1)}, INVALID_CLUSTER),
        ({"grid": (8, 1, 1), "cluster": (1, 2, 1)}, INVALID_CLUSTER),
        ({"grid": (8, 1, 1), "cluster": (2, 0, 1)}, INVALID_CLUSTER),
        ({"stream": 0x7777}, INVALID_HANDLE),
    ],
)
def test_shapes(fake: ModuleType, load: Load, shape: dict[str, Any], code: int) -> None:
    assert launch(load(), **shape) == code
    assert len(fake.launches()) == (code == 0)


def test_shared_memory_needs_the_attribute(load: Load) -> None:
    kernel, optin = load(static_smem=1000), 232448 - 1000
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert launch(kernel, smem=49152 - 1000) == 0
    assert launch(kernel, smem=49152 - 999) == INVALID_VALUE
    assert cu.cuKernelSetAttribute(attribute, optin + 1, kernel, 0)[0] == INVALID_VALUE
    assert cu.cuKernelSetAttribute(attribute, optin, kernel, 0)[0] == 0
    assert cu.cuKernelGetAttribute(attribute, kernel, 0) == (0, optin)
    assert launch(kernel, smem=optin) == 0
    assert launch(kernel, smem=optin + 1) == INVALID_VALUE


def test_large_clusters_need_the_attribute(load: Load) -> None:
    kernel = load()
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert cu.cuKernelSetAttribute(attribute, 1, kernel, 0)[0] == 0
    assert launch(kernel, (16, 1, 1), cluster=(16, 1, 1)) == 0
    assert launch(kernel, (17, 1, 1), cluster=(17, 1, 1)) == INVALID_CLUSTER


def test_clusters_need_hopper(fake: ModuleType, load: Load) -> None:
    fake.set_devices(1, cc=(8, 0))
    assert launch(load(arch=80, specific=False), (2, 1, 1), cluster=(2, 1, 1)) == INVALID_CLUSTER


def test_registers_and_compiled_block_sizes_count(load: Load) -> None:
    many = load(registers=168)
    assert launch(many, block=(384, 1, 1)) == 0
    assert launch(many, block=(385, 1, 1)) == OUT_OF_RESOURCES
    fixed = load(block=(128, 1, 1))
    assert launch(fixed, block=(128, 1, 1)) == 0
    assert launch(fixed, block=(64, 1, 1)) == INVALID_VALUE


@pytest.mark.parametrize(
    ("arch", "specific", "device", "runs"),
    [(90, True, (9, 0), True), (80, False, (8, 6), True), (86, False, (8, 0), False),
     (80, False, (9, 0), False), (100, True, (10, 3), False), (100, False, (10, 3), True)],
)  # fmt: skip
def test_kernels_run_where_they_were_compiled_for(
    fake: ModuleType, load: Load, arch: int, specific: bool, device: tuple[int, int], runs: bool
) -> None:
    fake.set_devices(1, cc=device)
    assert launch(load(arch=arch, specific=specific)) == (0 if runs else NO_BINARY)


def test_stale_kernels_are_refused(context: None) -> None:
    library = cu.cuLibraryLoadData(make_cubin(), [], [], 0, [], [], 0)[1]
    kernel = int(cu.cuLibraryGetKernel(library, b"k")[1])
    assert cu.cuLibraryGetKernel(library, b"other")[0] == 500
    assert cu.cuLibraryUnload(library)[0] == 0
    assert launch(kernel) == INVALID_HANDLE
    assert cu.cuLibraryGetKernel(library, b"k")[0] == INVALID_HANDLE
    assert cu.cuLibraryUnload(library)[0] == INVALID_HANDLE


def test_what_is_no_cubin_is_refused(context: None) -> None:
    for image in (bytes(64), b"\x7fELF\x02\x01\x01".ljust(64, b"\0")):
        assert cu.cuLibraryLoadData(image, [], [], 0, [], [], 0)[0] == INVALID_IMAGE


def test_a_launch_needs_a_context_or_a_stream(fake: ModuleType, load: Load, stream: int) -> None:
    kernel = load()
    context = cu.cuCtxPopCurrent()[1]
    try:
        assert launch(kernel) == 201
        assert launch(kernel, stream=stream) == 0
    finally:
        cu.cuCtxPushCurrent(context)


def test_a_kernel_may_be_played(fake: ModuleType, load: Load) -> None:
    played = []
    fake.on_launch(played.append)
    launch(load())
    assert played == fake.launches()
    assert len(played) == 1


def test_captured_launches_are_marked(fake: ModuleType, load: Load, stream: int) -> None:
    kernel = load()
    fake.set_capturing(stream, True)
    assert launch(kernel, stream=stream) == 0
    assert [seen.captured for seen in fake.launches()] == [True]
    assert fake.capture_status(stream) == 1


# ---- memory and streams --------------------------------------------------------------------------


def test_copies_are_checked(context: None) -> None:
    ptr = driver.alloc(100, 0)
    host = ctypes.create_string_buffer(200)
    at = ctypes.addressof(host)
    for offset, size, code in ((0, 100, 0), (40, 60, 0), (0, 101, 1), (40, 61, 1), (100, 1, 1)):
        assert cu.cuMemcpyHtoDAsync(ptr + offset, at, size, 0)[0] == code
        assert cu.cuMemcpyDtoHAsync(at, ptr + offset, size, 0)[0] == code
        assert cu.cuMemsetD8Async(ptr + offset, 0, size, 0)[0] == code
    assert cu.cuMemcpyHtoDAsync(ptr, at, 1, 0x7777)[0] == INVALID_HANDLE
    assert cu.cuMemcpyHtoDAsync(at, at, 1, 0)[0] == INVALID_VALUE
    driver.free(ptr, 0)
    assert cu.cuMemcpyHtoDAsync(ptr, at, 1, 0)[0] == INVALID_VALUE


def test_fresh_memory_is_not_zero(context: None) -> None:
    ptr = driver.alloc(16, 0)
    assert ctypes.string_at(ptr, 16) == b"\xa5" * 16
    driver.free(ptr, 0)


def test_too_much_is_out_of_memory(context: None) -> None:
    assert cu.cuMemAlloc(1 << 50)[0] == 2
    assert cu.cuMemAlloc(0)[0] == INVALID_VALUE


def test_work_needs_a_context(fake: ModuleType) -> None:
    assert cu.cuMemAlloc(1)[0] == cu.cuMemFree(1)[0] == cu.cuStreamCreate(0)[0] == 201
    assert cu.cuMemsetD8Async(1, 0, 1, 0)[0] == 201


def test_a_capture_is_spoilt_by_what_spoils_it(fake: ModuleType, context: None) -> None:
    stream = int(cu.cuStreamCreate(0)[1])
    event = cu.cuEventCreate(0)[1]
    for spoil, code in (
        (lambda: cu.cuStreamSynchronize(stream), UNSUPPORTED),
        (lambda: cu.cuEventQuery(event), UNSUPPORTED),
        (lambda: cu.cuMemAlloc(1), UNSUPPORTED),
        (lambda: cu.cuCtxSynchronize(), UNSUPPORTED),
        (lambda: cu.cuMemsetD8Async(0, 0, 0, 0), IMPLICIT),
    ):
        fake.set_capturing(stream, True)
        assert spoil()[0] == code
        assert fake.capture_status(stream) == 2
        fake.set_capturing(stream, False)
    cu.cuEventDestroy(event)
    cu.cuStreamDestroy(stream)


def test_streams_and_events_of_different_devices_do_not_mix(fake: ModuleType) -> None:
    fake.set_devices(2)
    with driver.current(0):
        event = cu.cuEventCreate(0)[1]
    with driver.current(1):
        stream = cu.cuStreamCreate(0)[1]
        assert cu.cuEventRecord(event, stream)[0] == INVALID_HANDLE
        assert cu.cuStreamWaitEvent(stream, event, 0)[0] == 0
    assert cu.cuStreamDestroy(stream)[0] == 0
    assert cu.cuStreamDestroy(stream)[0] == INVALID_HANDLE
    assert cu.cuEventDestroy(event)[0] == 0


# ---- steering ------------------------------------------------------------------------------------


def test_faults_are_counted(fake: ModuleType, context: None) -> None:
    fake.fail("cuMemAlloc", 2, times=2)
    statuses = [cu.cuMemAlloc(8) for _ in range(3)]
    assert [int(status) for status, _ in statuses] == [2, 2, 0]
    assert fake.calls("cuMemAlloc") == [(8, 0)] * 3
    driver.free(int(statuses[-1][1]), 0)
    fake.fail("cuMemAlloc", 2)
    fake.reset()
    assert fake.calls("cuMemAlloc") == []
    driver.free(driver.alloc(8, 0), 0)


def test_missing_entry_points_are_missing(fake: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="cuGraphCreate"):
        cu.cuGraphCreate(0)


# ---- tensor maps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"address": 0x1008}, INVALID_VALUE),
        ({"strides": [250, 4000]}, INVALID_VALUE),
        ({"box": [64, 257, 1]}, INVALID_VALUE),
        ({"box": [128, 1, 1]}, INVALID_VALUE),  # 256 bytes under a swizzle of 128
        ({"dims": [128, 0, 3]}, INVALID_VALUE),
    ],
)
def test_tensor_maps(fake: ModuleType, changes: dict[str, Any], code: int) -> None:
    given = {"address": 0x1000, "dims": [128, 5, 3], "strides": [256, 4096], "box": [64, 4, 1]}
    given |= changes
    space = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(space) + 63) // 64 * 64
    encode = fake.library().cuTensorMapEncodeTiled
    encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    encode.argtypes += [ctypes.c_void_p] * 4 + [ctypes.c_int] * 4
    dims, strides = ((ctypes.c_uint64 * 3)(*given[key]) for key in ("dims", "strides"))
    box, ones = ((ctypes.c_uint32 * 3)(*values) for values in (given["box"], [1, 1, 1]))
    driver.init()
    f16, swizzle_128 = 6, 3
    status = encode(at, f16, 3, given["address"], dims, strides, box, ones, 0, swizzle_128, 0, 0)
    assert status == code
    if not code:
        assert struct.unpack_from("<QII", ctypes.string_at(at, 128)) == (0x1000, f16, 3)
