"""Run Nsight Compute (``ncu``), and read from its report what kernels did and where they waited."""

import csv
import re
import shutil
import subprocess
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ctm_rt.errors import ToolError

REGIONS = ("start", "loop", "merge")
_OPTIONS = (
    *("--profile-from-start", "off"),  # until the program calls driver.profiler_start()
    *("--clock-control", "none"),  # clocks as they are, as in the benchmark
    *("--cache-control", "all"),  # L2 flushed before each pass: KV is cold
    *("--section", "SourceCounters"),  # samples by instruction and reason
)
ISSUED = "selected"  # what ncu calls a sampled warp that did not wait
_TENSOR_CORE = ("HMMA", "HGMMA")


class Instruction(NamedTuple):
    """One of a kernel's, and how many warps were sampled at it, by what they waited for."""

    address: int
    text: str
    samples: Counter[str]

    @property
    def opcode(self) -> str:
        """Such as ``EXIT``, whatever predicate is before it."""
        first, *more = self.text.split()
        return more[0] if first.startswith("@") else first


def profile(command: Sequence[str], metrics: Sequence[str], sampling: str, report: Path) -> None:
    """Run ``command`` under ncu and write the report, if it launches anything that is to be seen.

    A warp is sampled on each scheduler every 2**(5 + ``sampling``) cycles, or "auto".
    """
    options = ["--warp-sampling-interval", sampling, "--metrics", ",".join(metrics)]
    _ncu(*_OPTIONS, *options, "--export", str(report), *command)


def counters(report: Path) -> list[dict[str, float]]:
    """Return what was counted of each launch, in their order: metrics in base units."""
    header, _units, *rows = _page(report, "raw", "--print-units", "base")
    return [_numbers(dict(zip(header, row, strict=True))) for row in rows]


def code(report: Path) -> list[list[Instruction]]:
    """Return the kernel's code for each launch, in their order."""
    launches: list[list[Instruction]] = []
    header: list[str] = []
    for row in _page(report, "source", "--print-source", "sass"):
        if row[0] == "Kernel Name":
            launches.append([])
        elif row[0] == "Address":
            header = row
        else:
            launches[-1].append(_instruction(dict(zip(header, row, strict=True))))
    return launches


def regions(instructions: Sequence[Instruction]) -> dict[str, Counter[str]]:
    """Return the samples of each of ``REGIONS``; empty for code without tensor-core instructions.

    The loop reaches from the first of these to the last, and over every loop that has one in it:
    the wait for a tile stands before its multiplies. Behind the last EXIT are the parts that ptxas
    thinks are seldom run, such as going on to wait: each belongs where it jumps back to.
    """
    opcodes = [each.opcode for each in instructions]
    multiplies = [i for i, opcode in enumerate(opcodes) if opcode.startswith(_TENSOR_CORE)]
    if not multiplies:
        return {}
    end = max((i for i, opcode in enumerate(opcodes) if opcode == "EXIT"), default=len(opcodes))
    jumps = _jumps(instructions)
    loop = set(multiplies)
    for at, to in jumps.items():
        if at < end and any(to <= i <= at for i in multiplies):
            loop |= {at, to}
    first, last = min(loop), max(loop)
    found: dict[str, Counter[str]] = {region: Counter() for region in REGIONS}
    place = end  # of the division that ptxas appends: results are divided last
    for i, each in reversed(list(enumerate(instructions))):
        if i <= end:
            place = i
        elif each.text.startswith("BRA ") and jumps.get(i, i) <= end:
            place = jumps[i]
        found[REGIONS[(place >= first) + (place > last)]] += each.samples
    return found


def _jumps(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return from where to where the code branches, as indices."""
    addresses = [each.address for each in instructions]
    found = {}
    for i, each in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)$", each.text)
        if each.opcode.startswith("BRA") and target:
            found[i] = bisect_left(addresses, int(target[1], 16))
    return found


def _instruction(row: dict[str, str]) -> Instruction:
    stalls = {
        name.removeprefix("stall_"): int(value)
        for name, value in row.items()
        if value != "0" and name.startswith("stall_") and not name.endswith("(Not Issued)")
    }
    # ncu 2025.3 has no column for warps that wait for their warpgroup.
    other = int(row["# Samples"]) - sum(stalls.values())
    samples = Counter({**stalls, "other": other} if other else stalls)
    return Instruction(int(row["Address"], 16), row["Source"].strip(), samples)


def _numbers(row: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, text in row.items():
        with suppress(ValueError):
            found[name] = float(text.replace(",", ""))
    return found


def _page(report: Path, page: str, *options: str) -> Iterator[list[str]]:
    text = _ncu("--import", str(report), "--csv", "--page", page, *options)
    lines = (line for line in text.splitlines() if not line.startswith("=="))  # ncu's remarks
    return filter(None, csv.reader(lines))


def _ncu(*arguments: str) -> str:
    """Return what ncu prints."""
    program = shutil.which("ncu")
    if program is None:
        raise ToolError("no ncu on the PATH; it is Nsight Compute, a part of the CUDA toolkit")
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = re.findall(r"^==ERROR== (.*)", done.stdout, re.MULTILINE)
        raise ToolError(f"ncu: {' '.join(errors) or f'exit code {done.returncode}'}")
    return done.stdout
