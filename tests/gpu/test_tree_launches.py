"""Trees launched again and again: workspaces, streams, graphs, temporaries."""

import runpy
from dataclasses import replace

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from tests.gpu.device import (
    DEVICE,
    Call,
    assert_same,
    capture,
    decode,
    decode_modules,
    new_stream,
    place,
    write,
)
from tests.gpu.inputs import PAGE, Module, make
from tests.gpu.trees import (
    TreeCall,
    TreeInputs,
    assert_tree_matches,
    decode_tree,
    exact,
    make_tree,
)


def test_one_workspace_in_turn(tree_module: Module) -> None:
    """Case 13. Trees and single tokens share one; each gives what buffers of its own give."""
    single = next(
        m for m in decode_modules() if m[1:] == (tree_module.kv_dtype, tree_module.head_dim)
    )
    a = make_tree(tree_module, [1000, 9, 129], 9, ratio=3, max_pages=40)
    b = make_tree(tree_module, [2500], 70, ratio=8, num_kv_heads=1, seed=1)
    token = make(single, [700] * 6, ratio=4, num_kv_heads=3, max_pages=40)
    workspace = ctm_rt.Workspace(DEVICE)
    for inputs in (a, b, a, token, a):
        if isinstance(inputs, TreeInputs):
            got = TreeCall(tree_module, inputs, workspace).run()
            assert_same(got, decode_tree(tree_module, inputs))
        else:
            assert_same(Call(single, inputs, workspace).run(), decode(single, inputs))


@pytest.mark.parametrize("query_len", [3, 40])
def test_every_kernel(tree_module: Module, query_len: int) -> None:
    """Case 14. How keys are dealt changes rounding alone: 2 ulp of a row's largest element."""
    lengths = [2100, 64, 0, query_len, 1]
    inputs = make_tree(tree_module, lengths, query_len, max_pages=17, sinks=True)
    expected = exact(inputs)
    whole = None
    for what, got in TreeCall(tree_module, inputs).run_kernels():
        assert_tree_matches(got, inputs, expected, what)
        whole = got.astype(np.float32) if whole is None else whole
        ulp = np.spacing(np.abs(whole).max(-1, keepdims=True).astype(np.float16))
        assert (np.abs(got - whole) <= 2 * ulp.astype(np.float32)).all(), what


def test_counter_left_set(tree_module: Module) -> None:
    """Case 15. Whoever kills a launch may leave one; it never hangs, and ``reset()`` cures it."""
    call = TreeCall(tree_module, make_tree(tree_module, [6000], 5, num_kv_heads=1, max_pages=80))
    launch = call.bind()
    expected = call.run(launch)
    write(call.semaphores, np.ones(call.semaphores.shape, np.int32))
    launch()
    driver.synchronize(0, DEVICE)
    call.workspace.reset()
    assert_same(call.run(launch), expected)


def test_repeats_beside_another_stream(tree_module: Module) -> None:
    """Case 12. Two thousand launches give the same bits while another stream is busy."""
    call = TreeCall(tree_module, make_tree(tree_module, [2000, 129, 64], 9, max_pages=16))
    other = TreeCall(tree_module, make_tree(tree_module, [1500] * 4, 20, seed=1))
    last = max(call.kernels())
    beside = other.bind()
    with new_stream() as stream, new_stream() as second:
        for launch in (call.bind(), call.bind_kernel(last, 7, 0), call.bind_kernel(last, 1, 40)):
            expected = call.run(launch, stream)
            other.poison()
            for _ in range(700):
                beside(second)
                launch(stream)
            assert_same(call.result(), expected)
            other.result()


@pytest.mark.parametrize("window", [0, 50])
def test_replay_with_other_lengths_and_masks(tree_module: Module, window: int) -> None:
    """Between replays lengths grow, shrink and vanish, and the trees and tables change."""
    longest = make_tree(tree_module, [1500] * 3, 20, sinks=True, max_pages=12)
    options = {"sliding_window": window, "contiguous_query_swa": True}
    packed = np.ascontiguousarray(longest.tree_mask)  # so that it can be overwritten
    longest = replace(longest, **options, tree_mask=packed)
    call = TreeCall(tree_module, longest)
    launch = call.bind()
    rng = np.random.default_rng(0)
    with new_stream() as stream:
        call.run(launch, stream)  # the buffers exist and the workspace has its stream
        replay = capture(stream, launch)
        for lengths in ([1500, 20, 0], [1, 1499, 300], [1410, 1480, 1500]):
            table = longest.page_table[[2, 0, 1]]
            for row, length in zip(table, lengths, strict=True):
                row[:, -(-length // PAGE) :] = -1
            inputs = replace(
                longest,
                seq_lens=np.array(lengths, np.int32),
                tree_mask=rng.integers(-(2**31), 2**31, packed.shape, np.int32),
                page_table=table,
            )
            for name in ("seq_lens", "tree_mask", "page_table"):
                write(call.arrays[name], getattr(inputs, name))
            got = call.run(lambda _: replay(), stream)
            assert_tree_matches(got, inputs)
            assert_same(got, decode_tree(tree_module, inputs))


def test_many_launches_in_one_graph(tree_module: Module) -> None:
    """Ten launches in a row share a workspace inside one graph, counters clean between them."""
    call = TreeCall(tree_module, make_tree(tree_module, [6000], 5, num_kv_heads=1, max_pages=80))
    launch = call.bind()
    with new_stream() as stream:
        expected = call.run(launch, stream)
        replay = capture(stream, *[launch] * 10)
        assert_same(call.run(lambda _: replay(), stream), expected)


def test_temporaries(tree_module: Module) -> None:
    """Case 29. A mask dropped while the kernel is queued lives until it is done."""
    inputs = make_tree(tree_module, [2000, 129, 64], 9, max_pages=16)
    expected, queued = exact(inputs), []
    for _ in range(10):
        arrays = TreeCall(tree_module, inputs).arrays
        queued.append(ctm_rt.decode_attention(**arrays, **inputs.scalars))
        del arrays
        place(np.full(inputs.kv_pool.shape, 0x7F7F, np.uint16))  # lands in memory freed too early
        place(np.zeros(inputs.tree_mask.base.shape, np.int32))
    for out in queued:
        assert_tree_matches(ctm_rt.to_host(out), inputs, expected)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Trees write what single-token decode writes, in fewer calls."""
    runpy.run_module("examples.verify_tree", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[-1].rpartition(" ")[2]] == ["attention on the GPU", "equal"]
