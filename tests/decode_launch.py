"""A decode call for tests, and what its launch computes on the fake driver.

The fake driver's memory is host memory, so a launch is computed here from its parameters alone, by
the definition: a wrong pointer, extent or stride is a wrong answer.
"""

import ctypes
import math
import re
import struct
from typing import NamedTuple

import numpy as np
from ml_dtypes import float8_e4m3fn

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode.plan import (
    HEADS_PER_TILE,
    DecodeProblem,
    decode_kernels,
    module_name,
    plan_decode,
)
from ctm_rt.paged_kv import ceil_div
from ctm_rt.reference import decode_attention as definition
from ctm_rt.reference import dropped_pages

PAGE = 128
TENSORS = {  # dynamic extents, dynamic strides
    "q": (2, 2),
    "kv_pool": (2, 3),
    "page_table": (2, 2),
    "seq_lens": (1, 0),
    "sinks": (1, 0),
    "out": (2, 2),
    "workspace": (1, 0),
    "semaphores": (1, 0),
}
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
FLOAT16 = 6  # CUtensorMapDataType
TENSOR_MAP_NBYTES = 128  # kernels that copy by tensor maps get one first, as the fake encodes it
SCALARS = ("scale_log2", "v_scale", "sliding_window", "num_groups", "spare_groups")
NUM_OWN_SCALARS = 2  # of the kernel, behind those
SKIPPING = {
    "skip_table": (1, 0),
    "skip_dropped": (0, 0),
}  # tensors, behind those of kernels that do


class Tensor(NamedTuple):
    """A tensor as the kernel gets it: its address, dynamic extents and outer strides."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def arguments(launch):
    """The kernel's parameters by name: a tensor is a pointer, i32 extents, i64 strides.

    What follows the scalars of the plan is the kernel's own; then what skip-softmax needs.
    """
    tensors = {name: counts[0] for name, counts in TENSORS.items()}
    strides = {name: counts[1] for name, counts in TENSORS.items()}
    named = unpack(launch, tensors, strides, SCALARS)
    rest = parameters(launch)[len(TENSORS) + len(SCALARS) + NUM_OWN_SCALARS :]
    for (name, counts), raw in zip(SKIPPING.items(), rest, strict=False):
        named[name] = tensor(raw, *counts)
    return named


def parameters(launch):
    """The kernel's parameters but for a tensor map."""
    return [raw for raw in launch.params if len(raw) != TENSOR_MAP_NBYTES]


def unpack(launch, extents, strides, scalars):
    """Name the parameters, given the numbers of extents and of outer strides of the tensors."""
    params = parameters(launch)
    named = {
        name: tensor(raw, extents[name], strides[name])
        for name, raw in zip(extents, params, strict=False)
    }
    for name, raw in zip(scalars, params[len(extents) :], strict=False):
        named[name] = struct.unpack("<f" if "scale" in name else "<i", raw)[0]
    return named


def tensor(raw, extents, strides):
    """Take a parameter apart that has so many dynamic extents and outer strides."""
    form = f"<q{extents}i{extents % 2 * 4}x"
    ptr, *shape = struct.unpack_from(form, raw)
    outer = struct.unpack_from(f"<{strides}q", raw, struct.calcsize(form))
    return Tensor(ptr, tuple(shape), outer)


def on_host(tensor, shape, dtype):
    """The memory of a tensor, in the full shape that the kernel gives it."""
    strides = [*tensor.strides, 1][-len(shape) :]
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(tensor.ptr)
    flat = np.frombuffer(memory, dtype)
    nbytes = [step * dtype.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, nbytes)


def static(launch, named):
    """What no parameter tells: head_dim, and the type of the pool's elements."""
    if len(launch.params[0]) == TENSOR_MAP_NBYTES:
        address, dtype, rank, *dims = struct.unpack_from("<QII5I", launch.params[0])
        assert address == named["kv_pool"].ptr
        assert rank == 5  # a page's rows are cut into blocks: element, token, block, head, page
        return dims[0] * dims[2], np.float16 if dtype == FLOAT16 else np.uint8
    q_and_pool = r"_tensorptrf16gmemalign16o(\d+)i64.*?_tensorptr(f16|i8)"
    head_dim, pool = re.search(q_and_pool, launch.kernel).groups()
    return int(head_dim), np.float16 if pool == "f16" else np.uint8


