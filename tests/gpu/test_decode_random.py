"""Random inputs over the whole contract against float64: 6e-4 of the norm of each sequence."""

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.device import DEALINGS, Call, assert_matches, assert_same, decode, reference
from tests.gpu.inputs import Module, make

LENGTHS = [1150, 0, 1, 2, 127, 128, 129, 255, 700]
WINDOWS = (0, 1, 200, 1024)
SCALES = (None, 1.0, 0.37)  # None: that of head_dim


@pytest.mark.parametrize("ratio", range(1, 17))
def test_contract(module: Module, ratio: int) -> None:
    """Ratio, window, sinks, scale, kernel and dealing, over a ragged batch.

    Each ratio meets two windows and a part of the rest; all of that meets all within a few ratios.
    """
    if ratio > module.max_ratio:
        pytest.skip(f"{module.name} serves ratios up to {module.max_ratio}")
    for seed in (2 * ratio, 2 * ratio + 1):
        inputs = make(
            module,
            LENGTHS,
            ratio=ratio,
            num_kv_heads=1 + ratio % 2,
            sliding_window=WINDOWS[seed % 4],
            sinks=seed % 3 > 0,
            scale=SCALES[seed % 5 % 3],
            seed=seed,
        )
        exact = reference(inputs)
        call = Call(module, inputs)
        assert_matches(call.run(), inputs, exact, "as planned")
        for what, got in call.run_kernels(DEALINGS[seed % 3 :: 3]):
            assert_matches(got, inputs, exact, what)


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
    if fused_q and head_major:
        assert_matches(got, inputs)


@pytest.mark.parametrize("max_pages", [1, 40])
@pytest.mark.parametrize("batch", [1, 2, 7, 40, 300])
def test_batches(module: Module, batch: int, max_pages: int) -> None:
    """From one sequence over all SMs to several per SM, in tables tight and wide."""
    lengths = [(b * 37 + 100) % min(128 * max_pages, 300) + 1 for b in range(batch)]
    inputs = make(module, lengths, num_kv_heads=1 + (batch < 100), max_pages=max_pages)
    few = np.arange(0, batch, 1 + batch // 8)  # the reference is slow
    assert_matches(decode(module, inputs)[few], inputs.take(few))


@pytest.mark.parametrize(("batch", "window"), [(40, 0), (40, 700), (1024, 0), (1025, 0)])
def test_a_long_sequence_among_short_ones(module: Module, batch: int, window: int) -> None:
    """The device gives it most of the groups; of a batch beyond that, none has more than one."""
    lengths = np.arange(batch) % 70
    lengths[[3, batch // 2, batch - 1]] = 5000, 0, 2049
    inputs = make(module, lengths, ratio=2, num_kv_heads=2, sliding_window=window)
    few = [0, 1, 2, 3, 4, batch // 2, batch - 2, batch - 1]
    assert_matches(decode(module, inputs)[few], inputs.take(few))


def test_long_sequence(module: Module) -> None:
    """One of 20,000 tokens beside short ones, also on one CTA or cluster alone."""
    inputs = make(module, [20_000, 5, 600], ratio=module.max_ratio, num_kv_heads=1)
    exact = reference(inputs)
    call = Call(module, inputs)
    assert_matches(call.run(), inputs, exact, "as planned")
    for what, got in call.run_kernels([(1, 0), (1, 1)]):
        assert_matches(got, inputs, exact, what)


def test_scales_of_e4m3(module: Module) -> None:
    """Case 8. ``k_scale`` multiplies scores, ``v_scale`` values; tiny and huge ones cancel."""
    if module.kv_dtype != "e4m3":
        pytest.skip("f16 caches have no scales")
    inputs = make(module, LENGTHS)
    for k_scale, v_scale, scale in ((0.25, 3.0, 0.3), (1e-6, 0.01, 1e5)):
        scaled = replace(inputs, k_scale=k_scale, v_scale=v_scale, scale=scale)
        assert_matches(decode(module, scaled), scaled)
