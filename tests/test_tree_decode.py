"""Tree decode from arrays to the launch: what the driver was asked to run, and what is refused."""

import gc
import math
import runpy
from types import SimpleNamespace

import numpy as np
import pytest

import ctm_rt
from ctm_rt.decode import binding
from ctm_rt.memory import release_done
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.tensor import DType, view
from tests.decode_launch import PAGE, assert_close
from tests.tree_launch import TreeProblem, arguments, assert_planned, is_tree, plan_of

Runner = ctm_rt.CtmDecodeAttentionRunner


@pytest.fixture(autouse=True)
def _computing(computing, tree_store):
    """Each test starts without launches, on a GPU that computes."""


# -- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (15, 3), (8, 8), (32, 2)])
@pytest.mark.parametrize("query_len", [1, 5, 33, 128])
def test_one_launch_as_planned(fake, heads, query_len):
    problem = TreeProblem(query_len, (query_len, 0, 300), heads)
    sinks = np.linspace(-1, 1, heads[0], dtype=np.float32)
    device_sinks = ctm_rt.to_device(sinks)
    options = {"sliding_window": 20, "scale": 0.3, "contiguous_query_swa": True}
    out = problem.call(**options, sinks=device_sinks)
    assert out is problem.out
    assert_close(out, problem.expected(**options, sinks=sinks))

    [launch] = fake.launches()
    assert_planned(launch, problem.shape)
    got = arguments(launch)
    for name, array in {**problem.device, "sinks": device_sinks, "out": problem.out}.items():
        assert got[name].ptr == array.ptr, name
    hq, hkv = heads
    strides = query_len * hq * 64, hq * 64, 64
    assert got["q"][1:] == got["out"][1:] == ((3, query_len, hq), strides)
    words = -(-query_len // 32)
    assert got["tree_mask"][1:] == ((3, query_len, words), (query_len * words, words))
    assert got["kv_pool"][1:] == ((18, hkv), (PAGE * hkv * 64, hkv * 64, 64))
    assert got["scale_log2"] == pytest.approx(0.3 / math.log(2))
    assert (got["v_scale"], got["sliding_window"], got["contiguous_query_swa"]) == (1.0, 20, 1)


def test_an_e4m3_pool(fake):
    problem = TreeProblem(7, fp8=True)
    options = {"k_scale": 0.25, "v_scale": 3.0}
    assert_close(problem.call(**options), problem.expected(**options))
    [launch] = fake.launches()
    assert_planned(launch, problem.shape)
    assert arguments(launch)["v_scale"] == 3.0


@pytest.mark.parametrize(("window", "swa"), [(0, True), (3, False), (3, True), (10**12, True)])
def test_either_form_of_window(fake, window, swa):
    """Without a window a row has no edge of its own, so the kernel is not asked for one."""
    problem = TreeProblem(5)
    options = {"sliding_window": window, "contiguous_query_swa": swa}
    assert_close(problem.call(**options), problem.expected(**options))
    got = arguments(fake.launches()[0])
    passed = got["sliding_window"], got["contiguous_query_swa"]
    assert passed == (min(window, INT32_MAX), int(swa and window > 0))


def test_strides_travel(fake):
    """q, out and the mask are slices of wider arrays: more tokens, more heads, more words."""
    problem = TreeProblem(5, (5, 300), (8, 2))

    def wide(array, shape):
        whole = np.full(shape, -1, array.dtype)
        whole[tuple(map(slice, array.shape))] = array
        return view(ctm_rt.to_device(whole))._replace(shape=array.shape)

    q, mask = problem.host["q"], problem.host["tree_mask"]
    arrays = {
        "q": wide(q, (2, 9, 12, 64)),
        "out": wide(np.zeros_like(q), (2, 6, 9, 64)),
        "tree_mask": wide(mask, (2, 9, 4)),
    }
    problem.call(**arrays)
    got = arguments(fake.launches()[0])
    assert got["q"].strides == (9 * 12 * 64, 12 * 64, 64)
    assert got["out"].strides == (6 * 9 * 64, 9 * 64, 64)
    assert got["tree_mask"].strides == (9 * 4, 4)
    whole = view(arrays["out"])._replace(shape=(2, 6, 9, 64))
    out = ctm_rt.to_host(whole)
    np.testing.assert_allclose(out[:, :5, :8], problem.expected(), rtol=2e-3, atol=2e-4)
    assert (out[:, 5:] == -1).all()
    assert (out[:, :, 8:] == -1).all()


def test_more_mask_words_than_needed(fake):
    problem = TreeProblem(33)
    spare = np.full((2, 33, 2), -1, np.int32)
    words = np.concatenate([problem.host["tree_mask"], spare], axis=2)
    assert_close(problem.call(tree_mask=ctm_rt.to_device(words)), problem.expected())
    assert arguments(fake.launches()[0])["tree_mask"].shape == (2, 33, 4)


def test_a_tree_of_one_token_needs_no_query_axis(fake):
    """Its mask is applied: a row that does not see itself is another than plain decode."""
    problem = TreeProblem(1, (1, 300))
    problem.host["tree_mask"][1] = 0
    expected = problem.expected()
    assert not (expected == problem.expected(tree_mask=None)).all()
    device = {"tree_mask": ctm_rt.to_device(problem.host["tree_mask"])}
    assert_close(problem.call(**device), expected)
    q = ctm_rt.to_device(problem.host["q"][:, 0])
    out = problem.call(**device, q=q, out=None)
    assert out.shape == (2, 8, 64)
    assert_close(out, expected[:, 0])
    assert all(map(is_tree, fake.launches()))


def test_without_a_mask_it_is_single_token_decode(fake):
    problem = TreeProblem(1)
    assert_close(problem.call(tree_mask=None), problem.expected(tree_mask=None))
    assert not is_tree(fake.launches()[0])


def test_bound_once_launched_often(fake):
    problem = TreeProblem()
    launch = problem.bind()
    assert not fake.launches()
    for _ in range(3):
        launch()
    first, *rest = fake.launches()
    assert rest == [first, first]
    assert_close(problem.out, problem.expected())


def test_groups_get_scratch(fake):
    problem = TreeProblem(5, (5, 300), (8, 1), max_pages=70)
    plan = plan_of(problem.shape)
    assert plan.workspace_elems
    assert_close(problem.call(), problem.expected())
    assert_planned(fake.launches()[0], problem.shape)


# -- what is not ----------------------------------------------------------------------------------


def other(name, shape, dtype):
    return lambda _: {name: ctm_rt.DeviceArray.empty(shape, DType(dtype))}


def changed(name, **fields):
    return lambda p: {name: view(p.device[name])._replace(**fields)}


REFUSED = {
    "no mask": ("tree_mask", lambda _: {"tree_mask": None}, "a mask for 5 query tokens"),
    "mask i64": ("tree_mask", other("tree_mask", (2, 5, 1), "i64"), "i32"),
    "mask u32": ("tree_mask", other("tree_mask", (2, 5, 1), "u32"), "i32"),
    "mask of another batch": ("tree_mask", other("tree_mask", (3, 5, 1), "i32"), "batch 2"),
    "mask of fewer tokens": ("tree_mask", other("tree_mask", (2, 4, 1), "i32"), "query_len 5"),
    "mask of two axes": ("tree_mask", other("tree_mask", (2, 5), "i32"), "mask_words"),
    "mask without words": ("tree_mask", other("tree_mask", (2, 5, 0), "i32"), "at least 1 words"),
    "mask on the host": ("tree_mask", lambda p: {"tree_mask": p.host["tree_mask"]}, "CUDA device"),
    "mask on device 1": ("tree_mask", changed("tree_mask", device=1), "device"),
    "mask strided inside": ("tree_mask", changed("tree_mask", strides=(10, 2, 2)), "innermost"),
    "mask of no array": ("tree_mask", lambda _: {"tree_mask": [[1]]}, "an array"),
    "129 tokens": ("q", other("q", (2, 129, 8, 64), "f16"), "1 to 128 query tokens, got 129"),
    "q of five axes": ("q", other("q", (2, 1, 5, 8, 64), "f16"), "head_dim"),
    "ratio 17": ("q", other("q", (2, 5, 34, 64), "f16"), "1 to 16 query heads"),
    "head_dim 96": ("q", other("q", (2, 5, 8, 96), "f16"), "head_dim one of"),
    "out of fewer tokens": ("out", other("out", (2, 4, 8, 64), "f16"), "query_len 5"),
    "out without tokens": ("out", other("out", (2, 8, 64), "f16"), "query_len 5"),
    "a length too many": ("seq_lens", other("seq_lens", (3,), "i32"), "batch 2"),
    "sinks too short": ("sinks", other("sinks", (7,), "f32"), "num_q_heads 8"),
    "negative window": ("sliding_window", lambda _: {"sliding_window": -1}, "0 or more"),
    "skip_softmax": ("skip_softmax", lambda _: {"skip_softmax": [(0, 1)]}, "None"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("how", ["call", "bind"])
def test_refused_by_name(fake, case, how):
    fake.set_devices(2)
    name, change, words = REFUSED[case]
    problem = TreeProblem()
    with pytest.raises(ctm_rt.ArgumentError, match=rf"^{name}: .*{words}") as refusal:
        getattr(problem, how)(**change(problem))
    assert refusal.value.name == name
    assert not fake.launches()


def test_too_few_words_for_the_tokens(fake):
    problem = TreeProblem(33)
    mask = ctm_rt.to_device(problem.host["tree_mask"][:, :, :1].copy())
    with pytest.raises(ctm_rt.ArgumentError, match=r"tree_mask: .* at least 2 words .* got 1"):
        problem.call(tree_mask=mask)
    assert not fake.launches()


def test_e4m3_of_32_dimensions_has_no_tree(fake):
    problem = TreeProblem(head_dim=32, fp8=True)
    with pytest.raises(ctm_rt.ArgumentError, match=r"^q: expected head_dim one of \(64,"):
        problem.call()


@pytest.mark.parametrize("shape", [(0, 5, 8, 64), (2, 0, 8, 64), (2, 5, 0, 64)])
def test_no_rows_launch_nothing(fake, shape):
    problem = TreeProblem()
    q = ctm_rt.DeviceArray.empty(shape, DType("f16"))
    assert problem.call(q=q, out=None).shape == shape
    assert not fake.launches()


def test_no_pages_are_zeros(fake):
    problem = TreeProblem()
    assert not ctm_rt.to_host(
        problem.call(page_table=ctm_rt.DeviceArray.empty((2, 2, 0), DType("i32")))
    ).any()
    assert not fake.launches()


# -- what is remembered ---------------------------------------------------------------------------

OTHERS = {
    "mask": lambda p: {"tree_mask": ctm_rt.to_device(p.host["tree_mask"])},
    "form of window": lambda _: {"contiguous_query_swa": True},
}


def test_equal_calls_are_worked_out_once(fake):
    problem = TreeProblem()
    for _ in range(3):
        problem.call()
    assert binding._check.cache_info()[:2] == (2, 1)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_other_calls_are_not_taken_for_equal(fake, change):
    problem = TreeProblem()
    problem.call(sliding_window=3)
    problem.call(sliding_window=3, **change(problem))
    problem.call(sliding_window=3)
    first, second, third = map(arguments, fake.launches())
    assert first == third != second


def test_the_mask_lives_until_the_launch_is_done(fake):
    problem, workspace = TreeProblem(), ctm_rt.Workspace(0)
    problem.bind(workspace=workspace)()
    release_done()
    gc.collect()
    before = fake.live_allocations()
    launch = problem.bind(
        tree_mask=ctm_rt.to_device(problem.host["tree_mask"]), workspace=workspace
    )
    assert fake.live_allocations() == before + 1
    launch()
    assert_close(problem.out, problem.expected())
    del launch
    assert fake.live_allocations() == before


# -- the example ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_example(fake, capsys, gpus):
    fake.set_devices(gpus)
    runpy.run_module("examples.verify_tree", run_name="__main__")
    where, tokens, texts = capsys.readouterr().out.splitlines()
    assert where.endswith("GPU" if gpus else "host")
    assert texts.endswith("equal")
    numbers = [int(word) for word in tokens.split() if word.isdigit()]
    assert numbers[0] > 3 * numbers[1]
    assert sum(map(is_tree, fake.launches())) == gpus * numbers[1]


# -- the runner -----------------------------------------------------------------------------------


def params(problem, **changes):
    p = problem.shape
    heads = p.num_q_heads, p.num_kv_heads
    elems = Runner.tree_workspace_elems(p.batch, p.query_len, *heads, p.head_dim)
    counters = Runner.tree_semaphore_elems(p.batch, p.query_len, *heads)
    fields = {
        "output": problem.out,
        **problem.device,
        "workspace": ctm_rt.DeviceArray.empty((elems,), DType("f32")),
        "semaphores": ctm_rt.to_device(np.zeros(counters, np.int32)),
        "batch_size": p.batch,
        "q_seq_len": p.query_len,
        "mask_words": problem.host["tree_mask"].shape[2],
        "num_q_heads": p.num_q_heads,
        "num_kv_heads": p.num_kv_heads,
        "head_size": p.head_dim,
        "num_pages": len(problem.host["kv_pool"]) // 2,
        "max_pages_per_seq": p.max_pages,
        "attention_scale": 0.125,
    }
    return ctm_rt.CtmDecodeParams(**fields | changes)


@pytest.mark.parametrize("shape", [{}, {"query_len": 33, "heads": (8, 1), "max_pages": 70}])
def test_run_on_arrays_and_on_addresses(fake, shape):
    problem = TreeProblem(**shape)
    options = {"sliding_window": 40, "contiguous_query_swa": True}
    p = params(problem, **options)
    assert Runner.run(p)
    keep = SimpleNamespace(arrays=[p.workspace, p.semaphores])  # the memory is the caller's
    for name in ("output", *problem.device, "workspace", "semaphores"):
        setattr(p, name, getattr(p, name).ptr)
    assert Runner.run(p)
    del keep
    first, second = fake.launches()
    assert arguments(first) == arguments(second)
    assert_planned(first, problem.shape)
    assert_close(problem.out, problem.expected(**options))


def test_one_token_is_single_token_decode(fake):
    """Whatever mask comes with it."""
    problem = TreeProblem(1)
    assert Runner.run(params(problem))
    assert not is_tree(fake.launches()[0])
    assert_close(problem.out, problem.expected(tree_mask=None))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_seq_len": 0}, "1 to 128 query tokens, got 0"),
        ({"q_seq_len": 129}, "1 to 128 query tokens, got 129"),
        ({"head_size": 32, "fp8_kv_cache": True}, "head_dim one of (64,"),
        ({"num_q_heads": 34}, "1 to 16 query heads"),
        ({"head_size": 512}, "no module fmha_decode_tree_f16_d512"),
    ],
)
def test_run_answers_false(fake, changes, reason):
    problem = TreeProblem()
    p = params(problem)
    for name in ("output", *problem.device):
        setattr(p, name, getattr(p, name).ptr)
    for name, value in changes.items():
        setattr(p, name, value)
    assert Runner.run(p) is False
    assert reason in Runner.last_error()
    assert not fake.launches()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tree_mask": None}, "tree_mask"),
        ({"tree_mask": 0}, "tree_mask"),
        ({"mask_words": 2}, "tree_mask"),
        ({"mask_words": 0}, "tree_mask"),
        ({"q_seq_len": 4}, "q"),
        ({"output": None}, "output"),
    ],
)
def test_run_raises_for_a_wrong_buffer(fake, changes, name):
    with pytest.raises(ctm_rt.ArgumentError) as refusal:
        Runner.run(params(TreeProblem(), **changes))
    assert refusal.value.name == name
    assert not fake.launches()


def test_run_refuses_scratch_that_is_too_small(fake):
    problem = TreeProblem(5, (5, 300), (8, 1), max_pages=70)
    elems = plan_of(problem.shape).workspace_elems
    small = ctm_rt.DeviceArray.empty((elems - 1,), DType("f32"))
    with pytest.raises(ctm_rt.ArgumentError, match=r"^workspace: .*at least"):
        Runner.run(params(problem, workspace=small))
    assert Runner.run(params(problem, workspace=ctm_rt.DeviceArray.empty((elems,), DType("f32"))))
