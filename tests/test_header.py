import contextlib
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctm_rt.descriptors import make_ffi, parse_header, read_header
from ctm_rt.errors import HeaderError
from tests.header_text import render, signatures

GOLDEN = Path(__file__).parent / "headers" / "4.8.1"
STREAM = ("stream", "stream", "cudaStream_t", 0, 0, 0, 0)


def scalar(name, ctype):
    return (name, "scalar", ctype, 0, 0, 0, 0)


def ints(name, ctype, length):
    return (name, "int_tuple", f"{ctype} *", 0, 0, 0, 0, length)


def matrix(prefix, name):
    return (name, "tensor", f"{prefix}_Tensor_{name}_t *", 2, 32, 1, 64)


# name of the golden header: name, kind, ctype, shape slots and bits, stride slots and bits, length
EXPECTED = {
    "dynamic": [
        ("q", "tensor", "dynamic_Tensor_q_t *", 4, 32, 3, 64),
        matrix("dynamic", "table"),
        ("row", "tensor", "dynamic_Tensor_row_t *", 1, 32, 0, 0),
        ("column", "tensor", "dynamic_Tensor_column_t *", 1, 32, 1, 64),
        STREAM,
    ],
    "partly_static": [
        ("pool", "tensor", "partly_static_Tensor_pool_t *", 2, 32, 3, 64),
        ("no_strides", "tensor", "partly_static_Tensor_no_strides_t *", 1, 32, 0, 0),
        ("no_shapes", "tensor", "partly_static_Tensor_no_shapes_t *", 0, 0, 1, 64),
        ("whole", "tensor", "partly_static_Tensor_whole_t *", 0, 0, 0, 0),
        ("point", "tensor", "partly_static_Tensor_point_t *", 0, 0, 0, 0),
    ],
    "widths": [
        ("a3232", "tensor", "widths_Tensor_a3232_t *", 3, 32, 2, 32),
        ("a3264", "tensor", "widths_Tensor_a3264_t *", 3, 32, 2, 64),
        ("a6432", "tensor", "widths_Tensor_a6432_t *", 3, 64, 2, 32),
        ("a6464", "tensor", "widths_Tensor_a6464_t *", 3, 64, 2, 64),
    ],
    "lists": [
        ("three", "tensor_list", "lists_TensorList_three_t *", 2, 32, 1, 64, 3),
        ("one", "tensor_list", "lists_TensorList_one_t *", 3, 64, 2, 32, 1),
        ("pair", "tensor_list", "lists_TensorList_pair_t *", 2, 32, 1, 64, 2),
    ],
    "pointers": [
        STREAM,
        ("a", "pointer", "void *", 0, 0, 0, 0),
        ("b", "pointer", "void *", 0, 0, 0, 0),
    ],
    "numbers": [
        scalar("boolean", "uint8_t"),
        scalar("i8", "int8_t"),
        scalar("u8", "uint8_t"),
        scalar("i16", "int16_t"),
        scalar("u16", "uint16_t"),
        scalar("i32", "int32_t"),
        scalar("u32", "uint32_t"),
        scalar("i64", "int64_t"),
        scalar("u64", "uint64_t"),
        scalar("f16", "__half_raw"),
        scalar("bf16", "__nv_bfloat16"),
        scalar("f32", "float"),
        scalar("tf32", "float"),
        scalar("f64", "double"),
    ],
    "tuples": [
        ints("dims", "int32_t", 2),
        ints("far", "int64_t", 2),
        ints("near", "uint8_t", 1),
        ints("fixed", "int32_t", 0),
        ints("single", "int32_t", 1),
        STREAM,
    ],
    "optionals": [matrix("optionals", "present"), scalar("scale", "float"), STREAM],
    "all_absent": [],
    "two_streams": [("first", *STREAM[1:]), scalar("n", "int32_t"), ("second", *STREAM[1:])],
    "several_kernels": [matrix("several_kernels", "q"), scalar("plan", "int32_t"), STREAM],
    "names": [
        *(matrix("names", name) for name in ("module", "ret", "args", "t", "q_Tensor_q_t")),
        ("elements", "tensor_list", "names_TensorList_elements_t *", 2, 32, 1, 64, 1),
        *(scalar(name, "int32_t") for name in ("count", "int", "stream")),
        ints("data", "int32_t", 1),
        ("void", *STREAM[1:]),
    ],
} | {
    prefix: [matrix(prefix, "q"), STREAM]
    for prefix in (
        "method",
        "_x",
        "a_wrapper",
        "cute_dsl_a_wrapper",
        "a_dsl_b",
        "a_Tensor_q_t",
        "a_Kernel_Module_t",
    )
}
REFUSED = {
    "no_kernel": "no typedef of no_kernel_Kernel_Module_t",  # launches nothing, cannot be loaded
    "2d": "line 72: cute_dsl_2d_wrapper: cut off, or not of the exporter's form",  # not C
}
KEYS = (
    "name",
    "kind",
    "ctype",
    "shape_slots",
    "shape_bits",
    "stride_slots",
    "stride_bits",
    "length",
)


