"""ctm_rt.tensor: what view() makes of every spelling of an array."""

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt import driver
from ctm_rt.errors import ArgumentError
from ctm_rt.tensor import (
    HOST,
    DType,
    TensorView,
    as_dtype,
    is_packed,
    nbytes,
    packed_strides,
    view,
    with_axis,
    without_axis,
)
from tests.dlpack_producer import Producer

DEVICE = (2, 0)


class OnlyDLPack:
    """A NumPy array that shows nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__


def interface(**changes: Any) -> SimpleNamespace:
    described = {
        "version": 3,
        "shape": (2, 3),
        "typestr": "<f2",
        "data": (0x1000, False),
        "strides": None,
        "stream": None,
    }
    return SimpleNamespace(__cuda_array_interface__=described | changes)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "pointer_device", lambda ptr: 1 if ptr < 0x10000 else None)


# ---- DType -------------------------------------------------------------------------------------


def test_dtypes_know_their_size() -> None:
    assert {str(d): d.itemsize for d in DType} == {
        "bool": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
        "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "e4m3": 1, "e5m2": 1, "c64": 8, "c128": 16,
    }  # fmt: skip


def test_dtypes_are_found_by_name() -> None:
    assert as_dtype("e4m3") is as_dtype(DType.E4M3) is DType("e4m3") is DType.E4M3
    with pytest.raises(ArgumentError, match=r"^dtype: expected one of bool, .*, got 'fp8'"):
        as_dtype("fp8")


# ---- NumPy -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numpy", "dtype"),
    [
        *((name, dtype) for name, dtype in [
            ("?", "bool"), ("i1", "i8"), ("u1", "u8"), ("i2", "i16"), ("u2", "u16"), ("i4", "i32"),
            ("u4", "u32"), ("i8", "i64"), ("u8", "u64"), ("f2", "f16"), ("f4", "f32"),
            ("f8", "f64"), ("c8", "c64"), ("c16", "c128"),
        ]),
        (ml_dtypes.float8_e4m3fn, "e4m3"),
        (ml_dtypes.float8_e5m2, "e5m2"),
        (ml_dtypes.bfloat16, "bf16"),
    ],
)  # fmt: skip
def test_numpy_arrays(numpy: Any, dtype: str) -> None:
    array = np.zeros((2, 3, 4), numpy)
    found = view(array)
    assert found == TensorView(
        array.ctypes.data, (2, 3, 4), (12, 4, 1), DType(dtype), HOST, False, array
    )
    assert is_packed(found)
    assert nbytes(found) == array.nbytes


def test_numpy_slices_keep_their_strides() -> None:
    array = np.zeros((4, 6, 8), np.float16)
    found = view(array[1:, ::2, 3:])
    assert found.ptr == array.ctypes.data + 2 * (48 + 3)
    assert found.shape == (3, 3, 5)
    assert found.strides == (48, 16, 1)
    assert not is_packed(found)
    assert view(array[::-1]).strides == (-48, 8, 1)
    assert view(array.T).strides == (1, 8, 48)
    assert view(np.zeros(()))[1:3] == ((), ())


def test_numpy_read_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert view(array).readonly
    assert view(OnlyDLPack(array)).readonly


@pytest.mark.parametrize("name", [">f4", "S4", "U2", "O", "V2", "M8[s]", "longdouble"])
def test_numpy_types_without_a_name_here_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"^q: expected an element type of bool, "):
        view(np.zeros(3, name), "q")


def test_other_float8s_are_not_e4m3() -> None:
    for other in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4):
        with pytest.raises(ArgumentError, match="element type"):
            view(np.zeros(3, other))


def test_fields_of_records_with_odd_strides_are_refused() -> None:
    records = np.zeros(3, np.dtype([("a", "u1"), ("b", "<u4")]))
    with pytest.raises(ArgumentError, match=r"^lens: expected strides that are multiples of 4 byt"):
        view(records["b"], "lens")


def test_misaligned_arrays_are_refused() -> None:
    array = np.zeros(9, np.uint8)[1:].view(np.float16)
    with pytest.raises(ArgumentError, match=r"^q: expected an address aligned to 2 bytes, got 0x"):
        view(array, "q")


# ---- e4m3 and bf16 by other means ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("numpy", "said"),
    [("u1", "e4m3"), ("i1", "e4m3"), ("V1", "e4m3"), (ml_dtypes.float8_e4m3fn, "e4m3"),
     ("u1", "e5m2"), ("u2", "bf16"), ("i2", "bf16"), ("V2", "bf16"), ("f2", "f16")],
)  # fmt: skip
def test_a_said_dtype_is_taken_where_it_is_carried(numpy: Any, said: str) -> None:
    array = np.zeros((2, 2), numpy)
    assert view(array, dtype=said).dtype is DType(said)
    assert view(array, dtype=DType(said)).owner is array


@pytest.mark.parametrize(
    ("numpy", "said"),
    [("u2", "e4m3"), ("f2", "bf16"), ("u1", "bf16"), (ml_dtypes.float8_e5m2, "e4m3"),
     ("f4", "f16"), ("u4", "f32"), ("?", "e4m3")],
)  # fmt: skip
def test_a_said_dtype_is_refused_elsewhere(numpy: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^kv_pool: expected dtype {said}, or integers"):
        view(np.zeros((2, 2), numpy), "kv_pool", dtype=said)


@pytest.mark.parametrize(("numpy", "said"), [("V2", "e4m3"), ("V1", "bf16"), ("V4", "f32")])
def test_nameless_elements_carry_only_what_numpy_lacks(numpy: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=r"^kv_pool: expected an element type"):
        view(np.zeros((2, 2), numpy), "kv_pool", dtype=said)


def test_a_said_dtype_on_everything_else(on_device: None) -> None:
    array = np.zeros((2, 2), np.uint8)
    for spelling in (view(array), OnlyDLPack(array), interface(typestr="|u1"),
                     interface(typestr="|V1")):  # fmt: skip
        assert view(spelling, dtype="e4m3").dtype is DType.E4M3
    with pytest.raises(ArgumentError, match="element type"):
        view(interface(typestr="|V1"))


# ---- DLPack ------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("device", [(2, 3), (13, 3), (1, 0), (3, 0)])
def test_dlpack_on_every_device(legacy: bool, device: tuple[int, int]) -> None:
    producer = Producer(0x1000, (2, 3), (8, 1), device=device, byte_offset=4, legacy=legacy)
    found = view(producer)
    host = device[0] in (1, 3)
    assert found[:5] == (0x1004, (2, 3), (8, 1), DType.F16, HOST if host else 3)
    assert not found.readonly
    asked = producer.asked[-1]
    assert asked["stream"] == (None if host else -1)
    assert legacy or asked["max_version"] == (1, 1)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_library_that_takes_minus_1_for_a_handle(legacy: bool) -> None:
    producer = Producer(0x1000, (2, 3), None, device=DEVICE, legacy=legacy, refuses=[-1])
    assert view(producer).ptr == 0x1000
    assert [asked["stream"] for asked in producer.asked][-2:] == [-1, None]
    producer = Producer(0x1000, (2, 3), None, device=DEVICE, legacy=legacy, refuses=[-1, None])
    with pytest.raises(ArgumentError, match=r"^q: .*invalid resource handle"):
        view(producer, "q")


@pytest.mark.parametrize("legacy", [False, True])
def test_the_loan_ends_once_and_with_the_view(legacy: bool) -> None:
    producer = Producer(0x1000, (2,), None, device=DEVICE, legacy=legacy)
    found = view(producer)
    also = found._replace(shape=(1,))
    del found
    gc.collect()
    assert producer.deleted == 0
    del also
    assert producer.deleted == 1


@pytest.mark.parametrize("legacy", [False, True])
def test_the_loan_ends_also_after_a_refusal(legacy: bool) -> None:
    producer = Producer(0x1001, (2,), None, device=DEVICE, legacy=legacy)
    with pytest.raises(ArgumentError, match="aligned to 2 bytes, got 0x1001"):
        view(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [(0, 8, "i8"), (0, 16, "i16"), (0, 32, "i32"), (0, 64, "i64"), (1, 8, "u8"), (1, 16, "u16"),
     (1, 32, "u32"), (1, 64, "u64"), (2, 16, "f16"), (2, 32, "f32"), (2, 64, "f64"),
     (4, 16, "bf16"), (5, 64, "c64"), (5, 128, "c128"), (6, 8, "bool"), (10, 8, "e4m3"),
     (12, 8, "e5m2")],
)  # fmt: skip
def test_dlpack_types(code: int, bits: int, dtype: str) -> None:
    producer = Producer(0x1000, (2,), (1,), code=code, bits=bits, device=DEVICE)
    assert view(producer).dtype is DType(dtype)


@pytest.mark.parametrize(
    ("code", "bits", "lanes"),
    [(0, 4, 1), (1, 1, 1), (2, 128, 1), (3, 64, 1), (8, 8, 1), (11, 8, 1), (14, 8, 1), (17, 4, 1),
     (17, 4, 2), (2, 16, 2), (2, 16, 0), (1, 8, 4)],
)  # fmt: skip
def test_other_dlpack_types_are_refused(code: int, bits: int, lanes: int) -> None:
    producer = Producer(0x1000, (2,), (1,), code=code, bits=bits, lanes=lanes, device=DEVICE)
    with pytest.raises(ArgumentError, match=rf"got .* code {code}, {bits} bits, {lanes} lanes"):
        view(producer, "q")


@pytest.mark.parametrize(("flags", "readonly"), [(0, False), (1, True), (2, True), (4, False)])
def test_dlpack_read_only_and_copied(flags: int, readonly: bool) -> None:
    assert view(Producer(0x1000, (2,), None, flags=flags, device=DEVICE)).readonly == readonly


def test_another_dlpack_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"expected DLPack 1, got 2\.0"):
        view(Producer(0x1000, (2,), None, version=(2, 0), device=DEVICE))
    assert view(Producer(0x1000, (2,), None, version=(1, 9), device=DEVICE)).shape == (2,)


@pytest.mark.parametrize("kind", [4, 7, 8, 10, 14])
def test_other_devices_are_refused(kind: int) -> None:
    with pytest.raises(ArgumentError, match=f"DLPack device type {kind}"):
        view(Producer(0x1000, (2,), None, device=(kind, 0)))


def test_null_strides_are_row_major() -> None:
    assert view(Producer(0x1000, (2, 3, 4), None, device=DEVICE)).strides == (12, 4, 1)
    assert view(Producer(0x1000, (), None, device=DEVICE)).strides == ()


def test_a_refusing_library_is_quoted() -> None:
    class Refusing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return DEVICE

        def __dlpack__(self, **_: object) -> object:
            raise BufferError("requires grad")

    with pytest.raises(ArgumentError, match=r"q: .*its library exports, got requires grad"):
        view(Refusing(), "q")


def test_dlpack_goes_before_the_cuda_array_interface() -> None:
    producer = Producer(0x1000, (2,), None, device=DEVICE)
    producer.__cuda_array_interface__ = None
    assert view(producer).ptr == 0x1000


def test_numpy_through_dlpack() -> None:
    array = np.zeros((4, 6), np.float32)
    for given_ in (array, array[::2, 1:], array.T, array[::-1]):
        assert view(OnlyDLPack(given_))[:5] == view(given_)[:5]


# ---- the CUDA array interface -------------------------------------------------------------------


def test_cuda_array_interface(on_device: None) -> None:
    array = interface()
    assert view(array) == TensorView(0x1000, (2, 3), (3, 1), DType.F16, 1, False, array)
    strided = interface(strides=(16, 2), data=(0x1002, True))
    assert view(strided)[:3] == (0x1002, (2, 3), (8, 1))
    assert view(strided).readonly


def test_empty_arrays_need_no_address(on_device: None) -> None:
    found = view(interface(shape=(0, 3), data=(0, False)))
    assert found[:5] == (0, (0, 3), (3, 1), DType.F16, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": (0x20000, False)}, "expected device memory, got 0x20000"),
        ({"mask": object()}, "without mask"),
        ({"typestr": ">f2"}, "element type"),
        ({"typestr": "nonsense"}, "a CUDA array interface"),
        ({"data": None}, "a CUDA array interface"),
        ({"strides": (7, 2)}, "strides that are multiples of 2 bytes"),
        ({"data": (0x1001, False)}, "aligned"),
    ],
)
def test_bad_interfaces_are_refused(on_device: None, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^q: .*{message}"):
        view(interface(**changes), "q")


def test_the_driver_says_whose_memory_it_is(fake: ModuleType) -> None:
    fake.set_devices(2)
    ptr = driver.alloc(64, 1)
    assert view(interface(data=(ptr, False))).device == 1
    driver.free(ptr, 1)


# ---- whatever it is ------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, 3, [1, 2], "q", b"bytes", object(), np.float32(1)])
def test_what_is_no_array_is_refused_by_name(thing: object) -> None:
    wanted = rf"^seq_lens: expected an array .*, got {type(thing).__name__}$"
    with pytest.raises(ArgumentError, match=wanted):
        view(thing, "seq_lens")


def test_a_view_is_its_own_view() -> None:
    found = view(np.zeros(3))
    assert view(found) is found


@pytest.mark.parametrize("wild", [0, 7, -5, 1 << 40])
def test_axes_of_extent_1_get_the_packed_stride(wild: int) -> None:
    producer = Producer(0x1000, (1, 3, 1, 4), (wild, 4, wild, 1), device=DEVICE)
    found = view(producer)
    assert found.strides == (12, 4, 4, 1)
    assert is_packed(found)
    empty = Producer(0x1000, (1, 0, 4), (wild, 4, 1), device=DEVICE)
    assert view(empty).strides == (4, 4, 1)
    lone = np.lib.stride_tricks.as_strided(np.zeros(4, "f2"), (1, 4), (wild + 1, 2))
    assert view(lone).strides == (4, 1)  # also where it is no multiple of the item size


@given(st.lists(st.integers(0, 4), max_size=5))
def test_packed_is_what_numpy_calls_contiguous(shape: list[int]) -> None:
    array = np.zeros(shape, np.int32)
    assert is_packed(view(array))
    if array.size:
        assert view(array).strides == packed_strides(array.shape)
        assert packed_strides(array.shape) == tuple(s // 4 for s in array.strides)
    wider = np.zeros([n + 1 for n in shape], np.int32)
    part = wider[tuple(slice(n) for n in shape)] if shape else wider
    assert is_packed(view(part)) == part.flags.c_contiguous


def test_views_leave_reference_counts_level() -> None:
    array = np.zeros((2, 3), np.float16)
    producers = [Producer(0x1000, (2,), None, device=DEVICE, legacy=old) for old in (True, False)]
    watched = [array, *producers]
    counts = [sys.getrefcount(thing) for thing in watched]
    for _ in range(100_000 // 4):
        view(array)
        view(OnlyDLPack(array))
        view(producers[0])
        view(producers[1])
    assert [sys.getrefcount(thing) for thing in watched] == counts
    assert [producer.deleted for producer in producers] == [25_000, 25_000]


def test_an_axis_more_and_one_less():
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)[:, ::2]
    tensor = view(array)
    for axis in (1, 2, 3):
        more = with_axis(tensor, axis)
        assert more.shape == np.expand_dims(array, axis).shape
        assert without_axis(more, axis) == tensor
    first = without_axis(tensor, 1)
    assert (first.ptr, first.shape, first.strides) == (tensor.ptr, (2, 4), (12, 1))
    assert first.owner is tensor.owner
