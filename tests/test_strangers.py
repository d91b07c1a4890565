"""Kernels of which only the header is known, and launching with host arrays."""

import ctypes
import gc
import runpy
import shutil
import struct
import sys

import ml_dtypes
import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import DeviceArray
from ctm_rt.tensor import view
from tests import tiny

ROW = 64


@pytest.fixture
def stranger(fake):
    return ctm_rt.load(tiny.stranger())


def slots(array):
    return ctm_rt.Slots(array, shape=(0,), strides=())


def test_a_stranger_launches_with_slots(stranger, fake):
    a, b, out = (DeviceArray.empty((9, ROW), "f32") for _ in range(3))
    assert stranger.manifest is None
    stranger.bind(a=slots(a), b=slots(b), out=slots(out), scale=2)()
    (launch,) = fake.launches()
    assert (launch.grid, launch.block) == ((9, 1, 1), (ROW, 1, 1))
    for array, raw in zip((a, b, out), launch.params, strict=False):
        assert struct.unpack_from("<Qi", raw) == (array.ptr, 9)
    assert struct.unpack("<f", launch.params[3]) == (2.0,)


STRANGER_REFUSALS = {
    "which axis": ("a", lambda a: a, "1 shape and 0 stride slots filled from 2 axes, by ctm_rt.Sl"),
    "too many": ("a", lambda a: ctm_rt.Slots(a, (0, 1), ()), "1 shape and 0 stride slots"),
    "too few": ("a", lambda a: ctm_rt.Slots(a, (), ()), "1 shape and 0 stride slots"),
    "no such axis": ("a", lambda a: ctm_rt.Slots(a, (2,), ()), "1 shape and 0 stride slots"),
    "host": ("b", lambda a: slots(np.zeros((9, ROW), "f4")), "an array on a CUDA device"),
    "other device": (
        "b",
        lambda a: slots(view(a)._replace(device=1)),
        "device 0, like a, got device 1",
    ),
    "missing": ("out", None, "a tensor (scaled_add_Tensor_out_t *), got nothing"),
    "unknown": ("c", lambda a: 1, "one of a, b, out, scale, got no such parameter"),
    "scalar": ("scale", lambda a: "1", "a value that fits float, got '1'"),
    "no array": ("a", lambda a: ctm_rt.Slots(1, (0,), ()), "an array (NumPy, DLPack"),
}


@pytest.mark.parametrize(
    ("name", "value", "reason"), STRANGER_REFUSALS.values(), ids=STRANGER_REFUSALS.keys()
)
def test_a_strangers_refusals(stranger, fake, name, value, reason):
    given = {n: slots(DeviceArray.empty((9, ROW), "f32")) for n in ("a", "b", "out")}
    given["scale"] = 2.0
    if value is None:
        del given[name]
    else:
        given[name] = value(given["a"].array)
    with pytest.raises(ArgumentError) as refusal:
        stranger.bind(**given)
    assert str(refusal.value).startswith(f"{name}: expected {reason}")
    assert fake.launches() == []


# ---- every form of parameter -------------------------------------------------------------------


def device_array(*shape, dtype="f16"):
    return DeviceArray.empty(shape, dtype)


def turned(array, *axes):
    """Return a view of the array with its axes in another order."""
    tensor = view(array)
    shape, strides = ([values[axis] for axis in axes] for values in (tensor.shape, tensor.strides))
    return tensor._replace(shape=tuple(shape), strides=tuple(strides))


def read(kernel, packed):
    """Return what each slot of the packed array points to, tensors as (data, shape, strides)."""
    ffi, at, found = kernel._library.ffi, 0, {}
    args = ffi.cast("void **", packed.args)
    for parameter in kernel.wrapper.parameters:
        cells = [args[at + i] for i in range(parameter.length)]
        at += parameter.length
        if parameter.kind in ("tensor", "tensor_list"):
            base = parameter.base.replace("TensorList", "Tensor")
            structs = [ffi.cast(f"{base} *", cell) for cell in cells]
            found[parameter.name] = [
                (
                    int(ffi.cast("uintptr_t", struct.data)),
                    list(getattr(struct, "dynamic_shapes", ())),
                    list(getattr(struct, "dynamic_strides", ())),
                )
                for struct in structs
            ]
        elif parameter.kind != "stream":
            ctype = {"pointer": "uintptr_t"}.get(parameter.kind, parameter.base)
            found[parameter.name] = [ffi.cast(f"{ctype} *", cell)[0] for cell in cells]
    assert at + 1 == packed.num_args
    return found


