"""All arguments of one launch in one block of memory, written by one call."""

import struct
from collections.abc import Sequence
from typing import Any

from cffi import FFI

from ctm_rt.descriptors.header import Parameter, Wrapper
from ctm_rt.errors import ArgumentError, HeaderError

_CODES = {
    **dict(zip((f"int{bits}_t" for bits in (8, 16, 32, 64)), "bhiq", strict=True)),
    **dict(zip((f"uint{bits}_t" for bits in (8, 16, 32, 64)), "BHIQ", strict=True)),
    "float": "f",
    "double": "d",
    "__half_raw": "e",
}


class Block:
    """Where the arguments of a wrapper of tensors, scalars and streams lie in one block.

    It holds what ``descriptors.fill`` and ``pack`` build piece by piece. For the decode kernel's
    fourteen arguments those take 26 us, ``fill`` here 2.5 us; a call with new arrays pays that.

    Attributes
    ----------
    num_args : int
        Addresses in the packed array, which is at the front of the block.
    stream_at : int
        Offset of the cell to which every stream of the array points.
    """

    def __init__(self, ffi: FFI, wrapper: Wrapper) -> None:
        self._ffi = ffi
        self.num_args = len(wrapper.parameters) + 1
        self.stream_at = 8 * self.num_args
        status_at = self.stream_at + 8
        self._offsets, formats = [], [f"{self.num_args}Q16x"]
        self._parts: list[tuple[Parameter, struct.Struct]] = []
        at = status_at + 8
        for parameter in wrapper.parameters:
            if parameter.kind == "stream":
                self._offsets.append(self.stream_at)
                continue
            part = struct.Struct("=" + _format(ffi, parameter))
            self._parts.append((parameter, part))
            self._offsets.append(at)
            padding = -part.size % 8
            formats.append(f"{part.format[1:]}{padding}x")
            at += part.size + padding
        self._offsets.append(status_at)
        self._struct = struct.Struct("=" + "".join(formats))

    def fill(self, values: Sequence[Any]) -> tuple[Any, int]:
        """Return a new block with ``values``, and its address.

        Parameters
        ----------
        values
            In order, for each tensor its address, extents and strides, slot by slot; for each
            scalar its value.
        """
        memory = self._ffi.new("char[]", self._struct.size)
        base = int(self._ffi.cast("uintptr_t", memory))
        addresses = [base + offset for offset in self._offsets]
        try:
            self._struct.pack_into(self._ffi.buffer(memory), 0, *addresses, *values)
        except (struct.error, OverflowError, TypeError) as error:
            raise self._misfit(values) from error
        return memory, base

    def _misfit(self, values: Sequence[Any]) -> ArgumentError:
        at = 0
        for parameter, part in self._parts:
            count = 1 + parameter.shape_slots + parameter.stride_slots
            own, at = values[at : at + count], at + count
            try:
                part.pack(*own)
            except (struct.error, OverflowError, TypeError):
                got = repr(own[0]) if parameter.kind == "scalar" else list(own[1:])
                return ArgumentError(parameter.name, f"a value that fits {parameter.base}", got)
        raise HeaderError(f"{len(values)} values for {at} slots")


def _format(ffi: Any, parameter: Parameter) -> str:
    """Return the ``struct`` format of one parameter, from cffi's offsets."""
    if parameter.kind == "scalar" and parameter.ctype in _CODES:
        return _CODES[parameter.ctype]
    if parameter.kind != "tensor":
        raise HeaderError(f"{parameter.name}: a module of ours has no {parameter.ctype}")
    layout, formats, at = ffi.typeof(parameter.base), [], 0
    for _, field in layout.fields or ():
        array = field.type.kind == "array"
        item = field.type.item if array else field.type
        code = {4: "i", 8: "q"}[ffi.sizeof(item)] if array else "Q"
        formats.append(f"{field.offset - at}x{field.type.length if array else 1}{code}")
        at = field.offset + ffi.sizeof(field.type)
    return "".join(formats) + f"{ffi.sizeof(layout) - at}x"
