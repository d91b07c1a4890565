"""What has gone wrong for users of such kernels, each reduced to its smallest input.

Exact answers first: with q = 0 every visible key weighs the same, so ``out`` is the mean of V over
the visible keys, and a fault in a mask, a merge, a window or a sink moves a number with a name.
"""

from dataclasses import replace

import numpy as np
import pytest

import ctm_rt
from ctm_rt.reference import e4m3_to_float
from tests.gpu.device import Call, assert_matches, assert_same, decode, place, reference
from tests.gpu.inputs import INT32_MAX, PAGE, POISON, Inputs, Module, make, number, rising_keys

EDGES = [1, 127, 128, 129, 255, 256, 257, 1000]


def zero_q(inputs: Inputs) -> Inputs:
    inputs.q[:] = 0
    return inputs


@pytest.mark.parametrize(("window", "tail"), [(0, None), (0, 448), (1, None), (100, 448)])
def test_mean_at_page_edges(module: Module, window: int, tail: float | None) -> None:
    """Case 1. A finite tail moves the mean, where NaN might be masked by luck."""
    poison = None if tail is None else number(module, tail)
    values = np.arange(module.head_dim) % 7 == np.arange(2)[:, None]
    values = np.where(values, number(module, 2), number(module, -1))
    inputs = zero_q(make(module, EDGES, values=values, poison=poison, sliding_window=window))
    np.testing.assert_array_equal(decode(module, inputs), reference(inputs).astype(np.float16))


