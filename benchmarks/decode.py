"""Single-token decode, f16, head_dim 128, 32/8 heads: us per launch, and host us per call.

A CUDA graph of back-to-back launches, median of 20 replays. The launches rotate over input sets of
which the KV exceeds 400 MB, so each finds its cache, tables and queries cold. One set is checked
against the reference before anything is timed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cuda.bindings.driver as cu
import numpy as np

import ctm_rt
from ctm_rt import driver
from ctm_rt.memory import DeviceArray
from ctm_rt.modules.store import find, store_roots
from ctm_rt.tensor import DType, TensorView, view
from tests.gpu.device import DEVICE, capture, new_stream, place

MODULE, HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS = "fmha_decode_f16_d128", 128, 32, 8
PAGE = 128
PAGE_SHAPE = (PAGE, NUM_KV_HEADS, HEAD_DIM)
PAGE_NBYTES = 2 * PAGE * NUM_KV_HEADS * HEAD_DIM
SCALE = HEAD_DIM**-0.5
COLD_NBYTES = 400e6  # of KV between two uses of a set; the L2 has 60 MB
REPLAYS, WARM_UP = 20, 3
MIN_LAUNCHES = 64  # in a graph, so that its own start does not count


class Cell(NamedTuple):
    """A row of the table: what is decoded, and the us that we aim at on an H200."""

    batch: int
    seq_len: int
    target_us: float

    @property
    def num_pages(self) -> int:
        return self.batch * self.seq_len // PAGE

    @property
    def kv_nbytes(self) -> int:
        return 2 * self.num_pages * PAGE_NBYTES

    @property
    def num_sets(self) -> int:
        return int(COLD_NBYTES // self.kv_nbytes) + 1


# KV bytes / 4.39 TB/s (the best rate that we have seen another kernel reach) + 4 us
CELLS = (
    Cell(1, 1024, 5.0),
    Cell(1, 4096, 7.8),
    Cell(1, 16384, 19.3),
    Cell(1, 65536, 65.1),
    Cell(8, 4096, 34.6),
    Cell(32, 4096, 126.3),
    Cell(64, 8192, 493.2),
    Cell(128, 1024, 126.3),
)


class Bank:
    """64 MiB of random pages; pools are filled with them over and over, each at its own address."""

    num_pages = 256

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        pages = rng.standard_normal((self.num_pages, *PAGE_SHAPE), np.float32)
        self.host = pages.astype(np.float16)
        self.device = ctm_rt.to_device(self.host)

    def pools(self, cell: Cell) -> list[TensorView]:
        """Return one pool per set; page p of the first holds page p % num_pages of the bank."""
        pool_pages = 2 * cell.num_pages
        total = cell.num_sets * pool_pages
        array = view(DeviceArray.empty((total, *PAGE_SHAPE), DType("f16"), DEVICE))
        for start in range(0, total, self.num_pages):
            nbytes = min(self.num_pages, total - start) * PAGE_NBYTES
            target = array.ptr + start * PAGE_NBYTES
            driver.check("cuMemcpyDtoD", cu.cuMemcpyDtoD(target, self.device.ptr, nbytes))
        step = pool_pages * PAGE_NBYTES
        return [
            array._replace(ptr=array.ptr + s * step, shape=(pool_pages, *PAGE_SHAPE))
            for s in range(cell.num_sets)
        ]


def input_sets(cell: Cell, bank: Bank) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``bind_decode`` for each set, host arrays but for the pool."""
    rng = np.random.default_rng(1)
    for pool in bank.pools(cell):
        ids = np.stack([rng.permutation(cell.num_pages) + row * cell.num_pages for row in (0, 1)])
        table = ids.reshape(2, cell.batch, -1).swapaxes(0, 1).astype(np.int32)
        q = rng.standard_normal((cell.batch, NUM_Q_HEADS, HEAD_DIM), np.float32).astype(np.float16)
        lens = np.full(cell.batch, cell.seq_len, np.int32)
        yield {"q": q, "kv_pool": pool, "page_table": np.ascontiguousarray(table), "seq_lens": lens}


