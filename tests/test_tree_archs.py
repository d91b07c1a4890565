"""Trees on every architecture: a module exports, and the driver is asked for what the plan says."""

import itertools

import pytest

import ctm_rt
from ctm_rt.decode.plan import DecodeProblem
from ctm_rt.tensor import DType
from kernels.variants import VARIANTS
from tests.conftest import TREE_MODULES
from tests.decode_launch import PAGE
from tests.test_archs import assert_as_told, only, stores
from tests.tree_launch import assert_planned, plan_of

TREES = {v.name: v for v in VARIANTS if v.family == "fmha_decode_tree"}
# Between them every head_dim from 64 on, and both types of pool where an SM has 99 KB.
NAMES = {
    "sm_80": ["fmha_decode_tree_f16_d128"],
    "sm_89": ["fmha_decode_tree_e4m3_d512"],
    "sm_90a": TREE_MODULES,
    "sm_100a": ["fmha_decode_tree_e4m3_d256"],
    "sm_120a": ["fmha_decode_tree_f16_d256"],
}
SHAPES = tuple(itertools.product((1, 2, 3, 4, 32), (1, 8), (4, 16), (1, 16, 33, 128), (8, 512)))


@pytest.fixture(scope="module")
def archs(exported_trees, tmp_path_factory):
    return stores(exported_trees, NAMES, tmp_path_factory)


@pytest.fixture(params=NAMES)
def arch(request, fake, archs, monkeypatch):
    """An architecture whose modules are all that there are, on a device of it."""
    with only(request.param, archs, fake, monkeypatch):
        yield request.param


def launch(p):
    def empty(dtype, *shape):
        return ctm_rt.DeviceArray.empty(shape, DType(dtype))

    ctm_rt.decode_attention(
        empty("f16", p.batch, p.query_len, p.num_q_heads, p.head_dim),
        empty("e4m3" if p.fp8_kv_cache else "f16", 2, PAGE, p.num_kv_heads, p.head_dim),
        empty("i32", p.batch, 2, p.max_pages),
        empty("i32", p.batch),
        scale=1.0,
        tree_mask=empty("i32", p.batch, p.query_len, 4),
    )


def test_each_plan_is_one_launch(arch, fake):
    """And among them all is each kernel of each module."""
    for name in NAMES[arch]:
        used, key = set(), TREES[name].key
        head_dim, fp8 = key["head_dim"], key["kv_dtype"] == "e4m3"
        for batch, num_kv_heads, ratio, query_len, max_pages in SHAPES:
            heads = ratio * num_kv_heads, num_kv_heads
            p = DecodeProblem(batch, *heads, head_dim, max_pages, fp8, query_len, tree=True)
            fake.library().fake_forget_launches()
            launch(p)
            [seen] = fake.launches()
            assert_planned(seen, p)
            used.add(plan_of(p).kernel)
        config = ctm_rt.load(name).manifest.config
        assert used == set(range(len(config["kernels"])))


def test_what_the_exporter_found(arch):
    assert_as_told(arch, {name: TREES[name] for name in NAMES[arch]})
