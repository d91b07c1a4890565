"""The paged layout: its arithmetic, the page table, and the bookkeeping of a cache.

The arithmetic imports nothing; the classes are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctm_rt.paged_kv.layout import (
    INT32_MAX,
    MAX_KV_CACHE_CAPACITY,
    MAX_KV_POOL_PAGES,
    SWA_BOUNDARY_HEADROOM_PAGES,
    SWA_REPLACEMENT_PAGES,
    TOKENS_PER_PAGE,
    UNUSED_PAGE_ENTRY,
    ceil_div,
    compute_max_pages_per_seq,
    compute_minimum_kv_pool_pages,
    compute_minimum_swa_pool_pages,
    compute_swa_private_pages_per_slot,
    is_reduced_kv_cache_capacity,
    pages_per_slot,
    resolve_kv_cache_capacity,
    retained_pages,
)

if TYPE_CHECKING:
    from ctm_rt.paged_kv.cache import PagedKvCache
    from ctm_rt.paged_kv.pages import Move
    from ctm_rt.paged_kv.table import PageTable

__all__ = [
    "INT32_MAX",
    "MAX_KV_CACHE_CAPACITY",
    "MAX_KV_POOL_PAGES",
    "SWA_BOUNDARY_HEADROOM_PAGES",
    "SWA_REPLACEMENT_PAGES",
    "TOKENS_PER_PAGE",
    "UNUSED_PAGE_ENTRY",
    "Move",
    "PageTable",
    "PagedKvCache",
    "ceil_div",
    "compute_max_pages_per_seq",
    "compute_minimum_kv_pool_pages",
    "compute_minimum_swa_pool_pages",
    "compute_swa_private_pages_per_slot",
    "is_reduced_kv_cache_capacity",
    "pages_per_slot",
    "resolve_kv_cache_capacity",
    "retained_pages",
]

_PLACES = {"Move": "pages", "PageTable": "table", "PagedKvCache": "cache"}


def __getattr__(name: str) -> Any:
    """Import a class on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value
