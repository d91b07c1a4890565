"""How tree decode is launched: integers in, integers out, like the ``plan`` of a single token.

The rows of one (sequence, KV head), its query tokens times the query heads that share the KV head,
are cut into blocks of a kernel's ``rows``. A block is a unit: its keys are dealt to clusters of
CTAs and to groups as those of a (sequence, KV head) of single-token decode are.
"""

import operator
from dataclasses import dataclass
from typing import Any

from ctm_rt.decode.plan import (
    CLUSTER_CTAS,
    MAX_GROUPS,
    MAX_SMS,
    DecodePlan,
    DecodeProblem,
    capacity,
    check,
    is_balanced,
    largest_cluster,
    module_name,
    on_sms,
    partial_elems,
    read_kernels,
)
from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import INT32_MAX, TOKENS_PER_PAGE, ceil_div

MIN_ROWS, MAX_ROWS = 16, 128  # of any kernel

# The CTAs that fill the GPU that was measured, an H200.
_FULL_CTAS = 128
# Groups merge through the workspace, which takes 2 us. Where clusters leave room for more of them
# that run all at once, CTAs that have so much of K each win it back, while they are fewer than draw
# what the memory gives. Trees of 16 tokens, 4 heads for each KV head of 128 dimensions: one of
# those and 8,192 tokens take 8.9 us in 8 groups, 14.0 in one, four 12.9 in two and 14.3; but 4
# sequences with 8 27.9 in two groups of 64 CTAs, 24.7 in one. e4m3 is converted at half the
# memory's pace.
_MIN_ELEMS_OF_GROUPS = 512 * 128
_F16_DRAWING_CTAS, _E4M3_DRAWING_CTAS = 64, 128
# One for each SM, counting one per unit of a sequence: 65,536 tokens of context among 31 times
# 1,024 take 140 us with trees of 16 tokens and 154 of 32; with two for each SM 145 and 184.
_SPARE_GROUPS_PER_SM = 1


@dataclass(frozen=True, slots=True)
class TreeKernel:
    """One kernel of a module, as its manifest tells."""

    rows: int  # (query token, query head) of one KV head, at most
    cluster: int  # CTAs
    tile_tokens: int
    block: int  # threads
    smem_nbytes: int


def tree_kernels(config: dict[str, Any]) -> tuple[TreeKernel, ...]:
    """Return the kernels of a module of tree decode."""
    return read_kernels(config, TreeKernel)


def plan_tree(p: DecodeProblem, *, num_sms: int, kernels: tuple[TreeKernel, ...]) -> DecodePlan:
    """Return how the module that serves ``p``, tree decode, is launched.

    Parameters
    ----------
    p : DecodeProblem
        Of at least one sequence.
    num_sms : int
        SMs of the GPU.
    kernels : tuple of TreeKernel
        The module's, in the order of its ``kernel`` argument. Of each number of rows there is one
        for clusters of one CTA, or there is of half as many.

    Raises
    ------
    ArgumentError
        No module serves ``p``.
    """
    check(p)
    num_sms = min(num_sms, MAX_SMS)
    kernel, units = _choose(p, num_sms, kernels)
    num_groups, spare_groups = _groups(p, num_sms, units, kernel)
    units_per_sequence = units // p.batch
    x = (p.batch + spare_groups) * units_per_sequence * kernel.cluster
    if x > INT32_MAX:
        raise ArgumentError("q", f"a batch that {INT32_MAX} CTAs serve", x)
    # Of the sequences that get spare groups each has one group more than that.
    slots = 2 * spare_groups or (p.batch * num_groups if num_groups > 1 else 0)
    row_elems = partial_elems(p.head_dim, kernel.cluster)
    return DecodePlan(
        module=module_name(p.head_dim, p.fp8_kv_cache, p.tree),
        kernel=kernels.index(kernel),
        cluster=kernel.cluster,
        num_groups=num_groups,
        spare_groups=spare_groups,
        grid=(x, num_groups, 1),
        block=kernel.block,
        smem_nbytes=kernel.smem_nbytes,
        workspace_elems=slots * p.query_len * p.num_q_heads * row_elems,
        semaphore_elems=units * kernel.cluster if slots else 0,
    )


