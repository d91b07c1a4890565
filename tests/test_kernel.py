"""Binding and launching: what reaches the driver, what is refused, and what stays alive."""

import gc
import struct
import sys
import threading
from typing import Any

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.descriptors import fill, make_ffi, read_header
from ctm_rt.errors import ArgumentError, DriverError, ModuleError
from ctm_rt.memory import DeviceArray
from ctm_rt.modules.arguments import KnownArguments
from ctm_rt.modules.block import Block
from ctm_rt.modules.manifest import read_manifest
from ctm_rt.tensor import DType, TensorView, view
from tests import tiny

N, K = 5, 3


@pytest.fixture
def kernel(fake):
    return ctm_rt.load("tiny_a", store=tiny.store())


@pytest.fixture
def arguments(fake) -> dict[str, Any]:
    return {
        "x": DeviceArray.empty((N, K, 64), "f16"),
        "bias": DeviceArray.empty((K,), "f32"),
        "out": DeviceArray.empty((N, K, 64), "f16"),
        "counters": DeviceArray.empty((7,), "i32"),
        "scale": 0.5,
        "count": 2,
    }


def changed(array: DeviceArray, **fields: Any) -> TensorView:
    return view(array)._replace(**fields)


def stream(device: int = 0) -> int:
    with driver.current(device):
        return int(driver.check("cuStreamCreate", driver.cu.cuStreamCreate(1)))


# ---- what reaches the driver -------------------------------------------------------------------


def test_one_launch_with_the_planned_shape_and_the_right_parameters(kernel, arguments, fake):
    queue = stream()
    kernel.bind(**arguments)(queue)
    (launch,) = fake.launches()
    assert (launch.grid, launch.block, launch.cluster) == ((N, 2, 1), (64, 1, 1), (1, 1, 1))
    assert (launch.dynamic_smem, launch.stream, launch.device) == (tiny.SMEM_NBYTES, queue, 0)
    x, bias, out, counters, scale, count = launch.params[:6]
    assert struct.unpack_from("<Q2i2q", x) == (arguments["x"].ptr, N, K, K * 64, 64)
    assert struct.unpack_from("<Qi", bias) == (arguments["bias"].ptr, K)
    assert struct.unpack_from("<Q2i2q", out) == (arguments["out"].ptr, N, K, K * 64, 64)
    assert struct.unpack_from("<Qi", counters) == (arguments["counters"].ptr, 7)
    assert (struct.unpack("<f", scale), struct.unpack("<i", count)) == ((0.5,), (2,))


def test_strides_of_a_slice_travel(kernel, arguments, fake):
    fused = DeviceArray.empty((N, 4 * K, 64), "f16")
    part = changed(fused, shape=(N, K, 64), ptr=fused.ptr + 2 * K * 64)
    kernel.bind(**arguments | {"x": part})()
    x = fake.launches()[0].params[0]
    assert struct.unpack_from("<Q2i2q", x) == (part.ptr, N, K, 4 * K * 64, 64)


def test_an_absent_optional_is_a_null_address(kernel, arguments, fake):
    del arguments["bias"]
    kernel.bind(**arguments)()
    kernel.bind(**arguments, bias=None)()
    for launch in fake.launches():
        assert struct.unpack_from("<Qi", launch.params[1]) == (0, 0)


def test_a_launch_repeats_and_follows_its_stream(kernel, arguments, fake):
    launch, queues = kernel.bind(**arguments), [0, stream(), stream()]
    for queue in queues:
        launch(queue)
    launch(None)
    seen = fake.launches()
    assert [record.stream for record in seen] == [*queues, 0]
    assert len({record.params for record in seen}) == 1


def test_an_object_with_a_stream_and_what_is_none(kernel, arguments, fake):
    class Queue:
        handle = stream()

        def __cuda_stream__(self):
            return 0, self.handle

    launch = kernel.bind(**arguments)
    launch(Queue())
    assert fake.launches()[0].stream == Queue.handle
    for wrong in (True, -1, 1.0, "0"):
        with pytest.raises(ArgumentError, match=r"^stream: "):
            launch(wrong)
    assert len(fake.launches()) == 1


def test_an_output_without_elements_launches_nothing(kernel, arguments, fake):
    empty = DeviceArray.empty((0, K, 64), "f16")
    kernel.bind(**arguments | {"x": empty, "out": empty})()
    assert fake.launches() == []


def test_threads_may_share_a_launch(kernel, arguments, fake):
    launch, queues = kernel.bind(**arguments), [stream() for _ in range(8)]

    def work(queue):
        for _ in range(200):
            launch(queue)

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [record.stream for record in fake.launches()]
    assert {queue: seen.count(queue) for queue in queues} == dict.fromkeys(queues, 200)


