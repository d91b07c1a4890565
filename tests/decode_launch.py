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

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode.plan import DecodeProblem, plan_decode
from ctm_rt.reference import decode_attention as definition

PAGE = 128
TENSORS = ("q", "kv_pool", "page_table", "seq_lens", "sinks", "out", "workspace", "semaphores")


class Tensor(NamedTuple):
    """A tensor as the kernel gets it: its address, dynamic extents and outer strides."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def arguments(launch):
    """The kernel's parameters by name: a tensor is a pointer, i32 extents, i64 strides."""
    extents = dict(zip(TENSORS, (2, 2, 2, 1, 1, 2, 1, 1), strict=True))
    strides = dict(zip(TENSORS, (2, 3, 2, 0, 0, 2, 0, 0), strict=True))
    named = {}
    for name, raw in zip(TENSORS, launch.params, strict=False):
        form = f"<q{extents[name]}i{extents[name] % 2 * 4}x"
        ptr, *shape = struct.unpack_from(form, raw)
        outer = struct.unpack_from(f"<{strides[name]}q", raw, struct.calcsize(form))
        named[name] = Tensor(ptr, tuple(shape), outer)
    scalars = ("scale_log2", "v_scale", "sliding_window", "num_splits")
    for name, raw in zip(scalars, launch.params[len(TENSORS) :], strict=False):
        named[name] = struct.unpack("<f" if "scale" in name else "<i", raw)[0]
    return named


def on_host(tensor, shape, dtype):
    """The memory of a tensor, in the full shape that the kernel gives it."""
    strides = [*tensor.strides, 1][-len(shape) :]
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(tensor.ptr)
    flat = np.frombuffer(memory, dtype)
    nbytes = [step * dtype.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(flat, shape, nbytes)


def compute(launch):
    """Do what the kernel would, by the definition."""
    a = arguments(launch)
    batch, num_q_heads = a["q"].shape
    pool_pages, num_kv_heads = a["kv_pool"].shape
    head_dim = int(re.search(r"align16o(\d+)i64", launch.kernel)[1])  # q's static extent
    table = (batch, 2, a["page_table"].shape[1])
    pool = on_host(a["kv_pool"], (pool_pages, PAGE, num_kv_heads, head_dim), np.float16)
    out = on_host(a["out"], (batch, num_q_heads, head_dim), np.float16)
    out[...] = definition(
        on_host(a["q"], (batch, num_q_heads, head_dim), np.float16),
        pool,
        on_host(a["page_table"], table, np.int32),
        on_host(a["seq_lens"], (batch,), np.int32),
        scale=a["scale_log2"] * math.log(2),
        v_scale=a["v_scale"],
        sinks=on_host(a["sinks"], (num_q_heads,), np.float32) if a["sinks"].ptr else None,
        sliding_window=a["sliding_window"],
    )


class Problem:
    """Random arrays of one call, on the host and on the device."""

    def __init__(self, lengths=(5, 300), heads=(8, 2), head_dim=64, max_pages=3, seed=0):
        rng = np.random.default_rng(seed)
        batch, num_pages = len(lengths), len(lengths) * max_pages
        pool_shape = 2 * num_pages, PAGE, heads[1], head_dim
        ids = rng.permutation(num_pages).reshape(batch, max_pages)
        self.host = {
            "q": rng.standard_normal((batch, heads[0], head_dim)).astype(np.float16),
            "kv_pool": rng.standard_normal(pool_shape).astype(np.float16),
            "page_table": np.stack([ids, ids + num_pages], axis=1).astype(np.int32),
            "seq_lens": np.array(lengths, np.int32),
        }
        self.device = {name: ctm_rt.to_device(array) for name, array in self.host.items()}
        self.out = ctm_rt.to_device(np.full_like(self.host["q"], np.nan))

    def call(self, **options):
        return ctm_rt.decode_attention(**self.device | {"scale": 0.125, "out": self.out} | options)

    def bind(self, **options):
        return ctm_rt.bind_decode(**self.device | {"scale": 0.125, "out": self.out} | options)

    def expected(self, **options):
        return definition(**self.host | {"scale": 0.125} | options)

    def plan(self):
        batch, num_q_heads, head_dim = self.host["q"].shape
        max_pages = self.host["page_table"].shape[2]
        num_kv_heads = self.host["kv_pool"].shape[2]
        problem = DecodeProblem(batch, num_q_heads, num_kv_heads, head_dim, max_pages)
        return plan_decode(problem, num_sms=driver.num_sms(0))


def assert_close(got, expected):
    np.testing.assert_allclose(ctm_rt.to_host(got), expected, rtol=2e-3, atol=2e-4)
