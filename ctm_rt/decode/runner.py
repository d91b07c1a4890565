"""The runner: predicates, sizes, and one call that answers False instead of raising."""

import logging
import math
import threading
from typing import Any, NamedTuple

from ctm_rt import driver
from ctm_rt.decode import plan as planning
from ctm_rt.decode import tree_plan
from ctm_rt.decode.binding import E4M3, F16, bind_views
from ctm_rt.decode.params import CtmDecodeParams
from ctm_rt.decode.plan import DecodeProblem
from ctm_rt.decode.skip_softmax import table_on_device
from ctm_rt.errors import ArgumentError, DriverError, ModuleError
from ctm_rt.memory import hold_until_done
from ctm_rt.paged_kv import TOKENS_PER_PAGE
from ctm_rt.tensor import HOST, DType, TensorView, is_packed, packed_strides, view

F32, I32 = DType("f32"), DType("i32")

_log = logging.getLogger("ctm_rt")
_thread = threading.local()


class CtmDecodeAttentionRunner:
    """The kernels as a caller with another backend sees them: what is served, and did it run.

    ``run`` answers False, with the reason in ``last_error()`` and in the log ``ctm_rt``, when the
    shape is declined, the module cannot be loaded or the launch fails. Anything else raises.
    """

    MAX_GQA_RATIO = planning.MAX_GQA_RATIO
    MAX_GQA_RATIO_R16 = planning.MAX_GQA_RATIO_R16
    MAX_TREE_QUERY_SEQ_LEN = planning.MAX_TREE_QUERY_SEQ_LEN

    @staticmethod
    def supported(
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        fp8_kv_cache: bool,
        sliding_window: bool,
        sinks: bool,
    ) -> bool:
        """Return whether single-token decode serves the configuration."""
        return planning.serves(
            DecodeProblem(1, num_q_heads, num_kv_heads, head_size, 1, fp8_kv_cache)
        )

    @staticmethod
    def supported_tree(
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        fp8_kv_cache: bool,
        sliding_window: bool,
        contiguous_query_swa: bool,
    ) -> bool:
        """Return whether tree decode serves the configuration, with either form of window."""
        return planning.serves(
            DecodeProblem(1, num_q_heads, num_kv_heads, head_size, 1, fp8_kv_cache, tree=True)
        )

    @staticmethod
    def supports_tree_query_seq_len(q_seq_len: int) -> bool:
        """Return whether a tree of ``q_seq_len`` tokens has every bit of its mask applied."""
        return 1 <= q_seq_len <= planning.MAX_TREE_QUERY_SEQ_LEN

    workspace_elems = staticmethod(planning.workspace_elems)
    semaphore_elems = staticmethod(planning.semaphore_elems)
    tree_workspace_elems = staticmethod(tree_plan.tree_workspace_elems)
    tree_semaphore_elems = staticmethod(tree_plan.tree_semaphore_elems)

    @staticmethod
    def run(params: CtmDecodeParams) -> bool:
        """Launch one decode; return whether it was launched.

        Raises
        ------
        ArgumentError
            A buffer is not what its extents say, or a number is out of range. Nothing was launched.
        """
        try:
            reason = _declined(params)
            if reason is None:
                _launch(params)
        except (ModuleError, DriverError) as error:
            reason = str(error)
        if reason is not None:
            _log.warning("decode not run: %s", reason)
        _thread.last_error = reason
        return reason is None

    @staticmethod
    def last_error() -> str | None:
        """Return why this thread's last ``run`` was False; None if it was not."""
        return getattr(_thread, "last_error", None)


def _declined(p: CtmDecodeParams) -> str | None:
    """Return why no module serves ``p``, if so."""
    heads, tree = (p.num_q_heads, p.num_kv_heads, p.head_size), p.q_seq_len != 1
    shape = p.batch_size, *heads, p.max_pages_per_seq
    try:
        planning.check(DecodeProblem(*shape, p.fp8_kv_cache, p.q_seq_len, tree))
    except ArgumentError as error:
        return str(error)
    return None


