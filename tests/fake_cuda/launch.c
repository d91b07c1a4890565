/* Libraries (a cubin, bare or in a fat binary: the DSL embeds either), kernels, launches, tensor maps. */
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct library {
    struct object object;
    int num_kernels;
};

/* ---- cubin -------------------------------------------------------------------------------- */

static uint32_t word(const unsigned char *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* Records of a .nv.info section: u8 format, u8 attribute, u16 size (format 4) or value. */
static void read_info(struct kernel *kernel, const unsigned char *at, size_t size) {
    for (const unsigned char *end = at + size; at + 4 <= end;) {
        uint16_t value = at[2] | at[3] << 8;
        const unsigned char *data = at + 4;
        at = data + (at[0] == 4 ? value : 0);
        if (data[-4] != 4 || at > end) continue;
        if (data[-3] == 0x17 && value >= 12) { /* a parameter */
            int ordinal = data[4] | data[5] << 8;
            if (ordinal >= MAX_PARAMS) continue;
            kernel->sizes[ordinal] = word(data + 8) >> 18 & 0x3fff;
            if (ordinal >= kernel->num_params) kernel->num_params = ordinal + 1;
        } else if (data[-3] == 0x10 && value >= 12) { /* the block that it was compiled for */
            for (int i = 0; i < 3; i++) kernel->block[i] = word(data + 4 * i);
        }
    }
}

/* Registers are in the common .nv.info, by the kernel's symbol. */
static void read_registers(struct kernel *kernel, const unsigned char *at, size_t size,
                           uint32_t symbol) {
    for (const unsigned char *end = at + size; at + 4 <= end;) {
        uint16_t value = at[2] | at[3] << 8;
        if (at[0] == 4 && at[1] == 0x2f && value >= 8 && word(at + 4) == symbol)
            kernel->registers = word(at + 8);
        at += 4 + (at[0] == 4 ? value : 0);
    }
}

/* A fat binary is a header, then entries with headers; the first that is a cubin counts. */
static const unsigned char *find_cubin(const unsigned char *image) {
    if (word(image) != 0xba55ed50) return image;
    const unsigned char *at = image + word(image + 4) / 65536, *end = at + word(image + 8);
    while (at < end && at[0] != 2) at += word(at + 4) + word(at + 8);
    return at < end ? at + word(at + 4) : image;
}

static CUresult read_cubin(const unsigned char *image, void *library, int *num_kernels) {
    image = find_cubin(image);
    const Elf64_Ehdr *header = (const void *)image;
    REQUIRE(!memcmp(image, ELFMAG, SELFMAG), INVALID_IMAGE);
    REQUIRE(header->e_ident[EI_CLASS] == ELFCLASS64 && header->e_machine == 190, INVALID_IMAGE);
    const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
    const char *names = (const char *)image + sections[header->e_shstrndx].sh_offset;
    int newer = header->e_ident[EI_OSABI] == 0x41; /* two layouts of the flags are about */
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + sections[i].sh_name;
        if (strncmp(name, ".nv.info.", 9)) continue;
        struct kernel *kernel = calloc(1, sizeof *kernel);
        fake_add(kernel, KERNEL);
        ++*num_kernels;
        kernel->library = library;
        kernel->name = strdup(name + 9);
        kernel->arch = header->e_flags >> (newer ? 8 : 0) & 0xff;
        kernel->arch_specific = (header->e_flags & (newer ? 0x8 : 0x800)) != 0;
        read_info(kernel, image + sections[i].sh_offset, sections[i].sh_size);
        for (int j = 0; j < header->e_shnum; j++) {
            const char *other = names + sections[j].sh_name;
            /* From sm_90 on it begins with a KiB of the system's, which no limit counts. */
            if (!strncmp(other, ".nv.shared.", 11) && !strcmp(other + 11, kernel->name))
                kernel->static_smem = sections[j].sh_size - (kernel->arch >= 90 ? 1024 : 0);
            if (!strncmp(other, ".text.", 6) && !strcmp(other + 6, kernel->name))
                for (int k = 0; k < header->e_shnum; k++) /* low 24 bits: its symbol */
                    if (!strcmp(names + sections[k].sh_name, ".nv.info"))
                        read_registers(kernel, image + sections[k].sh_offset, sections[k].sh_size,
                                       sections[j].sh_info & 0xffffff);
        }
        for (int device = 0; device < MAX_DEVICES; device++)
            kernel->max_dynamic_smem[device] = 49152 - kernel->static_smem;
    }
    return SUCCESS;
}

