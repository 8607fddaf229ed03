/* Device memory, pinned memory, registered memory, and copies. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

enum block_kind { DEVICE, PINNED, REGISTERED };

struct block {
    enum block_kind kind;
    struct fake_context *context;
    uint64_t start, size; /* host address */
    unsigned flags;
    struct block *next;
};

static struct block *blocks;

static struct block *find(uint64_t host, uint64_t size)
{
    for (struct block *b = blocks; b; b = b->next)
        if (host >= b->start && size <= b->size && host - b->start <= b->size - size)
            return b;
    return NULL;
}

static struct block **place(uint64_t host, enum block_kind kind)
{
    struct block **at = &blocks;
    while (*at && ((*at)->start != host || (*at)->kind != kind))
        at = &(*at)->next;
    return at;
}

static uint64_t allocated(int device)
{
    uint64_t sum = 0;
    for (struct block *b = blocks; b; b = b->next)
        if (b->kind == DEVICE && b->context->device == device)
            sum += b->size;
    return sum;
}

static CUresult add(enum block_kind kind, uint64_t start, uint64_t size, unsigned flags)
{
    struct block *b = malloc(sizeof *b);
    if (!b)
        return OUT_OF_MEMORY;
    *b = (struct block){kind, fake_current, start, size, flags, blocks};
    blocks = b;
    live(kind == DEVICE ? LIVE_MEMORY : kind == PINNED ? LIVE_PINNED : LIVE_REGISTERED, 1);
    if (kind == DEVICE)
        live(LIVE_BYTES, (int64_t)size);
    return OK;
}

static void drop(struct block **at)
{
    struct block *b = *at;
    *at = b->next;
    live(b->kind == DEVICE ? LIVE_MEMORY : b->kind == PINNED ? LIVE_PINNED : LIVE_REGISTERED, -1);
    if (b->kind == DEVICE)
        live(LIVE_BYTES, -(int64_t)b->size);
    if (b->kind != REGISTERED)
        free((void *)b->start);
    free(b);
}

void free_memory_of(struct fake_context *context)
{
    for (struct block **at = &blocks; *at;) {
        if ((*at)->context == context) {
            fake_observed->leaked++;
            drop(at);
        } else {
            at = &(*at)->next;
        }
    }
}

void *host_of(uint64_t address) { return (void *)(address & ~DEVICE_BIT); }

/* For the stand-in of TensorRT: the same for Python. */
API uint64_t fake_cuda_host_address(uint64_t address) { return address & ~DEVICE_BIT; }

/* Which life of its context this thread is in: what was made in an earlier one is gone, and its address another's. */
API uint64_t fake_cuda_generation(void) { return fake_current && fake_current->alive ? fake_current->generation : 0; }

bool is_pinned(uint64_t address, uint64_t size)
{
    struct block *b = find(address & ~DEVICE_BIT, size);
    return b && (b->kind != DEVICE || (address & DEVICE_BIT));
}

CUresult check_range(uint64_t address, uint64_t size)
{
    if (!(address & DEVICE_BIT)) {
        struct block *b = find(address, size);
        return b && b->kind == DEVICE ? INVALID_VALUE : OK; /* a device's memory under its secret host address */
    }
    struct block *b = find(address & ~DEVICE_BIT, size);
    if (!b)
        return ILLEGAL_ADDRESS;
    if (b->kind == PINNED)
        return b->flags & 2 ? OK : ILLEGAL_ADDRESS; /* DEVICEMAP */
    return b->kind == DEVICE || (b->flags & 2) ? OK : ILLEGAL_ADDRESS;
}

API CUresult cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    ENTER(cuMemGetInfo);
    NEEDS_CONTEXT();
    *total = fake_control->memory_bytes;
    *unused = fake_control->memory_bytes - allocated(fake_current->device);
    return leave(OK);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    ENTER(cuMemAlloc);
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    if (size == 0)
        return leave(INVALID_VALUE);
    if (size > fake_control->memory_bytes || allocated(fake_current->device) > fake_control->memory_bytes - size)
        return leave(OUT_OF_MEMORY);
    void *memory = aligned_alloc(256, (size + 255) & ~255UL);
    if (!memory)
        return leave(OUT_OF_MEMORY);
    memset(memory, 0xa5, size); /* uninitialised, visibly */
    *address = (uint64_t)memory | DEVICE_BIT;
    return leave(add(DEVICE, (uint64_t)memory, size, 0));
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTER(cuMemFree);
    NOT_WHILE_CAPTURING();
    struct block **at = place(address & ~DEVICE_BIT, DEVICE);
    if (!*at || !(address & DEVICE_BIT))
        return leave(INVALID_VALUE);
    CUresult result = run_all_streams((*at)->context); /* cuMemFree waits for the device */
    drop(at);
    return leave(result);
}

static CUresult pinned(void **memory, size_t size, unsigned flags)
{
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    if (size == 0 || flags & ~7U)
        return leave(INVALID_VALUE);
    *memory = aligned_alloc(4096, (size + 4095) & ~4095UL);
    if (!*memory)
        return leave(OUT_OF_MEMORY);
    memset(*memory, 0xa5, size);
    return leave(add(PINNED, (uint64_t)*memory, size, flags | 2)); /* mapped anyway where addressing is unified */
}

API CUresult cuMemHostAlloc(void **memory, size_t size, unsigned flags)
{
    ENTER(cuMemHostAlloc);
    return pinned(memory, size, flags);
}

API CUresult cuMemAllocHost_v2(void **memory, size_t size)
{
    ENTER(cuMemAllocHost);
    return pinned(memory, size, 0);
}

