import gc

import numpy as np
import pytest
from cuda.bindings import driver as cu
from hypothesis import given
from hypothesis import strategies as st

import ctm_rt
from ctm_rt import driver
from ctm_rt.errors import ArgumentError, DriverError
from ctm_rt.paged_kv import UNUSED_PAGE_ENTRY, PageTable

ROW_NBYTES = 2 * 4 * 4  # of the tables below


@pytest.fixture
def table(fake):
    return PageTable(6, 4, 40)


@pytest.fixture
def stream(fake):
    with driver.current(0):
        handle = driver.stream_create()
        yield handle
        driver.stream_destroy(handle)


def on_device(table):
    return ctm_rt.to_host(table.device_array)


def copies(fake):
    """The first row and the stream of every copy to a table."""
    return fake.calls("cuMemcpyHtoDAsync")


def test_unused_at_first(table):
    assert table.host.shape == (6, 2, 4)
    assert table.host.dtype == np.int32
    assert (table.host == UNUSED_PAGE_ENTRY).all()
    with pytest.raises(ValueError, match="read-only"):
        table.host[0] = 0


def test_v_ids_are_offset_and_unused_stays_unused(table):
    table.update([(2, [7, 0, 39]), (0, [3, -1, -1, -1])])
    assert table.host[2].tolist() == [[7, 0, 39, -1], [47, 40, 79, -1]]
    assert table.host[0].tolist() == [[3, -1, -1, -1], [43, -1, -1, -1]]
    table.update([(2, [])])
    assert (table.host[2] == -1).all()
    table.update([(2, [-1, 5, -1, 6])], holes=True)
    assert table.host[2].tolist() == [[-1, 5, -1, 6], [-1, 45, -1, 46]]


def test_v_ids_of_the_largest_pool_fit():
    table = PageTable(1, 1, ctm_rt.paged_kv.MAX_KV_POOL_PAGES)
    table.update([(0, [ctm_rt.paged_kv.MAX_KV_POOL_PAGES - 1])])
    assert table.host[0, 1, 0] == 2**31 - 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((6, [1]), "slot: expected 0 to 5, got 6"),
        ((-1, [1]), "slot: expected 0 to 5, got -1"),
        ((0, [1]), "slot: expected each slot once, got 0 twice"),
        ((1, [40]), "pages of slot 1: expected -1 to 39, got 40"),
        ((1, [-2]), "pages of slot 1: expected -1 to 39, got -2"),
        ((1, [2**40]), "expected -1 to 39"),
        ((1, [1, 2, 3, 4, 5]), "expected at most 4, got 5"),
        ((1, [5, 6, 5]), "expected each page once, got 5 repeated"),
        ((1, [5, -1, 6]), "got a hole"),
        ((1, [-1, 6]), "got a hole"),
        ((1, [1.0]), "expected integers along one axis"),
        ((1, [[1]]), "expected integers along one axis"),
    ],
)
def test_a_refused_update_changes_nothing(table, row, message):
    table.update([(0, [9, 8])])
    before = table.host.copy()
    with pytest.raises(ArgumentError, match=message):
        table.update([(0, [1, 2]), row])
    assert (table.host == before).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-1, 9), max_size=4)), max_size=6))
def test_an_update_is_taken_exactly_if_it_is_sound(rows):
    table = PageTable(6, 4, 10)
    slots = [slot for slot, _ in rows]
    sound = len(set(slots)) == len(slots)
    for _, pages in rows:
        used = [page for page in pages if page >= 0]
        sound &= len(set(used)) == len(used) and pages[: len(used)] == used
    try:
        table.update(rows)
    except ArgumentError:
        assert not sound
        rows = []
    else:
        assert sound
    expected = np.full((6, 4), -1)
    for slot, pages in rows:
        expected[slot, : len(pages)] = pages
    assert (table.host[:, 0] == expected).all()
    assert (table.host[:, 1] == np.where(expected < 0, -1, expected + 10)).all()


def test_identity():
    table = PageTable(3, 2, 7)  # a pool may be larger
    table.map_identity()
    assert table.host[:, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert table.host[:, 1].tolist() == [[7, 8], [9, 10], [11, 12]]
    with pytest.raises(ArgumentError, match="num_pages: expected at least 6, got 5"):
        PageTable(3, 2, 5).map_identity()


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 2**30)])
def test_sizes_are_checked(sizes):
    with pytest.raises(ArgumentError):
        PageTable(*sizes)


# ---- on the device -----------------------------------------------------------------------------


