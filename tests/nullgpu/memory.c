// Memory of devices and pinned memory of the host: allocations, copies, attributes of an address.
//
// Both kinds are anonymous memory of the process, so pages that nothing writes take no room.
#include "nullgpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SMALL_STEP 512         // sizes below 1 MiB are rounded up to this
#define LARGE_STEP (2 * MIB)   // sizes from 1 MiB are rounded up to this
#define MOST_ON_DEVICE 65536   // a larger copy on a device, or fill, is not made: it would use memory of the host
#define MOST_IN_ROWS (32 * MIB)

// ---- ranges, sorted by address

static Range *ranges;
static int range_count;
static int range_room;
static pthread_mutex_t range_lock = PTHREAD_MUTEX_INITIALIZER;

// The place of the range around an address; -1 without one. The caller holds the lock.
static int place_of(const void *address) {
    const char *at = address;
    int low = 0;
    int high = range_count - 1;
    while (low <= high) {
        int middle = (low + high) / 2;
        const Range *range = &ranges[middle];
        if (at < range->base) {
            high = middle - 1;
        } else if (at >= range->base + range->size) {
            low = middle + 1;
        } else {
            return middle;
        }
    }
    return -1;
}

static void make_room(void) {
    if (range_count < range_room) {
        return;
    }
    range_room = range_room * 2 + 64;
    ranges = realloc(ranges, range_room * sizeof(Range));
    if (!ranges) {
        abort();
    }
}

static void add_range(Range range) {
    pthread_mutex_lock(&range_lock);
    make_room();
    int place = range_count++;
    while (place && ranges[place - 1].base > range.base) {
        ranges[place] = ranges[place - 1];
        place--;
    }
    ranges[place] = range;
    pthread_mutex_unlock(&range_lock);
}

bool find_range(const void *address, Range *range) {
    pthread_mutex_lock(&range_lock);
    int place = place_of(address);
    if (place >= 0) {
        *range = ranges[place];
    }
    pthread_mutex_unlock(&range_lock);
    return place >= 0;
}

// As find_range; the range is forgotten.
static bool take_range(const void *address, Range *range) {
    pthread_mutex_lock(&range_lock);
    int place = place_of(address);
    if (place >= 0) {
        *range = ranges[place];
        range_count--;
        memmove(&ranges[place], &ranges[place + 1], (range_count - place) * sizeof(Range));
    }
    pthread_mutex_unlock(&range_lock);
    return place >= 0;
}

// ---- memory of a device

