"""Random trees over the whole contract against float64: 6e-4 of the norm of each token's output."""

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.device import DEALINGS, assert_same
from tests.gpu.inputs import Module
from tests.gpu.trees import TreeCall, assert_tree_matches, decode_tree, exact, make_tree

QUERY_LENS = (*range(1, 41), 63, 64, 65, 127, 128)
WINDOWS = (0, 1, 70, 200)
SCALES = (None, 1.0, 0.37)  # None: that of head_dim


@pytest.mark.parametrize("ratio", [1, 3, 4, 7, 8, 16])
def test_every_number_of_queries(tree_module: Module, ratio: int) -> None:
    """The first so many of the rows of one tree; the draft moves to the end of the cache."""
    whole = make_tree(tree_module, [260, 128, 41], 128, ratio=ratio, num_kv_heads=1)
    call = TreeCall(tree_module, whole)
    for query_len in QUERY_LENS:
        inputs = whole.first(query_len)
        few = {name: call.arrays[name] for name in ("q", "tree_mask")} | {"out": call.out}
        for name, array in few.items():
            batch, _, *rest = array.shape
            few[name] = array._replace(shape=(batch, query_len, *rest))
        got = call.run(call.bind(**few))
        assert np.isnan(got[:, query_len:]).all(), "written past the last query"
        assert_tree_matches(got[:, :query_len], inputs)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_contract(tree_module: Module, ratio: int) -> None:
    """Ratio, queries, windows, sinks, scale, kernel and dealing, over a ragged batch.

    Each ratio meets a part of the rest; all of that meets all within a few ratios.
    """
    query_len = (1, 2, 5, 9, 16, 31, 33, 50)[ratio % 8]
    inputs = make_tree(
        tree_module,
        [420, 0, 1, query_len, query_len + 1, 127, 129, 256],
        query_len,
        ratio=ratio,
        num_kv_heads=1 + ratio % 2,
        sliding_window=WINDOWS[ratio % 4],
        contiguous_query_swa=ratio % 3 == 0,
        sinks=ratio % 5 > 1,
        scale=SCALES[ratio % 3],
        seed=ratio,
    )
    expected = exact(inputs)
    call = TreeCall(tree_module, inputs)
    assert_tree_matches(call.run(), inputs, expected, "as planned")
    for what, got in call.run_kernels(DEALINGS[ratio % 4 :: 4]):
        assert_tree_matches(got, inputs, expected, what)


def test_layouts(tree_module: Module) -> None:
    """The strides of q, of the mask and of the pool are the caller's; the bits are the same."""
    inputs = make_tree(tree_module, [300, 7, 20], 7, ratio=5, num_kv_heads=3, head_major=True)
    got = decode_tree(tree_module, inputs)
    assert_tree_matches(got, inputs)
    packed = {name: getattr(inputs, name).copy() for name in ("q", "tree_mask", "kv_pool")}
    assert not any(getattr(inputs, name).flags.c_contiguous for name in packed)
    assert_same(got, decode_tree(tree_module, replace(inputs, **packed)))


@pytest.mark.parametrize("max_pages", [1, 40])
@pytest.mark.parametrize(("batch", "query_len"), [(1, 3), (2, 40), (7, 16), (40, 3), (150, 20)])
def test_batches(tree_module: Module, batch: int, query_len: int, max_pages: int) -> None:
    """From one sequence over all SMs to several per SM, in tables tight and wide."""
    lengths = [(b * 37 + 100) % min(128 * max_pages, 300) + 1 for b in range(batch)]
    inputs = make_tree(tree_module, lengths, query_len, max_pages=max_pages, ratio=2)
    few = np.arange(0, batch, 1 + batch // 8)
    assert_tree_matches(decode_tree(tree_module, inputs)[few], inputs.take(few))


@pytest.mark.parametrize(("batch", "window"), [(40, 0), (40, 700), (1024, 0), (1025, 0)])
def test_a_long_sequence_among_short_ones(tree_module: Module, batch: int, window: int) -> None:
    """The device gives it most of the groups; of a batch beyond that, none has more than one."""
    lengths = np.arange(batch) % 70
    lengths[[3, batch // 2, batch - 1]] = 5000, 0, 2049
    options = {"sliding_window": window, "contiguous_query_swa": window > 0}
    inputs = make_tree(tree_module, lengths, 5, ratio=2, num_kv_heads=1, **options)
    few = [0, 1, 2, 3, 4, batch // 2, batch - 2, batch - 1]
    assert_tree_matches(decode_tree(tree_module, inputs)[few], inputs.take(few))


@pytest.mark.parametrize("query_len", [4, 100])
def test_long_sequence(tree_module: Module, query_len: int) -> None:
    """One of 20,000 tokens beside short ones, also on one CTA or cluster alone."""
    inputs = make_tree(tree_module, [20_000, 5, 600], query_len, num_kv_heads=1)
    expected = exact(inputs)
    call = TreeCall(tree_module, inputs)
    assert_tree_matches(call.run(), inputs, expected, "as planned")
    for what, got in call.run_kernels([(1, 0), (1, 1)]):
        assert_tree_matches(got, inputs, expected, what)


@pytest.mark.parametrize("query_len", [4, 100])
def test_long_sequence_with_holes(tree_module: Module, query_len: int) -> None:
    """Half of its pages lie outside the pool: the fast way through tiles ends anywhere."""
    inputs = make_tree(tree_module, [20_000], query_len, num_kv_heads=1)
    pages = inputs.page_table.shape[2] - 2  # the draft's own are left
    holes = np.random.default_rng(1).random(pages) < 0.5
    inputs.page_table[0, 0, :pages][holes] = -1
    expected = exact(inputs)
    call = TreeCall(tree_module, inputs)
    assert_tree_matches(call.run(), inputs, expected, "as planned")
    for what, got in call.run_kernels([(1, 0), (3, 0)]):
        assert_tree_matches(got, inputs, expected, what)


def test_scales_of_e4m3(tree_module: Module) -> None:
    """Case 8. ``k_scale`` multiplies scores, ``v_scale`` values; tiny and huge ones cancel."""
    if tree_module.kv_dtype != "e4m3":
        pytest.skip("f16 caches have no scales")
    inputs = make_tree(tree_module, [300, 9, 130], 9)
    for k_scale, v_scale, scale in ((0.25, 3.0, 0.3), (1e-6, 0.01, 1e5)):
        scaled = replace(inputs, k_scale=k_scale, v_scale=v_scale, scale=scale)
        assert_tree_matches(decode_tree(tree_module, scaled), scaled)
