/* The part of the CUDA driver API that `taktd.drivers._cuda` uses, declared by ourselves: taktd builds without CUDA.
 *
 * Values are those of NVIDIA's cuda.h (CUDA 12.0 and later); tests/unit/test_cuda_constants.py compares them where that
 * header is installed.
 */
#ifndef TAKTD_CUDA_API_H
#define TAKTD_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

enum {
    TAKT_CUDA_SUCCESS = 0,
    TAKT_CUDA_NOT_READY = 600,
    TAKT_CUDA_NOT_SUPPORTED = 801,
    TAKT_CUDA_TIMED_OUT = -110, /* ours: the device did not finish in time */
};

enum {
    ATTRIBUTE_KERNEL_EXEC_TIMEOUT = 17,
    ATTRIBUTE_INTEGRATED = 18,
    ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
    ATTRIBUTE_ECC_ENABLED = 32,
    ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122,
};

enum {
    CTX_SCHED_SPIN = 1,
    CTX_MAP_HOST = 8,
    STREAM_NON_BLOCKING = 1,
    EVENT_DISABLE_TIMING = 2,
    CAPTURE_MODE_THREAD_LOCAL = 1,
    MEMHOSTALLOC_PORTABLE_DEVICEMAP = 3,
    MEMHOSTREGISTER_PORTABLE_DEVICEMAP = 3,
    WRITE_VALUE_DEFAULT = 0,
};

/* The version asked of cuGetProcAddress: the oldest API that is supported (JetPack 6 has 12.6). */
#define CUDA_VERSION_ASKED 12000

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUhandle; /* context, stream, event, graph, executable graph */
typedef struct { unsigned char bytes[16]; } CUuuid;

/* name, parameters */
#define CUDA_ENTRIES(X) \
    X(cuInit, (unsigned)) \
    X(cuDriverGetVersion, (int *)) \
    X(cuGetErrorName, (CUresult, const char **)) \
    X(cuGetErrorString, (CUresult, const char **)) \
    X(cuDeviceGetCount, (int *)) \
    X(cuDeviceGet, (CUdevice *, int)) \
    X(cuDeviceGetName, (char *, int, CUdevice)) \
    X(cuDeviceGetUuid, (CUuuid *, CUdevice)) \
    X(cuDeviceTotalMem, (size_t *, CUdevice)) \
    X(cuDeviceGetAttribute, (int *, int, CUdevice)) \
    X(cuDeviceGetPCIBusId, (char *, int, CUdevice)) \
    X(cuDevicePrimaryCtxSetFlags, (CUdevice, unsigned)) \
    X(cuDevicePrimaryCtxRetain, (CUhandle *, CUdevice)) \
    X(cuDevicePrimaryCtxRelease, (CUdevice)) \
    X(cuCtxSetCurrent, (CUhandle)) \
    X(cuCtxGetCurrent, (CUhandle *)) \
    X(cuCtxGetStreamPriorityRange, (int *, int *)) \
    X(cuMemGetInfo, (size_t *, size_t *)) \
    X(cuMemAlloc, (CUdeviceptr *, size_t)) \
    X(cuMemFree, (CUdeviceptr)) \
    X(cuMemHostAlloc, (void **, size_t, unsigned)) \
    X(cuMemFreeHost, (void *)) \
    X(cuMemHostRegister, (void *, size_t, unsigned)) \
    X(cuMemHostUnregister, (void *)) \
    X(cuMemHostGetDevicePointer, (CUdeviceptr *, void *, unsigned)) \
    X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUhandle)) \
    X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUhandle)) \
    X(cuStreamCreateWithPriority, (CUhandle *, unsigned, int)) \
    X(cuStreamDestroy, (CUhandle)) \
    X(cuStreamQuery, (CUhandle)) \
    X(cuStreamGetPriority, (CUhandle, int *)) \
    X(cuStreamBeginCapture, (CUhandle, int)) \
    X(cuStreamEndCapture, (CUhandle, CUhandle *)) \
    X(cuStreamWriteValue32, (CUhandle, CUdeviceptr, uint32_t, unsigned)) \
    X(cuEventCreate, (CUhandle *, unsigned)) \
    X(cuEventDestroy, (CUhandle)) \
    X(cuEventRecord, (CUhandle, CUhandle)) \
    X(cuEventQuery, (CUhandle)) \
    X(cuEventElapsedTime, (float *, CUhandle, CUhandle)) \
    X(cuModuleLoadData, (CUhandle *, const void *)) \
    X(cuModuleGetFunction, (CUhandle *, CUhandle, const char *)) \
    X(cuLaunchKernel, (CUhandle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUhandle, void **, \
                       void **)) \
    X(cuGraphUpload, (CUhandle, CUhandle)) \
    X(cuGraphLaunch, (CUhandle, CUhandle)) \
    X(cuGraphGetNodes, (CUhandle, CUhandle *, size_t *)) \
    X(cuGraphDestroy, (CUhandle)) \
    X(cuGraphExecDestroy, (CUhandle))

/* Asked for by their symbols: `cuGraphInstantiate` has had five parameters and three, whatever header spells it how. */
#define CUDA_SYMBOLS(X) X(cuGraphInstantiateWithFlags, (CUhandle *, CUhandle, unsigned long long))

#endif
