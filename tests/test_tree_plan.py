"""How trees are launched: every row and key dealt once, sizes that hold every plan."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt.decode import plan as planning
from ctm_rt.decode import tree_plan
from ctm_rt.decode.plan import DecodeProblem
from ctm_rt.decode.tree_plan import TreeKernel, plan_tree, tree_kernels
from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div
from kernels.variants import VARIANTS
from tests.dealing import Dealing
from tests.test_plan import problems

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")

VARIANT = {variant.name: variant for variant in VARIANTS if variant.family == "fmha_decode_tree"}
TABLES = {
    (arch, name): tree_kernels(variant.config(arch))
    for arch, (name, variant) in itertools.product(ARCHS, VARIANT.items())
    if variant.supports(arch)
}
# As many forms as a module may have, in no order.
FORMS = tuple(
    TreeKernel(rows, cluster, 64, 2 * rows, 1000)
    for rows, cluster in itertools.product((64, 16, 128), (2, 1, 8, 4, 3, 6))
)


def test_all_nine_modules_have_a_table():
    assert len(VARIANT) == 9
    for (arch, name), kernels in TABLES.items():
        of_rows = {k.rows: [c.cluster for c in kernels if c.rows == k.rows] for k in kernels}
        for rows, clusters in of_rows.items():
            assert tree_plan.MIN_ROWS <= rows <= tree_plan.MAX_ROWS, (arch, name)
            in_pairs = name in ("fmha_decode_tree_e4m3_d64", "fmha_decode_tree_e4m3_d128")
            if (arch, rows, in_pairs) == ("sm_90a", 128, True):
                assert clusters == [2]
                assert 1 in of_rows[64]
            else:
                assert 1 in clusters
            assert len(set(clusters)) == len(clusters)
            if arch != "sm_120a":  # has clusters, and 99 KB, in which few find room
                assert (max(clusters) > 1) == (arch in ("sm_90a", "sm_100a")), (arch, name)


@pytest.mark.parametrize(("arch", "name"), TABLES)
def test_each_kernel_has_its_plans(arch, name):
    """None is exported in vain."""
    kernels, key = TABLES[arch, name], VARIANT[name].key
    shapes = itertools.product((1, 2, 3, 4, 8, 32), (1, 8), (1, 4), (1, 4, 16, 32, 128), (8, 512))
    used = {
        plan_tree(
            DecodeProblem(
                *(batch, ratio * heads, heads, key["head_dim"], pages, key["kv_dtype"] == "e4m3"),
                query_len=query_len,
                tree=True,
            ),
            num_sms=132,
            kernels=kernels,
        ).kernel
        for batch, heads, ratio, query_len, pages in shapes
    }
    assert used == set(range(len(kernels)))


@st.composite
def planned(draw, max_batch=3000):
    """A problem, the kernels of a module, and its plan on some GPU."""
    p = draw(problems(trees=[True], max_batch=max_batch))
    p = dataclasses.replace(p, sliding_window=draw(st.sampled_from([0, 0, 1, 100, 5000])))
    name = planning.module_name(p.head_dim, p.fp8_kv_cache, tree=True)
    some = draw(st.sets(st.sampled_from(FORMS), min_size=1))
    some |= {dataclasses.replace(kernel, cluster=1) for kernel in some}
    tables = [table for (_, of), table in TABLES.items() if of == name]
    kernels = draw(st.sampled_from([*tables, tuple(some)]))
    return p, kernels, plan_tree(p, num_sms=draw(st.integers(1, 256)), kernels=kernels)


def row_blocks(p, kernel):
    return ceil_div(p.query_len * p.num_q_heads // p.num_kv_heads, kernel.rows)


@given(planned())
def test_the_kernel_serves_the_problem(case):
    p, kernels, plan = case
    kernel = kernels[plan.kernel]
    assert (kernel.cluster, kernel.block) == (plan.cluster, plan.block)
    assert kernel.smem_nbytes == plan.smem_nbytes
    assert plan.module == planning.module_name(p.head_dim, p.fp8_kv_cache, tree=True)
    rows = p.query_len * p.num_q_heads // p.num_kv_heads
    smaller = [k.rows for k in kernels if k.rows < kernel.rows]
    assert all(size < rows for size in smaller), "a block that fewer rows would hold"


@given(planned())
def test_the_grid(case):
    p, kernels, plan = case
    x, y, z = plan.grid
    units = p.num_kv_heads * row_blocks(p, kernels[plan.kernel])  # of a sequence
    assert x == (p.batch + plan.spare_groups) * units * plan.cluster < 2**31
    assert 1 <= y == plan.num_groups <= planning.MAX_GROUPS <= 65_535
    assert z == 1
    if plan.spare_groups:
        assert (plan.cluster, plan.num_groups) == (1, 1)
        assert 1 < p.batch <= planning.MAX_BALANCED_BATCH


@given(planned())
def test_sizes_hold_every_plan(case):
    p, kernels, plan = case
    heads = p.num_q_heads, p.num_kv_heads
    elems = tree_plan.tree_workspace_elems(p.batch, p.query_len, *heads, p.head_dim)
    counters = tree_plan.tree_semaphore_elems(p.batch, p.query_len, *heads)
    assert plan.workspace_elems <= elems
    assert plan.semaphore_elems <= counters
    merges = plan.num_groups > 1 or plan.spare_groups > 0
    slots = 2 * plan.spare_groups or p.batch * plan.num_groups
    used = slots * p.query_len * p.num_q_heads * (p.head_dim + 2 * plan.cluster)
    assert plan.workspace_elems == merges * used
    units = p.batch * p.num_kv_heads * row_blocks(p, kernels[plan.kernel])
    assert plan.semaphore_elems == merges * units * plan.cluster


@given(planned(), st.sampled_from(["batch", "query_len"]))
def test_sizes_never_shrink(case, field):
    p, _, _ = case

    def sizes(p):
        shape = p.batch, p.query_len, p.num_q_heads, p.num_kv_heads
        return (
            tree_plan.tree_workspace_elems(*shape, p.head_dim),
            tree_plan.tree_semaphore_elems(*shape),
        )

    larger = dataclasses.replace(p, **{field: getattr(p, field) + 1})
    assert all(new >= old for new, old in zip(sizes(larger), sizes(p), strict=True))


def test_sizes_are_little_larger_than_the_widest_plan():
    """256 SMs, one block of 128 rows a sequence: 256 spare groups, two partial results for each."""
    p = DecodeProblem(1024, 4, 1, 128, 64, query_len=32, tree=True)
    widest = plan_tree(p, num_sms=256, kernels=FORMS)
    assert widest.workspace_elems == 2 * 256 * 128 * 130
    assert tree_plan.tree_workspace_elems(1024, 32, 4, 1, 128) == 2 * (256 * 128 + 128) * 130


@given(planned(max_batch=60), st.data())
def test_every_token_is_dealt_once(case, data):
    """Whatever the lengths: to one CTA, whose group leaves its partial in a slot of its own."""
    p, kernels, plan = case
    tokens = p.max_pages * TOKENS_PER_PAGE
    lengths = data.draw(
        st.lists(st.integers(-1, tokens + 1), min_size=p.batch, max_size=p.batch), label="lengths"
    )
    window = p.sliding_window and p.sliding_window + p.query_len - 1
    tile_tokens = kernels[plan.kernel].tile_tokens
    dealing = Dealing(plan, tile_tokens, lengths, p.max_pages, window, tree=True)
    dealt = [set() for _ in lengths]
    units = list(dealing.units())
    for unit in units:
        for rank in range(plan.cluster):
            tiles = set(unit.tiles(rank))
            assert not tiles & dealt[unit.sequence]
            dealt[unit.sequence] |= tiles
    assert [set(dealing.visible_tiles(b)) for b in range(p.batch)] == dealt
    assert {unit.sequence for unit in units} == set(range(p.batch)), "out is not written"

    first = {}  # work of each sequence
    for unit in units:
        first.setdefault(unit.sequence, unit.row)
    merging = [unit for unit in units if [u.sequence for u in units].count(unit.sequence) > 1]
    slots = [slot(plan, unit.sequence, first[unit.sequence], unit.row) for unit in merging]
    assert len(set(slots)) == len(slots)
    num_slots = 2 * plan.spare_groups or p.batch * plan.num_groups
    assert all(0 <= at < num_slots for at in slots)


def slot(plan, sequence, first_work, work):
    """Where a group of a sequence leaves its partial results, as the kernel works it out."""
    group = work - first_work
    if plan.spare_groups:
        return 2 * (first_work - sequence) + group  # twice the spare groups of those before
    return sequence * plan.num_groups + group


@given(planned())
def test_a_plan_is_a_value(case):
    p, kernels, _ = case
    plans = [plan_tree(dataclasses.replace(p), num_sms=132, kernels=kernels) for _ in range(2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])


# On an H200, 32 query heads on 8 KV heads, pages of 4,096 tokens: rows, cluster, groups, spare.
KNOWN = {
    (1, 4): (16, 8, 1, 0),
    (1, 16): (64, 8, 1, 0),
    (1, 32): (64, 6, 1, 0),
    (1, 64): (64, 3, 1, 0),
    (1, 128): (64, 2, 1, 0),
    (8, 16): (64, 2, 1, 0),
    (8, 32): (128, 2, 1, 0),
    (8, 64): (128, 1, 1, 9),
    (32, 16): (64, 1, 1, 17),
    (32, 32): (128, 1, 1, 17),
    (32, 128): (128, 1, 1, 5),
}


@pytest.mark.parametrize(("batch", "query_len"), KNOWN)
def test_known_plans(batch, query_len):
    p = DecodeProblem(batch, 32, 8, 128, 32, query_len=query_len, tree=True)
    plan = plan_tree(p, num_sms=132, kernels=FORMS)
    got = FORMS[plan.kernel].rows, plan.cluster, plan.num_groups, plan.spare_groups
    assert got == KNOWN[batch, query_len]


@pytest.mark.parametrize(("batch", "form"), [(8, (128, 2)), (32, (64, 1))])
def test_rows_that_clusters_alone_take(batch, form):
    """Where no cluster runs all at once, half as many rows a CTA do."""
    kernels = tuple(k for k in FORMS if k.rows == 64 or (k.rows, k.cluster) == (128, 2))
    p = DecodeProblem(batch, 32, 8, 128, 32, query_len=32, tree=True)
    plan = plan_tree(p, num_sms=132, kernels=kernels)
    assert (kernels[plan.kernel].rows, plan.cluster) == form


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "tokens", "groups"),
    [
        (8, 128, 4096, 1),
        (8, 128, 65_536, 1),
        (2, 128, 3968, 1),
        (2, 128, 4096, 4),
        (1, 128, 3968, 1),
        (1, 128, 4096, 8),
        (1, 512, 1024, 2),  # tiles
        (1, 32, 16_256, 1),
    ],
)
def test_long_sequences_get_groups(num_kv_heads, head_dim, tokens, groups):
    """One sequence of 64 rows a KV head, in clusters of 8."""
    heads = 4 * num_kv_heads, num_kv_heads
    p = DecodeProblem(1, *heads, head_dim, tokens // TOKENS_PER_PAGE, query_len=16, tree=True)
    plan = plan_tree(p, num_sms=132, kernels=FORMS)
    assert (plan.cluster, plan.num_groups) == (8, groups)


@pytest.mark.parametrize(("fp8", "groups"), [(False, 1), (True, 2)])
def test_no_more_groups_than_the_memory_has_use_for(fp8, groups):
    """4 sequences of 8 KV heads: 64 CTAs in clusters of two, which an e4m3 cache does not keep
    waiting; but blocks of rows that share keys and values may have groups.
    """
    in_pairs = tuple(kernel for kernel in FORMS if kernel.cluster < 3)
    p = DecodeProblem(4, 32, 8, 128, 32, fp8, query_len=16, tree=True)
    plan = plan_tree(p, num_sms=132, kernels=in_pairs)
    assert (plan.cluster, plan.num_groups) == (2, groups)
    shared = dataclasses.replace(p, batch=1, query_len=64)
    plan = plan_tree(shared, num_sms=132, kernels=in_pairs)
    assert (plan.cluster, plan.num_groups) == (2, 2)


def test_a_window_is_short_work():
    """A window wider by the draft, where rows have edges of their own, still bounds it."""
    p = DecodeProblem(4, 32, 8, 128, 512, query_len=16, tree=True, sliding_window=1024)
    plan = plan_tree(p, num_sms=132, kernels=FORMS)
    assert (plan.cluster, plan.num_groups, plan.spare_groups) == (3, 1, 0)


def test_kernels_are_read_from_a_manifest():
    row = {"name": "k", "registers": 9, "cluster": 2, "rows": 64, "tile_tokens": 128}
    row |= {"block": 128, "smem_nbytes": 1000, "kv_groups": 2}
    assert tree_kernels({"kernels": [row]}) == (TreeKernel(64, 2, 128, 128, 1000),)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query_len": 0}, "1 to 128 query tokens, got 0"),
        ({"query_len": 129}, "1 to 128 query tokens, got 129"),
        ({"num_q_heads": 136}, "1 to 16 query heads"),
        ({"head_dim": 32, "fp8_kv_cache": True}, r"one of \(64,"),
    ],
)
def test_refusals_have_the_numbers(change, words):
    p = dataclasses.replace(DecodeProblem(2, 8, 8, 64, 4, query_len=4, tree=True), **change)
    with pytest.raises(ArgumentError, match=words) as refusal:
        plan_tree(p, num_sms=132, kernels=FORMS)
    assert refusal.value.name == "q"


def test_more_ctas_than_a_grid_has_are_refused():
    p = DecodeProblem(2**21, 128, 8, 64, 1, query_len=128, tree=True)
    with pytest.raises(ArgumentError, match=f"2147483647 CTAs serve, got {2**21 * 8 * 128}"):
        plan_tree(p, num_sms=132, kernels=tuple(k for k in FORMS if k.rows == 16))
