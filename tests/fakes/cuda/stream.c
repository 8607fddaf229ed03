/* Streams and events: lists of operations that run when somebody waits or asks. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

#define OP_NS 2000             /* virtual cost of any operation */
#define COPY_BYTES_PER_NS 16   /* and of copies: PCIe 4 */
#define CAPTURES_MAX 16

__thread bool fake_in_host_function;
__thread unsigned fake_captures;
static __thread struct fake_stream *captured[CAPTURES_MAX];
static uint64_t virtual_ns;

struct fake_stream *stream_of(CUstream stream)
{
    /* 1 and 2 are CU_STREAM_LEGACY and CU_STREAM_PER_THREAD */
    return (uintptr_t)stream <= 2 ? &fake_current->default_stream : stream;
}

CUresult append_op(struct ops *ops, struct op op)
{
    if (ops->count == ops->room) {
        size_t room = ops->room ? 2 * ops->room : 16;
        struct op *items = realloc(ops->items, room * sizeof *items);
        if (!items)
            return OUT_OF_MEMORY;
        ops->items = items;
        ops->room = room;
    }
    ops->items[ops->count++] = op;
    return OK;
}

CUresult push_op(CUstream handle, struct op op)
{
    struct fake_stream *stream = stream_of(handle);
    if (stream->capturing)
        return append_op(&stream->capturing->ops, op);
    CUresult result = append_op(&stream->pending, op);
    if (!result && fake_control->eager && !fake_control->hang)
        result = run_stream(stream, stream->pending.count);
    return result;
}

CUresult invalidate_captures(void)
{
    for (unsigned i = 0; i < fake_captures; i++)
        captured[i]->capturing->invalid = true;
    return CAPTURE_UNSUPPORTED;
}

static CUresult run_op(struct fake_stream *stream, const struct op *op);

static CUresult run_ops(struct fake_stream *stream, const struct ops *ops)
{
    for (size_t i = 0; i < ops->count; i++) {
        CUresult result = run_op(stream, &ops->items[i]);
        if (result)
            return result;
    }
    return OK;
}

static CUresult call_host(const struct op *op)
{
    /* Without the lock: the function may need a lock of its own whose holder calls us. */
    fake_unlock();
    fake_in_host_function = true;
    op->function(op->argument);
    fake_in_host_function = false;
    fake_lock();
    return OK;
}

static CUresult wait_for(struct fake_event *event, uint64_t ticket)
{
    if (event->passed >= ticket || !event->stream)
        return OK;
    return run_stream(event->stream, event->stream->pending.count);
}

static CUresult run_op(struct fake_stream *stream, const struct op *op)
{
    CUresult result = strike(CALL_execute);
    if (result) {
        stream->context->broken = result; /* what fails on the device breaks its context */
        return result;
    }
    virtual_ns += OP_NS;
    switch (op->kind) {
    case OP_COPY:
        result = check_range(op->target, op->size);
        result = result ? result : check_range(op->source, op->size);
        if (!result)
            memmove(host_of(op->target), host_of(op->source), op->size);
        virtual_ns += op->size / COPY_BYTES_PER_NS;
        break;
    case OP_FILL:
        result = check_range(op->target, op->size);
        if (!result)
            memset(host_of(op->target), (int)op->source, op->size);
        break;
    case OP_WRITE:
        result = check_range(op->target, 4);
        if (!result)
            __atomic_store_n((uint32_t *)host_of(op->target), (uint32_t)op->source, __ATOMIC_RELEASE);
        break;
    case OP_HOST: result = call_host(op); break;
    case OP_RECORD:
        op->event->passed = op->ticket ? op->ticket : op->event->recorded;
        op->event->time_ns = virtual_ns;
        break;
    case OP_TRAP: result = LAUNCH_FAILED; break;
    case OP_WAIT: result = wait_for(op->event, op->ticket); break;
    case OP_GRAPH:
        result = run_ops(stream, &op->exec->ops);
        if (--op->exec->users == 0 && op->exec->dead) {
            free(op->exec->ops.items);
            free(op->exec);
        }
        break;
    }
    if (result)
        stream->context->broken = result;
    return result;
}

