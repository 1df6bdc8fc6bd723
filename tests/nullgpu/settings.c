// What the environment sets. Each function reads the environment again, as a process may change its own.
#include "nullgpu.h"

#include <stdlib.h>

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

int device_count(void) {
    uint64_t devices = number("NULLGPU_COUNT", 1);
    return devices < DEVICES ? (int)devices : DEVICES;
}

const char *device_name(void) {
    const char *name = getenv("NULLGPU_NAME");
    return name ? name : "NVIDIA H200";
}

uint64_t board_bytes(void) {
    return number("NULLGPU_MIB", 143771) * MIB;
}

uint64_t device_bytes(void) {
    return board_bytes() - DRIVER_BYTES;
}

uint64_t context_bytes(void) {
    return number("NULLGPU_CONTEXT_MIB", 520) * MIB;
}

uint64_t most_copied(void) {
    return number("NULLGPU_MOST_COPIED", 4 * MIB);
}
