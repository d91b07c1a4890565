"""Counters of the cells' kernels: ncu's reports, regions of the code, table and command."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from ctm_rt import driver
from ctm_rt.bench import counters, grid, ncu
from ctm_rt.bench.grid import Cell
from ctm_rt.bench.ncu import Instruction, regions
from ctm_rt.errors import ToolError

SMALL = Cell("f16", 64, 8, 2, (200, 300))
ABSENT = Cell("f16", 256, 8, 2, (128,))
LONG = Cell("f16", 64, 8, 2, (200,), known_target_us=100.0)

# Two launches of ncu 2025.3.1 on an H200, with fewer columns, and less code.
RAW = """\
==WARNING== A remark
"ID","Process ID","Kernel Name","Grid Size","gpu__time_duration.sum",\
"dram__throughput.avg.pct_of_peak_sustained_elapsed","smsp__pcsamp_dropped_bytes",\
"sm__cycles_elapsed.avg.per_second"
"","","","","ns","%","byte","hz"
"0","1433","kernel_0","(64, 1, 1)","6,176","14.32","0","1,844,871,153.24"
"1","1433","kernel_1","(64, 1, 1)","11,840","29.92","0","n/a"
"""
SOURCE = """\
"Kernel Name","kernel_0",
"Address","Source","# Samples","stall_imc","stall_selected","stall_short_sb","stall_wait",\
"stall_short_sb (Not Issued)"
"0x7f74bf7a0000","      LDC R1, c[0x0][0x28]","8","8","0","0","0","0"
"0x7f74bf7a3850","      HMMA.16816.F32 R4, R44, R48, RZ","1","0","0","1","0","1"
"0x7f74bf7a3940","@P0   HMMA.16816.F32 R4, R56, R72, R4","3","0","1","0","2","0"
"0x7f74bf7a7f20","      EXIT","0","0","0","0","0","0"
"Kernel Name","kernel_1",
"Address","Source","# Samples","stall_imc","stall_selected","stall_short_sb","stall_wait",\
"stall_short_sb (Not Issued)"
"0x7f74bf7b0000","      S2R R88, SR_TID.X","0","0","0","0","0","0"
"0x7f74bf7b0010","      HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT","4","0","1","0","0","0"
"0x7f74bf7b0020","      EXIT","0","0","0","0","0","0"
"""

# It stands for ncu: answers that the cells were launched, but for those named like ABSENT.
NCU = f"""\
#!{sys.executable}
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
given = sys.argv[1:]
with open(folder / "calls", "a") as calls:
    print(json.dumps(given), file=calls)
if "--import" in given:
    print((folder / given[given.index("--page") + 1]).read_text(), end="")
elif (folder / "error").exists():
    print((folder / "error").read_text())
    raise SystemExit(1)