def bound(name, **arguments):
    """Bind, launch, and return what the entry got."""
    kernel = ctm_rt.load(tiny.zoo(name))
    if name != "tuples":  # its entry counts a plain int beside a Uint8, which its header leaves out
        kernel.bind(**arguments)()
    return read(kernel, kernel._arguments.pack(dict(arguments)))


def test_all_dynamic_tensors_need_no_slots(fake):
    q, table, row, column = (device_array(*shape) for shape in ((2, 3, 4, 5), (6, 7), (8,), (9,)))
    got = bound("dynamic", q=q, table=turned(table, 1, 0), row=row, column=column)
    assert got == {
        "q": [(q.ptr, [2, 3, 4, 5], [60, 20, 5])],
        "table": [(table.ptr, [7, 6], [7])],  # the axis of stride 1 has no slot, wherever it is
        "row": [(row.ptr, [8], [])],
        "column": [(column.ptr, [9], [1])],
    }
    assert len(fake.launches()) == 1


def test_size_one_axes_do_not_hide_the_innermost(fake):
    q, table, row = device_array(1, 1, 1, 1), device_array(6, 1), device_array(1)
    got = bound("dynamic", q=q, table=table, row=row, column=row)
    assert got["q"] == [(q.ptr, [1, 1, 1, 1], [1, 1, 1])]
    assert got["table"] == [(table.ptr, [6, 1], [1])]


def test_static_tensors_must_be_packed_or_explained(fake):
    pool, narrow, wide = device_array(2, 128, 3, 64), device_array(9, 64), device_array(4, 64)
    point = view(device_array(1))._replace(shape=(), strides=())
    given = {
        "pool": ctm_rt.Slots(pool, shape=(0, 2), strides=(0, 1, 2)),
        "no_strides": ctm_rt.Slots(narrow, shape=(0,), strides=()),
        "no_shapes": ctm_rt.Slots(wide, shape=(), strides=(0,)),
        "whole": wide,
        "point": point,
    }
    got = bound("partly_static", **given)
    assert got["pool"] == [(pool.ptr, [2, 3], [128 * 3 * 64, 3 * 64, 64])]
    assert got["no_shapes"] == [(wide.ptr, [], [64])]
    assert got["whole"] == [(wide.ptr, [], [])]
    with pytest.raises(ArgumentError, match=r"^whole: expected 0 shape and 0 stride slots .*Slots"):
        bound("partly_static", **given | {"whole": turned(device_array(64, 4), 1, 0)})
    assert bound("partly_static", **given | {"no_shapes": wide}) == got  # only one reading


def test_no_axis_of_stride_one_is_ambiguous(fake):
    row, gaps = device_array(8), view(device_array(6, 7, 2))._replace(shape=(6, 7), strides=(14, 2))
    q = device_array(1, 1, 1, 1)
    with pytest.raises(ArgumentError, match=r"^table: .*strides \(14, 2\), no Slots"):
        bound("dynamic", q=q, table=gaps, row=row, column=row)


def test_lists_of_tensors(fake):
    three = [device_array(i, 5) for i in (1, 2, 3)]
    one, pair = [device_array(2, 3, 4)], (device_array(4, 5), device_array(6, 7))
    got = bound("lists", three=three, one=one, pair=pair)
    assert got["three"] == [(array.ptr, list(array.shape), [5]) for array in three]
    assert got["one"] == [(one[0].ptr, [2, 3, 4], [12, 4])]
    assert got["pair"] == [(pair[0].ptr, [4, 5], [5]), (pair[1].ptr, [6, 7], [7])]
    with pytest.raises(ArgumentError, match=r"^three: expected a sequence of 3 arrays, got 2 of"):
        bound("lists", three=three[:2], one=one, pair=pair)
    with pytest.raises(ArgumentError, match=r"^pair\[1\]: expected an array on a CUDA device"):
        bound("lists", three=three, one=one, pair=(pair[0], np.zeros((6, 7), "f2")))
    with pytest.raises(
        ArgumentError, match=r"^one: expected a sequence of 1 arrays, got DeviceArr"
    ):
        bound("lists", three=three, one=one[0], pair=pair)


