
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
} partly_static_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_partly_static_cuda_init(void **);
void _mlir_partly_static_cuda_load_to_device(void **);
static inline void partly_static_Kernel_Module_Load(partly_static_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_partly_static_cuda_init((void **)(&initArgs));
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
        _mlir_partly_static_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void partly_static_Kernel_Module_Unload(partly_static_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[3];
} partly_static_Tensor_pool_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[1];
} partly_static_Tensor_no_strides_t;


typedef struct {
    void *data;
    int64_t dynamic_strides[1];
} partly_static_Tensor_no_shapes_t;


typedef struct {
    void *data;
} partly_static_Tensor_whole_t;


typedef struct {
    void *data;
} partly_static_Tensor_point_t;

#ifdef __cplusplus
extern "C"
#endif
void _mlir_partly_static__mlir_ciface_cutlass_partly_static_FakeTensorFloat16div1128div164i64div1i64div1i64div11_FakeTensorFloat16div164641_FakeTensorFloat16464i64div11_FakeTensorFloat16464641_FakeTensorFloat16(void **args, int32_t num_args);

static inline int32_t cute_dsl_partly_static_wrapper(partly_static_Kernel_Module_t *module, partly_static_Tensor_pool_t *pool, partly_static_Tensor_no_strides_t *no_strides, partly_static_Tensor_no_shapes_t *no_shapes, partly_static_Tensor_whole_t *whole, partly_static_Tensor_point_t *point) {
    int32_t ret = 0;
    void *args[6] = {
        pool, no_strides, no_shapes, whole, point,
        &ret
    };
    _mlir_partly_static__mlir_ciface_cutlass_partly_static_FakeTensorFloat16div1128div164i64div1i64div1i64div11_FakeTensorFloat16div164641_FakeTensorFloat16464i64div11_FakeTensorFloat16464641_FakeTensorFloat16(args, 6);
    return ret;
}