CUresult run_stream(struct fake_stream *stream, size_t until)
{
    if (fake_control->hang)
        return NOT_READY;
    if (stream->running)
        return OK; /* a host function of this stream is in it already */
    stream->running = true;
    CUresult result = stream->context->broken;
    while (!result && stream->done < until && stream->done < stream->pending.count) {
        struct op op = stream->pending.items[stream->done++];
        result = run_op(stream, &op);
    }
    if (stream->done == stream->pending.count)
        stream->done = stream->pending.count = 0;
    stream->running = false;
    return result;
}

CUresult run_blocking_streams(struct fake_context *context)
{
    CUresult result = run_stream(&context->default_stream, SIZE_MAX);
    for (struct fake_stream *s = context->streams; s && !result; s = s->next)
        if (!(s->flags & 1) && !s->capturing)
            result = run_stream(s, SIZE_MAX);
    return result;
}

CUresult run_all_streams(struct fake_context *context)
{
    CUresult result = run_blocking_streams(context);
    for (struct fake_stream *s = context->streams; s && !result; s = s->next)
        result = run_stream(s, SIZE_MAX);
    return result;
}

API CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    return leave(run_all_streams(fake_current));
}

static CUresult create(CUstream *stream, unsigned flags, int priority)
{
    NEEDS_CONTEXT();
    if (flags & ~1U)
        return leave(INVALID_VALUE);
    struct fake_stream *made = calloc(1, sizeof *made);
    if (!made)
        return leave(OUT_OF_MEMORY);
    made->context = fake_current;
    made->flags = flags;
    made->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority; /* clamped, as CUDA does */
    made->next = fake_current->streams;
    fake_current->streams = made;
    live(LIVE_STREAM, 1);
    *stream = made;
    return leave(OK);
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    ENTER(cuStreamCreate);
    return create(stream, flags, 0);
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
    ENTER(cuStreamCreateWithPriority);
    fake_observed->priority = priority;
    return create(stream, flags, priority);
}

void free_streams_of(struct fake_context *context)
{
    while (context->streams) {
        struct fake_stream *stream = context->streams;
        context->streams = stream->next;
        free(stream->pending.items);
        free(stream);
        live(LIVE_STREAM, -1);
        fake_observed->leaked++;
    }
    free(context->default_stream.pending.items);
    context->default_stream.pending = (struct ops){0};
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTER(cuStreamDestroy);
    if ((uintptr_t)stream <= 2)
        return leave(INVALID_HANDLE);
    if (!fake_current)
        return leave(INVALID_CONTEXT);
    struct fake_stream **at = &fake_current->streams;
    while (*at && *at != stream)
        at = &(*at)->next;
    if (!*at)
        return leave(INVALID_HANDLE);
    if (!stream->capturing)
        run_stream(stream, SIZE_MAX);
    *at = stream->next;
    free(stream->pending.items);
    free(stream);
    live(LIVE_STREAM, -1);
    return leave(OK);
}

API CUresult cuStreamGetPriority(CUstream stream, int *priority)
{
    ENTER(cuStreamGetPriority);
    NEEDS_CONTEXT();
    *priority = stream_of(stream)->priority;
    return leave(OK);
}

API CUresult cuStreamQuery(CUstream handle)
{
    ENTER(cuStreamQuery);
    NEEDS_CONTEXT();
    struct fake_stream *stream = stream_of(handle);
    if (stream->capturing)
        return leave(invalidate_captures());
    if (stream->pending.count && stream->queries++ < fake_control->lazy_queries)
        return leave(NOT_READY);
    stream->queries = 0;
    return leave(run_stream(stream, SIZE_MAX));
}

API CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER(cuStreamSynchronize);
    NEEDS_CONTEXT();
    struct fake_stream *stream = stream_of(handle);
    if (stream->capturing)
        return leave(invalidate_captures());
    return leave(stream == &fake_current->default_stream ? run_blocking_streams(fake_current)
                                                         : run_stream(stream, SIZE_MAX));
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
    ENTER(cuLaunchHostFunc);
    NEEDS_CONTEXT();
    return leave(push_op(stream, (struct op){.kind = OP_HOST, .function = function, .argument = argument}));
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags)
{
    ENTER(cuStreamWriteValue32);
    NEEDS_CONTEXT();
    if (!fake_control->mem_ops)
        return leave(NOT_SUPPORTED);
    if (flags || !(address & DEVICE_BIT) || address & 3)
        return leave(INVALID_VALUE);
    return leave(push_op(stream, (struct op){.kind = OP_WRITE, .target = address, .source = value}));
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTER(cuStreamWaitEvent);
    NEEDS_CONTEXT();
    (void)flags;
    return leave(push_op(stream, (struct op){.kind = OP_WAIT, .event = event, .ticket = event->recorded}));
}

