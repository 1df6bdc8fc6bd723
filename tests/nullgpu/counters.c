// Counters of every process in one shared file, and the log.
#include "nullgpu.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static Counters *all;
static Counters *own;
static int32_t own_pid;
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static pthread_mutex_t claim_lock = PTHREAD_MUTEX_INITIALIZER;

static void stop(const char *reason) {
    fprintf(stderr, "nullgpu: %s\n", reason);
    abort();
}

static void open_file(void) {
    const char *path = getenv("NULLGPU_FILE");
    size_t size = sizeof(Counters) * PROCESSES;
    int file = open(path ? path : "/dev/shm/nullgpu", O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0 || ftruncate(file, size)) {
        stop("the file of the shared counters cannot be opened");
    }
    all = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (all == MAP_FAILED) {
        stop("the file of the shared counters cannot be mapped");
    }
    close(file);
}

// Free the structure of a process that ended. True: the structure is free now.
static bool release_if_ended(Counters *counters) {
    int32_t pid = __atomic_load_n(&counters->pid, __ATOMIC_ACQUIRE);
    if (!pid) {
        return true;
    }
    if (!kill(pid, 0) || errno != ESRCH) {
        return false;
    }
    // Another process may release the structure and claim it meanwhile.
    __atomic_compare_exchange_n(&counters->pid, &pid, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return !__atomic_load_n(&counters->pid, __ATOMIC_ACQUIRE);
}

static bool claim_one(Counters *counters, int32_t pid) {
    int32_t expected = 0;
    // A structure with this process's id is left from before an exec, or from a process that ended long ago.
    if (counters->pid == pid) {
        return true;
    }
    if (!release_if_ended(counters)) {
        return false;
    }
    return __atomic_compare_exchange_n(&counters->pid, &expected, pid, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static Counters *claim(int32_t pid) {
    size_t head = offsetof(Counters, bytes);
    for (int i = 0; i < PROCESSES; i++) {
        if (claim_one(&all[i], pid)) {
            memset((char *)&all[i] + head, 0, sizeof(Counters) - head);
            return &all[i];
        }
    }
    stop("more processes than the file of the shared counters has room for");
    return NULL;
}

// The counters of this process. A fork has counters of its own.
Counters *own_counters(void) {
    int32_t pid = getpid();
    if (__atomic_load_n(&own_pid, __ATOMIC_ACQUIRE) == pid) {
        return own;
    }
    pthread_once(&opened, open_file);
    pthread_mutex_lock(&claim_lock);
    if (own_pid != pid) {
        own = claim(pid);
        __atomic_store_n(&own_pid, pid, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&claim_lock);
    return own;
}

void count(uint64_t *counter, uint64_t more) {
    __atomic_add_fetch(counter, more, __ATOMIC_RELAXED);
}

// A wait for nothing that was launched since the last one takes no time: it is not counted.
void count_wait(void) {
    static uint64_t waited;
    Counters *counters = own_counters();
    uint64_t launches = __atomic_load_n(&counters->launches, __ATOMIC_RELAXED);
    if (__atomic_exchange_n(&waited, launches, __ATOMIC_RELAXED) != launches) {
        count(&counters->waits, 1);
    }
}

static void raise_to(uint64_t *counter, uint64_t value) {
    uint64_t old = __atomic_load_n(counter, __ATOMIC_RELAXED);
    while (old < value) {
        // A failed exchange loads the counter again.
        if (__atomic_compare_exchange_n(counter, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
            return;
        }
    }
}

void charge(int device, uint64_t bytes) {
    Counters *counters = own_counters();
    uint64_t now = __atomic_add_fetch(&counters->bytes[device], bytes, __ATOMIC_RELAXED);
    raise_to(&counters->peak[device], now);
}

void discharge(int device, uint64_t bytes) {
    __atomic_sub_fetch(&own_counters()->bytes[device], bytes, __ATOMIC_RELAXED);
}

uint64_t used_bytes(int device) {
    uint64_t sum = 0;
    pthread_once(&opened, open_file);
    for (int i = 0; i < PROCESSES; i++) {
        if (!release_if_ended(&all[i])) {
            sum += __atomic_load_n(&all[i].bytes[device], __ATOMIC_RELAXED);
        }
    }
    return sum;
}

// One of this process's counters, for callers in Python. The first two are of device 0.
EXPORT unsigned long long nullgpu_number(int which) {
    const Counters *counters = own_counters();
    switch (which) {
    case 0:
        return counters->bytes[0];
    case 1:
        return counters->peak[0];
    case 2:
        return counters->graphs;
    case 3:
        return counters->nodes;
    case 4:
        return counters->launches;
    case 5:
        return counters->refused;
    case 6:
        return counters->largest;
    case 7:
        return counters->waits;
    }
    return 0;
}

// Append a line to the log, after the process id. The file is opened for each line: processes share it.
void log_line(const char *format, ...) {
    const char *path = getenv("NULLGPU_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    va_list arguments;
    if (!file) {
        return;
    }
    fprintf(file, "%d ", getpid());
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    fputc('\n', file);
    fclose(file);
}
