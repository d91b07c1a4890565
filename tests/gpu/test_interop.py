"""Arrays and streams of the frameworks go in as they are."""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import ctm_rt
from tests.gpu.device import Call, assert_matches
from tests.gpu.inputs import Inputs, Module, make

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks say on import is theirs


@pytest.fixture
def inputs(any_module: Module) -> Inputs:
    if any_module.kv_dtype != "f16":
        pytest.skip("frameworks spell e4m3 in ways of their own")
    return make(any_module, [300, 1, 129], sinks=True)


def import_or_skip(name: str) -> ModuleType:
    return pytest.importorskip(name, exc_type=ImportError)


def test_torch(inputs: Inputs) -> None:
    """Tensors, strided ones too, on the stream that the framework has made current."""
    torch = import_or_skip("torch")
    wide = torch.from_numpy(inputs.q.base).cuda()
    arrays = {name: torch.from_numpy(a.copy()).cuda() for name, a in inputs.arrays.items()}
    arrays["q"] = wide[:, : inputs.num_q_heads]
    out = torch.full(inputs.q.shape, torch.nan, dtype=torch.float16, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = ctm_rt.decode_attention(
            **arrays, **inputs.scalars, out=out, stream=stream.cuda_stream
        )
    stream.synchronize()
    assert got is out
    assert_matches(out.cpu().numpy(), inputs)


def test_torch_reads_ours(inputs: Inputs) -> None:
    """A result that ctm_rt allocated is a tensor without a copy."""
    torch = import_or_skip("torch")
    arrays = {name: ctm_rt.to_device(a.copy()) for name, a in inputs.arrays.items()}
    out = ctm_rt.decode_attention(**arrays, **inputs.scalars)
    tensor = torch.from_dlpack(out)
    assert tensor.data_ptr() == out.ptr
    assert_matches(tensor.cpu().numpy(), inputs)


def test_torch_graph(inputs: Inputs) -> None:
    """A Launch is captured by the framework's own graphs."""
    torch = import_or_skip("torch")
    arrays = {name: torch.from_numpy(a.copy()).cuda() for name, a in inputs.arrays.items()}
    out = torch.full(inputs.q.shape, torch.nan, dtype=torch.float16, device="cuda")
    launch = ctm_rt.bind_decode(**arrays, **inputs.scalars, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(torch.cuda.current_stream().cuda_stream)
    assert torch.isnan(out).all()
    graph.replay()
    torch.cuda.synchronize()
    assert_matches(out.cpu().numpy(), inputs)


def test_cupy(inputs: Inputs) -> None:
    """Arrays and streams of CuPy; a result of ours read back by it."""
    cupy = import_or_skip("cupy")
    arrays = {name: cupy.asarray(a.copy()) for name, a in inputs.arrays.items()}
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    out = ctm_rt.decode_attention(**arrays, **inputs.scalars, stream=stream.ptr)
    stream.synchronize()
    assert_matches(cupy.asnumpy(cupy.from_dlpack(out)), inputs)


def test_jax(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of JAX, which are never written."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = import_or_skip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU")
    arrays = {name: jax.device_put(a.copy()) for name, a in inputs.arrays.items()}
    jax.block_until_ready(arrays)
    out = ctm_rt.decode_attention(**arrays, **inputs.scalars)
    ctm_rt.driver.synchronize(0, 0)
    assert_matches(np.asarray(jax.dlpack.from_dlpack(out)), inputs)


def test_stream_object(any_module: Module) -> None:
    """Anything with ``__cuda_stream__`` is a stream."""
    call = Call(any_module, make(any_module, [300, 1]))
    stream = SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    launch = call.bind()
    call.poison()
    launch(stream)
    assert_matches(call.result(), call.inputs)
