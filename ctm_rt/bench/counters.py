"""Say what holds each cell's kernel back: ``python -m ctm_rt.bench.counters`` prints a table.

Nsight Compute (``ncu``) counts. It runs this module again, which launches each cell twice: once
unseen, and once for ncu, which replays that launch until it has read all counters. Alone and cold,
a launch takes longer than in the benchmark, where it starts while the one before it ends.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ctm_rt import driver
from ctm_rt.bench import grid, ncu
from ctm_rt.bench.grid import Cell
from ctm_rt.bench.inputs import Pools, make_inputs
from ctm_rt.bench.measure import decode_launches, on_device
from ctm_rt.errors import CtmError, ToolError


class Metric(NamedTuple):
    """A figure of the report, and a column of the table."""

    name: str
    title: str
    text: str
    counter: str  # of ncu
    per_unit: float = 1.0


_PEAK = "avg.pct_of_peak_sustained_elapsed"  # of all SMs, from the launch's first cycle to its last
METRICS = (
    Metric("us", "us", "{:.2f}", "gpu__time_duration.sum", 1e3),
    Metric("sm_ghz", "GHz", "{:.2f}", "sm__cycles_elapsed.avg.per_second", 1e9),
    Metric("sm_active_pct", "SMs %", "{:.0f}", f"sm__cycles_active.{_PEAK}"),
    Metric("dram_pct", "DRAM %", "{:.0f}", f"dram__throughput.{_PEAK}"),
    Metric("l2_pct", "L2 %", "{:.0f}", f"lts__throughput.{_PEAK}"),
    Metric("tensor_pct", "tensor %", "{:.0f}", f"sm__pipe_tensor_cycles_active.{_PEAK}"),
    Metric("issue_pct", "issue %", "{:.0f}", f"smsp__issue_active.{_PEAK}"),
    Metric("warps", "warps", "{:.1f}", "smsp__warps_active.avg.per_cycle_active"),
)
COLUMNS = (
    "cell",
    *(m.title for m in METRICS),
    "samples",
    "stalls, %",
    *(f"{name} %" for name in ncu.REGIONS),
    "",
)

# By itself ncu samples every 2,048 cycles, so that its buffer does not overflow: 229 warps of a
# launch of 6 us. Short launches are sampled every 128.
SHORT_US, SHORT_SAMPLING = 50, "2"


def run(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the figures of each cell, in the order of ``cells``; or its ``problem``."""
    rows: dict[Cell, dict[str, Any]] = {}
    for is_short, sampling in ((True, SHORT_SAMPLING), (False, "auto")):
        group = [cell for cell in cells if (cell.target_us < SHORT_US) == is_short]
        if group:
            rows.update(zip(group, _profile(group, sampling), strict=True))
    return [rows[cell] for cell in cells]


def launch(cells: Sequence[Cell], device: int) -> list[str]:
    """Launch each cell twice, the second time for a profiler; return what went wrong, if it did."""
    problems, pools = [], Pools(cells, device)
    with driver.current(device):
        stream = driver.stream_create()
        for cell in cells:
            try:
                sets = on_device(cell, make_inputs(cell), pools.of(cell), device)
                (one,) = decode_launches(sets[:1], cell, device)
                one(stream)
                driver.synchronize(stream, device)
                driver.profiler_start()
                one(stream)
                driver.synchronize(stream, device)
                driver.profiler_stop()
                problems.append("")
            except CtmError as error:
                problems.append(str(error))
    return problems


def figures(
    cell: Cell, counted: dict[str, float], instructions: Sequence[ncu.Instruction]
) -> dict[str, Any]:
    """Return a cell's row of the report; None for what is not known.

    ``stalls`` are shares of all samples, warps that issued among them; those of a region are shares
    of its own, and its ``share`` is how many of all that is.
    """
    samples = sum((each.samples for each in instructions), Counter[str]())
    by_region = ncu.regions(instructions) if samples else {}
    problem = ""
    if counted.get("smsp__pcsamp_dropped_bytes"):
        problem = "some samples were dropped"
    elif not by_region:
        problem = "no loop around tensor-core instructions" if samples else "no samples of the code"
    return {
        "name": cell.name,
        **{m.name: _scaled(counted.get(m.counter), m.per_unit) for m in METRICS},
        "samples": samples.total(),
        "stalls": _stalls(samples),
        "regions": {
            name: {"share": found.total() / samples.total(), "stalls": _stalls(found)}
            for name, found in by_region.items()
        },
        "problem": problem,
    }


def table_row(row: dict[str, Any]) -> list[str]:
    """Return the texts of one of the report's cells, in the order of ``COLUMNS``."""
    if "samples" not in row:
        return [row["name"], *[""] * (len(COLUMNS) - 2), row["problem"]]
    found = [(m.text, row[m.name]) for m in METRICS]
    return [
        row["name"],
        *("" if value is None else text.format(value) for text, value in found),
        str(row["samples"]),
        _top(row["stalls"], 3),
        *(_region(row["regions"].get(name)) for name in ncu.REGIONS),
        row["problem"],
    ]


def _profile(cells: Sequence[Cell], sampling: str) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        report, answer = Path(folder) / "cells.ncu-rep", Path(folder) / "problems.json"
        again = [sys.executable, "-m", "ctm_rt.bench.counters", "--launch", str(answer)]
        command = [*again, *(cell.name for cell in cells)]
        ncu.profile(command, [m.counter for m in METRICS], sampling, report)
        problems = json.loads(answer.read_text())
        launched = problems.count("")  # without any ncu writes no report
        counted, code = (ncu.counters(report), ncu.code(report)) if launched else ([], [])
    if len(counted) != launched:
        raise ToolError(f"ncu: expected {launched} launches in its report, got {len(counted)}")
    if len(code) != launched:  # whose is not known
        code = [[]] * launched
    found = iter(zip(counted, code, strict=True))
    return [
        {"name": cell.name, "problem": problem} if problem else figures(cell, *next(found))
        for cell, problem in zip(cells, problems, strict=True)
    ]


def _scaled(value: float | None, per_unit: float) -> float | None:
    return None if value is None else value / per_unit


def _stalls(samples: Counter[str]) -> dict[str, float]:
    """Return the shares of what held warps back, the largest first."""
    counts = samples.most_common()
    return {name: n / samples.total() for name, n in counts if name != ncu.ISSUED}


def _top(stalls: dict[str, float], count: int) -> str:
    return ", ".join(f"{name} {100 * share:.0f}" for name, share in [*stalls.items()][:count])


def _region(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    share = f"{100 * found['share']:.0f}"
    return f"{share} ({_top(found['stalls'], 1)})" if found["stalls"] else share


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m ctm_rt.bench.counters")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORDS",
        help="cells whose name has these words, such as 'f16 b1'; may be repeated (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--launch", nargs="+", help=argparse.SUPPRESS)  # what ncu runs
    options = parser.parse_args(arguments)
    if options.launch:
        answer, *names = options.launch
        problems = launch([cell for cell in grid.CELLS if cell.name in names], 0)
        Path(answer).write_text(json.dumps(problems))
        return
    cells = grid.select(options.only)
    if not cells:
        parser.error("no such cell; names are like " + grid.CELLS[0].name)
    try:
        device, rows = driver.device_name(0), run(cells)
    except CtmError as error:
        parser.exit(1, f"Error: {error}\n")
    print(f"{device}, each launch alone and cold\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print(f"|{' --- |' * len(COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(table_row(row))} |")
    if options.json:
        report = json.dumps({"device": device, "cells": rows}, indent=1, allow_nan=False)
        options.json.write_text(report + "\n")
    if any(row["problem"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
