"""The paged layout: its constants and the arithmetic of pages.

A pool is ``[2 * num_pages, TOKENS_PER_PAGE, num_kv_heads, head_dim]``: ids 0..num_pages-1 are K
pages, the rest V pages. A page table is ``[batch, 2, max_pages]`` int32: row 0 lists K ids, row 1
V ids.
"""

from ctm_rt.errors import ArgumentError

INT32_MAX = 2**31 - 1

TOKENS_PER_PAGE = 128
UNUSED_PAGE_ENTRY = -1
MAX_KV_POOL_PAGES = INT32_MAX // 2  # K pages; V ids and the count of both must fit an int32
MAX_KV_CACHE_CAPACITY = INT32_MAX // TOKENS_PER_PAGE * TOKENS_PER_PAGE  # tokens
SWA_BOUNDARY_HEADROOM_PAGES = 1  # a window that starts inside a page touches one more
SWA_REPLACEMENT_PAGES = 1

_SWA_RETAINED_IMAGES = 2  # a chunk transition holds the old window and the new one


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up."""
    return -(-value // divisor)


def pages_per_slot(max_cap_padded: int) -> int:
    """Return the pages of a slot whose capacity, in tokens, is already a whole number of pages."""
    return max_cap_padded // TOKENS_PER_PAGE


def compute_max_pages_per_seq(max_kv_cache_capacity: int) -> int:
    """Return the pages that a capacity in tokens spans: the page table's last axis."""
    return ceil_div(max_kv_cache_capacity, TOKENS_PER_PAGE)


def resolve_kv_cache_capacity(kv_cache_capacity: int, max_kv_cache_capacity: int) -> int:
    """Return a layer's capacity in tokens, where 0 stands for the full ``max_kv_cache_capacity``.

    Raises
    ------
    ArgumentError
        The maximum is not positive, or the layer's capacity is outside 0..maximum.
    """
    if max_kv_cache_capacity <= 0:
        raise ArgumentError("max_kv_cache_capacity", "at least 1 token", max_kv_cache_capacity)
    if not 0 <= kv_cache_capacity <= max_kv_cache_capacity:
        expected = f"0 to {max_kv_cache_capacity} tokens"
        raise ArgumentError("kv_cache_capacity", expected, kv_cache_capacity)
    return kv_cache_capacity or max_kv_cache_capacity


def is_reduced_kv_cache_capacity(kv_cache_capacity: int, max_kv_cache_capacity: int) -> bool:
    """Return whether a layer keeps fewer tokens than the full capacity (bounded window storage)."""
    capacity = resolve_kv_cache_capacity(kv_cache_capacity, max_kv_cache_capacity)
    return capacity < max_kv_cache_capacity


def compute_swa_private_pages_per_slot(
    sliding_window_capacity: int, tokens_per_page: int, replacement_page_count: int
) -> int:
    """Return the pages that one slot with a sliding window reserves for itself."""
    image_pages = ceil_div(sliding_window_capacity, tokens_per_page) + SWA_BOUNDARY_HEADROOM_PAGES
    return _SWA_RETAINED_IMAGES * image_pages + replacement_page_count


def compute_minimum_swa_pool_pages(max_batch_size: int, sliding_window_capacity: int) -> int:
    """Return the pages that all slots with a sliding window reserve together."""
    return max_batch_size * compute_swa_private_pages_per_slot(
        sliding_window_capacity, TOKENS_PER_PAGE, SWA_REPLACEMENT_PAGES
    )


def compute_minimum_kv_pool_pages(max_batch_size: int, max_kv_cache_capacity: int) -> int:
    """Return the K pages of a pool in which every sequence can reach the full capacity.

    The caller checks the result against 1..``MAX_KV_POOL_PAGES``.
    """
    return max_batch_size * compute_max_pages_per_seq(max_kv_cache_capacity)
