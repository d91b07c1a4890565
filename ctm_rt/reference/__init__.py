"""The definition of every kernel on NumPy arrays: slow, obvious; also the host backend."""

from ctm_rt.reference.decode import (
    decode_attention,
    decode_attention_plain,
    dropped_pages,
    e4m3_to_float,
)
from ctm_rt.reference.paged_kv import advance, append, copy_pages, float_to_e4m3, gather

__all__ = [
    "advance",
    "append",
    "copy_pages",
    "decode_attention",
    "decode_attention_plain",
    "dropped_pages",
    "e4m3_to_float",
    "float_to_e4m3",
    "gather",
]
