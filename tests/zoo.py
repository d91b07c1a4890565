"""Tiny kernels whose headers have, between them, every form that the CuTe DSL exporter can write.

``python -m tests.zoo`` renews the golden headers of the installed DSL; ``python -m tests.zoo DIR``
writes the header and the object of each kernel to DIR. No GPU is needed. The tests run it as a
program: in their own process a libcuda made for tests may be loaded.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, Optional

import cuda.bindings.driver as cu
import cutlass as c
from cutlass import cute
from cutlass.cute import sym_int32 as dim
from cutlass.cute import sym_int64 as wide
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from cutlass.cute.runtime import make_ptr as pointer

HEADERS = Path(__file__).parent / "headers"

# Without a host target the exporter also loads the object that it writes, and wants libcuda for it.
OPTIONS = "--gpu-arch sm_90a --host-target 'llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2'"
ONE = {"grid": (1, 1, 1), "block": (32, 1, 1)}
MEMBERS = {}


def member(*arguments):
    """Enter a function into the zoo with the arguments that it is compiled for."""

    def enter(function):
        MEMBERS[function.__name__] = function, arguments
        return function

    return enter


def tensor(shape, stride):
    return make_fake_tensor(c.Float16, shape, stride=stride)


def row_major(extent, narrow):
    shape = (extent(), extent(), extent())
    return make_fake_compact_tensor(
        c.Float16, shape, stride_order=(2, 1, 0), use_32bit_stride=narrow
    )


def matrix():
    return tensor((dim(), dim()), (wide(), 1))


@cute.kernel
def nothing():
    pass


@cute.kernel
def nothing_else():
    pass


@member(
    tensor((dim(), dim(), dim(), dim()), (wide(), wide(), wide(), 1)),
    matrix(),
    tensor((dim(),), (1,)),
    tensor((dim(),), (wide(),)),
    make_fake_stream(),
)
@cute.jit
def dynamic(
    q: cute.Tensor, table: cute.Tensor, row: cute.Tensor, column: cute.Tensor, stream: cu.CUstream
):
    nothing().launch(**ONE, stream=stream)


@member(
    tensor((dim(), 128, dim(), 64), (wide(), wide(), wide(), 1)),
    tensor((dim(), 64), (64, 1)),
    tensor((4, 64), (wide(), 1)),
    tensor((4, 64), (64, 1)),
    tensor((), ()),
)
@cute.jit
def partly_static(
    pool: cute.Tensor,
    no_strides: cute.Tensor,
    no_shapes: cute.Tensor,
    whole: cute.Tensor,
    point: cute.Tensor,
):
    nothing().launch(**ONE)


@member(row_major(dim, True), row_major(dim, False), row_major(wide, True), row_major(wide, False))
@cute.jit
def widths(a3232: cute.Tensor, a3264: cute.Tensor, a6432: cute.Tensor, a6464: cute.Tensor):
    nothing().launch(**ONE)


class Pair(NamedTuple):
    """A tuple of tensors with names, which the header does not keep."""

    k: cute.Tensor
    v: cute.Tensor


@member([matrix(), matrix(), matrix()], (row_major(wide, True),), Pair(matrix(), matrix()))
@cute.jit
def lists(three: list, one: tuple, pair: Pair):
    nothing().launch(**ONE)


@member(
    make_fake_stream(),
    pointer(c.Float16, 0, cute.AddressSpace.gmem),
    pointer(c.Int32, 0, cute.AddressSpace.generic),
)
@cute.jit
def pointers(stream: cu.CUstream, a: cute.Pointer, b: cute.Pointer):
    nothing().launch(**ONE, stream=stream)


@member(True, *(1,) * 8, *(1.0,) * 5)
@cute.jit
def numbers(
    boolean: c.Boolean,
    i8: c.Int8,
    u8: c.Uint8,
    i16: c.Int16,
    u16: c.Uint16,
    i32: c.Int32,
    u32: c.Uint32,
    i64: c.Int64,
    u64: c.Uint64,
    f16: c.Float16,
    bf16: c.BFloat16,
    f32: c.Float32,
    tf32: c.TFloat32,
    f64: c.Float64,
):
    nothing().launch(**ONE)


@member(
    (c.Int32(1), 5, c.Int32(2)),
    (c.Int64(1), c.Int64(3)),
    (c.Uint8(1), 5),
    (1, 2),
    c.Int32(3),
    make_fake_stream(),
)
@cute.jit
def tuples(
    dims: cute.Shape,
    far: cute.IntTuple,
    near: tuple,
    fixed: cute.Stride,
    single: cute.Coord,
    stream: cu.CUstream,
):
    nothing().launch(**ONE, stream=stream)


@member(None, matrix(), None, c.Float32(1), 3, make_fake_stream())
@cute.jit
def optionals(
    absent: Optional[cute.Tensor],  # noqa: UP045
    present: Optional[cute.Tensor],  # noqa: UP045
    no_scale: Optional[c.Float32],  # noqa: UP045
    scale: Optional[c.Float32],  # noqa: UP045
    baked: c.Constexpr,
    stream: cu.CUstream,
):
    nothing().launch(**ONE, stream=stream)


@member(None)
@cute.jit
def all_absent(q: Optional[cute.Tensor]):  # noqa: UP045
    nothing().launch(**ONE)


@member(c.Int32(1))
@cute.jit
def no_kernel(n: c.Int32):
    pass


@member(make_fake_stream(), c.Int32(1), make_fake_stream())
@cute.jit
def two_streams(first: cu.CUstream, n: c.Int32, second: cu.CUstream):
    nothing().launch(**ONE, stream=first)
    nothing_else().launch(**ONE, stream=second)


@member(matrix(), c.Int32(1), make_fake_stream())
@cute.jit
def several_kernels(q: cute.Tensor, plan: c.Int32, stream: cu.CUstream):
    if plan == 0:
        nothing().launch(**ONE, stream=stream)
    else:
        nothing_else().launch(**ONE, stream=stream)


# Names that a pattern could take for another part of the header; some are not even C.
@member(
    *(matrix() for _ in range(5)),
    [matrix()],
    *(c.Int32(1) for _ in range(3)),
    (c.Int32(1),),
    make_fake_stream(),
)
@cute.jit
def names(
    module: cute.Tensor,
    ret: cute.Tensor,
    args: cute.Tensor,
    t: cute.Tensor,
    q_Tensor_q_t: cute.Tensor,
    elements: list,
    count: c.Int32,
    int: c.Int32,
    stream: c.Int32,
    data: cute.Shape,
    void: cu.CUstream,
):
    nothing().launch(**ONE, stream=void)


class Method:
    """A kernel that is a method, as most of the DSL's own are: the entry's name holds its class."""

    @cute.jit
    def __call__(self, q: cute.Tensor, stream: cu.CUstream):
        nothing().launch(**ONE, stream=stream)


for prefix in (
    "method",
    "_x",
    "a_wrapper",
    "cute_dsl_a_wrapper",
    "a_dsl_b",
    "a_Tensor_q_t",
    "a_Kernel_Module_t",
    "2d",
):
    MEMBERS[prefix] = Method(), (matrix(), make_fake_stream())


def export(out):
    """Write ``<name>.h`` and ``<name>.o`` of every member to the folder ``out``."""
    for name, (function, arguments) in MEMBERS.items():
        compiled = cute.compile(function, *arguments, options=OPTIONS)
        compiled.export_to_c(file_path=str(out), file_name=name, function_prefix=name)


def renew_golden_headers():
    golden = HEADERS / version("nvidia-cutlass-dsl")
    golden.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as out:
        export(out)
        for header in Path(out).glob("*.h"):
            (golden / header.name).write_bytes(header.read_bytes())


if __name__ == "__main__":
    from tests import zoo  # the entry of a method's name holds its module: never __main__

    zoo.export(Path(sys.argv[1])) if len(sys.argv) > 1 else zoo.renew_golden_headers()