/* ---- libraries and kernels ---------------------------------------------------------------- */

CUresult cuLibraryLoadData(void **handle, const void *image, void *jit, void *jit_values,
                           unsigned num_jit, void *options, void *values, unsigned num_options) {
    (void)jit, (void)jit_values, (void)num_jit, (void)options, (void)values, (void)num_options;
    ENTER(image, 0);
    REQUIRE(handle && image, INVALID_VALUE);
    TRY(fake_unsafe());
    struct library *library = calloc(1, sizeof *library);
    fake_add(library, LIBRARY);
    CUresult status = read_cubin(image, library->object.handle, &library->num_kernels);
    if (status)
        fake_remove(library);
    else
        *handle = library->object.handle;
    return status;
}

static struct kernel *next_kernel(struct object *from, const void *library) {
    for (; from; from = from->next)
        if (from->kind == KERNEL && ((struct kernel *)from)->library == library)
            return (void *)from;
    return NULL;
}

CUresult cuLibraryUnload(void *handle) {
    ENTER(handle, 0);
    struct library *library = fake_find(handle, LIBRARY);
    REQUIRE(library, INVALID_HANDLE);
    for (struct kernel *kernel; (kernel = next_kernel(fake_objects(), handle));) {
        free(kernel->name);
        fake_remove(kernel);
    }
    fake_remove(library);
    return SUCCESS;
}

CUresult cuLibraryGetKernel(void **handle, void *library, const char *name) {
    ENTER(library, name);
    REQUIRE(fake_find(library, LIBRARY), INVALID_HANDLE);
    struct kernel *kernel = next_kernel(fake_objects(), library);
    while (kernel && strcmp(kernel->name, name)) kernel = next_kernel(kernel->object.next, library);
    REQUIRE(kernel, NOT_FOUND);
    *handle = kernel->object.handle;
    return SUCCESS;
}

CUresult cuLibraryGetKernelCount(unsigned *count, void *handle) {
    ENTER(handle, 0);
    struct library *library = fake_find(handle, LIBRARY);
    REQUIRE(library, INVALID_HANDLE);
    *count = library->num_kernels;
    return SUCCESS;
}

static int runs_on(const struct kernel *kernel, int device) {
    int cc = fake_cc(device);
    if (kernel->arch_specific) return kernel->arch == cc;
    return kernel->arch / 10 == cc / 10 && kernel->arch <= cc;
}

CUresult cuKernelGetAttribute(int *value, int attribute, void *handle, int device) {
    ENTER(attribute, handle);
    struct kernel *kernel = fake_find(handle, KERNEL);
    REQUIRE(kernel, INVALID_HANDLE);
    REQUIRE(device >= 0 && device < fake_num_devices(), INVALID_DEVICE);
    REQUIRE(runs_on(kernel, device), NO_BINARY_FOR_GPU);
    int threads = kernel->block[0] * kernel->block[1] * kernel->block[2];
    switch (attribute) {
    case 0: *value = threads ? threads : 1024; break;
    case 1: *value = kernel->static_smem; break;
    case 2: case 3: case 7: case 10: case 11: case 12: case 13: case 15: *value = 0; break;
    case 4: *value = kernel->registers; break;
    case 5: case 6: *value = kernel->arch; break;
    case 8: *value = kernel->max_dynamic_smem[device]; break;
    case 9: *value = -1; break;
    case 14: *value = kernel->non_portable[device]; break;
    default: return INVALID_VALUE;
    }
    return SUCCESS;
}

