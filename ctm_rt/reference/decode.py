"""Decode attention over a paged cache, as it is defined and as a kernel rounds it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import TOKENS_PER_PAGE

Array = npt.NDArray[Any]
Pairs = Sequence[tuple[int, int]] | Array
Counts = int | Sequence[int]

_TILE_TOKENS = 64  # dealt to the partial results in turn, as a kernel deals its own


def e4m3_to_float(codes: Array) -> npt.NDArray[np.float32]:
    """Return the values of e4m3 numbers (the finite kind: no infinities, 0x7f and 0xff are NaN).

    Parameters
    ----------
    codes : uint8, or ``ml_dtypes.float8_e4m3fn``
    """
    return _E4M3[codes.view(np.uint8)]


def decode_attention(
    q: Array,
    kv_pool: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    sinks: Array | None = None,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    skip_softmax: Pairs | None = None,
    num_partials: Counts = 1,
    tree_mask: Array | None = None,
    contiguous_query_swa: bool = False,
) -> npt.NDArray[np.float64]:
    """Return softmax(scale * k_scale * q K) V * v_scale over each row's visible keys, in float64.

    A row that sees no key is zeros, with or without a sink. A NaN in a row's visible keys, values
    or query spreads to that row only. Keys whose K or V page id is outside the pool are invisible.

    Parameters
    ----------
    q : (batch, num_q_heads, head_dim) or (batch, query_len, num_q_heads, head_dim)
        The queries are the last ``query_len`` cache positions; head h reads KV head h // ratio.
    kv_pool : (2 * num_pages, 128, num_kv_heads, head_dim), f16 or e4m3 (``ml_dtypes`` or uint8)
    page_table : (batch, 2, max_pages), int32; row 0 lists K pages, row 1 V pages
    seq_lens : (batch,), int32, in tokens, the queries included; clamped to 0..max_pages * 128
    scale : float; multiplies the scores
    sinks : (num_q_heads,), optional; natural-log logits that join the denominator unscaled
    sliding_window : int; keys seen, the current one included; 0 means all
    skip_softmax : pairs (length bin, S), as (n, 2) or one after the other, optional
        A sequence goes by the last pair whose bin its length reaches; without one, or with S = 0,
        it attends all that it sees. Else its pages are dealt to ``num_partials`` in turn, and each
        drops those whose largest score lies, for every query head of the KV head, below that of
        its pages before, and by more than log(length / S). A NaN keeps its page and those after.
    num_partials : int, or one of each sequence
    tree_mask : (batch, query_len, words), int32; bit j % 32 of word j // 32 of row i
        Row i sees draft key j. Needed for more than one query token. Past keys are always seen,
        nothing is causal.
    contiguous_query_swa : bool
        With a window in a tree: row i's own position ends its window, rather than the last row's.

    Returns
    -------
    out : float64, shape of ``q``
    """
    group = q.shape[-2] // kv_pool.shape[2]
    pairs = _pairs(skip_softmax, tree_mask)
    out = np.zeros(q.shape)
    rows = _rows(q, kv_pool, page_table, seq_lens, sliding_window, tree_mask, contiguous_query_swa)
    with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN in the input are the caller's
        for row, g in itertools.product(rows, range(kv_pool.shape[2])):
            k, v = row.keys_and_values(kv_pool, g, np.float64)
            heads = range(g * group, (g + 1) * group)
            all_scores = q[row.token][heads].astype(np.float64) @ k.T * scale * k_scale
            kept = row.kept(all_scores, pairs, num_partials)
            v = v[kept]
            for h, scores in zip(heads, all_scores[:, kept], strict=True):
                sink = -np.inf if sinks is None else float(sinks[h])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                out[row.token][h] = weights @ v / total * v_scale
    return out


def decode_attention_plain(
    q: Array,
    kv_pool: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    num_partials: Counts = 1,
    sinks: Array | None = None,
    sliding_window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    skip_softmax: Pairs | None = None,
    tree_mask: Array | None = None,
    contiguous_query_swa: bool = False,
) -> npt.NDArray[np.float16]:
    """Return the same in a kernel's dtypes: f16 weights, f32 sums, merged from partial results.

    What a correct kernel can be expected to reach. Takes the arguments of ``decode_attention``, and
    in ``num_partials`` how many CTAs share the keys of a sequence.
    """
    scale_log2 = np.float32(scale * k_scale * np.log2(np.e))
    group = q.shape[-2] // kv_pool.shape[2]
    pairs = _pairs(skip_softmax, tree_mask)
    out = np.zeros(q.shape, np.float16)
    rows = _rows(q, kv_pool, page_table, seq_lens, sliding_window, tree_mask, contiguous_query_swa)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        for row, g in itertools.product(rows, range(kv_pool.shape[2])):
            heads = slice(g * group, (g + 1) * group)
            k, v = row.keys_and_values(kv_pool, g, np.float32)
            scores = q[row.token][heads].astype(np.float32) @ k.T * scale_log2
            owner = row.keys // _TILE_TOKENS % row.of(num_partials)
            kept = row.kept(scores * np.log(2), pairs, num_partials)
            parts = [
                _partial(scores[:, mine], v[mine])
                for mine in (kept & (owner == i) for i in np.unique(owner[kept]))
            ]
            logits = None if sinks is None else sinks[heads].astype(np.float32)
            out[row.token][heads] = (_merge(parts, logits) * v_scale).astype(np.float16)
    return out


def dropped_pages(
    q: Array,
    kv_pool: Array,
    page_table: Array,
    seq_lens: Array,
    *,
    scale: float,
    skip_softmax: Pairs,
    num_partials: Counts = 1,
    sliding_window: int = 0,
    k_scale: float = 1.0,
) -> npt.NDArray[np.int64]:
    """Return how many pages ``decode_attention`` drops: (batch, num_kv_heads)."""
    group = q.shape[-2] // kv_pool.shape[2]
    pairs = _pairs(skip_softmax, None)
    counts = np.zeros((len(seq_lens), kv_pool.shape[2]), np.int64)
    rows = _rows(q, kv_pool, page_table, seq_lens, sliding_window, None, False)
    with np.errstate(invalid="ignore", over="ignore"):
        for row, g in itertools.product(rows, range(kv_pool.shape[2])):
            k, _ = row.keys_and_values(kv_pool, g, np.float64)
            heads = q[row.token][g * group : (g + 1) * group].astype(np.float64)
            kept = row.kept(heads @ k.T * scale * k_scale, pairs, num_partials)
            counts[row.token[0], g] = len(np.unique(row.keys[~kept] // TOKENS_PER_PAGE))
    return counts


class _Row(NamedTuple):
    """One query token and the keys that it sees; there is at least one."""

    token: tuple[int, ...]  # its index in ``q``
    length: int  # of the sequence
    keys: Array  # cache positions
    pages: Array  # (2, keys), the K and the V page of each

    def keys_and_values(self, pool: Array, kv_head: int, dtype: type) -> tuple[Array, Array]:
        gathered = pool[self.pages, self.keys % TOKENS_PER_PAGE, kv_head]
        k, v = _floats(gathered).astype(dtype)
        return k, v

    def of(self, counts: Counts) -> int:
        return counts if isinstance(counts, int) else int(counts[self.token[0]])

    def kept(self, scores: Array, pairs: Array, num_partials: Counts) -> Array:
        """Return whether skip-softmax leaves each key, by the scores (heads, keys) of a KV head."""
        kept = np.ones(len(self.keys), bool)
        scale = 0
        for lower, value in pairs:
            if lower <= self.length:
                scale = value
        if scale == 0:
            return kept
        log_lambda = np.log(scale / self.length)
        maxima: dict[int, Array] = {}  # of each partial result, so far
        for page in np.unique(self.keys // TOKENS_PER_PAGE):
            inside = self.keys // TOKENS_PER_PAGE == page
            partial = page % self.of(num_partials)
            top = scores[:, inside].max(axis=1)
            before = maxima.get(partial, np.full_like(top, -np.inf))
            kept[inside] = not ((top < before) & (top - before < log_lambda)).all()
            maxima[partial] = np.maximum(before, top)
        return kept


def _rows(
    q: Array,
    kv_pool: Array,
    page_table: Array,
    seq_lens: Array,
    window: int,
    tree_mask: Array | None,
    per_row: bool,
) -> Iterator[_Row]:
    query_len = 1 if q.ndim == 3 else q.shape[1]
    if query_len > 1 and tree_mask is None:
        raise ArgumentError("tree_mask", f"a mask for {query_len} query tokens", None)
    if window < 0:
        raise ArgumentError("sliding_window", "0 or more tokens", window)
    for b, length in enumerate(seq_lens):
        end = min(max(int(length), 0), page_table.shape[2] * TOKENS_PER_PAGE)
        keys = np.arange(end)
        pages = page_table[b][:, keys // TOKENS_PER_PAGE]
        listed = ((pages >= 0) & (pages < kv_pool.shape[0])).all(axis=0)
        first_query = end - query_len
        for i in range(query_len):
            last = first_query + i if per_row else end - 1
            visible = listed & (keys > last - window) if window else listed.copy()
            if tree_mask is not None:
                for key in range(max(first_query, 0), end):
                    j = key - first_query
                    visible[key] &= bool(tree_mask[b, i, j // 32] >> (j % 32) & 1)
            if visible.any():
                yield _Row((b, i)[: q.ndim - 2], end, keys[visible], pages[:, visible])


def _pairs(skip_softmax: Pairs | None, tree_mask: Array | None) -> Array:
    """Return the (length bin, S) pairs; none where every page counts."""
    if skip_softmax is None:
        return np.empty((0, 2), np.int64)
    if tree_mask is not None:
        raise ArgumentError("skip_softmax", "None with a tree mask", skip_softmax)
    flat = np.asarray(skip_softmax, np.int64).reshape(-1)
    if flat.size % 2 or (flat < 0).any() or (np.diff(flat[::2]) <= 0).any():
        expected = "pairs (length bin, S), not negative, bins ascending"
        raise ArgumentError("skip_softmax", expected, flat.tolist())
    return flat.reshape(-1, 2)


def _partial(scores: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return the maximum, the sum and the unnormalised values of some keys, per head."""
    top = scores.max(axis=1)
    weights = np.exp2(scores - top[:, None])
    return top, weights.sum(axis=1), weights.astype(np.float16).astype(np.float32) @ v


