"""CUDA graphs: a captured launch serves whatever lengths and tables its buffers hold later."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ctm_rt
from tests.gpu.device import (
    Call,
    assert_matches,
    assert_same,
    capture,
    capturing,
    copy_module,
    decode,
    new_stream,
    write,
)
from tests.gpu.inputs import Module, make


@pytest.mark.parametrize("sinks", [False, True])
def test_replay_with_other_lengths(module: Module, sinks: bool) -> None:
    """Lengths grow, shrink and vanish between replays; the table changes with them."""
    longest = make(module, [1500, 1500, 1500, 1500], max_pages=12, sinks=sinks)
    call = Call(module, longest)
    launch = call.bind()
    with new_stream() as stream:
        call.run(launch, stream)  # the buffers exist and the workspace has its stream
        replay = capture(stream, launch)
        for lengths in ([1500, 1, 0, 128], [129, 1499, 77, 0], [1, 2, 3, 4]):
            # Any prefix of a poisoned sequence is one too, once its table ends with it.
            seq_lens = np.array(lengths, np.int32)
            shuffled = longest.page_table[[2, 0, 3, 1]].copy()
            for row, length in zip(shuffled, lengths, strict=True):
                row[:, -(-length // 128) :] = -1
            inputs = replace(longest, page_table=shuffled, seq_lens=seq_lens)
            write(call.arrays["page_table"], shuffled)
            write(call.arrays["seq_lens"], seq_lens)
            got = call.run(lambda _: replay(), stream)
            assert_matches(got, inputs)
            assert_same(got, decode(module, inputs))


def test_many_launches_in_one_graph(module: Module) -> None:
    """Ten launches in a row share a workspace inside one graph, counters clean between them."""
    call = Call(module, make(module, [2000, 129], max_pages=16))
    launch = call.bind()
    with new_stream() as stream:
        expected = call.run(launch, stream)
        replay = capture(stream, *[launch] * 10)
        assert_same(call.run(lambda _: replay(), stream), expected)


def test_first_use_inside_capture(any_module: Module, tmp_path: Path) -> None:
    """Case 26. Loading would break the capture: it is refused, and the error says what to do."""
    path = copy_module(any_module, tmp_path)
    call = Call(any_module, make(any_module, [300]))
    with new_stream() as stream:
        with capturing(stream), pytest.raises(ctm_rt.ModuleError, match=r"load\("):
            ctm_rt.load(path, stream=stream)
        launch = call.bind_kernel(0, 2, 0, ctm_rt.load(path))
        expected = call.run(launch, stream)
        replay = capture(stream, launch)
        assert_same(call.run(lambda _: replay(), stream), expected)