CUresult cuKernelSetAttribute(int attribute, int value, void *handle, int device) {
    ENTER(attribute, value);
    struct kernel *kernel = fake_find(handle, KERNEL);
    REQUIRE(kernel, INVALID_HANDLE);
    REQUIRE(device >= 0 && device < fake_num_devices(), INVALID_DEVICE);
    REQUIRE(runs_on(kernel, device), NO_BINARY_FOR_GPU);
    switch (attribute) {
    case 8:
        REQUIRE(value >= 0 && value <= fake_max_smem(device) - kernel->static_smem, INVALID_VALUE);
        kernel->max_dynamic_smem[device] = value;
        return SUCCESS;
    case 9: return value >= -1 && value <= 100 ? SUCCESS : INVALID_VALUE;
    case 14: kernel->non_portable[device] = value != 0; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

/* ---- launches ----------------------------------------------------------------------------- */

struct attribute { int id; char pad[4]; union { unsigned cluster[3]; char bytes[64]; }; };
struct config {
    unsigned grid[3], block[3], smem;
    void *stream;
    struct attribute *attributes;
    unsigned num_attributes;
};

static struct launch *launches;
static size_t num_launches;
static void (*on_launch)(size_t index);

size_t fake_num_launches(void) { return num_launches; }
const struct launch *fake_launch(size_t index) { return &launches[index]; }
void fake_on_launch(void (*callback)(size_t)) { on_launch = callback; }

void fake_forget_launches(void) {
    for (size_t i = 0; i < num_launches; i++) {
        free((void *)launches[i].kernel);
        free((void *)launches[i].sizes);
        free((void *)launches[i].attributes);
        free((void *)launches[i].params);
    }
    num_launches = 0;
    on_launch = NULL;
}

static CUresult check_shape(const struct kernel *kernel, const struct config *config, int device,
                            const unsigned cluster[3]) {
    const unsigned *grid = config->grid, *block = config->block;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    uint64_t blocks = (uint64_t)cluster[0] * cluster[1] * cluster[2];
    REQUIRE(grid[0] && grid[0] <= 0x7fffffff, INVALID_VALUE);
    REQUIRE(grid[1] && grid[1] <= 65535 && grid[2] && grid[2] <= 65535, INVALID_VALUE);
    REQUIRE(threads && threads <= 1024 && block[2] <= 64, INVALID_VALUE);
    for (int i = 0; i < 3; i++)
        REQUIRE(!kernel->block[i] || block[i] == (unsigned)kernel->block[i], INVALID_VALUE);
    REQUIRE(config->smem <= (unsigned)kernel->max_dynamic_smem[device], INVALID_VALUE);
    REQUIRE(kernel->registers * ((threads + 31) / 32 * 32) <= 65536, LAUNCH_OUT_OF_RESOURCES);
    REQUIRE(blocks && blocks <= (kernel->non_portable[device] ? 16 : 8), INVALID_CLUSTER_SIZE);
    REQUIRE(blocks == 1 || fake_cc(device) >= 90, INVALID_CLUSTER_SIZE);
    for (int i = 0; i < 3; i++) REQUIRE(grid[i] % cluster[i] == 0, INVALID_CLUSTER_SIZE);
    return SUCCESS;
}

static void *copy_of(const void *from, size_t size) {
    void *copy = malloc(size + 1);
    return size ? memcpy(copy, from, size) : copy;
}

static CUresult launch(const char *call, const struct config *config, void *handle, void **params,
                       void **extra) {
    struct kernel *kernel = fake_find(handle, KERNEL);
    REQUIRE(kernel, INVALID_HANDLE);
    REQUIRE(!extra, NOT_SUPPORTED);
    struct stream *stream;
    TRY(fake_stream(config->stream, &stream)); /* a CUkernel runs in the stream's context */
    int device = stream->context->device;
    REQUIRE(runs_on(kernel, device), NO_BINARY_FOR_GPU);
    struct launch record = {.call = call, .cluster = {1, 1, 1}};
    int *pairs = malloc(sizeof *pairs * (2 * config->num_attributes + 1));
    record.attributes = pairs;
    for (unsigned i = 0; i < config->num_attributes; i++) {
        const struct attribute *attribute = &config->attributes[i];
        pairs[2 * i] = attribute->id, pairs[2 * i + 1] = attribute->cluster[0];
        if (attribute->id == 4) memcpy(record.cluster, attribute->cluster, sizeof record.cluster);
    }
    CUresult status = check_shape(kernel, config, device, record.cluster);
    if (!status && kernel->num_params && !params) status = INVALID_VALUE;
    if (status || (status = fake_queue(stream))) {
        free(pairs);
        return status;
    }
    size_t size = 0;
    for (int i = 0; i < kernel->num_params; i++) size += kernel->sizes[i];
    unsigned char *bytes = malloc(size + 1), *at = bytes;
    for (int i = 0; i < kernel->num_params; at += kernel->sizes[i++])
        memcpy(at, params[i], kernel->sizes[i]);
    memcpy(record.grid, config->grid, sizeof record.grid);
    memcpy(record.block, config->block, sizeof record.block);
    record.kernel = strdup(kernel->name);
    record.dynamic_smem = config->smem;
    record.stream = config->stream;
    record.device = device;
    record.captured = stream->capturing != 0;
    record.num_params = kernel->num_params;
    record.num_attributes = config->num_attributes;
    record.sizes = copy_of(kernel->sizes, sizeof(int) * kernel->num_params);
    record.params = bytes;
    launches = realloc(launches, (num_launches + 1) * sizeof *launches);
    launches[num_launches++] = record;
    return SUCCESS;
}

static CUresult enter_launch(const char *call, const struct config *config, void *kernel,
                             void **params, void **extra) {
    {
        LOCK;
        TRY(fake_enter(call, (uintptr_t)kernel, (uintptr_t)config->stream));
        TRY(launch(call, config, kernel, params, extra));
    }
    if (on_launch) on_launch(num_launches - 1); /* without the lock: it runs Python */
    return SUCCESS;
}

CUresult cuLaunchKernelEx(const void *config, void *kernel, void **params, void **extra) {
    REQUIRE(config, INVALID_VALUE);
    return enter_launch(__func__, config, kernel, params, extra);
}

CUresult cuLaunchKernel(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned smem,
                        void *stream, void **params, void **extra) {
    struct config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, smem, stream,
                            NULL, 0};
    return enter_launch(__func__, &config, kernel, params, extra);
}

/* ---- tensor maps -------------------------------------------------------------------------- */

/* What the 128 opaque bytes hold here, for tests that look into a kernel's parameters. */
struct tensor_map { uint64_t address; uint32_t type, rank, dims[5], strides16[4], box[5]; };
_Static_assert(sizeof(struct tensor_map) <= 128, "a tensor map has 128 bytes");

CUresult cuTensorMapEncodeTiled(void *out, int type, uint32_t rank, void *address,
                                const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                                const uint32_t *element_strides, int interleave, int swizzle,
                                int promotion, int fill) {
    (void)interleave, (void)promotion, (void)fill;
    static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    static const unsigned spans[] = {0, 32, 64, 128}; /* innermost bytes under a swizzle */
    ENTER(address, rank);
    REQUIRE(out && (uintptr_t)out % 64 == 0 && rank >= 1 && rank <= 5, INVALID_VALUE);
    REQUIRE(address && (uintptr_t)address % 16 == 0, INVALID_VALUE);
    REQUIRE(type >= 0 && type < (int)(sizeof sizes / sizeof *sizes), INVALID_VALUE);
    struct tensor_map map = {.address = (uint64_t)address, .type = type, .rank = rank};
    for (uint32_t i = 0; i < rank; i++) {
        REQUIRE(dims[i] && dims[i] <= (uint64_t)1 << 32, INVALID_VALUE);
        REQUIRE(box[i] && box[i] <= 256, INVALID_VALUE);
        REQUIRE(element_strides[i] && element_strides[i] <= 8, INVALID_VALUE);
        map.dims[i] = dims[i], map.box[i] = box[i];
        if (i + 1 == rank) break;
        REQUIRE(strides[i] % 16 == 0 && strides[i] < (uint64_t)1 << 40, INVALID_VALUE);
        map.strides16[i] = strides[i] / 16;
    }
    unsigned inner = box[0] * sizes[type];
    REQUIRE(inner % 16 == 0, INVALID_VALUE);
    REQUIRE(swizzle < 1 || swizzle > 3 || inner <= spans[swizzle], INVALID_VALUE);
    memset(out, 0, 128);
    memcpy(out, &map, sizeof map);
    return SUCCESS;
}
