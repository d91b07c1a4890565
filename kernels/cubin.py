"""What the device code inside an exported object uses: read from its own ELF, with no tool."""

import re
import struct
from typing import NamedTuple

EM_CUDA = 190
_PROGBITS, _NOBITS = 1, 8

# Attributes of .nv.info; values of format 4 carry their length, all others are 16 bits.
_FORMAT_SIZED = 4
_FRAME_SIZE, _REQUIRED_THREADS, _REGISTERS = 0x11, 0x10, 0x2F


class KernelUsage(NamedTuple):
    name: str
    registers: int  # per thread
    spill_bytes: int  # local memory per thread: spills, and arrays that did not fit into registers
    static_smem_nbytes: int  # what is launched with on top is the variant's to say
    block: tuple[int, int, int] | None  # where the kernel fixes it


class _Section(NamedTuple):
    name: str
    kind: int
    link: int
    data: bytes  # empty where the file holds none
    nbytes: int


def kernel_usage(image: bytes) -> list[KernelUsage]:
    """List the kernels of the one cubin in ``image``, in the order in which they were traced."""
    sections = _sections(_cubin(image))
    names = _symbol_names(sections)
    smem = {s.name.removeprefix(".nv.shared."): s.nbytes for s in sections if s.kind == _NOBITS}
    registers, frames, blocks = {}, {}, {}
    for section in sections:
        if section.name == ".nv.info":
            for attribute, value in _attributes(section.data):
                if attribute in (_REGISTERS, _FRAME_SIZE):
                    symbol, count = struct.unpack("<II", value)
                    (registers if attribute == _REGISTERS else frames)[names[symbol]] = count
        elif section.name.startswith(".nv.info."):
            for attribute, value in _attributes(section.data):
                if attribute == _REQUIRED_THREADS:
                    blocks[section.name[9:]] = struct.unpack("<III", value)
    kernels = [s.name[6:] for s in sections if s.name.startswith(".text.") and s.kind == _PROGBITS]
    return [
        KernelUsage(name, registers[name], frames.get(name, 0), smem.get(name, 0), blocks.get(name))
        for name in sorted(kernels, key=lambda name: int(re.search(r"(\d*)$", name)[1] or 0))
    ]


def _cubin(image: bytes) -> bytes:
    starts = [m.start() for m in re.finditer(b"\x7fELF", image)]
    found = [at for at in starts if image[at + 18 : at + 20] == EM_CUDA.to_bytes(2, "little")]
    if len(found) != 1:
        raise ValueError(f"expected one uncompressed cubin in the object, got {len(found)}")
    return image[found[0] :]


def _sections(elf: bytes) -> list[_Section]:
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQI", elf, at + size * i) for i in range(count)]
    names = elf[headers[names_index][4] :]
    return [
        _Section(
            _text(names, name),
            kind,
            link,
            b"" if kind == _NOBITS else elf[offset : offset + nbytes],
            nbytes,
        )
        for name, kind, _, _, offset, nbytes, link in headers
    ]


def _symbol_names(sections: list[_Section]) -> list[str]:
    table = next(s for s in sections if s.name == ".symtab")
    strings = sections[table.link].data
    return [_text(strings, entry[0]) for entry in struct.iter_unpack("<I20x", table.data)]


def _attributes(data: bytes):
    at = 0
    while at < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield attribute, data[at : at + value]
            at += value


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