def _launch(p: CtmDecodeParams) -> None:
    """Bind and launch ``p``, whose shape is served."""
    if not p.batch_size:
        return
    device, tree = _device(p.q), p.q_seq_len != 1
    tokens = (p.q_seq_len,) if tree else ()
    rows = p.batch_size, *tokens, p.num_q_heads, p.head_size
    pool = 2 * p.num_pages, TOKENS_PER_PAGE, p.num_kv_heads, p.head_size
    table = p.batch_size, 2, p.max_pages_per_seq
    mask = p.batch_size, p.q_seq_len, p.mask_words
    stream = driver.stream_handle(p.stream)
    stats = p.skip_softmax_stats
    if stats is not None:
        stats = _buffer("skip_softmax_stats", stats, (1,), I32, device)
    arrays = (
        _buffer("q", p.q, rows, F16, device),
        _buffer("kv_pool", p.kv_pool, pool, E4M3 if p.fp8_kv_cache else F16, device),
        _buffer("page_table", p.page_table, table, I32, device),
        _buffer("seq_lens", p.seq_lens, (p.batch_size,), I32, device),
        _buffer("output", p.output, rows, F16, device),
        None if p.sinks is None else _buffer("sinks", p.sinks, (p.num_q_heads,), F32, device),
    )
    launch = bind_views(
        arrays,
        scale=p.attention_scale,
        k_scale=p.k_scale if p.fp8_kv_cache else 1.0,
        v_scale=p.v_scale if p.fp8_kv_cache else 1.0,
        sliding_window=p.sliding_window,
        skip_softmax=_skip_table(p, device, stream),
        tree_mask=_buffer("tree_mask", p.tree_mask, mask, I32, device) if tree else None,
        contiguous_query_swa=p.contiguous_query_swa,
        workspace=_CallerScratch(p, device),
        stream=stream,
        stats=stats,
    )
    launch(stream)
    hold_until_done((launch,), device, stream)


def _skip_table(p: CtmDecodeParams, device: int, stream: int) -> TensorView | None:
    table, entries = p.skip_softmax_scale_table, p.skip_softmax_scale_table_len
    if table is None or not entries:
        return None
    if isinstance(table, int) and table:
        table = _packed(table, (entries,), I32, device)
    name = "skip_softmax_scale_table"
    return table_on_device(table, device, stream, name=name, entries=entries)


class _CallerScratch(NamedTuple):
    """The scratch and counters that the caller allocated."""

    params: CtmDecodeParams
    device: int

    def scratch(self, elems: int, *, stream: int) -> TensorView:
        return self._first("workspace", self.params.workspace, elems, F32)

    def semaphores(self, elems: int, *, stream: int) -> TensorView:
        return self._first("semaphores", self.params.semaphores, elems, I32)

    def _first(self, name: str, value: Any, elems: int, dtype: DType) -> TensorView:
        """Take an address, or an array that is large enough, as ``elems`` elements."""
        if elems == 0:
            return _packed(0, (0,), dtype, self.device)
        if isinstance(value, int) and value:
            return _packed(value, (elems,), dtype, self.device)
        array = view(value, name)
        if array.dtype is not dtype or not is_packed(array) or math.prod(array.shape) < elems:
            expected = f"{dtype.value}, packed, at least {elems} elements"
            raise ArgumentError(name, expected, f"{array.dtype.value} {array.shape}")
        return array._replace(shape=(elems,), strides=(1,))


def _device(q: Any) -> int:
    device = driver.pointer_device(q) if isinstance(q, int) else view(q, "q").device
    if device is None or device == HOST:
        raise ArgumentError("q", "an address or an array on a CUDA device", q)
    return device


def _buffer(name: str, value: Any, shape: tuple[int, ...], dtype: DType, device: int) -> TensorView:
    """View an array that must have ``shape``, or take an address as packed memory of it."""
    if isinstance(value, int) and value:
        return _packed(value, shape, dtype, device)
    array = view(value, name, dtype="e4m3" if dtype is E4M3 else None)
    if array.dtype is not dtype or array.shape not in (shape, (shape[0], 1, *shape[1:])):
        raise ArgumentError(name, f"{dtype.value} {shape}", f"{array.dtype.value} {array.shape}")
    if array.device != device:
        raise ArgumentError(name, f"an array on CUDA device {device}, like q", array.device)
    return array


def _packed(ptr: int, shape: tuple[int, ...], dtype: DType, device: int) -> TensorView:
    return TensorView(ptr, shape, packed_strides(shape), dtype, device, False, None)
