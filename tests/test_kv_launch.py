"""From arrays to the launches that write and move a cache, and what is refused before that."""

import gc
import itertools

import ml_dtypes
import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver, paged_kv
from ctm_rt.bench import cache
from ctm_rt.memory import release_done
from ctm_rt.modules import kernel, loader, store
from ctm_rt.modules.manifest import HOST, read_manifest
from ctm_rt.paged_kv import INT32_MAX, Move, PagedKvCache
from ctm_rt.tensor import view
from kernels.variants import VARIANTS
from tests.conftest import run_export
from tests.kv_launch import (
    MODULES,
    PAGE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    arguments,
    assert_dealt,
    compute,
    kind,
)

E4M3 = ml_dtypes.float8_e4m3fn
CAPABILITIES = {
    "sm_80": (8, 0),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_120a": (12, 0),
}


@pytest.fixture(scope="session")
def cache_stores(tmp_path_factory):
    """The root of a store per architecture, filled when it is first asked for."""
    roots = {}

    def root(arch):
        if arch not in roots:
            roots[arch] = tmp_path_factory.mktemp(f"cache_{arch}")
            run_export(roots[arch], arch, *MODULES)
        return roots[arch]

    return root


def use(monkeypatch, root):
    monkeypatch.setattr(store, "PREBUILT", root)
    monkeypatch.setattr(store, "USER", root / "none")
    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(loader, "_libraries", {})


@pytest.fixture(autouse=True)
def _computing(fake, cache_stores, monkeypatch):
    """Each test starts without launches, on a GPU that computes, with these modules alone."""
    use(monkeypatch, cache_stores("sm_90a"))
    fake.on_launch(compute)
    yield
    release_done()


class Problem:
    """Random arrays on the host and on the device."""

    def __init__(self, lengths=(5, 300, 256), tokens=3, heads=2, head_dim=64, fp8=False):
        rng = np.random.default_rng(0)
        batch, max_pages = len(lengths), 3
        num_pages = batch * max_pages
        ids = rng.permutation(num_pages).reshape(batch, max_pages)
        pool = (2 * num_pages, PAGE, heads, head_dim)
        self.host = {
            "k": rng.standard_normal((batch, tokens, heads, head_dim)).astype(np.float16),
            "v": rng.standard_normal((batch, tokens, heads, head_dim)).astype(np.float16),
            "kv_pool": rng.standard_normal(pool).astype(E4M3 if fp8 else np.float16),
            "page_table": np.stack([ids, ids + num_pages], axis=1).astype(np.int32),
            "seq_lens": np.array(lengths, np.int32),
        }
        self.device = {name: ctm_rt.to_device(array) for name, array in self.host.items()}

    def append(self, **changed):
        paged_kv.append(**self.device | changed)

    def gather(self, **changed):
        names = ("kv_pool", "page_table", "seq_lens")
        arrays = {name: self.device[name] for name in names}
        return paged_kv.gather(**arrays | changed)

    def expected_pool(self, k_scale=1.0, v_scale=1.0):
        """The pool after an append of all tokens, each with a place."""
        h, pool = self.host, self.host["kv_pool"].copy()
        for half, (new, scale) in enumerate(((h["k"], k_scale), (h["v"], v_scale))):
            for b, t in np.ndindex(new.shape[:2]):
                position = h["seq_lens"][b] - new.shape[1] + t
                page = h["page_table"][b, half, position // PAGE]
                row = new[b, t].astype(np.float32) / np.float32(scale)
                pool[page, position % PAGE] = row.astype(pool.dtype)
        return pool


def assert_same(got, expected):
    bits = f"u{expected.dtype.itemsize}"
    np.testing.assert_array_equal(ctm_rt.to_host(got).view(bits), expected.view(bits))


def per_thread(name):
    (row,) = ctm_rt.load(name).manifest.config["kernels"]
    return row["per_thread"]


# -- append ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"), [(1, 2, 64), (3, 5, 128), (5, 1, 32), (2, 3, 48)]
)
def test_an_append_is_one_launch(fake, tokens, heads, head_dim, fp8):
    p = Problem((5, 300, 256), tokens, heads, head_dim, fp8)
    scales = {"k_scale": 0.37, "v_scale": 2.5} if fp8 else {}
    p.append(**scales)
    [launch] = fake.launches()
    assert_same(p.device["kv_pool"], p.expected_pool(**scales))
    row_chunks = head_dim // (16 if fp8 else 8)
    chunks = tokens * heads * row_chunks
    name = "kv_append_e4m3" if fp8 else "kv_append_f16"
    assert_dealt(launch, 6, chunks, heads, row_chunks, per_thread(name))
    assert (launch.call, launch.stream, launch.dynamic_smem) == ("cuLaunchKernelEx", 0, 0)
    got = arguments(launch)
    for array, device in p.device.items():
        assert got[array].ptr == device.ptr, array
    assert got["num_tokens"].ptr == 0
    assert got["k"][1:] == got["v"][1:]
    assert got["k"].shape == (3, tokens, heads, head_dim)


