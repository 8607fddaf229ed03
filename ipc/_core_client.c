/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_client.c: the client half of taktd.ipc._core begins here: ClientNode, pacing, errors. ClientLane is in
 * _core_lane.c, Reply in _core_reply.c. taktd.ipc.client builds its numpy views and its public classes on them; nobody
 * else should.
 */
#include "_core_client.h"

static PyTypeObject *node_type;

/* Raises the exception that taktd.ipc.errors has for an errno. Imported late: that package imports this module. */
PyObject *takt_py_raise(int code, const char *text)
{
	PyObject *errors = PyImport_ImportModule("taktd.ipc.errors");
	PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
	PyObject *error = NULL;

	if (errors && message)
		error = PyObject_CallMethod(errors, "from_errno", "iO", code < 0 ? -code : code, message);
	if (error)
		PyErr_SetObject((PyObject *)Py_TYPE(error), error);
	Py_XDECREF(error);
	Py_XDECREF(message);
	Py_XDECREF(errors);
	return NULL;
}

/* ---- ClientNode ---------------------------------------------------------------------------------------------- */

static PyObject *node_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"path", "timeout_ns", NULL};
	const char *path = NULL;
	long long timeout_ns = 0;
	takt_node *node = NULL;
	takt_py_node *self;
	int result;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zL", names, &path, &timeout_ns))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	result = takt_connect(&node, path, timeout_ns);
	Py_END_ALLOW_THREADS
	if (result < 0) {
		/* ENOENT would be taken for an unknown name. */
		takt_py_raise(result == -ENOENT ? -ENOTCONN : result, takt_error(node));
		takt_close(node);
		return NULL;
	}
	self = (takt_py_node *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
	if (self)
		self->node = node;
	else
		takt_close(node);
	return (PyObject *)self;
}

static takt_node *open_node(takt_py_node *self)
{
	if (!self->node)
		takt_py_raise(ENOTCONN, "the connection was closed: connect again");
	return self->node;
}

static PyObject *node_close(PyObject *object, PyObject *unused)
{
	takt_py_node *self = (takt_py_node *)object;
	takt_node *node = self->node;

	(void)unused;
	if (self->users)
		return takt_py_raise(EBUSY, "another thread is using this connection: let it finish before closing");
	self->node = NULL;
	takt_close(node);
	Py_RETURN_NONE;
}

static void node_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	takt_close(((takt_py_node *)self)->node);
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyObject *node_list(PyObject *object, PyObject *kind)
{
	takt_py_node *self = (takt_py_node *)object;
	const unsigned long number = PyLong_AsUnsignedLong(kind);
	takt_node *node = open_node(self);
	PyObject *text;
	char *json;
	int result;

	if (!node || PyErr_Occurred())
		return NULL;
	self->users++;
	Py_BEGIN_ALLOW_THREADS
	result = takt_list(node, (uint32_t)number, &json);
	Py_END_ALLOW_THREADS
	self->users--;
	if (result < 0)
		return takt_py_raise(result, takt_error(node));
	text = PyUnicode_FromString(json);
	takt_free(json);
	return text;
}

static PyObject *node_attach(PyObject *object, PyObject *args)
{
	takt_py_node *self = (takt_py_node *)object;
	unsigned int kind, wait_mode;
	const char *name;
	long long timeout_ns;
	takt_node *node;
	takt_lane *lane;
	int result;

	if (!PyArg_ParseTuple(args, "sIIL", &name, &kind, &wait_mode, &timeout_ns) || !(node = open_node(self)))
		return NULL;
	self->users++;
	Py_BEGIN_ALLOW_THREADS
	result = takt_attach(node, name, kind, wait_mode, timeout_ns, &lane);
	Py_END_ALLOW_THREADS
	self->users--;
	return result < 0 ? takt_py_raise(result, takt_error(node)) : takt_py_lane(self, lane);
}

static PyObject *node_name(PyObject *self, void *closure)
{
	const takt_node *node = open_node((takt_py_node *)self);

	(void)closure;
	return node ? PyUnicode_DecodeUTF8(takt_node_name(node), (Py_ssize_t)strlen(takt_node_name(node)), "replace")
		    : NULL;
}

static PyObject *node_path(PyObject *self, void *closure)
{
	const takt_node *node = open_node((takt_py_node *)self);

	(void)closure;
	return node ? PyUnicode_DecodeFSDefault(takt_node_path(node)) : NULL;
}

static PyObject *node_pid(PyObject *self, void *closure)
{
	const takt_node *node = open_node((takt_py_node *)self);

	(void)closure;
	return node ? PyLong_FromUnsignedLong(takt_node_pid(node)) : NULL;
}

static PyMethodDef node_methods[] = {
    {"attach", node_attach, METH_VARARGS, "attach(name, kind, wait_mode, timeout_ns) -> ClientLane"},
    {"list", node_list, METH_O, "list(kind) -> JSON array as text"},
    {"close", node_close, METH_NOARGS, "ends the connection and its lanes"},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef node_fields[] = {
    {"name", node_name, NULL, "the daemon's node name", NULL},
    {"path", node_path, NULL, "the socket that is used", NULL},
    {"pid", node_pid, NULL, "the daemon's process, as it says itself", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot node_slots[] = {
    {Py_tp_new, node_new},
    {Py_tp_dealloc, node_dealloc},
    {Py_tp_methods, node_methods},
    {Py_tp_getset, node_fields},
    {Py_tp_doc, "ClientNode(path=None, timeout_ns=0): a connection to lanes.sock"},
    {0, NULL},
};
static PyType_Spec node_spec = {"taktd.ipc._core.ClientNode", sizeof(takt_py_node), 0, Py_TPFLAGS_DEFAULT, node_slots};

/* ---- time ---------------------------------------------------------------------------------------------------- */

static PyObject *tick_next(PyObject *module, PyObject *args)
{
	struct takt_tick tick = {0, 0, 0};
	unsigned long long period_ns;

	(void)module;
	if (!PyArg_ParseTuple(args, "KKK", &tick.index, &tick.release_ns, &period_ns))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	takt_tick_next(&tick, period_ns);
	Py_END_ALLOW_THREADS
	if (PyErr_CheckSignals() < 0)
		return NULL;
	return Py_BuildValue("(KKK)", (unsigned long long)tick.index, (unsigned long long)tick.release_ns,
			     (unsigned long long)tick.missed);
}

static PyMethodDef functions[] = {
    {"tick_next", tick_next, METH_VARARGS,
     "tick_next(index, release_ns, period_ns) -> (index, release_ns, missed): sleeps until the next beat"},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *takt_py_type(PyObject *module, PyType_Spec *spec)
{
	PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);

	if (type && PyModule_AddType(module, (PyTypeObject *)type) < 0)
		Py_CLEAR(type);
	return (PyTypeObject *)type;
}

int takt_py_client_init(PyObject *module)
{
	node_type = takt_py_type(module, &node_spec);
	if (!node_type || PyModule_AddFunctions(module, functions) < 0)
		return -1;
	return takt_py_lane_init(module) < 0 || takt_py_reply_init(module) < 0 || takt_py_names_init(module) < 0 ? -1
														 : 0;
}
