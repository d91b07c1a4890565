"""Headers of the exporter's form with chosen parameters, and strategies that choose them."""

from hypothesis import strategies as st

from ctm_rt.descriptors.header import FLOATS, INTEGERS, Parameter

# Written as the golden headers are, less the bodies that nobody reads.
FORM = """
#pragma once
#include <cuda_runtime.h>
#ifndef CUTE_DSL_CUDA_ERROR_CHECK
#define CUTE_DSL_CUDA_ERROR_CHECK(err) {{ \\
    if ((err) != cudaSuccess) {{ printf("%s\\n", cudaGetErrorName(err)); }} \\
}}
#endif

typedef struct {{
    cudaLibrary_t module;
}} {prefix}_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {{
#endif
void _mlir_{prefix}_cuda_init(void **);
void _mlir_{prefix}_cuda_load_to_device(void **);
static inline void {prefix}_Kernel_Module_Unload({prefix}_Kernel_Module_t *module) {{
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}}
#ifdef __cplusplus
}}
#endif
{typedefs}
#ifdef __cplusplus
extern "C"
#endif
void _mlir_{prefix}__mlir_ciface_f(void **args, int32_t num_args);

static inline int32_t cute_dsl_{prefix}_wrapper({prefix}_Kernel_Module_t *module, {signature}) {{
    int32_t ret = 0;
    void *args[{count}] = {{
        {packed},
        &ret
    }};
    _mlir_{prefix}__mlir_ciface_f(args, {count});
    return ret;
}}
"""

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True) | st.sampled_from(
    ["q_t", "module", "ret", "args", "wrapper", "Tensor_q_t", "Kernel_Module_t", "dsl_x_wrapper"]
)


def render(prefix, parameters):
    """Return the header of a function with these parameters, as the exporter would write it."""
    signature, packed, typedefs = [], [], []
    for p in parameters:
        signature.append(p.ctype + ("" if p.ctype.endswith("*") else " ") + p.name)
        match p.kind:
            case "tensor":
                packed.append(p.name)
            case "tensor_list":
                packed += [f"&{p.name}->elements[{i}]" for i in range(p.length)]
            case "int_tuple":
                packed += [f"&{p.name}[{i}]" for i in range(p.length)]
            case _:
                packed.append(f"&{p.name}")
        if p.kind.startswith("tensor"):
            lines = ["void *data;"]
            if p.shape_slots:
                lines.append(f"int{p.shape_bits}_t dynamic_shapes[{p.shape_slots}];")
            if p.stride_slots:
                lines.append(f"int{p.stride_bits}_t dynamic_strides[{p.stride_slots}];")
            element = f"{prefix}_Tensor_{p.name}_t"
            typedefs.append("typedef struct {\n    " + "\n    ".join(lines) + f"\n}} {element};\n")
        if p.kind == "tensor_list":
            typedefs.append(
                f"typedef struct {{\n    {element} elements[{p.length}];\n    int32_t count;\n"
                f"}} {prefix}_TensorList_{p.name}_t;\n"
            )
    return FORM.format(
        prefix=prefix,
        typedefs="\n\n".join(typedefs),
        signature=", ".join(signature),
        packed=", ".join(packed),
        count=len(packed) + 1,
    )


@st.composite
def tensors(draw, prefix, name, *, kind="tensor"):
    shape_slots, stride_slots = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    return Parameter(
        name,
        kind,
        f"{prefix}_{'Tensor' if kind == 'tensor' else 'TensorList'}_{name}_t *",
        shape_slots,
        draw(st.sampled_from([32, 64])) if shape_slots else 0,
        stride_slots,
        draw(st.sampled_from([32, 64])) if stride_slots else 0,
        length=1 if kind == "tensor" else draw(st.integers(1, 4)),
    )


@st.composite
def signatures(draw):
    """Draw (prefix, parameters) of a function with up to eight parameters of all kinds."""
    prefix = draw(words)
    parameters = []
    for name in draw(st.lists(words, max_size=8, unique=True)):
        kind = draw(
            st.sampled_from(["tensor", "tensor_list", "scalar", "pointer", "int_tuple", "stream"])
        )
        match kind:
            case "tensor" | "tensor_list":
                parameters.append(draw(tensors(prefix, name, kind=kind)))
            case "scalar":
                ctype = draw(st.sampled_from(sorted(INTEGERS | FLOATS)))
                parameters.append(Parameter(name, kind, ctype))
            case "int_tuple":
                ctype = draw(st.sampled_from(sorted(INTEGERS)))
                length = draw(st.integers(0, 5))
                parameters.append(Parameter(name, kind, f"{ctype} *", length=length))
            case "pointer":
                parameters.append(Parameter(name, kind, "void *"))
            case "stream":
                parameters.append(Parameter(name, kind, "cudaStream_t"))
    return prefix, tuple(parameters)
