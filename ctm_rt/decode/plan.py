"""What decode attention serves and how it is launched: integers in, integers out.

The only place that knows the limits. A plan depends on shapes and the SM count alone, never on the
lengths, so one captured launch serves every length that the page table can hold.

The keys of one (sequence, KV head) are cut into tiles and dealt to ``groups`` clusters of
``cluster`` CTAs: CTA r of group g takes tile g * cluster + r and every (groups * cluster)-th after
it. The CTAs of a cluster merge among themselves, groups through the workspace.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeVar

from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import INT32_MAX, TOKENS_PER_PAGE, ceil_div

HEAD_DIMS = (32, 64, 128, 256, 512)
MAX_GQA_RATIO = 8  # f16, one query token, head_dim below 128
MAX_GQA_RATIO_R16 = 16  # everything else
MAX_TREE_QUERY_SEQ_LEN = 128
MASK_WORD_BITS = 32  # draft keys that a word of a tree mask tells of

HEADS_PER_TILE = 8  # query heads
MAX_GROUPS = 64  # of one sequence: the group that merges weighs two per lane
MAX_BALANCED_BATCH = 1024  # every CTA of a balanced launch reads all lengths
MAX_SMS = 256  # SMs beyond these are not used, so that sizes do not depend on the GPU

# Measured on an H200, which has 132 SMs; counts of CTAs are in proportion elsewhere.
_MEASURED_SMS = 132
# The CTAs of a launch up to which clusters of a size run all at once: of 16, one per GPC.
CLUSTER_CTAS = {16: 64, 8: 64, 6: 96, 4: 96, 3: 96, 2: 128}
# And up to which groups are added: to clusters (a second group costs 2 us, which only sequences
# that are long for a CTA win back: 16,384 tokens of 1 KB on 32 CTAs 20.9 us in two groups, 25.1 in
# one, but 4,096 9.8 and 9.5), and to CTAs without.
_GROUP_CTAS_CLUSTERS, _GROUP_CTAS_LONG, _GROUP_CTAS = 32, 64, 128
# Beyond so many tokens per CTA one long sequence would outlast the others in its few CTAs.
MAX_TOKENS_PER_CTA = 4096
_LONG_NBYTES_PER_CTA = 1 << 20  # of K and V
# Up to so many bytes of K and V, each read by two CTAs, from L2 the second time, half the heads and
# half the merge win: 64/4 heads of f16 d128, batch 1, 4,096 tokens 6.6 us in halves, 7.4 whole; at
# 8,192 9.6 and 9.8, at 16,384 15.7 and 14.6.
_HALVED_NBYTES = 32 << 20
MIN_BALANCED_TOKENS = 2048  # up to this capacity lengths cannot differ by much
# Counting one per KV head. With 2, ragged batches that fill the GPU take 2 % longer; smaller ones,
# whose every sequence is split, would not run all at once with 3.
_SPARE_GROUPS_PER_SM = 2
MAX_SPARE_GROUPS_PER_SM = 3


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
    sliding_window: int = 0  # keys; 0: all
    skip_softmax: bool = False  # with a table; a sequence may still be dense


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """One kernel of a module, as its manifest tells."""

    cluster: int  # CTAs
    head_tiles: int  # it serves ratios up to HEADS_PER_TILE times this
    tile_tokens: int
    max_tokens: int  # per CTA, at most; 0: any number
    block: int  # threads
    smem_nbytes: int
    skips: bool = False  # it serves calls with a skip-softmax table, and those alone
    min_ctas: int = 0  # of a launch, at least


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a problem is launched.

    Every sequence has ``num_groups`` groups; or, where there are ``spare_groups``, the device gives
    it one or more, in proportion to its tiles, and all sequences together have up to that many
    beyond one each.
    """

    module: str
    kernel: int  # index among the module's kernels
    cluster: int
    num_groups: int
    spare_groups: int
    grid: tuple[int, int, int]
    block: int  # threads
    smem_nbytes: int
    workspace_elems: int  # f32, 0 when no sequence can have two groups
    semaphore_elems: int  # i32, likewise

    @property
    def max_partials(self) -> int:
        """The most CTAs that share one sequence and KV head."""
        groups = min(MAX_GROUPS, 1 + self.spare_groups) if self.spare_groups else self.num_groups
        return self.cluster * groups


