"""What is refused, by name; and who keeps what alive."""

import gc
import sys
import threading

import cuda.bindings.driver as cu
import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.memory import DeviceArray, release_done
from tests.gpu.device import DEVICE, Call, assert_matches, new_stream, place
from tests.gpu.inputs import Module, make


class ReadOnly:
    """A CUDA array interface that says so."""

    def __init__(self, owner: DeviceArray) -> None:
        self.owner = owner
        interface = owner.__cuda_array_interface__
        self.__cuda_array_interface__ = interface | {"data": (owner.ptr, True)}


@pytest.fixture
def call(any_module: Module) -> Call:
    return Call(any_module, make(any_module, [300, 5], fused_q=False))


@pytest.mark.parametrize("name", ["q", "kv_pool", "page_table", "seq_lens", "out"])
def test_host_array(call: Call, name: str) -> None:
    """Case 30."""
    host = call.inputs.q.copy() if name == "out" else call.inputs.arrays[name]
    if host.dtype == np.uint8:
        host = ctm_rt.tensor.view(host, dtype="e4m3")
    with pytest.raises(ctm_rt.ArgumentError, match=f"^{name}: "):
        call.bind(**{name: host})


def test_read_only_out(call: Call) -> None:
    """Case 30."""
    with pytest.raises(ctm_rt.ArgumentError, match=r"^out: "):
        call.bind(out=ReadOnly(ctm_rt.to_device(np.zeros_like(call.inputs.q))))


def test_read_only_input(call: Call) -> None:
    """An input may be read-only."""
    call.run(call.bind(seq_lens=ReadOnly(ctm_rt.to_device(call.inputs.seq_lens))))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("q", "bf16"), ("q", "f32"), ("page_table", "i64"), ("seq_lens", "i64"), ("out", "f32")],
)
def test_dtype(call: Call, name: str, dtype: str) -> None:
    """Case 30."""
    shape = call.inputs.q.shape if name == "out" else call.inputs.arrays[name].shape
    wrong = DeviceArray.empty(shape, ctm_rt.tensor.DType(dtype))
    with pytest.raises(ctm_rt.ArgumentError, match=f"^{name}: "):
        call.bind(**{name: wrong})


@pytest.mark.parametrize("name", ["q", "kv_pool", "page_table", "seq_lens", "out"])
def test_misaligned_pointer(call: Call, name: str) -> None:
    """Case 30. Two bytes past an aligned address."""
    array = call.out if name == "out" else call.arrays[name]
    with pytest.raises(ctm_rt.ArgumentError, match=f"^{name}: "):
        call.bind(**{name: array._replace(ptr=array.ptr + 2)})


def test_misaligned_stride(call: Call) -> None:
    """Rows that are not 16 bytes apart cannot be read 16 bytes at a time."""
    batch, num_q_heads, head_dim = call.inputs.q.shape
    wide = np.zeros((batch, num_q_heads, head_dim + 1), np.float16)
    with pytest.raises(ctm_rt.ArgumentError, match=r"^q: "):
        call.bind(q=place(wide[..., :head_dim]))


def test_temporaries(module: Module) -> None:
    """Case 29. Arrays dropped while the kernel is queued live until it is done."""
    inputs = make(module, [2000, 129, 64], max_pages=16)
    queued = []
    for _ in range(20):
        arrays = Call(module, inputs).arrays
        queued.append(ctm_rt.decode_attention(**arrays, **inputs.scalars))
        del arrays
        place(np.full(inputs.kv_pool.shape, 0x7F7F, np.uint16))  # lands in memory freed too early
    for out in queued:
        assert_matches(ctm_rt.to_host(out), inputs)


def test_a_thread_without_a_context(any_module: Module) -> None:
    """The first call of a thread, on another's stream; it leaves no context behind."""
    inputs = make(any_module, [300, 5])
    call = Call(any_module, inputs)
    answers: list[object] = []

    def work(stream: int) -> None:
        for _ in range(20):
            answers.append(ctm_rt.decode_attention(**call.arrays, **inputs.scalars, stream=stream))
        answers.append(int(driver.check("cuCtxGetCurrent", cu.cuCtxGetCurrent())))

    with new_stream() as stream:
        thread = threading.Thread(target=work, args=(stream,))
        thread.start()
        thread.join()
        driver.synchronize(stream, DEVICE)
    *outs, context = answers
    assert context == 0
    assert len(outs) == 20
    for out in outs:
        assert_matches(ctm_rt.to_host(out), inputs)


def test_a_hundred_thousand_calls(any_module: Module) -> None:
    """Case 29. Nothing is left behind: no reference, no object."""
    call = Call(any_module, make(any_module, [5]))
    owners = [array.owner for array in call.arrays.values() if array is not None]
    arguments = call.arrays | call.inputs.scalars | {"out": call.out, "workspace": call.workspace}

    def counts() -> list[int]:
        driver.synchronize(0, DEVICE)
        release_done()
        gc.collect()
        return [len(gc.get_objects()), *map(sys.getrefcount, owners)]

    call.poison()
    for _ in range(1000):
        ctm_rt.decode_attention(**arguments)
    before = counts()
    for _ in range(100_000):
        ctm_rt.decode_attention(**arguments)
    after = counts()
    assert np.abs(np.subtract(after, before)).max() < 100
    assert_matches(call.result(), call.inputs)
