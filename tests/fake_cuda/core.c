/* Entry points, devices, contexts, and what the tests steer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

/* ---- lock, log, faults -------------------------------------------------------------------- */

static pthread_mutex_t mutex = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int initialised;

struct guard fake_lock(void) {
    pthread_mutex_lock(&mutex);
    return (struct guard){1};
}
void fake_unlock(struct guard *guard) {
    (void)guard;
    pthread_mutex_unlock(&mutex);
}

struct record { char call[48]; uintptr_t a, b; }; /* mirrored in __init__.py */
static struct record *records;
static size_t num_records, max_records;
static struct { char call[48]; CUresult code; int times; } faults[16];

CUresult fake_enter(const char *call, uintptr_t a, uintptr_t b) {
    if (num_records == max_records) {
        max_records = max_records ? 2 * max_records : 1024;
        records = realloc(records, max_records * sizeof *records);
    }
    struct record *record = &records[num_records++];
    *record = (struct record){.a = a, .b = b};
    snprintf(record->call, sizeof record->call, "%s", call);
    char *version = strstr(record->call, "_v"); /* cuMemAlloc_v2 is cuMemAlloc to everyone */
    if (version) *version = 0;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (faults[i].times && !strcmp(faults[i].call, record->call)) {
            faults[i].times--;
            return faults[i].code;
        }
    return initialised || !strcmp(call, "cuInit") ? SUCCESS : NOT_INITIALIZED;
}

void fake_fail(const char *call, CUresult code, int times) {
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (!faults[i].times) {
            snprintf(faults[i].call, sizeof faults[i].call, "%s", call);
            faults[i].code = code;
            faults[i].times = times;
            return;
        }
}

size_t fake_num_calls(void) { return num_records; }
const struct record *fake_call(size_t index) { return &records[index]; }

/* ---- handles ------------------------------------------------------------------------------ */

static struct object *objects;
static uintptr_t next_handle = 0x10000;

void *fake_add(void *object, enum kind kind) {
    struct object *head = object;
    head->handle = (void *)(next_handle += 16);
    head->kind = kind;
    head->next = objects;
    return (objects = head)->handle;
}

void *fake_find(const void *handle, enum kind kind) {
    for (struct object *object = objects; object; object = object->next)
        if (object->handle == handle) return object->kind == kind ? object : NULL;
    return NULL;
}

void fake_remove(void *object) {
    for (struct object **link = &objects; *link; link = &(*link)->next)
        if (*link == object) {
            *link = (*link)->next;
            free(object);
            return;
        }
}

struct object *fake_objects(void) { return objects; }

size_t fake_live_objects(enum kind kind) {
    size_t count = 0;
    for (struct object *object = objects; object; object = object->next)
        count += object->kind == kind;
    return count;
}

/* ---- devices ------------------------------------------------------------------------------ */

static int num_devices = 1, capability[MAX_DEVICES] = {90, 90, 90, 90, 90, 90, 90, 90};
static struct context *primary[MAX_DEVICES];

int fake_num_devices(void) { return num_devices; }
int fake_cc(int device) { return capability[device]; }
int fake_max_smem(int device) {
    int cc = capability[device];
    return cc == 80 || cc == 87 ? 166912 : cc == 86 || cc == 89 || cc >= 120 ? 101376 : 232448;
}
void fake_set_device(int device, int cc) { capability[device] = cc; }
void fake_set_num_devices(int count) { num_devices = count; }

void fake_reset(void) {
    num_devices = 1;
    for (int i = 0; i < MAX_DEVICES; i++) {
        capability[i] = 90;
        if (primary[i]) primary[i]->legacy.paused = 0;
    }
    num_records = 0;
    memset(faults, 0, sizeof faults);
    for (struct object *object = objects; object; object = object->next)
        if (object->kind == STREAM) {
            struct stream *stream = (void *)object;
            stream->capturing = stream->paused = 0;
            stream->done = stream->queued;
        }
    fake_forget_launches();
}

CUresult cuInit(unsigned flags) {
    ENTER(flags, 0);
    REQUIRE(flags == 0, INVALID_VALUE);
    REQUIRE(num_devices, NO_DEVICE);
    initialised = 1;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER(0, 0);
    *count = num_devices;
    return SUCCESS;
}

CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER(ordinal, 0);
    REQUIRE(ordinal >= 0 && ordinal < num_devices, INVALID_DEVICE);
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, int device) {
    ENTER(device, 0);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    snprintf(name, size, "Fake GPU %d.%d", capability[device] / 10, capability[device] % 10);
    return SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER(device, 0);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    *bytes = (size_t)80 << 30;
    return SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(attribute, device);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;  /* threads per block, block x and y */
    case 4: *value = 64; break;
    case 5: *value = 0x7fffffff; break;            /* grid x, y, z */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;
    case 10: *value = 32; break;                   /* warp */
    case 12: case 82: *value = 65536; break;       /* registers per block and SM */
    case 13: *value = 1755000; break;              /* kHz */
    case 16: *value = 132; break;                  /* SMs */
    case 31: case 41: case 95: *value = 1; break;  /* concurrent kernels, UVA, cooperative */
    case 38: *value = 50 << 20; break;             /* L2 */
    case 39: *value = 2048; break;
    case 75: *value = capability[device] / 10; break;
    case 76: *value = capability[device] % 10; break;
    case 81: *value = fake_max_smem(device) + 1024; break;
    case 97: *value = fake_max_smem(device); break;
    case 120: *value = capability[device] >= 90; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

/* ---- contexts ----------------------------------------------------------------------------- */

static __thread void *stack[16]; /* handles: a destroyed context is then found out */
static __thread int depth;

static struct context *new_context(int device) {
    struct context *context = calloc(1, sizeof *context);
    fake_add(context, CONTEXT);
    context->device = device;
    context->refs = 1;
    context->legacy.context = context;
    context->legacy.id = next_handle += 16;
    return context;
}

CUresult fake_context(struct context **context) {
    REQUIRE(depth && stack[depth - 1], INVALID_CONTEXT);
    *context = fake_find(stack[depth - 1], CONTEXT);
    REQUIRE(*context && (*context)->refs, CONTEXT_IS_DESTROYED);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(device, 0);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    if (primary[device])
        primary[device]->refs++;
    else
        primary[device] = new_context(device);
    *context = primary[device]->object.handle;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(device, 0);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    REQUIRE(primary[device] && primary[device]->refs, INVALID_CONTEXT);
    primary[device]->refs--;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER(device, 0);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    *flags = 0;
    *active = primary[device] && primary[device]->refs;
    return SUCCESS;
}

CUresult cuCtxPushCurrent_v2(void *handle) {
    ENTER(handle, 0);
    REQUIRE(!handle || fake_find(handle, CONTEXT), INVALID_CONTEXT);
    REQUIRE(depth < (int)(sizeof stack / sizeof *stack), INVALID_VALUE);
    stack[depth++] = handle;
    return SUCCESS;
}

CUresult cuCtxPopCurrent_v2(void **handle) {
    ENTER(0, 0);
    REQUIRE(depth, INVALID_CONTEXT);
    depth--;
    if (handle) *handle = stack[depth];
    return SUCCESS;
}

CUresult cuCtxSetCurrent(void *handle) {
    ENTER(handle, 0);
    REQUIRE(!handle || fake_find(handle, CONTEXT), INVALID_CONTEXT);
    if (!depth) depth = 1;
    stack[depth - 1] = handle;
    if (!handle) depth--;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(void **handle) {
    ENTER(0, 0);
    *handle = depth ? stack[depth - 1] : NULL;
    return SUCCESS;
}

CUresult cuCtxCreate_v4(void **handle, void *params, unsigned flags, int device) {
    ENTER(device, flags);
    REQUIRE(!params, NOT_SUPPORTED);
    REQUIRE(device >= 0 && device < num_devices, INVALID_DEVICE);
    *handle = new_context(device)->object.handle;
    return cuCtxPushCurrent_v2(*handle);
}

CUresult cuCtxDestroy_v2(void *handle) {
    ENTER(handle, 0);
    struct context *context = fake_find(handle, CONTEXT);
    REQUIRE(context && context != primary[context->device], INVALID_CONTEXT);
    if (depth && stack[depth - 1] == handle) depth--;
    fake_remove(context);
    return SUCCESS;
}

CUresult cuCtxGetDevice(int *device) {
    ENTER(0, 0);
    struct context *context;
    TRY(fake_context(&context));
    *device = context->device;
    return SUCCESS;
}

CUresult cuProfilerStart(void) {
    ENTER(0, 0);
    struct context *context;
    return fake_context(&context);
}

CUresult cuProfilerStop(void) {
    ENTER(0, 0);
    struct context *context;
    return fake_context(&context);
}

CUresult cuCtxSynchronize(void) {
    ENTER(0, 0);
    struct context *context;
    TRY(fake_context(&context));
    TRY(fake_unsafe());
    context->legacy.done = context->legacy.queued;
    for (struct object *object = objects; object; object = object->next) {
        struct stream *stream = (void *)object;
        if (object->kind == STREAM && stream->context == context) {
            stream->paused = 0;
            stream->done = stream->queued;
        }
    }
    return SUCCESS;
}

/* ---- errors and entry points -------------------------------------------------------------- */

static const struct { CUresult code; const char *name, *text; } errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {INVALID_CLUSTER_SIZE, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "invalid cluster size"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *name = errors[i].name, SUCCESS;
    return *name = NULL, INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].text, SUCCESS;
    return *text = NULL, INVALID_VALUE;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             int *found) {
    (void)version, (void)flags;
    static const char *const suffixes[] = {"_v4", "_v2", ""}; /* the newest that there is */
    static void *self;
    if (!self) {
        Dl_info info;
        dladdr((void *)&cuGetProcAddress_v2, &info);
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    *function = NULL;
    for (size_t i = 0; !*function && i < sizeof suffixes / sizeof *suffixes; i++) {
        char name[128];
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        *function = strncmp(symbol, "cu", 2) ? NULL : dlsym(self, name);
    }
    if (found) *found = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
