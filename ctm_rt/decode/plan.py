"""What decode attention serves and how it is launched: integers in, integers out.

The only place that knows the limits. A plan depends on shapes and the SM count alone, never on the
lengths, so one captured launch serves every length that the page table can hold.
"""

from dataclasses import dataclass

from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div

HEAD_DIMS = (32, 64, 128, 256, 512)
MAX_GQA_RATIO = 8  # f16, one query token, head_dim below 128
MAX_GQA_RATIO_R16 = 16  # everything else
MAX_TREE_QUERY_SEQ_LEN = 128  # four mask words

# Bounds that make the sizes below independent of the GPU. An SM more than MAX_SMS is not used; more
# than 32 splits cost the last CTA, which merges them, more than they gain.
MAX_SMS = 256
MAX_SPLITS = 32
TILE_TOKENS = 64  # the unit in which splits share a sequence
TREE_ROWS = 64  # (token, head) rows of one CTA in tree decode


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """The shapes of one call.

    ``tree`` tells a tree of one token, which has a mask, from plain decode.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_pages: int
    fp8_kv_cache: bool = False
    query_len: int = 1
    tree: bool = False


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a problem is launched: ``grid`` is (units of work, splits of each, 1)."""

    module: str
    num_splits: int
    grid: tuple[int, int, int]
    workspace_elems: int  # f32, 0 when nothing is split
    semaphore_elems: int  # i32


def gqa_ratio(num_q_heads: int, num_kv_heads: int) -> int:
    """Return the query heads per KV head, or 0 where that is no positive integer."""
    if num_q_heads <= 0 or num_kv_heads <= 0 or num_q_heads % num_kv_heads:
        return 0
    return num_q_heads // num_kv_heads


def max_gqa_ratio(head_dim: int, fp8_kv_cache: bool, tree: bool) -> int:
    """Return the largest ratio that the module of a configuration takes."""
    return MAX_GQA_RATIO if head_dim < 128 and not (fp8_kv_cache or tree) else MAX_GQA_RATIO_R16


def head_dims(fp8_kv_cache: bool, tree: bool) -> tuple[int, ...]:
    """Return the head dims that have a module."""
    return HEAD_DIMS[1:] if fp8_kv_cache and tree else HEAD_DIMS


def module_name(head_dim: int, fp8_kv_cache: bool, tree: bool) -> str:
    """Return the name in the store of the module that serves a configuration."""
    return f"fmha_decode{'_tree' * tree}_{'e4m3' if fp8_kv_cache else 'f16'}_d{head_dim}"


def check(p: DecodeProblem) -> None:
    """Raise ``ArgumentError`` unless a module serves ``p``."""
    served = head_dims(p.fp8_kv_cache, p.tree)
    if p.head_dim not in served:
        raise ArgumentError("q", f"head_dim one of {served}", p.head_dim)
    most = max_gqa_ratio(p.head_dim, p.fp8_kv_cache, p.tree)
    if not 1 <= gqa_ratio(p.num_q_heads, p.num_kv_heads) <= most:
        expected = f"1 to {most} query heads for each of {p.num_kv_heads} KV heads"
        raise ArgumentError("q", expected, f"{p.num_q_heads} heads")
    longest = MAX_TREE_QUERY_SEQ_LEN if p.tree else 1
    if not 1 <= p.query_len <= longest:
        raise ArgumentError("q", f"1 to {longest} query tokens", p.query_len)


def serves(p: DecodeProblem) -> bool:
    """Return whether a module serves ``p``."""
    try:
        check(p)
    except ArgumentError:
        return False
    return True


def plan_decode(p: DecodeProblem, *, num_sms: int) -> DecodePlan:
    """Return how ``p`` is launched on a GPU of ``num_sms`` SMs.

    Splits fill the SMs that one CTA per unit would leave idle, as far as there are tiles for them.

    Raises
    ------
    ArgumentError
        No module serves ``p``.
    """
    check(p)
    units = _units(p)
    num_tiles = ceil_div(p.max_pages * TOKENS_PER_PAGE, TILE_TOKENS)
    num_splits = max(1, min(min(num_sms, MAX_SMS) // max(units, 1), MAX_SPLITS, num_tiles))
    rows = units * TREE_ROWS if p.tree else p.batch * p.num_q_heads
    return DecodePlan(
        module=module_name(p.head_dim, p.fp8_kv_cache, p.tree),
        num_splits=num_splits,
        grid=(units, num_splits, 1),
        workspace_elems=rows * num_splits * _partial_elems(p.head_dim) if num_splits > 1 else 0,
        semaphore_elems=units,
    )


def workspace_elems(batch: int, num_q_heads: int, head_dim: int) -> int:
    """Return the f32 scratch that holds every plan of single-token decode, on any GPU.

    Never shrinks as an argument grows: a buffer for the largest batch serves the smaller ones. For
    split rows all CTAs run at once, so at most ``MAX_SMS`` of them leave a partial per row.
    """
    rows = min(batch * num_q_heads * MAX_SPLITS, MAX_SMS * MAX_GQA_RATIO_R16)
    return rows * _partial_elems(head_dim)


def semaphore_elems(batch: int, num_kv_heads: int) -> int:
    """Return the i32 counters that serve every plan of single-token decode."""
    return batch * num_kv_heads * _MAX_HEAD_SHARDS


def tree_workspace_elems(
    batch: int, query_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Return the f32 scratch that holds every plan of tree decode, on any GPU; never shrinks."""
    units = tree_semaphore_elems(batch, query_len, num_q_heads, num_kv_heads)
    return min(units * MAX_SPLITS, MAX_SMS) * TREE_ROWS * _partial_elems(head_dim)


def tree_semaphore_elems(batch: int, query_len: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the i32 counters of tree decode: one per sequence, KV head, row block and shard."""
    ratio = ceil_div(num_q_heads, max(num_kv_heads, 1))
    return batch * num_kv_heads * _tree_blocks(query_len, ratio)


_MAX_HEAD_SHARDS = 2


def _units(p: DecodeProblem) -> int:
    """Return the CTAs of ``p`` when nothing is split."""
    ratio = p.num_q_heads // p.num_kv_heads
    if p.tree:
        blocks = _tree_blocks(p.query_len, ratio)
    else:
        # 16 heads of 512 accumulators do not fit one CTA's registers.
        blocks = _MAX_HEAD_SHARDS if p.head_dim == 512 and ratio > 8 else 1
    return p.batch * p.num_kv_heads * blocks


def _tree_blocks(query_len: int, ratio: int) -> int:
    """Return the blocks of rows times the shards of heads that share one KV head."""
    shards = _MAX_HEAD_SHARDS if ratio > 8 else 1
    return shards * ceil_div(query_len * ceil_div(ratio, shards), TREE_ROWS)


def _partial_elems(head_dim: int) -> int:
    """Return the floats that a split leaves per row: the accumulator, its maximum and its sum."""
    return head_dim + 2
