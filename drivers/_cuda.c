/* taktd.drivers._cuda: what taktd asks of the CUDA driver, straight from libcuda.so.1.
 *
 * The library is opened at run time and its entries are asked for by version (cuGetProcAddress), so that one build
 * works with every driver and on machines without one. Handles and addresses are plain integers; who owns what is the
 * business of taktd.drivers.cuda. Calls that return at once keep the GIL, calls that may wait release it.
 *
 * The hot path (`Launch`) is in cuda_launch.c.
 */
#include "cuda_module.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

struct cuda_entries cuda;
static void *library;
static PyObject *error_type;

PyObject *cuda_raise(const char *call, CUresult code)
{
    PyObject *arguments = Py_BuildValue("(si)", call, code);
    if (arguments) {
        PyErr_SetObject(error_type, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

int cuda_loaded(void)
{
    if (!library)
        PyErr_SetString(PyExc_RuntimeError, "libcuda is not loaded: call load() first");
    return library != NULL;
}

/* The library -------------------------------------------------------------------------------------------------- */

typedef CUresult (*get_proc_address)(const char *, void **, int, uint64_t, int *);

FUNCTION(load)
{
    const char *path = "libcuda.so.1";
    if (!PyArg_ParseTuple(arguments, "|s", &path))
        return NULL;
    if (library)
        Py_RETURN_NONE;
    void *opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!opened) {
        PyErr_SetString(PyExc_OSError, dlerror());
        return NULL;
    }
    get_proc_address look_up = (get_proc_address)(uintptr_t)dlsym(opened, "cuGetProcAddress_v2");
    if (!look_up) {
        dlclose(opened);
        PyErr_Format(PyExc_OSError, "%s is older than CUDA 12.0: it has no cuGetProcAddress_v2", path);
        return NULL;
    }
#define LOADED(name, found) \
    { \
        void *address = NULL; \
        if (!(found)) { \
            dlclose(opened); \
            PyErr_Format(PyExc_OSError, "%s lacks %s: is the driver older than CUDA 12.0?", path, #name); \
            return NULL; \
        } \
        memcpy(&cuda.name, &address, sizeof address); \
    }
#define X(name, parameters) LOADED(name, !look_up(#name, &address, CUDA_VERSION_ASKED, 0, NULL) && address)
    CUDA_ENTRIES(X)
#undef X
#define X(name, parameters) LOADED(name, (address = dlsym(opened, #name)))
    CUDA_SYMBOLS(X)
#undef X
    library = opened;
    Py_RETURN_NONE;
}

FUNCTION(init)
{
    ARGUMENTS("");
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuInit(0);
    Py_END_ALLOW_THREADS
    return none_or("cuInit", result);
}

FUNCTION(driver_version)
{
    ARGUMENTS("");
    int version = 0;
    CUresult result = cuda.cuDriverGetVersion(&version);
    return result ? cuda_raise("cuDriverGetVersion", result) : PyLong_FromLong(version);
}

FUNCTION(error_name)
{
    int code;
    ARGUMENTS("i", &code);
    const char *name = NULL, *text = NULL;
    if (cuda.cuGetErrorName(code, &name) || cuda.cuGetErrorString(code, &text))
        name = text = NULL;
    return Py_BuildValue("(zz)", name, text);
}

/* Devices and contexts ----------------------------------------------------------------------------------------- */

FUNCTION(device_count)
{
    ARGUMENTS("");
    int count = 0;
    CUresult result = cuda.cuDeviceGetCount(&count);
    return result ? cuda_raise("cuDeviceGetCount", result) : PyLong_FromLong(count);
}

static void spell_uuid(const CUuuid *uuid, char text[41])
{
    const unsigned char *b = uuid->bytes;
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
             b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

FUNCTION(device_info)
{
    static const struct { const char *name; int attribute; } asked[] = {
        {"compute_major", ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR}, {"compute_minor", ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
        {"integrated", ATTRIBUTE_INTEGRATED}, {"map_host", ATTRIBUTE_CAN_MAP_HOST_MEMORY},
        {"host_register", ATTRIBUTE_HOST_REGISTER_SUPPORTED}, {"mem_ops", ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
        {"ecc", ATTRIBUTE_ECC_ENABLED}, {"watchdog", ATTRIBUTE_KERNEL_EXEC_TIMEOUT},
    };
    int index;
    ARGUMENTS("i", &index);
    CUdevice device;
    CUresult result = cuda.cuDeviceGet(&device, index);
    if (result)
        return cuda_raise("cuDeviceGet", result);
    char name[128] = "", pci[32] = "", uuid_text[41];
    CUuuid uuid;
    size_t bytes = 0;
    if ((result = cuda.cuDeviceGetName(name, sizeof name, device)))
        return cuda_raise("cuDeviceGetName", result);
    if ((result = cuda.cuDeviceGetUuid(&uuid, device)))
        return cuda_raise("cuDeviceGetUuid", result);
    if (cuda.cuDeviceGetPCIBusId(pci, sizeof pci, device))
        *pci = '\0'; /* an integrated GPU need not be on a bus */
    if ((result = cuda.cuDeviceTotalMem(&bytes, device)))
        return cuda_raise("cuDeviceTotalMem", result);
    spell_uuid(&uuid, uuid_text);
    PyObject *info = Py_BuildValue("{s:i,s:s,s:s,s:s,s:K}", "index", index, "name", name, "uuid", uuid_text, "pci", pci,
                                   "memory_bytes", (unsigned long long)bytes);
    for (size_t i = 0; info && i < sizeof asked / sizeof *asked; i++) {
        int value = 0;
        if (cuda.cuDeviceGetAttribute(&value, asked[i].attribute, device))
            value = 0; /* an attribute that this driver doesn't know is one that it doesn't have */
        PyObject *number = PyLong_FromLong(value);
        if (!number || PyDict_SetItemString(info, asked[i].name, number))
            Py_CLEAR(info);
        Py_XDECREF(number);
    }
    return info;
}

/* The device's primary context, made current for this thread. TensorRT, ONNX Runtime and pycuda use the same one. */
FUNCTION(retain)
{
    int index, spin;
    ARGUMENTS("ip", &index, &spin);
    CUdevice device;
    CUhandle context = NULL;
    const char *call = "cuDeviceGet";
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuDeviceGet(&device, index);
    if (!result) {
        /* Refused when somebody uses the context already: then its flags stay as they are. */
        (void)cuda.cuDevicePrimaryCtxSetFlags(device, (spin ? CTX_SCHED_SPIN : 0) | CTX_MAP_HOST);
        call = "cuDevicePrimaryCtxRetain";
        result = cuda.cuDevicePrimaryCtxRetain(&context, device);
    }
    if (!result) {
        call = "cuCtxSetCurrent";
        result = cuda.cuCtxSetCurrent(context);
    }
    Py_END_ALLOW_THREADS
    return result ? cuda_raise(call, result) : NUMBER(context);
}

FUNCTION(release)
{
    int index;
    ARGUMENTS("i", &index);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    (void)cuda.cuCtxSetCurrent(NULL);
    result = cuda.cuDevicePrimaryCtxRelease(index);
    Py_END_ALLOW_THREADS
    return none_or("cuDevicePrimaryCtxRelease", result);
}

FUNCTION(make_current)
{
    unsigned long long context;
    ARGUMENTS("K", &context);
    return none_or("cuCtxSetCurrent", cuda.cuCtxSetCurrent(HANDLE(context)));
}

FUNCTION(current)
{
    ARGUMENTS("");
    CUhandle context = NULL;
    CUresult result = cuda.cuCtxGetCurrent(&context);
    return result ? cuda_raise("cuCtxGetCurrent", result) : NUMBER(context);
}

FUNCTION(priority_range)
{
    ARGUMENTS("");
    int least = 0, greatest = 0;
    CUresult result = cuda.cuCtxGetStreamPriorityRange(&least, &greatest);
    return result ? cuda_raise("cuCtxGetStreamPriorityRange", result) : Py_BuildValue("(ii)", least, greatest);
}

/* Memory ------------------------------------------------------------------------------------------------------- */

FUNCTION(memory_info)
{
    ARGUMENTS("");
    size_t unused = 0, total = 0;
    CUresult result = cuda.cuMemGetInfo(&unused, &total);
    return result ? cuda_raise("cuMemGetInfo", result)
                  : Py_BuildValue("(KK)", (unsigned long long)unused, (unsigned long long)total);
}

FUNCTION(allocate)
{
    unsigned long long size;
    ARGUMENTS("K", &size);
    CUdeviceptr address = 0;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemAlloc(&address, size);
    Py_END_ALLOW_THREADS
    return result ? cuda_raise("cuMemAlloc", result) : PyLong_FromUnsignedLongLong(address);
}

FUNCTION(deallocate)
{
    unsigned long long address;
    ARGUMENTS("K", &address);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemFree(address);
    Py_END_ALLOW_THREADS
    return none_or("cuMemFree", result);
}

FUNCTION(allocate_pinned)
{
    unsigned long long size;
    ARGUMENTS("K", &size);
    void *memory = NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemHostAlloc(&memory, size, MEMHOSTALLOC_PORTABLE_DEVICEMAP);
    Py_END_ALLOW_THREADS
    return result ? cuda_raise("cuMemHostAlloc", result) : NUMBER(memory);
}

FUNCTION(deallocate_pinned)
{
    unsigned long long address;
    ARGUMENTS("K", &address);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemFreeHost(HANDLE(address));
    Py_END_ALLOW_THREADS
    return none_or("cuMemFreeHost", result);
}

FUNCTION(register_host)
{
    unsigned long long address, size;
    ARGUMENTS("KK", &address, &size);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemHostRegister(HANDLE(address), size, MEMHOSTREGISTER_PORTABLE_DEVICEMAP);
    Py_END_ALLOW_THREADS
    return none_or("cuMemHostRegister", result);
}

FUNCTION(unregister_host)
{
    unsigned long long address;
    ARGUMENTS("K", &address);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuMemHostUnregister(HANDLE(address));
    Py_END_ALLOW_THREADS
    return none_or("cuMemHostUnregister", result);
}

/* What the device calls the pinned or registered memory at `address`. */
FUNCTION(device_address)
{
    unsigned long long address;
    ARGUMENTS("K", &address);
    CUdeviceptr found = 0;
    CUresult result = cuda.cuMemHostGetDevicePointer(&found, HANDLE(address), 0);
    return result ? cuda_raise("cuMemHostGetDevicePointer", result) : PyLong_FromUnsignedLongLong(found);
}

/* Streams and events ------------------------------------------------------------------------------------------- */

FUNCTION(create_stream)
{
    int priority;
    ARGUMENTS("i", &priority);
    CUhandle stream = NULL;
    CUresult result = cuda.cuStreamCreateWithPriority(&stream, STREAM_NON_BLOCKING, priority);
    return result ? cuda_raise("cuStreamCreateWithPriority", result) : NUMBER(stream);
}

FUNCTION(destroy_stream)
{
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuStreamDestroy(HANDLE(stream));
    Py_END_ALLOW_THREADS
    return none_or("cuStreamDestroy", result);
}

FUNCTION(stream_priority)
{
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    int priority = 0;
    CUresult result = cuda.cuStreamGetPriority(HANDLE(stream), &priority);
    return result ? cuda_raise("cuStreamGetPriority", result) : PyLong_FromLong(priority);
}

FUNCTION(copy)
{
    unsigned long long target, source, size, stream;
    ARGUMENTS("KKKK", &target, &source, &size, &stream);
    return none_or("cuMemcpyAsync", cuda.cuMemcpyAsync(target, source, size, HANDLE(stream)));
}

FUNCTION(fill)
{
    unsigned long long target, size, stream;
    int value;
    ARGUMENTS("KiKK", &target, &value, &size, &stream);
    return none_or("cuMemsetD8Async", cuda.cuMemsetD8Async(target, (unsigned char)value, size, HANDLE(stream)));
}

FUNCTION(write_value)
{
    unsigned long long stream, address;
    unsigned value;
    ARGUMENTS("KKI", &stream, &address, &value);
    return none_or("cuStreamWriteValue32",
                   cuda.cuStreamWriteValue32(HANDLE(stream), address, value, WRITE_VALUE_DEFAULT));
}

FUNCTION(query)
{
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    CUresult result = cuda.cuStreamQuery(HANDLE(stream));
    if (result == TAKT_CUDA_SUCCESS)
        Py_RETURN_TRUE;
    if (result == TAKT_CUDA_NOT_READY)
        Py_RETURN_FALSE;
    return cuda_raise("cuStreamQuery", result);
}

/* Waits without the GIL, off the hot path: asks every 50 µs, so that a device that hangs does not hang us. */
FUNCTION(synchronize)
{
    unsigned long long stream;
    long long timeout_ns;
    ARGUMENTS("KL", &stream, &timeout_ns);
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    const int64_t until_ns = now_ns() + timeout_ns;
    const struct timespec pause = {0, 50000};
    while ((result = cuda.cuStreamQuery(HANDLE(stream))) == TAKT_CUDA_NOT_READY) {
        if (now_ns() >= until_ns) {
            result = TAKT_CUDA_TIMED_OUT;
            break;
        }
        nanosleep(&pause, NULL);
    }
    Py_END_ALLOW_THREADS
    return none_or("cuStreamQuery", result);
}

FUNCTION(create_event)
{
    int timing;
    ARGUMENTS("p", &timing);
    CUhandle event = NULL;
    CUresult result = cuda.cuEventCreate(&event, timing ? 0 : EVENT_DISABLE_TIMING);
    return result ? cuda_raise("cuEventCreate", result) : NUMBER(event);
}

FUNCTION(destroy_event)
{
    unsigned long long event;
    ARGUMENTS("K", &event);
    return none_or("cuEventDestroy", cuda.cuEventDestroy(HANDLE(event)));
}

FUNCTION(record)
{
    unsigned long long event, stream;
    ARGUMENTS("KK", &event, &stream);
    return none_or("cuEventRecord", cuda.cuEventRecord(HANDLE(event), HANDLE(stream)));
}

/* Between two recorded, passed events, as the device measured it (its resolution is about half a microsecond). */
FUNCTION(elapsed_ns)
{
    unsigned long long start, end;
    ARGUMENTS("KK", &start, &end);
    float ms = 0;
    CUresult result = cuda.cuEventElapsedTime(&ms, HANDLE(start), HANDLE(end));
    return result ? cuda_raise("cuEventElapsedTime", result) : PyLong_FromLongLong((long long)((double)ms * 1e6));
}

/* Graphs ------------------------------------------------------------------------------------------------------- */

FUNCTION(begin_capture)
{
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    return none_or("cuStreamBeginCapture", cuda.cuStreamBeginCapture(HANDLE(stream), CAPTURE_MODE_THREAD_LOCAL));
}

FUNCTION(end_capture)
{
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    CUhandle graph = NULL;
    CUresult result = cuda.cuStreamEndCapture(HANDLE(stream), &graph);
    return result ? cuda_raise("cuStreamEndCapture", result) : NUMBER(graph);
}

FUNCTION(graph_nodes)
{
    unsigned long long graph;
    ARGUMENTS("K", &graph);
    size_t count = 0;
    CUresult result = cuda.cuGraphGetNodes(HANDLE(graph), NULL, &count);
    return result ? cuda_raise("cuGraphGetNodes", result) : PyLong_FromSize_t(count);
}

FUNCTION(instantiate)
{
    unsigned long long graph;
    ARGUMENTS("K", &graph);
    CUhandle exec = NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuGraphInstantiateWithFlags(&exec, HANDLE(graph), 0);
    Py_END_ALLOW_THREADS
    return result ? cuda_raise("cuGraphInstantiateWithFlags", result) : NUMBER(exec);
}

FUNCTION(upload)
{
    unsigned long long exec, stream;
    ARGUMENTS("KK", &exec, &stream);
    return none_or("cuGraphUpload", cuda.cuGraphUpload(HANDLE(exec), HANDLE(stream)));
}

FUNCTION(destroy_graph)
{
    unsigned long long graph;
    ARGUMENTS("K", &graph);
    return none_or("cuGraphDestroy", cuda.cuGraphDestroy(HANDLE(graph)));
}

FUNCTION(destroy_exec)
{
    unsigned long long exec;
    ARGUMENTS("K", &exec);
    return none_or("cuGraphExecDestroy", cuda.cuGraphExecDestroy(HANDLE(exec)));
}

/* Breaks the context for good: a kernel that traps. For the self-test, in a process that is to be lost. */
FUNCTION(trap)
{
    static const char source[] = ".version 6.0\n.target sm_52\n.address_size 64\n.visible .entry taktd_trap()\n{\ntrap;\n}\n";
    unsigned long long stream;
    ARGUMENTS("K", &stream);
    CUhandle image = NULL, function = NULL;
    CUresult result = cuda.cuModuleLoadData(&image, source);
    if (result)
        return cuda_raise("cuModuleLoadData", result);
    if ((result = cuda.cuModuleGetFunction(&function, image, "taktd_trap")))
        return cuda_raise("cuModuleGetFunction", result);
    return none_or("cuLaunchKernel",
                   cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, HANDLE(stream), NULL, NULL));
}

#define METHOD(name) {#name, name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(load), METHOD(init), METHOD(driver_version), METHOD(error_name), METHOD(device_count), METHOD(device_info),
    METHOD(retain), METHOD(release), METHOD(make_current), METHOD(current), METHOD(priority_range),
    METHOD(memory_info), METHOD(allocate), METHOD(deallocate), METHOD(allocate_pinned), METHOD(deallocate_pinned),
    METHOD(register_host), METHOD(unregister_host), METHOD(device_address), METHOD(create_stream),
    METHOD(destroy_stream), METHOD(stream_priority), METHOD(copy), METHOD(fill), METHOD(write_value), METHOD(query),
    METHOD(synchronize), METHOD(create_event), METHOD(destroy_event), METHOD(record), METHOD(elapsed_ns),
    METHOD(begin_capture), METHOD(end_capture), METHOD(graph_nodes), METHOD(instantiate), METHOD(upload),
    METHOD(destroy_graph), METHOD(destroy_exec), METHOD(trap), {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_cuda", "The CUDA driver, by integers. See taktd.drivers.cuda.", -1, methods, NULL, NULL,
    NULL, NULL,
};

PyMODINIT_FUNC PyInit__cuda(void)
{
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    error_type = PyErr_NewExceptionWithDoc("taktd.drivers._cuda.Error", "args: (name of the call, CUresult)", NULL, NULL);
    PyObject *launch = PyType_FromSpec(&cuda_launch_spec);
    if (!error_type || !launch || PyModule_AddFunctions(made, cuda_launch_methods) || PyModule_AddObjectRef(made, "Error", error_type) ||
        PyModule_AddObjectRef(made, "Launch", launch) ||
        PyModule_AddIntConstant(made, "TIMED_OUT", TAKT_CUDA_TIMED_OUT)) {
        Py_DECREF(made);
        return NULL;
    }
    Py_DECREF(launch);
    return made;
}