def test_a_second_device_and_the_callers_context(kernel, arguments, fake, tmp_path):
    fake.set_devices(2)
    kernel = ctm_rt.load(tiny.copy("tiny_a", tmp_path), device=1)
    there = {
        name: DeviceArray.empty(value.shape, value.dtype, device=1)
        if isinstance(value, DeviceArray)
        else value
        for name, value in arguments.items()
    }
    before = driver.cu.cuCtxGetCurrent()
    queue = stream(1)
    kernel.bind(**there)(queue)
    assert driver.cu.cuCtxGetCurrent() == before
    kernel.bind(**arguments)()
    first, second = fake.launches()
    assert (first.device, first.stream, second.device) == (1, queue, 0)


@pytest.mark.parametrize("name", ["tiny_a", "dynamic", "partly_static", "widths", "two_streams"])
def test_the_block_is_what_the_builders_build(name):
    """Bit for bit, for every parameter, with and without gaps between the fields."""
    library = next(tiny.store().rglob("tiny_a.so")) if name == "tiny_a" else tiny.zoo(name)
    wrapper = read_header(library.with_suffix(".h"))
    ffi = make_ffi(wrapper)
    values, built = [], {}
    for at, parameter in enumerate(wrapper.parameters):
        if parameter.kind == "tensor":
            ptr = 0x7F00_0000_0000 + 256 * at
            shape = [2**31 - 1 - i for i in range(parameter.shape_slots)]
            strides = [2 ** (parameter.stride_bits - 2) + i for i in range(parameter.stride_slots)]
            values += [ptr, *shape, *strides]
            built[parameter.name] = fill.strided(ffi, parameter, ptr, shape, strides)
        elif parameter.kind == "scalar":
            values.append(at)
            built[parameter.name] = fill.scalar(ffi, parameter, at)
    block = Block(ffi, wrapper)
    memory, base = block.fill(values)
    args = ffi.cast("void **", base)
    for at, parameter in enumerate(wrapper.parameters):
        if parameter.kind == "stream":
            assert int(ffi.cast("uintptr_t", args[at])) == base + block.stream_at
            continue
        nbytes = ffi.sizeof(parameter.base)
        expected = bytes(ffi.buffer(built[parameter.name], nbytes))
        assert bytes(ffi.buffer(args[at], nbytes)) == expected
    assert block.num_args == len(wrapper.parameters) + 1
    del memory


# ---- what is refused ---------------------------------------------------------------------------

REFUSALS = {
    "missing": ("out", None, "f16 (n, k, 64), got nothing"),
    "host": ("x", np.zeros((N, K, 64), np.float16), "an array on a CUDA device, got host memory"),
    "dtype": ("x", {"dtype": DType("bf16")}, "dtype f16, got bf16"),
    "wide integers": ("counters", {"dtype": DType("i64")}, "dtype i32, got i64"),
    "rank": ("x", {"shape": (N, 64), "strides": (64, 1)}, f"f16 (n, k, 64), got ({N}, 64)"),
    "fixed extent": ("x", {"shape": (N, K, 32)}, f"f16 (n, k, 64), got ({N}, {K}, 32)"),
    "one-axis tuple": ("bias", {"shape": (), "strides": ()}, "f32 (k,), got ()"),
    "named extent": ("bias", {"shape": (K + 1,)}, f"k {K}, got {K + 1}"),
    "other named extent": ("out", {"shape": (N + 1, K, 64)}, f"n {N}, got {N + 1}"),
    "device": ("bias", {"device": 1}, "device 0, like x, got device 1"),
    "read-only output": ("out", {"readonly": True}, "a writable array, got a read-only one"),
    "read-only counters": ("counters", {"readonly": True}, "a writable array"),
    "innermost stride": ("x", {"strides": (64 * K, 64, 2)}, "a contiguous innermost axis, got str"),
    "innermost stride of a vector": ("bias", {"strides": (2,)}, "a contiguous innermost axis"),
    "address": ("x", {"ptr": 4098}, "address and outer strides in multiples of 16 bytes, got addr"),
    "stride": (
        "x",
        {"strides": (64 * K + 4, 64, 1)},
        "address and outer strides in multiples of 16 bytes",
    ),
    "negative stride": (
        "out",
        {"strides": (-4, 64, 1)},
        "address and outer strides in multiples of 16 bytes",
    ),
    "extent past int32": (
        "counters",
        {"shape": (2**31,)},
        "a value that fits tiny_a_Tensor_counters_t",
    ),
    "no array": ("x", 3, "an array (NumPy, DLPack or CUDA array interface), got int"),
    "no number": ("scale", "1", "a value that fits float, got '1'"),
    "no scalar": ("scale", None, "a value that fits float, got None"),
    "float for an integer": ("count", 2.0, "a value that fits int32_t, got 2.0"),
    "integer past int32": ("count", 2**31, "a value that fits int32_t, got 2147483648"),
    "float past f32": ("scale", 1e39, "a value that fits float, got 1e+39"),
    "unknown": ("y", 1, "one of x, bias, out, counters, scale, count, got no such parameter"),
    "stream": ("stream", 0, "one of x, bias, out, counters, scale, count, got no such parameter"),
}