def test_counts_of_each_sequence(fake):
    p = Problem(tokens=4)
    counts = ctm_rt.to_device(np.array([0, 4, 2], np.int32))
    before = p.host["kv_pool"].copy()
    p.append(num_tokens=counts)
    assert arguments(fake.launches()[0])["num_tokens"].ptr == counts.ptr
    after = ctm_rt.to_host(p.device["kv_pool"])
    changed = {tuple(at) for at in np.argwhere((after != before).any(axis=(2, 3)))}
    table = p.host["page_table"]
    places = [(1, t) for t in range(296, 300)] + [(2, t) for t in (254, 255)]
    assert changed == {
        (table[b, half, t // PAGE], t % PAGE) for b, t in places for half in range(2)
    }


def test_slices_of_a_fused_row(fake):
    """One token a sequence, without an axis for it; K and V follow the queries in a row."""
    p = Problem(tokens=1)
    fused = np.zeros((3, 4 + 2 + 2, 64), np.float16)
    fused[:, 4:6], fused[:, 6:] = p.host["k"][:, 0], p.host["v"][:, 0]
    row = view(ctm_rt.to_device(fused))
    k, v = (row._replace(ptr=row.ptr + 2 * 64 * at, shape=(3, 2, 64)) for at in (4, 6))
    p.append(k=k, v=v)
    assert_same(p.device["kv_pool"], p.expected_pool())
    assert arguments(fake.launches()[0])["k"].strides == (8 * 64, 8 * 64, 64)


def test_a_head_major_pool(fake):
    p = Problem()
    swapped = np.ascontiguousarray(p.host["kv_pool"].swapaxes(1, 2))
    device = view(ctm_rt.to_device(swapped))
    (pages, heads, head), shape = device.strides[:3], p.host["kv_pool"].shape
    pool = device._replace(shape=shape, strides=(pages, head, heads, 1))
    p.append(kv_pool=pool)
    assert arguments(fake.launches()[0])["kv_pool"].strides == (pages, head, heads)
    assert_same(device, np.ascontiguousarray(p.expected_pool().swapaxes(1, 2)))


def test_bytes_that_are_said_to_be_e4m3():
    p = Problem(fp8=True)
    pool = view(ctm_rt.to_device(p.host["kv_pool"].view(np.uint8)), dtype="e4m3")
    p.append(kv_pool=pool)
    assert_same(pool, p.expected_pool())


def test_a_loop_is_bound_once(fake):
    p = Problem((0, 100, 255), tokens=1)
    lengths, pool = p.device["seq_lens"], p.device["kv_pool"]
    count, append = paged_kv.bind_advance(lengths), paged_kv.bind_append(**p.device)
    assert not fake.launches()
    for _ in range(5):
        count()
        append()
    assert ctm_rt.to_host(lengths).tolist() == [5, 105, 260]
    assert [kind(launch) for launch in fake.launches()] == ["KvLengths", "KvAppend"] * 5
    dense = ctm_rt.to_host(paged_kv.gather(pool, p.device["page_table"], lengths))
    for b, first in enumerate((0, 100, 255)):
        for t in range(first, first + 5):
            np.testing.assert_array_equal(dense[b, 0, :, t], p.host["k"][b, 0])
            np.testing.assert_array_equal(dense[b, 1, :, t], p.host["v"][b, 0])


def test_temporaries_live_until_the_launch_is_done(fake):
    p = Problem()
    live = fake.live_allocations()
    with driver.current(0):
        stream = driver.stream_create()
    fake.set_paused(stream, True)
    p.append(k=ctm_rt.to_device(p.host["k"]), stream=stream)
    gc.collect()
    release_done()
    assert fake.live_allocations() == live + 1
    fake.set_paused(stream, False)
    release_done()
    assert fake.live_allocations() == live


@pytest.mark.parametrize("shape", [(0, 3, 2, 64), (3, 0, 2, 64), (3, 3, 2, 0), (3, 3, 0, 64)])
def test_nothing_to_append(fake, shape):
    p = Problem(heads=shape[2], head_dim=shape[3])
    none = ctm_rt.to_device(np.zeros(shape, np.float16))
    batch = shape[0]
    changed = {"page_table": p.host["page_table"][:batch], "seq_lens": p.host["seq_lens"][:batch]}
    changed = {name: ctm_rt.to_device(array) for name, array in changed.items()}
    p.append(k=none, v=none, **changed)
    assert not fake.launches()


def arrays_of(shape, dtype=np.float16):
    return ctm_rt.to_device(np.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("k", lambda p: {"k": arrays_of((3, 64))}, "batch, num_kv_heads, head_dim"),
        ("v", lambda p: {"v": arrays_of((3, 2, 2, 64))}, "tokens 3, got 2"),
        ("v", lambda p: {"v": arrays_of((3, 3, 2, 64), np.float32)}, "dtype f16, got f32"),
        ("k", lambda p: {"k": p.host["k"]}, "host memory"),
        ("k", lambda p: {"k": arrays_of((3, 3, 2, 60))}, "multiples of 8, got 60"),
        ("kv_pool", lambda p: {"kv_pool": arrays_of((4, PAGE, 2, 32))}, "head_dim 64, got 32"),
        ("kv_pool", lambda p: {"kv_pool": arrays_of((4, 64, 2, 64))}, "128, num_kv_heads"),
        ("kv_pool", lambda p: {"kv_pool": arrays_of((4, PAGE, 2, 64), "i1")}, "f16 or e4m3"),
        ("kv_pool", lambda p: {"kv_pool": arrays_of((4, PAGE, 1, 64))}, "num_kv_heads 2, got 1"),
        ("page_table", lambda p: {"page_table": arrays_of((3, 2, 3), np.int64)}, "i32, got i64"),
        ("page_table", lambda p: {"page_table": arrays_of((2, 2, 3), "i4")}, "batch 3, got 2"),
        ("seq_lens", lambda p: {"seq_lens": arrays_of((4,), "i4")}, "batch 3, got 4"),
        ("num_tokens", lambda p: {"num_tokens": arrays_of((1,), "i4")}, "batch 3, got 1"),
        ("k_scale", lambda p: {"k_scale": 0.5}, "1 for an f16 pool, got 0.5"),
        ("v_scale", lambda p: {"v_scale": float("nan")}, "1 for an f16 pool, got nan"),
    ],
)
def test_refused_appends(fake, name, change, reason):
    p = Problem()
    with pytest.raises(ctm_rt.ArgumentError, match=reason) as caught:
        p.append(**change(p))
    assert caught.value.name == name
    assert not fake.launches()


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), 1e-39, -(2.0**127)])
def test_scales_without_a_reciprocal_are_refused(fake, scale):
    p = Problem(fp8=True)
    for name in ("k_scale", "v_scale"):
        with pytest.raises(ctm_rt.ArgumentError, match="a size of") as caught:
            p.append(**{name: scale})
        assert caught.value.name == name
    assert not fake.launches()


