"""Measure one cell: its output against float64 first, then its time and that of loading alone."""

import math
from typing import Any

import numpy as np

from ctm_rt import driver, reference, tree
from ctm_rt.bench.grid import Cell
from ctm_rt.bench.inputs import Array, Inputs, Pool, make_inputs, split_sets
from ctm_rt.bench.timing import launch_us
from ctm_rt.decode.attention import bind_decode
from ctm_rt.decode.plan import DecodePlan, decode_kernels, plan_decode
from ctm_rt.decode.tree_plan import plan_tree, tree_kernels
from ctm_rt.memory import DeviceArray, Workspace, to_device, to_host
from ctm_rt.modules.kernel import Launch, load
from ctm_rt.paged_kv import TOKENS_PER_PAGE, ceil_div
from ctm_rt.tensor import without_axis

TOLERANCE = 6e-4  # |out - exact| / |exact| of a sequence
GRAPH_US = 2000  # of launches in one graph, so that its own start does not count


def measure(cell: Cell, pool: Pool, device: int, stream: int) -> dict[str, Any]:
    """Return the figures of a cell; without times where its output is wrong."""
    inputs = make_inputs(cell)
    plan = _plan(cell, device)
    sets = on_device(cell, inputs, pool, device)
    decode = decode_launches(sets, cell, device)
    for launch in decode:
        launch(stream)
    error_of = _tree_error if cell.is_tree else _relative_error
    error = error_of(cell, inputs, pool, to_host(sets[0]["out"], stream))
    singles = [_single_token(arrays) for arrays in sets] if cell.is_tree else sets
    beside = [_load_launches(singles, cell, device)]
    if cell.is_tree:
        beside.append(decode_launches(singles, cell, device))
    for launches in beside:
        for launch in launches:
            launch(stream)
    times = [math.nan] * 3
    if error <= TOLERANCE:
        rounds = ceil_div(GRAPH_US, math.ceil(len(sets) * cell.target_us))
        times = launch_us([decode, *beside], rounds, device, stream)
    return figures(cell, plan, error, *times)


def figures(
    cell: Cell,
    plan: DecodePlan,
    error: float,
    us: float,
    load_us: float,
    token_us: float = math.nan,
) -> dict[str, Any]:
    """Return a cell's row of the report; None for what is not known.

    ``us_over_scaled_target`` takes the target of a card whose memory is as fast as this one's;
    ``token_us`` is the time of one token's decode in place of a tree's.
    """
    scaled_us = cell.target_us * load_us / (cell.known_load_us or math.nan)
    row = {
        "us": us,
        "load_us": load_us,
        "us_above_load": us - load_us,
        "token_us": token_us,
        "us_over_token": us / token_us,
        "tb_per_s": cell.kv_nbytes / us / 1e6,
        "tflop_per_s": cell.flop / us / 1e6,
        "us_over_floor": us / cell.floor_us,
        "us_over_target": us / cell.target_us,
        "us_over_scaled_target": us / scaled_us,
        "relative_error": error,
    }
    return {
        "name": cell.name,
        "kv_nbytes": cell.kv_nbytes,
        "floor_us": cell.floor_us,
        "target_us": cell.target_us,
        **{name: value if math.isfinite(value) else None for name, value in row.items()},
        "kernel": plan.kernel,
        "cluster": plan.cluster,
        "num_groups": plan.num_groups,
        "spare_groups": plan.spare_groups,
        "problem": "" if error <= TOLERANCE else "wrong result, not timed",
    }


