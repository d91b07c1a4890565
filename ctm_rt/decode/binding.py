"""From views to a launch of decode attention: check, plan, take scratch, bind."""

import itertools
import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from ctm_rt import driver
from ctm_rt.decode.plan import (
    MASK_WORD_BITS,
    DecodePlan,
    DecodeProblem,
    check,
    decode_kernels,
    module_name,
    plan_decode,
)
from ctm_rt.decode.scratch import Scratch
from ctm_rt.decode.skip_softmax import counter_on_device, table_on_device
from ctm_rt.decode.tree_plan import plan_tree, tree_kernels
from ctm_rt.errors import ArgumentError
from ctm_rt.memory import Workspace
from ctm_rt.modules.kernel import Kernel, Launch, load
from ctm_rt.modules.manifest import Manifest
from ctm_rt.paged_kv import INT32_MAX, ceil_div
from ctm_rt.tensor import HOST, DType, TensorView, with_axis, without_axis

F16, E4M3 = DType("f16"), DType("e4m3")

_LOG2E = math.log2(math.e)
_F32_MAX = (2 - 2**-23) * 2.0**127
_AXES = {
    "q": "(batch, num_q_heads, head_dim), or with query_len after batch",
    "kv_pool": "(2 * num_pages, 128, num_kv_heads, head_dim)",
    "page_table": "(batch, 2, max_pages)",
    "tree_mask": "(batch, query_len, mask_words)",
}


# q, kv_pool, page_table, seq_lens, out, and sinks or None
Arrays = tuple[TensorView, TensorView, TensorView, TensorView, TensorView, TensorView | None]


def bind_views(
    arrays: Arrays,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
    sliding_window: int,
    skip_softmax: Any,
    tree_mask: TensorView | None,
    contiguous_query_swa: bool,
    workspace: Scratch | None,
    stream: int,
    stats: TensorView | None = None,
) -> Launch:
    """Check, plan, take scratch and bind; what equal arguments gave before is found again."""
    q, kv_pool, page_table, seq_lens, out, sinks = arrays
    table = counter = None
    if skip_softmax is not None or stats is not None:
        tree = tree_mask is not None
        table, counter = _skipping(skip_softmax, stats, on_device("q", q), tree, stream)
    call = _check(
        (q[:-1], kv_pool[:-1], page_table[:-1], seq_lens[:-1], out[:-1]),
        None if sinks is None else sinks[:-1],
        scale if type(scale) is float else _float(scale),
        k_scale if type(k_scale) is float else _float(k_scale),
        v_scale if type(v_scale) is float else _float(v_scale),
        operator.index(sliding_window),
        None if tree_mask is None else (tree_mask[:-1], bool(contiguous_query_swa)),
        stream,
        None if table is None else table[:-1],
        None if counter is None else counter[:-1],
    )
    if call is None:
        return _zeros(q, out)
    if workspace is None:
        workspace = Workspace(q.device)
    scratch = workspace.scratch(call.plan.workspace_elems, stream=stream)
    semaphores = workspace.semaphores(call.plan.semaphore_elems, stream=stream)
    owner = workspace if isinstance(workspace, Workspace) else None
    owners = arrays, tree_mask, scratch, semaphores, table, counter
    return call.bind(scratch[:-1], semaphores[:-1]).keeping(owners, owner)


def _float(number: Any) -> float:
    return float(number * 1.0)  # of any type that is a number, which a string is not


def _skipping(
    skip_softmax: Any, stats: TensorView | None, device: int, tree: bool, stream: int
) -> tuple[TensorView | None, TensorView | None]:
    """Return the table and the counter as the kernel takes them; None for dense attention."""
    for name, value in (("skip_softmax", skip_softmax), ("stats", stats)):
        if tree and value is not None:
            raise ArgumentError(name, "None with a tree mask", type(value).__name__)
    return (
        None if skip_softmax is None else table_on_device(skip_softmax, device, stream),
        None if stats is None else counter_on_device(stats, device),
    )


_Values = tuple[Any, ...]  # of a view, without its owner: ``view[:-1]``


@dataclass(slots=True)
class _Call:
    """What follows from the arguments of a call, but for its scratch."""

    kernel: Kernel
    plan: DecodePlan
    arguments: dict[str, Any]
    bound: tuple[_Values, _Values, Launch] | None = None  # to what scratch it was bound last

    def bind(self, scratch: _Values, semaphores: _Values) -> Launch:
        """Bind, unless it is to the same as last; ``Kernel.bind`` compares with the manifest.

        To look further back is of no use: a stream is among a call's arguments, and mostly has one
        workspace.
        """
        bound = self.bound
        if bound is None or bound[0] != scratch or bound[1] != semaphores:
            launch = self.kernel.bind(
                **self.arguments, workspace=_view(scratch), semaphores=_view(semaphores)
            )
            self.bound = bound = scratch, semaphores, launch
        return bound[2]