def _choose(
    p: DecodeProblem, num_sms: int, kernels: tuple[TreeKernel, ...]
) -> tuple[TreeKernel, int]:
    """Return the best kernel, and how many units there are of its rows.

    Of each number of rows it is that of the largest cluster that runs all at once. No CTA has room
    for more rows than there are, as far as smaller ones exist, and rows are halved once at most.
    The best keeps most of the GPU busy. Where that is all of it, more rows a CTA read keys and
    values less often; elsewhere fewer are sooner done. On an H200, trees of 32 tokens, 4 heads for
    each of 8 KV heads, 4,096 tokens of context: 43 us at batch 8 in blocks of 128 rows, 53 of 64;
    15.5 at batch 1 of 128, 12.8 of 64.
    """
    rows = p.query_len * (p.num_q_heads // p.num_kv_heads)
    sizes = {kernel.rows for kernel in kernels}
    enough = min((size for size in sizes if size >= rows), default=max(sizes))
    full = on_sms(num_sms, _FULL_CTAS)
    found = []
    for size in (size for size in sizes if enough // 2 <= size <= enough):
        units = p.batch * p.num_kv_heads * ceil_div(rows, size)
        of_size = {kernel.cluster: kernel for kernel in kernels if kernel.rows == size}
        kernel = of_size.get(largest_cluster(p, units, num_sms, of_size))
        if kernel is not None:
            busy = min(units * kernel.cluster, full)
            found.append(((busy, size if busy == full else -size), kernel, units))
    _, kernel, units = max(found, key=operator.itemgetter(0))
    return kernel, units


def _groups(p: DecodeProblem, num_sms: int, units: int, kernel: TreeKernel) -> tuple[int, int]:
    """Return ``num_groups`` and ``spare_groups``."""
    cluster = kernel.cluster
    if is_balanced(p, cluster):
        return 1, ceil_div(_SPARE_GROUPS_PER_SM * num_sms, units // p.batch)
    if cluster == 1:
        room = on_sms(num_sms, _FULL_CTAS) // units
    elif capacity(p) * p.head_dim < cluster * _MIN_ELEMS_OF_GROUPS:
        room = 1
    else:
        drawing = on_sms(num_sms, _E4M3_DRAWING_CTAS if p.fp8_kv_cache else _F16_DRAWING_CTAS)
        room = min(
            on_sms(num_sms, CLUSTER_CTAS[cluster]) // (units * cluster),
            drawing // (p.batch * p.num_kv_heads * cluster),  # what blocks of rows share, L2 gives
        )
    tiles = ceil_div(p.max_pages * TOKENS_PER_PAGE, kernel.tile_tokens * cluster)
    return max(1, min(MAX_GROUPS, room, tiles)), 0


def tree_workspace_elems(
    batch: int, query_len: int, num_q_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Return the f32 scratch that holds every plan of tree decode, on any GPU.

    Never shrinks as ``batch`` or ``query_len`` grows. Groups of equal number are no more than SMs,
    spare ones, rounded up, ``_SPARE_GROUPS_PER_SM`` times as many, and a partial result has as many
    rows as its unit.
    """
    all_rows = query_len * num_q_heads
    rows = min(query_len * ceil_div(num_q_heads, max(num_kv_heads, 1)), MAX_ROWS)
    elems = MAX_SMS * rows
    if batch > 1:
        elems = max(elems, 2 * (_SPARE_GROUPS_PER_SM * MAX_SMS * rows + all_rows))
    return elems * partial_elems(head_dim, 1)


def tree_semaphore_elems(batch: int, query_len: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return the i32 counters that serve every plan of tree decode.

    One for each unit; or, where clusters merge, and there all run at once, for each of their CTAs.
    """
    rows = query_len * ceil_div(num_q_heads, max(num_kv_heads, 1))
    return max(batch * num_kv_heads * ceil_div(rows, MIN_ROWS), MAX_SMS)