API CUresult cuMemFreeHost(void *memory)
{
    ENTER(cuMemFreeHost);
    NOT_WHILE_CAPTURING();
    struct block **at = place((uint64_t)memory, PINNED);
    if (!*at)
        return leave(INVALID_VALUE);
    drop(at);
    return leave(OK);
}

API CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags)
{
    ENTER(cuMemHostRegister);
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    uint64_t start = (uint64_t)memory;
    if (size == 0 || !memory || flags & ~0xfU)
        return leave(INVALID_VALUE);
    for (struct block *b = blocks; b; b = b->next)
        if (start < b->start + b->size && b->start < start + size)
            return leave(ALREADY_REGISTERED);
    return leave(add(REGISTERED, start, size, flags));
}

API CUresult cuMemHostUnregister(void *memory)
{
    ENTER(cuMemHostUnregister);
    NOT_WHILE_CAPTURING();
    struct block **at = place((uint64_t)memory, REGISTERED);
    if (!*at)
        return leave(NOT_REGISTERED);
    drop(at);
    return leave(OK);
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags)
{
    ENTER(cuMemHostGetDevicePointer);
    struct block *b = find((uint64_t)memory, 1);
    if (flags || !b || b->kind == DEVICE || !(b->flags & 2))
        return leave(INVALID_VALUE);
    *address = (uint64_t)memory | DEVICE_BIT;
    return leave(OK);
}

API CUresult cuMemHostGetFlags(unsigned *flags, void *memory)
{
    ENTER(cuMemHostGetFlags);
    struct block *b = find((uint64_t)memory, 1);
    if (!b || b->kind != PINNED)
        return leave(INVALID_VALUE);
    *flags = b->flags;
    return leave(OK);
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address)
{
    ENTER(cuMemGetAddressRange);
    struct block *b = address & DEVICE_BIT ? find(address & ~DEVICE_BIT, 1) : NULL;
    if (!b)
        return leave(INVALID_VALUE);
    if (start)
        *start = b->start | DEVICE_BIT;
    if (size)
        *size = b->size;
    return leave(OK);
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    ENTER(cuPointerGetAttribute);
    struct block *b = find(address & ~DEVICE_BIT, 1);
    if (!b)
        return leave(INVALID_VALUE);
    switch (attribute) {
    case 1: *(struct fake_context **)data = b->context; break;
    case 2: *(unsigned *)data = b->kind == DEVICE ? 2 : 1; break; /* memory type: device, host */
    case 3: *(uint64_t *)data = b->start | DEVICE_BIT; break;
    case 4: *(void **)data = (void *)b->start; break;
    default: return leave(NOT_SUPPORTED);
    }
    return leave(OK);
}

/* Copies ------------------------------------------------------------------------------------------------------- */

static struct op copy_op(uint64_t target, uint64_t source, size_t size)
{
    return (struct op){.kind = OP_COPY, .target = target, .source = source, .size = size};
}

/* A copy that has happened when the call returns. It is ordered with the legacy default stream only. */
static CUresult copy_now(uint64_t target, uint64_t source, size_t size)
{
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    CUresult result = check_range(target, size);
    result = result ? result : check_range(source, size);
    result = result ? result : run_blocking_streams(fake_current);
    if (!result)
        memmove(host_of(target), host_of(source), size);
    return leave(result == ILLEGAL_ADDRESS ? INVALID_VALUE : result);
}

static CUresult copy_later(uint64_t target, uint64_t source, size_t size, CUstream stream)
{
    NEEDS_CONTEXT();
    if (stream_of(stream)->capturing && !(is_pinned(target, size) && is_pinned(source, size)))
        return leave(invalidate_captures()); /* pageable memory needs the host's help at run time */
    return leave(push_op(stream, copy_op(target, source, size)));
}

API CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size)
{
    ENTER(cuMemcpy);
    return copy_now(target, source, size);
}

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream)
{
    ENTER(cuMemcpyAsync);
    return copy_later(target, source, size, stream);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size)
{
    ENTER(cuMemcpyHtoD);
    return target & DEVICE_BIT ? copy_now(target, (uint64_t)source, size) : leave(INVALID_VALUE);
}

API CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size)
{
    ENTER(cuMemcpyDtoH);
    return source & DEVICE_BIT ? copy_now((uint64_t)target, source, size) : leave(INVALID_VALUE);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t size)
{
    ENTER(cuMemcpyDtoD);
    return target & source & DEVICE_BIT ? copy_now(target, source, size) : leave(INVALID_VALUE);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream)
{
    ENTER(cuMemcpyHtoDAsync);
    return target & DEVICE_BIT ? copy_later(target, (uint64_t)source, size, stream) : leave(INVALID_VALUE);
}

API CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream)
{
    ENTER(cuMemcpyDtoHAsync);
    return source & DEVICE_BIT ? copy_later((uint64_t)target, source, size, stream) : leave(INVALID_VALUE);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream)
{
    ENTER(cuMemcpyDtoDAsync);
    return target & source & DEVICE_BIT ? copy_later(target, source, size, stream) : leave(INVALID_VALUE);
}

API CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t size)
{
    ENTER(cuMemsetD8);
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    CUresult result = target & DEVICE_BIT ? check_range(target, size) : INVALID_VALUE;
    result = result ? result : run_blocking_streams(fake_current);
    if (!result)
        memset(host_of(target), value, size);
    return leave(result);
}

API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream)
{
    ENTER(cuMemsetD8Async);
    NEEDS_CONTEXT();
    return leave(push_op(stream, (struct op){.kind = OP_FILL, .target = target, .source = value, .size = size}));
}
