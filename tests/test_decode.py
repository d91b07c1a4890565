"""From arrays to the launch: what the driver was asked to run, and what is refused before that."""

import gc
import math

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode import binding
from ctm_rt.memory import release_done
from ctm_rt.paged_kv import INT32_MAX
from ctm_rt.tensor import DType, TensorView, view
from tests.decode_launch import PAGE, Problem, arguments, assert_close, assert_planned, merging


@pytest.fixture(autouse=True)
def _computing(computing):
    """Each test starts without launches, on a GPU that computes."""


# -- what is launched -----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (15, 3), (8, 8), (40, 5)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_launch_as_planned(fake, heads, head_dim):
    problem = Problem((5, 0, 300), heads, head_dim)
    sinks = np.linspace(-1, 1, heads[0], dtype=np.float32)
    device_sinks = ctm_rt.to_device(sinks)
    workspace = ctm_rt.Workspace(0)
    options = {"sliding_window": 200, "scale": 0.3}
    out = problem.call(**options, sinks=device_sinks, workspace=workspace)
    assert out is problem.out
    assert_close(out, problem.expected(**options, sinks=sinks))

    [launch] = fake.launches()
    assert_planned(launch, problem.shape)
    assert launch.stream == 0

    got = arguments(launch)
    for name, array in {**problem.device, "sinks": device_sinks, "out": problem.out}.items():
        assert got[name].ptr == array.ptr, name
    hq, hkv = heads
    assert got["q"][1:] == got["out"][1:] == ((3, hq), (hq * head_dim, head_dim))
    rows = hkv * head_dim
    assert got["kv_pool"][1:] == ((18, hkv), (PAGE * rows, rows, head_dim))
    assert got["page_table"][1:] == ((3, 3), (6, 3))
    assert got["seq_lens"].shape == (3,)
    assert got["sinks"].shape == (hq,)
    assert got["scale_log2"] == pytest.approx(0.3 / math.log(2))
    assert (got["v_scale"], got["sliding_window"]) == (1.0, 200)


@pytest.mark.parametrize("heads", [(8, 2), (32, 2)])
def test_an_e4m3_pool(fake, heads):
    """As its own type or as bytes, with both scales."""
    problem = Problem((5, 300), heads, fp8=True)
    options = {"k_scale": 0.25, "v_scale": 3.0}
    expected = problem.expected(**options)
    assert_close(problem.call(**options), expected)
    pool = view(ctm_rt.to_device(problem.host["kv_pool"].view(np.uint8)), dtype="e4m3")
    assert_close(problem.call(**options, kv_pool=pool), expected)
    for launch in fake.launches():
        assert_planned(launch, problem.shape)
        assert arguments(launch)["scale_log2"] == pytest.approx(0.125 * 0.25 / math.log(2))
        assert arguments(launch)["v_scale"] == 3.0


def test_no_sinks_are_a_null_pointer(fake):
    problem = Problem()
    problem.call()
    assert arguments(fake.launches()[0])["sinks"].ptr == 0


def test_strides_travel(fake):
    """q is a slice of a fused QKV row, out of a wider row, the pool has heads before tokens."""
    problem = Problem((5, 300), (8, 2), 64)
    fused = np.zeros((2, 8 + 4, 64), np.float16)
    fused[:, :8] = problem.host["q"]
    wide_out = ctm_rt.to_device(np.zeros((2, 9, 64), np.float16))
    head_major = np.ascontiguousarray(problem.host["kv_pool"].transpose(0, 2, 1, 3))
    pool = view(ctm_rt.to_device(head_major))
    shape, strides = problem.host["kv_pool"].shape, (2 * PAGE * 64, 64, PAGE * 64, 1)
    arrays = {
        "q": view(ctm_rt.to_device(fused))._replace(shape=(2, 8, 64)),
        "kv_pool": pool._replace(shape=shape, strides=strides),
        "out": view(wide_out)._replace(shape=(2, 8, 64)),
    }
    problem.call(**arrays)
    assert arguments(fake.launches()[0])["q"].strides == (12 * 64, 64)
    assert arguments(fake.launches()[0])["kv_pool"].strides == strides[:3]
    got = ctm_rt.to_host(wide_out)
    np.testing.assert_allclose(got[:, :8], problem.expected(), rtol=2e-3, atol=2e-4)
    assert not got[:, 8].any()


