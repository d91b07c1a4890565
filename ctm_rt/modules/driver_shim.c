/*
 * What an object exported from CuTe DSL calls, on the CUDA driver API alone.
 *
 * The object expects the DSL's runtime and with it the CUDA runtime. Linked with this file it needs
 * libc and an installed driver: libcuda.so.1 is opened at the first call, so a module can be loaded
 * and inspected on a machine without one. Nothing here prints or aborts; a status travels back.
 * Runtime and driver agree on every structure and number that passes through, but for the launch
 * configuration. A kernel handle is a CUkernel: it belongs to no context, and serves all devices.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { NO_DRIVER = -1, OLD_DRIVER = -2 }; /* loader.py gives them their words */

static _Atomic(void *) libcuda;
static _Thread_local int first_failure;

/* Two threads may both open and both look up: they find the same, and the library stays open. */
static void *resolve(_Atomic(void *) *slot, const char *name)
{
    if (!*slot) {
        if (!libcuda)
            libcuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (libcuda)
            *slot = dlsym(libcuda, name);
    }
    return *slot;
}

/* Define `name`, which forwards to the driver's `call`. */
#define FORWARD(name, parameters, call, types, arguments)                  \
    int name parameters                                                    \
    {                                                                      \
        static _Atomic(void *) slot;                                       \
        int(*function) types = (int(*) types)resolve(&slot, #call);        \
        return function ? function arguments                               \
                        : libcuda ? OLD_DRIVER : NO_DRIVER;                \
    }

FORWARD(_cudaLibraryLoadData,
        (void **library, const void *image, void *options, void *values, unsigned count,
         void *library_options, void *library_values, unsigned library_count),
        cuLibraryLoadData, (void **, const void *, void *, void *, unsigned, void *, void *, unsigned),
        (library, image, options, values, count, library_options, library_values, library_count))

FORWARD(_cudaLibraryGetKernel, (void **kernel, void *library, const char *name),
        cuLibraryGetKernel, (void **, void *, const char *), (kernel, library, name))

FORWARD(_cuKernelGetAttribute, (int *value, int attribute, void *kernel, int device),
        cuKernelGetAttribute, (int *, int, void *, int), (value, attribute, kernel, device))

FORWARD(_cudaKernelSetAttributeForDevice, (void *kernel, int attribute, int value, int device),
        cuKernelSetAttribute, (int, int, void *, int), (attribute, value, kernel, device))

FORWARD(_cudaDeviceGetAttribute, (int *value, int attribute, int device),
        cuDeviceGetAttribute, (int *, int, int), (value, attribute, device))

FORWARD(_cudaGetDevice, (int *device), cuCtxGetDevice, (int *), (device))

FORWARD(_cuTensorMapEncodeTiled,
        (void *map, int dtype, uint32_t rank, void *address, const uint64_t *shape,
         const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
         int interleave, int swizzle, int promotion, int fill),
        cuTensorMapEncodeTiled,
        (void *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *,
         const uint32_t *, int, int, int, int),
        (map, dtype, rank, address, shape, strides, box, element_strides, interleave, swizzle,
         promotion, fill))

static FORWARD(current_context, (void **context), cuCtxGetCurrent, (void **), (context))
static FORWARD(push_context, (void *context), cuCtxPushCurrent_v2, (void *), (context))
static FORWARD(pop_context, (void **context), cuCtxPopCurrent_v2, (void **), (context))

int _cudaFuncSetAttribute(void *kernel, int attribute, int value)
{
    int device, status = _cudaGetDevice(&device);
    return status ? status : _cudaKernelSetAttributeForDevice(kernel, attribute, value, device);
}

/* The generated code asserts, then goes on as if nothing had failed; see _cudaLaunchKernelEx. */
void cuda_dialect_assert_success(int status)
{
    if (!first_failure)
        first_failure = status;
}

struct runtime_config { /* cudaLaunchConfig_t */
    uint32_t grid[3], block[3];
    size_t smem_nbytes;
    void *stream, *attributes;
    uint32_t num_attributes;
};

struct driver_config { /* CUlaunchConfig */
    uint32_t grid[3], block[3], smem_nbytes;
    void *stream, *attributes;
    uint32_t num_attributes;
};

static FORWARD(launch,
               (const struct driver_config *config, void *kernel, void **parameters),
               cuLaunchKernelEx, (const struct driver_config *, void *, void **, void **),
               (config, kernel, parameters, NULL))

int _cudaLaunchKernelEx(const struct runtime_config *from, void *kernel, void **parameters)
{
    struct driver_config to = {
        {from->grid[0], from->grid[1], from->grid[2]},
        {from->block[0], from->block[1], from->block[2]},
        (uint32_t)from->smem_nbytes,
        from->stream,
        from->attributes,
        from->num_attributes,
    };
    if (first_failure) /* a descriptor of this launch may be garbage */
        return first_failure;
    return launch(&to, kernel, parameters);
}

/*
 * Call `entry` on `stream` with `context` current, and return the first status that is not 0.
 *
 * Threads may share one array of packed arguments: it is copied, with a status of this call's own
 * in the last place, and its own stream wherever the array has `stream_cell`. Another signature takes
 * another name, so that loader.py never calls the one of an older module.
 */
__attribute__((visibility("default"))) int32_t ctm_rt_call_v1(
    void (*entry)(void **, int32_t), void *const *args, int32_t num_args, void *stream_cell,
    void *context, void *stream)
{
    void *packed[num_args], *current = NULL;
    int32_t status = current_context(&current);
    int other = current != context;

    for (int32_t i = 0; i < num_args; i++)
        packed[i] = args[i] == stream_cell ? &stream : args[i];
    packed[num_args - 1] = &status;

    if (!status && other)
        status = push_context(context);
    if (status)
        return status;
    first_failure = 0;
    entry(packed, num_args);
    if (other)
        pop_context(&current);
    return status ? status : first_failure;
}