/* Capture ------------------------------------------------------------------------------------------------------ */

API CUresult cuStreamBeginCapture_v2(CUstream handle, int mode)
{
    ENTER(cuStreamBeginCapture);
    NEEDS_CONTEXT();
    struct fake_stream *stream = stream_of(handle);
    if (!fake_control->capture)
        return leave(NOT_SUPPORTED);
    if (stream == &fake_current->default_stream || mode < 0 || mode > 2 || stream->capturing ||
        fake_captures == CAPTURES_MAX)
        return leave(INVALID_VALUE);
    stream->capturing = calloc(1, sizeof *stream->capturing);
    if (!stream->capturing)
        return leave(OUT_OF_MEMORY);
    captured[fake_captures++] = stream;
    live(LIVE_GRAPH, 1);
    return leave(OK);
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER(cuStreamEndCapture);
    *graph = NULL;
    unsigned at = 0;
    while (at < fake_captures && captured[at] != stream)
        at++;
    if (at == fake_captures)
        return leave(CAPTURE_UNMATCHED);
    captured[at] = captured[--fake_captures];
    struct fake_graph *made = stream->capturing;
    stream->capturing = NULL;
    if (made->invalid) {
        free(made->ops.items);
        free(made);
        live(LIVE_GRAPH, -1);
        return leave(CAPTURE_INVALIDATED);
    }
    *graph = made;
    return leave(OK);
}

API CUresult cuStreamIsCapturing(CUstream handle, int *status)
{
    ENTER(cuStreamIsCapturing);
    NEEDS_CONTEXT();
    struct fake_stream *stream = stream_of(handle);
    *status = !stream->capturing ? 0 : stream->capturing->invalid ? 2 : 1;
    return leave(OK);
}

/* Events ------------------------------------------------------------------------------------------------------- */

API CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    ENTER(cuEventCreate);
    NEEDS_CONTEXT();
    if (flags & ~7U)
        return leave(INVALID_VALUE);
    struct fake_event *made = calloc(1, sizeof *made);
    if (!made)
        return leave(OUT_OF_MEMORY);
    made->context = fake_current;
    made->generation = fake_current->generation;
    fake_current->events++;
    made->flags = flags;
    live(LIVE_EVENT, 1);
    *event = made;
    return leave(OK);
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(cuEventDestroy);
    if (!event || !event->context->alive || event->generation != event->context->generation)
        return leave(INVALID_HANDLE);
    event->context->events--;
    if (event->stream && event->passed < event->recorded)
        run_stream(event->stream, SIZE_MAX);
    live(LIVE_EVENT, -1);
    free(event);
    return leave(OK);
}

API CUresult cuEventRecord(CUevent event, CUstream handle)
{
    ENTER(cuEventRecord);
    NEEDS_CONTEXT();
    struct fake_stream *stream = stream_of(handle);
    struct op op = {.kind = OP_RECORD, .event = event};
    if (!stream->capturing) {
        event->stream = stream;
        op.ticket = ++event->recorded;
        event->queries = 0;
    }
    return leave(push_op(handle, op));
}

API CUresult cuEventQuery(CUevent event)
{
    ENTER(cuEventQuery);
    if (event->passed >= event->recorded)
        return leave(OK);
    if (event->queries++ < fake_control->lazy_queries)
        return leave(NOT_READY);
    return leave(wait_for(event, event->recorded));
}

API CUresult cuEventSynchronize(CUevent event)
{
    ENTER(cuEventSynchronize);
    return leave(wait_for(event, event->recorded));
}

API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    ENTER(cuEventElapsedTime);
    if (!start->recorded || !end->recorded || (start->flags | end->flags) & 2)
        return leave(INVALID_HANDLE);
    if (start->passed < start->recorded || end->passed < end->recorded)
        return leave(NOT_READY);
    *ms = (float)((double)(int64_t)(end->time_ns - start->time_ns) / 1e6);
    return leave(OK);
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) { return cuEventElapsedTime(ms, start, end); }