def test_a_query_axis_of_one(fake):
    problem = Problem()
    q = ctm_rt.to_device(problem.host["q"][:, None])
    assert ctm_rt.to_host(problem.call(q=q)) is not None
    out = problem.call(q=q, out=None)
    assert out.shape == (2, 1, 8, 64)
    assert_close(out, problem.expected()[:, None])
    assert arguments(fake.launches()[0])["q"].shape == (2, 8)


def test_out_is_made_where_none_is_given(fake):
    problem = Problem()
    out = problem.call(out=None)
    assert (out.shape, out.dtype, out.device) == ((2, 8, 64), DType("f16"), 0)
    assert_close(out, problem.expected())


@pytest.mark.parametrize(
    ("window", "passed"), [(0, 0), (1, 1), (INT32_MAX, INT32_MAX), (10**12, INT32_MAX)]
)
def test_a_window_is_clamped_to_what_the_kernel_takes(fake, window, passed):
    Problem().call(sliding_window=window)
    assert arguments(fake.launches()[0])["sliding_window"] == passed


def test_bound_once_launched_often(fake):
    problem = Problem()
    launch = problem.bind()
    assert not fake.launches()
    for _ in range(3):
        launch()
    first, *rest = fake.launches()
    assert all(launch == first for launch in rest)
    assert len(rest) == 2
    assert_close(problem.out, problem.expected())
    problem.host["seq_lens"][:] = 77, 1  # lengths may change between launches
    lengths = ctm_rt.to_device(problem.host["seq_lens"])
    launch = problem.bind(seq_lens=lengths)
    launch()
    assert_close(problem.out, problem.expected())


class Stream:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.fixture
def stream(fake):
    from cuda.bindings import driver as cu

    with driver.current(0):
        handle = driver.check("cuStreamCreate", cu.cuStreamCreate(0))
    yield int(handle)
    driver.check("cuStreamDestroy", cu.cuStreamDestroy(handle))


def test_streams(fake, stream):
    problem = Problem()
    for spelling in (None, 0, stream, Stream(stream)):
        problem.call(stream=spelling)
    assert [launch.stream for launch in fake.launches()] == [0, 0, stream, stream]


# -- what is not ----------------------------------------------------------------------------------


def changed(name, **fields):
    """A call in which one array's view is changed."""
    return lambda p: {name: view(p.device.get(name, p.out))._replace(**fields)}


def host(name):
    return lambda p: {name: p.host.get(name, p.host["q"])}


def other(name, shape, dtype):
    return lambda _: {name: ctm_rt.DeviceArray.empty(shape, DType(dtype))}


