import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctm_rt.decode import plan as planning
from ctm_rt.decode.plan import DecodeProblem, plan_decode
from ctm_rt.errors import ArgumentError


@st.composite
def problems(draw, trees=(False, True), max_batch=600):
    fp8, tree = draw(st.booleans()), draw(st.sampled_from(trees))
    head_dim = draw(st.sampled_from(planning.head_dims(fp8, tree)))
    ratio = draw(st.integers(1, planning.max_gqa_ratio(head_dim, fp8, tree)))
    num_kv_heads = draw(st.integers(1, 16))
    return DecodeProblem(
        batch=draw(st.integers(1, max_batch)),
        num_q_heads=ratio * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_pages=draw(st.integers(1, 4096)),
        fp8_kv_cache=fp8,
        query_len=draw(st.integers(1, planning.MAX_TREE_QUERY_SEQ_LEN)) if tree else 1,
        tree=tree,
    )


sms = st.integers(1, 400)


@given(problems(), sms)
def test_splits_fill_the_gpu_and_no_more(p, num_sms):
    plan = plan_decode(p, num_sms=num_sms)
    units, num_splits, one = plan.grid
    assert (num_splits, one) == (plan.num_splits, 1)
    assert 1 <= num_splits <= planning.MAX_SPLITS
    assert num_splits <= p.max_pages * 2, "a split without a tile"
    assert num_splits == 1 or units * num_splits <= num_sms
    tight = min(num_sms, planning.MAX_SMS) - units < units * num_splits
    assert tight or num_splits in (planning.MAX_SPLITS, p.max_pages * 2)


@given(problems(trees=[False]), sms)
def test_sizes_hold_every_plan(p, num_sms):
    plan = plan_decode(p, num_sms=num_sms)
    most = planning.workspace_elems(p.batch, p.num_q_heads, p.head_dim)
    assert plan.workspace_elems <= most
    assert plan.semaphore_elems <= planning.semaphore_elems(p.batch, p.num_kv_heads)
    assert (plan.workspace_elems == 0) == (plan.num_splits == 1)
    used = p.batch * p.num_q_heads * plan.num_splits * (p.head_dim + 2)
    assert plan.workspace_elems in (0, used)


def test_sizes_are_no_larger_than_the_widest_plan():
    """256 SMs, 16 heads a KV head: every CTA leaves a partial for 16 rows."""
    widest = plan_decode(DecodeProblem(1, 128, 8, 128, 64), num_sms=256)
    assert widest.workspace_elems == planning.workspace_elems(1, 128, 128) == 256 * 16 * 130
    trees = plan_decode(DecodeProblem(4, 8, 8, 128, 64, query_len=64, tree=True), num_sms=256)
    assert trees.workspace_elems == planning.tree_workspace_elems(4, 64, 8, 8, 128)
    assert trees.workspace_elems == 256 * 64 * 130


@given(problems(trees=[True]), sms)
def test_tree_sizes_hold_every_plan(p, num_sms):
    plan = plan_decode(p, num_sms=num_sms)
    heads = p.num_q_heads, p.num_kv_heads
    most = planning.tree_workspace_elems(p.batch, p.query_len, *heads, p.head_dim)
    assert plan.workspace_elems <= most
    assert plan.semaphore_elems == planning.tree_semaphore_elems(p.batch, p.query_len, *heads)
    rows = plan.semaphore_elems * planning.TREE_ROWS
    assert rows >= p.batch * p.query_len * p.num_q_heads
    assert plan.workspace_elems in (0, rows * plan.num_splits * (p.head_dim + 2))


@given(problems(max_batch=40), st.sampled_from(["batch", "query_len"]))
def test_sizes_never_shrink(p, field):
    def sizes(p):
        heads = p.num_q_heads, p.num_kv_heads
        return (
            planning.workspace_elems(p.batch, p.num_q_heads, p.head_dim),
            planning.semaphore_elems(p.batch, p.num_kv_heads),
            planning.tree_workspace_elems(p.batch, p.query_len, *heads, p.head_dim),
            planning.tree_semaphore_elems(p.batch, p.query_len, *heads),
        )

    larger = dataclasses.replace(p, **{field: getattr(p, field) + 1})
    assert all(new >= old for new, old in zip(sizes(larger), sizes(p), strict=True))


@given(problems(), sms)
def test_a_plan_is_a_value(p, num_sms):
    plan = plan_decode(p, num_sms=num_sms)
    assert plan == plan_decode(dataclasses.replace(p), num_sms=num_sms)
    assert hash(plan) == hash(plan_decode(p, num_sms=num_sms))
    assert eval(repr(plan), vars(planning)) == plan


def test_known_plans():
    """H200, 132 SMs: the cells of the issue, whose units and splits can be worked out by hand."""

    def splits(batch, heads, pages, head_dim=128):
        p = DecodeProblem(batch, *heads, head_dim, pages)
        return plan_decode(p, num_sms=132).grid[:2]

    assert splits(1, (32, 8), 8) == (8, 16)
    assert splits(1, (32, 8), 512) == (8, 16)
    assert splits(8, (32, 8), 32) == (64, 2)
    assert splits(32, (32, 8), 32) == (256, 1)
    assert splits(1, (1, 1), 1) == (1, 2)
    assert splits(1, (1, 1), 512) == (1, 32)
    assert splits(2, (8, 1), 64, 512) == (2, 32)
    assert splits(2, (9, 1), 64, 512) == (4, 32)
    assert splits(70_000, (8, 8), 1) == (560_000, 1)  # beyond a grid's y and z


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
        plan_decode(p, num_sms=132)
    assert refusal.value.name == "q"
