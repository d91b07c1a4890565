"""What a call costs the host, and how long a fresh process takes to its first result."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ctm_rt import driver
from ctm_rt.decode.attention import bind_decode, decode_attention
from ctm_rt.memory import DeviceArray, Workspace, to_device

REPEATS, WARM_UP = 20, 3
CALLS = 200  # in a burst: fewer than the launch queue holds


def host_us(device: int, stream: int) -> dict[str, float]:
    """Return the host's time of a bare launch, of a bound call and of an unbound one."""
    call: dict[str, Any] = {
        "q": to_device(np.ones((1, 32, 128), np.float16), device=device),
        "kv_pool": to_device(np.ones((2, 128, 8, 128), np.float16), device=device),
        "page_table": to_device(np.array([[[0], [1]]], np.int32), device=device),
        "seq_lens": to_device(np.array([128], np.int32), device=device),
        "out": DeviceArray.empty((1, 32, 128), "f16", device),
        "scale": 1.0,
        "workspace": Workspace(device),
    }
    launch = bind_decode(**call)
    with driver.current(device):
        rivals: dict[str, Callable[[], object]] = {
            "cuLaunchKernel": driver.bare_launch(stream),
            "Launch.__call__": lambda: launch(stream),
            "decode_attention": lambda: decode_attention(**call, stream=stream),
        }
        return {name: _call_us(function, device, stream) for name, function in rivals.items()}


def _call_us(function: Callable[[], object], device: int, stream: int) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
        driver.synchronize(stream, device)
    return statistics.median(times[WARM_UP:])


_FIRST_RESULT = """
import json, sys, time
device = int(sys.argv[1])
start = time.perf_counter()
import numpy as np
import ctm_rt
imported = time.perf_counter()
with ctm_rt.driver.current(device):
    context = time.perf_counter()
arrays = (
    np.ones((1, 32, 128), np.float16),
    np.ones((4, 128, 8, 128), np.float16),
    np.array([[[1, 0], [2, 3]]], np.int32),
    np.array([200], np.int32),
)
arrays = [ctm_rt.to_device(array, device=device) for array in arrays]
out = ctm_rt.to_host(ctm_rt.decode_attention(*arrays, scale=1.0))
done = time.perf_counter()
assert (out == 1).all()
seconds = {"import": imported - start, "context": context - imported, "call": done - context}
print(json.dumps(seconds))
"""


def first_result_s(device: int) -> dict[str, float]:
    """Return the seconds of a fresh process: import, the driver's context, the first call."""
    command = [sys.executable, "-c", _FIRST_RESULT, str(device)]
    seconds: dict[str, float] = json.loads(subprocess.check_output(command))
    return seconds