REFUSED = {
    "q on the host": ("q", host("q"), "CUDA device"),
    "table on the host": ("page_table", host("page_table"), "CUDA device"),
    "out on the host": ("out", host("out"), "CUDA device"),
    "q bf16": ("q", other("q", (2, 8, 64), "bf16"), "f16"),
    "q of two axes": ("q", other("q", (2, 512), "f16"), "head_dim"),
    "head_dim 96": ("q", other("q", (2, 8, 96), "f16"), "head_dim one of"),
    "head_dim 128 of a pool of 64": ("kv_pool", other("q", (2, 8, 128), "f16"), "128"),
    "9 heads on 2": ("q", other("q", (2, 9, 64), "f16"), "2 KV heads"),
    "ratio 16": ("q", other("q", (2, 32, 64), "f16"), "1 to 8 query heads"),
    "pool of f32": ("kv_pool", other("kv_pool", (12, PAGE, 2, 64), "f32"), "f16 or e4m3"),
    "pool of bytes": ("kv_pool", other("kv_pool", (12, PAGE, 2, 64), "u8"), "e4m3"),
    "pages of 64": ("kv_pool", other("kv_pool", (12, 64, 2, 64), "f16"), "128"),
    "odd pages": ("kv_pool", other("kv_pool", (11, PAGE, 2, 64), "f16"), "11 pages"),
    "pool of three axes": ("kv_pool", other("kv_pool", (12, PAGE, 128), "f16"), "num_kv_heads"),
    "table i64": ("page_table", other("page_table", (2, 2, 3), "i64"), "i32"),
    "table of two axes": ("page_table", other("page_table", (2, 6), "i32"), "max_pages"),
    "table without V": ("page_table", other("page_table", (2, 1, 3), "i32"), "2"),
    "a length too many": ("seq_lens", other("seq_lens", (3,), "i32"), "batch 2"),
    "lengths i64": ("seq_lens", other("seq_lens", (2,), "i64"), "i32"),
    "sinks f16": ("sinks", other("sinks", (8,), "f16"), "f32"),
    "sinks too short": ("sinks", other("sinks", (7,), "f32"), "num_q_heads 8"),
    "sinks on the host": ("sinks", lambda _: {"sinks": np.zeros(8, np.float32)}, "CUDA device"),
    "out of another shape": ("out", other("out", (2, 8, 128), "f16"), "64"),
    "out of another batch": ("out", other("out", (3, 8, 64), "f16"), "batch 2"),
    "out f32": ("out", other("out", (2, 8, 64), "f32"), "f16"),
    "out read-only": ("out", changed("out", readonly=True), "writable"),
    "q on device 1": ("kv_pool", changed("q", device=1), "device"),
    "misaligned q": ("q", lambda p: {"q": view(p.device["q"])._replace(ptr=p.out.ptr + 2)}, "16"),
    "q strided inside": ("q", changed("q", strides=(1024, 128, 2)), "innermost"),
    "not an array": ("seq_lens", lambda _: {"seq_lens": [5, 300]}, "an array"),
    "negative window": ("sliding_window", lambda _: {"sliding_window": -1}, "0 or more"),
    "scale inf": ("scale", lambda _: {"scale": math.inf}, "finite"),
    "scale nan": ("scale", lambda _: {"scale": math.nan}, "finite"),
    "scale too big": ("scale", lambda _: {"scale": 3e38}, "to fit f32"),
    "v_scale of f16": ("v_scale", lambda _: {"v_scale": 2.0}, "1 for an f16 pool"),
    "k_scale of f16": ("k_scale", lambda _: {"k_scale": 2.0}, "1 for an f16 pool"),
    "two tokens, no mask": ("tree_mask", other("q", (2, 2, 8, 64), "f16"), "2 query tokens"),
    "stream": ("stream", lambda _: {"stream": "0"}, "__cuda_stream__"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("how", ["call", "bind"])
def test_refused_by_name(fake, case, how):
    fake.set_devices(2)
    name, change, words = REFUSED[case]
    problem = Problem()
    with pytest.raises(ctm_rt.ArgumentError, match=rf"^{name}: .*{words}") as refusal:
        getattr(problem, how)(**change(problem))
    assert refusal.value.name == name
    assert not fake.launches()


@pytest.mark.parametrize("case", REFUSED)
def test_a_right_call_excuses_no_wrong_one(fake, case):
    """What was worked out for a call is found again for an equal one alone."""
    fake.set_devices(2)
    name, change, words = REFUSED[case]
    problem, workspace = Problem(), ctm_rt.Workspace(0)
    for number in (1, 2):
        problem.call(workspace=workspace)
        assert len(fake.launches()) == number
        with pytest.raises(ctm_rt.ArgumentError, match=rf"^{name}: .*{words}"):
            problem.call(**{"workspace": workspace} | change(problem))


@pytest.mark.parametrize(
    ("options", "module"),
    [
        ({"head_dim": 256}, "fmha_decode_f16_d256"),
        ({"head_dim": 128, "fp8": True}, "fmha_decode_e4m3_d128"),
        ({"head_dim": 256, "tree": True}, "fmha_decode_tree_f16_d256"),
    ],
)
def test_a_module_that_is_not_exported(fake, options, module):
    tree = options.pop("tree", False)
    problem, change = Problem(**options), {}
    if tree:
        change["q"] = ctm_rt.to_device(np.zeros((2, 2, 8, 256), np.float16))
        change["tree_mask"] = ctm_rt.to_device(np.zeros((2, 2, 1), np.int32))
    with pytest.raises(ctm_rt.ModuleError, match=rf"no module {module} .*kernels\.export"):
        problem.call(**change)
    assert not fake.launches()


@pytest.mark.parametrize("shape", [(0, 8, 64), (2, 0, 64), (0, 1, 8, 64)])
def test_no_rows_launch_nothing(fake, shape):
    problem = Problem()
    q = ctm_rt.DeviceArray.empty(shape, DType("f16"))
    assert problem.call(q=q, out=None).shape == shape
    problem.bind(q=q, out=ctm_rt.DeviceArray.empty(shape, DType("f16")))()
    assert not fake.launches()


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("page_table", (2, 2, 0), "i32"), ("kv_pool", (0, PAGE, 2, 64), "f16")],
)
def test_no_pages_are_zeros(fake, name, shape, dtype):
    problem = Problem()
    empty = {name: ctm_rt.DeviceArray.empty(shape, DType(dtype))}
    assert not ctm_rt.to_host(problem.call(**empty)).any()
    wide = ctm_rt.to_device(np.ones((2, 9, 64), np.float16))
    problem.call(**empty, out=view(wide)._replace(shape=(2, 8, 64)))
    assert (ctm_rt.to_host(wide) == [[0]] * 8 + [[1]]).all()
    assert not fake.launches()
    with pytest.raises(ctm_rt.ArgumentError, match=r"^out: expected f16 \(2, 8, 64\)"):
        problem.call(**empty, out=ctm_rt.DeviceArray.empty((2, 8, 64), DType("f32")))