def test_mean_of_random_values(module: Module) -> None:
    """Case 1, with every value told apart."""
    inputs = zero_q(make(module, EDGES))
    np.testing.assert_allclose(decode(module, inputs), reference(inputs), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("rest", [np.nan, np.inf, -np.inf])
def test_one_token_is_its_value(module: Module, rest: float) -> None:
    """Case 2. What lies beside the token must not even be multiplied by zero."""
    if module.kv_dtype == "e4m3" and not np.isnan(rest):
        pytest.skip("e4m3 has no infinity")
    poison = POISON[module.kv_dtype] if np.isnan(rest) else rest
    inputs = make(module, [1, 1, 1], poison=poison)
    np.testing.assert_array_equal(decode(module, inputs), reference(inputs).astype(np.float16))


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_beyond_any_sentinel(module: Module, sign: int) -> None:
    """Case 3. Equal scores of +-524,288 at D = 128: a finite "minus infinity" would mask them."""
    key = number(module, sign * (4096 if module.kv_dtype == "f16" else 448))
    values = np.full(module.head_dim, number(module, 2))
    values[::3] = number(module, -0.5)
    inputs = make(module, [1, 64, 129, 1000], keys=key, values=values, scale=1.0)
    inputs.q[:] = 1
    np.testing.assert_array_equal(decode(module, inputs), reference(inputs).astype(np.float16))


def test_scores_that_rise_and_fall(module: Module) -> None:
    """In steps of 46 octaves, for every other head up: what is summed is scaled for that alone."""
    inputs = make(module, [4096], keys=rising_keys(module), scale=1.0)
    inputs.q[:] = 0
    inputs.q[:, ::2, 0], inputs.q[:, 1::2, 0] = 16, -16
    exact = reference(inputs)
    for what, got in Call(module, inputs).run_kernels([(1, 0), (3, 0), (1, 5)]):
        assert_matches(got, inputs, exact, what)


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_without_a_key(module: Module, sinks: bool) -> None:
    """Case 4. Empty groups, CTAs without a tile and warps without a key are merged."""
    inputs = make(module, [1, 0, 130, 17, 0, 65], max_pages=40, sinks=sinks)
    exact = reference(inputs)
    for what, got in Call(module, inputs).run_kernels():
        assert_matches(got, inputs, exact, what)
        assert not got[[1, 4]].any()


def test_every_byte_as_value(module: Module) -> None:
    """Case 7. One token of every e4m3 code, exactly: 448, 2**-9, NaN, -0 as 0."""
    if module.kv_dtype != "e4m3":
        pytest.skip("f16 values are not converted")
    codes = np.arange(256, dtype=np.uint8)
    values = np.broadcast_to(codes[:, None, None], (256, 1, module.head_dim))
    inputs = zero_q(make(module, [1] * 256, values=values, num_kv_heads=1))
    np.testing.assert_array_equal(
        decode(module, inputs),
        np.broadcast_to(e4m3_to_float(codes)[:, None, None], inputs.q.shape),
    )


def test_every_byte_as_key(module: Module) -> None:
    """Beside a key of zeros, so that its weight tells its value; NaN tells itself."""
    if module.kv_dtype != "e4m3":
        pytest.skip("f16 keys are not converted")
    shape = (256, 2, 1, module.head_dim)
    keys, values = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    keys[:, 0] = np.arange(256, dtype=np.uint8)[:, None, None]
    values[:, 0] = number(module, 1)
    tokens = {"keys": keys.reshape(512, 1, -1), "values": values.reshape(512, 1, -1)}
    inputs = make(module, [2] * 256, num_kv_heads=1, **tokens)
    inputs.q[:] = 1
    for scale in (1 / 64, 1.0, 64.0):  # for the large values, the middle and the small ones
        scaled = replace(inputs, scale=scale / module.head_dim)
        # Every element of a row errs alike here: P and the output are rounded once each.
        np.testing.assert_allclose(
            decode(module, scaled), reference(scaled), rtol=2**-10, atol=2**-24
        )


@pytest.mark.parametrize("sinks", [False, True])
def test_pages_outside_the_pool(module: Module, sinks: bool) -> None:
    """Keys behind a table entry outside of the pool are invisible; it is not followed."""
    inputs = make(module, [300, 300, 300], sinks=sinks)
    inputs.page_table[0, 0, 0] = INT32_MAX
    inputs.page_table[0, 1, 1] = -1
    inputs.page_table[1] = len(inputs.kv_pool)
    got = decode(module, inputs)
    assert_matches(got, inputs)
    assert not got[1].any()


def test_lengths_outside_of_the_table(module: Module) -> None:
    """A negative length counts as 0; one past the table as the whole table."""
    inputs = make(module, [0, 256, 5], max_pages=2)
    got = decode(module, replace(inputs, seq_lens=np.array([-5, 10_000, 5], np.int32)))
    assert_same(got, decode(module, inputs))


@pytest.mark.parametrize("sinks", [False, True])
def test_batch_padding(module: Module, sinks: bool) -> None:
    """Case 5. Rows of length 0 with an empty table are zeros and change nothing beside them."""
    padded = make(module, [5, 0, 7, 0], max_pages=2, sinks=sinks)
    padded.page_table[[1, 3]] = -1
    got = decode(module, padded)
    assert not got[[1, 3]].any()
    assert_matches(got, padded)
    calls = [Call(module, inputs) for inputs in (padded, padded.take([0, 2]))]
    for (_, with_padding), (_, without) in zip(*(c.run_kernels() for c in calls), strict=True):
        assert_same(with_padding[[0, 2]], without)


def test_nan_in_one_query(module: Module) -> None:
    """Case 6. It stays in its row."""
    inputs = make(module, [3, 200, 129])
    clean = decode(module, inputs)
    inputs.q[1, 2, 7] = np.nan
    got = decode(module, inputs)
    assert np.isnan(got[1, 2]).all()
    got[1, 2] = clean[1, 2]
    assert_same(got, clean)


@pytest.mark.parametrize("row", [0, 1])
def test_nan_in_a_visible_token(module: Module, row: int) -> None:
    """A NaN that is asked for is not repaired: it shows in the rows that see it, only there."""
    inputs = make(module, [3, 200, 129])
    clean = decode(module, inputs)
    page = inputs.page_table[1, row, 1]
    inputs.kv_pool[page, 150 % PAGE, 1, 9] = POISON[module.kv_dtype]
    got = decode(module, inputs)
    heads = slice(4, 8)
    assert np.isnan(got[1, heads, 9]).all()
    got[1, heads] = clean[1, heads]
    assert_same(got, clean)


def test_sink_of_minus_infinity_is_none(module: Module) -> None:
    """Case 9."""
    inputs = make(module, EDGES)
    sinks = np.full(inputs.num_q_heads, -np.inf, np.float32)
    assert_same(decode(module, replace(inputs, sinks=sinks)), decode(module, inputs))


def test_extreme_sinks(module: Module) -> None:
    """Case 9. One takes all of the mass, one takes none, and each its own head."""
    inputs = make(module, EDGES)
    sinks = np.tile(np.array([1e4, -1e4], np.float32), inputs.num_q_heads // 2)
    got = decode(module, replace(inputs, sinks=sinks))
    assert not got[:, ::2].any()
    assert_same(got[:, 1::2], decode(module, inputs)[:, 1::2])


def test_sink_of_zero_is_one_more_key(module: Module) -> None:
    """With q = 0 the mean shrinks by n / (n + 1), whatever the scale."""
    values = np.broadcast_to(number(module, 1), module.head_dim)
    inputs = zero_q(make(module, EDGES, values=values, scale=0.37))
    sinks = np.zeros(inputs.num_q_heads, np.float32)
    expected = (inputs.seq_lens / (inputs.seq_lens + 1)).astype(np.float16)
    got = decode(module, replace(inputs, sinks=sinks))
    np.testing.assert_allclose(
        got, np.broadcast_to(expected[:, None, None], got.shape), rtol=2**-11
    )


@pytest.mark.parametrize("sinks", ["dtype", "length", "device"])
def test_wrong_sinks_are_refused(any_module: Module, sinks: str) -> None:
    """Case 9."""
    call = Call(any_module, make(any_module, [5], sinks=True))
    host = call.inputs.sinks
    wrong = {
        "dtype": place(host.astype(np.float16)),
        "length": place(host[:-1].copy()),
        "device": host,
    }
    with pytest.raises(ctm_rt.ArgumentError, match=r"^sinks: "):
        call.bind(sinks=wrong[sinks])


@pytest.mark.parametrize("length", [1, 129, 1000])
def test_windows(module: Module, length: int) -> None:
    """Case 10. Left of the window the table holds -1, and its pages NaN."""
    for window in sorted({1, 2, 127, 128, 129, max(1, length - 1), length, length + 1, 10**9}):
        inputs = make(module, [length, max(1, length - 5), 40], sliding_window=window)
        got = decode(module, inputs)
        assert_matches(got, inputs)
        if window >= inputs.seq_lens.max():
            assert_same(got, decode(module, replace(inputs, sliding_window=0)))


def test_head_reads_its_own_kv_head(module: Module) -> None:
    """Case 17. The values of KV head g are 2**g, so head h answers 2 ** (h // ratio)."""
    for ratio in range(1, module.max_ratio + 1):
        marks = [number(module, 2.0**g) for g in range(5)]
        values = np.repeat(np.array(marks)[:, None], module.head_dim, 1)
        inputs = zero_q(make(module, [1, 77, 300], ratio=ratio, num_kv_heads=5, values=values))
        expected = 2.0 ** (np.arange(inputs.num_q_heads) // ratio)
        got = decode(module, inputs)
        np.testing.assert_array_equal(got, np.broadcast_to(expected[:, None], got.shape))


def test_ratio_beyond_the_contract(any_module: Module) -> None:
    """Case 17. It is refused, not computed wrongly."""
    call = Call(any_module, make(any_module, [5], ratio=17, num_kv_heads=1))
    with pytest.raises(ctm_rt.ArgumentError, match=r"^q: "):
        call.bind()


class Strided:
    """A CUDA array interface with the strides that it is told."""

    def __init__(self, owner: object, strides: tuple[int, ...]) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = owner.__cuda_array_interface__ | {"strides": strides}


def test_odd_strides_of_size_one(module: Module) -> None:
    """Case 18. The stride of an axis of one element means nothing."""
    inputs = make(module, [1], ratio=1, num_kv_heads=1, max_pages=1, fused_q=False)
    call = Call(module, inputs)
    expected = call.run()
    strided = {"q": (6, 10, 2), "page_table": (20, 4, 12), "seq_lens": (12,)}  # in bytes
    if module.kv_dtype == "f16":  # this interface cannot say e4m3
        strided["kv_pool"] = (256 * module.head_dim, 2 * module.head_dim, 14, 2)
    odd = {
        name: Strided(ctm_rt.to_device(np.ascontiguousarray(inputs.arrays[name])), strides)
        for name, strides in strided.items()
    }
    assert_same(call.run(call.bind(**odd)), expected)


@pytest.mark.parametrize(("batch", "num_kv_heads"), [(0, 2), (3, 0)])
def test_nothing_to_do(any_module: Module, batch: int, num_kv_heads: int) -> None:
    """Case 19. The call returns, and there is nothing to launch."""
    shape = (batch, 4 * num_kv_heads, any_module.head_dim)
    arrays = (
        np.zeros(shape, np.float16),
        np.zeros((2, PAGE, num_kv_heads, any_module.head_dim), np.float16),
        np.zeros((batch, 2, 1), np.int32),
        np.zeros(batch, np.int32),
    )
    out = ctm_rt.decode_attention(*map(ctm_rt.to_device, arrays), scale=1.0)
    assert ctm_rt.to_host(out).shape == shape