def test_pointers_are_addresses_or_arrays(fake):
    array = device_array(4)
    assert bound("pointers", a=array, b=64) == {"a": [array.ptr], "b": [64]}
    for wrong in (-1, 2**64, True, "0", np.zeros(3)):
        with pytest.raises(ArgumentError, match=r"^b: expected"):
            bound("pointers", a=array, b=wrong)


def test_numbers_and_tuples(fake):
    numbers = {"boolean": True, "i8": -8, "u8": 8, "i16": -16, "u16": 16, "i32": -32, "u32": 32}
    numbers |= {"i64": -(2**63), "u64": 2**64 - 1, "f16": 1, "bf16": 1, "f32": 1.5, "f64": 0.1}
    got = bound("numbers", **numbers, tf32=1.5)
    assert {name: got[name] for name in ("i8", "i64", "u64", "f32", "f64")} == {
        name: [numbers[name]] for name in ("i8", "i64", "u64", "f32", "f64")
    }
    assert (got["f16"], got["bf16"]) == ([0x3C00], [0x3F80])
    got = bound("tuples", dims=(7, 9), far=(2**40, 3), near=[1], fixed=(), single=(5,))
    assert (got["dims"], got["far"], got["fixed"]) == ([7, 9], [2**40, 3], [])
    for wrong in ((7,), (7, 9, 1), 7, None):
        with pytest.raises(ArgumentError, match=r"^dims: expected"):
            bound("tuples", dims=wrong, far=(1, 3), near=[1], fixed=(), single=(5,))


def test_every_stream_of_a_wrapper_is_the_launchs_own(fake):
    with driver.current(0):
        queue = int(driver.check("cuStreamCreate", driver.cu.cuStreamCreate(1)))
    ctm_rt.load(tiny.zoo("two_streams")).bind(n=1)(queue)
    assert [launch.stream for launch in fake.launches()] == [queue, queue]


def test_a_wrapper_without_a_stream_runs_on_the_default_one(fake):
    with driver.current(0):
        queue = int(driver.check("cuStreamCreate", driver.cu.cuStreamCreate(1)))
    workspace = ctm_rt.Workspace()
    launch = ctm_rt.load(tiny.zoo("all_absent")).bind(workspace_owner=workspace)
    for other in (queue, 2):
        refusal = rf"^stream: expected the default stream, as \w+ takes none, got {other:#x}$"
        with pytest.raises(ArgumentError, match=refusal):
            launch(other)
    for legacy in (None, 0, 1):
        launch(legacy)
    assert [launch.stream for launch in fake.launches()] == [0, 0, 0]


def test_a_static_tuple_needs_no_value(fake):
    tuples = {"dims": (7, 9), "far": (2**40, 3), "near": [1], "single": (5,)}
    assert bound("tuples", **tuples) == bound("tuples", **tuples, fixed=())
    with pytest.raises(ArgumentError, match=r"^fixed: expected a sequence of 0 integers, got 1"):
        bound("tuples", **tuples, fixed=(1,))
    with pytest.raises(ArgumentError, match=r"^fix: expected one of dims, far, near, fixed, sing"):
        bound("tuples", **tuples, fix=())
    del tuples["near"]
    with pytest.raises(ArgumentError, match=r"^near: expected a int_tuple \(uint8_t \*\), got not"):
        bound("tuples", **tuples)


def test_without_an_argument(fake):
    ctm_rt.load(tiny.zoo("all_absent")).bind()()
    assert len(fake.launches()) == 1


# ---- host arrays -------------------------------------------------------------------------------


@pytest.fixture
def adds(fake):
    """Let the fake device compute what scaled_add computes."""

    def act(launch):
        a, b, out = (struct.unpack_from("<Qi", raw) for raw in launch.params[:3])
        (scale,) = struct.unpack("<f", launch.params[3])
        a, b, out = (
            np.ctypeslib.as_array((ctypes.c_float * (rows * ROW)).from_address(ptr))
            for ptr, rows in (a, b, out)
        )
        out[:] = a + np.float32(scale) * b

    fake.on_launch(act)
    return fake


def host(rows=9, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, ROW), dtype=np.float32)