def test_first_use_while_capturing_says_what_to_do(fake, stream, monkeypatch):
    from ctm_rt.modules import kernel, loader

    monkeypatch.setattr(kernel, "_kernels", {})
    monkeypatch.setattr(loader, "_libraries", {})
    problem, workspace = Problem(), ctm_rt.Workspace(0)
    fake.set_capturing(stream, True)
    with pytest.raises(ctm_rt.ModuleError, match=r"load\("):
        problem.call(stream=stream, workspace=workspace)
    fake.set_capturing(stream, False)
    ctm_rt.load("fmha_decode_f16_d64")
    problem.call(stream=stream, workspace=workspace)
    fake.set_capturing(stream, True)
    problem.call(stream=stream, workspace=workspace)
    assert [launch.captured for launch in fake.launches()] == [False, True]
    fake.set_capturing(stream, False)


# -- scratch --------------------------------------------------------------------------------------


def buffers(launch):
    got = arguments(launch)
    return got["workspace"].ptr, got["semaphores"].ptr


def test_calls_on_one_stream_share_a_workspace(fake, stream):
    problem = merging()
    for each in (None, None, stream, stream):
        problem.call(stream=each)
    a, b, c, d = map(buffers, fake.launches())
    assert a == b
    assert c == d
    assert not set(a) & set(c)