# What an unbound call would take 30 us to work out, it looks up. Nothing that it finds is stale: it
# follows from the values of the arguments alone, as a kernel stays once it is loaded. They come
# without owners, so that no array and no workspace lives on for it.
@lru_cache(maxsize=1024)
def _check(
    arrays: tuple[_Values, ...],
    sinks: _Values | None,
    scale: float,
    k_scale: float,
    v_scale: float,
    window: int,
    tree: tuple[_Values, bool] | None,
    stream: int,
    skip_table: _Values | None,
    skip_dropped: _Values | None,
) -> _Call | None:
    """Check what only decode knows, and plan; None where the shapes hold no key or no row.

    ``tree`` is the mask, and whether each row has a window of its own.
    """
    q, kv_pool, page_table, seq_lens, out = map(_view, arrays)
    device = on_device("q", q)
    if 0 in q.shape:
        return None
    if len(q.shape) not in (3, 4):
        raise ArgumentError("q", _AXES["q"], q.shape)
    query_len = q.shape[1] if len(q.shape) == 4 else 1
    if query_len > 1 and tree is None:
        raise ArgumentError("tree_mask", f"a mask for {query_len} query tokens", None)
    batch, *_, num_q_heads, head_dim = q.shape
    pool_pages, _, num_kv_heads, _ = _shape("kv_pool", kv_pool)
    _, _, max_pages = _shape("page_table", page_table)
    if kv_pool.dtype not in (F16, E4M3):
        expected = 'f16 or e4m3 (of bytes: view(array, dtype="e4m3"))'
        raise ArgumentError("kv_pool", expected, kv_pool.dtype.value)
    if pool_pages % 2:
        raise ArgumentError("kv_pool", "as many V pages as K pages", f"{pool_pages} pages")
    if window < 0:
        raise ArgumentError("sliding_window", "0 or more tokens", window)
    fp8 = kv_pool.dtype is E4M3
    window = min(window, INT32_MAX)
    extents = batch, num_q_heads, num_kv_heads, head_dim, max_pages
    shape = *extents, fp8, query_len, tree is not None, window, skip_table is not None
    module = _module(*shape)
    scale_log2 = _scale_log2(scale, k_scale, v_scale, fp8)
    if tree is None:
        with_axes, of_tree = _without_query_axis, {}
    else:
        with_axes, of_tree = _with_query_axis, _tree_arguments(*tree, query_len, window)
    if not (pool_pages and max_pages):
        return None
    kernel = load(module, device=device, stream=stream)
    plan = _plan(kernel, driver.num_sms(device), *shape)
    arguments = {
        "q": with_axes(q),
        "kv_pool": kv_pool,
        "page_table": page_table,
        "seq_lens": seq_lens,
        "sinks": None if sinks is None else _view(sinks),
        "out": with_axes(out),
        "scale_log2": scale_log2,
        "v_scale": v_scale,
        "sliding_window": window,
        "kernel": plan.kernel,
        "num_groups": plan.num_groups,
        "spare_groups": plan.spare_groups,
        **of_tree,
    }
    for name, values in (("skip_table", skip_table), ("skip_dropped", skip_dropped)):
        if values is not None:  # kernels for trees do not have them
            arguments[name] = _view(values)
    return _Call(kernel, plan, arguments)


def _tree_arguments(
    mask: _Values, contiguous_query_swa: bool, query_len: int, window: int
) -> dict[str, Any]:
    """Return what the module of a tree takes beside what every module does."""
    tree_mask = _view(mask)
    _, _, words = _shape("tree_mask", tree_mask)
    least = ceil_div(query_len, MASK_WORD_BITS)
    if words < least:
        raise ArgumentError("tree_mask", f"at least {least} words for {query_len} tokens", words)
    return {
        "tree_mask": tree_mask,
        "contiguous_query_swa": int(contiguous_query_swa and window > 0),
    }


def _view(values: _Values) -> TensorView:
    return TensorView._make((*values, None))


def _zeros(q: TensorView, out: TensorView) -> Launch:
    """Return a call whose shapes hold no key, or no row: it launches nothing, and writes zeros."""
    q, out = _without_query_axis(q), _without_query_axis(out)
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


@lru_cache(maxsize=1024)  # what follows from integers alone is worked out once
def _module(*shape: Any) -> str:
    """Return the name of the module that serves a problem, which is checked."""
    problem = DecodeProblem(*shape)
    check(problem)
    return module_name(problem.head_dim, problem.fp8_kv_cache, problem.tree)


@lru_cache(maxsize=1024)
def _plan(kernel: Kernel, num_sms: int, *shape: Any) -> DecodePlan:
    problem = DecodeProblem(*shape)
    manifest = cast(Manifest, kernel.manifest)  # there is one: the kernel was asked for by name
    if problem.tree:
        return plan_tree(problem, num_sms=num_sms, kernels=tree_kernels(manifest.config))
    return plan_decode(problem, num_sms=num_sms, kernels=decode_kernels(manifest.config))


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


def _shape(name: str, array: TensorView) -> tuple[int, ...]:
    if len(array.shape) != _AXES[name].count(",") + 1:
        raise ArgumentError(name, _AXES[name], array.shape)
    return array.shape


def _without_query_axis(array: TensorView) -> TensorView:
    return without_axis(array, 1) if len(array.shape) == 4 and array.shape[1] == 1 else array


def _with_query_axis(array: TensorView) -> TensorView:
    return with_axis(array, 1) if len(array.shape) == 3 else array


def on_device(name: str, array: TensorView) -> int:
    """Return the CUDA device that ``array`` is on."""
    if array.device == HOST:
        raise ArgumentError(name, "an array on a CUDA device (to_device makes one)", "a host array")
    return array.device
