"""Decode attention on arrays: view, plan, bind, launch."""

import itertools
import math
import operator
from functools import lru_cache
from typing import Any

from ctm_rt import driver
from ctm_rt.decode.plan import DecodePlan, DecodeProblem, plan_decode
from ctm_rt.decode.scratch import Scratch, forget_workspace, shared_workspace
from ctm_rt.errors import ArgumentError, DriverError
from ctm_rt.memory import DeviceArray, Workspace, hold_until_done
from ctm_rt.modules.kernel import Launch, load
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.tensor import HOST, DType, TensorView, view

F16, E4M3 = DType("f16"), DType("e4m3")

_LOG2E = math.log2(math.e)
_F32_MAX = (2 - 2**-23) * 2.0**127
_AXES = {
    "q": "(batch, num_q_heads, head_dim)",
    "kv_pool": "(2 * num_pages, 128, num_kv_heads, head_dim)",
    "page_table": "(batch, 2, max_pages)",
}


def decode_attention(
    q: Any,
    kv_pool: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    scale: float,
    out: Any = None,
    sinks: Any = None,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    skip_softmax: Any = None,
    tree_mask: Any = None,
    contiguous_query_swa: bool = False,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> Any:
    """Attend the query of each sequence to its paged KV cache; write and return ``out``.

    The arguments are those of ``bind_decode``, and two may be left out: ``out`` is then allocated,
    and ``workspace`` is one that all calls on this stream share. Temporaries may be dropped at
    once. For a captured graph pass both, and keep them and every array as long as the graph.
    """
    handle = driver.stream_handle(stream)
    if out is None:
        q = view(q, "q")
        out = DeviceArray.empty(q.shape, F16, _on_device("q", q))
    arrays = _views(q, kv_pool, page_table, seq_lens, out, sinks)
    device = _on_device("q", arrays[0])
    shared = workspace is None
    if workspace is None:
        workspace = shared_workspace(device, handle)
    launch = bind_views(
        *arrays,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        skip_softmax=skip_softmax,
        tree=tree_mask is not None,
        workspace=workspace,
        stream=handle,
    )
    try:
        launch(handle)
    except DriverError:
        if shared:  # dirty, and nobody else can reset it
            forget_workspace(device, handle)
        raise
    # Not the launch itself: the driver has copied the arguments, and their memory is warm.
    hold_until_done((arrays, workspace), device, handle)
    return out


def bind_decode(
    q: Any,
    kv_pool: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    scale: float,
    out: Any,
    sinks: Any = None,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    skip_softmax: Any = None,
    tree_mask: Any = None,
    contiguous_query_swa: bool = False,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> Launch:
    """Check, plan and fill once; the result launches the same call again and again.

    What is in ``seq_lens`` and ``page_table`` may change between launches, shapes and addresses may
    not. The ``Launch`` keeps every array alive; keep it until its last launch is done.

    Parameters
    ----------
    q : (batch, num_q_heads, head_dim) or (batch, 1, num_q_heads, head_dim), f16
        ``num_q_heads`` is a multiple of ``num_kv_heads``: head h reads KV head h // ratio. All
        arrays are on one CUDA device; the innermost axis of each is contiguous, others may be
        strided.
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), f16 or e4m3
        Bytes count as e4m3 when that is said: ``view(array, dtype="e4m3")``.
    page_table : (batch, 2, max_pages), i32
        Row 0 lists the K pages of a sequence, row 1 its V pages, already offset by num_pages.
        Entries outside the pool make their keys invisible (``validate`` finds them). Entries past
        the length or left of the window are not read.
    seq_lens : (batch,), i32, in tokens, the current one included; clamped to 0..max_pages * 128
    scale : float; multiplies the scores, 1/sqrt(head_dim) is not assumed
    out : like ``q``; overwritten, never read. A sequence without a visible key gives zeros.
    sinks : (num_q_heads,), f32, optional; natural-log logits that join the denominator unscaled
    sliding_window : int; keys attended, the current one included; 0 means all
    k_scale, v_scale : float; from stored to true values of an e4m3 pool, 1 for f16
    skip_softmax : not served yet
    tree_mask, contiguous_query_swa
        Tree decode over several query tokens: needs a module that is not exported yet.
    workspace : Workspace, optional; made for this launch when left out
        Two launches that may overlap must not share one.
    stream : int, object with ``__cuda_stream__`` or None
        Where the launches will go; asked only whether it captures, before anything is allocated.

    Raises
    ------
    ArgumentError
        An argument is outside this contract. Nothing was launched.
    ModuleError
        The module that serves it is not in the store.
    """
    return bind_views(
        *_views(q, kv_pool, page_table, seq_lens, out, sinks),
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        skip_softmax=skip_softmax,
        tree=tree_mask is not None,
        workspace=workspace,
        stream=driver.stream_handle(stream),
    )


def bind_views(
    q: TensorView,
    kv_pool: TensorView,
    page_table: TensorView,
    seq_lens: TensorView,
    out: TensorView,
    sinks: TensorView | None,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
    sliding_window: int,
    skip_softmax: Any,
    tree: bool,
    workspace: Scratch | None,
    stream: int,
) -> Launch:
    """Check what only decode knows, plan, and bind; ``Kernel.bind`` compares with the manifest."""
    device = _on_device("q", q)
    if skip_softmax is not None:
        raise ArgumentError("skip_softmax", "None: dense attention only", type(skip_softmax))
    if 0 in q.shape:
        return _zeros(q, out)
    if len(q.shape) not in (3, 4):
        raise ArgumentError("q", _AXES["q"], q.shape)
    query_len = q.shape[1] if len(q.shape) == 4 else 1
    if query_len > 1 and not tree:
        raise ArgumentError("tree_mask", f"a mask for {query_len} query tokens", None)
    if query_len == 1:
        q, out = _without_query_axis(q), _without_query_axis(out)
    *_, num_q_heads, head_dim = q.shape
    pool_pages, _, num_kv_heads, _ = _shape("kv_pool", kv_pool)
    batch, _, max_pages = _shape("page_table", page_table)
    if kv_pool.dtype not in (F16, E4M3):
        expected = 'f16 or e4m3 (of bytes: view(array, dtype="e4m3"))'
        raise ArgumentError("kv_pool", expected, kv_pool.dtype.value)
    if pool_pages % 2:
        raise ArgumentError("kv_pool", "as many V pages as K pages", f"{pool_pages} pages")
    window = operator.index(sliding_window)
    if window < 0:
        raise ArgumentError("sliding_window", "0 or more tokens", window)
    fp8 = kv_pool.dtype is E4M3
    heads = num_q_heads, num_kv_heads, head_dim
    plan = _plan(driver.num_sms(device), batch, *heads, max_pages, fp8, query_len, tree)
    scale_log2 = _scale_log2(scale, k_scale, v_scale, fp8)
    if not (pool_pages and max_pages):
        return _zeros(q, out)
    kernel = load(plan.module, device=device, stream=stream)
    if workspace is None:
        workspace = Workspace(device)
    return kernel.bind(
        q=q,
        kv_pool=kv_pool,
        page_table=page_table,
        seq_lens=seq_lens,
        sinks=sinks,
        out=out,
        workspace=workspace.scratch(plan.workspace_elems, stream=stream),
        semaphores=workspace.semaphores(plan.semaphore_elems, stream=stream),
        scale_log2=scale_log2,
        v_scale=v_scale,
        sliding_window=min(window, INT32_MAX),
        num_splits=plan.num_splits,
        workspace_owner=workspace if isinstance(workspace, Workspace) else None,
    )


def _zeros(q: TensorView, out: TensorView) -> Launch:
    """Return a call whose shapes hold no key, or no row: it launches nothing, and writes zeros."""
    expected, got = (f"{v.dtype.value} {v.shape} on device {v.device}" for v in (q, out))
    if got != expected:
        raise ArgumentError("out", expected, got)

    def fill(stream: int) -> int:
        *extents, row_elems = out.shape
        with driver.current(out.device):
            for row in itertools.product(*map(range, extents)):
                start = sum(map(operator.mul, row, out.strides)) * out.dtype.itemsize
                driver.fill_zero(out.ptr + start, row_elems * out.dtype.itemsize, stream)
        return 0

    return Launch("decode_attention", None if 0 in out.shape else fill, (out,), None)


@lru_cache(maxsize=1024)  # a plan follows from integers alone
def _plan(num_sms: int, *fields: Any) -> DecodePlan:
    return plan_decode(DecodeProblem(*fields), num_sms=num_sms)


def _scale_log2(scale: float, k_scale: float, v_scale: float, fp8: bool) -> float:
    """Return the factor that turns q K into an exponent of 2."""
    for name, value in (("scale", scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if not abs(value) <= _F32_MAX:
            raise ArgumentError(name, "a finite f32 number", value)
        if name != "scale" and value != 1 and not fp8:
            raise ArgumentError(name, "1 for an f16 pool", value)
    scale_log2 = scale * k_scale * _LOG2E
    if abs(scale_log2) > _F32_MAX:
        raise ArgumentError("scale", "scale * k_scale * log2(e) to fit f32", scale_log2)
    return scale_log2


def _views(
    q: Any, kv_pool: Any, page_table: Any, seq_lens: Any, out: Any, sinks: Any
) -> tuple[TensorView, TensorView, TensorView, TensorView, TensorView, TensorView | None]:
    return (
        view(q, "q"),
        view(kv_pool, "kv_pool"),
        view(page_table, "page_table"),
        view(seq_lens, "seq_lens"),
        view(out, "out"),
        None if sinks is None else view(sinks, "sinks"),
    )


def _shape(name: str, array: TensorView) -> tuple[int, ...]:
    if len(array.shape) != _AXES[name].count(",") + 1:
        raise ArgumentError(name, _AXES[name], array.shape)
    return array.shape


def _without_query_axis(array: TensorView) -> TensorView:
    if len(array.shape) != 4:
        return array
    (batch, _, *shape), (step, _, *strides) = array.shape, array.strides
    return array._replace(shape=(batch, *shape), strides=(step, *strides))


def _on_device(name: str, array: TensorView) -> int:
    if array.device == HOST:
        raise ArgumentError(name, "an array on a CUDA device (to_device makes one)", "a host array")
    return array.device
