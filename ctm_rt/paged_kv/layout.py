"""The arithmetic of the paged layout: its constants, and sizes in pages.

A pool is ``[2 * num_pages, TOKENS_PER_PAGE, num_kv_heads, head_dim]``: ids 0..num_pages-1 are K
pages, the rest V pages. A page table is ``[batch, 2, max_pages]`` int32: row 0 lists K ids, row 1
V ids. All arguments are counts; a negative one is refused with ArgumentError.
"""

from ctm_rt.errors import ArgumentError

INT32_MAX = 2**31 - 1

TOKENS_PER_PAGE = 128
UNUSED_PAGE_ENTRY = -1
MAX_KV_POOL_PAGES = INT32_MAX // 2  # K pages; V ids and the count of both must fit an int32
MAX_KV_CACHE_CAPACITY = INT32_MAX // TOKENS_PER_PAGE * TOKENS_PER_PAGE  # tokens
SWA_BOUNDARY_HEADROOM_PAGES = 1  # a window that starts inside a page touches one more
SWA_REPLACEMENT_PAGES = 1  # takes the place of a shared page that is about to be written

_SWA_RETAINED_IMAGES = 2  # a chunk transition holds the old window and the new one


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up."""
    return -(-value // divisor)


def require_count(name: str, value: int, *, least: int = 0, most: int | None = None) -> int:
    """Return ``value`` if it lies in ``least``..``most``, else raise ArgumentError."""
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ArgumentError(name, expected, value)
    return value


def pages_per_slot(max_cap_padded: int) -> int:
    """Return the pages of a slot whose capacity, in tokens, is already a whole number of pages."""
    return require_count("max_cap_padded", max_cap_padded) // TOKENS_PER_PAGE


def compute_max_pages_per_seq(max_kv_cache_capacity: int) -> int:
    """Return the pages that a capacity in tokens spans: the page table's last axis."""
    tokens = require_count("max_kv_cache_capacity", max_kv_cache_capacity)
    return ceil_div(tokens, TOKENS_PER_PAGE)


def resolve_kv_cache_capacity(kv_cache_capacity: int, max_kv_cache_capacity: int) -> int:
    """Return a layer's capacity in tokens, where 0 stands for the full ``max_kv_cache_capacity``.

    Raises
    ------
    ArgumentError
        The maximum is not positive, or the layer's capacity is outside 0..maximum.
    """
    require_count("max_kv_cache_capacity", max_kv_cache_capacity, least=1)
    require_count("kv_cache_capacity", kv_cache_capacity, most=max_kv_cache_capacity)
    return kv_cache_capacity or max_kv_cache_capacity


def is_reduced_kv_cache_capacity(kv_cache_capacity: int, max_kv_cache_capacity: int) -> bool:
    """Return whether a layer keeps fewer tokens than the full capacity (bounded window storage)."""
    capacity = resolve_kv_cache_capacity(kv_cache_capacity, max_kv_cache_capacity)
    return capacity < max_kv_cache_capacity


def compute_swa_private_pages_per_slot(
    sliding_window_capacity: int, tokens_per_page: int, replacement_page_count: int
) -> int:
    """Return the pages that one slot with a sliding window reserves for itself."""
    window = require_count("sliding_window_capacity", sliding_window_capacity)
    require_count("tokens_per_page", tokens_per_page, least=1)
    require_count("replacement_page_count", replacement_page_count)
    image_pages = ceil_div(window, tokens_per_page) + SWA_BOUNDARY_HEADROOM_PAGES
    return _SWA_RETAINED_IMAGES * image_pages + replacement_page_count


def compute_minimum_swa_pool_pages(max_batch_size: int, sliding_window_capacity: int) -> int:
    """Return the pages that all slots with a sliding window reserve together."""
    return require_count("max_batch_size", max_batch_size) * compute_swa_private_pages_per_slot(
        sliding_window_capacity, TOKENS_PER_PAGE, SWA_REPLACEMENT_PAGES
    )


def compute_minimum_kv_pool_pages(max_batch_size: int, max_kv_cache_capacity: int) -> int:
    """Return the K pages of a pool in which every sequence can reach the full capacity.

    The caller checks the result against 1..``MAX_KV_POOL_PAGES``.
    """
    pages = compute_max_pages_per_seq(max_kv_cache_capacity)
    return require_count("max_batch_size", max_batch_size) * pages


def retained_pages(length: int, sliding_window: int = 0) -> range:
    """Return the logical pages that hold a sequence's tokens; with a window, its last ones only.

    A window of 0 is none. One more token adds at most one page to the range, and takes at most one.
    """
    require_count("length", length)
    window = require_count("sliding_window", sliding_window)
    first = max(0, length - window) // TOKENS_PER_PAGE if window else 0
    return range(first, ceil_div(length, TOKENS_PER_PAGE))
