import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt.decode import plan as planning
from ctm_rt.decode.plan import DecodeKernel, DecodeProblem, decode_kernels, plan_decode
from ctm_rt.errors import ArgumentError
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div
from kernels.variants import VARIANTS
from tests.dealing import Dealing

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")

VARIANT = {variant.name: variant for variant in VARIANTS if variant.family == "fmha_decode"}
TABLES = {
    (arch, name): decode_kernels(variant.config(arch))
    for arch, (name, variant) in itertools.product(ARCHS, VARIANT.items())
    if variant.supports(arch)
}


def table(p, arch="sm_90a"):
    return TABLES[arch, planning.module_name(p.head_dim, p.fp8_kv_cache, p.tree)]


@st.composite
def problems(draw, trees=(False,), max_batch=3000):
    fp8, tree = draw(st.booleans()), draw(st.sampled_from(trees))
    head_dim = draw(st.sampled_from(planning.head_dims(fp8, tree)))
    ratio = draw(st.integers(1, planning.max_gqa_ratio(head_dim, fp8, tree)))
    num_kv_heads = draw(st.integers(1, 20))
    return DecodeProblem(
        batch=draw(st.one_of(st.integers(1, 40), st.integers(1, max_batch))),
        num_q_heads=ratio * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_pages=draw(st.one_of(st.integers(1, 40), st.integers(1, 4096))),
        fp8_kv_cache=fp8,
        query_len=draw(st.integers(1, planning.MAX_TREE_QUERY_SEQ_LEN)) if tree else 1,
        tree=tree,
        skip_softmax=not tree and draw(st.booleans()),
    )


@st.composite
def planned(draw, max_batch=3000):
    """A problem, the kernels of a module that serves it, and its plan on some GPU."""
    p, arch = draw(problems(max_batch=max_batch)), draw(st.sampled_from(ARCHS))
    if p.fp8_kv_cache and arch == "sm_80":
        arch = "sm_89"
    num_sms = draw(st.integers(1, 256))
    return p, table(p, arch), plan_decode(p, num_sms=num_sms, kernels=table(p, arch))


def test_all_ten_modules_have_a_table():
    assert len({name for _, name in TABLES}) == 10
    for (arch, _), kernels in TABLES.items():
        clusters = {kernel.cluster for kernel in kernels}
        assert 1 in clusters
        assert (len(clusters) > 1) == (arch not in ("sm_80", "sm_89"))
        assert len(set(kernels)) == len(kernels)


@pytest.mark.parametrize(("arch", "name"), TABLES)
def test_each_kernel_has_its_plans(arch, name):
    """None is exported in vain."""
    kernels, key = TABLES[arch, name], VARIANT[name].key
    head_dim, fp8 = key["head_dim"], key["kv_dtype"] == "e4m3"
    shapes = itertools.product(
        (1, 16),
        (1, 5, 12, 40, 70),
        (8, planning.max_gqa_ratio(head_dim, fp8, tree=False)),
        (8, 32, 512),
        (False, True),
    )
    used = {
        plan_decode(
            DecodeProblem(batch, ratio * heads, heads, head_dim, pages, fp8, skip_softmax=skip),
            num_sms=132,
            kernels=kernels,
        ).kernel
        for batch, heads, ratio, pages, skip in shapes
    }
    assert used == set(range(len(kernels)))


@pytest.mark.parametrize(("arch", "name"), TABLES)
def test_each_kernel_has_a_twin_that_skips(arch, name):
    """Which computes the same, but may ask further ahead."""
    free = {"skips", "stages", "smem_nbytes"}
    dense, skipping = (
        [
            {name: value for name, value in row.items() if name not in free}
            for row in VARIANT[name].config(arch)["kernels"]
            if row["skips"] == skips
        ]
        for skips in (False, True)
    )
    assert dense == skipping


@given(planned())
def test_the_kernel_serves_the_problem(case):
    p, kernels, plan = case
    kernel = kernels[plan.kernel]
    ratio = p.num_q_heads // p.num_kv_heads
    assert kernel.head_tiles <= (1 if ratio <= 8 else 2)
    assert kernel.skips == p.skip_softmax
    assert (kernel.cluster, kernel.block) == (plan.cluster, plan.block)
    tokens = p.max_pages * TOKENS_PER_PAGE / (plan.cluster * plan.num_groups)
    assert not kernel.max_tokens or tokens <= kernel.max_tokens
    assert kernel.smem_nbytes == plan.smem_nbytes
    assert plan.module == planning.module_name(p.head_dim, p.fp8_kv_cache, tree=False)


