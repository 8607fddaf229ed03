/* SPDX-License-Identifier: Apache-2.0 */
/*
 * _core.h - what the .c files of the Python module share. Limited API of Python 3.10: one binary for all later versions.
 *
 * The GIL is kept by everything except the waits: releasing it costs more than all the rest does, and a real-time process
 * has one Python thread anyway. Memory is handed out as integer addresses or by PyMemoryView_FromMemory.
 */
#ifndef TAKT_CORE_PYTHON_H
#define TAKT_CORE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core/lib.h"

/* Raises OSError for a negative errno; returns NULL. */
PyObject *takt_py_error(int rc);
/* One integer argument of a fastcall method; -1 with an exception set when it is none or out of range. */
int takt_py_u64(PyObject *value, uint64_t *out);
int takt_py_u32(PyObject *value, uint32_t *out);
int takt_py_u16(PyObject *value, uint16_t *out);
int takt_py_arguments(const char *function, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most);
/* dict[key] = value; steals value, which may be NULL (an exception is set then). */
int takt_py_put(PyObject *dict, const char *key, PyObject *value);
/* A tuple of `count` new references; steals them; NULL if one of them is NULL. */
PyObject *takt_py_tuple(Py_ssize_t count, PyObject **items);

/* _core_layout.c */
PyObject *takt_py_create_lane(PyObject *module, PyObject *args, PyObject *kwargs);
/* Reads the dict that create_lane returned (or its JSON round trip). 0, or -1 with an exception set. */
int takt_py_read_layout(PyObject *dict, struct takt_layout *layout);
PyObject *takt_py_dims(uint32_t rank, const int64_t *dims);

/* _core_server.c */
int takt_py_server_init(PyObject *module);
/* _core_witness.c */
int takt_py_witness_init(PyObject *module);
/* _core_client.c: the client's half of the module */
int takt_py_client_init(PyObject *module);

#endif
