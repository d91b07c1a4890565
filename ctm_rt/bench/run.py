"""Run the benchmark on one GPU and report."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ctm_rt import driver
from ctm_rt.bench.grid import Cell
from ctm_rt.bench.host import first_result_s, host_us
from ctm_rt.bench.inputs import Pools
from ctm_rt.bench.measure import measure
from ctm_rt.errors import CtmError, DriverError, ModuleError
from ctm_rt.modules.store import find, store_roots

COLUMNS = (
    *("decode", "us", "load-only", "above", "x token", "TB/s", "TFLOP/s"),
    *("us/floor", "us/target", "us/scaled", "error", "kernel", "cluster", "groups", ""),
)


def run_cells(
    cells: Sequence[Cell], device: int, on_cell: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return what was measured: the report's ``cells``, and what they were measured on.

    One that cannot be measured says so in its ``problem``. ``on_cell()`` is called after each.
    """
    rows, pools = [], Pools(cells, device)
    with driver.current(device):
        stream = driver.stream_create()
        for cell in cells:
            try:
                rows.append(measure(cell, pools.of(cell), device, stream))
            except CtmError as error:
                rows.append({"name": cell.name, "problem": str(error)})
            on_cell()
        with suppress(DriverError):  # a dead context: its cell has said so
            driver.stream_destroy(stream)
    return {
        "device": driver.device_name(device),
        "num_sms": driver.num_sms(device),
        "driver": driver.driver_version(),
        "cells": rows,
    }


def run_host(modules: Sequence[str], device: int) -> dict[str, Any]:
    """Return the report's figures of the host, and the sizes of the ``modules`` that exist."""
    with driver.current(device):
        stream = driver.stream_create()
        calls_us = host_us(device, stream)
        driver.stream_destroy(stream)
    capability, roots = driver.compute_capability(device), store_roots()
    sizes = {}
    for name in modules:
        with suppress(ModuleError):
            sizes[name] = find(name, capability, roots).with_suffix(".so").stat().st_size
    return {
        "host_us": calls_us,
        "first_result_s": first_result_s(device),
        "module_nbytes": sizes,
    }


def table_row(row: dict[str, Any]) -> list[str]:
    """Return the texts of one of the report's cells, in the order of ``COLUMNS``."""
    formats = {
        "us": "{:.2f}",
        "load_us": "{:.2f}",
        "us_above_load": "{:+.2f}",
        "us_over_token": "{:.2f}",
        "tb_per_s": "{:.2f}",
        "tflop_per_s": "{:.0f}",
        "us_over_floor": "{:.3f}",
        "us_over_target": "{:.3f}",
        "us_over_scaled_target": "{:.3f}",
        "relative_error": "{:.1e}",
        "kernel": "{}",
        "cluster": "{}",
    }
    found = [(text, row.get(name)) for name, text in formats.items()]
    texts = ["" if value is None else text.format(value) for text, value in found]
    return [row["name"], *texts, _groups(row), row["problem"]]


def _groups(row: dict[str, Any]) -> str:
    if "num_groups" not in row:
        return ""
    return f"+{row['spare_groups']}" if row["spare_groups"] else str(row["num_groups"])
