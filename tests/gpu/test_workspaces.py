"""Scratch and counters: shared in turn, never at once; and every number of splits."""

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver
from ctm_rt.decode.plan import MAX_SPLITS
from tests.gpu.device import DEVICE, Call, assert_matches, assert_same, decode, new_stream, write
from tests.gpu.inputs import Module, make


def test_one_workspace_in_turn(module: Module) -> None:
    """Case 13. Shapes A, B, A give what buffers of their own give, and leave it clean."""
    a = make(module, [1000, 3, 129], ratio=3, num_kv_heads=2, max_pages=8)
    b = make(module, [700] * 6, ratio=8, num_kv_heads=3, seed=1)
    workspace = ctm_rt.Workspace(DEVICE)
    for inputs in (a, b, a):
        assert_same(Call(module, inputs, workspace).run(), decode(module, inputs))


@pytest.mark.parametrize("sinks", [False, True])
def test_every_number_of_splits(module: Module, sinks: bool) -> None:
    """Case 14. Splits change rounding alone: 2 ulp of a row's largest element.

    f16 weights are rounded against the maximum of their split, so a small element of a row may move
    by more than its own ulp.
    """
    inputs = make(module, [2100, 64, 65, 1], max_pages=17, sinks=sinks)
    call = Call(module, inputs)
    whole = call.run(call.bind_splits(1))
    assert_matches(whole, inputs)
    ulp = np.spacing(np.abs(whole).max(-1, keepdims=True)).astype(np.float32)
    for num_splits in range(2, MAX_SPLITS + 1):
        got = call.run(call.bind_splits(num_splits))
        assert (np.abs(got.astype(np.float32) - whole) <= 2 * ulp).all(), num_splits


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


@pytest.mark.parametrize("busy", [False, True])
def test_repeats_beside_another_stream(module: Module, busy: bool) -> None:
    """Case 12 in small. Two hundred launches give the same bits, whatever runs beside them."""
    call = Call(module, make(module, [2000, 129, 64], max_pages=16))
    other = Call(module, make(module, [1500] * 4, seed=1))
    launch, beside = call.bind(), other.bind()
    with new_stream() as stream, new_stream() as second:
        expected = call.run(launch, stream)
        other.poison()
        for _ in range(200):
            if busy:
                beside(second)
            launch(stream)
        assert_same(call.result(), expected)
        other.result()
