"""The main job on this machine, checked: what ``ctm-rt demo`` runs."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctm_rt import driver, reference
from ctm_rt.decode.attention import bind_decode
from ctm_rt.decode.plan import (
    DecodePlan,
    DecodeProblem,
    decode_kernels,
    module_name,
    plan_decode,
)
from ctm_rt.errors import ModuleError
from ctm_rt.memory import Workspace, to_device, to_host
from ctm_rt.modules.manifest import read_manifest
from ctm_rt.modules.store import find, store_roots
from ctm_rt.paged_kv import TOKENS_PER_PAGE, UNUSED_PAGE_ENTRY, compute_max_pages_per_seq

TOLERANCE = 6e-4  # |out - exact| / |exact|: f16 weights and output give about 3e-4
H200 = (9, 0), 132  # whose plans the host backend follows: compute capability and SMs
NUM_TIMED = 200

Array = npt.NDArray[Any]


class Case(NamedTuple):
    """One decode step."""

    name: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]
    sliding_window: int = 0
    sinks: bool = False

    @property
    def problem(self) -> DecodeProblem:
        """The shapes that are planned for."""
        max_pages = compute_max_pages_per_seq(max(self.seq_lens))
        return DecodeProblem(
            len(self.seq_lens),
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            max_pages,
            sliding_window=self.sliding_window,
        )


CASES = (
    Case("one sequence", 32, 8, 128, (4096,)),
    Case("batch of 8", 32, 8, 128, (1024,) * 8),
    Case("ragged, one empty", 32, 8, 128, (0, 1, 127, 128, 129, 2000)),
    Case("16 heads a KV head", 64, 4, 128, (777, 1500)),
    Case("a KV head per head", 8, 8, 64, (640,) * 4),
    Case("window of 256", 32, 8, 128, (100, 256, 2000), sliding_window=256),
    Case("sinks", 64, 8, 64, (50, 1000), sinks=True),
    Case("window and sinks", 64, 8, 64, (0, 129, 1000), sliding_window=128, sinks=True),
)


class Result(NamedTuple):
    """How a case went."""

    case: Case
    plan: DecodePlan | None  # None on a host without the module
    error: float
    us: float  # per launch on a GPU, per call on the host

    @property
    def passed(self) -> bool:
        """Whether the error is within ``TOLERANCE``."""
        return self.error <= TOLERANCE


def run_case(case: Case, device: int | None, *, seed: int = 0) -> Result:
    """Run ``case`` on a CUDA device, or on the host where that is None, and check the result."""
    arrays, options = _inputs(case, np.random.default_rng(seed))
    plan = _plan(case.problem, device)
    if device is None:
        out, us = _on_host(arrays, options, plan.max_partials if plan else 1)
    else:
        out, us = _on_gpu(arrays, options, device)
    exact = reference.decode_attention(**arrays, **options)
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    return Result(case, plan, float(np.nan_to_num(error, nan=np.inf)), us)


def _plan(p: DecodeProblem, device: int | None) -> DecodePlan | None:
    """Return how ``p`` is launched on a device, or would be on an H200; None without a module."""
    capability, num_sms = H200
    if device is not None:
        capability, num_sms = driver.compute_capability(device), driver.num_sms(device)
    try:
        path = find(module_name(p.head_dim, p.fp8_kv_cache, p.tree), capability, store_roots())
        kernels = decode_kernels(read_manifest(path).config)
    except ModuleError:
        return None
    return plan_decode(p, num_sms=num_sms, kernels=kernels)


def _inputs(case: Case, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make random arrays in which whatever is not visible is NaN, or no page at all."""
    p = case.problem
    num_pages = p.batch * p.max_pages + 1
    pages = rng.permutation(num_pages)[: p.batch * p.max_pages].reshape(p.batch, p.max_pages)
    page_table = np.stack([pages, pages + num_pages], axis=1).astype(np.int32)
    pool = np.full((2 * num_pages, TOKENS_PER_PAGE, p.num_kv_heads, p.head_dim), np.nan, np.float16)
    for b, length in enumerate(case.seq_lens):
        left = max(0, length - case.sliding_window) if case.sliding_window else 0
        for index in range(p.max_pages):
            start = index * TOKENS_PER_PAGE
            visible = slice(max(left - start, 0), max(min(length - start, TOKENS_PER_PAGE), 0))
            ids = page_table[b, :, index]
            tokens = pool[ids, visible]
            pool[ids, visible] = rng.standard_normal(tokens.shape)
            if tokens.size == 0:
                page_table[b, :, index] = UNUSED_PAGE_ENTRY
    q = rng.standard_normal((p.batch, p.num_q_heads, p.head_dim)).astype(np.float16)
    sinks = rng.standard_normal(p.num_q_heads).astype(np.float32) if case.sinks else None
    seq_lens = np.array(case.seq_lens, np.int32)
    arrays = {"q": q, "kv_pool": pool, "page_table": page_table, "seq_lens": seq_lens}
    options = {
        "scale": p.head_dim**-0.5,
        "sinks": sinks,
        "sliding_window": case.sliding_window,
    }
    return arrays, options


def _on_gpu(arrays: dict[str, Any], options: dict[str, Any], device: int) -> tuple[Array, float]:
    out = to_device(np.full_like(arrays["q"], np.nan), device=device)
    on_device: dict[str, Any] = {
        name: to_device(value, device=device) if isinstance(value, np.ndarray) else value
        for name, value in {**arrays, **options}.items()
    }
    launch = bind_decode(**on_device, out=out, workspace=Workspace(device))
    launch()
    driver.synchronize(0, device)
    start = time.perf_counter()
    for _ in range(NUM_TIMED):
        launch()
    driver.synchronize(0, device)
    us = (time.perf_counter() - start) / NUM_TIMED * 1e6
    return to_host(out), us


def _on_host(
    arrays: dict[str, Any], options: dict[str, Any], num_partials: int
) -> tuple[Array, float]:
    run: Callable[..., Array] = reference.decode_attention_plain
    start = time.perf_counter()
    out = run(**arrays, **options, num_partials=num_partials)
    return out, (time.perf_counter() - start) * 1e6
