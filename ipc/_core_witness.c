/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_witness.c: taktd.ipc._core.Witness, which sees the executor's core stand still.
 */
#include "_core_server.h"

typedef struct {
	PyObject_HEAD
	struct takt_witness *witness; /* NULL: not initialised */
} Witness;

static PyTypeObject *witness_type;

static struct takt_witness *get(PyObject *self)
{
	struct takt_witness *witness = ((Witness *)self)->witness;

	if (!witness)
		PyErr_SetString(PyExc_ValueError, "this Witness was not initialised");
	return witness;
}

static int witness_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"priority", "cores", NULL};
	PyObject *cores;
	cpu_set_t set;
	int priority, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO", names, &priority, &cores) || takt_py_cores(cores, &set) < 0)
		return -1;
	if (((Witness *)self)->witness) {
		PyErr_SetString(PyExc_RuntimeError, "Witness is initialised already");
		return -1;
	}
	rc = takt_witness_start(&((Witness *)self)->witness, priority, &set);
	if (rc < 0) {
		takt_py_error(rc);
		return -1;
	}
	return 0;
}

static void witness_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	if (((Witness *)self)->witness)
		takt_witness_stop(((Witness *)self)->witness);
	release(self);
	Py_DECREF(type);
}

static PyObject *witness_expect(PyObject *self, PyObject *due)
{
	struct takt_witness *witness = get(self);
	uint64_t due_ns;

	if (!witness || takt_py_u64(due, &due_ns) < 0)
		return NULL;
	takt_witness_expect(witness, due_ns);
	Py_RETURN_NONE;
}

static PyObject *witness_absent_ns(PyObject *self, PyObject *now)
{
	struct takt_witness *witness = get(self);
	uint64_t now_ns;

	if (!witness || takt_py_u64(now, &now_ns) < 0)
		return NULL;
	return PyLong_FromUnsignedLongLong(takt_witness_absent_ns(witness, now_ns));
}

struct takt_witness *takt_py_witness(PyObject *witness)
{
	if (PyObject_TypeCheck(witness, witness_type))
		return get(witness);
	PyErr_SetString(PyExc_TypeError, "expected a Witness");
	return NULL;
}

static PyObject *witness_over(PyObject *self, PyObject *ignored)
{
	struct takt_witness *witness = get(self);

	(void)ignored;
	if (!witness)
		return NULL;
	takt_witness_over(witness);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{"expect", witness_expect, METH_O, NULL},
	{"over", witness_over, METH_NOARGS, NULL},
	{"absent_ns", witness_absent_ns, METH_O, NULL},
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "Sees that the executor's core stood still. See _core.pyi."},
	{Py_tp_init, witness_init},
	{Py_tp_dealloc, witness_dealloc},
	{Py_tp_methods, methods},
	{0, NULL},
};

static PyType_Spec spec = {
	.name = "taktd.ipc._core.Witness",
	.basicsize = sizeof(Witness),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = slots,
};

int takt_py_witness_init(PyObject *module)
{
	witness_type = (PyTypeObject *)PyType_FromSpec(&spec);
	if (!witness_type)
		return -1;
	Py_INCREF(witness_type);
	if (PyModule_AddObject(module, "Witness", (PyObject *)witness_type) < 0) {
		Py_DECREF(witness_type);
		return -1;
	}
	return 0;
}
