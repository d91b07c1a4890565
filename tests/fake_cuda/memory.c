/* Memory, streams and events. Copies happen at once; only events wait, while a stream is paused. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fake.h"

typedef uintptr_t CUdeviceptr;

/* ---- streams ------------------------------------------------------------------------------ */

static __thread struct stream per_thread[MAX_DEVICES];
static __thread int capture_mode; /* CUstreamCaptureMode: 0 global, 1 thread-local, 2 relaxed */
static uint64_t next_id = 1;

CUresult fake_stream(void *handle, struct stream **stream) {
    if ((uintptr_t)handle > 2) {
        *stream = fake_find(handle, STREAM);
        return *stream ? SUCCESS : INVALID_HANDLE;
    }
    struct context *context;
    TRY(fake_context(&context));
    *stream = &context->legacy;
    if ((uintptr_t)handle == 2) {
        *stream = &per_thread[context->device];
        (*stream)->context = context;
        if (!(*stream)->id) (*stream)->id = next_id++;
    }
    return SUCCESS;
}

static int any_capture(int blocking_only, int invalidate) {
    int found = 0;
    for (struct object *object = fake_objects(); object; object = object->next) {
        struct stream *stream = (void *)object;
        if (object->kind != STREAM || !stream->capturing) continue;
        if (blocking_only && stream->flags & 1) continue;
        found = 1;
        if (invalidate) stream->capturing = 2;
    }
    return found;
}

/* Calls that the driver forbids to a thread while any stream captures, and that spoil the capture. */
CUresult fake_unsafe(void) {
    return capture_mode != 2 && any_capture(0, 1) ? STREAM_CAPTURE_UNSUPPORTED : SUCCESS;
}

CUresult fake_queue(struct stream *stream) {
    REQUIRE(stream != &stream->context->legacy || !any_capture(1, 1), STREAM_CAPTURE_IMPLICIT);
    stream->queued++;
    if (!stream->paused) stream->done = stream->queued;
    return SUCCESS;
}

/* Find the stream and queue work on it, under a current context. */
static CUresult work(void *handle, struct stream **stream) {
    struct context *context;
    TRY(fake_context(&context));
    TRY(fake_stream(handle, stream));
    return fake_queue(*stream);
}

CUresult fake_set_capturing(void *handle, int capturing) {
    struct guard guard = fake_lock();
    struct stream *stream = fake_find(handle, STREAM);
    if (stream) stream->capturing = capturing;
    fake_unlock(&guard);
    return stream ? SUCCESS : INVALID_HANDLE;
}

CUresult fake_set_paused(void *handle, int paused) {
    struct guard guard = fake_lock();
    struct stream *stream;
    CUresult status = fake_stream(handle, &stream);
    if (!status && !(stream->paused = paused)) stream->done = stream->queued;
    fake_unlock(&guard);
    return status;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(*mode, 0);
    int previous = capture_mode;
    capture_mode = *mode;
    *mode = previous;
    return SUCCESS;
}

CUresult cuStreamCreate(void **handle, unsigned flags) {
    ENTER(flags, 0);
    struct context *context;
    TRY(fake_context(&context));
    REQUIRE(flags <= 1, INVALID_VALUE);
    struct stream *stream = calloc(1, sizeof *stream);
    *handle = fake_add(stream, STREAM);
    stream->context = context;
    stream->flags = flags;
    stream->id = next_id++;
    return SUCCESS;
}

CUresult cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(handle, flags);
}

CUresult cuStreamDestroy_v2(void *handle) {
    ENTER(handle, 0);
    struct stream *stream = fake_find(handle, STREAM);
    REQUIRE(stream, INVALID_HANDLE);
    fake_remove(stream);
    return SUCCESS;
}

