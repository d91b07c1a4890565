"""The benchmark, all but the clock: its cells, inputs, checks, report and command."""

import dataclasses
import json
import math
import shutil
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import ctm_rt
from ctm_rt import cli, driver
from ctm_rt.bench import grid, host, measure, run, timing
from ctm_rt.bench.grid import CELLS, Cell, select
from ctm_rt.bench.inputs import BLOCK_NBYTES, Pool, make_inputs, split_sets
from ctm_rt.decode.plan import DecodePlan
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from ctm_rt.reference import e4m3_to_float
from tests import decode_launch, tree_launch
from tests.conftest import run_export
from tests.decode_launch import plan_of
from tests.tree_launch import plan_of as tree_plan_of

SMALL = Cell("f16", 64, 8, 2, (200, 300), known_load_us=2.0)
WINDOW = Cell("f16", 64, 8, 2, (513,) * 3, sliding_window=200)
TREE = Cell("f16", 64, 8, 2, (200, 300), query_len=5, known_load_us=2.0)
PLAN = DecodePlan("", 3, 4, 2, 0, (1, 1, 1), 128, 0, 0, 0)
TIMES = [12.0, 10.0]  # of a launch and of a load-only one, as the clock below says
TOKEN_US = 8.0  # and of a single token beside a tree


# -- cells ----------------------------------------------------------------------------------------


def test_names_tell_cells_apart():
    assert len({cell.name for cell in CELLS}) == len(CELLS) == 45 + 48
    assert CELLS[4].name == "f16 d128 32/8 b8 s4096"
    assert WINDOW.name == "f16 d64 8/2 b3 s513 w200"
    assert TREE.name == "f16 d64 8/2 b2 s300 q5"
    of_b8 = select(["f16 d128 32/8 b8 s4096"])
    assert [cell.query_len for cell in of_b8] == [1, 4, 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("name", "floor_us", "target_us"),
    [
        ("f16 d128 32/8 b1 s1024", 0.96, 5.0),
        ("f16 d128 32/8 b64 s8192", 489.2, 493.2),
        ("e4m3 d128 32/8 b1 s4096", 1.91, 5.9),
        ("f16 d32 32/8 b32 s4096", 30.6, 34.6),
        ("f16 d512 16/2 b8 s4096", 30.6, 34.6),
        ("f16 d128 32/8 b8 s32768 w1024", 7.64, 11.6),
        ("f16 d128 32/8 b32 s65536 middle", 90.8, 104.0),
        ("e4m3 d128 32/8 b8 s4096 q16", 15.3, 31.0),
        ("f16 d64 32/8 b32 s4096 q4", 61.1, 65.1),
        ("f16 d256 32/8 b32 s4096 q128", 244.6, 1169.7),  # 550 GFLOP at 470 TFLOP/s
    ],
)
def test_targets(name, floor_us, target_us):
    (cell,) = (cell for cell in CELLS if cell.name == name)
    assert cell.floor_us == pytest.approx(floor_us, rel=5e-3)
    assert cell.target_us == target_us


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_launch_finds_its_cache_cold(cell):
    assert cell.num_sets * cell.kv_nbytes > 400e6
    assert (cell.num_sets - 1) * cell.kv_nbytes <= 400e6
    assert cell.pool_nbytes >= cell.num_sets * cell.kv_nbytes
    assert cell.pool_nbytes <= 2.2e9
    assert BLOCK_NBYTES % (PAGE * cell.token_nbytes) == 0


def test_only():
    assert select([]) == list(CELLS)
    assert [cell.name for cell in select(["b1 s1024"])] == [
        "f16 d128 32/8 b1 s1024",
        "e4m3 d128 32/8 b1 s1024",
    ]
    assert [cell.label for cell in select(["first", "last"])] == ["first", "last"]
    assert select(["b1 b8"]) == []


def test_load_only_fills_the_gpu():
    groups = {cell.name: measure.load_groups(cell, 132) for cell in CELLS}
    assert groups["f16 d128 32/8 b1 s1024"] == (16, 0)
    assert groups["f16 d128 32/8 b8 s4096"] == (2, 0)
    assert groups["f16 d128 32/8 b64 s8192"] == (1, 0)
    assert groups["f16 d128 32/8 b32 s65536 last"] == (1, 33)


