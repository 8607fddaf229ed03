/* A simulated CUDA driver for machines without a GPU: what its files share.
 *
 * Memory is the host's; a device address is a host address with one high bit set, so that code which mixes the two up
 * crashes here as it would on a GPU. A stream is a list of operations that runs only when somebody synchronises or
 * queries it: a forgotten synchronisation shows. Time is virtual. There are no kernels: what stands for one is a host
 * function on the stream. Whatever is not simulated answers CUDA_ERROR_NOT_SUPPORTED.
 *
 * Two pages make it observable and controllable from outside: `struct fake_control` (faults, what kind of device
 * this is) and `struct fake_observed` (calls, a trace, what is still alive). Without FAKE_CUDA_CONTROL and
 * FAKE_CUDA_OBSERVE in the environment both live in this process alone.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As in NVIDIA's cuda.h; tests/unit/test_cuda_constants.py compares them where that header is installed. */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct fake_context *CUcontext;
typedef struct fake_stream *CUstream;
typedef struct fake_event *CUevent;
typedef struct fake_graph *CUgraph;
typedef struct fake_graph_exec *CUgraphExec;
typedef void (*CUhostFn)(void *);
typedef struct { char bytes[16]; } CUuuid;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, ECC_UNCORRECTABLE = 214, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, LAUNCH_TIMEOUT = 702, PRIMARY_CONTEXT_ACTIVE = 708, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903,
};

#define API __attribute__((visibility("default")))
#define DEVICE_BIT (1ULL << 62)

/* Every simulated entry: the name cuGetProcAddress is asked for, and the symbol of its newest simulated version. */
#define FAKE_CALLS(X) \
    X(cuInit, cuInit) X(cuDriverGetVersion, cuDriverGetVersion) X(cuGetProcAddress, cuGetProcAddress_v2) \
    X(cuGetErrorName, cuGetErrorName) X(cuGetErrorString, cuGetErrorString) \
    X(cuDeviceGetCount, cuDeviceGetCount) X(cuDeviceGet, cuDeviceGet) X(cuDeviceGetName, cuDeviceGetName) \
    X(cuDeviceGetUuid, cuDeviceGetUuid_v2) X(cuDeviceTotalMem, cuDeviceTotalMem_v2) \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute) X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId) \
    X(cuDeviceGetByPCIBusId, cuDeviceGetByPCIBusId) X(cuDeviceComputeCapability, cuDeviceComputeCapability) \
    X(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer) \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2) \
    X(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2) X(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2) \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState) \
    X(cuCtxCreate, cuCtxCreate_v2) X(cuCtxDestroy, cuCtxDestroy_v2) X(cuCtxPushCurrent, cuCtxPushCurrent_v2) \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2) X(cuCtxSetCurrent, cuCtxSetCurrent) X(cuCtxGetCurrent, cuCtxGetCurrent) \
    X(cuCtxGetDevice, cuCtxGetDevice) X(cuCtxGetFlags, cuCtxGetFlags) X(cuCtxSynchronize, cuCtxSynchronize) \
    X(cuCtxAttach, cuCtxAttach) X(cuCtxDetach, cuCtxDetach) X(cuCtxGetApiVersion, cuCtxGetApiVersion) \
    X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange) \
    X(cuMemGetInfo, cuMemGetInfo_v2) X(cuMemAlloc, cuMemAlloc_v2) X(cuMemFree, cuMemFree_v2) \
    X(cuMemHostAlloc, cuMemHostAlloc) X(cuMemAllocHost, cuMemAllocHost_v2) X(cuMemFreeHost, cuMemFreeHost) \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2) X(cuMemHostGetFlags, cuMemHostGetFlags) \
    X(cuMemHostRegister, cuMemHostRegister_v2) X(cuMemHostUnregister, cuMemHostUnregister) \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2) X(cuPointerGetAttribute, cuPointerGetAttribute) \
    X(cuMemcpy, cuMemcpy) X(cuMemcpyAsync, cuMemcpyAsync) \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2) X(cuMemcpyDtoH, cuMemcpyDtoH_v2) X(cuMemcpyDtoD, cuMemcpyDtoD_v2) \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2) \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2) X(cuMemsetD8, cuMemsetD8_v2) X(cuMemsetD8Async, cuMemsetD8Async) \
    X(cuStreamCreate, cuStreamCreate) X(cuStreamCreateWithPriority, cuStreamCreateWithPriority) \
    X(cuStreamDestroy, cuStreamDestroy_v2) X(cuStreamQuery, cuStreamQuery) \
    X(cuStreamSynchronize, cuStreamSynchronize) X(cuStreamGetPriority, cuStreamGetPriority) \
    X(cuStreamWaitEvent, cuStreamWaitEvent) X(cuStreamWriteValue32, cuStreamWriteValue32_v2) \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2) X(cuStreamEndCapture, cuStreamEndCapture) \
    X(cuStreamIsCapturing, cuStreamIsCapturing) X(cuLaunchHostFunc, cuLaunchHostFunc) \
    X(cuEventCreate, cuEventCreate) X(cuEventDestroy, cuEventDestroy_v2) X(cuEventRecord, cuEventRecord) \
    X(cuEventQuery, cuEventQuery) X(cuEventSynchronize, cuEventSynchronize) X(cuEventElapsedTime, cuEventElapsedTime) \
    X(cuModuleLoadData, cuModuleLoadData) X(cuModuleGetFunction, cuModuleGetFunction) \
    X(cuModuleUnload, cuModuleUnload) X(cuLaunchKernel, cuLaunchKernel) \
    X(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags) X(cuGraphLaunch, cuGraphLaunch) \
    X(cuGraphUpload, cuGraphUpload) X(cuGraphGetNodes, cuGraphGetNodes) \
    X(cuGraphDestroy, cuGraphDestroy) X(cuGraphExecDestroy, cuGraphExecDestroy)

