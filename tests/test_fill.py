import ctypes
import math
import os
import struct
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctm_rt.descriptors import ctypes_mirror, fill, make_ffi, parse_header, read_header
from ctm_rt.errors import ArgumentError, HeaderError
from tests.header_text import render, signatures, tensors

GOLDEN = Path(__file__).parent / "headers" / "4.8.1"
ADDRESSES = st.integers(0, 2**64 - 1)
INT_BITS = {"int8_t": 8, "int16_t": 16, "int32_t": 32, "int64_t": 64}
UINT_BITS = {f"u{ctype}": bits for ctype, bits in INT_BITS.items()}
RANGES = {c: (-(1 << b - 1), (1 << b - 1) - 1) for c, b in INT_BITS.items()} | {
    c: (0, (1 << b) - 1) for c, b in UINT_BITS.items()
}
WIDE = st.integers(-(2**70), 2**70)


class Kernel:
    """The wrapper of a header, its cffi instance and its parameters by name."""

    def __init__(self, wrapper):
        self.wrapper, self.ffi = wrapper, make_ffi(wrapper)
        self.parameters = {p.name: p for p in wrapper.parameters}
        self.mirrors = ctypes_mirror(wrapper)

    def fill(self, builder, name, *arguments):
        return builder(self.ffi, self.parameters[name], *arguments)

    def address(self, value):
        return int(self.ffi.cast("uintptr_t", value))

    def read(self, name, value):
        """Read a descriptor back through its mirror: (data, shape, strides)."""
        return fields_of(self.mirrors[name].from_address(self.address(value)))


def fields_of(mirror):
    slots = (getattr(mirror, f"dynamic_{which}", ()) for which in ("shapes", "strides"))
    return mirror.data or 0, *map(tuple, slots)


@pytest.fixture(params=[None])
def kernel(request):
    return Kernel(read_header(GOLDEN / f"{request.param}.h"))


def on(name):
    return pytest.mark.parametrize("kernel", [name], indirect=True)


# ---- tensors


@on("dynamic")
def test_strided_fills_every_slot(kernel):
    q = kernel.fill(fill.strided, "q", 1 << 40, (2, 3, 5, 7), (-8, 1 << 40, 0))
    assert kernel.read("q", q) == (1 << 40, (2, 3, 5, 7), (-8, 1 << 40, 0))
    column = kernel.fill(fill.strided, "column", 0, [9], [4])
    assert kernel.read("column", column) == (0, (9,), (4,))


