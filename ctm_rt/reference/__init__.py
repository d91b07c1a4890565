"""The definition of every kernel on NumPy arrays: slow, obvious; also the host backend."""

from ctm_rt.reference.decode import (
    decode_attention,
    decode_attention_plain,
    dropped_pages,
    e4m3_to_float,
)

__all__ = ["decode_attention", "decode_attention_plain", "dropped_pages", "e4m3_to_float"]
