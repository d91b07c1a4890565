
#pragma once

#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <stdio.h>
#include <stdint.h>


// Macro to check for cuda errors.
#ifndef CUTE_DSL_CUDA_ERROR_CHECK
#define CUTE_DSL_CUDA_ERROR_CHECK(err) { \
    if ((err) != cudaSuccess) { \
        printf("Got Cuda Error %s: %s\n", cudaGetErrorName(err), cudaGetErrorString(err)); \
    } \
}

#endif

typedef struct {
    cudaLibrary_t module;
} numbers_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_numbers_cuda_init(void **);
void _mlir_numbers_cuda_load_to_device(void **);
static inline void numbers_Kernel_Module_Load(numbers_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_numbers_cuda_init((void **)(&initArgs));
    CUTE_DSL_CUDA_ERROR_CHECK(ret);
    int32_t device_id = 0;
    struct {
        cudaLibrary_t **library;
        int32_t *device_id;
        cudaError_t *ret;
    } loadArgs = {&libraryPtr, &device_id, &ret};
    int32_t device_count;
    CUTE_DSL_CUDA_ERROR_CHECK(cudaGetDeviceCount(&device_count));
    for (int32_t i = 0; i < device_count; i++) {
        device_id = i;
        _mlir_numbers_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void numbers_Kernel_Module_Unload(numbers_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

#ifdef __cplusplus
extern "C"
#endif
void _mlir_numbers__mlir_ciface_cutlass_numbers_True_1_1_1_1_1_1_1_1_10_10_10_10_10(void **args, int32_t num_args);

static inline int32_t cute_dsl_numbers_wrapper(numbers_Kernel_Module_t *module, uint8_t boolean, int8_t i8, uint8_t u8, int16_t i16, uint16_t u16, int32_t i32, uint32_t u32, int64_t i64, uint64_t u64, __half_raw f16, __nv_bfloat16 bf16, float f32, float tf32, double f64) {
    int32_t ret = 0;
    void *args[15] = {
        &boolean, &i8, &u8, &i16, &u16, &i32, &u32, &i64, &u64, &f16, &bf16, &f32, &tf32, &f64,
        &ret
    };
    _mlir_numbers__mlir_ciface_cutlass_numbers_True_1_1_1_1_1_1_1_1_10_10_10_10_10(args, 15);
    return ret;
}
