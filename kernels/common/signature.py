"""A kernel's parameters, written once: traced with, and told to the manifest.

Our kernels keep one convention. A named axis is dynamic, an integer axis is static; the innermost
axis is contiguous; every other stride is dynamic and a multiple of the alignment.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import sym_int32, sym_int64

_DTYPES = {
    "f16": cutlass.Float16,
    "e4m3": cutlass.Uint8,  # the kernels convert bytes: no DSL arithmetic on every arch
    "f32": cutlass.Float32,
    "i32": cutlass.Int32,
}


class TensorParameter(NamedTuple):
    name: str
    role: str  # in, out, workspace, semaphore
    dtype: str
    axes: tuple[str | int, ...]
    alignment: int = 16  # bytes, of the pointer and of every stride but the innermost
    optional: bool = False

    def fake(self) -> Any:
        dtype = _DTYPES[self.dtype]
        shape = tuple(sym_int32() if isinstance(axis, str) else axis for axis in self.axes)
        step = max(1, self.alignment * 8 // dtype.width)
        outer = tuple(sym_int64(divisibility=step) for _ in self.axes[:-1])
        return make_fake_tensor(dtype, shape, stride=(*outer, 1), assumed_align=self.alignment)

    def row(self) -> dict[str, Any]:
        return {"kind": "tensor", **self._asdict(), "axes": list(self.axes)}


class ScalarParameter(NamedTuple):
    name: str
    dtype: str

    def fake(self) -> Any:
        return _DTYPES[self.dtype](0)

    def row(self) -> dict[str, Any]:
        return {"kind": "scalar", **self._asdict()}


class StreamParameter(NamedTuple):
    name: str = "stream"

    def fake(self) -> Any:
        return make_fake_stream()

    def row(self) -> dict[str, Any]:
        return {"kind": "stream", "name": self.name}


Parameter = TensorParameter | ScalarParameter | StreamParameter
