/* Graphs (recorded lists), cuGetProcAddress, names of errors. */
#include "fake.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    ENTER(cuGraphInstantiateWithFlags);
    NEEDS_CONTEXT();
    NOT_WHILE_CAPTURING();
    if (flags || !graph)
        return leave(INVALID_VALUE);
    struct fake_graph_exec *made = calloc(1, sizeof *made);
    if (!made)
        return leave(OUT_OF_MEMORY);
    for (size_t i = 0; i < graph->ops.count; i++) {
        CUresult result = append_op(&made->ops, graph->ops.items[i]);
        if (result)
            return leave(result);
    }
    made->context = fake_current;
    made->generation = fake_current->generation;
    fake_current->execs++;
    live(LIVE_EXEC, 1);
    *exec = made;
    return leave(OK);
}

API CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
    ENTER(cuGraphUpload);
    (void)stream;
    return leave(exec ? OK : INVALID_VALUE);
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    ENTER(cuGraphLaunch);
    NEEDS_CONTEXT();
    if (!exec)
        return leave(INVALID_VALUE);
    if (stream_of(stream)->capturing)
        return leave(invalidate_captures()); /* child graphs are not simulated */
    exec->users++;
    return leave(push_op(stream, (struct op){.kind = OP_GRAPH, .exec = exec}));
}

API CUresult cuGraphGetNodes(CUgraph graph, void **nodes, size_t *count)
{
    ENTER(cuGraphGetNodes);
    if (nodes)
        return leave(NOT_SUPPORTED);
    *count = graph->ops.count;
    return leave(OK);
}

API CUresult cuGraphDestroy(CUgraph graph)
{
    ENTER(cuGraphDestroy);
    if (!graph)
        return leave(INVALID_VALUE);
    free(graph->ops.items);
    free(graph);
    live(LIVE_GRAPH, -1);
    return leave(OK);
}

API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    ENTER(cuGraphExecDestroy);
    if (!exec || !exec->context->alive || exec->generation != exec->context->generation)
        return leave(INVALID_VALUE);
    exec->context->execs--;
    live(LIVE_EXEC, -1);
    if (exec->users) {
        exec->dead = true; /* it is launched already: freed when that has run */
    } else {
        free(exec->ops.items);
        free(exec);
    }
    return leave(OK);
}

/* cuGetProcAddress --------------------------------------------------------------------------------------------- */

static const char *const table[][2] = {
#define X(name, symbol) {#name, #symbol},
    FAKE_CALLS(X)
#undef X
};

static void *address_of(const char *symbol)
{
    Dl_info self;
    static void *library;
    if (!library && dladdr((void *)cuGraphLaunch, &self))
        library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    return library ? dlsym(library, symbol) : NULL;
}

API CUresult cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags, int *status)
{
    (void)flags;
    ENTER(cuGetProcAddress);
    *address = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i][0], name))
            *address = address_of(table[i][1]);
    if (version > (int)fake_control->driver_version)
        *address = NULL;
    if (status)
        *status = *address ? 0 : 1;
    return leave(*address ? OK : NOT_FOUND);
}

static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    ENTER(cuGetErrorName);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *name = errors[i].name;
            return leave(OK);
        }
    *name = NULL;
    return leave(INVALID_VALUE);
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    ENTER(cuGetErrorString);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *text = errors[i].text;
            return leave(OK);
        }
    *text = NULL;
    return leave(INVALID_VALUE);
}

/* Kernels ------------------------------------------------------------------------------------------------------ */

/* The one kernel that is simulated is one that traps. */
static char trapping_module, trapping_function;

API CUresult cuModuleLoadData(void **module, const void *image)
{
    ENTER(cuModuleLoadData);
    NEEDS_CONTEXT();
    if (!strstr(image, "trap;"))
        return leave(NOT_SUPPORTED);
    *module = &trapping_module;
    return leave(OK);
}

API CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    ENTER(cuModuleGetFunction);
    if (module != &trapping_module || !name)
        return leave(NOT_FOUND);
    *function = &trapping_function;
    return leave(OK);
}

API CUresult cuModuleUnload(void *module)
{
    ENTER(cuModuleUnload);
    return leave(module == &trapping_module ? OK : INVALID_HANDLE);
}

API CUresult cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void **parameters, void **extra)
{
    ENTER(cuLaunchKernel);
    NEEDS_CONTEXT();
    (void)shared, (void)parameters, (void)extra;
    if (function != &trapping_function || !gx || !gy || !gz || !bx || !by || !bz)
        return leave(INVALID_VALUE);
    return leave(push_op(stream, (struct op){.kind = OP_TRAP}));
}
