import pytest

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