def test_a_capture_needs_a_workspace_of_its_own(fake):
    """One that was used before goes on; the shared one is refused; neither spoils the capture."""
    problem, workspace = merging((5,)), ctm_rt.Workspace(0)
    with driver.current(0):
        stream = driver.stream_create()
    launch = problem.bind(workspace=workspace)
    launch(stream)
    fake.set_capturing(stream, True)
    launch(stream)
    with pytest.raises(ctm_rt.ArgumentError, match=r"^workspace: .*captured graph"):
        problem.call(stream=stream)
    assert fake.capture_status(stream) == 1
    fake.set_capturing(stream, False)
    launch(stream)
    assert len(fake.launches()) == 3


def test_the_scratch_is_that_of_the_call(fake, stream):
    """Also where calls that are else equal have another workspace, or one that has grown."""
    problem, one, other = merging(), ctm_rt.Workspace(0), ctm_rt.Workspace(0)
    for workspace in (one, other, one):
        problem.call(stream=stream, workspace=workspace)
    a, b, c = map(buffers, fake.launches())
    assert a == c
    assert not set(a) & set(b)
    scratch, semaphores = a
    one.scratch(100_000, stream=stream)
    problem.call(stream=stream, workspace=one)
    grown, kept = buffers(fake.launches()[3])
    assert (grown != scratch, kept) == (True, semaphores)
    one.semaphores(100_000, stream=stream)
    problem.call(stream=stream, workspace=one)
    kept, grown_too = buffers(fake.launches()[4])
    assert (kept, grown_too != semaphores) == (grown, True)
    assert_close(problem.out, problem.expected())


def test_bound_launches_have_workspaces_of_their_own(fake):
    problem = merging()
    launches = problem.bind(), problem.bind()
    for launch in launches:
        launch()
    assert not set(buffers(fake.launches()[0])) & set(buffers(fake.launches()[1]))


def test_a_failed_launch(fake):
    """The caller's workspace is dirty until reset; the shared one is cured at once."""
    problem, workspace = Problem(), ctm_rt.Workspace(0)
    for options in ({"workspace": workspace}, {}):
        problem.call(**options)
        fake.fail("cuLaunchKernelEx", 719)
        with pytest.raises(ctm_rt.DriverError, match=r"LAUNCH_FAILED"):
            problem.call(**options)
    problem.call()
    with pytest.raises(ctm_rt.ArgumentError, match=r"^workspace: "):
        problem.call(workspace=workspace)
    workspace.reset()
    problem.call(workspace=workspace)


@pytest.mark.parametrize("default", [True, False])
def test_calls_leave_nothing_behind(fake, stream, default):
    problem, stream = Problem(), 0 if default else stream
    for _ in range(20):
        problem.call(stream=stream)
    release_done()
    gc.collect()
    allocations, objects = fake.live_allocations(), len(gc.get_objects())
    for _ in range(200):
        problem.call(stream=stream)
        problem.call(stream=stream, out=None)
    driver.synchronize(stream, 0)
    release_done()
    gc.collect()
    assert fake.live_allocations() == allocations
    assert len(gc.get_objects()) - objects < 50


def test_temporaries_live_until_the_launch_is_done(fake, stream):
    problem = Problem()
    problem.call(stream=stream)
    baseline = fake.live_allocations()
    fake.set_paused(stream, True)
    out = problem.call(stream=stream, q=ctm_rt.to_device(problem.host["q"]), out=None)
    assert fake.live_allocations() == baseline + 2
    fake.set_paused(stream, False)
    driver.synchronize(stream, 0)
    release_done()
    assert_close(out, problem.expected())
    assert fake.live_allocations() == baseline + 1


@pytest.mark.parametrize("own", [False, True])
def test_the_stream_is_asked_once_whether_it_captures(fake, stream, own):
    """As that is a call of the driver, and an unbound call has no time to lose."""
    problem = Problem()
    options = {"stream": stream} | ({"workspace": ctm_rt.Workspace(0)} if own else {})
    for _ in range(2):
        before = len(fake.calls("cuStreamIsCapturing"))
        problem.call(**options)
    assert len(fake.calls("cuStreamIsCapturing")) == before + 1


