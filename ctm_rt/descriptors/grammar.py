"""The form of what the CuTe DSL exporter writes, as patterns over C text.

Written for the headers in ``tests/headers``; what a new version of the DSL changes is changed here.
The numbers of digits are bounds on what is believed, far above what a kernel can take.
"""

import re
from typing import Final


def _c(pattern: str) -> re.Pattern[str]:
    """Compile a pattern over C text in which each blank stands for any white space, or none."""
    return re.compile(pattern.replace(" ", r"\s*"), re.ASCII)


# Comments and preprocessor lines with their continuations: the error macro, `#ifdef __cplusplus`.
NOISE: Final = re.compile(r"/\*.*?\*/|//[^\n]*|^[ \t]*#(?:\\.|[^\\\n])*", re.DOTALL | re.MULTILINE)
WRAPPER_HEAD: Final = _c(r"static inline \w+\s+(?P<name>cute_(?:experimental_)?dsl_\w+_wrapper) \(")
WRAPPER: Final = _c(
    r"static inline int32_t\s+"
    r"(?P<name>cute_(?:experimental_)?dsl_(?P<prefix>[A-Za-z_]\w*)_wrapper) "
    r"\( (?P=prefix)_Kernel_Module_t \* module\b (?P<parameters>(?:,[^(){};]*)?) \) \{"
    r" int32_t\s+ret = 0 ; void \* args \[ (?P<declared>\d{1,5}) \] = \{ (?P<packed>[^{};]*) \} ;"
    r" (?P<entry>_mlir_(?P=prefix)__mlir_ciface_\w+) \( args , (?P<passed>\d{1,5}) \) ;"
    r" return\s+ret ; \}"
)
PARAMETER: Final = _c(r"(?P<base>\w+)(?:\s+| (?P<pointer>\*) )(?P<name>[A-Za-z_]\w*)")
STRUCT: Final = _c(r"typedef\s+struct \{ (?P<fields>[^{}]*?) \} (?P<name>\w+) ;")
PROTOTYPE: Final = _c(r"void\s+(?P<name>\w+) \( (?P<arguments>[^(){};]*?) \) ;")
ENTRY_ARGUMENTS: Final = _c(r"void \* \* args , int32_t\s+num_args")
LOAD_ARGUMENTS: Final = _c(r"void \* \* (?:\w+)?")
MODULE_FIELDS: Final = _c(r"cudaLibrary_t\s+module ;")
TENSOR_FIELDS: Final = _c(
    r"void \* data ;"
    r"(?: int(?P<shape_bits>32|64)_t\s+dynamic_shapes \[ (?P<shape_slots>[1-9]\d{0,3}) \] ;)?"
    r"(?: int(?P<stride_bits>32|64)_t\s+dynamic_strides \[ (?P<stride_slots>[1-9]\d{0,3}) \] ;)?"
)
LIST_FIELDS: Final = _c(
    r"(?P<element>\w+)\s+elements \[ (?P<length>[1-9]\d{0,3}) \] ; int32_t\s+count ;"
)