enum fake_call {
#define X(name, symbol) CALL_##name,
    FAKE_CALLS(X)
#undef X
    CALL_execute, /* not an entry: one operation run by a stream; a fault armed for it strikes on the device */
    CALL_COUNT
};

/* What is alive in this process. */
enum fake_live { LIVE_MEMORY, LIVE_BYTES, LIVE_PINNED, LIVE_REGISTERED, LIVE_STREAM, LIVE_EVENT, LIVE_GRAPH, LIVE_EXEC,
                 LIVE_CONTEXT, LIVE_KINDS };

#define FAULTS_MAX 16
#define TRACE_MAX 4096
#define CALLS_MAX 128
#define DEVICES_MAX 4

struct fake_fault {
    uint32_t armed;  /* 0 free, 1 armed, 2 has struck for good */
    uint32_t call;   /* enum fake_call */
    uint32_t after;  /* so many calls still succeed */
    uint32_t error;  /* the CUresult */
    uint32_t sticky; /* 1: the context is broken, every later call answers the same; 0: this call alone */
    uint32_t times;  /* it strikes so often, then it is gone; 0: for ever */
};

struct fake_control {
    char magic[8]; /* "FAKECTL1" */
    uint32_t devices, integrated, mem_ops, capture, driver_version, init_error, crash_at_init;
    uint32_t lost;         /* every call answers this error: the device is gone */
    uint32_t hang;         /* streams make no progress, queries answer NOT_READY */
    uint32_t lazy_queries; /* a query answers NOT_READY so often before the stream runs */
    uint32_t compute_major, compute_minor;
    uint64_t memory_bytes; /* per device */
    uint32_t first_device; /* UUIDs and addresses count from here: devices were swapped at a reboot */
    uint32_t eager;        /* streams run at once, like a device that is infinitely fast */
    struct fake_fault faults[FAULTS_MAX];
};