else:
    answer, *names = given[given.index("--launch") + 1 :]
    problems = ["no module" if "d256" in name else "" for name in names]
    pathlib.Path(answer).write_text(json.dumps(problems))
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A folder that is all of the PATH, with an ncu that reports what is in its files."""
    (tmp_path / "raw").write_text(RAW)
    (tmp_path / "source").write_text(SOURCE)
    (tmp_path / "ncu").write_text(NCU)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(grid, "CELLS", (SMALL, ABSENT, SMALL._replace(query_len=2), LONG))
    return tmp_path


def calls(tool):
    return [json.loads(line) for line in (tool / "calls").read_text().splitlines()]


# -- reports --------------------------------------------------------------------------------------


def test_counters_are_numbers_in_base_units(tool):
    first, second = ncu.counters(Path("cells.ncu-rep"))
    assert first["gpu__time_duration.sum"] == 6176
    assert first["sm__cycles_elapsed.avg.per_second"] == 1844871153.24
    assert "sm__cycles_elapsed.avg.per_second" not in second  # n/a
    assert second["dram__throughput.avg.pct_of_peak_sustained_elapsed"] == 29.92
    (asked,) = calls(tool)
    assert asked[:2] == ["--import", "cells.ncu-rep"]
    assert asked[-2:] == ["--print-units", "base"]


@pytest.mark.usefixtures("tool")
def test_code_is_of_each_launch():
    first, second = ncu.code(Path("cells.ncu-rep"))
    assert [each.opcode for each in first] == ["LDC", "HMMA.16816.F32", "HMMA.16816.F32", "EXIT"]
    assert first[2].address == 0x7F74BF7A3940
    assert first[2].samples == {"selected": 1, "wait": 2}
    assert first[1].samples == {"short_sb": 1}  # once: those that did not issue are among them
    assert first[3].samples == {}
    assert second[1].samples == {"selected": 1, "other": 3}  # for which ncu has no column


# -- regions --------------------------------------------------------------------------------------


def listing(text):
    """Lines of code, each sampled as often as its index says; a target is an index."""
    lines = [line.strip() for line in text.strip().splitlines()]
    for i in range(len(lines)):
        lines = [line.replace(f"->{i}.", hex(0x7000 + 16 * i)) for line in lines]
    return [
        Instruction(0x7000 + 16 * i, line, Counter({str(i): 1})) for i, line in enumerate(lines)
    ]


def places(text):
    found = regions(listing(text))
    return {name: sorted(map(int, samples)) for name, samples in found.items()}


def test_regions_of_a_loop():
    """It begins with the wait, where it is jumped back to, not with the multiplies."""
    assert places("""
        MOV R1, R2
        @P0 BRA ->3.
        MOV R3, R2
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6], RZ
        HMMA.16816.F32 R4, R44, R48, RZ
        HMMA.16816.F32 R4, R44, R48, RZ
        @!P1 BRA P2, ->3.
        STS [R1], R2
        EXIT
    """) == {"start": [0, 1, 2], "loop": [3, 4, 5, 6], "merge": [7, 8]}


def test_what_lies_behind_the_code_belongs_where_it_jumps_back_to():
    assert places("""
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6], RZ
        @!P0 BRA ->10.
        HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT
        @P1 BRA ->13.
        HGMMA.64x64x16.F32 R24, gdesc[UR8], R24
        @P2 BRA ->3.
        CALL.REL.NOINC ->16.
        @P3 EXIT
        SYNCS.ARRIVE [R6]
        EXIT
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6], RZ
        @!P0 BRA ->10.
        BRA ->1.
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R7], RZ
        @!P0 BRA ->13.
        BRA ->4.
        MUFU.RCP R1, R2
        RET.REL.NODEC R10, ->0.
        BRA ->18.
    """) == {
        "start": [0, 1, 10, 11, 12],
        "loop": [2, 3, 4, 5, 13, 14, 15],
        "merge": [6, 7, 8, 9, 16, 17, 18],
    }


def test_regions_without_loops():
    straight = (
        "MOV R1, R2\nHMMA.16816.F32 R4, R5, R6, RZ\nMOV R1, R2\nHMMA.16816.F32 R4, R5, R6, R4"
    )
    assert places(straight) == {"start": [0], "loop": [1, 2, 3], "merge": []}
    assert places("MOV R1, R2\nBRA ->0.\nEXIT") == {}


def test_every_sample_is_in_one_region():
    code = listing("MOV R1, R2\nHMMA.16816.F32 R4, R5, R6, RZ\nEXIT\nBRA ->1.\nNOP")
    assert sum(regions(code).values(), Counter()) == Counter({str(i): 1 for i in range(5)})


# -- the report -----------------------------------------------------------------------------------


def figures(**counted):
    stalls = (
        ("MOV R1, R2", {"long_sb": 3, "selected": 1}),
        ("HMMA.16816.F32 R4, R44, R48, RZ", {"wait": 9, "math": 5, "selected": 6}),
        ("STS [R1], R2", {"barrier": 1, "selected": 15}),
        ("EXIT", {}),
    )
    code = [Instruction(16 * i, text, Counter(found)) for i, (text, found) in enumerate(stalls)]
    return counters.figures(SMALL, counted, code)


def test_figures():
    row = figures(**{"gpu__time_duration.sum": 6176.0, "smsp__pcsamp_dropped_bytes": 0.0})
    assert row["name"] == SMALL.name
    assert row["us"] == 6.176
    assert row["sm_ghz"] is None
    assert row["samples"] == 40
    assert row["stalls"] == {"wait": 9 / 40, "math": 5 / 40, "long_sb": 3 / 40, "barrier": 1 / 40}
    assert row["regions"] == {
        "start": {"share": 4 / 40, "stalls": {"long_sb": 3 / 4}},
        "loop": {"share": 20 / 40, "stalls": {"wait": 9 / 20, "math": 5 / 20}},
        "merge": {"share": 16 / 40, "stalls": {"barrier": 1 / 16}},
    }
    assert row["problem"] == ""


def test_a_row_of_the_table():
    row = figures(**{"gpu__time_duration.sum": 6176.0})
    texts = dict(zip(counters.COLUMNS, counters.table_row(row), strict=True))
    assert texts["us"] == "6.18"
    assert texts["GHz"] == ""
    assert texts["stalls, %"] == "wait 22, math 12, long_sb 8"
    assert texts["start %"] == "10 (long_sb 75)"
    assert texts["loop %"] == "50 (wait 45)"
    assert texts["merge %"] == "40 (barrier 6)"


def test_figures_that_are_not_whole_say_why():
    assert figures(smsp__pcsamp_dropped_bytes=8.0)["problem"] == "some samples were dropped"
    unseen = counters.figures(SMALL, {}, [])
    assert unseen["problem"] == "no samples of the code"
    assert counters.table_row(unseen)[-5:] == ["", "", "", "", "no samples of the code"]
    straight = counters.figures(SMALL, {}, [Instruction(0, "MOV R1, R2", Counter(wait=2))])
    assert straight["problem"] == "no loop around tensor-core instructions"
    assert straight["stalls"] == {"wait": 1.0}
    assert straight["regions"] == {}


# -- what ncu runs --------------------------------------------------------------------------------


def test_each_cell_is_launched_once_for_ncu(computing, tmp_path, monkeypatch):
    """And once before; a cell that cannot be launched says why and is passed over."""
    monkeypatch.setattr(grid, "COLD_NBYTES", 1.5 * SMALL.kv_nbytes)
    monkeypatch.setattr(grid, "CELLS", (SMALL, ABSENT, LONG))
    seen = []
    for name in ("profiler_start", "profiler_stop"):
        call = getattr(driver, name)
        monkeypatch.setattr(
            driver, name, lambda call=call: seen.append(len(computing.launches())) or call()
        )
    answer = tmp_path / "problems.json"
    counters.main(["--launch", str(answer), SMALL.name, ABSENT.name, LONG.name])
    first, second, third = json.loads(answer.read_text())
    assert first == third == ""
    assert "no module fmha_decode_f16_d256" in second
    assert seen == [1, 2, 3, 4]
    assert len(computing.calls("cuProfilerStart")) == len(computing.calls("cuProfilerStop")) == 2


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_the_command(tool, capsys):
    figures = tool / "figures.json"
    with pytest.raises(SystemExit, match="1"):  # a cell has a problem
        counters.main(["--only", "b2", "--only", "d256", "--json", str(figures)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(driver.device_name(0))
    assert lines[4].startswith(f"| {SMALL.name} | 6.18 | 1.84 |  | 14 |")
    assert "| 12 | imc 67, wait 17, short_sb 8 | 67 (imc 100) | 33 (wait 50) | 0 |" in lines[4]
    assert lines[5].startswith(f"| {ABSENT.name} |  |")
    assert lines[5].endswith("| no module |")
    assert lines[6].startswith("| f16 d64 8/2 b2 s300 q2 | 11.84 |")
    assert len(lines) == 7
    report = json.loads(figures.read_text())
    assert report["device"] == driver.device_name(0)
    assert [row["problem"] for row in report["cells"]] == ["", "no module", ""]
    profiled, *_ = calls(tool)
    assert profiled[profiled.index("--launch") + 2 :] == [row["name"] for row in report["cells"]]
    assert "gpu__time_duration.sum" in profiled[profiled.index("--metrics") + 1].split(",")
    assert profiled[profiled.index("--profile-from-start") + 1] == "off"


@pytest.mark.usefixtures("fake")
def test_short_launches_are_sampled_more_often(tool, capsys):
    (tool / "raw").write_text("".join(RAW.splitlines(keepends=True)[:4]))
    (tool / "source").write_text(SOURCE[: SOURCE.rindex('"Kernel Name"')])
    counters.main(["--only", "b1 d64", "--only", "q2"])
    profiled = [call for call in calls(tool) if "--launch" in call]
    found = {call[-1]: call[call.index("--warp-sampling-interval") + 1] for call in profiled}
    assert found == {"f16 d64 8/2 b2 s300 q2": "2", LONG.name: "auto"}
    names = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[4:]]
    assert names == ["| f16 d64 8/2 b2 s300 q2", f"| {LONG.name}"]


@pytest.mark.usefixtures("fake")
def test_nothing_launched_is_nothing_read(tool, capsys):
    with pytest.raises(SystemExit, match="1"):
        counters.main(["--only", "d256"])
    assert "| no module |" in capsys.readouterr().out
    assert len(calls(tool)) == 1


@pytest.mark.usefixtures("fake")
def test_counters_without_code(tool, capsys):
    """Of one launch too few it is not known whose is missing."""
    (tool / "source").write_text(SOURCE[: SOURCE.rindex('"Kernel Name"')])
    with pytest.raises(SystemExit, match="1"):
        counters.main(["--only", "b2"])
    rows = capsys.readouterr().out.splitlines()[4:]
    assert ["| 6.18 |" in rows[0], "| 11.84 |" in rows[1]] == [True, True]
    assert all(row.endswith("no samples of the code |") for row in rows)


@pytest.mark.usefixtures("fake")
def test_a_report_of_other_launches_is_refused(tool, capsys):
    with pytest.raises(SystemExit, match="1"):
        counters.main(["--only", "b1 d64"])
    assert "expected 1 launches in its report, got 2" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_what_ncu_refuses_is_told(tool, capsys):
    (tool / "error").write_text("==PROF== x\n==ERROR== ERR_NVGPUCTRPERM - no permission\n")
    with pytest.raises(SystemExit, match="1"):
        counters.main([])
    assert capsys.readouterr().err == "Error: ncu: ERR_NVGPUCTRPERM - no permission\n"
    (tool / "error").write_text("")
    with pytest.raises(ToolError, match="ncu: exit code 1"):
        counters.run([SMALL])


@pytest.mark.usefixtures("fake")
def test_without_ncu(tool, capsys):
    (tool / "ncu").unlink()
    with pytest.raises(SystemExit, match="1"):
        counters.main([])
    assert "no ncu on the PATH" in capsys.readouterr().err


def test_usage(fake, capsys):
    with pytest.raises(SystemExit, match="2"):
        counters.main(["--only", "b7"])
    assert grid.CELLS[0].name in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        counters.main(["--sampling", "3"])
    fake.set_devices(0)
    with pytest.raises(SystemExit, match="1"):
        counters.main([])
    assert "cuDeviceGetName failed" in capsys.readouterr().err
