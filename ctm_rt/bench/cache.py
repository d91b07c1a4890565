"""Time what writes and moves a paged cache: ``python -m ctm_rt.bench.cache`` prints a table.

Each case is a graph of launches on different inputs, and the GPU's L2 is overwritten before each of
its replays, so that nothing is found in it.
"""

import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ctm_rt import driver
from ctm_rt.bench.grid import COLD_NBYTES, KV_NBYTES
from ctm_rt.memory import DeviceArray, to_device
from ctm_rt.modules.kernel import Launch
from ctm_rt.paged_kv import TOKENS_PER_PAGE as PAGE
from ctm_rt.paged_kv import bind_append, bind_copy_pages, bind_gather, ceil_div
from ctm_rt.tensor import DType, TensorView, packed_strides, view

COPY_TB_PER_S = 4.27  # of a device copy on an H200, read and written: the floor
KV_HEADS = 8
MAX_SETS = 100
REPLAYS, WARM_UP = 12, 2
FLUSH_NBYTES = 1 << 28
BUFFER_NBYTES = 1 << 30  # of the pool, and of what is not paged


class Case(NamedTuple):
    """One launch: what it does to how many sequences, or moves, of how many tokens each."""

    what: str  # append, copy_pages, gather
    kv_dtype: str
    head_dim: int
    num_items: int
    tokens: int

    @property
    def name(self) -> str:
        """Words such as ``append e4m3 d128 b32 t1``."""
        return f"{self.what} {self.kv_dtype} d{self.head_dim} b{self.num_items} t{self.tokens}"

    @property
    def elems(self) -> int:
        """Elements of K and V."""
        return 2 * self.num_items * self.tokens * KV_HEADS * self.head_dim

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        read = 2 if self.what == "append" else KV_NBYTES[self.kv_dtype]
        return self.elems * (read + KV_NBYTES[self.kv_dtype])

    @property
    def floor_us(self) -> float:
        """The time of a device copy of as many bytes."""
        return self.nbytes / COPY_TB_PER_S / 1e6

    @property
    def num_sets(self) -> int:
        """How many inputs take turns."""
        fits = BUFFER_NBYTES // self.nbytes
        return max(1, min(MAX_SETS, fits, ceil_div(int(COLD_NBYTES), self.nbytes)))


CASES = (
    *(Case("append", *rest) for rest in product(KV_NBYTES, (64, 128), (1, 32, 256), (1, PAGE))),
    *(Case("copy_pages", *rest) for rest in product(KV_NBYTES, (64, 128), (1, 32, 256), (PAGE,))),
    *(Case("gather", *rest) for rest in product(KV_NBYTES, (64, 128), (1, 32), (8 * PAGE,))),
)


def run(cases: Iterable[Case], device: int) -> list[dict[str, Any]]:
    """Return the figures of each case."""
    with driver.current(device):
        stream = driver.stream_create()
        bench = _Bench(device)
        rows = []
        for case in cases:
            us = cold_us(bench.launches(case), device, stream)
            floor = case.floor_us
            row = {"name": case.name, "nbytes": case.nbytes, "us": us, "floor_us": floor}
            rows.append(row | {"allowed_us": 1.3 * floor + 3})
        driver.stream_destroy(stream)
    return rows


def cold_us(launches: Sequence[Launch], device: int, stream: int) -> float:
    """Return the time of one of ``launches``: the median of the replays of their graph."""
    flush = DeviceArray.empty((FLUSH_NBYTES,), "u8", device)
    times = []

    def queue() -> None:
        for launch in launches:
            launch(stream)

    with driver.current(device):
        graph = driver.graph_create(queue, stream)
        start, stop = (driver.event_create(timing=True) for _ in range(2))
        for _ in range(WARM_UP + REPLAYS):
            driver.fill_zero(flush.ptr, flush.nbytes, stream)
            driver.event_record(start, stream)
            driver.graph_launch(graph, stream)
            driver.event_record(stop, stream)
            driver.synchronize(stream, device)
            times.append(driver.event_elapsed_us(start, stop))
        driver.graph_destroy(graph)
        for event in (start, stop):
            driver.event_destroy(event)
    return statistics.median(times[WARM_UP:]) / len(launches)


