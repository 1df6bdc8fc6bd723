// cuBLAS functions with results that callers use. All other ones, matrix products included, are in stubs.txt.
//
// Handles and descriptors have no state here, so they are plain zeroed memory.
#include "nullgpu.h"

#include <stdlib.h>
#include <string.h>

#define HANDLE_BYTES 64
#define DESCRIPTOR_BYTES 256
#define CUBLAS_SUCCESS 0
#define CUBLAS_ALLOCATION_FAILED 3
#define CUBLAS_LT_RELEASE 130200

// The start of cublasLtMatmulHeuristicResult_t, which ends with reserved numbers.
typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
} Heuristic;

static int allocate(void **memory, size_t size) {
    *memory = calloc(1, size);
    return *memory ? CUBLAS_SUCCESS : CUBLAS_ALLOCATION_FAILED;
}

EXPORT int cublasCreate_v2(void **handle) {
    return allocate(handle, HANDLE_BYTES);
}

EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return CUBLAS_SUCCESS;
}

EXPORT int cublasGetMathMode(void *handle, int *mode) {
    *mode = 0;
    return CUBLAS_SUCCESS;
}

EXPORT int cublasLtCreate(void **handle) {
    return allocate(handle, HANDLE_BYTES);
}

EXPORT size_t cublasLtGetVersion(void) {
    return CUBLAS_LT_RELEASE;
}

EXPORT int cublasLtMatmulDescCreate(void **descriptor, int compute_type, int scale_type) {
    return allocate(descriptor, DESCRIPTOR_BYTES);
}

EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    return allocate(layout, DESCRIPTOR_BYTES);
}

EXPORT int cublasLtMatmulPreferenceCreate(void **preference) {
    return allocate(preference, DESCRIPTOR_BYTES);
}

// One algorithm that needs no workspace; PyTorch fails without one.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *left, void *right, void *added,
                                          void *result, void *preference, int room, Heuristic *heuristics,
                                          int *number) {
    memset(heuristics, 0, sizeof *heuristics);
    *number = 1;
    return CUBLAS_SUCCESS;
}