@on("dynamic")
def test_packed_is_row_major(kernel):
    array = np.zeros((2, 3, 5, 7), np.float16)
    q = kernel.fill(fill.packed, "q", 64, array.shape)
    *strides, innermost = (stride // array.itemsize for stride in array.strides)
    assert innermost == 1
    assert kernel.read("q", q) == (64, (2, 3, 5, 7), tuple(strides))
    assert kernel.read("row", kernel.fill(fill.packed, "row", 64, [6])) == (64, (6,), ())
    far = kernel.fill(fill.packed, "q", 64, (2, 70_000, 70_000, 7))  # strides pass 32 bits
    assert kernel.read("q", far)[2] == (70_000 * 70_000 * 7, 70_000 * 7, 7)


@on("dynamic")
def test_cu_seqlen_is_a_vector(kernel):
    assert kernel.read("row", kernel.fill(fill.cu_seqlen, "row", 8, 129)) == (8, (129,), ())
    for name in ("q", "table", "column"):
        with pytest.raises(HeaderError, match=f"{name}: not a vector: header has . shape and"):
            kernel.fill(fill.cu_seqlen, name, 8, 129)


@on("partly_static")
def test_what_is_static_has_no_slot(kernel):
    pool = kernel.fill(fill.strided, "pool", 8, (4, 2), (1 << 33, 128, 64))
    assert kernel.read("pool", pool) == (8, (4, 2), (1 << 33, 128, 64))
    assert kernel.read("whole", kernel.fill(fill.strided, "whole", 8, (), ())) == (8, (), ())
    with pytest.raises(HeaderError, match="pool: header has 2 shape and 3 stride slots, got 4"):
        kernel.fill(fill.packed, "pool", 8, (4, 128, 2, 64))


@given(st.data())
@settings(deadline=None)
def test_strided_holds_what_it_is_given_or_refuses(data):
    parameter = data.draw(tensors("p", "x"))
    kernel = Kernel(parse_header(render("p", [parameter])))
    ptr = data.draw(ADDRESSES)
    shape, strides = (
        data.draw(st.lists(WIDE | st.integers(0, 2**31), min_size=n, max_size=n))
        for n in (parameter.shape_slots, parameter.stride_slots)
    )
    limits = [
        1 << bits - 1 if bits else 0 for bits in (parameter.shape_bits, parameter.stride_bits)
    ]
    fits = all(0 <= n < limits[0] for n in shape) and all(
        -limits[1] <= n < limits[1] for n in strides
    )
    if fits:
        filled = kernel.fill(fill.strided, "x", ptr, shape, strides)
        assert kernel.read("x", filled) == (ptr, tuple(shape), tuple(strides))
    else:
        with pytest.raises(ArgumentError, match=r"^x: expected ") as error:
            kernel.fill(fill.strided, "x", ptr, shape, strides)
        assert error.value.name == "x"


@given(st.data())
@settings(deadline=None)
def test_too_few_or_too_many_slots_are_never_filled(data):
    parameter = data.draw(tensors("p", "x"))
    kernel = Kernel(parse_header(render("p", [parameter])))
    slots = (parameter.shape_slots, parameter.stride_slots)
    given_ = data.draw(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda n: n != slots))
    with pytest.raises(HeaderError, match=f"got {given_[0]} and {given_[1]}"):
        kernel.fill(fill.strided, "x", 0, [1] * given_[0], [1] * given_[1])


@on("dynamic")
@pytest.mark.parametrize(
    ("ptr", "shape", "strides", "message"),
    [
        (-1, (1, 1), (1,), "table: expected an address, got -1"),
        (1 << 64, (1, 1), (1,), "table: expected an address"),
        (1.0, (1, 1), (1,), "table: expected an address"),
        (None, (1, 1), (1,), "table: expected an address"),
        (0, (1, -1), (1,), r"table: expected extents of at least 0, got \(1, -1\)"),
        (0, (1, np.float32(2)), (1,), "table: expected a value that fits dynamic_Tensor_table_t"),
        (0, (1, 2.0), (1,), "table: expected a value that fits"),
        (0, (1, None), (1,), "table: expected a value that fits"),
        (0, (1, 2**31), (1,), "table: expected a value that fits"),
        (0, (1, 2), ("1",), "table: expected a value that fits"),
        (0, (1, 2), (2**63,), "table: expected a value that fits"),
    ],
)
def test_what_does_not_fit_a_tensor(kernel, ptr, shape, strides, message):
    with pytest.raises(ArgumentError, match=message):
        kernel.fill(fill.strided, "table", ptr, shape, strides)


@on("dynamic")
def test_numpy_integers_fit(kernel):
    shape = np.array([3, 4], np.int64)
    table = kernel.fill(fill.strided, "table", np.uint64(2**64 - 8), shape, (np.int32(4),))
    assert kernel.read("table", table) == (2**64 - 8, (3, 4), (4,))


