
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
} tuples_Kernel_Module_t;

#ifdef __cplusplus
extern "C" {
#endif
void _mlir_tuples_cuda_init(void **);
void _mlir_tuples_cuda_load_to_device(void **);
static inline void tuples_Kernel_Module_Load(tuples_Kernel_Module_t *module) {
    cudaLibrary_t *libraryPtr = &(module->module);
    cudaError_t ret = cudaSuccess;
    struct {
        cudaLibrary_t **libraryPtr;
        cudaError_t *ret;
    } initArgs = {&libraryPtr, &ret};
    _mlir_tuples_cuda_init((void **)(&initArgs));
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
        _mlir_tuples_cuda_load_to_device((void **)(&loadArgs));
        CUTE_DSL_CUDA_ERROR_CHECK(ret);
    }
}

static inline void tuples_Kernel_Module_Unload(tuples_Kernel_Module_t *module) {
    CUTE_DSL_CUDA_ERROR_CHECK(cudaLibraryUnload(module->module));
}

#ifdef __cplusplus
}
#endif

#ifdef __cplusplus
extern "C"
#endif
void _mlir_tuples__mlir_ciface_cutlass_tuples__5____Uint815_1_2__FakeStream(void **args, int32_t num_args);

static inline int32_t cute_dsl_tuples_wrapper(tuples_Kernel_Module_t *module, int32_t *dims, int64_t *far, uint8_t *near, int32_t *fixed, int32_t *single, cudaStream_t stream) {
    int32_t ret = 0;
    void *args[8] = {
        &dims[0], &dims[1], &far[0], &far[1], &near[0], &single[0], &stream,
        &ret
    };
    _mlir_tuples__mlir_ciface_cutlass_tuples__5____Uint815_1_2__FakeStream(args, 8);
    return ret;
}
