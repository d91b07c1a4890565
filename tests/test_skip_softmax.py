"""Skip-softmax from the call to the launch: the table in all its spellings, and the counter."""

from dataclasses import replace

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode import skip_softmax
from ctm_rt.memory import release_done
from ctm_rt.reference import dropped_pages
from ctm_rt.tensor import DType, view
from tests.decode_launch import Problem, arguments, assert_close, assert_planned, on_host
from tests.test_runner import Runner, params

TABLE = [(0, 0), (200, 5), (301, 10**6)]  # of 300 tokens: S = 5


@pytest.fixture(autouse=True)
def _computing(computing):
    """Each test starts without launches, on a GPU that computes, and without known tables."""
    skip_softmax._uploaded.clear()
    skip_softmax._read.clear()


@pytest.fixture
def stream(fake):
    with driver.current(0):
        handle = driver.stream_create()
    yield handle
    driver.stream_destroy(handle)


def sparse():
    """Of the second sequence's three pages the second is dropped, the third is not."""
    problem = Problem((5, 300))
    pool, pages = problem.host["kv_pool"], problem.host["page_table"][1, 0]
    problem.host["q"][:] = np.eye(1, 64)
    pool[pages] = 0
    pool[pages[0], :, :, 0] = 600
    pool[pages[2], :40, :, 0] = 590
    problem.device = {name: ctm_rt.to_device(array) for name, array in problem.host.items()}
    return problem


def counter():
    return ctm_rt.to_device(np.zeros(1, np.int32))


def table_of(launch):
    got = arguments(launch)["skip_table"]
    return on_host(got, got.shape, np.int32).tolist()


def uploaded(table):
    return ctm_rt.to_device(np.array(table, np.int32).reshape(-1))