# -- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [SMALL, WINDOW, TREE], ids=lambda cell: cell.name)
def test_each_set_has_pages_of_its_own(cell, monkeypatch):
    monkeypatch.setattr(grid, "COLD_NBYTES", 3.5 * cell.kv_nbytes)
    q, table, seq_lens, tree_mask = make_inputs(cell)
    assert len(q) == len(table) == len(seq_lens) == cell.num_sets == 4
    half = cell.num_sets * cell.num_pages
    for row, ids in ((0, range(half)), (1, range(half, 2 * half))):
        listed = table[:, :, row]
        assert sorted(listed[listed >= 0]) == list(ids)
    for b, (left, end) in enumerate(cell.spans):
        seen = np.arange(table.shape[3])
        seen = (seen * PAGE < end) & ((seen + 1) * PAGE > left)
        assert ((table[:, b] >= 0) == seen).all()
    assert (seq_lens == cell.seq_lens).all()
    assert len(np.unique(q)) > 100
    if cell is TREE:  # tokens 1 and 2 are the children of 0, 3 and 4 those of 1
        assert q.shape == (4, 2, 5, 8, 64)
        assert (tree_mask == [[0b1], [0b11], [0b101], [0b1011], [0b10011]]).all()
        assert tree_mask.shape == (4, 2, 5, 1)
    else:
        assert tree_mask is None


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_a_pool_is_its_block_over_and_over(kv_dtype, monkeypatch):
    cell = Cell(kv_dtype, 128, 8, 4, (PAGE,) * 200)
    monkeypatch.setattr(grid, "COLD_NBYTES", 0)
    pool = Pool(kv_dtype, cell.pool_nbytes, 0)
    got, block = ctm_rt.to_host(pool.on_device(cell)), pool.on_host(cell)
    assert got.shape == (2 * 200, PAGE, 4, 128)
    assert 1 < len(got) / len(block) != len(got) // len(block)  # a part of it, last
    np.testing.assert_array_equal(
        got.view(block.dtype), block[np.arange(len(got)) % len(block)], strict=True
    )
    values = e4m3_to_float(block) if kv_dtype == "e4m3" else block.astype(np.float32)
    assert values.mean() == pytest.approx(0, abs=0.02)
    assert values.std() == pytest.approx(1, abs=0.02)


@pytest.mark.usefixtures("fake")
def test_sets_are_views_of_one_array():
    whole = np.arange(24, dtype=np.int32).reshape(3, 2, 4)
    views = split_sets(ctm_rt.to_device(whole))
    np.testing.assert_array_equal(np.stack([ctm_rt.to_host(v) for v in views]), whole)


# -- one cell -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def bench_store(exported, exported_trees, tmp_path_factory):
    """A store in which load-only kernels are, too, and trees."""
    root = tmp_path_factory.mktemp("bench")
    for modules in (exported, exported_trees):
        shutil.copytree(modules, root, dirs_exist_ok=True)
    run_export(root, "sm_90a", "kv_load_f16_d64", "kv_load_e4m3_d64")
    return root


@pytest.fixture
def clock(bench_store, monkeypatch):
    """Let a pass of the clock be known, and small cells found; return what was timed."""
    from ctm_rt.modules import store

    timed = []

    def launch_us(loops, rounds, device, stream):
        timed.append((list(map(len, loops)), rounds))
        return [*TIMES, TOKEN_US][: len(loops)]

    monkeypatch.setattr(store, "PREBUILT", bench_store)
    monkeypatch.setattr(measure, "launch_us", launch_us)
    monkeypatch.setattr(grid, "COLD_NBYTES", 1.5 * SMALL.kv_nbytes)
    monkeypatch.setattr(grid, "CELLS", (SMALL, WINDOW))
    return timed


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_a_cell(computing, clock, kv_dtype):
    cell = SMALL._replace(kv_dtype=kv_dtype)
    num_sets = cell.num_sets
    assert num_sets == {"f16": 2, "e4m3": 4}[kv_dtype]
    (row,) = run.run_cells([cell], 0)["cells"]
    plan = plan_of(cell.problem)
    assert not row["problem"]
    assert [row["us"], row["load_us"]] == TIMES
    assert 0 < row["relative_error"] < measure.TOLERANCE
    assert (row["kernel"], row["num_groups"]) == (plan.kernel, plan.num_groups)
    rounds = math.ceil(2000 / math.ceil(num_sets * cell.target_us))
    assert clock == [([num_sets] * 2, rounds)]
    decoding, loading = (
        ctm_rt.load(name).manifest.config["kernels"][index]["name"]
        for name, index in ((cell.module, plan.kernel), (cell.load_module, 0))
    )
    launched = computing.launches()
    assert [launch.kernel for launch in launched] == [decoding] * num_sets + [loading] * num_sets
    assert launched[-1].grid == ((2 + 132) * 2, 1, 1)  # unequal lengths: dealt out on the device


