// Streams, events and the captures of streams. All work is done when its call returns, so nothing has to wait.
#include "nullgpu.h"

#include <stdlib.h>
#include <time.h>

typedef struct {
    double milliseconds;  // when the event was recorded
    Capture *capture;     // the capture of the stream that it was recorded on
} Event;

static Stream default_stream;
static __thread Stream thread_stream;

Stream *stream_of(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) {
        return &default_stream;
    }
    return handle == cudaStreamPerThread ? &thread_stream : (Stream *)handle;
}

// A stream that joined the capture of another stream leaves it when that capture ends.
Capture *capture_of(cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    if (!is_open(stream->capture)) {
        stream->capture = NULL;
    }
    return stream->capture;
}

// ---- streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned int flags, int priority) {
    need_context();
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream) {
        return fail(cudaErrorMemoryAllocation);
    }
    stream->priority = priority;
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned int flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    return cudaStreamCreateWithPriority(handle, 0, 0);
}

// The stream is not released: a handle that is used later stays readable.
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

static cudaError_t check_wait(cudaStream_t handle, const char *call) {
    Capture *capture = capture_of(handle);
    if (!capture) {
        return cudaSuccess;
    }
    capture->invalid = true;
    refuse(call, "waits for a stream that is captured");
    return fail(cudaErrorStreamCaptureUnsupported);
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return check_wait(handle, "cudaStreamQuery");
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    count_wait();
    return check_wait(handle, "cudaStreamSynchronize");
}

EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    count_wait();
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
    need_context();
    count_wait();
    return check_unsafe("cudaDeviceSynchronize");
}

// ---- captures of streams

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    Stream *stream = stream_of(handle);
    if (stream == &default_stream) {
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    Capture *capture = begin_capture(mode);
    if (!capture) {
        return fail(cudaErrorMemoryAllocation);
    }
    stream->capture = capture;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t graph,
                                                 const cudaGraphNode_t *dependencies, const cudaGraphEdgeData *edges,
                                                 size_t number, enum cudaStreamCaptureMode mode) {
    return cudaStreamBeginCapture(handle, mode);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
    Capture *capture = capture_of(handle);
    if (!capture) {
        return fail(cudaErrorIllegalState);
    }
    stream_of(handle)->capture = NULL;
    end_capture(capture);
    Counters *counters = own_counters();
    count(&counters->graphs, 1);
    count(&counters->nodes, capture->nodes);
    if (graph) {
        *graph = capture->invalid ? NULL : (cudaGraph_t)capture;
    }
    return capture->invalid ? fail(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

static enum cudaStreamCaptureStatus status_of(const Capture *capture) {
    if (!capture) {
        return cudaStreamCaptureStatusNone;
    }
    return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    *status = status_of(capture_of(handle));
    return cudaSuccess;
}

EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    *status = (CUstreamCaptureStatus)status_of(capture_of(handle));
    return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                                            size_t *number) {
    Capture *capture = capture_of(handle);
    *status = status_of(capture);
    if (!capture) {
        return cudaSuccess;
    }
    if (id) {
        *id = capture->id;
    }
    if (graph) {
        *graph = (cudaGraph_t)capture;
    }
    if (dependencies) {
        *dependencies = NULL;
    }
    if (edges) {
        *edges = NULL;
    }
    if (number) {
        *number = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t *dependencies,
                                                       const cudaGraphEdgeData *edges, size_t number,
                                                       unsigned int flags) {
    return cudaSuccess;
}

// ---- events

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned int flags) {
    need_context();
    *handle = (cudaEvent_t)calloc(1, sizeof(Event));
    return *handle ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *handle) {
    return cudaEventCreateWithFlags(handle, 0);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    free(handle);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned int flags) {
    Event *event = (Event *)handle;
    event->milliseconds = now();
    event->capture = flags & cudaEventRecordExternal ? NULL : capture_of(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    return cudaEventRecordWithFlags(handle, stream, 0);
}

// A stream that waits for an event of a capture joins this capture.
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned int flags) {
    const Event *event = (const Event *)handle;
    if (event && is_open(event->capture) && !capture_of(stream)) {
        stream_of(stream)->capture = event->capture;
    }
    return cudaSuccess;
}

static cudaError_t check_event(cudaEvent_t handle, const char *call) {
    const Event *event = (const Event *)handle;
    if (!is_open(event->capture)) {
        return cudaSuccess;
    }
    event->capture->invalid = true;
    refuse(call, "event of a capture");
    return fail(cudaErrorCapturedEvent);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
    return check_event(handle, "cudaEventQuery");
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    count_wait();
    cudaError_t error = check_unsafe("cudaEventSynchronize");
    return error ? error : check_event(handle, "cudaEventSynchronize");
}

// More than zero: callers divide by it.
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = 0.01f + (float)(((Event *)end)->milliseconds - ((Event *)start)->milliseconds);
    return cudaSuccess;
}
