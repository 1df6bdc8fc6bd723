// The rest of the driver: where functions are found, contexts, modules and libraries.
#include "nullgpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

// ---- where functions are found

static int succeed() {
    return 0;
}

// The function of a name, or of its second version. A name that nothing defines has a function that succeeds.
static void *function_of(const char *name) {
    char second[128];
    void *function = dlsym(RTLD_DEFAULT, name);
    if (function) {
        return function;
    }
    snprintf(second, sizeof second, "%s_v2", name);
    function = dlsym(RTLD_DEFAULT, second);
    return function ? function : (void *)succeed;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    *function = function_of(name);
    if (status) {
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    *function = function_of(name);
    if (status) {
        *status = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

// ---- contexts

EXPORT CUresult cuInit(unsigned int flags) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = MIB;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return CUDA_SUCCESS;
}

// ---- modules and libraries; the handle of a kernel is a copy of its name

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) {
    *module = (CUmodule)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int number, CUjit_option *options,
                                   void **values) {
    *module = (CUmodule)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *kernel, CUmodule module, const char *name) {
    *kernel = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values,
                                  unsigned int number, CUlibraryOption *library_options, void **library_values,
                                  unsigned int library_number) {
    *library = (CUlibrary)any_handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    *kernel = (CUkernel)strdup(name);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute attribute, int value) {
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction kernel, CUfunc_cache configuration) {
    return CUDA_SUCCESS;
}
