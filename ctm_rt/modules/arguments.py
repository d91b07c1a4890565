"""From what the caller passes, by name, to the packed arguments of a C entry: our own kernels."""

from typing import Any, NamedTuple

from cffi import FFI

from ctm_rt.descriptors.header import Wrapper
from ctm_rt.errors import ArgumentError, ModuleError
from ctm_rt.modules.block import Block
from ctm_rt.modules.manifest import Manifest, ParameterSpec
from ctm_rt.tensor import HOST, DType, TensorView, view

_CARRIED = {DType("bf16"), DType("e4m3"), DType("e5m2")}  # held as integers by some libraries


class Packed(NamedTuple):
    """Arguments laid out for the driver shim."""

    args: int  # address of the array
    num_args: int
    stream_cell: int  # address that stands for the stream in it
    device: int | None  # None where no argument tells
    owners: tuple[object, ...]
    empty: bool = False  # an output has no element: there is nothing to launch


class KnownArguments:
    """The arguments of a kernel whose manifest says what they mean."""

    def __init__(self, ffi: FFI, wrapper: Wrapper, manifest: Manifest) -> None:
        told = [(spec.name, spec.kind, *_num_slots(spec)) for spec in manifest.parameters]
        declared = [(p.name, p.kind, p.shape_slots, p.stride_slots) for p in wrapper.parameters]
        if told != declared:
            raise ModuleError(
                f"{manifest.name}: header declares {declared}, manifest tells of {told}"
            )
        self._rows = [_Row.of(spec) for spec in manifest.parameters if spec.kind != "stream"]
        self._block = Block(ffi, wrapper)

    def pack(self, arguments: dict[str, Any]) -> Packed:
        """Check ``arguments``, which is emptied, and lay them out.

        This is most of what an unbound call costs, so it looks at each thing once, in line.
        """
        values: list[Any] = []
        owners: list[object] = []
        extents: dict[str, int] = {}
        device, first, empty = None, "", False
        for row in self._rows:
            name, dtype, hint, itemsize, fixed, named, misaligned, writes, is_out = row[:9]
            array = arguments.pop(name, None)
            if dtype is None:
                values.append(array)
                continue
            if array is None:
                if not row.optional:
                    raise ArgumentError(name, row.describe(), "nothing")
                values += row.absent
                continue
            if hint is not None or type(array) is not TensorView:
                array = view(array, name, dtype=hint)
            ptr, shape, strides, found, on, readonly, _ = array
            if found is not dtype:
                raise ArgumentError(name, f"dtype {dtype}", found)
            if len(shape) != row.rank:
                raise ArgumentError(name, row.describe(), shape)
            values.append(ptr)
            for i, extent in fixed:
                if shape[i] != extent:
                    raise ArgumentError(name, row.describe(), shape)
            for i, axis in named:
                extent = shape[i]
                if extents.setdefault(axis, extent) != extent:
                    raise ArgumentError(name, f"{axis} {extents[axis]}", extent)
                values.append(extent)
            if on != device:
                check_device(name, on, device, first)
                device, first = on, name
            if writes:
                if readonly:
                    raise ArgumentError(name, "a writable array", "a read-only one")
                empty = empty or (is_out and 0 in shape)
            inner, bits = strides[-1], ptr
            for stride in strides[:-1]:
                bits |= stride * itemsize
                values.append(stride)
            if inner != 1 or bits & misaligned:
                row.refuse_layout(ptr, shape, strides)
            owners.append(array)
        if arguments:
            raise unknown(arguments, [row.name for row in self._rows])
        memory, base = self._block.fill(values)
        owners.append(memory)
        cell = base + self._block.stream_at
        return Packed(base, self._block.num_args, cell, device, tuple(owners), empty)


class _Row(NamedTuple):
    """A ``ParameterSpec``, with what ``pack`` asks of it worked out."""

    name: str
    dtype: DType | None  # None: a scalar
    hint: DType | None
    itemsize: int
    fixed: tuple[tuple[int, int], ...]  # places of the axes that the kernel fixes, and extents
    named: tuple[tuple[int, str], ...]  # places of the others, and names
    misaligned: int  # bits of an address or a stride in bytes that must be clear
    writes: bool
    is_out: bool
    rank: int
    axes: tuple[int | str, ...]
    optional: bool
    absent: list[int]

    @classmethod
    def of(cls, spec: ParameterSpec) -> "_Row":
        dtype = DType(spec.dtype) if spec.kind == "tensor" else None
        return cls(
            spec.name,
            dtype,
            dtype if dtype in _CARRIED else None,
            dtype.itemsize if dtype else 0,
            tuple((i, axis) for i, axis in enumerate(spec.axes) if isinstance(axis, int)),
            tuple((i, axis) for i, axis in enumerate(spec.axes) if isinstance(axis, str)),
            spec.alignment - 1,
            spec.role != "in",
            spec.role == "out",
            len(spec.axes),
            spec.axes,
            spec.optional,
            [0] * (1 + sum(_num_slots(spec))),
        )

    def describe(self) -> str:
        """Say what the tensor is, as in ``f16 (batch, num_q_heads, 64)``."""
        return f"{self.dtype} ({', '.join(map(str, self.axes))}{',' * (len(self.axes) == 1)})"

    def refuse_layout(self, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        """Raise if a tensor with elements has a layout that the kernel cannot read."""
        if 0 in shape:
            return
        if strides[-1] != 1:
            raise ArgumentError(self.name, "a contiguous innermost axis", f"strides {strides}")
        nbytes = [stride * self.itemsize for stride in strides[:-1]]
        raise ArgumentError(
            self.name,
            f"address and outer strides in multiples of {self.misaligned + 1} bytes",
            f"address {ptr:#x}, strides {nbytes} bytes",
        )


def _num_slots(spec: ParameterSpec) -> tuple[int, int]:
    """Return the shape and stride slots by our kernels' convention: see ``ParameterSpec``."""
    return sum(isinstance(axis, str) for axis in spec.axes), max(0, len(spec.axes) - 1)


def check_device(name: str, on: int, device: int | None, first: str) -> None:
    """Refuse host memory and a second device."""
    if on == HOST:
        raise ArgumentError(name, "an array on a CUDA device", "host memory")
    if device is not None:
        raise ArgumentError(name, f"device {device}, like {first}", f"device {on}")


def unknown(arguments: dict[str, Any], names: list[str]) -> ArgumentError:
    """Return the refusal of what is left when every parameter has its argument."""
    return ArgumentError(next(iter(arguments)), f"one of {', '.join(names)}", "no such parameter")
