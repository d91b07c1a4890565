"""A decode loop in one CUDA graph: count, append and attend, 256 replays."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ctm_rt
from ctm_rt import driver, paged_kv, reference
from tests.gpu.caches import Cache, on_device
from tests.gpu.device import DEVICE, TOLERANCE, capture, new_stream, write
from tests.gpu.inputs import Module

STEPS, CHECKED = 256, 15  # every 15th step, so that all places in a page come up


def test_decode_reads_what_append_wrote(module: Module) -> None:
    """Three sequences, one from nothing, two over page edges; the rest of the pool is any bits."""
    lengths = np.array([0, 120, 250], np.int32)
    batch, heads, ratio, head_dim = 3, 2, 3, module.head_dim
    fp8 = module.kv_dtype == "e4m3"
    scales = {"k_scale": 0.05, "v_scale": 0.02} if fp8 else {}
    rng = np.random.default_rng(0)
    cache = Cache(module.kv_dtype, heads, head_dim, batch, 4)
    # What was there before is as random as what is appended.
    old = rng.standard_normal((2, batch, 250, heads, head_dim)).astype(np.float16)
    reference.append(*old, cache.pool, cache.table, lengths, num_tokens=lengths, **scales)
    seq_lens, table = on_device(lengths), on_device(cache.table)
    arrays = cache.device_pool, table, seq_lens
    paged_kv.append(*map(on_device, old), *arrays, num_tokens=on_device(lengths), **scales)

    q, k, v = (np.zeros((batch, n, head_dim), np.float16) for n in (heads * ratio, heads, heads))
    device_q, device_k, device_v = map(on_device, (q, k, v))
    out = ctm_rt.to_device(q)
    launches = (
        paged_kv.bind_advance(seq_lens),
        paged_kv.bind_append(device_k, device_v, *arrays, **scales),
        ctm_rt.bind_decode(device_q, *arrays, scale=head_dim**-0.5, out=out, **scales),
    )
    with new_stream() as stream:
        replay = capture(stream, *launches)
        for step in range(STEPS):
            q, k, v = (rng.standard_normal(a.shape).astype(np.float16) for a in (q, k, v))
            for device, host in ((device_q, q), (device_k, k), (device_v, v)):
                write(device, host)
            replay()
            driver.synchronize(stream, DEVICE)
            reference.advance(lengths)
            reference.append(k, v, cache.pool, cache.table, lengths, **scales)
            if step % CHECKED and step != STEPS - 1:
                continue
            exact = reference.decode_attention(
                q, cache.pool, cache.table, lengths, scale=head_dim**-0.5, **scales
            )
            error = np.linalg.norm(ctm_rt.to_host(out) - exact, axis=(1, 2))
            assert (error <= TOLERANCE * np.linalg.norm(exact, axis=(1, 2))).all(), step
    np.testing.assert_array_equal(ctm_rt.to_host(seq_lens), lengths)


def test_the_example() -> None:
    """A small transformer decodes as a dense model does."""
    pytest.importorskip("cupy")
    command = [sys.executable, "-m", "examples.decode_loop"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
