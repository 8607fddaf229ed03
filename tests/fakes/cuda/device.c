/* Devices and contexts. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__thread struct fake_context *fake_current;
#define STACK_MAX 32
static __thread struct fake_context *stack[STACK_MAX]; /* what cuCtxPushCurrent covered */
static __thread int stacked;
static struct fake_context primaries[DEVICES_MAX];
static bool initialised;

#define NEEDS_INIT() do { if (!initialised) return leave(NOT_INITIALIZED); } while (0)
#define NEEDS_DEVICE(device) do { if ((device) < 0 || (uint32_t)(device) >= fake_control->devices) \
    return leave(INVALID_DEVICE); } while (0)

/* By PCI address where that is asked for, else the fastest first: which here is the last one. */
static uint32_t card(CUdevice device)
{
    const char *order = getenv("CUDA_DEVICE_ORDER");
    bool by_address = order && !strcmp(order, "PCI_BUS_ID");
    return fake_control->first_device + (by_address ? (uint32_t)device : fake_control->devices - 1 - (uint32_t)device);
}

API CUresult cuInit(unsigned flags)
{
    ENTER(cuInit);
    if (fake_control->crash_at_init)
        __builtin_trap();
    if (flags)
        return leave(INVALID_VALUE);
    if (fake_control->init_error)
        return leave((CUresult)fake_control->init_error);
    if (fake_control->devices == 0)
        return leave(NO_DEVICE);
    initialised = true;
    return leave(OK);
}

API CUresult cuDriverGetVersion(int *version)
{
    ENTER(cuDriverGetVersion);
    *version = (int)fake_control->driver_version;
    return leave(OK);
}

API CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount);
    NEEDS_INIT();
    *count = (int)fake_control->devices;
    return leave(OK);
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(cuDeviceGet);
    NEEDS_INIT();
    NEEDS_DEVICE(ordinal);
    *device = ordinal;
    return leave(OK);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    ENTER(cuDeviceGetName);
    NEEDS_DEVICE(device);
    snprintf(name, (size_t)length, "Simulated GPU %d.%d", fake_control->compute_major, fake_control->compute_minor);
    return leave(OK);
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    ENTER(cuDeviceGetUuid);
    NEEDS_DEVICE(device);
    for (int i = 0; i < 16; i++)
        uuid->bytes[i] = (char)(0xf0 + i);
    uuid->bytes[15] = (char)card(device);
    return leave(OK);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    ENTER(cuDeviceTotalMem);
    NEEDS_DEVICE(device);
    *bytes = fake_control->memory_bytes;
    return leave(OK);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    ENTER(cuDeviceGetAttribute);
    NEEDS_DEVICE(device);
    switch (attribute) {
    case 1: *value = 1024; break;               /* MAX_THREADS_PER_BLOCK */
    case 10: *value = 32; break;                /* WARP_SIZE */
    case 16: *value = 4; break;                 /* MULTIPROCESSOR_COUNT */
    case 17: *value = 0; break;                 /* KERNEL_EXEC_TIMEOUT */
    case 18: *value = (int)fake_control->integrated; break;
    case 19: *value = 1; break;                 /* CAN_MAP_HOST_MEMORY */
    case 20: *value = 0; break;                 /* COMPUTE_MODE: default */
    case 31: *value = 1; break;                 /* CONCURRENT_KERNELS */
    case 32: *value = 1; break;                 /* ECC_ENABLED */
    case 33: *value = (int)card(device) + 1; break; /* PCI_BUS_ID */
    case 34: case 50: *value = 0; break;        /* PCI_DEVICE_ID, PCI_DOMAIN_ID */
    case 41: *value = 1; break;                 /* UNIFIED_ADDRESSING */
    case 75: *value = (int)fake_control->compute_major; break;
    case 76: *value = (int)fake_control->compute_minor; break;
    case 78: *value = 1; break;                 /* STREAM_PRIORITIES_SUPPORTED */
    case 91: *value = 0; break;                 /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 92: case 122: *value = (int)fake_control->mem_ops; break; /* CAN_USE_STREAM_MEM_OPS, v1 and v2 */
    case 99: *value = 1; break;                 /* HOST_REGISTER_SUPPORTED */
    default: *value = 0; return leave(attribute > 0 && attribute < 160 ? OK : INVALID_VALUE);
    }
    return leave(OK);
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    ENTER(cuDeviceGetPCIBusId);
    NEEDS_DEVICE(device);
    snprintf(text, (size_t)length, "0000:%02X:00.0", card(device) + 1);
    return leave(OK);
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    ENTER(cuDeviceGetByPCIBusId);
    unsigned domain, bus, slot;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3 || bus < 1 + fake_control->first_device ||
        bus > fake_control->devices + fake_control->first_device)
        return leave(INVALID_DEVICE);
    *device = (int)(bus - 1 - fake_control->first_device);
    return leave(OK);
}