@on("lists")
def test_a_list_of_tensors(kernel):
    given_ = [(8 * i, (i, i + 1), (i + 2,)) for i in range(3)]
    three = kernel.fill(fill.tensor_list, "three", given_)
    mirror = kernel.mirrors["three"].from_address(kernel.address(three))
    assert mirror.count == 3
    assert [fields_of(element) for element in mirror.elements] == given_
    for wrong in (given_[:2], given_ + given_[:1], []):
        with pytest.raises(HeaderError, match=f"three: header has 3 of them, got {len(wrong)}"):
            kernel.fill(fill.tensor_list, "three", wrong)
    with pytest.raises(HeaderError, match="three: header has 2 shape and 1 stride slots, got 1"):
        kernel.fill(fill.tensor_list, "three", [*given_[:2], (0, (1,), (1,))])
    with pytest.raises(ArgumentError, match="one: expected a value that fits lists_TensorList_one"):
        kernel.fill(fill.tensor_list, "one", [(0, (1, 1, 1), (1, 2**31))])


# ---- scalars, pointers, tuples

NUMBERS = {
    p.name: p.ctype for p in read_header(GOLDEN / "numbers.h").parameters if p.ctype in RANGES
}


@on("numbers")
@pytest.mark.parametrize("name", NUMBERS)
def test_integers_fit_exactly(kernel, name):
    low, high = RANGES[NUMBERS[name]]
    for value in (low, high, 0, 1, True, np.int8(7)):
        cell = kernel.fill(fill.scalar, name, value)
        assert cell[0] == value
        assert kernel.ffi.sizeof(kernel.ffi.typeof(cell).item) * 8 == int(high - low).bit_length()
    for value in (low - 1, high + 1, 1.0, np.float32(1), "1", None, 1j, math.nan, [1]):
        with pytest.raises(
            ArgumentError, match=f"{name}: expected a value that fits {NUMBERS[name]}"
        ):
            kernel.fill(fill.scalar, name, value)


@on("numbers")
def test_a_boolean_may_be_numpys(kernel):
    assert kernel.fill(fill.scalar, "boolean", np.True_)[0] == 1
    assert kernel.fill(fill.scalar, "boolean", np.False_)[0] == 0


FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
KERNEL = Kernel(read_header(GOLDEN / "numbers.h"))


@pytest.mark.parametrize("name", FLOATS)
@given(value=st.floats() | st.floats(width=16) | st.integers(-(10**6), 10**6))
def test_floats_round_as_numpy_does(name, value):
    with np.errstate(over="ignore"):
        rounded = np.float64(value).astype(FLOATS[name])
    if np.isinf(rounded) and not math.isinf(value):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a value that fits"):
            KERNEL.fill(fill.scalar, name, value)
        return
    cell = KERNEL.fill(fill.scalar, name, value)
    got = np.frombuffer(bytes(KERNEL.ffi.buffer(cell)), FLOATS[name])[0]
    assert np.isnan(got) if np.isnan(rounded) else got.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("name", FLOATS)
def test_a_nan_stays_a_nan_whatever_its_payload(name):
    (nan,) = struct.unpack("<d", b"\xff" * 7 + b"\x7f")
    cell = KERNEL.fill(fill.scalar, name, nan)
    assert np.isnan(np.frombuffer(bytes(KERNEL.ffi.buffer(cell)), FLOATS[name])[0])


@on("numbers")
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_no_float(kernel, name):
    for value in ("1.5", None, 1j, [1.5], 10**400):
        with pytest.raises(ArgumentError, match=f"{name}: expected a value that fits"):
            kernel.fill(fill.scalar, name, value)
    assert bytes(kernel.ffi.buffer(kernel.fill(fill.scalar, name, np.float32(0)))) == bytes(
        np.dtype(FLOATS[name]).itemsize
    )


@on("pointers")
def test_pointers(kernel):
    for ptr in (0, 8, 2**64 - 1):
        assert kernel.address(kernel.fill(fill.pointer, "a", ptr)[0]) == ptr
    for wrong in (-1, 2**64, None, 1.5):
        with pytest.raises(ArgumentError, match="a: expected an address"):
            kernel.fill(fill.pointer, "a", wrong)