def golden(name):
    return (GOLDEN / f"{name}.h").read_text()


def test_every_golden_header_is_expected():
    assert {path.stem for path in GOLDEN.iterdir()} == {*EXPECTED, *REFUSED}


@pytest.mark.skipif(not importlib.util.find_spec("cutlass"), reason="needs nvidia-cutlass-dsl")
def test_fresh_exports_are_the_golden_headers(tmp_path):
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "tests.zoo", tmp_path], cwd=root, check=True)
    fresh = {path.name: path.read_bytes() for path in tmp_path.glob("*.h")}
    assert fresh == {path.name: path.read_bytes() for path in GOLDEN.iterdir()}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden_header(name):
    wrapper = read_header(GOLDEN / f"{name}.h")
    document = json.loads(json.dumps(wrapper.as_dict()))
    assert document == {
        "wrapper": f"cute_dsl_{name}_wrapper",
        "prefix": name,
        "parameters": [dict(zip(KEYS, row, strict=False)) for row in EXPECTED[name]],
    }
    assert wrapper.names == tuple(row[0] for row in EXPECTED[name])
    assert wrapper.entry.startswith(f"_mlir_{name}__mlir_ciface_cutlass_")
    assert wrapper.init == f"_mlir_{name}_cuda_init"
    assert wrapper.load_to_device == f"_mlir_{name}_cuda_load_to_device"
    ffi = make_ffi(wrapper)
    for parameter in wrapper.parameters:
        assert ffi.typeof(parameter.cell).kind in ("pointer", "array")


@pytest.mark.parametrize("name", REFUSED)
def test_golden_header_that_is_no_use(name):
    with pytest.raises(HeaderError, match=re.escape(REFUSED[name])) as error:
        read_header(GOLDEN / f"{name}.h")
    assert str(error.value).startswith(str(GOLDEN / f"{name}.h"))


def without_extern_c(text):
    text = re.sub(r'#ifdef __cplusplus\nextern "C"( \{)?\n#endif\n', "", text)
    return re.sub(r"#ifdef __cplusplus\n\}\n#endif\n", "", text)


def reformatted(text):
    return (
        text.replace("void *args[", "void* args[")
        .replace("typedef struct {", "typedef struct\n{")
        .replace("(void **);", "(\n    void** args);")
        .replace(", ", ",\n        ")
        .replace(" *", "* ")
    )


def in_one_line(text):
    body = re.sub(r"^[ \t]*#(?:\\\n|.)*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"//.*", "", body).replace("\n", " ")


def commented(text):
    old = "/* void *data; */ // static inline int32_t cute_dsl_old_wrapper(void) {\n"
    return old + text.replace("typedef", f"{old}typedef").replace(", ", " /* , */, ").replace(
        "int32_t ", "int32_t/**/"
    )


def experimental(text):
    return text.replace("cute_dsl_", "cute_experimental_dsl_")


def with_carriage_returns(text):
    return text.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "rewrite",
    [
        without_extern_c,
        reformatted,
        in_one_line,
        commented,
        experimental,
        with_carriage_returns,
    ],
)
@pytest.mark.parametrize("name", ["dynamic", "lists", "numbers", "tuples", "names", "all_absent"])
def test_other_spellings(name, rewrite):
    text = golden(name)
    assert rewrite(text) != text
    wrapper, plain = parse_header(rewrite(text)), parse_header(text)
    assert wrapper.parameters == plain.parameters
    assert (wrapper.entry, wrapper.init) == (plain.entry, plain.init)
    make_ffi(wrapper)