FORMS = {
    "pairs": list,
    "a tuple": tuple,
    "one after the other": lambda table: [value for pair in table for value in pair],
    "numbers of NumPy": lambda table: [(np.int64(low), np.int32(s)) for low, s in table],
    "host (n, 2)": lambda table: np.array(table, np.int32),
    "host flat": lambda table: np.array(table, np.int32).reshape(-1),
    "host strided": lambda table: np.array(table, np.int32).repeat(2, axis=0)[::2],
    "a view": lambda table: view(np.array(table, np.int32)),
    "device (n, 2)": lambda table: ctm_rt.to_device(np.array(table, np.int32)),
    "device flat": uploaded,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("bound", [False, True])
def test_the_table_and_the_counter(fake, form, bound):
    problem, stats = sparse(), counter()
    options = {"skip_softmax": form(TABLE), "stats": stats}
    for _ in range(2):
        if bound:
            problem.bind(**options)()
        else:
            problem.call(**options)
    assert_close(problem.out, problem.expected(skip_softmax=TABLE))
    assert ctm_rt.to_host(stats).tolist() == [2 * 2]  # of each KV head
    counts = dropped_pages(**problem.host, scale=0.125, skip_softmax=TABLE)
    np.testing.assert_array_equal(counts, [[0, 0], [1, 1]])
    for launch in fake.launches():
        assert table_of(launch) == [value for pair in TABLE for value in pair]
        assert arguments(launch)["skip_dropped"].ptr == stats.ptr


def test_kernels_that_skip_serve_it_and_no_other_call(fake):
    problem = Problem()
    problem.call(skip_softmax=TABLE)
    problem.call(stats=counter())
    problem.call()
    skipping, *dense = fake.launches()
    assert_planned(skipping, replace(problem.shape, skip_softmax=True))
    for launch in dense:
        assert_planned(launch, problem.shape)


@pytest.mark.parametrize("empty", [[], (), np.empty((0, 2), np.int32), np.empty(0, np.int32)])
@pytest.mark.parametrize("on_device", [False, True])
def test_an_empty_table_is_dense(fake, empty, on_device):
    problem = Problem()
    table = ctm_rt.to_device(np.asarray(empty, np.int32)) if on_device else empty
    problem.call(skip_softmax=table)
    problem.call()
    assert arguments(fake.launches()[0]) == arguments(fake.launches()[1])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_any_array_of_one_counts(fake, shape):
    problem, stats = sparse(), ctm_rt.to_device(np.full(shape, 40, np.int32))
    problem.call(skip_softmax=TABLE, stats=stats)
    assert ctm_rt.to_host(stats) == 42


def test_where_there_is_nothing_to_attend(fake):
    problem, stats = Problem(), counter()
    empty = ctm_rt.DeviceArray.empty((2, 2, 0), DType("i32"))
    out = problem.call(page_table=empty, skip_softmax=TABLE, stats=stats)
    assert not ctm_rt.to_host(out).any()
    assert ctm_rt.to_host(stats) == [0]
    with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax: "):
        problem.call(page_table=empty, skip_softmax=[1])


# -- where the table lies -------------------------------------------------------------------------


def test_equal_host_tables_are_uploaded_once(fake):
    problem = Problem()
    for form in ("pairs", "one after the other", "host (n, 2)", "host flat", "a view"):
        problem.call(skip_softmax=FORMS[form](TABLE))
    problem.call(skip_softmax=[(0, 3)])
    *equal, other = (arguments(launch)["skip_table"] for launch in fake.launches())
    assert len(set(equal)) == 1
    assert other.ptr not in {table.ptr for table in equal}


def test_tables_beyond_the_most_are_lent_to_one_call(fake, monkeypatch, stream):
    """They live until its work is done; the others stay."""
    monkeypatch.setattr(skip_softmax, "_MAX_TABLES", 1)
    problem = Problem()
    problem.call(skip_softmax=TABLE, stream=stream)
    release_done()
    before = fake.live_allocations()
    fake.set_paused(stream, True)
    problem.call(skip_softmax=TABLE, stream=stream)
    assert fake.live_allocations() == before
    fake.set_paused(stream, False)
    problem.call(skip_softmax=[(0, 1)], stream=stream)
    assert table_of(fake.launches()[-1]) == [0, 1]
    driver.synchronize(stream, 0)
    release_done()
    assert fake.live_allocations() == before


def test_a_launch_keeps_its_table_and_counter(fake):
    problem, stats = sparse(), counter()
    launch = problem.bind(skip_softmax=uploaded(TABLE), stats=view(stats))
    before = fake.live_allocations()
    launch()
    assert table_of(fake.launches()[0])[:2] == [0, 0]
    del launch
    assert fake.live_allocations() == before - 1  # the table; the counter is held here


def reads(fake):
    return len(fake.calls("cuMemcpyDtoHAsync"))


def test_a_device_table_is_read_back_once(fake):
    problem, table = Problem(), uploaded(TABLE)
    before = reads(fake)
    for _ in range(3):
        problem.call(skip_softmax=table)
        problem.bind(skip_softmax=view(table))
    assert reads(fake) == before + 1
    problem.call(skip_softmax=uploaded(TABLE))
    assert reads(fake) == before + 2


def test_a_wrong_device_table_is_refused_each_time(fake):
    problem, table = Problem(), uploaded([(5, 1), (5, 2)])
    for _ in range(2):
        with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax: .*ascending"):
            problem.call(skip_softmax=table)
    assert not fake.launches()


def test_what_is_remembered_of_addresses_is_bounded(fake, monkeypatch):
    monkeypatch.setattr(skip_softmax, "_MAX_TABLES", 2)
    problem, tables = Problem(), [uploaded(TABLE) for _ in range(5)]
    for table in tables:
        problem.call(skip_softmax=table)
    assert len(skip_softmax._read) <= 2


@pytest.mark.parametrize("form", ["pairs", "device flat"])
def test_a_capture_takes_only_tables_that_were_taken_before(fake, stream, form):
    """Where there is a table to bring or to look at, it says what to do, and spoils nothing."""
    problem, workspace = Problem(), ctm_rt.Workspace(0)
    known, new = (FORMS[form](table) for table in (TABLE, [(0, 7)]))
    options = {"stream": stream, "workspace": workspace}
    launch = problem.bind(skip_softmax=known, **options)
    problem.call(**options)  # the workspace is this stream's
    fake.set_capturing(stream, True)
    launch(stream)
    problem.call(skip_softmax=known, **options)
    for call in (problem.call, problem.bind):
        with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax: .*before the capture"):
            call(skip_softmax=new, **options)
    assert fake.capture_status(stream) == 1
    fake.set_capturing(stream, False)
    assert [launch.captured for launch in fake.launches()] == [False, True, True]


def test_other_tables_are_not_taken_for_equal(fake):
    problem, workspace = Problem(), ctm_rt.Workspace(0)
    stats = counter()
    for options in (
        {"skip_softmax": TABLE},
        {"skip_softmax": TABLE[:1]},
        {"skip_softmax": TABLE, "stats": stats},
        {"skip_softmax": TABLE, "stats": counter()},
        {},
    ):
        problem.call(workspace=workspace, **options)
    got = [arguments(launch) for launch in fake.launches()]
    assert all(a != b for i, a in enumerate(got) for b in got[:i])


# -- what is refused ------------------------------------------------------------------------------


def on_device(array):
    return lambda: ctm_rt.to_device(np.asarray(array))


REFUSED = {
    "an odd length": ("skip_softmax", lambda: [0, 1, 200], "two to a pair"),
    "rows of three": ("skip_softmax", lambda: [(0, 1, 2), (3, 4, 5)], "pairs"),
    "rows of several lengths": ("skip_softmax", lambda: [(0, 1), (2,)], "pairs"),
    "three axes": ("skip_softmax", lambda: np.zeros((1, 1, 2), np.int32), "pairs"),
    "descending bins": ("skip_softmax", lambda: [(200, 1), (100, 1)], "strictly ascending"),
    "a bin twice": ("skip_softmax", lambda: [(200, 1), (200, 1)], "strictly ascending"),
    "a negative bin": ("skip_softmax", lambda: [(-1, 1)], "0 to"),
    "a negative S": ("skip_softmax", lambda: [(0, -1)], "0 to"),
    "S beyond int32": ("skip_softmax", lambda: [(0, 2**31)], "0 to"),
    "S beyond int64": ("skip_softmax", lambda: [(0, 2**70)], "integers"),
    "floats": ("skip_softmax", lambda: [(0, 0.5)], "integers"),
    "truths": ("skip_softmax", lambda: [(False, True)], "integers"),
    "text": ("skip_softmax", lambda: ["01"], "integers"),
    "a number": ("skip_softmax", lambda: 5, "an array"),
    "a dict": ("skip_softmax", lambda: {0: 5}, "an array"),
    "host i64": ("skip_softmax", lambda: np.zeros(2, np.int64), "i32"),
    "host f32": ("skip_softmax", lambda: np.zeros(2, np.float32), "i32"),
    "device i64": ("skip_softmax", on_device(np.zeros(2, np.int64)), "i32"),
    "device, odd": ("skip_softmax", on_device(np.zeros(3, np.int32)), "two to a pair"),
    "device, three axes": ("skip_softmax", on_device(np.zeros((1, 2, 2), np.int32)), "pairs"),
    "device, a bin twice": ("skip_softmax", on_device(np.zeros(4, np.int32)), "ascending"),
    "device, negative": ("skip_softmax", on_device(np.array([0, -5], np.int32)), "0 to"),
    "device, strided": (
        "skip_softmax",
        lambda: view(uploaded([(0, 1), (2, 3)]))._replace(shape=(2,), strides=(2,)),
        "packed",
    ),
    "another device": (
        "skip_softmax",
        lambda: view(uploaded([(0, 1)]))._replace(device=1),
        "device 0, like q",
    ),
    "host counter": ("stats", lambda: np.zeros(1, np.int32), "device 0, like q"),
    "counter of two": ("stats", on_device(np.zeros(2, np.int32)), "one i32"),
    "empty counter": ("stats", on_device(np.zeros(0, np.int32)), "one i32"),
    "i64 counter": ("stats", on_device(np.zeros(1, np.int64)), "one i32"),
    "number as counter": ("stats", lambda: 0, "an array"),
    "read-only counter": ("stats", lambda: view(counter())._replace(readonly=True), "writable"),
    "counter elsewhere": ("stats", lambda: view(counter())._replace(device=1), "device 0"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("how", ["call", "bind"])
def test_refused_by_name(fake, case, how):
    name, make, words = REFUSED[case]
    problem = Problem()
    with pytest.raises(ctm_rt.ArgumentError, match=rf"^{name}: .*{words}") as refusal:
        getattr(problem, how)(**{name: make()})
    assert refusal.value.name == name
    assert not fake.launches()


def test_what_was_right_once_does_not_excuse_what_is_wrong(fake):
    problem = Problem()
    for _ in range(2):
        problem.call(skip_softmax=[(0, 1), (1, 2)])
        with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax: .*integers"):
            problem.call(skip_softmax=[(0, 1), (1, 2.0)])


@pytest.mark.parametrize("option", [{"skip_softmax": TABLE}, {"stats": 0}])
def test_not_with_a_tree(fake, option):
    [name] = option
    problem = Problem()
    tree = {
        "q": ctm_rt.to_device(np.zeros((2, 2, 8, 64), np.float16)),
        "out": ctm_rt.to_device(np.zeros((2, 2, 8, 64), np.float16)),
        "tree_mask": ctm_rt.to_device(np.zeros((2, 2, 1), np.int32)),
    }
    option = option if name == "skip_softmax" else {"stats": counter()}
    with pytest.raises(ctm_rt.ArgumentError, match=rf"^{name}: .*tree mask"):
        problem.call(**tree, **option)


def test_a_host_query_is_refused_as_such(fake):
    problem = Problem()
    with pytest.raises(ctm_rt.ArgumentError, match=r"^q: "):
        problem.bind(q=problem.host["q"], skip_softmax=TABLE)


# -- the runner -----------------------------------------------------------------------------------


FLAT = [value for pair in TABLE for value in pair]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_runner_takes_every_form(fake, form):
    problem, stats = sparse(), counter()
    fields = {"skip_softmax_scale_table": form(TABLE), "skip_softmax_scale_table_len": len(FLAT)}
    assert Runner.run(params(problem, **fields, skip_softmax_stats=stats))
    assert_close(problem.out, problem.expected(skip_softmax=TABLE))
    assert ctm_rt.to_host(stats) == [2]


def test_the_runner_takes_addresses(fake, stream):
    """Also while the stream captures, if they were taken before."""
    problem, stats, table = sparse(), counter(), uploaded(TABLE)
    p = params(problem, skip_softmax_scale_table=table.ptr, skip_softmax_stats=stats.ptr)
    p.skip_softmax_scale_table_len, p.stream = len(FLAT), stream
    assert Runner.run(p)
    fake.set_capturing(stream, True)
    assert Runner.run(p)
    p.skip_softmax_scale_table_len = 4
    with pytest.raises(ctm_rt.ArgumentError, match=r"^skip_softmax_scale_table: .*capture"):
        Runner.run(p)
    fake.set_capturing(stream, False)
    assert ctm_rt.to_host(stats) == [4]
    assert [table_of(launch) for launch in fake.launches()] == [FLAT, FLAT]


@pytest.mark.parametrize("on_device", [False, True])
def test_the_runner_takes_as_many_entries_as_it_is_told(fake, on_device):
    problem = sparse()
    table = uploaded(TABLE) if on_device else np.array(FLAT, np.int32)
    assert Runner.run(
        params(problem, skip_softmax_scale_table=table, skip_softmax_scale_table_len=4)
    )
    assert table_of(fake.launches()[0]) == FLAT[:4]


@pytest.mark.parametrize(("table", "entries"), [(None, 6), (FLAT, 0), (1, 0)])
def test_the_runner_is_dense_without_a_table(fake, table, entries):
    problem = Problem()
    fields = {"skip_softmax_scale_table": table, "skip_softmax_scale_table_len": entries}
    assert Runner.run(params(problem, **fields, skip_softmax_stats=counter()))
    assert "skip_table" not in arguments(fake.launches()[0])


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"table_len": 3}, "scale_table", "two to a pair"),
        ({"table_len": -2}, "scale_table", "two to a pair"),
        ({"table_len": 8}, "scale_table", "8 entries"),
        ({"table": [2, 1, 0, 1], "table_len": 4}, "scale_table", "ascending"),
        ({"table": 0, "table_len": 4}, "scale_table", "an array"),
        ({"table": np.zeros(4, np.int64), "table_len": 4}, "scale_table", "i32"),
        ({"stats": np.zeros(1, np.int32)}, "stats", "device 0"),
        ({"stats": 0}, "stats", "an array"),
    ],
)
def test_the_runner_raises_for_a_wrong_table(fake, fields, name, words):
    spelled = {"skip_softmax_scale_table": FLAT, "skip_softmax_scale_table_len": 6} | {
        f"skip_softmax_{'scale_' * ('table' in key)}{key}": value for key, value in fields.items()
    }
    with pytest.raises(ctm_rt.ArgumentError, match=rf"^skip_softmax_{name}: .*{words}"):
        Runner.run(params(Problem(), **spelled))
    assert not fake.launches()
