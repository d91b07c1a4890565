import numpy as np
import pytest

import ctm_rt


def test_validate_finds_what_is_needed_and_wrong(fake):
    table = np.zeros((3, 2, 4), np.int32)
    table[0, 0] = [0, 16, -1, 2**31 - 1]
    table[1, 1, :2] = -1
    lengths = np.array([300, 128, -5], np.int32)
    everything = [(0, 0, 1), (0, 0, 2), (1, 1, 0)]
    assert ctm_rt.validate(table, lengths, 8) == everything
    on_device = map(ctm_rt.to_device, (table, lengths))
    assert ctm_rt.validate(*on_device, 8) == everything
    assert ctm_rt.validate(table, lengths, 9) == [(0, 0, 2), (1, 1, 0)]
    lengths[:] = 10**9
    table[1:] = 0
    assert ctm_rt.validate(table, lengths, 8) == [(0, 0, 1), (0, 0, 2), (0, 0, 3)]


@pytest.mark.parametrize(
    ("window", "query_len", "first"), [(0, 1, 0), (44, 1, 2), (45, 1, 1), (44, 2, 1), (10**9, 1, 0)]
)
def test_validate_skips_what_is_left_of_the_window(window, query_len, first):
    table = np.full((1, 2, 4), -1, np.int32)
    lengths = np.array([300], np.int32)
    faults = ctm_rt.validate(table, lengths, 8, sliding_window=window, query_len=query_len)
    assert [fault.entry for fault in faults if fault.row == 0] == list(range(first, 3))


def test_validate_clamps_lengths_to_the_table():
    table = np.full((1, 2, 4), -1, np.int32)
    faults = ctm_rt.validate(table, np.array([10**9], np.int32), 8, sliding_window=200)
    assert [fault.entry for fault in faults if fault.row == 0] == [2, 3]