@on("tuples")
def test_int_tuples(kernel):
    assert list(kernel.fill(fill.int_tuple, "dims", (2**31 - 1, -(2**31)))) == [2**31 - 1, -(2**31)]
    assert list(kernel.fill(fill.int_tuple, "far", iter([1 << 40, 2]))) == [1 << 40, 2]
    assert list(kernel.fill(fill.int_tuple, "fixed", ())) == []
    for wrong in ((), (1,), (1, 2, 3)):
        with pytest.raises(HeaderError, match=f"dims: header has 2 of them, got {len(wrong)}"):
            kernel.fill(fill.int_tuple, "dims", wrong)
    for wrong in ((1, 2**31), (1, 1.0), (None, 1)):
        with pytest.raises(ArgumentError, match="dims: expected a value that fits int32_t"):
            kernel.fill(fill.int_tuple, "dims", wrong)
    with pytest.raises(
        ArgumentError, match=r"near: expected a value that fits uint8_t, got \(256,\)"
    ):
        kernel.fill(fill.int_tuple, "near", (256,))


@on("names")
@pytest.mark.parametrize(
    ("builder", "kind", "arguments"),
    [
        (fill.strided, "tensor", (0, (), ())),
        (fill.packed, "tensor", (0, ())),
        (fill.tensor_list, "tensor_list", ([(0, (1, 1), (1,))],)),
        (fill.scalar, "scalar", (1,)),
        (fill.pointer, "pointer", (0,)),
        (fill.int_tuple, "int_tuple", ((1,),)),
    ],
)
def test_a_builder_of_another_kind(kernel, builder, kind, arguments):
    for name, parameter in kernel.parameters.items():
        if parameter.kind != kind:
            message = f"{name}: header has a {parameter.kind}, not a {kind}"
            with pytest.raises(HeaderError, match=message):
                kernel.fill(builder, name, *arguments)


# ---- the packed array


def fill_anything(kernel, parameter, number):
    """Fill a parameter with values made from ``number``, small enough for every type."""
    shape, strides = (1,) * parameter.shape_slots, (number,) * parameter.stride_slots
    match parameter.kind:
        case "tensor":
            return fill.strided(kernel.ffi, parameter, number, shape, strides)
        case "tensor_list":
            tensors_ = [(number, shape, strides)] * parameter.length
            return fill.tensor_list(kernel.ffi, parameter, tensors_)
        case "scalar":
            return fill.scalar(kernel.ffi, parameter, number)
        case "pointer":
            return fill.pointer(kernel.ffi, parameter, number)
        case "int_tuple":
            return fill.int_tuple(kernel.ffi, parameter, [number] * parameter.length)


def values_of(kernel):
    return {
        p.name: fill_anything(kernel, p, number)
        for number, p in enumerate(kernel.wrapper.parameters)
        if p.kind != "stream"
    }


@given(signatures())
@settings(deadline=None)
def test_the_packed_array_is_the_headers(signature):
    kernel = Kernel(parse_header(render(*signature)))
    values = values_of(kernel)
    packed = fill.pack(kernel.ffi, kernel.wrapper, values)
    expected = []
    for parameter in kernel.wrapper.parameters:
        if parameter.kind == "stream":
            expected.append(packed.stream)
        elif parameter.kind == "tensor_list":
            elements = values[parameter.name].elements
            expected += [kernel.ffi.addressof(elements, i) for i in range(parameter.length)]
        elif parameter.kind == "int_tuple":
            array = values[parameter.name]
            expected += [kernel.ffi.addressof(array, i) for i in range(parameter.length)]
        else:
            expected.append(values[parameter.name])
    expected.append(packed.status)
    assert [*map(kernel.address, packed.args)] == [*map(kernel.address, expected)]
    assert packed.num_args == len(packed.args) == len(expected)
    assert {*map(id, values.values())} <= {*map(id, packed.owners)}