def test_a_head_dim_of_no_whole_chunks_of_e4m3():
    p = Problem(head_dim=72, fp8=True)
    with pytest.raises(ctm_rt.ArgumentError, match="k: expected a head_dim in multiples of 16"):
        p.append()


# -- lengths --------------------------------------------------------------------------------------


def test_lengths_are_counted_by_sequence(fake):
    lengths = ctm_rt.to_device(np.array([3, 0, 9], np.int32))
    paged_kv.advance(lengths)
    paged_kv.advance(lengths, ctm_rt.to_device(np.array([0, 5, -20], np.int32)))
    paged_kv.advance(lengths, -1)
    assert ctm_rt.to_host(lengths).tolist() == [3, 5, 0]
    assert [launch.grid for launch in fake.launches()] == [(1, 1, 1)] * 3
    many = ctm_rt.to_device(np.zeros(100_000, np.int32))
    paged_kv.advance(many, 7)
    assert (ctm_rt.to_host(many) == 7).all()
    launch = fake.launches()[-1]
    assert launch.grid[0] * launch.block[0] * per_thread("kv_append_lengths") >= 100_000


def test_refused_counts(fake):
    lengths = ctm_rt.to_device(np.zeros(3, np.int32))
    for name, count, reason in (
        ("num_tokens", 2**31, "to 2147483647, got 2147483648"),
        ("num_tokens", arrays_of((2,), "i4"), "batch 3, got 2"),
        ("num_tokens", 1.5, "array"),
    ):
        with pytest.raises(ctm_rt.ArgumentError, match=reason) as caught:
            paged_kv.advance(lengths, count)
        assert caught.value.name == name
    with pytest.raises(ctm_rt.ArgumentError, match="seq_lens"):
        paged_kv.advance(np.zeros(3, np.int32))
    assert not fake.launches()


