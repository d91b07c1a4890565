/* A libcuda.so.1 for tests: device memory is host memory, kernels are logged and never run.
 *
 * Handles are numbers that are never used twice, so a stale one is always found out. One lock
 * guards everything. A call that the real driver would refuse is refused with the same code.
 */
#ifndef FAKE_H
#define FAKE_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    CONTEXT_IS_DESTROYED = 709,
    NOT_SUPPORTED = 801,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    INVALID_CLUSTER_SIZE = 912,
};

enum { MAX_DEVICES = 8, MAX_PARAMS = 256 };
enum kind { CONTEXT = 1, STREAM, EVENT, LIBRARY, KERNEL };

struct object { /* first member of everything that has a handle */
    void *handle;
    enum kind kind;
    struct object *next;
};

struct stream {
    struct object object;
    struct context *context;
    unsigned flags;
    uint64_t id, queued, done; /* an event is done when its place in the queue is */
    int paused;
    int capturing; /* CUstreamCaptureStatus: 1 active, 2 invalidated */
};

struct context {
    struct object object;
    int device, refs;
    struct stream legacy;
};

struct kernel {
    struct object object;
    void *library;
    char *name;
    int num_params, sizes[MAX_PARAMS];
    int registers, static_smem, block[3]; /* block: what the kernel was compiled for, or zeros */
    int max_dynamic_smem[MAX_DEVICES], non_portable[MAX_DEVICES];
    int arch, arch_specific;
};

struct launch { /* mirrored in __init__.py */
    const char *call, *kernel;
    unsigned grid[3], block[3], cluster[3], dynamic_smem;
    void *stream;
    int device, captured, num_params, num_attributes;
    const int *sizes, *attributes; /* an attribute is its id and the first word of its value */
    const unsigned char *params; /* all of them, end to end */
};

/* core.c */
struct guard { int held; };
struct guard fake_lock(void);
void fake_unlock(struct guard *);
CUresult fake_enter(const char *call, uintptr_t a, uintptr_t b);
void *fake_add(void *object, enum kind);
void *fake_find(const void *handle, enum kind);
void fake_remove(void *object);
struct object *fake_objects(void);
int fake_cc(int device), fake_num_devices(void), fake_max_smem(int device);
CUresult fake_context(struct context **);
/* memory.c */
CUresult fake_stream(void *handle, struct stream **);
CUresult fake_queue(struct stream *);
CUresult fake_unsafe(void);
/* launch.c */
void fake_forget_launches(void);

/* Take the lock for the rest of the function, log the call and its first two arguments, and
 * return what was ordered by fake_fail(). */
#define LOCK __attribute__((cleanup(fake_unlock), unused)) struct guard guard = fake_lock()
#define ENTER(a, b)                                                                    \
    LOCK;                                                                              \
    TRY(fake_enter(__func__, (uintptr_t)(a), (uintptr_t)(b)))
#define TRY(call)                                                                      \
    do {                                                                               \
        CUresult status_ = (call);                                                     \
        if (status_) return status_;                                                   \
    } while (0)
#define REQUIRE(condition, code)                                                       \
    do {                                                                               \
        if (!(condition)) return (code);                                               \
    } while (0)

#endif