def test_host_arrays_go_there_and_back(adds):
    a, b, out = host(), host(seed=1), np.full((9, ROW), np.nan, np.float32)
    given = {"a": slots(a), "b": slots(b), "out": slots(out)}
    before = adds.live_allocations()
    ctm_rt.launch(tiny.stranger(), **given, scale=0.5, outputs=["out"])
    np.testing.assert_array_equal(out, a + np.float32(0.5) * b)
    ctm_rt.memory.release_done()
    assert adds.live_allocations() == before


def test_strided_host_arrays_and_what_lies_between(adds):
    a, wide = host()[::-1], np.full((18, ROW), np.nan, np.float32)
    given = {"a": slots(a), "b": slots(a), "out": slots(wide[::2])}
    ctm_rt.launch(tiny.stranger(), **given, scale=1, outputs="out")
    np.testing.assert_array_equal(wide[::2], a + a)
    assert np.isnan(wide[1::2]).all()


def test_host_and_device_arrays_mixed(adds, tmp_path):
    adds.set_devices(2)
    library = shutil.copy(tiny.stranger(), tmp_path)
    shutil.copy(tiny.stranger().with_suffix(".h"), tmp_path)
    a, out = host(), host()
    there = ctm_rt.to_device(host(seed=1), device=1)
    given = {"a": slots(a), "b": slots(there), "out": slots(out)}
    ctm_rt.launch(library, **given, scale=1, outputs=["out"])
    assert adds.launches()[0].device == 1
    np.testing.assert_array_equal(out, a + host(seed=1))


def test_types_that_numpy_lacks_travel_bit_for_bit(fake):
    a = np.arange(ROW * 2, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(2, ROW)
    out = np.zeros_like(a)

    def copies(launch):
        ctypes.memmove(*(struct.unpack_from("<Q", launch.params[i])[0] for i in (2, 0)), a.nbytes)

    fake.on_launch(copies)
    given = {"a": slots(a), "b": slots(a), "out": slots(out)}
    ctm_rt.launch(tiny.stranger(), **given, scale=1, outputs=["out"])
    np.testing.assert_array_equal(out.view(np.uint8), a.view(np.uint8))


def test_a_manifest_tells_the_outputs(fake):
    x, out = np.ones((2, 3, 64), np.float16), np.zeros((2, 3, 64), np.float16)
    counters = np.zeros(4, np.int32)

    def fills(launch):
        ctypes.memset(struct.unpack_from("<Q", launch.params[2])[0], 0x3C, out.nbytes)
        ctypes.memset(struct.unpack_from("<Q", launch.params[3])[0], 0xFF, counters.nbytes)

    fake.on_launch(fills)
    given = {"x": x, "out": out, "counters": counters, "scale": 1, "count": 1}
    ctm_rt.launch("tiny_a", store=tiny.store(), **given)
    assert (out.view(np.uint8) == 0x3C).all()
    assert not counters.any()


def test_device_arrays_are_not_waited_for_and_are_kept(fake):
    with driver.current(0):
        queue = int(driver.check("cuStreamCreate", driver.cu.cuStreamCreate(1)))
    fake.set_paused(queue, True)
    gc.collect()
    ctm_rt.memory.release_done()
    before = fake.live_allocations()
    given = {name: slots(device_array(9, ROW, dtype="f32")) for name in ("a", "b", "out")}
    ctm_rt.launch(tiny.stranger(), **given, scale=1, stream=queue)
    del given
    ctm_rt.memory.release_done()
    assert fake.live_allocations() == before + 3
    fake.set_paused(queue, False)
    ctm_rt.memory.release_done()
    assert fake.live_allocations() == before


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (None, "outputs: expected the names of the arrays to copy back, got None"),
        (["out", "c"], "outputs: expected names among a, b, out, got c"),
        (["scale"], "outputs: expected names among a, b, out, got scale"),
        (["out", "a"], "a: expected a writable array, got a read-only one"),
    ],
)
def test_refused_outputs(fake, outputs, reason):
    a, out = host(), host()
    a.flags.writeable = False
    given = {"a": slots(a), "b": slots(a), "out": slots(out)}
    with pytest.raises(ArgumentError) as refusal:
        ctm_rt.launch(tiny.stranger(), **given, scale=1, outputs=outputs)
    assert str(refusal.value) == reason
    assert fake.launches() == []


def test_the_example(adds, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["stranger", str(tiny.stranger())])
    runpy.run_module("examples.stranger", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "scale: scalar, float" in lines
    assert [line.rpartition(": ")[2] for line in lines[-2:]] == ["0.0", "0.0"]
