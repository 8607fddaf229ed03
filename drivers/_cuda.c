/* taktd.drivers._cuda: what taktd asks of the CUDA driver, straight from libcuda.so.1.
 *
 * The library is opened at run time and its entries are asked for by version (cuGetProcAddress), so that one build
 * works with every driver and on machines without one. Handles and addresses are plain integers; who owns what is the
 * business of taktd.drivers.cuda. Calls that return at once keep the GIL, calls that may wait release it.
 *
 * `Launch` is the hot path: one graph launch, then a bounded wait for its end, in one Python call without allocation.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "cuda_api.h"

static struct {
#define X(name, parameters) CUresult (*name) parameters;
    CUDA_ENTRIES(X)
#undef X
} cuda;

static void *library;
static PyObject *error_type;

#define QUERY_EVERY_NS 20000 /* while a flag is watched, the stream is asked for errors this often */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Raises Error(call, code). */
static PyObject *raise(const char *call, CUresult code)
{
    PyObject *arguments = Py_BuildValue("(si)", call, code);
    if (arguments) {
        PyErr_SetObject(error_type, arguments);
        Py_DECREF(arguments);
    }
    return NULL;
}

static PyObject *none_or(const char *call, CUresult code)
{
    if (code)
        return raise(call, code);
    Py_RETURN_NONE;
}

static int loaded(void)
{
    if (!library)
        PyErr_SetString(PyExc_RuntimeError, "libcuda is not loaded: call load() first");
    return library != NULL;
}

#define ARGUMENTS(format, ...) \
    do { if (!loaded() || !PyArg_ParseTuple(arguments, format, ##__VA_ARGS__)) return NULL; } while (0)
#define HANDLE(number) ((CUhandle)(uintptr_t)(number))
#define NUMBER(handle) PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)(handle))

/* Module functions take (self, arguments); `self` is the module and never used. */
#define FUNCTION(name) static PyObject *name(PyObject *Py_UNUSED(self), PyObject *arguments)

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
#define X(name, parameters) \
    { \
        void *address = NULL; \
        if (look_up(#name, &address, CUDA_VERSION_ASKED, 0, NULL) || !address) { \
            dlclose(opened); \
            PyErr_Format(PyExc_OSError, "%s lacks %s: is the driver older than CUDA 12.0?", path, #name); \
            return NULL; \
        } \
        memcpy(&cuda.name, &address, sizeof address); \
    }
    CUDA_ENTRIES(X)
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
    return result ? raise("cuDriverGetVersion", result) : PyLong_FromLong(version);
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
    return result ? raise("cuDeviceGetCount", result) : PyLong_FromLong(count);
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
        return raise("cuDeviceGet", result);
    char name[128] = "", pci[32] = "", uuid_text[41];
    CUuuid uuid;
    size_t bytes = 0;
    if ((result = cuda.cuDeviceGetName(name, sizeof name, device)))
        return raise("cuDeviceGetName", result);
    if ((result = cuda.cuDeviceGetUuid(&uuid, device)))
        return raise("cuDeviceGetUuid", result);
    if ((result = cuda.cuDeviceGetPCIBusId(pci, sizeof pci, device)))
        return raise("cuDeviceGetPCIBusId", result);
    if ((result = cuda.cuDeviceTotalMem(&bytes, device)))
        return raise("cuDeviceTotalMem", result);
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
    return result ? raise(call, result) : NUMBER(context);
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
    return result ? raise("cuCtxGetCurrent", result) : NUMBER(context);
}

FUNCTION(priority_range)
{
    ARGUMENTS("");
    int least = 0, greatest = 0;
    CUresult result = cuda.cuCtxGetStreamPriorityRange(&least, &greatest);
    return result ? raise("cuCtxGetStreamPriorityRange", result) : Py_BuildValue("(ii)", least, greatest);
}

/* Memory ------------------------------------------------------------------------------------------------------- */

FUNCTION(memory_info)
{
    ARGUMENTS("");
    size_t unused = 0, total = 0;
    CUresult result = cuda.cuMemGetInfo(&unused, &total);
    return result ? raise("cuMemGetInfo", result)
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
    return result ? raise("cuMemAlloc", result) : PyLong_FromUnsignedLongLong(address);
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
    return result ? raise("cuMemHostAlloc", result) : NUMBER(memory);
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
    return result ? raise("cuMemHostGetDevicePointer", result) : PyLong_FromUnsignedLongLong(found);
}

/* Streams and events ------------------------------------------------------------------------------------------- */

FUNCTION(create_stream)
{
    int priority;
    ARGUMENTS("i", &priority);
    CUhandle stream = NULL;
    CUresult result = cuda.cuStreamCreateWithPriority(&stream, STREAM_NON_BLOCKING, priority);
    return result ? raise("cuStreamCreateWithPriority", result) : NUMBER(stream);
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
    return result ? raise("cuStreamGetPriority", result) : PyLong_FromLong(priority);
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
    return raise("cuStreamQuery", result);
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
    return result ? raise("cuEventCreate", result) : NUMBER(event);
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
    return result ? raise("cuEventElapsedTime", result) : PyLong_FromLongLong((long long)((double)ms * 1e6));
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
    return result ? raise("cuStreamEndCapture", result) : NUMBER(graph);
}

FUNCTION(graph_nodes)
{
    unsigned long long graph;
    ARGUMENTS("K", &graph);
    size_t count = 0;
    CUresult result = cuda.cuGraphGetNodes(HANDLE(graph), NULL, &count);
    return result ? raise("cuGraphGetNodes", result) : PyLong_FromSize_t(count);
}

FUNCTION(instantiate)
{
    unsigned long long graph;
    ARGUMENTS("K", &graph);
    CUhandle exec = NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuGraphInstantiate(&exec, HANDLE(graph), 0);
    Py_END_ALLOW_THREADS
    return result ? raise("cuGraphInstantiate", result) : NUMBER(exec);
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

/* Launch ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    CUhandle exec, stream, event;
    uint32_t *flag; /* pinned memory that the graph's last node sets to 1; NULL: the event tells */
    int64_t timeout_ns;
} Launch;

/* The graph's last node writes the flag. The stream is asked now and then: it alone knows of errors. */
static CUresult wait_for_flag(const Launch *self, int64_t until_ns)
{
    int64_t ask_ns = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (__atomic_load_n(self->flag, __ATOMIC_ACQUIRE))
                return TAKT_CUDA_SUCCESS;
            relax();
        }
        int64_t now = now_ns();
        if (now >= ask_ns) {
            CUresult result = cuda.cuStreamQuery(self->stream);
            if (result != TAKT_CUDA_NOT_READY)
                return result;
            ask_ns = now + QUERY_EVERY_NS;
        }
        if (now >= until_ns)
            return TAKT_CUDA_TIMED_OUT;
    }
}

static CUresult wait_for_event(CUhandle event, int64_t until_ns)
{
    CUresult result;
    while ((result = cuda.cuEventQuery(event)) == TAKT_CUDA_NOT_READY) {
        if (now_ns() >= until_ns)
            return TAKT_CUDA_TIMED_OUT;
        relax();
    }
    return result;
}

static PyObject *launch_call(PyObject *object, PyObject *Py_UNUSED(arguments), PyObject *Py_UNUSED(keywords))
{
    Launch *self = (Launch *)object;
    const char *call = "cuGraphLaunch";
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    if (self->flag)
        __atomic_store_n(self->flag, 0, __ATOMIC_RELEASE);
    result = cuda.cuGraphLaunch(self->exec, self->stream);
    if (!result && !self->flag) {
        call = "cuEventRecord";
        result = cuda.cuEventRecord(self->event, self->stream);
    }
    if (!result) {
        int64_t until_ns = now_ns() + self->timeout_ns;
        call = self->flag ? "cuStreamQuery" : "cuEventQuery";
        result = self->flag ? wait_for_flag(self, until_ns) : wait_for_event(self->event, until_ns);
    }
    Py_END_ALLOW_THREADS
    return none_or(call, result);
}

/* A graph between other work of a stream: launched, not waited for. */
FUNCTION(launch)
{
    unsigned long long exec, stream;
    ARGUMENTS("KK", &exec, &stream);
    return none_or("cuGraphLaunch", cuda.cuGraphLaunch(HANDLE(exec), HANDLE(stream)));
}

/* Records the event and spins until it has passed. */
FUNCTION(finish)
{
    unsigned long long event, stream;
    long long timeout_ns;
    ARGUMENTS("KKL", &event, &stream, &timeout_ns);
    const char *call = "cuEventRecord";
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = cuda.cuEventRecord(HANDLE(event), HANDLE(stream));
    if (!result) {
        call = "cuEventQuery";
        result = wait_for_event(HANDLE(event), now_ns() + timeout_ns);
    }
    Py_END_ALLOW_THREADS
    return none_or(call, result);
}

static int launch_init(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"exec", "stream", "event", "flag", "timeout_ns", NULL};
    unsigned long long exec, stream, event, flag;
    long long timeout_ns;
    if (!loaded() || !PyArg_ParseTupleAndKeywords(arguments, keywords, "KKKKL", names, &exec, &stream, &event, &flag,
                                                  &timeout_ns))
        return -1;
    if (!event && !flag) {
        PyErr_SetString(PyExc_ValueError, "neither an event nor a flag tells when the launch has ended");
        return -1;
    }
    Launch *self = (Launch *)object;
    self->exec = HANDLE(exec);
    self->stream = HANDLE(stream);
    self->event = HANDLE(event);
    self->flag = HANDLE(flag);
    self->timeout_ns = timeout_ns;
    return 0;
}

static void launch_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "One graph launch and the wait for its end, in one call. Raises Error."},
    {Py_tp_init, launch_init},
    {Py_tp_dealloc, launch_free},
    {Py_tp_call, launch_call},
    {0, NULL},
};