# -- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
def test_copies_of_listed_pages(fake, fp8):
    p = Problem(fp8=fp8)
    pool, before = p.device["kv_pool"], p.host["kv_pool"].copy()
    paged_kv.copy_pages(pool, [Move(0, 5), Move(3, 1)])
    expected = before.copy()
    expected[[5, 1, 14, 10]] = before[[0, 3, 9, 12]]
    assert_same(pool, expected)
    [launch] = fake.launches()
    row_chunks = 4 if fp8 else 8
    chunks = PAGE * 2 * row_chunks
    assert_dealt(launch, 4, chunks, 2, row_chunks, per_thread("kv_copy_pages"))


def test_copies_of_first_rows(fake):
    p = Problem()
    moves, counts = (ctm_rt.to_device(np.array(a, np.int32)) for a in ([[2, 4], [-1, 7]], [9, 9]))
    before = p.host["kv_pool"].copy()
    paged_kv.copy_pages(p.device["kv_pool"], moves, num_tokens=counts)
    expected = before.copy()
    expected[[4, 13], :9] = before[[2, 11], :9]
    assert_same(p.device["kv_pool"], expected)
    assert arguments(fake.launches()[0])["moves"].ptr == moves.ptr


def test_no_moves_are_no_launch(fake):
    p = Problem()
    paged_kv.copy_pages(p.device["kv_pool"], [])
    paged_kv.copy_pages(p.device["kv_pool"], arrays_of((0, 2), "i4"))
    PagedKvCache(1, 100).copy_pages([])
    assert not fake.launches()


def test_a_fork_copies_in_every_layer(fake):
    """What PagedKvCache lists is copied in each pool, whatever its heads and its type."""
    kv = PagedKvCache(2, 200)
    pools = [kv.add_layer(2, 64), kv.add_layer(1, 32, "e4m3")]
    slot = kv.admit(130)
    kv.advance(slot, 130)
    kv.upload()
    rng = np.random.default_rng(0)
    for pool in pools:
        new = ctm_rt.to_device(rng.integers(1, 9, (2, 130, *pool.shape[2:])).astype(np.float16))
        table, lengths = kv.table.device_array, kv.seq_lens_device_array
        paged_kv.append(new, new, pool, table, lengths)
    moves = kv.extend(kv.fork(slot), 1)
    appends = len(fake.launches())
    kv.copy_pages(moves)
    assert [kind(launch) for launch in fake.launches()[appends:]] == ["KvCopyPages"] * 2
    [(source, destination)] = moves
    for pool in pools:
        host = ctm_rt.to_host(pool)
        for first in (0, kv.num_pages):
            rows = host[first + source].view(np.uint8)
            assert (rows[:2] > 0).any()  # the two tokens of the shared page
            np.testing.assert_array_equal(rows, host[first + destination].view(np.uint8))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("kv_pool", {"kv_pool": (5, PAGE, 2, 64)}, "as many V pages as K pages, got 5 pages"),
        ("kv_pool", {"kv_pool": (4, 64, 2, 64)}, "2 . num_pages, 128"),
        ("kv_pool", {"kv_pool": (4, PAGE, 128)}, "2 . num_pages, 128"),
        ("kv_pool", {"kv_pool": (4, PAGE, 2, 60)}, "multiples of 16 bytes, got 120"),
        ("moves", {"moves": (2, 3)}, "num_moves, 2"),
        ("num_tokens", {"num_tokens": (3,)}, "num_moves 2, got 3"),
    ],
)
def test_refused_copies(fake, name, change, reason):
    shapes = {"kv_pool": (4, PAGE, 2, 64), "moves": (2, 2)} | change
    arrays = {
        key: arrays_of(shape, np.float16 if key == "kv_pool" else np.int32)
        for key, shape in shapes.items()
    }
    with pytest.raises(ctm_rt.ArgumentError, match=reason) as caught:
        paged_kv.copy_pages(**arrays)
    assert caught.value.name == name
    assert not fake.launches()


