"""Inputs of one decode call, with poison wherever the contract says that the kernel does not look.

The pool is NaN all over, guard pages around it too, and only visible tokens are then written. So a
page tail, a page that no row lists, a page or a slot left of the window: whatever the kernel reads
without being asked shows in ``out``. Unused table entries are -1, INT32_MAX or a poisoned page.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctm_rt.decode.plan import max_gqa_ratio
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from ctm_rt.reference import e4m3_to_float

POISON = {"f16": np.float16(np.nan), "e4m3": np.uint8(0x7F)}


class Module(NamedTuple):
    """A decode module of the store."""

    name: str
    kv_dtype: str
    head_dim: int

    @property
    def max_ratio(self) -> int:
        """Query heads that may share a KV head."""
        return max_gqa_ratio(self.head_dim, self.kv_dtype == "e4m3", "_tree_" in self.name)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Host arrays and scalars, under the names of ``ctm_rt.decode_attention``; e4m3 as uint8."""

    q: np.ndarray
    kv_pool: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    scale: float
    sinks: np.ndarray | None = None
    sliding_window: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0

    @property
    def arrays(self) -> dict[str, np.ndarray | None]:
        """The arguments that live in memory."""
        names = ("q", "kv_pool", "page_table", "seq_lens", "sinks")
        return {name: getattr(self, name) for name in names}

    @property
    def scalars(self) -> dict[str, float]:
        """The arguments that do not."""
        names = ("scale", "sliding_window", "k_scale", "v_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def num_q_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_pool.shape[2]

    def take(self, sequences: NDArray[np.integer] | list[int]) -> "Inputs":
        """The same call for a few of the sequences; what a slow reference can check."""
        picked = {n: getattr(self, n)[sequences] for n in ("q", "page_table", "seq_lens")}
        return replace(self, **picked)


def make(
    module: Module,
    lengths: list[int] | NDArray[np.integer],
    *,
    ratio: int = 4,
    num_kv_heads: int = 2,
    max_pages: int | None = None,
    sliding_window: int = 0,
    scale: float | None = None,
    sinks: bool = False,
    keys: object = None,
    values: object = None,
    fused_q: bool = True,
    head_major: bool = False,
    poison: float | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs for sequences of these lengths, poisoned.

    Parameters
    ----------
    module : Module
    lengths : tokens of each sequence
    keys, values : broadcast to (visible tokens of all sequences, num_kv_heads, head_dim)
        Instead of random ones.
    fused_q, head_major : whether ``q`` is a slice of a fused QKV row, and the pool
        (pages, heads, 128, head_dim) in memory
    poison : instead of NaN
    """
    rng = np.random.default_rng(seed)
    head_dim, dtype = module.head_dim, module.kv_dtype
    seq_lens = np.asarray(lengths, np.int32)
    page_table, num_pages = _page_table(rng, seq_lens, sliding_window, max_pages)

    guarded = (2 * num_pages + 2, num_kv_heads, PAGE, head_dim)
    if not head_major:
        guarded = (guarded[0], PAGE, num_kv_heads, head_dim)
    filling = POISON[dtype] if poison is None else np.asarray(poison, POISON[dtype].dtype)
    guarded_pool = np.full(guarded, filling)
    kv_pool = (guarded_pool.transpose(0, 2, 1, 3) if head_major else guarded_pool)[1:-1]

    sequence, token = _visible_tokens(seq_lens, sliding_window)
    for row, given in enumerate((keys, values)):
        shape = (len(token), num_kv_heads, head_dim)
        written = random_kv(rng, dtype, shape) if given is None else np.broadcast_to(given, shape)
        kv_pool[page_table[sequence, row, token // PAGE], token % PAGE] = written

    batch, num_q_heads = len(seq_lens), num_kv_heads * ratio
    beside = 2 * num_kv_heads if fused_q else 0
    row = np.full((batch, num_q_heads + beside, head_dim), np.nan, np.float16)
    q = row[:, :num_q_heads]
    q[:] = rng.standard_normal(q.shape, np.float32)
    return Inputs(
        q,
        kv_pool,
        page_table,
        seq_lens,
        head_dim**-0.5 if scale is None else scale,
        rng.normal(1, 2, num_q_heads).astype(np.float32) if sinks else None,
        sliding_window,
    )


def random_kv(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of about unit size: normal in f16, codes between -4 and 4 in e4m3."""
    if dtype == "f16":
        return rng.standard_normal(shape, np.float32).astype(np.float16)
    sign, magnitude = rng.integers(0, 2, shape, np.uint8), rng.integers(0, 0x49, shape, np.uint8)
    return magnitude | sign << 7


def number(module: Module, value: float) -> np.generic:
    """Return ``value``, or what is nearest to it, in the module's KV dtype."""
    if module.kv_dtype == "f16":
        return np.float16(value)
    return np.uint8(np.nanargmin(np.abs(e4m3_to_float(np.arange(256, dtype=np.uint8)) - value)))


def rising_keys(module: Module) -> np.ndarray:
    """Return 4,096 keys, of one head, whose first element rises from 0 to 30, the rest being 0."""
    keys = np.full((4096, 1, module.head_dim), number(module, 0))
    keys[:, 0, 0] = np.repeat([number(module, 2 * level) for level in range(16)], 256)
    return keys


def _page_table(
    rng: np.random.Generator, seq_lens: np.ndarray, window: int, max_pages: int | None
) -> tuple[np.ndarray, int]:
    """Shuffled pages for visible tokens, nonsense elsewhere; and how many K pages there are."""
    end = -(-np.maximum(seq_lens, 0) // PAGE)
    start = np.maximum(seq_lens - window, 0) // PAGE if window else np.zeros_like(end)
    columns = np.arange(end.max(initial=0) + 1 if max_pages is None else max_pages)
    needed = (columns >= start[:, None]) & (columns < end[:, None])
    num_needed = int(needed.sum())
    num_pages = num_needed + 2  # two pages of K and of V that no sequence needs

    page_table = np.empty((len(seq_lens), 2, len(columns)), np.int32)
    for row in (0, 1):
        ids = rng.permutation(num_pages).astype(np.int32) + row * num_pages
        nonsense = np.array([-1, INT32_MAX, ids[-1]], np.int32)[columns % 3]
        page_table[:, row] = np.where(columns < start[:, None], np.int32(-1), nonsense)
        page_table[:, row][needed] = ids[:num_needed]
    return page_table, num_pages


def _visible_tokens(seq_lens: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, token) of every visible key of the batch."""
    left = np.maximum(seq_lens - window, 0) if window else np.zeros_like(seq_lens)
    count = np.maximum(seq_lens - left, 0)
    sequence = np.repeat(np.arange(len(seq_lens)), count)
    return sequence, np.arange(count.sum()) - np.repeat(np.cumsum(count) - count - left, count)