struct fake_observed {
    char magic[8]; /* "FAKEOBS1" */
    uint32_t calls, live_kinds;
    uint64_t traced; /* calls since the start; the trace holds the last TRACE_MAX */
    int64_t live[LIVE_KINDS];
    int64_t priority; /* of the stream that was made last with one */
    int64_t first_device_used; /* contexts that were made on the first device */
    int64_t leaked; /* objects that died with their context instead of being freed */
    uint64_t count[CALLS_MAX];
    uint16_t trace[TRACE_MAX];
    char names[CALLS_MAX][40];
};

enum op_kind { OP_COPY, OP_FILL, OP_HOST, OP_WRITE, OP_RECORD, OP_WAIT, OP_GRAPH, OP_TRAP };

struct op {
    enum op_kind kind;
    uint64_t target, source, size; /* COPY: addresses as given; FILL, WRITE: source is the value */
    CUhostFn function;
    void *argument;
    struct fake_event *event;
    uint64_t ticket; /* RECORD, WAIT: which record of the event */
    struct fake_graph_exec *exec;
};

struct ops { struct op *items; size_t count, room; };

struct fake_graph { struct ops ops; bool invalid; };
struct fake_graph_exec { struct ops ops; struct fake_context *context; unsigned generation, users; bool dead; };

struct fake_stream {
    struct fake_context *context;
    struct fake_stream *next;
    struct ops pending;
    size_t done; /* how many of `pending` have run */
    unsigned flags;
    int priority;
    unsigned queries;
    bool running;
    struct fake_graph *capturing;
};

struct fake_event {
    struct fake_context *context;
    unsigned generation;
    struct fake_stream *stream; /* of the last record */
    uint64_t recorded, passed;  /* tickets */
    uint64_t time_ns;           /* virtual, of the last passed record */
    unsigned flags, queries;
};

struct fake_context {
    int device;
    unsigned flags, retained;
    bool primary, alive;
    CUresult broken; /* the sticky error */
    unsigned generation; /* a primary context is the same record over all its lives */
    unsigned events, execs;
    struct fake_stream *streams;
    struct fake_stream default_stream;
};

extern struct fake_control *fake_control;
extern struct fake_observed *fake_observed;
extern __thread struct fake_context *fake_current;
extern __thread unsigned fake_captures; /* streams of this thread that are being captured */

/* Begins an entry: counts and traces it, then says whether a fault answers in its place. Takes the lock; `leave`
 * gives it back. */
CUresult enter(enum fake_call call);
CUresult leave(CUresult result);
void fake_lock(void);
void fake_unlock(void);
CUresult strike(enum fake_call call); /* the armed fault's error, or 0; a sticky one breaks the context */
void live(enum fake_live kind, int64_t change);

/* An entry's usual start: a context is needed, and it must not be broken. */
#define ENTER(name) do { CUresult refused = enter(CALL_##name); if (refused) return leave(refused); } while (0)
#define NEEDS_CONTEXT() do { if (!fake_current || !fake_current->alive) return leave(INVALID_CONTEXT); } while (0)
/* Not allowed while this thread captures a stream (thread-local and global mode). */
#define NOT_WHILE_CAPTURING() do { if (fake_captures) return leave(invalidate_captures()); } while (0)

CUresult invalidate_captures(void);
void *host_of(uint64_t address); /* where the memory behind a device or host address is */
bool is_pinned(uint64_t address, uint64_t size);
CUresult check_range(uint64_t address, uint64_t size); /* a device range must lie in one live allocation */
CUresult push_op(CUstream stream, struct op op);
CUresult append_op(struct ops *ops, struct op op);
CUresult run_stream(struct fake_stream *stream, size_t until);
CUresult run_blocking_streams(struct fake_context *context); /* what the legacy default stream waits for */
CUresult run_all_streams(struct fake_context *context);
void destroy_context(struct fake_context *context);
void free_memory_of(struct fake_context *context);
void free_streams_of(struct fake_context *context);
struct fake_stream *stream_of(CUstream stream);

#endif