FAULTS = [
    # golden header, what is replaced by what, what the message says
    ("dynamic", "cute_dsl_dynamic_wrapper", "launch", "expected one function .*, got none"),
    (
        "dynamic",
        "static inline int32_t",
        "static inline void",
        "line 92: cute_dsl_dynamic_wrapper: cut",
    ),
    (
        "dynamic",
        "dynamic_Kernel_Module_t *module,",
        "other_Kernel_Module_t *module,",
        "line 92: cute",
    ),
    ("dynamic", "} dynamic_Kernel_Module_t", "} other_t", "no typedef of dynamic_Kernel_Module_t"),
    ("dynamic", "cudaLibrary_t module", "CUmodule module", "line 2.: .*unknown fields 'CUmodule"),
    ("dynamic", "} dynamic_Tensor_row_t", "} row_t", "no typedef of dynamic_Tensor_row_t"),
    ("dynamic", "} dynamic_Tensor_row_t", "} dynamic_Tensor_q_t", "line .*second typedef of dyn"),
    ("dynamic", "dynamic_Tensor_row_t *row", "dynamic_Tensor_q_t *row", "'row' has type 'dynamic_"),
    ("dynamic", "dynamic_Tensor_row_t *row", "other_Tensor_row_t *row", "'row' has type 'other_"),
    ("dynamic", "dynamic_Tensor_row_t *row", "dynamic_Tensor_row_t row", "'row' has type 'dynamic"),
    ("dynamic", "dynamic_Tensor_row_t *row", "size_t row", "'row' has type 'size_t'"),
    ("dynamic", "dynamic_Tensor_row_t *row", "float *row", "'row' has type 'float \\*'"),
    ("dynamic", "dynamic_Tensor_row_t *row", "int32_t **row", "cannot read parameter 'int32_t "),
    ("dynamic", "dynamic_Tensor_row_t *row", "dynamic_Tensor_q_t *q", "name comes twice"),
    ("dynamic", "int32_t dynamic_shapes[4]", "int16_t dynamic_shapes[4]", "line .*unknown fields"),
    ("dynamic", "int32_t dynamic_shapes[4]", "int32_t dynamic_shapes[0]", "unknown fields"),
    ("dynamic", "int32_t dynamic_shapes[4]", f"int32_t dynamic_shapes[{'9' * 5000}]", "unknown"),
    ("dynamic", "int32_t dynamic_shapes[4]", "float scale", "unknown fields 'void \\*data; float"),
    ("dynamic", "q, table, row", "table, q, row", "packs 6 arguments .*'table', 'q', 'row'"),
    ("dynamic", "q, table, row", "q, table", "packs 6 arguments"),
    ("dynamic", "&stream,", "stream,", "packs 6 arguments"),
    ("dynamic", "args[6]", "args[7]", "declares 7, passes 6"),
    ("dynamic", "(args, 6)", "(args, 5)", "declares 6, passes 5"),
    ("dynamic", "(args, 6)", f"(args, {'6' * 5000})", "cut off, or not of the exporter's form"),
    ("dynamic", "void **args, int32_t num_args", "void **args", "no prototype of _mlir_dynamic__m"),
    (
        "dynamic",
        "void _mlir_dynamic_cuda_init(void **)",
        "",
        "no prototype of _mlir_dynamic_cuda_i",
    ),
    ("dynamic", "cuda_load_to_device(void **);", "cuda_load(void **);", "no prototype of .*to_dev"),
    ("dynamic", "_mlir_dynamic__mlir_ciface", "_mlir_other__mlir_ciface", "cut off, or not of"),
    ("dynamic", "_mlir_dynamic__mlir_ciface_", "_mlir_dynamic_", "cut off, or not of"),
    ("dynamic", "return ret;", "return 0;", "cut off, or not of the exporter's form"),
    (
        "lists",
        "lists_Tensor_three_t elements[3]",
        "lists_Tensor_one_t elements[3]",
        "expected elem",
    ),
    ("lists", "elements[3];", "elements[2];", "packs 6 arguments"),
    ("lists", "elements[3];", "items[3];", "lists_TensorList_three_t: unknown fields"),
    ("lists", "} lists_Tensor_one_t", "} one_t", "no typedef of lists_Tensor_one_t"),
    ("lists", "} lists_TensorList_one_t", "} one_t", "no typedef of lists_TensorList_one_t"),
    ("tuples", "&dims[1]", "&dims[2]", "packs 8 arguments"),
    ("names", "int32_t int", "int32_t a\N{GREEK SMALL LETTER ALPHA}", "cannot read parameter"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), FAULTS)