def test_what_the_driver_is_called_for(fake, stream):
    """Beside the launch, which calls it too: twice a call, and thrice for every eight of them."""
    problem, options = Problem(), {"stream": stream, "workspace": ctm_rt.Workspace(0)}
    launch = problem.bind(workspace=options["workspace"])

    def calls(function):
        before = fake.library().fake_num_calls()
        for _ in range(16):
            function()
        return fake.library().fake_num_calls() - before

    problem.call(**options)
    assert calls(lambda: problem.call(**options)) == calls(lambda: launch(stream)) + 2 * 16 + 3 * 2


def test_the_legacy_stream_is_asked_where_arrays_are_held(fake, monkeypatch):
    """Its shared workspace is found without: its id is known."""
    problem = Problem()
    problem.call()
    release_done()
    asked = []
    monkeypatch.setattr(driver, "is_capturing", lambda *args: asked.append(args) or False)
    problem.call()
    assert asked


def test_equal_calls_are_worked_out_once(fake):
    problem = Problem()
    shared, own = view(problem.device["q"]), view(problem.device["q"])._replace(owner=object())
    for q in (problem.device["q"], shared, own):
        problem.call(q=q)
        problem.bind(q=q, workspace=ctm_rt.Workspace(0))
    assert binding._check.cache_info()[:2] == (5, 1)


OTHERS = {
    "an address": lambda p: {"q": ctm_rt.to_device(p.host["q"])},
    "a length": lambda p: {"page_table": changed_view(p, "page_table", shape=(2, 2, 2))},
    "a stride": lambda p: {"out": ctm_rt.to_device(np.zeros((2, 1, 8, 64), np.float16))},
    "sinks": lambda _: {"sinks": ctm_rt.to_device(np.zeros(8, np.float32))},
    "scale": lambda _: {"scale": 0.25},
    "window": lambda _: {"sliding_window": 3},
}


def changed_view(problem, name, **fields):
    return view(problem.device[name])._replace(**fields)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_other_calls_are_not_taken_for_equal(fake, change):
    problem = Problem()
    workspace = ctm_rt.Workspace(0)
    problem.call(workspace=workspace)
    problem.call(workspace=workspace, **change(problem))
    problem.call(workspace=workspace)
    first, second, third = map(arguments, fake.launches())
    assert first == third != second


def test_what_was_right_once_does_not_excuse_what_is_wrong(fake):
    problem = Problem()
    for _ in range(2):
        problem.call(sliding_window=1)
        with pytest.raises(TypeError):
            problem.call(sliding_window=1.0)
        with pytest.raises(TypeError):
            problem.call(scale="0.125")
        with pytest.raises(ctm_rt.ArgumentError, match=r"^out: .*writable"):
            problem.call(out=view(problem.out)._replace(readonly=True))
        with pytest.raises(ctm_rt.ArgumentError, match=r"^scale: "):
            problem.call(scale=math.nan)


@pytest.mark.parametrize("scale", [np.array(0.125), np.float16(0.125), np.float64(0.125)])
def test_a_scale_of_another_library(fake, scale):
    problem = Problem()
    problem.call(scale=scale)
    assert arguments(fake.launches()[0])["scale_log2"] == pytest.approx(0.125 / math.log(2))


def test_nothing_is_kept_for_the_next_equal_call(fake):
    problem = Problem()
    problem.call()
    release_done()
    gc.collect()
    before = fake.live_allocations()
    problem.call(out=None, workspace=ctm_rt.Workspace(0), q=ctm_rt.to_device(problem.host["q"]))
    del problem
    release_done()
    assert fake.live_allocations() == before - 5


def test_views_pass_through_unchanged():
    """A view made once is what the launch gets: nothing asks the array again."""

    class Once:
        def __init__(self, array):
            self.tensor = view(array)

        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

    problem = Problem()
    tensor = Once(problem.device["q"]).tensor
    assert isinstance(tensor, TensorView)
    assert_close(problem.call(q=tensor), problem.expected())
