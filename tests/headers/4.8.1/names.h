
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
} names_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_names_cuda_init(void **);
void _mlir_names_cuda_load_to_device(void **);
static inline void names_Kernel_Module_Load(names_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_names_cuda_init((void **)(&initArgs));
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
        _mlir_names_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void names_Kernel_Module_Unload(names_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_module_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_ret_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_args_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_t_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_q_Tensor_q_t_t;


typedef struct {
    void *data;
    int32_t dynamic_shapes[2];
    int64_t dynamic_strides[1];
} names_Tensor_elements_t;


typedef struct {
    names_Tensor_elements_t elements[1];
    int32_t count;
} names_TensorList_elements_t;

#ifdef __cplusplus
extern "C"
#endif
void _mlir_names__mlir_ciface_cutlass_names_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64di(void **args, int32_t num_args);

static inline int32_t cute_dsl_names_wrapper(names_Kernel_Module_t *module, names_Tensor_module_t *module, names_Tensor_ret_t *ret, names_Tensor_args_t *args, names_Tensor_t_t *t, names_Tensor_q_Tensor_q_t_t *q_Tensor_q_t, names_TensorList_elements_t *elements, int32_t count, int32_t int, int32_t stream, int32_t *data, cudaStream_t void) {
    int32_t ret = 0;
    void *args[12] = {
        module, ret, args, t, q_Tensor_q_t, &elements->elements[0], &count, &int, &stream, &data[0], &void,
        &ret
    };
    _mlir_names__mlir_ciface_cutlass_names_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64div11_FakeTensorFloat16div1div1i64di(args, 12);
    return ret;
}