def test_faults_are_named(name, old, new, message):
    text = golden(name)
    assert old in text
    with pytest.raises(HeaderError, match=message):
        parse_header(text.replace(old, new))


def test_two_wrappers():
    with pytest.raises(HeaderError, match=r"got cute_dsl_lists_wrapper \(line \d+\), cute_dsl_num"):
        parse_header(golden("lists") + golden("numbers"))


@pytest.mark.parametrize("name", ["dynamic", "tuples"])
def test_a_truncated_header_is_refused_wherever_it_ends(name):
    text = golden(name)
    for end in range(text.rindex("}")):
        with pytest.raises(HeaderError):
            parse_header(text[:end])


@given(st.data())
def test_damage_is_a_header_error_or_harmless(data):
    text = golden(data.draw(st.sampled_from(sorted(EXPECTED))))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 80)))
    middle = data.draw(
        st.sampled_from(["", "{", "}", "(", ";", ",", "*", "\0", "/*", "#", "\\", "x"])
    )
    with contextlib.suppress(HeaderError):
        make_ffi(parse_header(text[:start] + middle + text[stop:]))


@given(signatures())
@settings(deadline=None)
def test_generated_headers_come_back(signature):
    prefix, parameters = signature
    wrapper = parse_header(render(prefix, parameters))
    assert (wrapper.prefix, wrapper.parameters) == (prefix, parameters)
    ffi = make_ffi(wrapper)
    for parameter in parameters:
        if parameter.kind == "tensor":
            fields = dict(ffi.typeof(parameter.base).fields)
            assert fields.pop("data").offset == 0
            slots = {
                "dynamic_shapes": parameter.shape_slots,
                "dynamic_strides": parameter.stride_slots,
            }
            assert {n: f.type.length for n, f in fields.items()} == {
                n: s for n, s in slots.items() if s
            }


@pytest.mark.parametrize("name", EXPECTED)
def test_the_renderer_writes_what_the_exporter_writes(name):
    """Else the tests that use it would prove nothing about real headers."""
    wrapper = parse_header(golden(name))
    made = render(name, wrapper.parameters)
    made = made.replace(f"_mlir_{name}__mlir_ciface_f", wrapper.entry)
    for part in (r"typedef struct.*?_t;", r"static inline int32_t.*", r"void _mlir_\S+\(void .*?;"):
        real = re.findall(part, golden(name), re.DOTALL)
        assert real == re.findall(part, made, re.DOTALL)


def test_unreadable_files(tmp_path):
    with pytest.raises(HeaderError, match=r"absent\.h: No such file"):
        read_header(tmp_path / "absent.h")
    (tmp_path / "binary.h").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HeaderError, match=r"binary\.h: .*utf-8"):
        read_header(str(tmp_path / "binary.h"))


def test_what_cffi_refuses_is_a_header_error():
    wrapper = dataclasses.replace(parse_header(golden("numbers")), cdef="typedef struct {")
    with pytest.raises(HeaderError, match="cute_dsl_numbers_wrapper: cffi refuses"):
        make_ffi(wrapper)
