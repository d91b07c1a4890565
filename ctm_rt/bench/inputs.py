"""Random inputs that cost little to make: one block, copied over and over on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctm_rt import driver, tree
from ctm_rt.bench.grid import KV_NBYTES, Cell
from ctm_rt.memory import DeviceArray
from ctm_rt.paged_kv import TOKENS_PER_PAGE, UNUSED_PAGE_ENTRY
from ctm_rt.reference import e4m3_to_float
from ctm_rt.tensor import DType, TensorView, packed_strides, view

BLOCK_NBYTES = 1 << 24  # whole pages of every shape

Array = npt.NDArray[Any]


class Pool:
    """Device memory of one KV dtype, as large as any cell asks, and the block it is full of.

    Page p of any shape holds what page p % (pages of the block) of the block holds.
    """

    def __init__(self, kv_dtype: str, nbytes: int, device: int) -> None:
        self.kv_dtype = kv_dtype
        self._block = _random_block(kv_dtype)
        self._memory = view(DeviceArray.empty((max(nbytes, BLOCK_NBYTES),), "u8", device))
        self._fill(self._memory.shape[0])

    def _fill(self, nbytes: int) -> None:
        ptr, device, done = self._memory.ptr, self._memory.device, BLOCK_NBYTES
        with driver.current(device):
            driver.copy_to_device(ptr, self._block.ctypes.data, done, 0)
            while done < nbytes:
                more = min(done, nbytes - done)
                driver.copy_on_device(ptr + done, ptr, more, 0)
                done += more
        driver.synchronize(0, device)

    def on_device(self, cell: Cell) -> TensorView:
        """Return the pages of all sets of ``cell``."""
        shape = (2 * cell.num_sets * cell.num_pages, *_page_shape(cell))
        strides, dtype = packed_strides(shape), DType(self.kv_dtype)
        return self._memory._replace(shape=shape, strides=strides, dtype=dtype)

    def on_host(self, cell: Cell) -> Array:
        """Return the pages of the block."""
        pages: Array = self._block.reshape(-1, *_page_shape(cell))
        return pages


class Pools:
    """The pool of each KV dtype that some cells ask for, made when it is first needed."""

    def __init__(self, cells: Sequence[Cell], device: int) -> None:
        self._cells, self._device = cells, device
        self._made: dict[str, Pool] = {}

    def of(self, cell: Cell) -> Pool:
        """Return the pool that the cell's pages lie in."""
        kind = cell.kv_dtype
        if kind not in self._made:
            needed = max(c.pool_nbytes for c in self._cells if c.kv_dtype == kind)
            self._made[kind] = Pool(kind, needed, self._device)
        return self._made[kind]


def _page_shape(cell: Cell) -> tuple[int, int, int]:
    return TOKENS_PER_PAGE, cell.num_kv_heads, cell.head_dim


def _random_block(kv_dtype: str) -> Array:
    """Return standard normal values; those of e4m3 as bytes."""
    rng = np.random.default_rng(0)
    elems = BLOCK_NBYTES // KV_NBYTES[kv_dtype]
    if kv_dtype == "f16":
        return rng.standard_normal(elems, np.float32).astype(np.float16)
    # Rounding a normal value to a byte is slow in NumPy, so a few are, and then drawn from.
    values = rng.standard_normal(1 << 14, np.float32)
    magnitudes = e4m3_to_float(np.arange(127, dtype=np.uint8))
    nearest = np.searchsorted((magnitudes[1:] + magnitudes[:-1]) / 2, np.abs(values))
    codes = (nearest + 128 * (values < 0)).astype(np.uint8)
    drawn: Array = codes[rng.integers(0, len(codes), elems, np.uint16)]
    return drawn


class Inputs(NamedTuple):
    """What else a cell's launches read; the first axis counts its sets, each with its own pages."""

    q: Array  # of trees with a query axis
    page_table: Array
    seq_lens: Array
    tree_mask: Array | None  # of trees


def make_inputs(cell: Cell) -> Inputs:
    """Make random queries and shuffled pages; a page that is not seen has no entry.

    Each token of a tree has two children.
    """
    rng = np.random.default_rng(1)
    p, num_sets = cell.problem, cell.num_sets
    total = num_sets * cell.num_pages
    ids = np.stack([rng.permutation(total), rng.permutation(total) + total])
    ids = ids.reshape(2, num_sets, cell.num_pages).swapaxes(0, 1)
    table = np.full((num_sets, p.batch, 2, p.max_pages), UNUSED_PAGE_ENTRY, np.int32)
    at = 0
    for b, (first, end) in enumerate(cell.page_spans):
        table[:, b, :, first:end] = ids[:, :, at : at + end - first]
        at += end - first
    tokens = (p.query_len,) if cell.is_tree else ()
    q = rng.standard_normal((num_sets, p.batch, *tokens, p.num_q_heads, p.head_dim), np.float32)
    seq_lens = np.tile(np.array(cell.seq_lens, np.int32), (num_sets, 1))
    tree_mask = None
    if cell.is_tree:
        parents = (np.arange(p.query_len) - 1) // 2
        tree_mask = np.tile(tree.mask([parents]), (num_sets, p.batch, 1, 1))
    return Inputs(q.astype(np.float16), table, seq_lens, tree_mask)


def split_sets(array: object) -> list[TensorView]:
    """Return a view of each set of a packed device array whose first axis counts them."""
    whole = view(array)
    num_sets, *shape = whole.shape
    step = whole.strides[0] * whole.dtype.itemsize
    return [
        whole._replace(ptr=whole.ptr + i * step, shape=tuple(shape), strides=whole.strides[1:])
        for i in range(num_sets)
    ]
