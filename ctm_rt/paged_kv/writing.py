"""Write new tokens into a paged cache, and count them, on the device."""

from __future__ import annotations

from typing import Any

from ctm_rt.errors import ArgumentError
from ctm_rt.modules.kernel import Launch, load
from ctm_rt.paged_kv.launching import CHUNK_NBYTES, launch_once, on_device, require_small
from ctm_rt.paged_kv.layout import INT32_MAX
from ctm_rt.tensor import DType, TensorView, view, with_axis

_NEW = "(batch, num_kv_heads, head_dim) or (batch, tokens, num_kv_heads, head_dim)"
_LEAST_SCALE, _MOST_SCALE = 2.0**-126, 2.0**126  # their reciprocals are f32 numbers too


def append(
    k: Any,
    v: Any,
    kv_pool: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    num_tokens: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    stream: Any = None,
) -> None:
    """Write each sequence's new keys and values into its pages; see ``bind_append``.

    Temporaries may be dropped at once. A captured graph needs every array as long as it lives.
    """
    launch = bind_append(
        k,
        v,
        kv_pool,
        page_table,
        seq_lens,
        num_tokens=num_tokens,
        k_scale=k_scale,
        v_scale=v_scale,
        stream=stream,
    )
    launch_once(launch, kv_pool, stream)


def bind_append(
    k: Any,
    v: Any,
    kv_pool: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    num_tokens: Any = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    stream: Any = None,
) -> Launch:
    """Check and fill once; the result appends what ``k`` and ``v`` hold, again and again.

    ``seq_lens`` counts the new tokens already, as ``decode_attention`` takes it: one array serves
    both. New token t of sequence b goes to position ``seq_lens[b] - n + t``, where n is
    ``num_tokens[b]`` or, without it, all ``tokens``. What has no place is dropped: positions below
    0 or past the table, and entries of the table that are outside of the pool, each for itself.
    Nothing else of the pool is touched.

    Parameters
    ----------
    k, v : (batch, num_kv_heads, head_dim) or (batch, tokens, num_kv_heads, head_dim), f16
        All arrays are on one CUDA device; the innermost axis is contiguous, others may be strided,
        as in a slice of a fused QKV row.
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), f16 or e4m3; written
        Any head_dim of whole 16 bytes. f16 is stored as it is. e4m3 stores k / k_scale and
        v / v_scale, divided in f32, rounded to nearest even, what is larger than 448 as 448, NaN
        as 0x7f: ``ctm_rt.reference.float_to_e4m3``.
    page_table : (batch, 2, max_pages), i32
    seq_lens : (batch,), i32, in tokens, the new ones included; a negative one counts as 0
    num_tokens : (batch,), i32, optional
        How many of its ``tokens`` a sequence gets, the first ones; none for a slot that is free.
    k_scale, v_scale : float; from stored to true values of an e4m3 pool, 1 for f16
    stream : int, object with ``__cuda_stream__`` or None
        Asked only whether it captures, before the module is loaded.

    Raises
    ------
    ArgumentError
        An argument is outside this contract. Nothing was launched.
    ModuleError
        The module is not in the store.
    """
    new_k, new_v = _with_tokens("k", view(k, "k")), _with_tokens("v", view(v, "v"))
    pool = view(kv_pool, "kv_pool")
    device = on_device("k", new_k)
    if pool.dtype not in (DType.F16, DType.E4M3):
        expected = 'f16 or e4m3 (of bytes: view(array, dtype="e4m3"))'
        raise ArgumentError("kv_pool", expected, pool.dtype)
    _, tokens, num_kv_heads, head_dim = new_k.shape
    step = CHUNK_NBYTES // pool.dtype.itemsize
    if head_dim % step:
        raise ArgumentError("k", f"a head_dim in multiples of {step}", head_dim)
    require_small("k", new_k.shape, tokens * num_kv_heads * head_dim // step)
    kernel = load(f"kv_append_{pool.dtype}", device=device, stream=stream)
    return kernel.bind(
        k=new_k,
        v=new_v,
        kv_pool=pool,
        page_table=page_table,
        seq_lens=seq_lens,
        num_tokens=num_tokens,
        k_scale=_checked_scale("k_scale", k_scale, pool.dtype),
        v_scale=_checked_scale("v_scale", v_scale, pool.dtype),
    )


def advance(seq_lens: Any, num_tokens: Any = 1, *, stream: Any = None) -> None:
    """Add ``num_tokens`` to ``seq_lens``; see ``bind_advance``."""
    launch_once(bind_advance(seq_lens, num_tokens, stream=stream), seq_lens, stream)


def bind_advance(seq_lens: Any, num_tokens: Any = 1, *, stream: Any = None) -> Launch:
    """Check and fill once; the result adds ``num_tokens`` to ``seq_lens`` on the device.

    A captured decode loop that begins with it needs nothing of the host but the replay.

    Parameters
    ----------
    seq_lens : (batch,), i32; written
    num_tokens : int, or (batch,) i32 on the device
        For all sequences or for each; below 0 takes tokens away, as of drafts that were refused.
        Lengths stay within 0..MAX_KV_CACHE_CAPACITY.
    """
    lengths = view(seq_lens, "seq_lens")
    same = isinstance(num_tokens, int)
    if same and abs(num_tokens) > INT32_MAX:
        raise ArgumentError("num_tokens", f"{-INT32_MAX} to {INT32_MAX}", num_tokens)
    kernel = load("kv_append_lengths", device=on_device("seq_lens", lengths), stream=stream)
    return kernel.bind(
        seq_lens=lengths,
        num_tokens=None if same else num_tokens,
        tokens=num_tokens if same else 0,
    )


def _with_tokens(name: str, array: TensorView) -> TensorView:
    """Give the axis of tokens to an array that has one token a sequence."""
    if len(array.shape) == 3:
        return with_axis(array, 1)
    if len(array.shape) != 4:
        raise ArgumentError(name, _NEW, array.shape)
    return array


def _checked_scale(name: str, scale: float, dtype: DType) -> float:
    if dtype is DType.F16 and scale != 1:
        raise ArgumentError(name, "1 for an f16 pool", scale)
    if not _LEAST_SCALE <= abs(scale) <= _MOST_SCALE:
        raise ArgumentError(name, f"a size of {_LEAST_SCALE} to {_MOST_SCALE}", scale)
    return float(scale)
