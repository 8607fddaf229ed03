/* The hot path: one graph launch, then a bounded wait for its end, in one Python call without allocation. */
#include "cuda_module.h"

#define QUERY_EVERY_NS 20000 /* while a flag is watched, the stream is asked for errors this often */

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

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
    if (!cuda_loaded() || !PyArg_ParseTupleAndKeywords(arguments, keywords, "KKKKL", names, &exec, &stream, &event, &flag,
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

PyType_Spec cuda_launch_spec = {"taktd.drivers._cuda.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

PyMethodDef cuda_launch_methods[] = {
    {"launch", launch, METH_VARARGS, NULL}, {"finish", finish, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL},
};
