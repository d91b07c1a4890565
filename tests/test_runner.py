"""The runner: what is served, and when it answers False."""

import dataclasses
import logging
import threading

import numpy as np
import pytest

import ctm_rt
from ctm_rt.tensor import DType
from tests.decode_launch import Problem, arguments, assert_close, assert_planned, merging, plan_of

Runner = ctm_rt.CtmDecodeAttentionRunner
DIMS = (32, 64, 128, 256, 512)


@pytest.fixture(autouse=True)
def _computing(computing):
    """Each test starts without launches, on a GPU that computes."""


def params(problem, **changes):
    p = problem.shape
    fields = {
        "output": problem.out,
        **problem.device,
        "workspace": ctm_rt.DeviceArray.empty(
            (Runner.workspace_elems(p.batch, p.num_q_heads, p.head_dim),), DType("f32")
        ),
        "semaphores": ctm_rt.to_device(
            np.zeros(Runner.semaphore_elems(p.batch, p.num_kv_heads), np.int32)
        ),
        "batch_size": p.batch,
        "num_q_heads": p.num_q_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_size": p.head_dim,
        "num_pages": len(problem.host["kv_pool"]) // 2,
        "max_pages_per_seq": p.max_pages,
        "attention_scale": 0.125,
    }
    return ctm_rt.CtmDecodeParams(**fields | changes)


def test_run_on_arrays_and_on_addresses(fake):
    problem = Problem()
    sinks = np.linspace(-1, 1, 8, dtype=np.float32)
    p = params(problem, sinks=ctm_rt.to_device(sinks), sliding_window=130)
    assert Runner.run(p)
    keep = dataclasses.replace(p)  # the memory is the caller's
    for name in ("output", *problem.device, "sinks", "workspace", "semaphores"):
        setattr(p, name, getattr(p, name).ptr)
    assert Runner.run(p)
    del keep
    assert Runner.last_error() is None
    first, second = fake.launches()
    assert arguments(first) == arguments(second)
    assert_planned(first, problem.shape)
    assert_close(problem.out, problem.expected(sinks=sinks, sliding_window=130))


def test_run_takes_a_query_axis(fake):
    problem = Problem()
    q, out = (ctm_rt.to_device(problem.host["q"][:, None]) for _ in range(2))
    assert Runner.run(params(problem, q=q, output=out))
    assert_close(out, problem.expected()[:, None])


def test_run_of_an_empty_batch(fake):
    assert Runner.run(ctm_rt.CtmDecodeParams(num_q_heads=8, num_kv_heads=2, head_size=64))
    assert not fake.launches()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 96}, "head_dim one of"),
        ({"num_q_heads": 18}, "1 to 8 query heads"),
        (
            {"head_size": 256, "q_seq_len": 2, "tree_mask": 1, "mask_words": 1},
            "no module fmha_decode_tree_f16_d256",
        ),
        ({"q_seq_len": 129}, "1 to 128 query tokens"),
        ({"head_size": 128, "fp8_kv_cache": True}, "no module fmha_decode_e4m3_d128"),
    ],
)
def test_run_answers_false(fake, caplog, changes, reason):
    problem = Problem()
    p = params(problem)
    for name in ("output", *problem.device, "workspace", "semaphores"):
        setattr(p, name, getattr(p, name).ptr)
    for name, value in changes.items():
        setattr(p, name, value)
    with caplog.at_level(logging.WARNING, logger="ctm_rt"):
        assert Runner.run(p) is False
    assert reason in Runner.last_error()
    assert reason in caplog.text
    assert not fake.launches()


def test_run_answers_false_when_the_launch_fails(fake):
    problem = Problem()
    fake.fail("cuLaunchKernelEx", 701)
    assert Runner.run(params(problem)) is False
    assert "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in Runner.last_error()
    other_thread = []
    thread = threading.Thread(target=lambda: other_thread.append(Runner.last_error()))
    thread.start()
    thread.join()
    assert other_thread == [None]
    assert Runner.run(params(problem))
    assert Runner.last_error() is None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"q": None}, "q"),
        ({"batch_size": 3}, "q"),
        ({"num_pages": 5}, "kv_pool"),
        ({"max_pages_per_seq": 25}, "page_table"),
        ({"output": np.zeros((2, 8, 64), np.float16)}, "output"),
        ({"workspace": 0}, "workspace"),
        ({"workspace": None}, "workspace"),
        ({"semaphores": None}, "semaphores"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"seq_lens": 0}, "seq_lens"),
        ({"q": 16}, "q"),
    ],
)
def test_run_raises_for_a_wrong_buffer(fake, changes, name):
    with pytest.raises(ctm_rt.ArgumentError) as refusal:
        Runner.run(params(merging(), **changes))
    assert refusal.value.name == name
    assert not fake.launches()


def test_run_refuses_scratch_that_is_too_small(fake):
    problem = merging()
    elems = plan_of(problem.shape).workspace_elems
    small = ctm_rt.DeviceArray.empty((elems - 1,), DType("f32"))
    with pytest.raises(ctm_rt.ArgumentError, match=r"^workspace: .*at least"):
        Runner.run(params(problem, workspace=small))
    exact = ctm_rt.DeviceArray.empty((elems,), DType("f32"))
    assert Runner.run(params(problem, workspace=exact))


def test_run_needs_no_scratch_where_nothing_is_merged(fake):
    problem = Problem((5, 300), (16, 8))
    assert plan_of(problem.shape).workspace_elems == 0
    assert Runner.run(params(problem, workspace=None, semaphores=None))
    assert_close(problem.out, problem.expected())


def test_predicates():
    """Every row of the contract: 10 modules, 9 of trees, and their ratios."""
    served = {
        (fp8, head_size, ratio)
        for fp8 in (False, True)
        for head_size in range(1, 600)
        for ratio in range(18)
        if Runner.supported(2 * ratio, 2, head_size, fp8, True, True)
    }
    ratios = {(fp8, d): 8 if not fp8 and d < 128 else 16 for fp8 in (0, 1) for d in DIMS}
    assert served == {
        (bool(f), d, r) for (f, d), most in ratios.items() for r in range(1, most + 1)
    }
    trees = {
        (fp8, head_size, ratio)
        for fp8 in (False, True)
        for head_size in range(1, 600)
        for ratio in range(18)
        if Runner.supported_tree(2 * ratio, 2, head_size, fp8, True, False)
    }
    assert trees == {(f, d, r) for f in (False, True) for d in DIMS[f:] for r in range(1, 17)}
    assert not Runner.supported(9, 2, 64, False, False, False)
    assert not Runner.supported(-8, -2, 64, False, False, False)
    lengths = [n for n in range(-2, 300) if Runner.supports_tree_query_seq_len(n)]
    assert lengths == list(range(1, 129))
    assert (Runner.MAX_GQA_RATIO, Runner.MAX_GQA_RATIO_R16) == (8, 16)
    assert Runner.MAX_TREE_QUERY_SEQ_LEN == 128