CUresult cuStreamGetId(void *handle, unsigned long long *id) {
    ENTER(handle, 0);
    struct stream *stream;
    TRY(fake_stream(handle, &stream));
    if (stream->capturing) {
        stream->capturing = 2;
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    *id = stream->id;
    return SUCCESS;
}

CUresult cuStreamIsCapturing(void *handle, int *status) {
    ENTER(handle, 0);
    struct stream *stream;
    TRY(fake_stream(handle, &stream));
    REQUIRE(stream != &stream->context->legacy || !any_capture(1, 0), STREAM_CAPTURE_IMPLICIT);
    *status = stream->capturing;
    return SUCCESS;
}

CUresult cuStreamSynchronize(void *handle) {
    ENTER(handle, 0);
    struct stream *stream;
    TRY(fake_stream(handle, &stream));
    if (stream->capturing) {
        stream->capturing = 2;
        return STREAM_CAPTURE_UNSUPPORTED;
    }
    REQUIRE(stream != &stream->context->legacy || !any_capture(1, 1), STREAM_CAPTURE_IMPLICIT);
    TRY(fake_unsafe());
    stream->paused = 0; /* waiting for the work is the end of the work */
    stream->done = stream->queued;
    return SUCCESS;
}

CUresult cuStreamQuery(void *handle) {
    ENTER(handle, 0);
    struct stream *stream;
    TRY(fake_stream(handle, &stream));
    REQUIRE(!stream->capturing, STREAM_CAPTURE_UNSUPPORTED);
    return stream->done < stream->queued ? NOT_READY : SUCCESS;
}

/* ---- events ------------------------------------------------------------------------------- */

struct event {
    struct object object;
    struct context *context;
    void *stream; /* of the last record; NULL is a legacy stream, below */
    struct stream *legacy;
    uint64_t place;
    int captured;
};

static int is_done(const struct event *event) {
    struct stream *stream = event->stream ? fake_find(event->stream, STREAM) : event->legacy;
    return !stream || stream->done >= event->place;
}

CUresult cuEventCreate(void **handle, unsigned flags) {
    ENTER(flags, 0);
    struct context *context;
    TRY(fake_context(&context));
    struct event *event = calloc(1, sizeof *event);
    *handle = fake_add(event, EVENT);
    event->context = context;
    return SUCCESS;
}

CUresult cuEventDestroy_v2(void *handle) {
    ENTER(handle, 0);
    struct event *event = fake_find(handle, EVENT);
    REQUIRE(event, INVALID_HANDLE);
    fake_remove(event);
    return SUCCESS;
}

CUresult cuEventRecord(void *handle, void *stream_handle) {
    ENTER(handle, stream_handle);
    struct event *event = fake_find(handle, EVENT);
    REQUIRE(event, INVALID_HANDLE);
    struct stream *stream;
    TRY(fake_stream(stream_handle, &stream));
    REQUIRE(stream->context == event->context, INVALID_HANDLE);
    TRY(fake_queue(stream));
    event->stream = stream->object.handle;
    event->legacy = stream;
    event->place = stream->queued;
    event->captured = stream->capturing != 0;
    return SUCCESS;
}

CUresult cuEventQuery(void *handle) {
    ENTER(handle, 0);
    struct event *event = fake_find(handle, EVENT);
    REQUIRE(event, INVALID_HANDLE);
    TRY(fake_unsafe());
    REQUIRE(!event->captured, CAPTURED_EVENT);
    return is_done(event) ? SUCCESS : NOT_READY;
}

CUresult cuEventSynchronize(void *handle) {
    ENTER(handle, 0);
    struct event *event = fake_find(handle, EVENT);
    REQUIRE(event, INVALID_HANDLE);
    TRY(fake_unsafe());
    REQUIRE(!event->captured, CAPTURED_EVENT);
    struct stream *stream = event->stream ? fake_find(event->stream, STREAM) : event->legacy;
    if (stream && stream->done < event->place) stream->done = event->place;
    return SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    ENTER(start, end);
    REQUIRE(fake_find(start, EVENT) && fake_find(end, EVENT), INVALID_HANDLE);
    *milliseconds = 1;
    return SUCCESS;
}

CUresult cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags) {
    ENTER(stream_handle, handle);
    REQUIRE(flags <= 1, INVALID_VALUE);
    REQUIRE(fake_find(handle, EVENT), INVALID_HANDLE);
    struct stream *stream;
    return work(stream_handle, &stream);
}

/* ---- memory ------------------------------------------------------------------------------- */

struct block {
    CUdeviceptr start;
    size_t size;
    int device, pinned; /* pinned: the host's, and the device may use it */
    struct block *next;
};
static struct block *blocks;

size_t fake_live_allocations(int pinned) {
    size_t count = 0;
    for (struct block *block = blocks; block; block = block->next) count += block->pinned == pinned;
    return count;
}

static struct block *find_block(CUdeviceptr start, size_t size) {
    for (struct block *block = blocks; block; block = block->next)
        if (start >= block->start && start - block->start < block->size &&
            size <= block->size - (start - block->start))
            return block;
    return NULL;
}