def test_a_transposed_pool_is_refused():
    pool = view(arrays_of((4, PAGE, 2, 64)))
    strides = (*pool.strides[:2], 1, 2)
    with pytest.raises(ctm_rt.ArgumentError, match="contiguous innermost axis"):
        paged_kv.copy_pages(pool._replace(strides=strides), [Move(0, 1)])


# -- gathering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("capacity", [None, 1, 200, 400])
def test_a_gather_is_one_launch(fake, fp8, capacity):
    p = Problem((5, 300, -1), fp8=fp8)
    out = p.gather(capacity=capacity)
    tokens = 3 * PAGE if capacity is None else capacity
    assert (out.shape, out.dtype) == ((3, 2, 2, tokens, 64), p.device["kv_pool"].dtype)
    expected = np.zeros(out.shape, p.host["kv_pool"].dtype)
    for b, half, t in itertools.product(range(3), range(2), range(tokens)):
        if t < p.host["seq_lens"][b]:
            page = p.host["page_table"][b, half, t // PAGE]
            expected[b, half, :, t] = p.host["kv_pool"][page, t % PAGE]
    assert_same(out, expected)
    [launch] = fake.launches()
    row_chunks = 4 if fp8 else 8
    chunks = tokens * 2 * row_chunks
    assert_dealt(launch, 6, chunks, 2, row_chunks, per_thread("kv_gather"))


def test_gather_into_what_is_given(fake):
    p = Problem()
    out = arrays_of((3, 2, 2, 70, 64))
    assert p.gather(out=out) is out
    assert arguments(fake.launches()[0])["out"].ptr == out.ptr
    with pytest.raises(ctm_rt.ArgumentError, match="capacity: expected None beside out"):
        p.gather(out=out, capacity=70)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("out", {"out": arrays_of}, "batch, 2, num_kv_heads, capacity, head_dim"),
        ("out", {"out": lambda s: arrays_of((3, 2, 2, 70, 64), "i2")}, "dtype f16, got i16"),
        ("out", {"out": lambda s: arrays_of((3, 2, 2, 70, 32))}, "head_dim 64, got 32"),
        ("out", {"out": lambda s: arrays_of((3, 2, 1, 70, 64))}, "num_kv_heads 2, got 1"),
        ("page_table", {"page_table": arrays_of}, "batch, 2, max_pages"),
        ("kv_pool", {"kv_pool": lambda s: np.zeros((4, PAGE, 2, 64), "f2")}, "host memory"),
    ],
)
def test_refused_gathers(fake, name, change, reason):
    p = Problem()
    with pytest.raises(ctm_rt.ArgumentError, match=reason) as caught:
        p.gather(**{key: make((3, 2)) for key, make in change.items()})
    assert caught.value.name == name
    assert not fake.launches()


