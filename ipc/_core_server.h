/* SPDX-License-Identifier: Apache-2.0 */
/*
 * _core_server.h - what _core_server.c and _core_succession.c share: both are methods of taktd.ipc._core.Server.
 */
#ifndef TAKT_CORE_PYTHON_SERVER_H
#define TAKT_CORE_PYTHON_SERVER_H

#include "_core.h"
#include "core/server.h"

/* The server of a Server object, or NULL with an exception set. */
struct takt_server *takt_py_enter(PyObject *self);
/* A sequence of core numbers; their count, or -1 with an exception set. */
Py_ssize_t takt_py_cores(PyObject *cores, cpu_set_t *set);

/* _core_witness.c: the witness of a Witness object, or NULL with an exception set. */
struct takt_witness *takt_py_witness(PyObject *witness);

PyObject *takt_py_open_ledger(PyObject *self, PyObject *args);
PyObject *takt_py_activate(PyObject *self, PyObject *lane);
PyObject *takt_py_release(PyObject *self, PyObject *lane);
PyObject *takt_py_set_area(PyObject *self, PyObject *args);
PyObject *takt_py_set_budget(PyObject *self, PyObject *args);
PyObject *takt_py_join(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *takt_py_leave(PyObject *self, PyObject *ledger);
PyObject *takt_py_set_hang_after(PyObject *self, PyObject *args);
PyObject *takt_py_set_pidfd(PyObject *self, PyObject *args);
PyObject *takt_py_successions(PyObject *self, PyObject *ignored);
PyObject *takt_py_hand_over(PyObject *self, PyObject *ledger);
PyObject *takt_py_set_control(PyObject *self, PyObject *descriptor);
#define TAKT_PY_SUCCESSION_METHODS                                                                                     \
	{"open_ledger", takt_py_open_ledger, METH_VARARGS, NULL}, {"activate", takt_py_activate, METH_O, NULL},        \
		{"release", takt_py_release, METH_O, NULL}, {"set_area", takt_py_set_area, METH_VARARGS, NULL},        \
		{"set_budget", takt_py_set_budget, METH_VARARGS, NULL},                                                \
		{"join", (PyCFunction)(void (*)(void))takt_py_join, METH_VARARGS | METH_KEYWORDS, NULL},               \
		{"leave", takt_py_leave, METH_O, NULL},                                                                \
		{"set_hang_after", takt_py_set_hang_after, METH_VARARGS, NULL},                                        \
		{"set_pidfd", takt_py_set_pidfd, METH_VARARGS, NULL},                                                  \
		{"successions", takt_py_successions, METH_NOARGS, NULL},                                               \
		{"hand_over", takt_py_hand_over, METH_O, NULL},                                                        \
		{"set_control", takt_py_set_control, METH_O, NULL}

PyObject *takt_py_succession_set(PyObject *module, PyObject *args);
PyObject *takt_py_succession_ask_release(PyObject *module, PyObject *args);
PyObject *takt_py_succession_state(PyObject *module, PyObject *ledger_fd);
#define TAKT_PY_SUCCESSION_FUNCTIONS                                                                                   \
	{"succession_set", takt_py_succession_set, METH_VARARGS, NULL},                                                \
		{"succession_ask_release", takt_py_succession_ask_release, METH_VARARGS, NULL},                        \
		{"succession_state", takt_py_succession_state, METH_O, NULL}

#endif