@pytest.mark.parametrize("kv_dtype", ["f16", "e4m3"])
def test_a_tree(computing, clock, kv_dtype):
    """Beside it one token in its place is timed, in the same call."""
    cell = TREE._replace(kv_dtype=kv_dtype)
    num_sets = cell.num_sets
    (row,) = run.run_cells([cell], 0)["cells"]
    assert not row["problem"]
    assert [row["us"], row["load_us"], row["token_us"]] == [*TIMES, TOKEN_US]
    assert row["us_over_token"] == 1.5
    assert row["tflop_per_s"] == pytest.approx(4 * 5 * 8 * 64 * 500 / 12.0 / 1e6)
    assert 0 < row["relative_error"] < measure.TOLERANCE
    plan = tree_plan_of(cell.problem)
    assert (row["kernel"], row["num_groups"]) == (plan.kernel, plan.num_groups)
    single = dataclasses.replace(cell.problem, query_len=1, tree=False)
    names = [
        ctm_rt.load(name).manifest.config["kernels"][index]["name"]
        for name, index in (
            (cell.module, plan.kernel),
            (cell.load_module, 0),
            (plan_of(single).module, plan_of(single).kernel),
        )
    ]
    launched = [launch.kernel for launch in computing.launches()]
    assert launched == [name for name in names for _ in range(num_sets)]
    assert clock[0][0] == [num_sets] * 3


def test_a_wrong_token_of_a_tree_is_found(computing, clock, monkeypatch):
    """Of each of the tokens that are looked at, in either KV head that is."""

    def flawed(at):
        def compute(launch):
            if tree_launch.is_tree(launch):
                tree_launch.compute(launch)
                out = tree_launch.arguments(launch)["out"]
                rows = decode_launch.on_host(out, (2, 5, 8, 64), np.float16)
                rows[at] += np.float16(0.5)

        return compute

    for at in ((0, 0, 0), (1, 2, 7), (1, 4, 5)):
        computing.on_launch(flawed(at))
        (row,) = run.run_cells([TREE], 0)["cells"]
        assert row["problem"] == "wrong result, not timed"
    assert not clock


def test_figures():
    row = measure.figures(SMALL, PLAN, 3e-4, *TIMES)
    assert row["tb_per_s"] == pytest.approx(500 * 2 * 64 * 2 * 2 / 12.0 / 1e6)
    assert row["us_above_load"] == 2.0
    assert row["us_over_floor"] == pytest.approx(12.0 / SMALL.floor_us)
    assert row["us_over_target"] == pytest.approx(12.0 / round(SMALL.floor_us + 4, 1))
    assert row["us_over_scaled_target"] == pytest.approx(row["us_over_target"] / 5)
    unknown = measure.figures(WINDOW, PLAN, 3e-4, *TIMES)
    assert unknown["us_over_scaled_target"] is None
    assert unknown["us"] == 12.0
    assert unknown["token_us"] is unknown["us_over_token"] is None


# -- the clock ------------------------------------------------------------------------------------