API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    ENTER(cuDeviceComputeCapability);
    NEEDS_DEVICE(device);
    *major = (int)fake_control->compute_major;
    *minor = (int)fake_control->compute_minor;
    return leave(OK);
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    ENTER(cuDeviceCanAccessPeer);
    NEEDS_DEVICE(device);
    NEEDS_DEVICE(peer);
    *can = 0;
    return leave(OK);
}

static void begin_context(struct fake_context *context, int device)
{
    unsigned flags = context->flags, generation = context->generation + 1;
    memset(context, 0, sizeof *context);
    context->device = device;
    context->flags = flags;
    context->generation = generation;
    context->alive = true;
    context->default_stream.context = context;
    live(LIVE_CONTEXT, 1);
    fake_observed->first_device_used += device == 0;
}

void destroy_context(struct fake_context *context)
{
    /* As on a GPU: what was made in a context ends with it, and handles to it are void. */
    free_streams_of(context);
    free_memory_of(context);
    fake_observed->leaked += context->events + context->execs;
    live(LIVE_EVENT, -(int64_t)context->events);
    live(LIVE_EXEC, -(int64_t)context->execs);
    context->alive = false;
    live(LIVE_CONTEXT, -1);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain);
    NEEDS_INIT();
    NEEDS_DEVICE(device);
    struct fake_context *primary = &primaries[device];
    if (!primary->alive) {
        begin_context(primary, device);
        primary->primary = true;
    }
    primary->retained++;
    *context = primary;
    return leave(OK);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease);
    NEEDS_DEVICE(device);
    struct fake_context *primary = &primaries[device];
    if (!primary->alive || primary->retained == 0)
        return leave(INVALID_CONTEXT);
    if (--primary->retained == 0)
        destroy_context(primary);
    return leave(OK);
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxReset);
    NEEDS_DEVICE(device);
    if (primaries[device].alive)
        destroy_context(&primaries[device]);
    return leave(OK);
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    ENTER(cuDevicePrimaryCtxSetFlags);
    NEEDS_DEVICE(device);
    if (flags & ~0x1fU)
        return leave(INVALID_VALUE);
    primaries[device].flags = flags;
    return leave(OK);
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTER(cuDevicePrimaryCtxGetState);
    NEEDS_DEVICE(device);
    *flags = primaries[device].flags;
    *active = primaries[device].alive;
    return leave(OK);
}

static void push(struct fake_context *context)
{
    if (stacked < STACK_MAX)
        stack[stacked++] = fake_current;
    fake_current = context;
}

static CUresult create(CUcontext *context, unsigned flags, CUdevice device)
{
    NEEDS_INIT();
    NEEDS_DEVICE(device);
    struct fake_context *made = calloc(1, sizeof *made);
    if (!made)
        return leave(OUT_OF_MEMORY);
    made->flags = flags;
    begin_context(made, device);
    made->retained = 1;
    push(made);
    *context = made;
    return leave(OK);
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    ENTER(cuCtxCreate);
    return create(context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device)
{
    ENTER(cuCtxCreate);
    return parameters ? leave(NOT_SUPPORTED) : create(context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER(cuCtxDestroy);
    if (!context || !context->alive || context->primary)
        return leave(INVALID_CONTEXT);
    destroy_context(context);
    if (fake_current == context)
        fake_current = stacked ? stack[--stacked] : NULL;
    return leave(OK); /* the record itself stays: other threads may still hold its address */
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(cuCtxPushCurrent);
    if (!context)
        return leave(INVALID_CONTEXT);
    push(context);
    return leave(OK);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(cuCtxPopCurrent);
    if (!fake_current)
        return leave(INVALID_CONTEXT);
    if (context)
        *context = fake_current;
    fake_current = stacked ? stack[--stacked] : NULL;
    return leave(OK);
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(cuCtxSetCurrent);
    fake_current = context;
    return leave(OK);
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(cuCtxGetCurrent);
    *context = fake_current;
    return leave(OK);
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(cuCtxGetDevice);
    NEEDS_CONTEXT();
    *device = fake_current->device;
    return leave(OK);
}

API CUresult cuCtxGetFlags(unsigned *flags)
{
    ENTER(cuCtxGetFlags);
    NEEDS_CONTEXT();
    *flags = fake_current->flags;
    return leave(OK);
}

API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    ENTER(cuCtxGetApiVersion);
    (void)context;
    *version = 3020;
    return leave(OK);
}

API CUresult cuCtxAttach(CUcontext *context, unsigned flags)
{
    ENTER(cuCtxAttach);
    NEEDS_CONTEXT();
    if (flags)
        return leave(INVALID_VALUE);
    fake_current->retained++;
    *context = fake_current;
    return leave(OK);
}

API CUresult cuCtxDetach(CUcontext context)
{
    ENTER(cuCtxDetach);
    if (!context || !context->alive)
        return leave(INVALID_CONTEXT);
    if (--context->retained == 0) {
        destroy_context(context);
        if (fake_current == context)
            fake_current = stacked ? stack[--stacked] : NULL;
    }
    return leave(OK);
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(cuCtxGetStreamPriorityRange);
    NEEDS_CONTEXT();
    *least = 0;
    *greatest = -5;
    return leave(OK);
}
