// Captures that are open in this process, and what CUDA refuses because of them.
#include "nullgpu.h"

#include <pthread.h>
#include <stdlib.h>

#define CAPTURES 64

static Capture *open_captures[CAPTURES];
static uint64_t capture_count;
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;

// What cudaThreadExchangeStreamCaptureMode has set: a relaxed thread may make unsafe calls.
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Put `after` where `before` is. Readers take no lock, as a place changes at once.
static bool replace(const Capture *before, Capture *after) {
    for (int i = 0; i < CAPTURES; i++) {
        if (open_captures[i] == before) {
            __atomic_store_n(&open_captures[i], after, __ATOMIC_RELEASE);
            return true;
        }
    }
    return false;
}

static Capture *capture_at(int place) {
    return __atomic_load_n(&open_captures[place], __ATOMIC_ACQUIRE);
}

// NULL: too many captures are open.
Capture *begin_capture(enum cudaStreamCaptureMode mode) {
    Capture *capture = calloc(1, sizeof *capture);
    if (!capture) {
        abort();
    }
    capture->mode = mode;
    capture->thread = pthread_self();
    pthread_mutex_lock(&capture_lock);
    capture->id = ++capture_count;
    bool placed = replace(NULL, capture);
    pthread_mutex_unlock(&capture_lock);
    if (placed) {
        return capture;
    }
    free(capture);
    return NULL;
}

void end_capture(Capture *capture) {
    pthread_mutex_lock(&capture_lock);
    replace(capture, NULL);
    pthread_mutex_unlock(&capture_lock);
}

bool is_open(const Capture *capture) {
    for (int i = 0; capture && i < CAPTURES; i++) {
        if (capture_at(i) == capture) {
            return true;
        }
    }
    return false;
}

static bool is_of_this_thread(const Capture *capture) {
    return pthread_equal(capture->thread, pthread_self());
}

void refuse(const char *call, const char *reason) {
    count(&own_counters()->refused, 1);
    log_line("REFUSED in a capture: %s: %s", call, reason);
}

static bool forbids_unsafe(const Capture *capture) {
    switch (capture->mode) {
    case cudaStreamCaptureModeGlobal:
        return true;
    case cudaStreamCaptureModeThreadLocal:
        return is_of_this_thread(capture);
    default:
        return false;
    }
}

cudaError_t check_unsafe(const char *call) {
    if (thread_mode == cudaStreamCaptureModeRelaxed) {
        return cudaSuccess;
    }
    for (int i = 0; i < CAPTURES; i++) {
        Capture *capture = capture_at(i);
        if (capture && forbids_unsafe(capture)) {
            capture->invalid = true;
            refuse(call, "not allowed while this thread captures");
            return fail(cudaErrorStreamCaptureUnsupported);
        }
    }
    return cudaSuccess;
}

cudaError_t check_default_stream(void) {
    for (int i = 0; i < CAPTURES; i++) {
        Capture *capture = capture_at(i);
        if (capture && capture->mode != cudaStreamCaptureModeRelaxed && is_of_this_thread(capture)) {
            capture->invalid = true;
            refuse("launch", "on the default stream while another one is captured");
            return fail(cudaErrorStreamCaptureImplicit);
        }
    }
    return cudaSuccess;
}

// Count a matrix product. Its stream is set in a handle of cuBLAS, so the capture is found by the thread.
EXPORT int nullgpu_matmul(void) {
    count(&own_counters()->launches, 1);
    for (int i = 0; i < CAPTURES; i++) {
        Capture *capture = capture_at(i);
        if (capture && is_of_this_thread(capture)) {
            count(&capture->nodes, 1);
        }
    }
    return 0;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}