class Gpu:
    """A stream whose launches take the microseconds that they are called with."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        self.recorded = {}
        self.graphs = []
        self.live = set()
        for name in ("event_record", "event_elapsed_us", "graph_create", "graph_launch"):
            monkeypatch.setattr(driver, name, getattr(self, name))
        monkeypatch.setattr(driver, "graph_destroy", self.live.remove)

    def run(self, us):
        return lambda stream: self.queued.append(us)

    def graph_create(self, queue, stream):
        self.queued = []
        queue()
        self.graphs.append(list(self.queued))
        self.live.add(len(self.graphs) - 1)
        return len(self.graphs) - 1

    def graph_launch(self, graph, stream):
        self.now += sum(self.graphs[graph])

    def event_record(self, event, stream):
        assert event not in self.recorded
        self.recorded[event] = self.now

    def event_elapsed_us(self, start, stop):
        return self.recorded[stop] - self.recorded[start]


def test_each_loop_has_its_time(fake, monkeypatch):
    gpu, events = Gpu(monkeypatch), fake.live_events()
    got = timing.launch_us([[gpu.run(3.0), gpu.run(5.0)], [gpu.run(7.0)]], 2, 0, 0)
    assert gpu.graphs == [[3.0, 5.0] * 2, [7.0] * 2]
    assert got == pytest.approx([4.0, 7.0])
    assert not gpu.live
    assert fake.live_events() == events


def test_a_graph_is_what_was_queued(fake, monkeypatch):
    called = []

    def answer(name, *results):
        def call(*arguments):
            called.append(name)
            return (driver.cu.CUresult.CUDA_SUCCESS, *results)

        monkeypatch.setattr(driver.cu, name, call)

    answer("cuStreamBeginCapture")
    answer("cuStreamEndCapture", driver.cu.CUgraph(5))
    answer("cuGraphInstantiate", driver.cu.CUgraphExec(7))
    answer("cuGraphDestroy")
    assert driver.graph_create(lambda: called.append("queue"), 3) == 7
    assert called == [
        *("cuStreamBeginCapture", "queue", "cuStreamEndCapture"),
        *("cuGraphInstantiate", "cuGraphDestroy"),
    ]
    called.clear()
    with pytest.raises(ZeroDivisionError):
        driver.graph_create(lambda: 1 // 0, 3)
    assert called == ["cuStreamBeginCapture", "cuStreamEndCapture"]


# -- the report -----------------------------------------------------------------------------------


@pytest.fixture
def bench(clock):
    """Run the command; return its result, and its JSON if it was asked for."""

    def bench(*arguments, exit_code=0):
        result = CliRunner().invoke(cli.main, ["bench", *arguments])
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result

    return bench


@pytest.mark.usefixtures("computing")
def test_report(bench):
    found = bench("--json", "--only", "f16")
    assert (found["device"], found["num_sms"]) == (driver.device_name(0), 132)
    assert [row["name"] for row in found["cells"]] == [SMALL.name, WINDOW.name]
    assert "host_us" not in found
    lines = bench("--only", "b3").stdout.splitlines()
    assert [word in lines[1] for word in run.COLUMNS] == [True] * len(run.COLUMNS)
    assert lines[2].startswith(f"{WINDOW.name}  12.00  10.00      +2.00")
    assert len(lines) == 3


@pytest.mark.usefixtures("fake")
def test_a_wrong_output_is_not_timed(bench, clock):
    """The fake driver computes nothing, so ``out`` stays NaN."""
    (row,) = bench("--json", "--only", "b2", exit_code=1)["cells"]
    assert row["problem"] == "wrong result, not timed"
    assert row["us"] is row["load_us"] is row["relative_error"] is None
    assert not clock
    assert "wrong result" in bench("--only", "b2", exit_code=1).stdout


@pytest.mark.usefixtures("computing")
def test_a_cell_without_its_module_is_told_and_passed_over(bench, monkeypatch):
    absent = Cell("f16", 128, 8, 2, (128,))
    monkeypatch.setattr(grid, "CELLS", (absent, SMALL))
    first, second = bench("--json", "--only", "f16", exit_code=1)["cells"]
    assert "no module kv_load_f16_d128" in first["problem"]
    assert not second["problem"]
    assert "no module kv_load_f16_d128" in bench("--only", "d128", exit_code=1).stdout


def test_without_a_gpu(bench, fake):
    fake.set_devices(0)
    assert "needs a GPU: no GPU is visible" in bench(exit_code=1).stderr


@pytest.mark.usefixtures("fake")
def test_no_such_cell(bench):
    assert SMALL.name in bench("--only", "b7", exit_code=2).stderr


# -- the host -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("computing")
def test_host_figures(bench, monkeypatch):
    bare = []
    monkeypatch.setattr(driver, "bare_launch", lambda stream: lambda: bare.append(stream))
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(run, "first_result_s", lambda device: {"import": 0.25})
    found = bench("--json")
    assert list(found["host_us"]) == ["cuLaunchKernel", "Launch.__call__", "decode_attention"]
    assert all(us > 0 for us in found["host_us"].values())
    assert len(bare) == 2 * (host.REPEATS + host.WARM_UP)
    assert 10_000 < found["module_nbytes"][SMALL.module] < 1_000_000
    text = bench().stdout
    assert "first_result_s import: 0.250" in text
    assert f"module_nbytes {SMALL.module}: {found['module_nbytes'][SMALL.module]:,}\n" in text


@pytest.mark.usefixtures("computing")
def test_the_first_result_is_right(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "0"])
    exec(host._FIRST_RESULT, {})
    assert list(json.loads(capsys.readouterr().out)) == ["import", "context", "call"]
