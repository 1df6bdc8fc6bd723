// A null device: one library stands for the CUDA runtime, the CUDA driver, NVML and the cuBLAS calls of PyTorch.
//
// The runtime is replaced by LD_PRELOAD. The driver and NVML are links to the same file, found by LD_LIBRARY_PATH.
// Memory is mapped and counted over all processes. Copies are made, kernels do nothing. Captures are checked.
//
// Environment:
//   NULLGPU_MIB          memory of a device as NVML reports it (143771)
//   NULLGPU_COUNT        number of devices, 8 at most (1)
//   NULLGPU_NAME         name of the devices (NVIDIA H200)
//   NULLGPU_FILE         file of the counters that all processes share (/dev/shm/nullgpu)
//   NULLGPU_LOG          file for one line per context, failed allocation and refused call (none)
//   NULLGPU_CONTEXT_MIB  memory that a context takes from its device (520)
//   NULLGPU_MOST_COPIED  bytes of the largest copy into the library's memory that is made (4194304)
//
// Include this header before any other: it chooses the functions that the C library declares.
#pragma once
#define _GNU_SOURCE

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define DEVICES 8
#define PROCESSES 256
#define KIB (1ULL << 10)
#define MIB (1ULL << 20)

#define CUDA_RELEASE 13000  // CUDA 13.0, as the version functions report it
#define COMPUTE_MAJOR 9
#define COMPUTE_MINOR 0

// ---- settings.c: what the environment sets

// The driver of a board keeps this part of it: NVML counts it, the CUDA runtime does not.
#define DRIVER_BYTES (600 * MIB)

int device_count(void);
const char *device_name(void);
uint64_t board_bytes(void);   // with the driver's part
uint64_t device_bytes(void);  // without it
uint64_t context_bytes(void);
uint64_t most_copied(void);

// ---- counters.c: counters of every process, in one file

// The file NULLGPU_FILE is an array of PROCESSES structures, in the byte order of the machine. counters.py reads it.
// A structure stays after its process ended, until another process takes it or computes the memory in use.
typedef struct {
    int32_t pid;              // 0: the structure is free
    int32_t unused;
    uint64_t bytes[DEVICES];  // memory in use now, contexts included
    uint64_t peak[DEVICES];   // the most that `bytes` has been
    uint64_t graphs;          // captures that ended, failed ones included
    uint64_t nodes;           // launches and copies in these captures
    uint64_t launches;        // launches and copies, captured or not; one for each launch of a graph
    uint64_t refused;         // calls that CUDA would refuse during a capture
    uint64_t largest;         // bytes of the largest allocation
    uint64_t waits;           // times that the host waits for what it has launched
} Counters;

_Static_assert(sizeof(Counters) == 184, "counters.py reads this layout");

Counters *own_counters(void);
void count(uint64_t *counter, uint64_t more);
void count_wait(void);
void charge(int device, uint64_t bytes);
void discharge(int device, uint64_t bytes);
uint64_t used_bytes(int device);  // over all processes
void log_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

// ---- errors.c

// Keep an error for cudaGetLastError of this thread, and return it.
cudaError_t fail(cudaError_t error);

// ---- devices.c

extern void *any_handle[4];  // stands for contexts, modules, libraries and pools, which have no state here

int current_device(void);
void make_context(int device);
bool has_context(int device);
void need_context(void);  // make a context on this thread's device

// ---- memory.c

typedef struct {
    char *base;
    uint64_t size;
    uint64_t charged;  // 0: host memory
    enum cudaMemoryType type;
    int device;
    int pid;  // the process that was charged; a fork inherits the range, not the charge
} Range;

// Copy the range around an address to `range`. False: the address is of no allocation.
bool find_range(const void *address, Range *range);

// ---- captures.c

typedef struct {
    uint64_t id;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    bool invalid;
    uint64_t nodes;
} Capture;

// A capture is also the graph that it makes. It is never released, so an old pointer to one stays readable.
Capture *begin_capture(enum cudaStreamCaptureMode mode);
void end_capture(Capture *capture);
bool is_open(const Capture *capture);
void refuse(const char *call, const char *reason);

// The error of a call that CUDA refuses while a capture is open in this thread, or a global one in any thread.
cudaError_t check_unsafe(const char *call);

// The error of a launch on the default stream while this thread captures another stream.
cudaError_t check_default_stream(void);
EXPORT int nullgpu_matmul(void);

// ---- streams.c

typedef struct {
    Capture *capture;
    int priority;
} Stream;

Stream *stream_of(cudaStream_t handle);
Capture *capture_of(cudaStream_t handle);  // NULL: the stream is not captured now

// ---- launches.c

// Count a kernel or a copy; in a capture it becomes a node.
cudaError_t launch(cudaStream_t handle);
