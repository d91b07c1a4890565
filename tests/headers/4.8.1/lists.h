
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
} lists_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_lists_cuda_init(void **);
void _mlir_lists_cuda_load_to_device(void **);
static inline void lists_Kernel_Module_Load(lists_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_lists_cuda_init((void **)(&initArgs));
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
        _mlir_lists_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void lists_Kernel_Module_Unload(lists_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} lists_Tensor_three_t;


typedef struct {
    lists_Tensor_three_t elements[3];
    int32_t count;
} lists_TensorList_three_t;


typedef struct {
    void *data;
    int64_t dynamic_shapes[3];
    int32_t dynamic_strides[2];
} lists_Tensor_one_t;


typedef struct {
    lists_Tensor_one_t elements[1];
    int32_t count;
} lists_TensorList_one_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} lists_Tensor_pair_t;


typedef struct {
    lists_Tensor_pair_t elements[2];
    int32_t count;
} lists_TensorList_pair_t;

#ifdef __cplusplus
extern "C"
#endif
void _mlir_lists__mlir_ciface_cutlass_lists_FakeTensorFloat16div1div1i64div11FakeTensorFloat16div1div1i64div11FakeTensorFloat16div1div1i64div11_FakeTensorFloat16i64div1i64div1i64div1div1div11_PairkFakeTensorFlo(void **args, int32_t num_args);

static inline int32_t cute_dsl_lists_wrapper(lists_Kernel_Module_t *module, lists_TensorList_three_t *three, lists_TensorList_one_t *one, lists_TensorList_pair_t *pair) {
    int32_t ret = 0;
    void *args[7] = {
        &three->elements[0], &three->elements[1], &three->elements[2], &one->elements[0], &pair->elements[0], &pair->elements[1],
        &ret
    };
    _mlir_lists__mlir_ciface_cutlass_lists_FakeTensorFloat16div1div1i64div11FakeTensorFloat16div1div1i64div11FakeTensorFloat16div1div1i64div11_FakeTensorFloat16i64div1i64div1i64div1div1div11_PairkFakeTensorFlo(args, 7);
    return ret;
}
