import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings

from ctm_rt.descriptors import ctypes_mirror, make_ffi, mirror, parse_header, read_header
from ctm_rt.errors import HeaderError
from tests.header_text import render, signatures

GOLDEN = Path(__file__).parent / "headers" / "4.8.1"


def test_fields_are_the_headers():
    mirrors = ctypes_mirror(read_header(GOLDEN / "partly_static.h"))
    fields = {name: made._fields_ for name, made in mirrors.items()}
    assert fields == {
        "pool": [
            ("data", ctypes.c_void_p),
            ("dynamic_shapes", ctypes.c_int32 * 2),
            ("dynamic_strides", ctypes.c_int64 * 3),
        ],
        "no_strides": [("data", ctypes.c_void_p), ("dynamic_shapes", ctypes.c_int32 * 1)],
        "no_shapes": [("data", ctypes.c_void_p), ("dynamic_strides", ctypes.c_int64 * 1)],
        "whole": [("data", ctypes.c_void_p)],
        "point": [("data", ctypes.c_void_p)],
    }
    assert mirrors["pool"].__name__ == "partly_static_Tensor_pool_t"


def test_only_tensors_have_mirrors():
    assert list(ctypes_mirror(read_header(GOLDEN / "several_kernels.h"))) == ["q"]
    assert ctypes_mirror(read_header(GOLDEN / "numbers.h")) == {}


def test_the_c_compiler_agrees(tmp_path):
    """The compiler lays the headers' own structs out as the mirrors do."""
    source = ["#include <stddef.h>\n#include <stdint.h>"]
    mirrors = {}
    for path in sorted(GOLDEN.glob("*.h")):
        if path.stem not in ("2d", "no_kernel"):
            wrapper = read_header(path)
            source.append(wrapper.cdef)
            mirrors |= {p.base: ctypes_mirror(wrapper).get(p.name) for p in wrapper.parameters}
    mirrors = {ctype: made for ctype, made in mirrors.items() if made}
    facts = [
        f"sizeof({ctype}), _Alignof({ctype}), "
        + ", ".join(
            f"offsetof({ctype}, {field}), sizeof((({ctype} *)0)->{field})"
            for field, _ in made._fields_
        )
        for ctype, made in mirrors.items()
    ]
    source.append(f"const size_t facts[] = {{ {', '.join(facts)} }};")
    (tmp_path / "facts.c").write_text("\n".join(source))
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-o", "facts.so", "facts.c"], cwd=tmp_path, check=True)

    ours = []
    for made in mirrors.values():
        ours += [ctypes.sizeof(made), ctypes.alignment(made)]
        for field, ctype in made._fields_:
            ours += [getattr(made, field).offset, ctypes.sizeof(ctype)]
    library = ctypes.CDLL(str(tmp_path / "facts.so"))
    assert list((ctypes.c_size_t * len(ours)).in_dll(library, "facts")) == ours
    assert len(mirrors) > 20


@given(signatures())
@settings(deadline=None)
def test_every_descriptor_has_a_mirror_that_cffi_confirms(signature):
    wrapper = parse_header(render(*signature))
    mirrors = ctypes_mirror(wrapper)
    assert list(mirrors) == [p.name for p in wrapper.parameters if p.kind.startswith("tensor")]
    ffi = make_ffi(wrapper)
    for parameter in wrapper.parameters:
        if parameter.name in mirrors:
            assert ctypes.sizeof(mirrors[parameter.name]) == ffi.sizeof(parameter.base)


def structure(*fields):
    return type("Wrong", (ctypes.Structure,), {"_fields_": list(fields)})


DATA, SHAPES = ("data", ctypes.c_void_p), ("dynamic_shapes", ctypes.c_int32 * 2)
STRIDES = ("dynamic_strides", ctypes.c_int64 * 1)


@pytest.mark.parametrize(
    "wrong",
    [
        structure(DATA, SHAPES),
        structure(DATA, SHAPES, ("dynamic_strides", ctypes.c_int64 * 2)),
        structure(DATA, SHAPES, ("dynamic_strides", ctypes.c_int32 * 1)),  # same size
        structure(DATA, SHAPES, ("dynamic_strides", ctypes.c_int32 * 2)),  # same size
        structure(DATA, ("dynamic_shapes", ctypes.c_int64 * 1), STRIDES),  # same size
        structure(DATA, STRIDES, SHAPES),
        structure(SHAPES, DATA, STRIDES),
        structure(DATA, SHAPES, ("strides", ctypes.c_int64 * 1)),
    ],
)
def test_a_mirror_that_differs_is_refused(wrong):
    ffi = make_ffi(read_header(GOLDEN / "method.h"))
    mirror.check_mirror(ffi, "method_Tensor_q_t", structure(DATA, SHAPES, STRIDES))
    with pytest.raises(HeaderError, match="method_Tensor_q_t: mirror differs"):
        mirror.check_mirror(ffi, "method_Tensor_q_t", wrong)


def test_mirrors_are_checked_when_they_are_made(monkeypatch):
    monkeypatch.setitem(mirror._INTEGER, 32, ctypes.c_int64)
    with pytest.raises(HeaderError, match="method_Tensor_q_t: mirror differs"):
        ctypes_mirror(read_header(GOLDEN / "method.h"))
