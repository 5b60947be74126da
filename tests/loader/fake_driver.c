/* The calls that umbp.loader.driver makes, as a library of its own. FAKE_FAIL names those that fail, with spaces between; FAKE_LOG is where calls are written. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIAS 0x100000000000ULL
typedef struct { char reserved[64]; } handle_t;

static int last = 0;

static int result(const char *name) {
    const char *fail = getenv("FAKE_FAIL");
    char list[256] = " ", word[64];
    snprintf(list, sizeof list, " %s ", fail ? fail : "");
    snprintf(word, sizeof word, " %s ", name);
    last = strstr(list, word) ? 2 : 0;
    return last;
}

static void note(const char *name, unsigned long long a, unsigned long long b, unsigned long long c) {
    FILE *file = fopen(getenv("FAKE_LOG"), "a");
    if (file) { fprintf(file, "%s %llx %llx %llx\n", name, a, b, c); fclose(file); }
}

#define NAME2(prefix, name) prefix##name
#define NAME(prefix, name) NAME2(prefix, name)
#define CALL(name) int NAME(PREFIX, name)

CALL(HostRegister)(void *p, size_t n, unsigned flags) { note("HostRegister", (uintptr_t)p, n, flags); return result("HostRegister"); }
CALL(HostGetDevicePointer)(void **d, void *p, unsigned flags) {
    note("HostGetDevicePointer", (uintptr_t)p, flags, 0);
    *d = (void *)((uintptr_t)p + ALIAS);
    return result("HostGetDevicePointer");
}
CALL(HostUnregister)(void *p) { note("HostUnregister", (uintptr_t)p, 0, 0); return result("HostUnregister"); }
CALL(Malloc)(void **d, size_t n) { *d = calloc(1, n); note("Malloc", (uintptr_t)*d, n, 0); return result("Malloc"); }
CALL(ExtMallocWithFlags)(void **d, size_t n, unsigned flags) {
    int code = result("ExtMallocWithFlags");
    note("ExtMallocWithFlags", 0, n, flags);
    if (code == 0) *d = malloc(n);
    return code;
}
CALL(Memset)(void *d, int value, size_t n) { note("Memset", (uintptr_t)d, (unsigned)value, n); memset(d, value, n); return result("Memset"); }
CALL(Free)(void *d) { note("Free", (uintptr_t)d, 0, 0); free(d); return result("Free"); }
CALL(IpcGetMemHandle)(handle_t *h, void *d) {
    note("IpcGetMemHandle", (uintptr_t)d, 0, 0);
    memset(h, 7, sizeof *h);
    memcpy(h->reserved, &d, sizeof d); /* with zero bytes in it, as real handles have */
    return result("IpcGetMemHandle");
}
CALL(IpcOpenMemHandle)(void **d, handle_t h, unsigned flags) {
    uintptr_t base;
    memcpy(&base, h.reserved, sizeof base);
    note("IpcOpenMemHandle", base, (unsigned char)h.reserved[63], flags);
    *d = (void *)(base + 0x1000);
    return result("IpcOpenMemHandle");
}
CALL(IpcCloseMemHandle)(void *d) { note("IpcCloseMemHandle", (uintptr_t)d, 0, 0); return result("IpcCloseMemHandle"); }
CALL(DeviceGetPCIBusId)(char *text, int size, int device) {
    snprintf(text, size, "0000:C%d:00.0", device);
    return result("DeviceGetPCIBusId");
}
CALL(GetLastError)(void) { int code = last; last = 0; note("GetLastError", code, 0, 0); return code; }
const char *NAME(PREFIX, GetErrorString)(int code) { return code == 2 ? "out of memory" : "no error"; }

static int range(void **base, size_t *size, uintptr_t p) {
    *base = (void *)(p & ~0xffffULL);
    *size = 0x10000;
    return result("MemGetAddressRange");
}
int hipMemGetAddressRange(void **base, size_t *size, void *p) { return range(base, size, (uintptr_t)p); }
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long p) { return range((void **)base, size, p); }