static CUresult add_block(CUdeviceptr *ptr, size_t size, int pinned) {
    struct context *context;
    TRY(fake_context(&context));
    REQUIRE(size, INVALID_VALUE);
    TRY(fake_unsafe());
    REQUIRE(size <= (size_t)80 << 30, OUT_OF_MEMORY);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED, OUT_OF_MEMORY);
    if (size <= (size_t)1 << 26) memset(memory, 0xa5, size); /* fresh memory is not zero */
    struct block *block = malloc(sizeof *block);
    *block = (struct block){(CUdeviceptr)memory, size, context->device, pinned, blocks};
    *ptr = (blocks = block)->start;
    return SUCCESS;
}

static CUresult remove_block(CUdeviceptr ptr, int pinned) {
    struct context *context;
    TRY(fake_context(&context));
    TRY(fake_unsafe());
    for (struct block **link = &blocks; *link; link = &(*link)->next)
        if ((*link)->start == ptr && (*link)->pinned == pinned) {
            struct block *block = *link;
            *link = block->next;
            munmap((void *)block->start, block->size);
            free(block);
            return SUCCESS;
        }
    return INVALID_VALUE;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t size) {
    ENTER(size, 0);
    return add_block(ptr, size, 0);
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
    ENTER(ptr, 0);
    return remove_block(ptr, 0);
}

CUresult cuMemHostAlloc(void **ptr, size_t size, unsigned flags) {
    ENTER(size, flags);
    return add_block((CUdeviceptr *)ptr, size, 1);
}

CUresult cuMemFreeHost(void *ptr) {
    ENTER(ptr, 0);
    return remove_block((CUdeviceptr)ptr, 1);
}

CUresult cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(0, 0);
    *available = *total = (size_t)80 << 30;
    return SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr ptr) {
    ENTER(ptr, attribute);
    struct block *block = find_block(ptr, 1);
    REQUIRE(block, INVALID_VALUE);
    switch (attribute) {
    case 2: *(unsigned *)data = block->pinned ? 1 : 2; break; /* CU_MEMORYTYPE_HOST, _DEVICE */
    case 3: *(CUdeviceptr *)data = ptr; break;
    case 8: *(unsigned *)data = 0; break;
    case 9: *(int *)data = block->device; break;
    case 11: *(CUdeviceptr *)data = block->start; break;
    case 12: *(size_t *)data = block->size; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

static CUresult copy(void *to, const void *from, size_t size, const void *device_side,
                     void *stream_handle) {
    struct stream *stream;
    TRY(work(stream_handle, &stream));
    REQUIRE(!size || (to && from && find_block((CUdeviceptr)device_side, size)), INVALID_VALUE);
    if (!stream->capturing) memcpy(to, from, size);
    return SUCCESS;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, void *stream) {
    ENTER(to, stream);
    return copy((void *)to, from, size, (void *)to, stream);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, void *stream) {
    ENTER(from, stream);
    return copy(to, (void *)from, size, (void *)from, stream);
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size) {
    ENTER(to, 0);
    TRY(fake_unsafe());
    return copy((void *)to, from, size, (void *)to, NULL);
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size) {
    ENTER(from, 0);
    TRY(fake_unsafe());
    return copy(to, (void *)from, size, (void *)from, NULL);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, void *stream) {
    ENTER(to, stream);
    REQUIRE(!size || find_block(from, size), INVALID_VALUE);
    return copy((void *)to, (void *)from, size, (void *)to, stream);
}

static CUresult fill(CUdeviceptr ptr, const void *value, size_t width, size_t count,
                     void *stream_handle) {
    struct stream *stream;
    TRY(work(stream_handle, &stream));
    REQUIRE(ptr % width == 0 && (!count || find_block(ptr, width * count)), INVALID_VALUE);
    for (size_t i = 0; i < count && !stream->capturing; i++)
        memcpy((char *)ptr + i * width, value, width);
    return SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr ptr, unsigned char value, size_t count, void *stream) {
    ENTER(ptr, stream);
    return fill(ptr, &value, 1, count, stream);
}
CUresult cuMemsetD32Async(CUdeviceptr ptr, unsigned value, size_t count, void *stream) {
    ENTER(ptr, stream);
    return fill(ptr, &value, 4, count, stream);
}
