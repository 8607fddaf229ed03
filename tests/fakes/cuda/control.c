/* The two pages, the lock, injected faults. */
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

_Static_assert(CALL_COUNT <= CALLS_MAX, "room for every call");

struct fake_control *fake_control;
struct fake_observed *fake_observed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const char *const names[] = {
#define X(name, symbol) #name,
    FAKE_CALLS(X)
#undef X
    "execute",
};

static uint32_t number(const char *variable, uint32_t otherwise)
{
    const char *text = getenv(variable);
    return text ? (uint32_t)strtoul(text, NULL, 0) : otherwise;
}

/* A page of its own, or the file that the variable names. */
static void *page(const char *variable, size_t size, bool per_process, bool *fresh)
{
    const char *path = getenv(variable);
    char full[512];
    *fresh = true;
    if (path && *path) {
        if (per_process)
            snprintf(full, sizeof full, "%s.%d", path, (int)getpid());
        else
            snprintf(full, sizeof full, "%s", path);
        int fd = open(full, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd >= 0) {
            off_t found = lseek(fd, 0, SEEK_END);
            *fresh = found < (off_t)size;
            if (!*fresh || ftruncate(fd, (off_t)size) == 0) {
                void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
                close(fd);
                if (memory != MAP_FAILED)
                    return memory;
            } else {
                close(fd);
            }
        }
        fprintf(stderr, "fake libcuda: can't use %s=%s\n", variable, path);
        abort();
    }
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    return memory;
}

static void defaults(struct fake_control *c)
{
    memset(c, 0, sizeof *c);
    c->devices = number("FAKE_CUDA_DEVICES", 1);
    c->integrated = number("FAKE_CUDA_INTEGRATED", 0);
    c->mem_ops = number("FAKE_CUDA_MEM_OPS", 1);
    c->capture = number("FAKE_CUDA_CAPTURE", 1);
    c->driver_version = number("FAKE_CUDA_DRIVER", 13000);
    c->init_error = number("FAKE_CUDA_INIT_ERROR", 0);
    c->crash_at_init = number("FAKE_CUDA_CRASH", 0);
    c->lazy_queries = number("FAKE_CUDA_LAZY_QUERIES", 1);
    c->eager = number("FAKE_CUDA_EAGER", 0);
    c->compute_major = number("FAKE_CUDA_COMPUTE_MAJOR", 8);
    c->compute_minor = number("FAKE_CUDA_COMPUTE_MINOR", 9);
    c->memory_bytes = (uint64_t)number("FAKE_CUDA_MEMORY_MB", 1024) << 20;
    memcpy(c->magic, "FAKECTL1", 8);
}

__attribute__((constructor)) static void set_up(void)
{
    bool fresh;
    fake_control = page("FAKE_CUDA_CONTROL", sizeof *fake_control, false, &fresh);
    if (fresh)
        defaults(fake_control);
    fake_observed = page("FAKE_CUDA_OBSERVE", sizeof *fake_observed, true, &fresh);
    memset(fake_observed, 0, sizeof *fake_observed);
    memcpy(fake_observed->magic, "FAKEOBS1", 8);
    fake_observed->calls = CALL_COUNT;
    fake_observed->live_kinds = LIVE_KINDS;
    for (int i = 0; i < CALL_COUNT; i++)
        snprintf(fake_observed->names[i], sizeof fake_observed->names[i], "%s", names[i]);
}

/* For tests in this process. */
API struct fake_control *fake_cuda_control(void) { return fake_control; }
API struct fake_observed *fake_cuda_observed(void) { return fake_observed; }
API void fake_cuda_defaults(void) { defaults(fake_control); }
API size_t fake_cuda_sizes(int which) { return which ? sizeof *fake_observed : sizeof *fake_control; }

void fake_lock(void) { pthread_mutex_lock(&lock); }
void fake_unlock(void) { pthread_mutex_unlock(&lock); }

void live(enum fake_live kind, int64_t change) { fake_observed->live[kind] += change; }

CUresult strike(enum fake_call call)
{
    for (int i = 0; i < FAULTS_MAX; i++) {
        struct fake_fault *fault = &fake_control->faults[i];
        if (fault->armed != 1 || fault->call != (uint32_t)call)
            continue;
        if (fault->after) {
            fault->after--;
            continue;
        }
        if (fault->times && --fault->times == 0)
            fault->armed = 0;
        if (fault->sticky && fake_current)
            fake_current->broken = (CUresult)fault->error;
        return (CUresult)fault->error;
    }
    return OK;
}

/* What works in a broken context and on a lost device: looking for devices, and giving back. */
static bool always_answers(enum fake_call call)
{
    switch (call) {
    case CALL_cuGetErrorName: case CALL_cuGetErrorString: case CALL_cuGetProcAddress: case CALL_cuDriverGetVersion:
    case CALL_cuCtxSetCurrent: case CALL_cuCtxGetCurrent: case CALL_cuCtxPushCurrent: case CALL_cuCtxPopCurrent:
    case CALL_cuCtxGetDevice: case CALL_cuDevicePrimaryCtxRelease: case CALL_cuCtxDetach: case CALL_cuCtxDestroy:
        return true;
    default:
        return false;
    }
}

CUresult enter(enum fake_call call)
{
    extern __thread bool fake_in_host_function;
    fake_lock();
    fake_observed->count[call]++;
    fake_observed->trace[fake_observed->traced++ % TRACE_MAX] = (uint16_t)call;
    if (fake_in_host_function)
        return NOT_PERMITTED; /* CUDA forbids it, and a real driver may hang */
    CUresult struck = strike(call);
    if (struck)
        return struck;
    if (always_answers(call))
        return OK;
    if (fake_control->lost)
        return (CUresult)fake_control->lost;
    return fake_current && fake_current->alive ? fake_current->broken : OK;
}

CUresult leave(CUresult result)
{
    fake_unlock();
    return result;
}
