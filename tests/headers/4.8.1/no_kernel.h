
#pragma once

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <stdio.h>
#include <stdint.h>


#ifdef __cplusplus
extern "C"
#endif
void _mlir_no_kernel__mlir_ciface_cutlass_no_kernel_(void **args, int32_t num_args);

static inline int32_t cute_dsl_no_kernel_wrapper(no_kernel_Kernel_Module_t *module, int32_t n) {
    int32_t ret = 0;
    void *args[2] = {
        &n,
        &ret
    };
    _mlir_no_kernel__mlir_ciface_cutlass_no_kernel_(args, 2);
    return ret;
}
