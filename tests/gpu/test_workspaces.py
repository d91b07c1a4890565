"""Scratch and counters: shared in turn, never at once; and every kernel, dealt in every way."""

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from tests.gpu.device import (
    DEVICE,
    Call,
    assert_matches,
    assert_same,
    decode,
    new_stream,
    reference,
    write,
)
from tests.gpu.inputs import Module, make


def test_one_workspace_in_turn(module: Module) -> None:
    """Case 13. Shapes A, B, A give what buffers of their own give, and leave it clean."""
    a = make(module, [1000, 3, 129], ratio=3, num_kv_heads=2, max_pages=8)
    b = make(module, [700] * 6, ratio=8, num_kv_heads=3, seed=1)
    workspace = ctm_rt.Workspace(DEVICE)
    for inputs in (a, b, a):
        assert_same(Call(module, inputs, workspace).run(), decode(module, inputs))


@pytest.mark.parametrize("many_heads", [False, True])
def test_every_kernel(module: Module, many_heads: bool) -> None:
    """Case 14. How keys are dealt changes rounding alone: 2 ulp of a row's largest element.

    f16 weights are rounded against a maximum of some of the keys, so a small element of a row may
    move by more than its own ulp.
    """
    ratio = module.max_ratio if many_heads else 4
    inputs = make(module, [2100, 64, 0, 65, 1], ratio=ratio, max_pages=17, sinks=many_heads)
    exact = reference(inputs)
    call = Call(module, inputs)
    whole = None
    for what, got in call.run_kernels():
        assert_matches(got, inputs, exact, what)
        whole = got.astype(np.float32) if whole is None else whole
        ulp = np.spacing(np.abs(whole).max(-1, keepdims=True).astype(np.float16))
        assert (np.abs(got - whole) <= 2 * ulp.astype(np.float32)).all(), what


def test_two_streams_are_refused(any_module: Module) -> None:
    """Case 15. Neither a hang nor a race: an error, until the workspace is handed over."""
    call = Call(any_module, make(any_module, [2000], max_pages=16))
    launch = call.bind()
    with new_stream() as first, new_stream() as second:
        expected = call.run(launch, first)
        with pytest.raises(ctm_rt.ArgumentError, match=r"^workspace: "):
            launch(second)
        event = driver.event_create()
        driver.event_record(event, first)
        call.workspace.hand_over(second, event)
        assert_same(call.run(launch, second), expected)
        driver.event_destroy(event)


def test_counter_left_set(module: Module) -> None:
    """Case 15. Whoever kills a launch may leave one; it never hangs, and ``reset()`` cures it."""
    call = Call(module, make(module, [2000, 1, 500], max_pages=16))
    launch = call.bind()
    expected = call.run(launch)
    write(call.semaphores, np.ones(call.semaphores.shape, np.int32))
    launch()
    driver.synchronize(0, DEVICE)
    call.workspace.reset()
    assert_same(call.run(launch), expected)


def test_repeats_beside_another_stream(module: Module) -> None:
    """Case 12. Two thousand launches give the same bits while another stream is busy."""
    call = Call(module, make(module, [2000, 129, 64], max_pages=16))
    other = Call(module, make(module, [1500] * 4, seed=1))
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
