// Launches of kernels, host functions and graphs. A kernel does nothing: its launch is counted.
#include "nullgpu.h"

#define CONFIGURATIONS 16

cudaError_t launch(cudaStream_t handle) {
    Capture *capture = capture_of(handle);
    count(&own_counters()->launches, 1);
    if (capture) {
        count(&capture->nodes, 1);
        return cudaSuccess;
    }
    return stream_of(handle) == stream_of(NULL) ? check_default_stream() : cudaSuccess;
}

// ---- kernels of the runtime

EXPORT cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                    cudaStream_t stream) {
    need_context();
    return launch(stream);
}

EXPORT cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    need_context();
    return launch(stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    need_context();
    return launch(stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *kernel,
                                       void **arguments) {
    need_context();
    return launch(configuration->stream);
}

// ---- kernels of the driver

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *configuration, CUfunction kernel, void **arguments,
                                 void **extra) {
    return (CUresult)launch(configuration->hStream);
}

EXPORT CUresult cuLaunchKernel(CUfunction kernel, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                               CUstream stream, void **arguments, void **extra) {
    return (CUresult)launch(stream);
}

// ---- functions of the host

// Outside a capture the function runs at once, as the work before it is done.
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    if (capture_of(stream)) {
        return launch(stream);
    }
    function(data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                         unsigned int flags) {
    if (capture_of(stream)) {
        return launch(stream);
    }
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

// ---- graphs; a capture is its graph and the executable of it

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *number) {
    *number = ((const Capture *)graph)->nodes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                 unsigned long long flags) {
    *executable = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    return launch(stream);
}

// ---- what nvcc generates around `kernel<<<grid, block, shared, stream>>>()`

typedef struct {
    dim3 grid;
    dim3 block;
    size_t shared;
    void *stream;
} Configuration;

static __thread Configuration configurations[CONFIGURATIONS];
static __thread int configuration_count;

EXPORT unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    if (configuration_count == CONFIGURATIONS) {
        return fail(cudaErrorLaunchOutOfResources);
    }
    configurations[configuration_count++] = (Configuration){grid, block, shared, stream};
    return cudaSuccess;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!configuration_count) {
        return fail(cudaErrorMissingConfiguration);
    }
    const Configuration *configuration = &configurations[--configuration_count];
    *grid = configuration->grid;
    *block = configuration->block;
    *shared = configuration->shared;
    *(void **)stream = configuration->stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

EXPORT void **__cudaRegisterFatBinary(void *binary) {
    return any_handle;
}

EXPORT char __cudaInitModule(void **binary) {
    return 1;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **binary) {
}

EXPORT void __cudaUnregisterFatBinary(void **binary) {
}

EXPORT void __cudaRegisterFunction() {
}

EXPORT void __cudaRegisterVar() {
}
