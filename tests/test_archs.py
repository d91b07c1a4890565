"""Modules of every architecture: they export, and the driver is asked for what the plan says."""

import contextlib
import itertools

import pytest

import ctm_rt
from ctm_rt.decode import binding
from ctm_rt.decode.plan import DecodeProblem, max_gqa_ratio
from ctm_rt.modules import kernel, loader, store
from ctm_rt.modules.manifest import HOST, read_manifest
from ctm_rt.tensor import DType
from kernels.variants import VARIANTS
from tests.conftest import MODULES, run_export
from tests.decode_launch import PAGE, assert_planned, plan_of

CAPABILITIES = {
    "sm_80": (8, 0),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_120a": (12, 0),
}
DECODE = {v.name: v for v in VARIANTS if v.family == "fmha_decode"}
# All ten where a module has few kernels; elsewhere a pair: one has e4m3, two tiles of heads and,
# where they fit, clusters of 16.
PAIR = ("fmha_decode_f16_d64", "fmha_decode_e4m3_d256")
NAMES = {
    "sm_80": [name for name in DECODE if "f16" in name],
    "sm_89": [name for name in DECODE if "e4m3" in name],
    "sm_90a": MODULES,
    "sm_100a": PAIR,
    "sm_120a": PAIR,
}
SHAPES = {  # batch, num_kv_heads, max_pages
    "one pair": (1, 1, 64),
    "a cluster of 8 a pair": (1, 5, 64),
    "of 4": (1, 12, 64),
    "of 2": (1, 40, 64),
    "a CTA a pair": (1, 70, 64),
    "short, two sequences": (2, 1, 2),
    "long, two sequences": (2, 2, 600),
    "balanced": (16, 8, 17),
    "a batch beyond balancing": (1100, 1, 17),
    "many short ones": (16, 70, 8),
    "short, a cluster of 16": (1, 4, 32),
    "too long for halves of the heads": (1, 4, 300),
}


@pytest.fixture(scope="module")
def archs(exported, tmp_path_factory):
    return stores(exported, NAMES, tmp_path_factory)


@pytest.fixture(params=NAMES)
def arch(request, fake, archs, monkeypatch):
    """An architecture whose modules are all that there are, on a device of it."""
    with only(request.param, archs, fake, monkeypatch):
        yield request.param


def stores(exported, names, tmp_path_factory):
    """Return what gives the root of an architecture's store, filled when it is first asked for."""
    roots = {"sm_90a": exported}

    def root(arch):
        if arch not in roots:
            roots[arch] = tmp_path_factory.mktemp(arch)
            run_export(roots[arch], arch, *names[arch])
        return roots[arch]

    return root


@contextlib.contextmanager
def only(arch, roots, fake, monkeypatch):
    """Let there be a device of the architecture, and no modules but those of its store."""
    root = roots(arch)
    monkeypatch.setattr(store, "PREBUILT", root)
    monkeypatch.setattr(store, "USER", root / "none")
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(loader, "_libraries", {})
    binding._check.cache_clear()
    fake.set_devices(1, CAPABILITIES[arch])
    yield
    binding._check.cache_clear()


def problems(name):
    key = DECODE[name].key
    fp8 = key["kv_dtype"] == "e4m3"
    ratios = {1, 8, max_gqa_ratio(key["head_dim"], fp8, tree=False)}
    for ratio, shape, skip in itertools.product(ratios, SHAPES.values(), (False, True)):
        batch, num_kv_heads, max_pages = shape
        heads = ratio * num_kv_heads, num_kv_heads
        yield DecodeProblem(batch, *heads, key["head_dim"], max_pages, fp8, skip_softmax=skip)


def launch(p):
    def empty(dtype, *shape):
        return ctm_rt.DeviceArray.empty(shape, DType(dtype))

    ctm_rt.decode_attention(
        empty("f16", p.batch, p.num_q_heads, p.head_dim),
        empty("e4m3" if p.fp8_kv_cache else "f16", 2, PAGE, p.num_kv_heads, p.head_dim),
        empty("i32", p.batch, 2, p.max_pages),
        empty("i32", p.batch),
        scale=1.0,
        skip_softmax=[(0, 1)] if p.skip_softmax else None,
    )


def test_each_plan_is_one_launch(arch, fake):
    """And among them all is each kernel of each module."""
    for name in NAMES[arch]:
        used = set()
        for p in problems(name):
            fake.library().fake_forget_launches()
            launch(p)
            [seen] = fake.launches()
            assert_planned(seen, p)
            used.add(plan_of(p).kernel)
        config = ctm_rt.load(name).manifest.config
        assert used == set(range(len(config["kernels"])))


def test_what_the_exporter_found(arch):
    assert_as_told(arch, {name: DECODE[name] for name in NAMES[arch]})


def assert_as_told(arch, variants):
    """The kernels are those that the variants tell of, in their order."""
    for name, variant in variants.items():
        path = store.PREBUILT / arch / HOST / f"{name}.json"
        rows = read_manifest(path).config["kernels"]
        told = variant.config(arch)["kernels"]
        assert [{key: row[key] for key in told[0]} for row in rows] == told
