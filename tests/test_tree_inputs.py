"""The inputs and the fast answer of the GPU tests of trees, against the definition."""

import numpy as np
import pytest

from ctm_rt import tree
from tests.gpu.inputs import PAGE, Module
from tests.gpu.trees import exact, make_tree, tree_reference

F16, E4M3 = Module("fmha_decode_tree_f16_d32", "f16", 32), Module("", "e4m3", 64)
LENGTHS = [5, 0, 3, 129, 300, -4, 128]


@pytest.mark.parametrize("module", [F16, E4M3], ids=["f16", "e4m3"])
@pytest.mark.parametrize("query_len", [1, 5, 33])
@pytest.mark.parametrize(("window", "per_row"), [(0, False), (2, False), (2, True), (40, True)])
@pytest.mark.parametrize("sinks", [False, True])
def test_the_fast_answer_is_the_definition(module, query_len, window, per_row, sinks):
    """Also that nothing which is seen is poisoned: both are finite."""
    options = {"sliding_window": window, "contiguous_query_swa": per_row, "sinks": sinks}
    inputs = make_tree(module, LENGTHS, query_len, ratio=3, max_pages=3, **options)
    expected = tree_reference(inputs)
    np.testing.assert_allclose(exact(inputs), expected, rtol=1e-10, atol=1e-12)
    assert np.isfinite(expected).all()
    few = inputs.take([4, 0])
    np.testing.assert_array_equal(exact(few), exact(inputs)[[4, 0]])


def test_pages_outside_the_pool_and_lengths_outside_the_table():
    inputs = make_tree(F16, [256, 200, 256], 5, max_pages=2)
    inputs.page_table[0, 1, 1] = -1
    inputs.page_table[1] = len(inputs.kv_pool)
    inputs.seq_lens[2] = 10_000
    np.testing.assert_allclose(exact(inputs), tree_reference(inputs), rtol=1e-10, atol=1e-12)
    assert not exact(inputs)[1].any()


def test_scales():
    inputs = make_tree(E4M3, LENGTHS, 4)
    scaled = type(inputs)(**{**vars(inputs), "k_scale": 0.5, "v_scale": 3.0, "scale": 0.7})
    np.testing.assert_allclose(exact(scaled), tree_reference(scaled), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("words", [None, 4])
def test_masks_are_what_they_say_among_garbage(words):
    visible = np.random.default_rng(0).random((2, 33, 33)) < 0.5
    inputs = make_tree(F16, [60, 40], 33, visible=visible, mask_words=words)
    np.testing.assert_array_equal(tree.unpack(np.ascontiguousarray(inputs.tree_mask)), visible)
    assert inputs.tree_mask.shape == (2, 33, words or 2)
    spare = inputs.tree_mask[:, :, 1] >> 1
    assert len(np.unique(spare)) > 30
    assert not inputs.tree_mask.flags.c_contiguous


def test_what_no_row_sees_is_poison():
    visible = np.ones((1, 4, 4), bool)
    visible[:, :, 1] = False
    inputs = make_tree(F16, [PAGE + 2], 4, visible=visible)
    pages, at = inputs.page_table[0, :, 0], PAGE - 1  # draft 1 is the last token of page 0
    assert np.isnan(inputs.kv_pool[pages, at]).all()
    assert np.isfinite(inputs.kv_pool[pages, at - 1]).all()


def test_the_first_queries():
    """Draft 0 of 5 lies where draft 28 of 33 did."""
    inputs = make_tree(F16, [200, 40], 33)
    few = inputs.first(5)
    np.testing.assert_array_equal(few.q, inputs.q[:, :5])
    np.testing.assert_allclose(exact(few), tree_reference(few), rtol=1e-10, atol=1e-12)
