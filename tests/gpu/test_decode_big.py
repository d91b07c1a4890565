"""Sizes at which an index overflows."""

import cuda.bindings.driver as cu
import numpy as np
import pytest

from ctm_rt import driver
from ctm_rt.memory import DeviceArray
from ctm_rt.tensor import DType, TensorView, view
from tests.gpu.device import DEVICE, Call, assert_matches, assert_same, decode, fill_nan, write
from tests.gpu.inputs import PAGE, Module, make
from tests.gpu.trees import TreeCall, assert_tree_matches, decode_tree, make_tree


@pytest.mark.parametrize("exponent", [31, 32])
def test_pool_beyond_32_bits(module: Module, exponent: int) -> None:
    """Case 16. K and V lie past 2**exponent elements, at the ends of their halves; else NaN."""
    small = make(module, [300, 129], ratio=1, num_kv_heads=8)
    call = Call(module, small)
    assert_matches(call.run(call.bind(kv_pool=far_pool(call, exponent))), small)


def test_pool_of_a_tree_beyond_32_bits(tree_module: Module) -> None:
    """Case 16."""
    small = make_tree(tree_module, [300, 129], 9, ratio=1, num_kv_heads=8)
    call = TreeCall(tree_module, small)
    assert_tree_matches(call.run(call.bind(kv_pool=far_pool(call, 32))), small)


def far_pool(call: Call, exponent: int) -> TensorView:
    """Return a pool that ends with the pages of ``call``, whose table is overwritten for it."""
    module, small = call.module, call.inputs
    used = len(small.kv_pool) // 2
    page_elems = PAGE * 8 * module.head_dim
    num_pages = 2**exponent // page_elems + used
    shape, dtype = (2 * num_pages, PAGE, 8, module.head_dim), DType(module.kv_dtype)
    page_nbytes = page_elems * dtype.itemsize
    free, _ = driver.check("cuMemGetInfo", cu.cuMemGetInfo())
    if free < 2 * num_pages * page_nbytes + 2**30:
        pytest.skip(f"{free / 1e9:.0f} GB of device memory are too few")

    pool = view(DeviceArray.empty(shape, dtype, DEVICE))
    fill_nan(pool.ptr, 2 * num_pages * page_nbytes)
    halves = small.kv_pool[:used], small.kv_pool[used:]
    for pages, end in zip(halves, (num_pages, 2 * num_pages), strict=True):
        write(pool._replace(ptr=pool.ptr + (end - used) * page_nbytes), pages)
    moved = np.where(
        (small.page_table >= 0) & (small.page_table < 2 * used),
        small.page_table + (num_pages - used) * np.array([[1], [2]]),
        -1,
    )
    write(call.arrays["page_table"], moved.astype(np.int32))
    return pool


def test_batch_beyond_16_bits(module: Module) -> None:
    """More sequences than a grid has rows in y and z; fifty, repeated, share their pages."""
    fifty = make(module, np.arange(50) * 5, ratio=1, num_kv_heads=1)
    got = decode(module, fifty.take(np.arange(70_000) % 50))
    assert_matches(got[:50], fifty)
    assert_same(got.reshape(-1, *fifty.q.shape), np.broadcast_to(got[:50], (1400, *fifty.q.shape)))


def test_batch_of_trees_beyond_16_bits(tree_module: Module) -> None:
    """Trees of two tokens, likewise."""
    fifty = make_tree(tree_module, np.arange(50) * 5, 2, ratio=1, num_kv_heads=1)
    got = decode_tree(tree_module, fifty.take(np.arange(70_000) % 50))
    assert_tree_matches(got[:50], fifty)
    assert_same(got.reshape(-1, *fifty.q.shape), np.broadcast_to(got[:50], (1400, *fifty.q.shape)))