static PyType_Spec launch_spec = {"taktd.drivers._cuda.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

#define METHOD(name) {#name, name, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(load), METHOD(init), METHOD(driver_version), METHOD(error_name), METHOD(device_count), METHOD(device_info),
    METHOD(retain), METHOD(release), METHOD(make_current), METHOD(current), METHOD(priority_range),
    METHOD(memory_info), METHOD(allocate), METHOD(deallocate), METHOD(allocate_pinned), METHOD(deallocate_pinned),
    METHOD(register_host), METHOD(unregister_host), METHOD(device_address), METHOD(create_stream),
    METHOD(destroy_stream), METHOD(stream_priority), METHOD(copy), METHOD(fill), METHOD(write_value), METHOD(query),
    METHOD(synchronize), METHOD(create_event), METHOD(destroy_event), METHOD(record), METHOD(elapsed_ns),
    METHOD(begin_capture), METHOD(end_capture), METHOD(graph_nodes), METHOD(instantiate), METHOD(upload),
    METHOD(destroy_graph), METHOD(destroy_exec), METHOD(launch), METHOD(finish), {NULL, NULL, 0, NULL},
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
    PyObject *launch = PyType_FromSpec(&launch_spec);
    if (!error_type || !launch || PyModule_AddObjectRef(made, "Error", error_type) ||
        PyModule_AddObjectRef(made, "Launch", launch) ||
        PyModule_AddIntConstant(made, "TIMED_OUT", TAKT_CUDA_TIMED_OUT)) {
        Py_DECREF(made);
        return NULL;
    }
    Py_DECREF(launch);
    return made;
}
