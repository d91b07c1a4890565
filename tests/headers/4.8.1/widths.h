
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
} widths_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_widths_cuda_init(void **);
void _mlir_widths_cuda_load_to_device(void **);
static inline void widths_Kernel_Module_Load(widths_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_widths_cuda_init((void **)(&initArgs));
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
        _mlir_widths_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void widths_Kernel_Module_Unload(widths_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

typedef struct {
    void *data;
    int32_t dynamic_shapes[3];
    int32_t dynamic_strides[2];
} widths_Tensor_a3232_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[3];
    int64_t dynamic_strides[2];
} widths_Tensor_a3264_t;


typedef struct {
    void *data;
    int64_t dynamic_shapes[3];
    int32_t dynamic_strides[2];
} widths_Tensor_a6432_t;


typedef struct {
    void *data;
    int64_t dynamic_shapes[3];
    int64_t dynamic_strides[2];
} widths_Tensor_a6464_t;

#ifdef __cplusplus
extern "C"
#endif
void _mlir_widths__mlir_ciface_cutlass_widths_FakeTensorFloat16div1div1div1div1div11_FakeTensorFloat16div1div1div1i64div1i64div11_FakeTensorFloat16i64div1i64div1i64div1div1div11_FakeTensorFloat16i64div1i64div1i6(void **args, int32_t num_args);

static inline int32_t cute_dsl_widths_wrapper(widths_Kernel_Module_t *module, widths_Tensor_a3232_t *a3232, widths_Tensor_a3264_t *a3264, widths_Tensor_a6432_t *a6432, widths_Tensor_a6464_t *a6464) {
    int32_t ret = 0;
    void *args[5] = {
        a3232, a3264, a6432, a6464,
        &ret
    };
    _mlir_widths__mlir_ciface_cutlass_widths_FakeTensorFloat16div1div1div1div1div11_FakeTensorFloat16div1div1div1i64div1i64div11_FakeTensorFloat16i64div1i64div1i64div1div1div11_FakeTensorFloat16i64div1i64div1i6(args, 5);
    return ret;
}