def load_groups(cell: Cell, num_sms: int) -> tuple[int, int]:
    """Return ``num_groups`` and ``spare_groups`` of the load-only kernel: the GPU is full.

    It merges nothing, so groups cost it nothing; among unequal sequences the device deals them out.
    """
    if len(set(cell.seq_lens)) > 1:
        return 1, ceil_div(2 * num_sms, cell.num_kv_heads)
    return max(1, min(16, num_sms // (len(cell.seq_lens) * cell.num_kv_heads))), 0


def _plan(cell: Cell, device: int) -> DecodePlan:
    manifest: Any = load(cell.module, device=device).manifest  # there is one: asked for by name
    num_sms = driver.num_sms(device)
    if cell.is_tree:
        return plan_tree(cell.problem, num_sms=num_sms, kernels=tree_kernels(manifest.config))
    return plan_decode(cell.problem, num_sms=num_sms, kernels=decode_kernels(manifest.config))


def on_device(cell: Cell, inputs: Inputs, pool: Pool, device: int) -> list[dict[str, Any]]:
    """Return each set's arrays; ``out`` is NaN."""
    given = {name: array for name, array in inputs._asdict().items() if array is not None}
    stacked = {**given, "out": np.full_like(inputs.q, np.nan)}
    columns = [split_sets(to_device(array, device=device)) for array in stacked.values()]
    kv_pool = pool.on_device(cell)
    return [
        {**dict(zip(stacked, row, strict=True)), "kv_pool": kv_pool}
        for row in zip(*columns, strict=True)
    ]


def _single_token(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the call of one token in place of a tree: its first."""
    rest = {name: array for name, array in arrays.items() if name != "tree_mask"}
    return {**rest, **{name: without_axis(arrays[name], 1) for name in ("q", "out")}}


def decode_launches(sets: list[dict[str, Any]], cell: Cell, device: int) -> list[Launch]:
    """Return a launch of the cell's kernel for each set; all for one stream."""
    workspace = Workspace(device)  # launches on one stream follow each other
    options: dict[str, Any] = {"scale": _scale(cell), "sliding_window": cell.sliding_window}
    return [bind_decode(**arrays, **options, workspace=workspace) for arrays in sets]


def _load_launches(sets: list[dict[str, Any]], cell: Cell, device: int) -> list[Launch]:
    kernel = load(cell.load_module, device=device)
    num_groups, spare_groups = load_groups(cell, driver.num_sms(device))
    return [
        kernel.bind(
            **arrays,
            workspace=DeviceArray.empty((0,), "f32", device),
            semaphores=DeviceArray.empty((0,), "i32", device),
            scale_log2=1.0,
            v_scale=1.0,
            sliding_window=cell.sliding_window,
            kernel=0,
            num_groups=num_groups,
            spare_groups=spare_groups,
        )
        for arrays in sets
    ]


def _relative_error(cell: Cell, inputs: Inputs, pool: Pool, got: Array) -> float:
    """Return the worst error of a few sequences, in the first and the last KV head of each."""
    longest = int(np.argmax(cell.seq_lens))
    sequences = sorted({0, longest, len(cell.seq_lens) - 1})
    kv_heads, heads = _few_heads(cell)
    pages, table = pool.on_host(cell), inputs.page_table[0][sequences]
    exact = reference.decode_attention(
        inputs.q[0][sequences][:, heads],
        pages[:, :, kv_heads],
        np.where(table < 0, -1, table % len(pages)),
        inputs.seq_lens[0][sequences],
        scale=_scale(cell),
        sliding_window=cell.sliding_window,
    )
    errors = got[sequences][:, heads] - exact
    ratios = np.linalg.norm(errors, axis=(1, 2)) / np.linalg.norm(exact, axis=(1, 2))
    return float(ratios.max())  # NaN if one is


def _tree_error(cell: Cell, inputs: Inputs, pool: Pool, got: Array) -> float:
    """Return the worst error of a few tokens, in the first and the last KV head.

    Each is decoded alone, from a cache that has the keys that it sees and no other.
    """
    kv_heads, heads = _few_heads(cell)
    pages, table = pool.on_host(cell)[:, :, kv_heads], inputs.page_table[0]
    masks: Any = inputs.tree_mask  # there are some: it is a tree
    visible = tree.unpack(masks[0])
    errors = []
    for b in sorted({0, len(cell.seq_lens) - 1}):
        past = cell.seq_lens[b] - cell.query_len
        for i in sorted({0, cell.query_len // 2, cell.query_len - 1}):
            keys = np.flatnonzero(np.append(np.ones(past, bool), visible[b, i]))
            seen = pages[table[b][:, keys // TOKENS_PER_PAGE] % len(pages), keys % TOKENS_PER_PAGE]
            num_pages = ceil_div(len(keys), TOKENS_PER_PAGE)
            cache = np.zeros((2, num_pages * TOKENS_PER_PAGE, *seen.shape[2:]), seen.dtype)
            cache[:, : len(keys)] = seen
            exact = reference.decode_attention(
                inputs.q[0][b, i][None, heads],
                cache.reshape(2 * num_pages, TOKENS_PER_PAGE, *seen.shape[2:]),
                np.arange(2 * num_pages, dtype=np.int32).reshape(1, 2, num_pages),
                np.array([len(keys)], np.int32),
                scale=_scale(cell),
            )
            error = got[b, i][heads] - exact[0]
            errors.append(np.linalg.norm(error) / np.linalg.norm(exact))
    return float(np.max(errors))  # NaN if one is


def _few_heads(cell: Cell) -> tuple[list[int], Array]:
    """Return the first and the last KV head, and the query heads that share them."""
    kv_heads = [0, cell.num_kv_heads - 1]
    ratio = cell.num_q_heads // cell.num_kv_heads
    return kv_heads, np.concatenate([np.arange(h * ratio, (h + 1) * ratio) for h in kv_heads])


def _scale(cell: Cell) -> float:
    return float(cell.head_dim**-0.5)