_Kernel = TypeVar("_Kernel")


def read_kernels(config: dict[str, Any], record: Callable[..., _Kernel]) -> tuple[_Kernel, ...]:
    """Return the kernels of a module, each as a ``record``, from its manifest's ``config``."""
    names = signature(record).parameters
    return tuple(record(*(row[name] for name in names)) for row in config["kernels"])


def decode_kernels(config: dict[str, Any]) -> tuple[DecodeKernel, ...]:
    """Return the kernels of a module of single-token decode."""
    return read_kernels(config, DecodeKernel)


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


def plan_decode(p: DecodeProblem, *, num_sms: int, kernels: tuple[DecodeKernel, ...]) -> DecodePlan:
    """Return how the module that serves ``p``, single-token decode, is launched.

    Few pairs of sequence and KV head are spread over clusters and groups of equal size. Many pairs
    fill the GPU; what their lengths then differ by is evened out on the device, with spare groups.

    Parameters
    ----------
    p : DecodeProblem
        Of at least one sequence.
    num_sms : int
        SMs of the GPU.
    kernels : tuple of DecodeKernel
        The module's, in the order of its ``kernel`` argument. Of those that could serve ``p`` in
        clusters of one size the first does; one in clusters of one CTA serves any.

    Raises
    ------
    ArgumentError
        No module serves ``p``.
    """
    check(p)
    index, num_groups, spare_groups = next(_choices(p, min(num_sms, MAX_SMS), kernels))
    cluster = kernels[index].cluster
    pairs = p.num_kv_heads * _shards(p, kernels[index].head_tiles)
    x = (p.batch + spare_groups) * pairs * cluster
    if x > INT32_MAX:
        raise ArgumentError("q", f"a batch that {INT32_MAX} CTAs serve", x)
    merges = num_groups > 1 or spare_groups > 0
    rows = (p.batch * num_groups + spare_groups) * p.num_q_heads if merges else 0
    return DecodePlan(
        module=module_name(p.head_dim, p.fp8_kv_cache, p.tree),
        kernel=index,
        cluster=cluster,
        num_groups=num_groups,
        spare_groups=spare_groups,
        grid=(x, num_groups, 1),
        block=kernels[index].block,
        smem_nbytes=kernels[index].smem_nbytes,
        workspace_elems=rows * partial_elems(p.head_dim, cluster),
        semaphore_elems=p.batch * pairs * cluster if merges else 0,
    )