@on("optionals")
def test_pack_refuses_what_is_not_the_wrappers(kernel):
    values = values_of(kernel)
    without = {name: value for name, value in values.items() if name != "scale"}
    message = "cute_dsl_optionals_wrapper: no value for 'scale'"
    with pytest.raises(HeaderError, match=message):
        fill.pack(kernel.ffi, kernel.wrapper, without)
    with pytest.raises(
        HeaderError, match="cute_dsl_optionals_wrapper: takes no value for 'absent, x'"
    ):
        fill.pack(kernel.ffi, kernel.wrapper, values | {"x": 0, "absent": 0})
    with pytest.raises(HeaderError, match="takes no value for 'stream'"):
        fill.pack(kernel.ffi, kernel.wrapper, values | {"stream": kernel.ffi.NULL})

    # The same layout, but of another wrapper; of another kind; of another cffi instance.
    other = Kernel(read_header(GOLDEN / "method.h"))
    foreign = other.fill(fill.packed, "q", 0, (1, 1))
    for wrong in (foreign, values["scale"], values_of(Kernel(kernel.wrapper))["present"]):
        with pytest.raises(
            HeaderError, match="'present' takes 'optionals_Tensor_present_t \\*', got"
        ):
            fill.pack(kernel.ffi, kernel.wrapper, values | {"present": wrong})


@on("tuples")
def test_a_static_tuple_needs_no_value(kernel):
    values = values_of(kernel)
    del values["fixed"]
    assert fill.pack(kernel.ffi, kernel.wrapper, values).num_args == 8


ENTRY = """
#include <stdint.h>
{cdef}
uint64_t seen[8];
void {init}(void **args) {{ *(int32_t *)args[1] = 11; }}
void {load_to_device}(void **args) {{ *(int32_t *)args[2] = 12 + *(int32_t *)args[1]; }}
void {entry}(void **args, int32_t num_args) {{
    widths_Tensor_a3232_t *a = args[0];
    widths_Tensor_a6432_t *c = args[2];
    seen[0] = num_args, seen[1] = (uint64_t)a->data, seen[2] = a->dynamic_strides[1];
    seen[3] = c->dynamic_shapes[2], seen[4] = c->dynamic_strides[0];
    *(int32_t *)args[num_args - 1] = -3;
}}
"""


@on("widths")
def test_a_library_is_called_through_the_same_declarations(kernel, tmp_path):
    """C code with the header's own structs reads what was filled; its status comes back."""
    wrapper, ffi = kernel.wrapper, kernel.ffi
    symbols = {name: getattr(wrapper, name) for name in ("entry", "init", "load_to_device")}
    source = ENTRY.format(cdef=wrapper.cdef, **symbols)
    (tmp_path / "entry.c").write_text(source)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", "entry.so", "entry.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ffi.dlopen(str(tmp_path / "entry.so"))

    filled = [
        kernel.fill(fill.strided, name, 8 + i, (1, 2, 3 + i), (4, 5 + i))
        for i, name in enumerate(kernel.parameters)
    ]
    values = dict(zip(kernel.parameters, filled, strict=True))
    packed = fill.pack(ffi, wrapper, values)
    getattr(library, wrapper.entry)(packed.args, packed.num_args)
    assert packed.status[0] == -3
    seen = (ctypes.c_uint64 * 8).in_dll(ctypes.CDLL(str(tmp_path / "entry.so")), "seen")
    assert list(seen[:5]) == [5, 8, 5, 5, 4]

    status, device = ffi.new("int32_t *"), ffi.new("int32_t *", 5)
    getattr(library, wrapper.init)(ffi.new("void *[]", [ffi.NULL, status]))
    assert status[0] == 11
    getattr(library, wrapper.load_to_device)(ffi.new("void *[]", [ffi.NULL, device, status]))
    assert status[0] == 17


@on("two_streams")
def test_the_stream_slot_serves_every_stream(kernel):
    packed = fill.pack(kernel.ffi, kernel.wrapper, values_of(kernel))
    packed.stream[0] = 0x7F00_0000_1234
    handles = [kernel.ffi.cast("uint64_t *", packed.args[i])[0] for i in (0, 2)]
    assert handles == [0x7F00_0000_1234] * 2
