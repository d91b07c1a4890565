"""Decode attention on arrays: view, bind, launch."""

from typing import Any

from ctm_rt import driver
from ctm_rt.decode.binding import F16, Arrays, bind_views, on_device
from ctm_rt.decode.scratch import forget_workspace, shared_workspace
from ctm_rt.errors import DriverError
from ctm_rt.memory import DeviceArray, Workspace, hold_until_done
from ctm_rt.modules.kernel import Launch
from ctm_rt.tensor import TensorView, view


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
    stats: Any = None,
    tree_mask: Any = None,
    contiguous_query_swa: bool = False,
    workspace: Workspace | None = None,
    stream: Any = None,
) -> Any:
    """Attend the queries of each sequence to its paged KV cache; write and return ``out``.

    The arguments are those of ``bind_decode``, and two may be left out: ``out`` is then allocated,
    and ``workspace`` is one that all calls on this stream share. Temporaries may be dropped at
    once. For a captured graph pass both, and keep them and every array as long as the graph.
    """
    handle = driver.stream_handle(stream)
    if out is None:
        q = view(q, "q")
        out = DeviceArray.empty(q.shape, F16, on_device("q", q))
    arrays = _views(q, kv_pool, page_table, seq_lens, out, sinks)
    device = arrays[0].device
    shared = workspace is None
    if workspace is None:
        workspace = shared_workspace(on_device("q", arrays[0]), handle)
    launch = bind_views(
        arrays,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        skip_softmax=skip_softmax,
        tree_mask=_optional(tree_mask, "tree_mask"),
        contiguous_query_swa=contiguous_query_swa,
        workspace=workspace,
        stream=handle,
        stats=_optional(stats, "stats"),
    )
    try:
        launch(handle)
    except DriverError:
        if shared:  # dirty, and nobody else can reset it
            forget_workspace(device, handle)
        raise
    # For a shared workspace it was asked whether the stream captures, unless it is the default one.
    may_capture = not shared or handle <= 1
    hold_until_done(launch, device, handle, may_capture=may_capture, workspace=workspace)
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
    stats: Any = None,
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
    q : (batch, num_q_heads, head_dim) or (batch, query_len, num_q_heads, head_dim), f16
        The last ``query_len`` cache positions, 1 to 128; more than one need a ``tree_mask``.
        ``num_q_heads`` is a multiple of ``num_kv_heads``: head h reads KV head h // ratio. All
        arrays are on one CUDA device; the innermost axis of each is contiguous, others may be
        strided.
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), f16 or e4m3
        Bytes count as e4m3 when that is said: ``view(array, dtype="e4m3")``.
    page_table : (batch, 2, max_pages), i32
        Row 0 lists the K pages of a sequence, row 1 its V pages, already offset by num_pages.
        Entries outside the pool make their keys invisible (``validate`` finds them). Entries past
        the length or left of the window are not read.
    seq_lens : (batch,), i32, in tokens, the queries included; clamped to 0..max_pages * 128
    scale : float; multiplies the scores, 1/sqrt(head_dim) is not assumed
    out : like ``q``; overwritten, never read. A row without a visible key gives zeros.
    sinks : (num_q_heads,), f32, optional; natural-log logits that join the denominator unscaled
    sliding_window : int; keys attended, the current one included; 0 means all
    k_scale, v_scale : float; from stored to true values of an e4m3 pool, 1 for f16
    skip_softmax : pairs (length bin, S), optional; ints, or i32 as (n, 2) or one after the other
        With strictly ascending bins. A sequence goes by the last pair whose bin its length (all of
        it, also under a window) reaches. Where S > 0, a page is dropped if its largest score lies,
        for every query head of the KV head, below that of the pages before it in the same partial
        result by more than log(length / S); so never the first, nor one that raises the maximum.
        Below the first bin, and for S = 0, nothing changes, in any bit. Host pairs are uploaded
        when they are first seen, a device array is read back when its address is; both wait for
        ``stream``, and are refused while it captures.
    stats : one i32, optional; the number of (page, KV head) pairs that were dropped is added
    tree_mask : (batch, query_len, mask_words), i32, optional
        Bit j % 32 of word j // 32 of row i: query i sees draft key j, the key at query j's
        position. Past keys are always seen, and nothing is causal: a row without its own bit does
        not see itself. Bits at or past ``query_len`` may hold anything. ``ctm_rt.tree`` makes one.
    contiguous_query_swa : bool
        With a window in a tree: row i's own position ends its window, rather than the last row's.
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
        _views(q, kv_pool, page_table, seq_lens, out, sinks),
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        sliding_window=sliding_window,
        skip_softmax=skip_softmax,
        tree_mask=_optional(tree_mask, "tree_mask"),
        contiguous_query_swa=contiguous_query_swa,
        workspace=workspace,
        stream=driver.stream_handle(stream),
        stats=_optional(stats, "stats"),
    )


def _views(q: Any, kv_pool: Any, page_table: Any, seq_lens: Any, out: Any, sinks: Any) -> Arrays:
    return (
        view(q, "q"),
        view(kv_pool, "kv_pool"),
        view(page_table, "page_table"),
        view(seq_lens, "seq_lens"),
        view(out, "out"),
        _optional(sinks, "sinks"),
    )


def _optional(array: Any, name: str) -> TensorView | None:
    return None if array is None else view(array, name)
