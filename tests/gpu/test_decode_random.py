"""Random inputs over the whole contract against float64: 6e-4 of the norm of each sequence."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ctm_rt.decode.plan import MAX_SPLITS
from tests.gpu.device import Call, assert_matches, assert_same, decode, reference
from tests.gpu.inputs import Module, make

LENGTHS = [1150, 0, 1, 2, 127, 128, 129, 255, 3000]


@pytest.mark.parametrize("window", [0, 1, 200, 1024])
@pytest.mark.parametrize("ratio", range(1, 17))
def test_contract(module: Module, ratio: int, window: int) -> None:
    """Ratio, window, sinks, scale and splits, over a ragged batch."""
    if ratio > module.max_ratio:
        pytest.skip(f"{module.name} serves ratios up to {module.max_ratio}")
    shapes = {"ratio": ratio, "num_kv_heads": 1 + ratio % 2, "sliding_window": window}
    drawn = make(module, LENGTHS, sinks=True, seed=ratio, **shapes)
    for scale, sinks in itertools.product((drawn.scale, 1.0, 0.37), (None, drawn.sinks)):
        inputs = replace(drawn, scale=scale, sinks=sinks)
        exact = reference(inputs)
        call = Call(module, inputs)
        for launch in (call.bind(), call.bind_splits(1), call.bind_splits(MAX_SPLITS)):
            assert_matches(call.run(launch), inputs, exact)


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("fused_q", [False, True])
def test_layouts(module: Module, fused_q: bool, head_major: bool) -> None:
    """The strides of q and of the pool are the caller's; the answer is the same in every bit."""
    layouts = {"fused_q": fused_q, "head_major": head_major}
    inputs = make(module, LENGTHS, ratio=5, num_kv_heads=3, **layouts)
    got = decode(module, inputs)
    packed = replace(inputs, q=inputs.q.copy(), kv_pool=inputs.kv_pool.copy())
    assert packed.kv_pool.flags.c_contiguous
    assert_same(got, decode(module, packed))
    assert_matches(got, inputs)


@pytest.mark.parametrize("max_pages", [1, 24, 400])
@pytest.mark.parametrize("batch", [1, 2, 7, 40, 300])
def test_batches(module: Module, batch: int, max_pages: int) -> None:
    """From one sequence over all SMs to several per SM, in tables tight and wide."""
    lengths = [(b * 37 + 100) % min(128 * max_pages, 300) + 1 for b in range(batch)]
    inputs = make(module, lengths, max_pages=max_pages)
    few = np.arange(0, batch, 1 + batch // 8)  # the reference is slow
    assert_matches(decode(module, inputs)[few], inputs.take(few))


def test_long_sequence(module: Module) -> None:
    """One of 40,000 tokens beside short ones."""
    inputs = make(module, [40_000, 5, 600], ratio=module.max_ratio, num_kv_heads=1)
    assert_matches(decode(module, inputs), inputs)


def test_scales_of_e4m3(module: Module) -> None:
    """Case 8. ``k_scale`` multiplies scores, ``v_scale`` values; tiny and huge ones cancel."""
    if module.kv_dtype != "e4m3":
        pytest.skip("f16 caches have no scales")
    inputs = make(module, LENGTHS)
    for k_scale, v_scale, scale in ((0.25, 3.0, 0.3), (1e-6, 0.01, 1e5)):
        scaled = replace(inputs, k_scale=k_scale, v_scale=v_scale, scale=scale)
        assert_matches(decode(module, scaled), scaled)
