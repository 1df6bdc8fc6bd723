// Devices, their properties and their contexts, for the runtime and the driver. All devices are equal: Hopper boards.
#include "nullgpu.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    WARP = 32,
    MULTIPROCESSORS = 132,
    THREADS_PER_BLOCK = 1024,
    BLOCK_DEPTH = 64,
    THREADS_PER_MULTIPROCESSOR = 2048,
    BLOCKS_PER_MULTIPROCESSOR = 32,
    GRID_WIDTH = 2147483647,
    GRID_HEIGHT = 65535,
    REGISTERS = 65536,
    CONSTANT_BYTES = 65536,
    SHARED_BYTES = 49152,
    SHARED_BYTES_OPTIN = 232448,
    SHARED_BYTES_MULTIPROCESSOR = 233472,
    SHARED_BYTES_RESERVED = 1024,
    CACHE_BYTES = 60 << 20,
    BUS_BITS = 6144,
    CLOCK_KHZ = 1980000,
    MEMORY_CLOCK_KHZ = 3201000,
    MOST_URGENT_PRIORITY = -5,
    RESIDENT_BLOCKS = 2,  // of any kernel
};

void *any_handle[4];

static __thread int device_of_thread;
static int contexts[DEVICES];
static int contexts_pid;  // a fork has no contexts

// ---- contexts

int current_device(void) {
    return device_of_thread;
}

bool has_context(int device) {
    return contexts_pid == getpid() && contexts[device];
}

void make_context(int device) {
    int pid = getpid();
    if (__atomic_exchange_n(&contexts_pid, pid, __ATOMIC_ACQ_REL) != pid) {
        memset(contexts, 0, sizeof contexts);
    }
    if (__atomic_exchange_n(&contexts[device], 1, __ATOMIC_ACQ_REL)) {
        return;
    }
    charge(device, context_bytes());
    log_line("context on device %d", device);
}

void need_context(void) {
    make_context(device_of_thread);
}

// ---- devices of the runtime

EXPORT cudaError_t cudaGetDeviceCount(int *number) {
    *number = device_count();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = device_of_thread;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) {
        return fail(cudaErrorInvalidDevice);
    }
    device_of_thread = device;
    need_context();
    return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return cudaSuccess;
}

static void set_limits(struct cudaDeviceProp *properties) {
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->warpSize = WARP;
    properties->maxThreadsPerBlock = THREADS_PER_BLOCK;
    properties->maxThreadsPerMultiProcessor = THREADS_PER_MULTIPROCESSOR;
    properties->maxBlocksPerMultiProcessor = BLOCKS_PER_MULTIPROCESSOR;
    properties->maxGridSize[0] = GRID_WIDTH;
    properties->maxGridSize[1] = GRID_HEIGHT;
    properties->maxGridSize[2] = GRID_HEIGHT;
    properties->maxThreadsDim[0] = THREADS_PER_BLOCK;
    properties->maxThreadsDim[1] = THREADS_PER_BLOCK;
    properties->maxThreadsDim[2] = BLOCK_DEPTH;
    properties->regsPerBlock = REGISTERS;
    properties->regsPerMultiprocessor = REGISTERS;
    properties->sharedMemPerBlock = SHARED_BYTES;
    properties->sharedMemPerBlockOptin = SHARED_BYTES_OPTIN;
    properties->sharedMemPerMultiprocessor = SHARED_BYTES_MULTIPROCESSOR;
}

static void set_abilities(struct cudaDeviceProp *properties) {
    properties->concurrentKernels = 1;
    properties->unifiedAddressing = 1;
    properties->managedMemory = 1;
    properties->cooperativeLaunch = 1;
    properties->asyncEngineCount = 3;
    properties->textureAlignment = 512;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", device_name());
    memset(properties->uuid.bytes, device + 1, sizeof properties->uuid.bytes);
    properties->pciBusID = device + 1;
    properties->major = COMPUTE_MAJOR;
    properties->minor = COMPUTE_MINOR;
    properties->totalGlobalMem = device_bytes();
    properties->l2CacheSize = CACHE_BYTES;
    properties->memoryBusWidth = BUS_BITS;
    set_limits(properties);
    set_abilities(properties);
    return cudaSuccess;
}

// The numbers of attributes are the same in the runtime and in the driver.
static int attribute_value(CUdevice_attribute attribute) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return THREADS_PER_BLOCK;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return BLOCK_DEPTH;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return GRID_WIDTH;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return GRID_HEIGHT;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return SHARED_BYTES;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return SHARED_BYTES_OPTIN;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
        return SHARED_BYTES_MULTIPROCESSOR;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
        return SHARED_BYTES_RESERVED;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
        return CONSTANT_BYTES;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return WARP;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
        return REGISTERS;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        return CLOCK_KHZ;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
        return MEMORY_CLOCK_KHZ;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
        return BUS_BITS;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
        return CACHE_BYTES;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return MULTIPROCESSORS;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return THREADS_PER_MULTIPROCESSOR;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
        return BLOCKS_PER_MULTIPROCESSOR;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return COMPUTE_MAJOR;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return COMPUTE_MINOR;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        return 0;
    default:
        return 1;  // most other attributes are abilities
    }
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    *value = attribute_value((CUdevice_attribute)attribute);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device) {
    snprintf(text, room, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most) {
    *least = 0;
    *most = MOST_URGENT_PRIORITY;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)any_handle;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

// ---- kernels on a device

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->binaryVersion = COMPUTE_MAJOR * 10 + COMPUTE_MINOR;
    attributes->ptxVersion = COMPUTE_MAJOR * 10 + COMPUTE_MINOR;
    attributes->maxThreadsPerBlock = THREADS_PER_BLOCK;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = SHARED_BYTES_OPTIN;
    return cudaSuccess;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction kernel) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = THREADS_PER_BLOCK;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 64;
        break;
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *number, const void *kernel, int threads,
                                                                 size_t shared) {
    *number = RESIDENT_BLOCKS;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *number, const void *kernel,
                                                                          int threads, size_t shared,
                                                                          unsigned int flags) {
    *number = RESIDENT_BLOCKS;
    return cudaSuccess;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *number, CUfunction kernel, int threads,
                                                            size_t shared) {
    *number = RESIDENT_BLOCKS;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction kernel, const CUlaunchConfig *configuration) {
    *number = 16;
    return CUDA_SUCCESS;
}

// ---- devices of the driver

EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_RELEASE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *number) {
    *number = device_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute_value(attribute);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int room, CUdevice device) {
    return (CUresult)cudaDeviceGetPCIBusId(text, room, device);
}

EXPORT CUresult cuDeviceGetName(char *text, int room, CUdevice device) {
    snprintf(text, room, "%s", device_name());
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid, device + 1, sizeof *uuid);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *size, CUdevice device) {
    *size = device_bytes();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    make_context(device);
    *context = (CUcontext)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
    *flags = 0;
    *active = has_context(device);
    return CUDA_SUCCESS;
}
