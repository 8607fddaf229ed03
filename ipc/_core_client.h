/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_client.h: what the files of the module's client half share.
 */
#ifndef TAKT_CORE_CLIENT_PYTHON_H
#define TAKT_CORE_CLIENT_PYTHON_H

#include "_core.h"
#include "core/client.h"

/* ClientNode */
typedef struct {
	PyObject_HEAD takt_node *node; /* NULL once closed */
	int users; /* calls under way without the GIL: it can't be closed now */
} takt_py_node;

/* _core_client.c: raises the exception that taktd.ipc.errors has for a negative errno; returns NULL. */
PyObject *takt_py_raise(int code, const char *text);
/* _core_client.c: makes a heap type and adds it to the module. */
PyTypeObject *takt_py_type(PyObject *module, PyType_Spec *spec);
/* _core_lane.c; takt_py_lane takes the lane over. */
int takt_py_lane_init(PyObject *module);
PyObject *takt_py_lane(takt_py_node *node, takt_lane *lane);
/* _core_reply.c */
int takt_py_reply_init(PyObject *module);
PyObject *takt_py_reply(const struct takt_reply *reply);
/* _core_names.c: the numbers of takt.h and the layout of wire version 1 as dicts */
int takt_py_names_init(PyObject *module);

#endif