def _merge(parts: list[tuple[Array, Array, Array]], sinks: Array | None) -> Array:
    """Return the normalised values of all keys; a sink joins the sum once, here."""
    tops, sums, values = (np.stack(field) for field in zip(*parts, strict=True))
    top = tops.max(axis=0)
    if sinks is not None:
        sinks = sinks * np.float32(np.log2(np.e))
        top = np.maximum(top, sinks)
    weights = np.exp2(tops - top)
    total = (weights * sums).sum(axis=0)
    if sinks is not None:
        total = total + np.exp2(sinks - top)
    merged: Array = (weights[..., None] * values).sum(axis=0) / total[:, None]
    return merged


def _floats(kv: Array) -> Array:
    if kv.dtype == np.uint8 or kv.dtype.name == "float8_e4m3fn":
        return e4m3_to_float(kv)
    if kv.dtype != np.float16:
        raise ArgumentError("kv_pool", "float16 or e4m3", kv.dtype)
    return kv


def _e4m3_values() -> npt.NDArray[np.float32]:
    """Return the value of each byte: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    values = np.where(exponent > 0, normal, np.ldexp(mantissa.astype(float), -9))
    values[code & 0x7F == 0x7F] = np.nan
    signed: npt.NDArray[np.float32] = np.where(code < 128, values, -values).astype(np.float32)
    return signed


_E4M3 = _e4m3_values()