class _Bench:
    """Memory that all cases share; what is in it does not matter."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pages, self._dense = (
            view(DeviceArray.empty((BUFFER_NBYTES,), "u8", device)) for _ in range(2)
        )
        self._rng = np.random.default_rng(0)

    def launches(self, case: Case) -> list[Launch]:
        """Return a launch for each set of the case's inputs."""
        bind = {"append": self._appends, "copy_pages": self._copies, "gather": self._gathers}
        return bind[case.what](case)

    def _appends(self, case: Case) -> list[Launch]:
        """To two pages a sequence; of each set other tokens."""
        shape = (case.num_items, case.tokens, KV_HEADS, case.head_dim)
        pool, table = (
            self._pool(case, 2 * case.num_items),
            self._table(2 * case.num_items, case.num_items),
        )
        scales = {} if case.kv_dtype == "f16" else {"k_scale": 0.37, "v_scale": 0.5}
        launches = []
        for i in range(case.num_sets):
            k, v = (_carve(self._dense, 2 * i + half, shape, "f16") for half in range(2))
            lengths = self._rng.integers(case.tokens, 2 * PAGE + 1, case.num_items)
            launches.append(bind_append(k, v, pool, table, self._upload(lengths), **scales))
        return launches

    def _copies(self, case: Case) -> list[Launch]:
        pages = 2 * case.num_items * case.num_sets
        pool = self._pool(case, pages)
        moves = self._rng.permutation(pages).reshape(case.num_sets, case.num_items, 2)
        return [bind_copy_pages(pool, self._upload(each)) for each in moves]

    def _gathers(self, case: Case) -> list[Launch]:
        shape = (case.num_items, 2, KV_HEADS, case.tokens, case.head_dim)
        pages = case.num_items * case.tokens // PAGE
        pool = self._pool(case, pages * case.num_sets)
        lengths = self._upload(np.full(case.num_items, case.tokens))
        return [
            bind_gather(
                pool,
                self._table(pages, case.num_items, i * pages, case.num_sets),
                lengths,
                out=_carve(self._dense, i, shape, case.kv_dtype),
            )
            for i in range(case.num_sets)
        ]

    def _pool(self, case: Case, num_pages: int) -> TensorView:
        shape = (2 * num_pages, PAGE, KV_HEADS, case.head_dim)
        return _carve(self._pages, 0, shape, case.kv_dtype)

    def _table(self, pages: int, batch: int, first: int = 0, num_sets: int = 1) -> DeviceArray:
        """Return a table of shuffled pages, those from ``first`` on."""
        ids = first + self._rng.permutation(pages).reshape(batch, pages // batch)
        return self._upload(np.stack([ids, ids + pages * num_sets], axis=1))

    def _upload(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        return to_device(array.astype(np.int32), device=self._device)


def _carve(memory: TensorView, index: int, shape: tuple[int, ...], dtype: str) -> TensorView:
    """Return the ``index``-th array of this shape in the memory."""
    strides, kind = packed_strides(shape), DType(dtype)
    nbytes = strides[0] * shape[0] * kind.itemsize
    if (index + 1) * nbytes > memory.shape[0]:
        raise ValueError(f"array {index} of {shape} does not fit {memory.shape[0]} bytes")
    return memory._replace(
        ptr=memory.ptr + index * nbytes, shape=shape, strides=strides, dtype=kind
    )


def main() -> None:
    """Print the table."""
    driver.init()
    print(f"{driver.device_name(0)}, cold; floor: a device copy at {COPY_TB_PER_S} TB/s\n")
    print("| launch | MB read and written | us | floor | 1.3 floor + 3 |")
    print("| --- | --- | --- | --- | --- |")
    for row in run(CASES, 0):
        figures = (f"{row[name]:.2f}" for name in ("us", "floor_us", "allowed_us"))
        print(f"| {row['name']} | {row['nbytes'] / 1e6:.3f} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
