/* What the two C files of taktd.drivers._cuda share. */
#ifndef TAKTD_CUDA_MODULE_H
#define TAKTD_CUDA_MODULE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <time.h>

#include "cuda_api.h"

struct cuda_entries {
#define X(name, parameters) CUresult (*name) parameters;
    CUDA_ENTRIES(X)
    CUDA_SYMBOLS(X)
#undef X
};

extern struct cuda_entries cuda;         /* all set once cuda_loaded() */
extern PyType_Spec cuda_launch_spec;
extern PyMethodDef cuda_launch_methods[]; /* launch, finish */

PyObject *cuda_raise(const char *call, CUresult code); /* Error(call, code); NULL */
int cuda_loaded(void);                                  /* or RuntimeError and 0 */

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline PyObject *none_or(const char *call, CUresult code)
{
    if (code)
        return cuda_raise(call, code);
    Py_RETURN_NONE;
}

#define ARGUMENTS(format, ...) \
    do { if (!cuda_loaded() || !PyArg_ParseTuple(arguments, format, ##__VA_ARGS__)) return NULL; } while (0)
#define HANDLE(number) ((CUhandle)(uintptr_t)(number))
#define NUMBER(handle) PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)(handle))

/* Module functions take (self, arguments); `self` is the module and never used. */
#define FUNCTION(name) static PyObject *name(PyObject *Py_UNUSED(self), PyObject *arguments)

#endif
