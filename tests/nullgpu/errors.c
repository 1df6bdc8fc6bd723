// The last error of a thread, and the texts of errors.
#include "nullgpu.h"

static __thread cudaError_t last;

cudaError_t fail(cudaError_t error) {
    last = error;
    return error;
}

EXPORT cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void) {
    return last;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    default:
        return "nullgpu error";
    }
}

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    return "cudaErrorNullGpu";
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = "nullgpu";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = "nullgpu";
    return CUDA_SUCCESS;
}
