import pytest
from hypothesis import given
from hypothesis.strategies import integers

from ctm_rt import paged_kv as kv
from ctm_rt.errors import ArgumentError


def test_constants():
    assert kv.TOKENS_PER_PAGE == 128
    assert kv.UNUSED_PAGE_ENTRY == -1
    assert kv.MAX_KV_POOL_PAGES == 1_073_741_823
    assert kv.MAX_KV_CACHE_CAPACITY == 2_147_483_520
    assert kv.SWA_BOUNDARY_HEADROOM_PAGES == 1
    assert kv.SWA_REPLACEMENT_PAGES == 1


@pytest.mark.parametrize(
    ("capacity", "pages"),
    [(0, 0), (1, 1), (128, 1), (129, 2), (kv.MAX_KV_CACHE_CAPACITY, 16_777_215)],
)
def test_max_pages_per_seq(capacity, pages):
    assert kv.compute_max_pages_per_seq(capacity) == pages


def test_pages_per_slot_truncates():
    assert [kv.pages_per_slot(c) for c in (0, 127, 128, 256)] == [0, 0, 1, 2]


def test_resolve_capacity():
    assert kv.resolve_kv_cache_capacity(0, 4096) == 4096
    assert kv.resolve_kv_cache_capacity(512, 4096) == 512
    assert kv.is_reduced_kv_cache_capacity(512, 4096)
    assert not kv.is_reduced_kv_cache_capacity(0, 4096)
    assert not kv.is_reduced_kv_cache_capacity(4096, 4096)


@pytest.mark.parametrize(
    ("capacity", "maximum", "name"),
    [
        (0, 0, "max_kv_cache_capacity"),
        (0, -1, "max_kv_cache_capacity"),
        (-1, 8, "kv_cache_capacity"),
        (9, 8, "kv_cache_capacity"),
    ],
)
def test_resolve_capacity_refuses(capacity, maximum, name):
    with pytest.raises(ArgumentError) as refusal:
        kv.resolve_kv_cache_capacity(capacity, maximum)
    assert refusal.value.name == name


def test_pool_sizes():
    assert kv.compute_swa_private_pages_per_slot(1024, 128, 1) == 19
    assert kv.compute_swa_private_pages_per_slot(1, 128, 1) == 5
    assert kv.compute_swa_private_pages_per_slot(129, 64, 0) == 8
    assert kv.compute_minimum_swa_pool_pages(4, 1024) == 76
    assert kv.compute_minimum_kv_pool_pages(3, 129) == 6
    assert kv.compute_minimum_kv_pool_pages(2**20, kv.MAX_KV_CACHE_CAPACITY) > 2**31


@given(capacity=integers(0, kv.MAX_KV_CACHE_CAPACITY), batch=integers(0, 2**16))
def test_pages_hold_the_capacity_and_none_is_idle(capacity, batch):
    pages = kv.compute_max_pages_per_seq(capacity)
    assert 0 <= pages * kv.TOKENS_PER_PAGE - capacity < kv.TOKENS_PER_PAGE
    assert kv.pages_per_slot(pages * kv.TOKENS_PER_PAGE) == pages
    assert kv.compute_minimum_kv_pool_pages(batch, capacity) == batch * pages


@given(length=integers(0, 2000), window=integers(0, 700))
def test_retained_pages_are_those_of_the_last_tokens(length, window):
    seen = range(max(0, length - window) if window else 0, length)
    assert list(kv.retained_pages(length, window)) == sorted({t // 128 for t in seen})
    before, after = (set(kv.retained_pages(n, window)) for n in (length, length + 1))
    assert len(after - before) <= 1
    assert len(before - after) <= 1
    if window:
        private = kv.compute_swa_private_pages_per_slot(window, 128, kv.SWA_REPLACEMENT_PAGES)
        assert 2 * len(after) + 1 <= private


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (kv.pages_per_slot, (-1,), "max_cap_padded"),
        (kv.compute_max_pages_per_seq, (-1,), "max_kv_cache_capacity"),
        (kv.compute_swa_private_pages_per_slot, (-1, 128, 1), "sliding_window_capacity"),
        (kv.compute_swa_private_pages_per_slot, (1, 0, 1), "tokens_per_page"),
        (kv.compute_swa_private_pages_per_slot, (1, 128, -1), "replacement_page_count"),
        (kv.compute_minimum_swa_pool_pages, (-1, 1), "max_batch_size"),
        (kv.compute_minimum_kv_pool_pages, (-1, 1), "max_batch_size"),
        (kv.compute_minimum_kv_pool_pages, (1, -1), "max_kv_cache_capacity"),
        (kv.retained_pages, (-1,), "length"),
        (kv.retained_pages, (1, -1), "sliding_window"),
    ],
)
def test_negative_counts_are_refused(function, arguments, name):
    with pytest.raises(ArgumentError) as refusal:
        function(*arguments)
    assert refusal.value.name == name


def test_names():
    assert all(getattr(kv, name) is not None for name in kv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kv.nonsense
