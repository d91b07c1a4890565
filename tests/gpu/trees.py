"""Inputs of one call of tree decode, poisoned like those of a single token, and what is exact."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import ctm_rt
from ctm_rt import tree
from ctm_rt.decode import tree_plan
from ctm_rt.decode.tree_plan import TreeKernel, tree_kernels
from ctm_rt.reference import e4m3_to_float
from tests.gpu.device import HALF_STEP, TOLERANCE, Call
from tests.gpu.inputs import INT32_MAX, PAGE, POISON, Inputs, Module, make


@dataclass(frozen=True, eq=False)
class TreeInputs(Inputs):
    """``q`` is (batch, query_len, num_q_heads, head_dim)."""

    tree_mask: np.ndarray | None = None
    contiguous_query_swa: bool = False

    @property
    def arrays(self) -> dict[str, np.ndarray | None]:
        """The arguments that live in memory."""
        return {**super().arrays, "tree_mask": self.tree_mask}

    @property
    def scalars(self) -> dict[str, float]:
        """The arguments that do not."""
        return {**super().scalars, "contiguous_query_swa": self.contiguous_query_swa}

    @property
    def query_len(self) -> int:
        return self.q.shape[1]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[2]

    def take(self, sequences: NDArray[np.integer] | list[int]) -> "TreeInputs":
        """The same call for a few of the sequences."""
        return replace(super().take(sequences), tree_mask=self.tree_mask[sequences])

    def first(self, query_len: int) -> "TreeInputs":
        """The same call for the first queries; they are the last cache positions now."""
        return replace(self, q=self.q[:, :query_len], tree_mask=self.tree_mask[:, :query_len])


def make_tree(
    module: Module,
    lengths: list[int] | NDArray[np.integer],
    query_len: int,
    *,
    ratio: int = 4,
    num_kv_heads: int = 2,
    visible: ArrayLike | None = None,
    mask_words: int | None = None,
    sliding_window: int = 0,
    contiguous_query_swa: bool = False,
    hidden: float | None = None,
    seed: int = 0,
    **options: Any,
) -> TreeInputs:
    """Random inputs, poisoned wherever no row looks.

    q and the mask are slices of wider arrays, of more tokens, heads and words. A draft token that
    no row sees is NaN; bits past the last query, and words past those needed, are garbage.

    Parameters
    ----------
    module, lengths, ratio, num_kv_heads, options : as for ``make``
    query_len : int
    visible : broadcast to (batch, query_len, query_len), bool; query i sees draft key j
        By default by chance, and the third row of each sequence sees none.
    mask_words : int; more than are needed
    hidden : instead of NaN, for a draft token that no row sees
    """
    rng = np.random.default_rng(seed)
    widest = sliding_window
    if sliding_window and contiguous_query_swa:
        widest = min(sliding_window + query_len - 1, INT32_MAX)
    # Without its own fused q: the pool, the table, the lengths and the sinks are what is wanted.
    plain = make(
        module,
        lengths,
        ratio=ratio,
        num_kv_heads=num_kv_heads,
        sliding_window=widest,
        fused_q=False,
        seed=seed,
        **options,
    )
    batch, num_q_heads = plain.batch, plain.num_q_heads
    q = np.full((batch, query_len + 1, num_q_heads + 3, module.head_dim), np.nan, np.float16)
    q = q[:, :query_len, :num_q_heads]
    q[:] = rng.standard_normal(q.shape, np.float32)

    shape = batch, query_len, query_len
    if visible is None:
        visible = rng.random(shape) < 0.5
        visible[:, 2:3] = False
    visible = np.broadcast_to(visible, shape)
    inputs = TreeInputs(
        **{**vars(plain), "q": q, "sliding_window": sliding_window},
        tree_mask=pack_with_garbage(rng, visible, mask_words),
        contiguous_query_swa=contiguous_query_swa,
    )
    poison_unseen(module, inputs, visible, hidden)
    return inputs


def pack_with_garbage(
    rng: np.random.Generator, visible: np.ndarray, mask_words: int | None
) -> np.ndarray:
    """Pack a mask into a slice of an array that is garbage all over."""
    batch, query_len, _ = visible.shape
    words = mask_words or -(-query_len // 32)
    garbage = rng.integers(-(2**31), 2**31, (batch, query_len + 1, words + 1), np.int32)
    tree_mask = garbage[:, :query_len, :words]
    told = tree.pack(np.ones((1, query_len, query_len), bool), mask_words=words)[:1, :1]
    tree_mask[:] = tree_mask & ~told | tree.pack(visible, mask_words=words)
    return tree_mask


def poison_unseen(
    module: Module, inputs: TreeInputs, visible: np.ndarray, value: float | None
) -> None:
    """Overwrite the draft tokens that no row sees."""
    capacity = inputs.page_table.shape[2] * PAGE
    filling = POISON[module.kv_dtype] if value is None else value
    for b, length in enumerate(inputs.seq_lens):
        end = min(max(int(length), 0), capacity)
        keys = end - inputs.query_len + np.flatnonzero(~visible[b].any(axis=0))
        keys = keys[keys >= 0]
        pages = inputs.page_table[b, :, keys // PAGE]  # key, then K and V
        listed = (pages >= 0) & (pages < len(inputs.kv_pool))  # not left of the window
        inputs.kv_pool[pages[listed], np.repeat(keys[:, None] % PAGE, 2, 1)[listed]] = filling


def exact(inputs: TreeInputs) -> np.ndarray:
    """Return the answer in float64, all rows of a sequence at once; visible tokens are finite.

    Another way to the same numbers than ``ctm_rt.reference``, and fast enough for many shapes.
    """
    out = np.zeros(inputs.q.shape)
    pool_pages, _, num_kv_heads, head_dim = inputs.kv_pool.shape
    query_len = inputs.query_len
    drafts = tree.unpack(np.ascontiguousarray(inputs.tree_mask))
    for b, length in enumerate(inputs.seq_lens):
        end = min(max(int(length), 0), inputs.page_table.shape[2] * PAGE)
        keys = np.arange(end)
        pages = inputs.page_table[b][:, keys // PAGE]
        sees = np.ones((query_len, end), bool)
        num_drafts = min(query_len, end)
        sees[:, end - num_drafts :] = drafts[b][:, query_len - num_drafts :]
        sees &= ((pages >= 0) & (pages < pool_pages)).all(axis=0)
        if inputs.sliding_window:
            behind = np.arange(query_len)[::-1] * inputs.contiguous_query_swa
            sees &= keys >= end - behind[:, None] - inputs.sliding_window
        seen = np.flatnonzero(sees.any(axis=0))
        kv = inputs.kv_pool[pages[:, seen], seen % PAGE]
        kv = (e4m3_to_float(kv) if kv.dtype == np.uint8 else kv).astype(np.float64)
        k, v = kv.transpose(0, 2, 1, 3)  # KV head, key, dimension

        # A row of a KV head is a token and a query head, token by token.
        q = inputs.q[b].reshape(query_len, num_kv_heads, -1, head_dim).astype(np.float64)
        q = q.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
        ratio = q.shape[1] // query_len
        scores = q @ k.swapaxes(1, 2) * (inputs.scale * inputs.k_scale)
        scores[:, ~sees[:, seen].repeat(ratio, axis=0)] = -np.inf
        sinks = np.full(inputs.num_q_heads, -np.inf) if inputs.sinks is None else inputs.sinks
        sinks = np.tile(sinks.astype(np.float64).reshape(num_kv_heads, ratio), query_len)
        top = np.maximum(scores.max(axis=2, initial=-np.inf), sinks)
        top = np.where(np.isfinite(top), top, 0.0)
        weights = np.exp(scores - top[..., None])
        total = weights.sum(axis=2)
        total = np.where(total > 0, total + np.exp(sinks - top), 1.0)  # no key: zeros
        rows = (weights / total[..., None]) @ v
        rows = rows.reshape(num_kv_heads, query_len, ratio, head_dim).swapaxes(0, 1)
        out[b] = rows.reshape(out[b].shape) * inputs.v_scale
    return out


class TreeCall(Call):
    """One call of tree decode on the device."""

    inputs: TreeInputs

    def kernels(self) -> dict[int, TreeKernel]:
        """Return the module's kernels by their index: each can serve any call."""
        return dict(enumerate(tree_kernels(self.kernel.manifest.config)))

    def sizes(self) -> tuple[int, int]:
        """Return how much scratch holds every plan, and how many counters any way of dealing."""
        inputs = self.inputs
        shape = inputs.batch, inputs.query_len, inputs.num_q_heads, inputs.num_kv_heads
        elems = tree_plan.tree_workspace_elems(*shape, self.module.head_dim)
        return elems, 8 * tree_plan.tree_semaphore_elems(*shape)

    def possible(
        self, dealings: Sequence[tuple[int, int]], cluster: int
    ) -> Sequence[tuple[int, int]]:
        """Return all: clusters of trees know spare groups, though no plan has any for them."""
        return dealings

    @property
    def more_scalars(self) -> dict[str, int]:
        """The form of window."""
        return {"contiguous_query_swa": int(self.inputs.contiguous_query_swa)}

    def partial_rows(self, num_groups: int, spare_groups: int) -> int:
        """Return how many rows of partial results a launch may leave."""
        slots = 2 * spare_groups or self.inputs.batch * num_groups
        return slots * self.inputs.query_len * self.inputs.num_q_heads


