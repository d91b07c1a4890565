"""What launches of the cache's kernels compute on the fake driver: the definition, from parameters.

The fake driver's memory is host memory. All that is used is what the kernel was given, so a wrong
pointer, extent or stride is a wrong answer; so is a wrong grid or a wrong divisor, by ``dealt``.
"""

import re
import struct
from typing import NamedTuple

import numpy as np

from ctm_rt import reference
from tests.decode_launch import PAGE, Tensor, on_host

MODULES = (
    "kv_append_f16",
    "kv_append_e4m3",
    "kv_append_lengths",
    "kv_copy_pages",
    "kv_gather",
)
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class Form(NamedTuple):
    """A kernel's tensors, with how many extents and strides of each are dynamic, then its words."""

    tensors: dict[str, tuple[int, int]]
    words: tuple[str, ...]


_DIVISORS = ("ctas", "ctas_magic", "heads", "heads_magic", "row_chunks", "row_magic")
FORMS = {
    "KvAppend": Form(
        {
            "k": (4, 3),
            "v": (4, 3),
            "kv_pool": (3, 3),
            "page_table": (2, 2),
            "seq_lens": (1, 0),
            "num_tokens": (1, 0),
        },
        ("k_scale", "v_scale", *_DIVISORS),
    ),
    "KvLengths": Form({"seq_lens": (1, 0), "num_tokens": (1, 0)}, ("tokens",)),
    "KvCopyPages": Form({"kv_pool": (3, 3), "moves": (1, 1), "num_tokens": (1, 0)}, _DIVISORS),
    "KvGather": Form(
        {"kv_pool": (3, 3), "page_table": (2, 2), "seq_lens": (1, 0), "out": (4, 4)}, _DIVISORS
    ),
}


def kind(launch):
    """The class that the kernel is of."""
    return next(name for name in FORMS if name in launch.kernel)


def arguments(launch):
    """The kernel's parameters by name: a tensor is a pointer, i32 extents, i64 strides."""
    form, named = FORMS[kind(launch)], {}
    assert len(launch.params) == len(form.tensors) + len(form.words)
    for (name, (extents, strides)), raw in zip(form.tensors.items(), launch.params, strict=False):
        head = f"<q{extents}i{extents % 2 * 4 if strides else 0}x"
        ptr, *shape = struct.unpack_from(head, raw)
        outer = struct.unpack_from(f"<{strides}q", raw, struct.calcsize(head))
        named[name] = Tensor(ptr, tuple(shape), outer)
    for name, raw in zip(form.words, launch.params[len(form.tensors) :], strict=True):
        named[name] = struct.unpack("<f" if "scale" in name else "<i", raw)[0]
        if "magic" in name:
            named[name] &= 0xFFFFFFFF
    return named


def compute(launch):
    """Do what the kernel would, by the definition."""
    {
        "KvAppend": _append,
        "KvLengths": _advance,
        "KvCopyPages": _copy_pages,
        "KvGather": _gather,
    }[kind(launch)](launch, arguments(launch))


def assert_dealt(launch, items, chunks, heads, row_chunks, per_thread):
    """The grid has CTAs for all chunks of all items; each CTA is told how to find its own."""
    a, ctas = arguments(launch), -(-chunks // (launch.block[0] * per_thread))
    assert (launch.block[1:], launch.cluster) == ((1, 1), (1, 1, 1))
    assert launch.grid == (items * ctas, 1, 1)
    for name, divisor in (("ctas", ctas), ("heads", heads), ("row_chunks", row_chunks)):
        magic = a[f"{name.removesuffix('_chunks')}_magic"]
        assert (a[name], magic) == (divisor, 0xFFFFFFFF // divisor)


def _pool(a, dtype):
    pages, heads, row = a["kv_pool"].shape
    return on_host(a["kv_pool"], (pages, PAGE, heads, row), dtype)


def _vector(tensor):
    return on_host(tensor, tensor.shape, np.int32) if tensor.ptr else None


def _table(a):
    batch, max_pages = a["page_table"].shape
    return on_host(a["page_table"], (batch, 2, max_pages), np.int32)


def _append(launch, a):
    third = re.findall(r"_tensorptr(f16|i8|i32)gmem", launch.kernel)[2]
    new = [on_host(a[name], a[name].shape, np.float16) for name in ("k", "v")]
    reference.append(
        *new,
        _pool(a, np.uint8 if third == "i8" else np.float16),
        _table(a),
        _vector(a["seq_lens"]),
        num_tokens=_vector(a["num_tokens"]),
        k_scale=a["k_scale"],
        v_scale=a["v_scale"],
    )


def _advance(launch, a):
    counts = _vector(a["num_tokens"])
    reference.advance(_vector(a["seq_lens"]), a["tokens"] if counts is None else counts)


def _copy_pages(launch, a):
    moves = on_host(a["moves"], (a["moves"].shape[0], 2), np.int32)
    reference.copy_pages(_pool(a, np.int32), moves, num_tokens=_vector(a["num_tokens"]))


def _gather(launch, a):
    batch, heads, capacity, row = a["out"].shape
    out = on_host(a["out"], (batch, 2, heads, capacity, row), np.int32)
    lengths = _vector(a["seq_lens"])
    out[...] = reference.gather(_pool(a, np.int32), _table(a), lengths, capacity=capacity)