def measure(cell: Cell, bank: Bank, stream: int) -> dict[str, Any]:
    """Return the figures of one row, its output checked."""
    launches, outs, sets = [], [], list(input_sets(cell, bank))
    workspace = ctm_rt.Workspace(DEVICE)  # launches on one stream follow each other
    for arguments in sets:
        placed = {n: place(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        outs.append(DeviceArray.empty(arguments["q"].shape, DType("f16"), DEVICE))
        launch = ctm_rt.bind_decode(**placed, scale=SCALE, out=outs[-1], workspace=workspace)
        launch(stream)
        launches.append(launch)
    driver.synchronize(stream, DEVICE)
    error = relative_error(sets[0], ctm_rt.to_host(outs[0]), bank)

    rounds = -(-MIN_LAUNCHES // len(launches))
    us = replay_us(capture(stream, *launches * rounds), stream) / (len(launches) * rounds)
    return {
        "batch": cell.batch,
        "seq_len": cell.seq_len,
        "us": us,
        "tb_per_s": cell.kv_nbytes / us / 1e6,
        "us_over_target": us / cell.target_us,
        "relative_error": error,
    }


def relative_error(arguments: dict[str, Any], got: np.ndarray, bank: Bank) -> float:
    """Return the error of the first and the last sequence against float64; refuse a wrong one."""
    few = sorted({0, len(got) - 1})
    exact = ctm_rt.reference.decode_attention(
        arguments["q"][few],
        bank.host,
        arguments["page_table"][few] % Bank.num_pages,
        arguments["seq_lens"][few],
        scale=SCALE,
    )
    error = float(np.linalg.norm(got[few] - exact) / np.linalg.norm(exact))
    if not error <= 6e-4:
        raise SystemExit(f"wrong result, relative error {error:.3g}: nothing was timed")
    return error


def replay_us(replay: Callable[[], None], stream: int) -> float:
    """Return the median time of one replay."""
    start, stop = (driver.check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
    times = []
    for _ in range(WARM_UP + REPLAYS):
        driver.check("cuEventRecord", cu.cuEventRecord(start, stream))
        replay()
        driver.check("cuEventRecord", cu.cuEventRecord(stop, stream))
        driver.check("cuEventSynchronize", cu.cuEventSynchronize(stop))
        ms = driver.check("cuEventElapsedTime", cu.cuEventElapsedTime(start, stop))
        times.append(1e3 * ms)
    return statistics.median(times[WARM_UP:])


def host_us(bank: Bank, stream: int) -> dict[str, float]:
    """Return what one call costs the host, the GPU being ahead of it or not."""
    arguments = next(input_sets(CELLS[0]._replace(seq_len=PAGE), bank))
    placed = {n: place(a) if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
    out = DeviceArray.empty(arguments["q"].shape, DType("f16"), DEVICE)
    call = {**placed, "scale": SCALE, "out": out, "workspace": ctm_rt.Workspace(DEVICE)}
    launch = ctm_rt.bind_decode(**call)
    empty = empty_kernel()
    rivals: dict[str, Callable[[], object]] = {
        "cuLaunchKernel": lambda: cu.cuLaunchKernel(empty, 1, 1, 1, 128, 1, 1, 0, stream, 0, 0),
        "Launch.__call__": lambda: launch(stream),
        "decode_attention": lambda: ctm_rt.decode_attention(**call, stream=stream),
    }
    return {name: call_us(function, stream) for name, function in rivals.items()}


def empty_kernel() -> Any:
    """Return a kernel without parameters that does nothing."""
    ptx = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\0"
    module = driver.check("cuModuleLoadData", cu.cuModuleLoadData(ptx))
    return driver.check("cuModuleGetFunction", cu.cuModuleGetFunction(module, b"empty"))


def call_us(function: Callable[[], object], stream: int, calls: int = 200) -> float:
    """Return the median over bursts that the launch queue holds; the first warm up."""
    times = []
    for _ in range(WARM_UP + REPLAYS):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
        driver.synchronize(stream, DEVICE)
    return statistics.median(times[WARM_UP:])


FIRST_RESULT = """
import json, time
start = time.perf_counter()
import numpy as np
import ctm_rt
imported = time.perf_counter()
with ctm_rt.driver.current(0):
    context = time.perf_counter()
arrays = (
    np.ones((1, 32, 128), np.float16),
    np.ones((4, 128, 8, 128), np.float16),
    np.array([[[1, 0], [2, 3]]], np.int32),
    np.array([200], np.int32),
)
out = ctm_rt.to_host(ctm_rt.decode_attention(*map(ctm_rt.to_device, arrays), scale=1.0))
done = time.perf_counter()
assert (out == 1).all()
seconds = {"import": imported - start, "context": context - imported, "call": done - context}
print(json.dumps(seconds))
"""


def first_result_s() -> dict[str, float]:
    """Return the seconds of a fresh process: import, the driver's context, the first call."""
    command = [sys.executable, "-c", FIRST_RESULT]
    figures: dict[str, float] = json.loads(subprocess.check_output(command))
    return figures


def main() -> None:
    """Measure, print the table and, where asked, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too")
    path = parser.parse_args().json

    print(f"{driver.device_name(DEVICE)}, driver CUDA {driver.driver_version()}, {MODULE}")
    print(f"{'batch x tokens':>16} {'us':>8} {'TB/s':>6} {'us/target':>10} {'error':>8}")
    rows = []
    with driver.current(DEVICE), new_stream() as stream:
        bank = Bank()
        for cell in CELLS:
            rows.append(row := measure(cell, bank, stream))
            shape = f"{cell.batch} x {cell.seq_len:,}"
            print(
                f"{shape:>16} {row['us']:8.2f} {row['tb_per_s']:6.2f}"
                f" {row['us_over_target']:10.3f} {row['relative_error']:8.1e}"
            )
        host = host_us(bank, stream)
    first = first_result_s()
    so = find(MODULE, driver.compute_capability(DEVICE), store_roots()).with_suffix(".so")
    figures = {
        "device": driver.device_name(DEVICE),
        "driver": driver.driver_version(),
        "module": MODULE,
        "cells": rows,
        "host_us": host,
        "first_result_s": first,
        "module_nbytes": so.stat().st_size,
    }
    print("host us:", ", ".join(f"{name} {us:.2f}" for name, us in host.items()))
    print("first result, s:", ", ".join(f"{name} {s:.3f}" for name, s in first.items()))
    print("module bytes:", figures["module_nbytes"])
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