# -- modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", CAPABILITIES)
def test_every_architecture(fake, cache_stores, monkeypatch, arch):
    """The modules export, spill nothing, and ask for overlap where the hardware has it."""
    use(monkeypatch, cache_stores(arch))
    fake.set_devices(1, CAPABILITIES[arch])
    rows = {v.name: v for v in VARIANTS if v.name in MODULES and v.supports(arch)}
    assert len(rows) == len(MODULES) - (arch == "sm_80")
    for name, variant in rows.items():
        path = cache_stores(arch) / arch / HOST / f"{name}.json"
        manifest = read_manifest(path)
        (row,) = manifest.config["kernels"]
        assert row["spill_bytes"] == row["instructions"]["LDL"] == row["instructions"]["STL"] == 0
        (told,) = variant.config(arch)["kernels"]
        assert {key: row[key] for key in told} == told
        assert (manifest.family, manifest.key) == (variant.family, variant.key)
    for fp8 in {False, "kv_append_e4m3" in rows}:
        p = Problem(fp8=fp8)
        p.append()
        assert_same(p.device["kv_pool"], p.expected_pool())
    paged_kv.advance(p.device["seq_lens"])
    paged_kv.copy_pages(p.device["kv_pool"], [Move(0, 1)])
    p.gather()
    kinds = [kind(launch) for launch in fake.launches()]
    assert kinds == ["KvAppend"] * (len(rows) - 3) + ["KvLengths", "KvCopyPages", "KvGather"]
    for launch in fake.launches():
        overlaps = launch.attributes.get(PROGRAMMATIC_STREAM_SERIALIZATION, 0)
        assert overlaps == (CAPABILITIES[arch] >= (9, 0))


def test_an_old_gpu_has_no_e4m3(fake, cache_stores, monkeypatch):
    use(monkeypatch, cache_stores("sm_80"))
    fake.set_devices(1, (8, 0))
    with pytest.raises(ctm_rt.ModuleError, match="kv_append_e4m3"):
        Problem(fp8=True).append()


def test_an_index_that_does_not_fit_is_refused(fake):
    """As far as 32-bit counts of chunks reach, and no further."""
    p = Problem()
    k = view(p.device["k"])._replace(shape=(1, INT32_MAX, 2, 64), strides=(128, 128, 64, 1))
    with pytest.raises(ctm_rt.ArgumentError, match=r"fewer than 2\*\*31 chunks") as caught:
        p.append(k=k, v=k)
    assert caught.value.name == "k"
    assert not fake.launches()


# -- benchmark ------------------------------------------------------------------------------------


def test_each_case_of_the_benchmark_can_be_launched(fake, monkeypatch):
    """Small enough for this machine; each set of inputs is another launch."""

    def launch_all(launches, device, stream):
        for launch in launches:
            launch(stream)
        return 2.0

    cases = [case._replace(num_items=2, head_dim=32) for case in cache.CASES]
    largest = max(case.nbytes for case in cases)
    monkeypatch.setattr(cache, "BUFFER_NBYTES", 2 * largest)
    monkeypatch.setattr(cache, "COLD_NBYTES", 2 * largest)
    monkeypatch.setattr(cache, "MAX_SETS", 3)
    monkeypatch.setattr(cache, "cold_us", launch_all)
    rows = cache.run(cases, 0)
    assert [row["name"] for row in rows] == [case.name for case in cases]
    kinds = {"append": "KvAppend", "copy_pages": "KvCopyPages", "gather": "KvGather"}
    expected = [kinds[case.what] for case in cases for _ in range(case.num_sets)]
    assert [kind(launch) for launch in fake.launches()] == expected
    assert {case.num_sets for case in cases} >= {2, 3}
    for case, row in zip(cases, rows, strict=True):
        assert (row["nbytes"], row["us"]) == (case.nbytes, 2.0)
        assert row["allowed_us"] == pytest.approx(1.3 * case.nbytes / 4.27e6 + 3)


def test_bytes_of_a_case():
    """An append reads f16; a copy and a gather read what they write."""
    assert cache.Case("append", "e4m3", 128, 32, 1).nbytes == 32 * 2 * 8 * 128 * (2 + 1)
    assert cache.Case("copy_pages", "e4m3", 64, 1, PAGE).nbytes == PAGE * 2 * 8 * 64 * 2
    assert cache.Case("gather", "f16", 64, 2, 1024).nbytes == 2 * 1024 * 2 * 8 * 64 * 4