@given(planned())
def test_the_grid(case):
    p, kernels, plan = case
    x, y, z = plan.grid
    shards = ceil_div(p.num_q_heads // p.num_kv_heads, 8 * kernels[plan.kernel].head_tiles)
    assert x == (p.batch + plan.spare_groups) * p.num_kv_heads * shards * plan.cluster < 2**31
    assert x % plan.cluster == 0
    assert 1 <= y == plan.num_groups <= planning.MAX_GROUPS <= 65_535
    assert z == 1
    if plan.spare_groups:
        assert (plan.cluster, plan.num_groups) == (1, 1)
        assert 1 < p.batch <= planning.MAX_BALANCED_BATCH


@given(planned())
def test_sizes_hold_every_plan(case):
    p, kernels, plan = case
    assert plan.workspace_elems <= planning.workspace_elems(p.batch, p.num_q_heads, p.head_dim)
    assert plan.semaphore_elems <= planning.semaphore_elems(p.batch, p.num_kv_heads)
    units = p.batch * plan.num_groups + plan.spare_groups
    used = units * p.num_q_heads * (p.head_dim + 2 * plan.cluster)
    merges = plan.num_groups > 1 or plan.spare_groups > 0
    assert plan.workspace_elems == merges * used
    shards = ceil_div(p.num_q_heads // p.num_kv_heads, 8 * kernels[plan.kernel].head_tiles)
    assert plan.semaphore_elems == merges * p.batch * p.num_kv_heads * shards * plan.cluster


@given(planned())
def test_a_table_changes_nothing_else(case):
    """So a sequence that is dense by its table is dense to the bit."""
    p, kernels, plan = case
    other = dataclasses.replace(p, skip_softmax=not p.skip_softmax)
    twin = plan_decode(other, num_sms=132, kernels=kernels)
    plan = plan_decode(p, num_sms=132, kernels=kernels)
    kernel = kernels[plan.kernel]
    ring = {"smem_nbytes": kernel.smem_nbytes}  # how far ahead warps ask
    assert dataclasses.replace(twin, kernel=plan.kernel, **ring) == plan
    twin_kernel = dataclasses.replace(kernels[twin.kernel], **ring)
    assert dataclasses.replace(twin_kernel, skips=p.skip_softmax) == kernel


def test_sizes_are_little_larger_than_the_widest_plan():
    """256 SMs, 16 heads a KV head, a batch that is balanced."""
    p = DecodeProblem(1024, 16, 1, 128, 64)
    widest = plan_decode(p, num_sms=256, kernels=table(p))
    assert widest.workspace_elems == (1024 + 768) * 16 * 130
    assert planning.workspace_elems(1024, 16, 128) == (1024 + 768 + 1) * 16 * 130


def test_counters_of_clusters_that_have_several_groups():
    """One for each CTA of a cluster, also where two clusters share the heads of a KV head."""
    alone = DecodeProblem(1, 1, 1, 512, 512)
    halved = DecodeProblem(1, 16, 1, 128, 64)
    for p, counters in ((alone, 16), (halved, 2 * 8)):
        plan = plan_decode(p, num_sms=132, kernels=table(p))
        assert plan.num_groups > 1
        assert plan.semaphore_elems == counters <= planning.semaphore_elems(1, 1)


@given(planned(max_batch=60), st.data())
def test_every_token_is_dealt_once(case, data):
    """Whatever the lengths: to one CTA, whose group leaves its partial in a row of its own."""
    p, kernels, plan = case
    tokens = p.max_pages * TOKENS_PER_PAGE
    lengths = data.draw(
        st.lists(st.integers(-1, tokens + 1), min_size=p.batch, max_size=p.batch), label="lengths"
    )
    window = data.draw(st.sampled_from([0, 1, 200, tokens]), label="window")
    dealing = Dealing(plan, kernels[plan.kernel].tile_tokens, lengths, p.max_pages, window)
    dealt = [set() for _ in lengths]
    rows = set()
    for unit in dealing.units():
        assert unit.row not in rows
        rows.add(unit.row)
        for rank in range(plan.cluster):
            tiles = set(unit.tiles(rank))
            assert not tiles & dealt[unit.sequence]
            dealt[unit.sequence] |= tiles
    assert [set(dealing.visible_tiles(b)) for b in range(p.batch)] == dealt
    assert all(0 <= row < p.batch * plan.num_groups + plan.spare_groups for row in rows)
    assert {unit.sequence for unit in dealing.units()} == set(range(p.batch)), "out is not written"


@given(problems(max_batch=2000))
def test_sizes_never_shrink(p):
    def sizes(batch):
        return (
            planning.workspace_elems(batch, p.num_q_heads, p.head_dim),
            planning.semaphore_elems(batch, p.num_kv_heads),
        )

    assert all(new >= old for new, old in zip(sizes(p.batch + 1), sizes(p.batch), strict=True))


@given(planned())
def test_a_plan_is_a_value(case):
    p, kernels, plan = case
    again = [plan_decode(dataclasses.replace(p), num_sms=132, kernels=kernels) for _ in range(2)]
    assert again[0] == again[1]
    assert hash(again[0]) == hash(again[1])
    assert eval(repr(plan), vars(planning)) == plan


CLUSTERS = tuple(DecodeKernel(cluster, 1, 64, 0, 128, 1000) for cluster in (16, 8, 4, 2, 1))

KNOWN = {  # on an H200, with tiles of 64 tokens; cluster, groups, spare groups
    "one sequence, one head": ((1, 1, 512), (16, 4, 0)),
    "of 16,384 tokens": ((1, 1, 128), (16, 2, 0)),
    "of one page: no more groups than tiles": ((1, 1, 1), (16, 1, 0)),
    "8 heads": ((1, 8, 512), (8, 1, 0)),
    "8 heads, twice": ((2, 8, 32), (4, 1, 0)),
    "2 heads, twice": ((2, 2, 64), (16, 1, 0)),
    "4 sequences": ((4, 8, 32), (2, 1, 0)),
    "8 sequences of 8 heads": ((8, 8, 32), (2, 1, 0)),
    "longer than two CTAs take": ((8, 8, 65), (1, 1, 33)),
    "longer than 16 CTAs take": ((2, 2, 513), (1, 1, 132)),
    "long, and too few to fill the GPU": ((4, 8, 128), (1, 1, 33)),
    "alone it waits for nobody": ((1, 2, 5000), (16, 2, 0)),
    "many": ((32, 8, 32), (1, 1, 50)),
    "many short ones": ((32, 8, 16), (1, 1, 0)),
    "too many to balance": ((1025, 8, 64), (1, 1, 0)),
    "beyond a grid's y and z": ((70_000, 8, 1), (1, 1, 0)),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_plans(case):
    (batch, num_kv_heads, max_pages), expected = KNOWN[case]
    p = DecodeProblem(batch, 4 * num_kv_heads, num_kv_heads, 128, max_pages)
    plan = plan_decode(p, num_sms=132, kernels=CLUSTERS)
    assert (plan.cluster, plan.num_groups, plan.spare_groups) == expected


@pytest.mark.parametrize(
    ("shape", "num_sms", "groups"),
    [
        ((1, 1, 512), 108, (64, 0)),  # as many as the device merges
        ((1, 8, 512), 108, (13, 0)),  # 128 CTAs of 132 SMs are 104 of 108
        ((1, 8, 4), 108, (8, 0)),  # 8 tiles
        ((2, 8, 16), 108, (6, 0)),
        ((2, 8, 17), 108, (1, 27)),
        ((1, 8, 512), 4, (1, 0)),
    ],
)
def test_known_plans_without_clusters(shape, num_sms, groups):
    batch, num_kv_heads, max_pages = shape
    p = DecodeProblem(batch, 4 * num_kv_heads, num_kv_heads, 128, max_pages)
    plan = plan_decode(p, num_sms=num_sms, kernels=CLUSTERS[-1:])
    assert (plan.num_groups, plan.spare_groups) == groups


def test_most_partials():
    """For the tolerance of a reference that merges as the kernel does."""

    def most(*shape):
        return plan_decode(DecodeProblem(*shape), num_sms=132, kernels=CLUSTERS).max_partials

    assert most(1, 4, 1, 128, 512) == 16 * 4
    assert most(32, 64, 8, 128, 32) == 1 + 50
    assert most(20, 16, 4, 128, 32) == 64 == planning.MAX_GROUPS


def test_more_sms_than_the_sizes_hold_are_not_used():
    p = DecodeProblem(8, 64, 8, 128, 64)
    plans = [plan_decode(p, num_sms=n, kernels=table(p, "sm_80")) for n in (256, 1000)]
    assert plans[0] == plans[1]


def test_kernels_are_read_from_a_manifest():
    rows = [
        {"name": "k", "registers": 9, "cluster": 2, "head_tiles": 1, "tile_tokens": 64}
        | {"max_tokens": 0, "block": 128, "smem_nbytes": 1000, "skips": False, "min_ctas": 0},
    ]
    assert decode_kernels({"kernels": rows}) == (DecodeKernel(2, 1, 64, 0, 128, 1000),)


def test_the_first_kernel_that_takes_so_many_tokens():
    """One sequence of one head: 8 groups of clusters of 8 are 64 CTAs."""
    few = DecodeKernel(8, 1, 64, 1024, 256, 1000)
    kernels = few, dataclasses.replace(few, max_tokens=0), dataclasses.replace(few, cluster=1)
    taken = {
        pages: plan_decode(DecodeProblem(1, 1, 1, 128, pages), num_sms=132, kernels=kernels).kernel
        for pages in (1, 512, 513, 4096)
    }
    assert taken == {1: 0, 512: 0, 513: 1, 4096: 1}


@pytest.mark.parametrize(
    ("batch", "pages", "num_sms", "block"),
    [
        (128, 8, 132, 64),
        (90, 8, 132, 128),
        (128, 8, 264, 128),
        (128, 16, 132, 128),
        (40, 8, 132, 256),
        (90, 8, 264, 256),
        (128, 17, 132, 256),
    ],
)
def test_smaller_ctas_for_many_short_sequences(batch, pages, num_sms, block):
    """All of a launch run at once: so many of a size as a GPU holds, and no smaller ones."""
    p = DecodeProblem(batch, 32, 8, 128, pages, fp8_kv_cache=True)
    plan = plan_decode(p, num_sms=num_sms, kernels=table(p))
    assert (plan.cluster, plan.block) == (1, block)


def test_there_are_nineteen_modules():
    names = {
        planning.module_name(head_dim, fp8, tree)
        for fp8 in (False, True)
        for tree in (False, True)
        for head_dim in planning.head_dims(fp8, tree)
    }
    assert len(names) == 19
    assert "fmha_decode_f16_d128" in names
    assert "fmha_decode_tree_e4m3_d64" in names
    assert "fmha_decode_tree_e4m3_d32" not in names


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 96}, r"head_dim one of \(32, 64, 128, 256, 512\), got 96"),
        ({"num_q_heads": 9}, "8 KV heads, got 9 heads"),
        ({"num_q_heads": 72}, "1 to 8 query heads for each of 8"),
        ({"num_q_heads": 136, "head_dim": 128}, "1 to 16 query heads"),
        ({"num_kv_heads": 0}, "0 KV heads"),
        ({"query_len": 2}, "1 to 1 query tokens, got 2"),
        ({"query_len": 129, "tree": True}, "1 to 128 query tokens, got 129"),
        ({"head_dim": 32, "fp8_kv_cache": True, "tree": True}, r"one of \(64,"),
    ],
)
def test_refusals_have_the_numbers(change, words):
    p = dataclasses.replace(DecodeProblem(2, 8, 8, 64, 4), **change)
    assert not planning.serves(p)
    with pytest.raises(ArgumentError, match=words) as refusal:
        plan_decode(p, num_sms=132, kernels=())
    assert refusal.value.name == "q"


def test_more_ctas_than_a_grid_has_are_refused():
    p = DecodeProblem(2**28, 8, 8, 64, 1)
    with pytest.raises(ArgumentError, match=f"2147483647 CTAs serve, got {2**31}"):
        plan_decode(p, num_sms=132, kernels=table(p))
    ok = dataclasses.replace(p, batch=2**28 - 1)
    assert plan_decode(ok, num_sms=132, kernels=table(ok)).grid[0] == 2**31 - 8