def test_changed_rows_are_uploaded_in_runs(table, fake, stream):
    table.upload(stream)
    ptr = table.device_array.ptr
    assert copies(fake) == [(ptr, stream)]
    assert (on_device(table) == table.host).all()
    table.update([(slot, [slot]) for slot in (5, 1, 2)])
    table.upload(stream)
    assert copies(fake)[1:] == [(ptr + ROW_NBYTES, stream), (ptr + 5 * ROW_NBYTES, stream)]
    assert (on_device(table) == table.host).all()
    table.upload(stream)
    assert len(copies(fake)) == 3
    assert table.device_array.ptr == ptr
    assert table.device_array.shape == (6, 2, 4)
    assert str(table.device_array.dtype) == "i32"


def test_the_host_waits_only_for_the_staging_that_it_overwrites(table, fake, stream):
    fake.set_paused(stream, True)
    for page in range(5):
        table.update([(0, [page])])
        table.upload(stream)
        assert len(fake.calls("cuEventSynchronize")) == max(0, page - 1)
    waited = [event for event, _ in fake.calls("cuEventSynchronize")]
    recorded = [event for event, _ in fake.calls("cuEventRecord")]
    assert waited == recorded[:3]  # each before its staging is written again
    assert len(set(recorded)) == fake.live_pinned() == 2
    assert fake.calls("cuStreamSynchronize") == []


def test_staging_goes_with_the_table(fake, stream):
    gc.collect()
    before = fake.live_allocations(), fake.live_pinned(), fake.live_events()
    table = PageTable(6, 4, 40)
    table.upload(stream)
    assert fake.live_pinned() == before[1] + 1
    fake.set_paused(stream, True)
    table.update([(0, [1])])
    table.upload(stream)
    del table
    assert (fake.live_allocations(), fake.live_pinned(), fake.live_events()) == before
    assert len(fake.calls("cuEventSynchronize")) == 2  # a copy may have been under way


def test_pinned_and_device_memory_are_not_mixed_up(fake):
    pinned, other = driver.alloc_pinned(64, 0), driver.alloc(64, 0)
    for free, ptr in ((driver.free, pinned), (driver.free_pinned, other)):
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            free(ptr, 0)
    driver.free_pinned(pinned, 0)
    driver.free(other, 0)


def test_the_driver_is_asked_only_when_needed(fake):
    table = PageTable(6, 4, 40)
    table.update([(0, [1])])
    assert fake.live_pinned() == len(copies(fake)) == 0
    assert fake.calls("cuMemAlloc") == []


def test_no_upload_into_a_capture(table, fake, stream):
    table.upload(stream)
    fake.set_capturing(stream, True)
    table.upload(stream)  # nothing to do
    table.update([(3, [1])])
    with pytest.raises(ArgumentError, match="stream: expected one that does not capture"):
        table.upload(stream)
    assert fake.capture_status(stream) == 1  # not spoilt
    fake.set_capturing(stream, False)
    table.upload(stream)
    assert (on_device(table) == table.host).all()


@pytest.mark.parametrize(
    "call", ["cuMemAlloc", "cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord"]
)
def test_after_a_failure_the_next_upload_sends_all(fake, stream, call):
    table = PageTable(6, 4, 40)
    table.update([(1, [2]), (4, [3])])
    fake.fail(call, cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DriverError, match=call):
        table.upload(stream)
    table.upload(stream)
    assert (on_device(table) == table.host).all()


def test_a_failed_copy_leaves_the_queued_ones_guarded(table, fake, stream):
    table.upload(stream)
    table.update([(1, [2]), (4, [3])])
    fake.fail("cuMemcpyHtoDAsync", 1)
    with pytest.raises(DriverError):
        table.upload(stream)
    assert len(fake.calls("cuEventRecord")) == 2


def test_decode_attention_takes_the_device_array(computing):
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((2 * 5, 128, 2, 64)).astype(np.float16)
    q = rng.standard_normal((2, 4, 64)).astype(np.float16)
    lengths = np.array([200, 100], np.int32)
    table = PageTable(2, 3, 5)
    table.update([(0, [4, 1]), (1, [2])])
    table.upload()
    on = {name: ctm_rt.to_device(a) for name, a in (("q", q), ("pool", pool), ("n", lengths))}
    got = ctm_rt.decode_attention(on["q"], on["pool"], table.device_array, on["n"], scale=0.1)
    want = ctm_rt.reference.decode_attention(q, pool, table.host, lengths, scale=0.1)
    np.testing.assert_allclose(ctm_rt.to_host(got), want, atol=1e-2)
