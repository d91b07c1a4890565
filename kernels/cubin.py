"""What the device code inside an exported object uses: read from its own ELF, with no tool."""

import re
import struct
from typing import NamedTuple

EM_CUDA = 190
_PROGBITS, _NOBITS = 1, 8

# Attributes of .nv.info; values of format 4 carry their length, all others are 16 bits.
_FORMAT_SIZED = 4
_FRAME_SIZE, _REQUIRED_THREADS, _REGISTERS = 0x11, 0x10, 0x2F

# The low 9 bits of a 128-bit instruction are its opcode; the same on sm_80 to sm_121 (nvdisasm).
_OPCODES = {
    0x03C: "HMMA",  # f16 and bf16 matrix multiply
    0x03B: "LDSM",  # ldmatrix
    0x1AE: "LDGSTS",  # cp.async
    0x1B4: "UTMALDG",  # cp.async.bulk.tensor
    0x1BA: "UBLKCP",  # cp.async.bulk
    0x183: "LDL",
    0x187: "STL",
}
_WARPGROUP_OPCODES = {  # sm_90a alone
    0x1F0: "HGMMA",  # f16 matrix multiply
    0x1C5: "WARPGROUP",  # a fence before those, a wait after them
}
_SYSTEM_SMEM_NBYTES = 1024  # from sm_90 on a cubin counts it among a kernel's own (ptxas does not)
_LDGSTS_128 = 2  # in the 2 bits of its second word that say 32, 64 or 128 bits


class KernelUsage(NamedTuple):
    name: str
    registers: int  # per thread
    spill_bytes: int  # local memory per thread: spills, and arrays that did not fit into registers
    static_smem_nbytes: int  # what is launched with on top is the variant's to say
    block: tuple[int, int, int] | None  # where the kernel fixes it
    instructions: dict[str, int]  # how many of those that tell whether it is what was meant

    @property
    def is_serialised(self) -> bool:
        """Whether ptxas gave each multiply of a warpgroup a wait of its own, which it tells nobody.

        It must where it cannot tell the registers in flight from others (its warnings C7510 on).
        """
        return self.instructions["WARPGROUP"] > self.instructions["HGMMA"]


class _Section(NamedTuple):
    name: str
    kind: int
    link: int
    data: bytes  # empty where the file holds none
    nbytes: int


def kernel_usage(image: bytes, gpu_arch: str) -> list[KernelUsage]:
    """List the kernels of the one cubin in ``image``, in the order in which they were traced."""
    sections = _sections(_cubin(image))
    names = _symbol_names(sections)
    system = _SYSTEM_SMEM_NBYTES if _number(gpu_arch) >= 90 else 0
    smem = {
        s.name.removeprefix(".nv.shared."): s.nbytes - system
        for s in sections
        if s.kind == _NOBITS and s.name.startswith(".nv.shared.")
    }
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
    kernels = [
        (s.name.removeprefix(".text."), _instructions(s.data, gpu_arch))
        for s in sections
        if s.name.startswith(".text.") and s.kind == _PROGBITS
    ]
    return [
        KernelUsage(
            name, registers[name], frames.get(name, 0), smem.get(name, 0), blocks.get(name), counts
        )
        for name, counts in sorted(kernels, key=_traced)
    ]


def _traced(kernel: tuple[str, dict[str, int]]) -> int:
    """Return the number that ends a kernel's name."""
    return int(re.search(r"(\d*)$", kernel[0])[1] or 0)


def _number(gpu_arch: str) -> int:
    return int(re.sub(r"\D", "", gpu_arch))


def _instructions(code: bytes, gpu_arch: str) -> dict[str, int]:
    """Count the opcodes that there are names for; copies of 16 bytes apart from narrower ones."""
    width_at = 10 if _number(gpu_arch) >= 100 else 9
    names = _OPCODES | (_WARPGROUP_OPCODES if _number(gpu_arch) == 90 else {})
    counts = dict.fromkeys([*_OPCODES.values(), *_WARPGROUP_OPCODES.values(), "LDGSTS.128"], 0)
    for low, high in struct.iter_unpack("<QQ", code):
        name = names.get(low & 0x1FF)
        if name == "LDGSTS" and high >> width_at & 3 == _LDGSTS_128:
            name = "LDGSTS.128"
        if name:
            counts[name] += 1
    return counts


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
