"""Read the C header of an exported kernel: its wrapper's parameters and the layout of each one.

The header says everything about how the C entry is called and nothing about what the arguments
mean. The wrapper's own signature names the descriptor types, so a descriptor of another variant
cannot slip in; the wrapper's body, which packs the arguments, is checked against the signature.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from cffi import FFI
from cffi.error import CDefError, FFIError

from ctm_rt.descriptors import grammar
from ctm_rt.errors import HeaderError

Kind = Literal["tensor", "tensor_list", "scalar", "pointer", "int_tuple", "stream"]

INTEGERS: Final = frozenset(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS: Final = frozenset({"float", "double", "__half_raw", "__nv_bfloat16"})

# The toolkit's types, by size and alignment: arguments are passed by address, so no more is needed.
_PRELUDE: Final = """\
typedef void *cudaLibrary_t;
typedef void *cudaStream_t;
typedef uint16_t __half_raw;
typedef uint16_t __nv_bfloat16;"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the wrapper, as the header declares it.

    Attributes
    ----------
    name : str
    kind : "tensor", "tensor_list", "scalar", "pointer", "int_tuple" or "stream"
    ctype : str
        Type in the wrapper's signature: ``"fmha_Tensor_q_t *"``, ``"float"``, ``"int32_t *"``, ...
    shape_slots, stride_slots : int
        Extents and strides that the caller supplies for a tensor, or for each one of a list. What
        is static, and a stride of 1, has no slot.
    shape_bits, stride_bits : int
        32 or 64; 0 where there is no slot.
    length : int
        Addresses that the parameter takes in the packed array: the number of tensors of a list,
        the dynamic integers of a tuple (0 if all are static), else 1.
    base, cell : str
        Derived: the C type without its pointer, and that of the value that is made for it.
    """

    name: str
    kind: Kind
    ctype: str
    shape_slots: int = 0
    shape_bits: int = 0
    stride_slots: int = 0
    stride_bits: int = 0
    length: int = 1
    base: str = field(init=False, repr=False)
    cell: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        base = self.ctype.removesuffix(" *")
        cells = {"tensor": self.ctype, "tensor_list": self.ctype, "int_tuple": f"{base}[]"}
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "cell", cells.get(self.kind, f"{self.ctype} *"))

    def as_dict(self) -> dict[str, str | int]:
        """Return what ``ctm-rt inspect --json`` prints; ``length`` only where it can vary."""
        row: dict[str, str | int] = {
            "name": self.name,
            "kind": self.kind,
            "ctype": self.ctype,
            "shape_slots": self.shape_slots,
            "shape_bits": self.shape_bits,
            "stride_slots": self.stride_slots,
            "stride_bits": self.stride_bits,
        }
        return row | {"length": self.length} if self.kind in ("tensor_list", "int_tuple") else row


@dataclass(frozen=True, slots=True)
class Wrapper:
    """What one exported header declares.

    Attributes
    ----------
    name : str
        The wrapper function: ``cute_dsl_<prefix>_wrapper``, or ``cute_experimental_dsl_...``.
    prefix : str
        What the exporter was told to put before every name.
    parameters : tuple of Parameter
        In order, without the leading module, which the C entry does not take.
    entry, init, load_to_device : str
        Symbols of the C entry, of the module's set-up and of its set-up on one device.
    cdef : str
        Declarations of the descriptors and of the three symbols, for :func:`make_ffi`.
    """

    name: str
    prefix: str
    parameters: tuple[Parameter, ...]
    entry: str
    init: str
    load_to_device: str
    cdef: str

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in order."""
        return tuple(parameter.name for parameter in self.parameters)

    def as_dict(self) -> dict[str, Any]:
        """Return the document that ``ctm-rt inspect --json`` prints."""
        rows = [parameter.as_dict() for parameter in self.parameters]
        return {"wrapper": self.name, "prefix": self.prefix, "parameters": rows}