def decode_tree(module: Module, inputs: TreeInputs) -> np.ndarray:
    """Run one call with buffers of its own."""
    return TreeCall(module, inputs).run()


def assert_tree_matches(
    got: np.ndarray, inputs: TreeInputs, expected: np.ndarray | None = None, what: str = ""
) -> None:
    """Match float64 in each token of each tree, so that no token hides another.

    Of few elements the roundings even out less: of 20,000 rows of 32 dimensions one errs by 6e-4 of
    its norm, where all together err by 3.3e-4.
    """
    expected = exact(inputs) if expected is None else expected
    elems = expected[0, 0].size
    error = np.sqrt(np.square(got - expected).sum(axis=(2, 3)))
    tolerance = TOLERANCE * (1 + 4 / np.sqrt(elems))
    allowed = tolerance * np.sqrt(np.square(expected).sum(axis=(2, 3)))
    allowed += HALF_STEP * np.sqrt(elems)
    wrong = ~(error <= allowed)  # NaN is
    if wrong.any():
        b, i = np.argwhere(wrong)[0]
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} tokens wrong, first {i} of {inputs.query_len} of "
            f"sequence {b} of {inputs.seq_lens[b]}: error {error[b, i]:.3g}, "
            f"allowed {allowed[b, i]:.3g}; {what}"
        )


def tree_reference(inputs: TreeInputs) -> np.ndarray:
    """Return the float64 definition, which knows what NaN and infinity do; slow."""
    with np.errstate(all="ignore"):
        return ctm_rt.reference.decode_attention(**inputs.arrays, **inputs.scalars)
