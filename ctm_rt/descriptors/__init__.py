"""Descriptors: what a header says about its kernel's arguments, and how they are filled."""

from ctm_rt.descriptors import fill
from ctm_rt.descriptors.header import Parameter, Wrapper, make_ffi, parse_header, read_header
from ctm_rt.descriptors.mirror import ctypes_mirror

__all__ = [
    "Parameter",
    "Wrapper",
    "ctypes_mirror",
    "fill",
    "make_ffi",
    "parse_header",
    "read_header",
]