def compute(launch):
    """Do what the kernel would, by the definition; drop pages as if one CTA saw them all."""
    a = arguments(launch)
    batch, num_q_heads = a["q"].shape
    pool_pages, num_kv_heads = a["kv_pool"].shape
    head_dim, pool_dtype = static(launch, a)
    table = (batch, 2, a["page_table"].shape[1])
    pool = on_host(a["kv_pool"], (pool_pages, PAGE, num_kv_heads, head_dim), pool_dtype)
    out = on_host(a["out"], (batch, num_q_heads, head_dim), np.float16)
    arrays = (
        on_host(a["q"], (batch, num_q_heads, head_dim), np.float16),
        pool,
        on_host(a["page_table"], table, np.int32),
        on_host(a["seq_lens"], (batch,), np.int32),
    )
    options = {"scale": a["scale_log2"] * math.log(2), "sliding_window": a["sliding_window"]}
    if "skip_table" in a:
        options["skip_softmax"] = on_host(a["skip_table"], a["skip_table"].shape, np.int32)
        if a["skip_dropped"].ptr:
            count = on_host(a["skip_dropped"], (1,), np.int32)
            count += dropped_pages(*arrays, **options).sum()
    out[...] = definition(
        *arrays,
        **options,
        v_scale=a["v_scale"],
        sinks=on_host(a["sinks"], (num_q_heads,), np.float32) if a["sinks"].ptr else None,
    )


def plan_of(p):
    """The plan of a problem on device 0, by the module that the store has for it."""
    config = ctm_rt.load(module_name(p.head_dim, p.fp8_kv_cache, p.tree)).manifest.config
    return plan_decode(p, num_sms=driver.num_sms(0), kernels=decode_kernels(config))


def assert_planned(launch, p):
    """The launch is that of the problem's plan."""
    plan = plan_of(p)
    row = ctm_rt.load(plan.module).manifest.config["kernels"][plan.kernel]
    assert launch.call == "cuLaunchKernelEx"
    assert launch.kernel == row["name"]
    shards = ceil_div(p.num_q_heads // p.num_kv_heads, HEADS_PER_TILE * row["head_tiles"])
    ctas = (p.batch + plan.spare_groups) * p.num_kv_heads * shards * plan.cluster
    assert launch.grid == plan.grid == (ctas, plan.num_groups, 1)
    assert launch.block == (plan.block, 1, 1)
    assert launch.cluster == (plan.cluster, 1, 1)
    assert launch.dynamic_smem == plan.smem_nbytes
    dependent = driver.compute_capability(0) >= (9, 0)  # may begin before the last one's end
    assert launch.attributes[PROGRAMMATIC_STREAM_SERIALIZATION] == dependent
    got = arguments(launch)
    assert (got["num_groups"], got["spare_groups"]) == (plan.num_groups, plan.spare_groups)
    assert got["workspace"].shape[0] >= plan.workspace_elems
    assert got["semaphores"].shape[0] >= plan.semaphore_elems


class Problem:
    """Random arrays of one call, on the host and on the device."""

    def __init__(self, lengths=(5, 300), heads=(8, 2), head_dim=64, max_pages=3, fp8=False, seed=0):
        rng = np.random.default_rng(seed)
        batch, num_pages = len(lengths), len(lengths) * max_pages
        pool_shape = 2 * num_pages, PAGE, heads[1], head_dim
        ids = rng.permutation(num_pages).reshape(batch, max_pages)
        pool = rng.standard_normal(pool_shape).astype(float8_e4m3fn if fp8 else np.float16)
        self.host = {
            "q": rng.standard_normal((batch, heads[0], head_dim)).astype(np.float16),
            "kv_pool": pool,
            "page_table": np.stack([ids, ids + num_pages], axis=1).astype(np.int32),
            "seq_lens": np.array(lengths, np.int32),
        }
        self.shape = DecodeProblem(batch, *heads, head_dim, max_pages, fp8)
        self.device = {name: ctm_rt.to_device(array) for name, array in self.host.items()}
        self.out = ctm_rt.to_device(np.full_like(self.host["q"], np.nan))

    def call(self, **options):
        return ctm_rt.decode_attention(**self.device | {"scale": 0.125, "out": self.out} | options)

    def bind(self, **options):
        return ctm_rt.bind_decode(**self.device | {"scale": 0.125, "out": self.out} | options)

    def expected(self, **options):
        return definition(**self.host | {"scale": 0.125} | options)


def merging(lengths=(5, 300)):
    """A problem whose plan has several groups for a sequence, so needs scratch."""
    return Problem(lengths, (8, 1), max_pages=24)


def assert_close(got, expected):
    np.testing.assert_allclose(ctm_rt.to_host(got), expected, rtol=2e-3, atol=2e-4)
