"""Time launches on the device, in CUDA graphs."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from ctm_rt import driver

REPLAYS, WARM_UP = 20, 3

Loop = Sequence[Callable[[int], object]]


def launch_us(loops: Sequence[Loop], rounds: int, device: int, stream: int) -> list[float]:
    """Return for each of ``loops`` the time of one of its launches.

    Each becomes a graph that repeats it ``rounds`` times. The graphs take turns, queued without a
    gap; the median of their replays counts.
    """
    with driver.current(device):
        graphs = [_graph(launches, rounds, stream) for launches in loops]
        events = [
            driver.event_create(timing=True) for _ in range(len(loops) * (WARM_UP + REPLAYS) + 1)
        ]
        driver.event_record(events[0], stream)
        for i, event in enumerate(events[1:]):
            driver.graph_launch(graphs[i % len(graphs)], stream)
            driver.event_record(event, stream)
        times = [driver.event_elapsed_us(*pair) for pair in pairwise(events)]
        for graph in graphs:
            driver.graph_destroy(graph)
        for event in events:
            driver.event_destroy(event)
    return [
        statistics.median(times[i :: len(loops)][WARM_UP:]) / (rounds * len(launches))
        for i, launches in enumerate(loops)
    ]


def _graph(launches: Loop, rounds: int, stream: int) -> int:
    def queue() -> None:
        for _ in range(rounds):
            for launch in launches:
                launch(stream)

    return driver.graph_create(queue, stream)
