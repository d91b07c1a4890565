"""The parameters of one launch, as the runner takes them."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class CtmDecodeParams:
    """Everything that one decode launch needs; the caller states every extent.

    Each buffer is an array on one CUDA device (DLPack, CUDA array interface, ``DeviceArray``,
    ``TensorView``) or an int device address of packed memory, which the caller keeps alive.
    ``q_seq_len`` 1 is plain decode; above 1 the queries are a tree over the last ``q_seq_len``
    cache positions: every past key is attended, draft keys as ``tree_mask`` says, nothing is
    causal.
    """

    output: Any = None
    """[batch, q_seq_len, num_q_heads, head_size] f16; overwritten, never read."""
    q: Any = None
    """Like ``output``; rotary embedding applied."""
    kv_pool: Any = None
    """[2 * num_pages, 128, num_kv_heads, head_size] f16, or e4m3 with ``fp8_kv_cache``."""
    page_table: Any = None
    """[batch, 2, max_pages_per_seq] i32; row 1 holds V page ids, already offset by num_pages."""
    seq_lens: Any = None
    """[batch] i32, valid keys per sequence; in a tree, past + q_seq_len."""
    sinks: Any = None
    """[num_q_heads] f32 logits, or None."""
    tree_mask: Any = None
    """[batch, q_seq_len, mask_words] i32; bit j % 32 of word j // 32 of row i: i sees draft j.

    Bits at or past ``q_seq_len`` may hold anything. Only for a tree."""
    workspace: Any = None
    """f32 scratch of ``workspace_elems()`` or ``tree_workspace_elems()``."""
    semaphores: Any = None
    """i32 counters of ``semaphore_elems()`` or ``tree_semaphore_elems()``; zero at first use."""
    batch_size: int = 0
    q_seq_len: int = 1
    mask_words: int = 0
    contiguous_query_swa: bool = False
    """Tree with a window: each row has its own left edge, rather than that of the last."""
    num_q_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    num_pages: int = 0
    """K pages; the pool holds twice as many."""
    max_pages_per_seq: int = 0
    sliding_window: int = 0
    """Keys attended, the current token included; 0 means all."""
    attention_scale: float = 1.0
    """Factor of the scores; 1/sqrt(head_size) is not assumed."""
    fp8_kv_cache: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Dequantisation scales of an e4m3 pool, from stored to true."""
    fallback_available: bool = True
    """The caller has another kernel, so slow shapes may be declined (none is today)."""
    skip_softmax_scale_table: Any = None
    """i32 pairs (length bin, S), bins ascending, also on the host; None means dense."""
    skip_softmax_scale_table_len: int = 0
    """Entries to take, two to a pair; 0 means dense."""
    skip_softmax_stats: Any = None
    """One i32 to which the number of dropped (page, KV head) pairs is added, or None."""
    stream: Any = None
