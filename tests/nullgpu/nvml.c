// NVML. The handle of a device is its index plus one.
#include "nullgpu.h"

#include <stdio.h>

#define NVML_SUCCESS 0
#define NVML_INVALID_ARGUMENT 2
#define NVML_NOT_SUPPORTED 3

typedef struct {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
} Memory;

typedef struct {
    unsigned int version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
} MemoryV2;

static int index_of(void *handle) {
    return (int)(uintptr_t)handle - 1;
}

// ---- the library

EXPORT int nvmlInit(void) {
    return NVML_SUCCESS;
}

EXPORT int nvmlInit_v2(void) {
    return NVML_SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned int flags) {
    return NVML_SUCCESS;
}

EXPORT int nvmlShutdown(void) {
    return NVML_SUCCESS;
}

EXPORT const char *nvmlErrorString(int error) {
    return "nullgpu";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned int room) {
    snprintf(text, room, "580.159.03");
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = CUDA_RELEASE;
    return NVML_SUCCESS;
}

EXPORT int nvmlSystemGetNVMLVersion(char *text, unsigned int room) {
    snprintf(text, room, "13.580.0");
    return NVML_SUCCESS;
}

// ---- handles of devices

EXPORT int nvmlDeviceGetCount_v2(unsigned int *number) {
    *number = device_count();
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCount(unsigned int *number) {
    return nvmlDeviceGetCount_v2(number);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    if (index >= (unsigned int)device_count()) {
        return NVML_INVALID_ARGUMENT;
    }
    *handle = (void *)(uintptr_t)(index + 1);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned int index, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(0, handle);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(0, handle);
}

EXPORT int nvmlDeviceGetIndex(void *handle, unsigned int *index) {
    *index = index_of(handle);
    return NVML_SUCCESS;
}

// ---- properties of devices

EXPORT int nvmlDeviceGetName(void *handle, char *text, unsigned int room) {
    snprintf(text, room, "%s", device_name());
    return NVML_SUCCESS;
}

// The first four bytes are those of the CUDA runtime.
EXPORT int nvmlDeviceGetUUID(void *handle, char *text, unsigned int room) {
    int mark = index_of(handle) + 1;
    snprintf(text, room, "GPU-%02x%02x%02x%02x-0000-0000-0000-00000000000%d", mark, mark, mark, mark, mark);
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = COMPUTE_MAJOR;
    *minor = COMPUTE_MINOR;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNumaNodeId(void *handle, unsigned int *node) {
    *node = 0;
    return NVML_SUCCESS;
}

// ---- memory of devices

// The first version counts the driver's part as used, the second one as reserved.
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = board_bytes();
    memory->used = used_bytes(index_of(handle)) + DRIVER_BYTES;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    memory->total = board_bytes();
    memory->reserved = DRIVER_BYTES;
    memory->used = used_bytes(index_of(handle));
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

// No process is listed.
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned int *number, void *processes) {
    *number = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *number, void *processes) {
    *number = 0;
    return NVML_SUCCESS;
}

// ---- connections between devices

EXPORT int nvmlDeviceGetP2PStatus(void *handle, void *peer, int index, int *status) {
    *status = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned int link, int *type) {
    *type = 0;
    return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned int link, void *bus) {
    return NVML_NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetFabricInfoV(void *handle, void *fabric) {
    return NVML_NOT_SUPPORTED;
}