def read_header(path: str | Path) -> Wrapper:
    """Parse the header at ``path``; every error is a HeaderError that begins with the path."""
    try:
        return parse_header(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HeaderError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise HeaderError(f"{path}: {error}") from error


def parse_header(text: str) -> Wrapper:
    """Parse the text of a header that the CuTe DSL exporter wrote.

    White space and comments are free, so a reformatted header parses too; so does one without the
    ``extern "C"`` blocks.

    Raises
    ------
    HeaderError
        The text is cut off, has no wrapper or several, names an unknown type or a descriptor that
        is not its own, or packs its arguments otherwise than its signature says. The message says
        which, and gives the line where there is one.
    """
    text = grammar.NOISE.sub(lambda noise: "\n" * noise[0].count("\n") or " ", text)
    wrapper = _wrapper(text)
    name, prefix, where = wrapper["name"], wrapper["prefix"], f"{_line(wrapper)}: {wrapper['name']}"
    packed = ["".join(slot.split()) for slot in wrapper["packed"].split(",") if slot.strip()]

    structs = _Structs(text)
    structs.match(f"{prefix}_Kernel_Module_t", grammar.MODULE_FIELDS)
    parameters: list[Parameter] = []
    for declaration in map(str.strip, wrapper["parameters"].split(",")):
        if declaration:  # the exporter leaves `module, )` when every argument is absent
            parameters.append(_parameter(declaration, where, prefix, structs, packed))
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise HeaderError(f"{where}: a parameter's name comes twice in {names}")

    expected = [*(slot for parameter in parameters for slot in _slots(parameter)), "&ret"]
    counts = {int(wrapper["declared"]), int(wrapper["passed"]), len(expected)}
    if packed != expected or len(counts) > 1:
        raise HeaderError(
            f"{where}: by its signature it packs {len(expected)} arguments {expected}, but it "
            f"declares {wrapper['declared']}, passes {wrapper['passed']} and packs {packed}"
        )

    symbols = {
        wrapper["entry"]: grammar.ENTRY_ARGUMENTS,
        f"_mlir_{prefix}_cuda_init": grammar.LOAD_ARGUMENTS,
        f"_mlir_{prefix}_cuda_load_to_device": grammar.LOAD_ARGUMENTS,
    }
    prototypes = {found["name"]: found for found in grammar.PROTOTYPE.finditer(text)}
    for symbol, form in symbols.items():
        if symbol not in prototypes or not form.fullmatch(prototypes[symbol]["arguments"]):
            raise HeaderError(f"{where}: no prototype of {symbol} as the exporter writes it")
    declarations = [*structs.used, *(prototypes[symbol][0] for symbol in symbols)]
    cdef = [_PRELUDE, *(" ".join(text.split()) for text in declarations)]
    entry, init, load_to_device = symbols
    return Wrapper(
        name, prefix, tuple(parameters), entry, init, load_to_device, cdef="\n".join(cdef)
    )


def make_ffi(wrapper: Wrapper) -> FFI:
    """Return a cffi instance that knows the wrapper's types; ``dlopen`` finds its three symbols."""
    ffi = FFI()
    try:
        ffi.cdef(wrapper.cdef)
    except (CDefError, FFIError) as error:
        raise HeaderError(f"{wrapper.name}: cffi refuses its declarations: {error}") from error
    return ffi


def _line(match: re.Match[str]) -> str:
    lines = match.string.count("\n", 0, match.start()) + 1
    return f"line {lines}"


def _wrapper(text: str) -> re.Match[str]:
    heads = list(grammar.WRAPPER_HEAD.finditer(text))
    if len(heads) != 1:
        names = ", ".join(f"{head['name']} ({_line(head)})" for head in heads)
        raise HeaderError(f"expected one function cute_dsl_<prefix>_wrapper, got {names or 'none'}")
    wrapper = grammar.WRAPPER.match(text, heads[0].start())
    if wrapper is None:
        raise HeaderError(
            f"{_line(heads[0])}: {heads[0]['name']}: cut off, or not of the exporter's form "
            "'int32_t cute_dsl_<prefix>_wrapper(<prefix>_Kernel_Module_t *module, ...) { ... }'"
        )
    return wrapper


class _Structs:
    """The typedefs of a header, and the text of those that were asked for."""

    def __init__(self, text: str) -> None:
        self.used: list[str] = []  # in the order of use, which is that of dependence
        self._found: dict[str, re.Match[str]] = {}
        for struct in grammar.STRUCT.finditer(text):
            if struct["name"] in self._found:
                raise HeaderError(f"{_line(struct)}: second typedef of {struct['name']}")
            self._found[struct["name"]] = struct

    def match(self, name: str, form: re.Pattern[str]) -> re.Match[str]:
        struct = self._found.get(name)
        if struct is None:
            raise HeaderError(f"no typedef of {name}")
        fields = form.fullmatch(struct["fields"])
        if fields is None:
            got = " ".join(struct["fields"].split())
            raise HeaderError(f"{_line(struct)}: {name}: unknown fields '{got}'")
        self.used.append(struct[0])
        return fields


def _parameter(
    declaration: str, where: str, prefix: str, structs: _Structs, packed: list[str]
) -> Parameter:
    found = grammar.PARAMETER.fullmatch(declaration)
    if found is None:
        raise HeaderError(f"{where}: cannot read parameter '{declaration}'")
    name, base = found["name"], found["base"]
    ctype = f"{base} *" if found["pointer"] else base
    tensor = f"{prefix}_Tensor_{name}_t"

    if ctype == f"{tensor} *":
        return Parameter(
            name, "tensor", ctype, **_slot_fields(structs.match(tensor, grammar.TENSOR_FIELDS))
        )
    if ctype == f"{prefix}_TensorList_{name}_t *":
        slots = _slot_fields(structs.match(tensor, grammar.TENSOR_FIELDS))
        fields = structs.match(base, grammar.LIST_FIELDS)
        if fields["element"] != tensor:
            raise HeaderError(f"{base}: expected elements of {tensor}, got {fields['element']}")
        return Parameter(name, "tensor_list", ctype, length=int(fields["length"]), **slots)
    if ctype == "void *":
        return Parameter(name, "pointer", ctype)
    if ctype == "cudaStream_t":
        return Parameter(name, "stream", ctype)
    if ctype in INTEGERS | FLOATS:
        return Parameter(name, "scalar", ctype)
    if base in INTEGERS:
        # Only the packed array tells how many leaves are dynamic.
        length = sum(slot.startswith(f"&{name}[") for slot in packed)
        return Parameter(name, "int_tuple", ctype, length=length)
    raise HeaderError(
        f"{where}: parameter '{name}' has type '{ctype}', neither its own descriptor "
        f"'{tensor} *' nor a type that the exporter knows"
    )


def _slot_fields(fields: re.Match[str]) -> dict[str, int]:
    return {name: int(value or 0) for name, value in fields.groupdict().items()}


def _slots(parameter: Parameter) -> Iterator[str]:
    """Spell the parameter's part of the packed array as the exporter does."""
    name = parameter.name
    match parameter.kind:
        case "tensor":
            yield name
        case "tensor_list":
            yield from (f"&{name}->elements[{i}]" for i in range(parameter.length))
        case "int_tuple":
            yield from (f"&{name}[{i}]" for i in range(parameter.length))
        case _:
            yield f"&{name}"