@pytest.mark.parametrize(("name", "value", "reason"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_name_argument_expected_and_got(kernel, arguments, fake, name, value, reason):
    if isinstance(value, dict):
        value = changed(arguments[name], **value)
    with pytest.raises(ArgumentError) as refusal:
        kernel.bind(**arguments | {name: value})
    assert str(refusal.value).startswith(f"{name}: expected {reason}")
    assert refusal.value.name == name
    assert fake.launches() == []


def test_layout_of_an_empty_input_does_not_matter(kernel, arguments):
    odd = changed(arguments["counters"], shape=(0,), strides=(3,), ptr=0)
    kernel.bind(**arguments | {"counters": odd})()


def test_a_device_without_the_module_is_refused(kernel, arguments, fake):
    there = {
        name: changed(value, device=3) if isinstance(value, DeviceArray) else value
        for name, value in arguments.items()
    }
    with pytest.raises(ArgumentError, match="device: expected one that tiny_a runs on: 0, got 3"):
        kernel.bind(**there)


def test_header_and_manifest_must_agree():
    manifest = read_manifest(next(tiny.store().rglob("tiny_a.json")))
    wrapper = read_header(tiny.stranger().with_suffix(".h"))
    with pytest.raises(ModuleError, match=r"tiny_a: header declares .* manifest tells of"):
        KnownArguments(make_ffi(wrapper), wrapper, manifest)


# ---- failures and lifetimes --------------------------------------------------------------------


class Owner:
    """Stands for a Workspace and notes what it is told."""

    def __init__(self, refuse=False):
        self.told, self.refuse = [], refuse

    def claim(self, queue):
        self.told.append(queue)
        if self.refuse:
            raise ArgumentError("workspace", "one stream", "two")

    def mark_dirty(self):
        self.told.append("dirty")


def test_a_failed_launch_says_so_and_dirties_the_workspace(kernel, arguments, fake):
    owner = Owner()
    launch = kernel.bind(**arguments, workspace_owner=owner)
    launch()
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(DriverError, match=r"tiny_a.* failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        launch(0)
    launch(0)
    assert owner.told == [0, 0, "dirty", 0]
    assert len(fake.launches()) == 2


def test_a_claim_that_is_refused_launches_nothing(kernel, arguments, fake):
    launch = kernel.bind(**arguments, workspace_owner=Owner(refuse=True))
    with pytest.raises(ArgumentError, match=r"^workspace: "):
        launch()
    assert fake.launches() == []


def test_a_launch_keeps_its_arrays_and_no_longer(kernel, fake):
    def bound():
        return kernel.bind(
            x=DeviceArray.empty((N, K, 64), "f16"),
            out=DeviceArray.empty((N, K, 64), "f16"),
            counters=DeviceArray.empty((7,), "i32"),
            scale=1,
            count=1,
        )

    gc.collect()
    before = fake.live_allocations()
    launch = bound()
    gc.collect()
    assert fake.live_allocations() == before + 3
    launch()
    del launch
    assert fake.live_allocations() == before


def test_a_launch_may_be_kept_with_other_owners(kernel, arguments, fake):
    """As for equal arguments that belong to others."""
    owner = Owner()
    launch = kernel.bind(**arguments)
    before, count = sys.getrefcount(launch), sys.getrefcount(arguments)
    kept = launch.keeping((arguments,), owner)
    kept(0)
    launch(0)
    assert owner.told == [0]
    first, second = fake.launches()
    assert first == second
    assert sys.getrefcount(arguments) == count + 1
    del kept
    assert (sys.getrefcount(launch), sys.getrefcount(arguments)) == (before, count)


def test_many_calls_leave_counts_level(kernel, arguments):
    x, queue = arguments["x"], stream()
    for _ in range(10):
        kernel.bind(**arguments)(queue)
    gc.collect()
    before = sys.getrefcount(x), sys.getrefcount(queue), len(gc.get_objects())
    for _ in range(2000):
        kernel.bind(**arguments)(queue)
    launch = kernel.bind(**arguments)
    for _ in range(100_000):
        launch(queue)
    del launch
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(queue)) == before[:2]
    assert abs(len(gc.get_objects()) - before[2]) < 50
