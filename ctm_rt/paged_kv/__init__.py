"""The paged layout: its arithmetic, the page table, a cache's bookkeeping, and what writes it.

The arithmetic imports nothing; all else is imported when it is first used.
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
    from ctm_rt.paged_kv.moving import bind_copy_pages, bind_gather, copy_pages, gather
    from ctm_rt.paged_kv.pages import Move
    from ctm_rt.paged_kv.table import PageTable
    from ctm_rt.paged_kv.writing import advance, append, bind_advance, bind_append

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
    "advance",
    "append",
    "bind_advance",
    "bind_append",
    "bind_copy_pages",
    "bind_gather",
    "ceil_div",
    "compute_max_pages_per_seq",
    "compute_minimum_kv_pool_pages",
    "compute_minimum_swa_pool_pages",
    "compute_swa_private_pages_per_slot",
    "copy_pages",
    "gather",
    "is_reduced_kv_cache_capacity",
    "pages_per_slot",
    "resolve_kv_cache_capacity",
    "retained_pages",
]

_PLACES = {
    "cache": ("PagedKvCache",),
    "moving": ("bind_copy_pages", "bind_gather", "copy_pages", "gather"),
    "pages": ("Move",),
    "table": ("PageTable",),
    "writing": ("advance", "append", "bind_advance", "bind_append"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    for place, names in _PLACES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{place}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
