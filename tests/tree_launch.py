"""A call of tree decode for tests, and what its launch computes on the fake driver."""

import math

import numpy as np
from ml_dtypes import float8_e4m3fn

import ctm_rt
from ctm_rt import driver, tree
from ctm_rt.decode.plan import DecodeProblem, module_name
from ctm_rt.decode.tree_plan import plan_tree, tree_kernels
from ctm_rt.paged_kv import ceil_div
from ctm_rt.reference import decode_attention as definition
from tests.decode_launch import (
    PAGE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    TENSOR_MAP_NBYTES,
    on_host,
    static,
    unpack,
)

# Of each tensor its dynamic extents and its outer strides.
EXTENTS = {"q": 3, "kv_pool": 2, "page_table": 2, "seq_lens": 1, "tree_mask": 3, "sinks": 1}
EXTENTS |= {"out": 3, "workspace": 1, "semaphores": 1}
STRIDES = {"q": 3, "kv_pool": 3, "page_table": 2, "seq_lens": 0, "tree_mask": 2, "sinks": 0}
STRIDES |= {"out": 3, "workspace": 0, "semaphores": 0}
SCALARS = ("scale_log2", "v_scale", "sliding_window", "contiguous_query_swa")
SCALARS += ("num_groups", "spare_groups")
Q_NBYTES = 48  # an address, three extents, three strides


def is_tree(launch):
    """A tree's q has a query axis."""
    return len(next(p for p in launch.params if len(p) != TENSOR_MAP_NBYTES)) == Q_NBYTES


def arguments(launch):
    """The kernel's parameters by name."""
    return unpack(launch, EXTENTS, STRIDES, SCALARS)


def compute(launch):
    """Do what the kernel would, by the definition."""
    a = arguments(launch)
    batch, query_len, num_q_heads = a["q"].shape
    pool_pages, num_kv_heads = a["kv_pool"].shape
    head_dim, pool_dtype = static(launch, a)
    rows = batch, query_len, num_q_heads, head_dim
    table = batch, 2, a["page_table"].shape[1]
    out = on_host(a["out"], rows, np.float16)
    out[...] = definition(
        on_host(a["q"], rows, np.float16),
        on_host(a["kv_pool"], (pool_pages, PAGE, num_kv_heads, head_dim), pool_dtype),
        on_host(a["page_table"], table, np.int32),
        on_host(a["seq_lens"], (batch,), np.int32),
        scale=a["scale_log2"] * math.log(2),
        v_scale=a["v_scale"],
        sinks=on_host(a["sinks"], (num_q_heads,), np.float32) if a["sinks"].ptr else None,
        sliding_window=a["sliding_window"],
        tree_mask=on_host(a["tree_mask"], a["tree_mask"].shape, np.int32),
        contiguous_query_swa=bool(a["contiguous_query_swa"]),
    )


def plan_of(p):
    """The plan of a problem on device 0, by the module that the store has for it."""
    config = ctm_rt.load(module_name(p.head_dim, p.fp8_kv_cache, tree=True)).manifest.config
    return plan_tree(p, num_sms=driver.num_sms(0), kernels=tree_kernels(config))


def assert_planned(launch, p):
    """The launch is that of the problem's plan."""
    plan = plan_of(p)
    row = ctm_rt.load(plan.module).manifest.config["kernels"][plan.kernel]
    assert launch.kernel == row["name"]
    blocks = ceil_div(p.query_len * p.num_q_heads // p.num_kv_heads, row["rows"])
    ctas = (p.batch + plan.spare_groups) * p.num_kv_heads * blocks * plan.cluster
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


class TreeProblem:
    """Random arrays of one call, on the host and on the device; masks of random trees."""

    def __init__(
        self, query_len=5, lengths=(5, 300), heads=(8, 2), head_dim=64, max_pages=3, fp8=False
    ):
        rng = np.random.default_rng(query_len)
        batch, num_pages = len(lengths), len(lengths) * max_pages
        ids = rng.permutation(num_pages).reshape(batch, max_pages)
        pool = rng.standard_normal((2 * num_pages, PAGE, heads[1], head_dim))
        q = rng.standard_normal((batch, query_len, heads[0], head_dim))
        parents = rng.integers(-1, np.arange(query_len), (batch, query_len))
        self.host = {
            "q": q.astype(np.float16),
            "kv_pool": pool.astype(float8_e4m3fn if fp8 else np.float16),
            "page_table": np.stack([ids, ids + num_pages], axis=1).astype(np.int32),
            "seq_lens": np.array(lengths, np.int32),
            "tree_mask": tree.mask(parents),
        }
        self.shape = DecodeProblem(
            batch, *heads, head_dim, max_pages, fp8, query_len=query_len, tree=True
        )
        self.device = {name: ctm_rt.to_device(array) for name, array in self.host.items()}
        self.out = ctm_rt.to_device(np.full_like(self.host["q"], np.nan))

    def call(self, **options):
        return ctm_rt.decode_attention(**self.device | {"scale": 0.125, "out": self.out} | options)

    def bind(self, **options):
        return ctm_rt.bind_decode(**self.device | {"scale": 0.125, "out": self.out} | options)

    def expected(self, **options):
        return definition(**self.host | {"scale": 0.125} | options)