static void *map(uint64_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static uint64_t rounded(size_t size) {
    uint64_t step = size >= MIB ? LARGE_STEP : SMALL_STEP;
    return (size + step - 1) / step * step;
}

static bool has_room(int device, uint64_t size) {
    uint64_t used = used_bytes(device);
    uint64_t total = device_bytes();
    if (used + size <= total) {
        return true;
    }
    unsigned long long wanted = size / MIB;
    log_line("out of memory: %llu MiB wanted, %llu used of %llu", wanted, used / MIB + 0ULL, total / MIB + 0ULL);
    return false;
}

static void count_allocation(int device, uint64_t size) {
    Counters *counters = own_counters();
    charge(device, size);
    if (size > counters->largest) {
        counters->largest = size;
    }
}

EXPORT cudaError_t cudaMalloc(void **memory, size_t wanted) {
    need_context();
    cudaError_t error = check_unsafe("cudaMalloc");
    if (error) {
        return error;
    }
    if (!wanted) {
        *memory = NULL;
        return cudaSuccess;
    }
    int device = current_device();
    uint64_t size = rounded(wanted);
    char *base = has_room(device, size) ? map(size) : NULL;
    if (!base) {
        return fail(cudaErrorMemoryAllocation);
    }
    count_allocation(device, size);
    add_range((Range){base, size, size, cudaMemoryTypeDevice, device, getpid()});
    *memory = base;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **memory, size_t wanted, cudaStream_t stream) {
    return cudaMalloc(memory, wanted);
}

EXPORT cudaError_t cudaFree(void *memory) {
    Range range;
    // PyTorch makes the context of a device by freeing nothing.
    if (!memory) {
        need_context();
        return cudaSuccess;
    }
    cudaError_t error = check_unsafe("cudaFree");
    if (error) {
        return error;
    }
    if (!take_range(memory, &range)) {
        return fail(cudaErrorInvalidValue);
    }
    munmap(range.base, range.size);
    if (range.pid == getpid()) {
        discharge(range.device, range.charged);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    return cudaFree(memory);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    need_context();
    uint64_t used = used_bytes(current_device());
    *total = device_bytes();
    *free_bytes = used > *total ? 0 : *total - used;
    return cudaSuccess;
}

// ---- memory in two steps, for vLLM's sleep: addresses that stay, and allocations that are mapped to them

typedef struct {
    uint64_t size;
    int device;
    int pid;  // the process that was charged
} Allocation;

EXPORT CUresult cuMemGetAllocationGranularity(size_t *step, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags option) {
    *step = LARGE_STEP;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    *address = (CUdeviceptr)map(size);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    munmap((void *)address, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    int device = properties->location.id;
    Allocation *made = has_room(device, size) ? malloc(sizeof *made) : NULL;
    if (!made) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (Allocation){size, device, getpid()};
    count_allocation(device, size);
    *handle = (CUmemGenericAllocationHandle)made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Allocation *made = (Allocation *)handle;
    if (made->pid == getpid()) {
        discharge(made->device, made->size);
    }
    free(made);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    const Allocation *made = (const Allocation *)handle;
    add_range((Range){(char *)address, size, 0, cudaMemoryTypeDevice, made->device, getpid()});
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    Range range;
    if (!take_range((void *)address, &range)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    madvise((void *)address, size, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t number) {
    return CUDA_SUCCESS;
}

// ---- pinned memory of the host

EXPORT cudaError_t cudaHostAlloc(void **memory, size_t size, unsigned int flags) {
    need_context();
    cudaError_t error = check_unsafe("cudaHostAlloc");
    if (error) {
        return error;
    }
    *memory = NULL;
    if (!size) {
        return cudaSuccess;
    }
    char *base = map(size);
    if (!base) {
        return fail(cudaErrorMemoryAllocation);
    }
    add_range((Range){base, size, 0, cudaMemoryTypeHost, current_device(), getpid()});
    *memory = base;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocHost(void **memory, size_t size) {
    return cudaHostAlloc(memory, size, 0);
}

EXPORT cudaError_t cudaFreeHost(void *memory) {
    Range range;
    if (!memory) {
        return cudaSuccess;
    }
    if (!take_range(memory, &range)) {
        return fail(cudaErrorInvalidValue);
    }
    munmap(range.base, range.size);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *memory, size_t size, unsigned int flags) {
    need_context();
    add_range((Range){memory, size, 0, cudaMemoryTypeHost, current_device(), getpid()});
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *memory) {
    Range range;
    take_range(memory, &range);
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **address, void *memory, unsigned int flags) {
    *address = memory;
    return cudaSuccess;
}

// ---- addresses

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    Range range;
    memset(attributes, 0, sizeof *attributes);
    if (!find_range(address, &range)) {
        return cudaSuccess;
    }
    attributes->type = range.type;
    attributes->device = range.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = range.type == cudaMemoryTypeHost ? (void *)address : NULL;
    return cudaSuccess;
}

static CUresult pointer_attribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    Range range = {0};
    bool found = find_range((void *)address, &range);
    bool on_device = found && range.type == cudaMemoryTypeDevice;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = address;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)value = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = range.device;
        break;
    default:
        *(uint64_t *)value = 0;
    }
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    return pointer_attribute(value, attribute, address);
}

EXPORT CUresult cuPointerGetAttributes(unsigned int number, CUpointer_attribute *attributes, void **values,
                                       CUdeviceptr address) {
    for (unsigned int i = 0; i < number; i++) {
        pointer_attribute(values[i], attributes[i], address);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address) {
    Range range;
    if (!find_range((void *)address, &range)) {
        return CUDA_ERROR_NOT_FOUND;
    }
    if (base) {
        *base = (CUdeviceptr)range.base;
    }
    if (size) {
        *size = range.size;
    }
    return CUDA_SUCCESS;
}

// No memory of this device is shared with a network card or another process.
EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t size,
                                              CUmemRangeHandleType type, unsigned long long flags) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                               CUmemAllocationHandleType type) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *memory) {
    memset(handle, 0, sizeof *handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char room[64 * KIB];
    *address = room;
    return cudaSuccess;
}

// ---- copies

// Is a copy made? A large one would take memory of the host for pages that no kernel reads.
static bool is_made(const Range *target, const Range *source, size_t size) {
    if (target && source && target->type == cudaMemoryTypeDevice && source->type == cudaMemoryTypeDevice) {
        return size <= MOST_ON_DEVICE;
    }
    // The target's pages exist already if the library did not map them.
    return size <= most_copied() || (!target && source);
}

static cudaError_t copy(void *target, const void *source, size_t size, cudaStream_t stream, const char *call) {
    Range target_range;
    Range source_range;
    need_context();
    const Range *to = find_range(target, &target_range) ? &target_range : NULL;
    const Range *from = find_range(source, &source_range) ? &source_range : NULL;
    cudaError_t error = launch(stream);
    if (error) {
        return error;
    }
    if (capture_of(stream)) {
        if (!to || !from) {
            refuse(call, "pageable host memory");
        }
        return cudaSuccess;
    }
    if (!to && from) {  // to pageable memory
        count_wait();
    }
    if (is_made(to, from, size)) {
        memmove(target, source, size);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void *target, const void *source, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = check_unsafe("cudaMemcpy");
    count_wait();
    return error ? error : copy(target, source, size, NULL, "cudaMemcpy");
}

EXPORT cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
    return copy(target, source, size, stream, "cudaMemcpyAsync");
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *target, int target_device, const void *source, int source_device,
                                       size_t size, cudaStream_t stream) {
    return copy(target, source, size, stream, "cudaMemcpyPeerAsync");
}

EXPORT cudaError_t cudaMemcpyBatchAsync(void *const *targets, const void *const *sources, const size_t *sizes,
                                        size_t number, struct cudaMemcpyAttributes *attributes, size_t *indexes,
                                        size_t kinds, cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; i < number && !error; i++) {
        error = copy(targets[i], sources[i], sizes[i], stream, "cudaMemcpyBatchAsync");
    }
    return error;
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                     size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    need_context();
    cudaError_t error = launch(stream);
    if (error || capture_of(stream) || width * height > MOST_IN_ROWS) {
        return error;
    }
    for (size_t i = 0; i < height; i++) {
        memmove((char *)target + i * target_pitch, (const char *)source + i * source_pitch, width);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemset(void *target, int value, size_t size) {
    need_context();
    if (size <= MOST_ON_DEVICE) {
        memset(target, value, size);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream) {
    need_context();
    cudaError_t error = launch(stream);
    if (error || capture_of(stream)) {
        return error;
    }
    if (size <= MOST_ON_DEVICE) {
        memset(target, value, size);
    }
    return cudaSuccess;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr target, unsigned int value, size_t number, CUstream stream) {
    return CUDA_SUCCESS;
}