def _choices(
    p: DecodeProblem, num_sms: int, kernels: tuple[DecodeKernel, ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield what can serve ``p``, best first: a kernel, ``num_groups`` and ``spare_groups``."""
    head_tiles = 1 if _halves(p, num_sms) else _shards(p, 1)
    pairs = p.batch * p.num_kv_heads * _shards(p, head_tiles)
    fitting = {
        i: kernel
        for i, kernel in enumerate(kernels)
        if (kernel.head_tiles, kernel.skips) == (head_tiles, p.skip_softmax)
    }
    cluster = largest_cluster(p, pairs, num_sms, {kernel.cluster for kernel in fitting.values()})
    for i, kernel in fitting.items():
        num_groups, spare_groups = _groups(p, pairs, num_sms, cluster, kernel.tile_tokens)
        tokens = ceil_div(capacity(p), cluster * num_groups)  # of a CTA
        short = not kernel.max_tokens or tokens <= kernel.max_tokens
        many = pairs * cluster * num_groups >= on_sms(num_sms, kernel.min_ctas)
        if kernel.cluster == cluster and short and many:
            yield i, num_groups, spare_groups


def _halves(p: DecodeProblem, num_sms: int) -> bool:
    """Return whether CTAs of half the heads each are few, and short: they read every key twice."""
    pairs = p.batch * p.num_kv_heads * 2
    nbytes = pairs * capacity(p) * _token_nbytes(p)
    return pairs * 8 <= on_sms(num_sms, CLUSTER_CTAS[8]) and nbytes <= _HALVED_NBYTES


def _shards(p: DecodeProblem, head_tiles: int) -> int:
    """Return how many CTAs of ``head_tiles`` tiles share the query heads of a KV head."""
    return ceil_div(p.num_q_heads // p.num_kv_heads, HEADS_PER_TILE * head_tiles)


def largest_cluster(p: DecodeProblem, units: int, num_sms: int, clusters: Iterable[int]) -> int:
    """Return the largest of the module's ``clusters`` of which ``units`` run all at once."""
    few = [c for c in clusters if c > 1 and units * c <= on_sms(num_sms, CLUSTER_CTAS[c])]
    cluster = max(few, default=1)
    too_long = p.batch > 1 and capacity(p) > cluster * MAX_TOKENS_PER_CTA
    return 1 if too_long else cluster


def _groups(
    p: DecodeProblem, pairs: int, num_sms: int, cluster: int, tile_tokens: int
) -> tuple[int, int]:
    """Return ``num_groups`` and ``spare_groups``."""
    if is_balanced(p, cluster):
        per_sm = MAX_SPARE_GROUPS_PER_SM if pairs >= num_sms else _SPARE_GROUPS_PER_SM
        return 1, ceil_div(per_sm * num_sms, pairs // p.batch)
    long = capacity(p) * _token_nbytes(p) > cluster * _LONG_NBYTES_PER_CTA
    clusters = _GROUP_CTAS_LONG if long else _GROUP_CTAS_CLUSTERS
    room = on_sms(num_sms, _GROUP_CTAS if cluster == 1 else clusters) // (pairs * cluster)
    tiles = ceil_div(p.max_pages * TOKENS_PER_PAGE, tile_tokens * cluster)
    return max(1, min(MAX_GROUPS, room, tiles)), 0


def is_balanced(p: DecodeProblem, cluster: int) -> bool:
    """Return whether the lengths of a batch may differ by enough to be evened out on the device."""
    many = 1 < p.batch <= MAX_BALANCED_BATCH
    return cluster == 1 and many and capacity(p) > MIN_BALANCED_TOKENS


def capacity(p: DecodeProblem) -> int:
    """Return the most tokens of a sequence that are read, those that share a page with them too."""
    pages = p.max_pages
    if p.sliding_window:
        seen = p.sliding_window + p.query_len - 1  # by any row, where each has an edge of its own
        pages = min(pages, ceil_div(seen, TOKENS_PER_PAGE) + 1)
    return pages * TOKENS_PER_PAGE


def _token_nbytes(p: DecodeProblem) -> int:
    """Return the bytes of K and V of one token and KV head."""
    return 2 * p.head_dim * (1 if p.fp8_kv_cache else 2)


def on_sms(num_sms: int, ctas: int) -> int:
    """Return for a GPU of ``num_sms`` SMs what was measured to be ``ctas``."""
    return ctas * num_sms // _MEASURED_SMS


def workspace_elems(batch: int, num_q_heads: int, head_dim: int) -> int:
    """Return the f32 scratch that holds every plan of single-token decode, on any GPU.

    Never shrinks as an argument grows: a buffer for the largest batch serves the smaller ones.

    A balanced launch needs most: num_q_heads rows for each of batch + spare_groups groups, where
    spare_groups, rounded up, times num_kv_heads is as the SMs are.
    """
    spare = MAX_SPARE_GROUPS_PER_SM * MAX_SMS * min(num_q_heads, MAX_GQA_RATIO_R16)
    rows = (min(batch, MAX_BALANCED_BATCH) + 1) * num_q_heads + spare
    return rows * partial_elems(head_dim, 1)


def semaphore_elems(batch: int, num_kv_heads: int) -> int:
    """Return the i32 counters that serve every plan of single-token decode."""
    return batch * num_kv_heads * 2 * max(CLUSTER_CTAS)


def partial_elems(head_dim: int, cluster: int) -> int:
    """Return the floats that a group leaves per row: of each CTA its maximum and sum, and the sums.

    The CTAs of a cluster own a slice of the dimensions each.
    """
    return head_dim + 2 * cluster
