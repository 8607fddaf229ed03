/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_server.c: taktd.ipc._core.Server, the executor's lanes. Its hot methods (poll, begin, complete, record) take
 * positional integers only.
 */
#include "_core.h"

#include <string.h>
#include <unistd.h>

#include "_core_server.h"

typedef struct {
	PyObject_HEAD
	struct takt_server server;
	PyObject *witness; /* keeps the server's alive; NULL: none */
	int open;    /* server is initialised */
	int waiting; /* wait() runs without the GIL: the one thread that owns the server is in there */
} Server;

/* The server is its one thread's. A second Python thread that comes while wait() runs is a bug of ours: say so. */
static struct takt_server *enter(PyObject *self)
{
	return takt_py_enter(self);
}

struct takt_server *takt_py_enter(PyObject *self)
{
	Server *own = (Server *)self;

	if (own->open && !own->waiting)
		return &own->server;
	PyErr_SetString(PyExc_RuntimeError, own->open ? "Server is in wait() on another thread; it belongs to one thread"
						      : "Server was not initialised");
	return NULL;
}

static PyObject *no_such_job(uint32_t lane, uint32_t slot)
{
	return PyErr_Format(PyExc_ValueError, "lane %u, slot %u: no job is pending there", lane, slot);
}

static struct takt_served *get_lane(struct takt_server *server, PyObject *number)
{
	struct takt_served *lane;
	uint32_t index;

	if (takt_py_u32(number, &index) < 0)
		return NULL;
	lane = takt_server_lane(server, index);
	if (!lane)
		PyErr_Format(PyExc_ValueError, "lane %u is not served", index);
	return lane;
}

static int get_slot(const struct takt_served *lane, PyObject *number, uint32_t *slot)
{
	if (takt_py_u32(number, slot) < 0)
		return -1;
	if (*slot < lane->layout.slot_count)
		return 0;
	PyErr_Format(PyExc_ValueError, "slot %u: lane %u has slots 0 to %u", *slot, lane->index,
		     lane->layout.slot_count - 1);
	return -1;
}

/* ---- life ---- */

static int server_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"ledger_fd", "stats_fd", "journal_fd", "control_fd", NULL};
	Server *own = (Server *)self;
	int ledger_fd, stats_fd, journal_fd, control_fd, rc;

	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiii", names, &ledger_fd, &stats_fd, &journal_fd, &control_fd))
		return -1;
	if (own->open) {
		PyErr_SetString(PyExc_RuntimeError, "Server is initialised already");
		return -1;
	}
	rc = takt_server_init(&own->server, ledger_fd, stats_fd, journal_fd, control_fd);
	if (rc < 0) {
		takt_py_error(rc);
		return -1;
	}
	own->open = 1;
	return 0;
}

static void server_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);
	freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

	if (((Server *)self)->open)
		takt_watch_stop(&((Server *)self)->server);
	if (((Server *)self)->open)
		takt_server_destroy(&((Server *)self)->server);
	Py_XDECREF(((Server *)self)->witness); /* after the watch, which asks it */
	release(self);
	Py_DECREF(type);
}

static PyObject *server_add(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"lane", "memfd", "wake_fd", "layout", "stats_block", "area", "recover", "dormant", NULL};
	struct takt_server *server = enter(self);
	struct takt_layout layout;
	PyObject *dict;
	struct takt_service service = {.area = UINT32_MAX, .recover = -1};
	unsigned int lane;
	int memfd, wake_fd, rc;

	if (!server || !PyArg_ParseTupleAndKeywords(args, kwargs, "IiiOI|$Ipp", names, &lane, &memfd, &wake_fd, &dict,
						    &service.stats_block, &service.area, &service.recover, &service.dormant))
		return NULL;
	if (service.area == UINT32_MAX || service.recover < 0) /* the format can't say that these must be given */
		return PyErr_Format(PyExc_TypeError, "add() needs area and recover");
	if (takt_py_read_layout(dict, &layout) < 0) {
		close(memfd);
		close(wake_fd);
		return NULL;
	}
	rc = takt_server_add(server, lane, memfd, wake_fd, &layout, &service);
	if (rc < 0)
		return takt_py_error(rc);
	return PyLong_FromVoidPtr(takt_server_lane(server, lane)->base);
}

static PyObject *server_remove(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	uint32_t status = 0;
	int rc;

	if (!server || takt_py_arguments("remove", count, 2, 2) < 0)
		return NULL;
	lane = get_lane(server, args[0]);
	if (!lane || (args[1] != Py_None && takt_py_u32(args[1], &status) < 0))
		return NULL;
	if (status > TAKT_DETACHED)
		return PyErr_Format(PyExc_ValueError, "status %u: must be None or 0 to %d", status, TAKT_DETACHED);
	rc = takt_server_remove(server, lane->index, args[1] == Py_None ? -1 : (int)status, takt_clock_ns());
	return rc < 0 ? takt_py_error(rc) : PyLong_FromLong(rc);
}

/* ---- jobs ---- */

static PyObject *job_tuple(const struct takt_job *job)
{
	PyObject *items[6] = {
		PyLong_FromUnsignedLong(job->lane),	      PyLong_FromUnsignedLongLong(job->sequence),
		PyLong_FromUnsignedLong(job->slot),	      PyLong_FromUnsignedLongLong(job->deadline_ns),
		PyLong_FromUnsignedLongLong(job->release_ns), PyLong_FromUnsignedLong(job->flags),
	};

	return takt_py_tuple(6, items);
}

static PyObject *server_poll(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_job jobs[TAKT_POLL_ENTRIES_MAX];
	PyObject *list;
	uint64_t now_ns;
	uint32_t found;

	if (!server || takt_py_arguments("poll", count, 1, 1) < 0 || takt_py_u64(args[0], &now_ns) < 0)
		return NULL;
	found = takt_server_poll(server, now_ns, jobs);
	list = PyList_New((Py_ssize_t)found);
	for (uint32_t i = 0; list && i < found; i++) {
		PyObject *tuple = job_tuple(&jobs[i]);
		if (!tuple || PyList_SetItem(list, (Py_ssize_t)i, tuple) < 0)
			Py_CLEAR(list);
	}
	return list;
}

static PyObject *server_unfinished(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	PyObject *list;

	if (!server || takt_py_arguments("unfinished", count, 1, 1) < 0 || !(lane = get_lane(server, args[0])))
		return NULL;
	list = PyList_New(0);
	for (uint32_t i = 0; list && i < lane->layout.slot_count; i++) {
		const struct takt_ledger_slot *slot = &lane->ledger->slots[i];
		PyObject *item;
		if (!(lane->pending >> i & 1))
			continue;
		item = Py_BuildValue("(KIKK)", (unsigned long long)slot->sequence, (unsigned int)i,
				     (unsigned long long)slot->deadline_ns, (unsigned long long)slot->release_ns);
		if (!item || PyList_Append(list, item) < 0)
			Py_CLEAR(list);
		Py_XDECREF(item);
	}
	return list;
}

static PyObject *server_begin(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	uint64_t now_ns, deadline_ns = 0, next_arrival_ns = 0, cost_ns = 0;
	uint32_t lane, slot, more = 0;

	if (!server || takt_py_arguments("begin", count, 3, 7) < 0 || takt_py_u32(args[0], &lane) < 0 ||
	    takt_py_u32(args[1], &slot) < 0 || takt_py_u64(args[2], &now_ns) < 0 ||
	    (count > 3 && takt_py_u64(args[3], &deadline_ns) < 0) ||
	    (count > 4 && takt_py_u64(args[4], &next_arrival_ns) < 0) || (count > 5 && takt_py_u32(args[5], &more) < 0) ||
	    (count > 6 && takt_py_u64(args[6], &cost_ns) < 0))
		return NULL;
	if (takt_server_begin(server, lane, slot, now_ns, deadline_ns, next_arrival_ns, (int)more, cost_ns) < 0)
		return no_such_job(lane, slot);
	Py_RETURN_NONE;
}

/* The run is over: its end by the clock. */
static PyObject *server_end(PyObject *self, PyObject *ignored)
{
	struct takt_server *server = enter(self);
	uint64_t ended_ns = takt_clock_ns();

	(void)ignored;
	if (!server)
		return NULL;
	takt_server_end(server);
	return PyLong_FromUnsignedLongLong(ended_ns);
}

static PyObject *server_batched(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	uint64_t run_ns;
	uint32_t size;

	if (!server || takt_py_arguments("batched", count, 3, 3) < 0 || !(lane = get_lane(server, args[0])) ||
	    takt_py_u32(args[1], &size) < 0 || takt_py_u64(args[2], &run_ns) < 0)
		return NULL;
	if (size < 2)
		return PyErr_Format(PyExc_ValueError, "a batch of %u: two jobs or more are one", size);
	takt_stats_batch(lane->stats, size, run_ns);
	Py_RETURN_NONE;
}

static PyObject *server_set_epoch(PyObject *self, PyObject *value)
{
	struct takt_server *server = enter(self);
	uint64_t epoch;

	if (!server || takt_py_u64(value, &epoch) < 0)
		return NULL;
	takt_server_set_epoch(server, epoch);
	Py_RETURN_NONE;
}

static PyObject *server_keep_record(PyObject *self, PyObject *value)
{
	struct takt_server *server = enter(self);
	uint32_t on;

	if (!server || takt_py_u32(value, &on) < 0)
		return NULL;
	server->recording = on;
	Py_RETURN_NONE;
}

static PyObject *server_expect(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	uint64_t hopeless_ns;
	uint32_t lane, slot;

	if (!server || takt_py_arguments("expect", count, 3, 3) < 0 || takt_py_u32(args[0], &lane) < 0 ||
	    takt_py_u32(args[1], &slot) < 0 || takt_py_u64(args[2], &hopeless_ns) < 0)
		return NULL;
	if (takt_server_expect(server, lane, slot, hopeless_ns) < 0)
		return no_such_job(lane, slot);
	Py_RETURN_NONE;
}

Py_ssize_t takt_py_cores(PyObject *cores, cpu_set_t *set)
{
	Py_ssize_t count = PySequence_Size(cores);

	CPU_ZERO(set);
	for (Py_ssize_t i = 0; i < count; i++) {
		PyObject *item = PySequence_GetItem(cores, i);
		uint32_t core;
		int bad = !item || takt_py_u32(item, &core) < 0;

		Py_XDECREF(item);
		if (bad)
			return -1;
		if (core < CPU_SETSIZE)
			CPU_SET(core, set);
	}
	return count;
}

static PyObject *server_runs_late(PyObject *self, PyObject *number)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;

	if (!server || !(lane = get_lane(server, number)))
		return NULL;
	takt_server_runs_late(server, lane->index);
	Py_RETURN_NONE;
}

static PyObject *server_beats(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	uint64_t phase_ns;

	if (!server || takt_py_arguments("beats", count, 2, 2) < 0 || !(lane = get_lane(server, args[0])) ||
	    takt_py_u64(args[1], &phase_ns) < 0)
		return NULL;
	takt_server_beats(server, lane->index, phase_ns);
	Py_RETURN_NONE;
}

static PyObject *server_set_witness(PyObject *self, PyObject *object)
{
	struct takt_server *server = enter(self);
	struct takt_witness *witness;
	PyObject *before;

	if (!server || !(witness = takt_py_witness(object)))
		return NULL;
	before = ((Server *)self)->witness;
	Py_INCREF(object);
	((Server *)self)->witness = object;
	server->witness = witness;
	Py_XDECREF(before);
	Py_RETURN_NONE;
}

static PyObject *server_watch(PyObject *self, PyObject *args)
{
	struct takt_server *server = enter(self);
	PyObject *cores;
	cpu_set_t set;
	Py_ssize_t count;
	int priority, rc;

	if (!server || !PyArg_ParseTuple(args, "iO", &priority, &cores) || (count = takt_py_cores(cores, &set)) < 0)
		return NULL;
	rc = takt_watch_start(server, priority, count > 0 ? &set : NULL);
	if (rc < 0)
		return takt_py_error(rc);
	Py_RETURN_NONE;
}

static PyObject *server_complete(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_verdict verdict = {0};
	uint32_t lane, slot;
	int rc;

	if (!server || takt_py_arguments("complete", count, 8, 9) < 0 || takt_py_u32(args[0], &lane) < 0 ||
	    takt_py_u32(args[1], &slot) < 0 || takt_py_u16(args[2], &verdict.status) < 0 ||
	    takt_py_u16(args[3], &verdict.flags) < 0 || takt_py_u16(args[4], &verdict.path) < 0 ||
	    takt_py_u16(args[5], &verdict.cause) < 0 || takt_py_u32(args[6], &verdict.cause_detail) < 0 ||
	    takt_py_u64(args[7], &verdict.ended_ns) < 0 || (count > 8 && takt_py_u64(args[8], &verdict.deadline_ns) < 0))
		return NULL;
	rc = takt_server_complete(server, lane, slot, &verdict);
	if (rc == -EINVAL)
		return PyErr_Format(PyExc_ValueError, "status %u, path %u, cause %u: outside the closed sets of takt.h",
				    verdict.status, verdict.path, verdict.cause);
	if (rc < 0)
		return no_such_job(lane, slot);
	Py_RETURN_NONE;
}

/* ---- tensors ---- */

static PyObject *server_slot_address(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	const struct takt_tensor_entry *tensor;
	struct takt_served *lane;
	uint32_t slot, index, area;
	uint64_t offset;

	if (!server || takt_py_arguments("slot_address", count, 4, 4) < 0 || !(lane = get_lane(server, args[0])) ||
	    get_slot(lane, args[1], &slot) < 0 || takt_py_u32(args[2], &index) < 0 || takt_py_u32(args[3], &area) < 0)
		return NULL;
	if (index >= lane->layout.tensor_count || area >= TAKT_AREAS)
		return PyErr_Format(PyExc_ValueError, "tensor %u, area %u: lane %u has %u tensors and %d areas", index, area,
				    lane->index, lane->layout.tensor_count, TAKT_AREAS);
	tensor = &lane->layout.tensors[index];
	offset = area == 0 ? tensor->offset_in_slot : tensor->offset_in_slot_1;
	return PyLong_FromVoidPtr(lane->base + lane->layout.slots_offset + slot * lane->layout.slot_stride + offset);
}

static PyObject *server_shapes(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	PyObject *tuple;
	uint32_t slot;

	if (!server || takt_py_arguments("shapes", count, 2, 2) < 0 || !(lane = get_lane(server, args[0])) ||
	    get_slot(lane, args[1], &slot) < 0)
		return NULL;
	tuple = PyTuple_New((Py_ssize_t)lane->layout.input_count);
	for (uint32_t i = 0; tuple && i < lane->layout.input_count; i++) {
		const struct takt_tensor_entry *declared = &lane->layout.tensors[i];
		const int64_t *dims = declared->dims;
		PyObject *shape;
		if (lane->shaped >> slot & 1)
			dims = lane->shapes[slot * lane->layout.input_count + i].dims;
		shape = takt_py_dims(declared->rank, dims);
		if (!shape || PyTuple_SetItem(tuple, (Py_ssize_t)i, shape) < 0)
			Py_CLEAR(tuple);
	}
	return tuple;
}

static int read_shape(PyObject *value, const struct takt_tensor_entry *declared, struct takt_shape *shape)
{
	Py_ssize_t rank = PySequence_Size(value);

	memset(shape, 0, sizeof(*shape));
	if (rank < 0)
		return -1;
	if (rank != (Py_ssize_t)declared->rank) {
		PyErr_Format(PyExc_ValueError, "output '%s' has %zd dimensions; declared are %u", declared->name, rank,
			     declared->rank);
		return -1;
	}
	shape->rank = declared->rank;
	for (Py_ssize_t i = 0; i < rank; i++) {
		PyObject *dim = PySequence_GetItem(value, i);
		shape->dims[i] = dim ? PyLong_AsLongLong(dim) : -1;
		Py_XDECREF(dim);
		if (shape->dims[i] == -1 && PyErr_Occurred())
			return -1;
		if (shape->dims[i] < 0 || shape->dims[i] > declared->dims[i]) {
			PyErr_Format(PyExc_ValueError, "output '%s': dimension %zd is %lld; declared are 0 to %lld",
				     declared->name, i, (long long)shape->dims[i], (long long)declared->dims[i]);
			return -1;
		}
	}
	return 0;
}

static PyObject *server_set_output_shapes(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;
	struct takt_shape shapes[TAKT_TENSORS_MAX];
	uint32_t slot, outputs;
	uint8_t *block;

	if (!server || takt_py_arguments("set_output_shapes", count, 3, 3) < 0 || !(lane = get_lane(server, args[0])) ||
	    get_slot(lane, args[1], &slot) < 0)
		return NULL;
	outputs = lane->layout.tensor_count - lane->layout.input_count;
	if (!lane->layout.dynamic || PySequence_Size(args[2]) != (Py_ssize_t)outputs)
		return PyErr_Format(PyExc_ValueError, "lane %u: %s, %u outputs", lane->index,
				    lane->layout.dynamic ? "dynamic shapes" : "fixed shapes", outputs);
	for (uint32_t i = 0; i < outputs; i++) {
		PyObject *value = PySequence_GetItem(args[2], (Py_ssize_t)i);
		int rc = value ? read_shape(value, &lane->layout.tensors[lane->layout.input_count + i], &shapes[i]) : -1;
		Py_XDECREF(value);
		if (rc < 0)
			return NULL;
	}
	block = lane->base + lane->layout.slots_offset + slot * lane->layout.slot_stride +
		lane->layout.shapes_offset_in_slot;
	memcpy(block + lane->layout.input_count * sizeof(struct takt_shape), shapes, outputs * sizeof(struct takt_shape));
	lane->outputs_shaped |= UINT64_C(1) << slot;
	Py_RETURN_NONE;
}

/* ---- waiting, journal ---- */

static PyObject *server_wait(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	uint64_t until_ns, spin_until_ns;
	int woke;

	if (!server || takt_py_arguments("wait", count, 2, 2) < 0 || takt_py_u64(args[0], &until_ns) < 0 ||
	    takt_py_u64(args[1], &spin_until_ns) < 0)
		return NULL;
	woke = takt_server_wait(server, 1, 0); /* one look first: often there is something, and the GIL needs no hand-over */
	if (woke == TAKT_WOKE_TIMEOUT) {
		((Server *)self)->waiting = 1;
		Py_BEGIN_ALLOW_THREADS
		woke = takt_server_wait(server, until_ns, spin_until_ns);
		Py_END_ALLOW_THREADS
		((Server *)self)->waiting = 0;
	}
	if (woke == 0 && PyErr_CheckSignals() < 0)
		return NULL;
	return PyLong_FromLong(woke);
}

static PyObject *server_slept_ns(PyObject *self, PyObject *ignored)
{
	struct takt_server *server = enter(self);

	(void)ignored;
	return server ? PyLong_FromUnsignedLongLong(server->slept_ns) : NULL;
}

static PyObject *server_spins(PyObject *self, PyObject *arg)
{
	struct takt_server *server = enter(self);
	struct takt_served *lane;

	if (!server || !(lane = get_lane(server, arg)))
		return NULL;
	return PyBool_FromLong(takt_load_word(&lane->rings.cursors->client_wait_mode) == TAKT_WAIT_SPIN);
}

static PyObject *server_record(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
	struct takt_server *server = enter(self);
	struct takt_record record = {0};

	if (!server || takt_py_arguments("record", count, 6, 6) < 0 || takt_py_u16(args[0], &record.kind) < 0 ||
	    takt_py_u16(args[1], &record.lane) < 0 || takt_py_u32(args[2], &record.aux) < 0 ||
	    takt_py_u64(args[3], &record.a) < 0 || takt_py_u64(args[4], &record.b) < 0 ||
	    takt_py_u64(args[5], &record.t_ns) < 0)
		return NULL;
	takt_journal_write(server->journal, &record);
	Py_RETURN_NONE;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))server_##name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
	{"add", (PyCFunction)(void (*)(void))server_add, METH_VARARGS | METH_KEYWORDS, NULL},
	FAST(remove),
	FAST(poll),
	FAST(unfinished),
	FAST(begin),
	FAST(expect),
	{"end", server_end, METH_NOARGS, NULL},
	FAST(batched),
	{"set_epoch", server_set_epoch, METH_O, NULL},
	{"keep_record", server_keep_record, METH_O, NULL},
	{"runs_late", server_runs_late, METH_O, NULL},
	FAST(beats),
	{"watch", server_watch, METH_VARARGS, NULL},
	{"set_witness", server_set_witness, METH_O, NULL},
	FAST(complete),
	FAST(slot_address),
	FAST(shapes),
	FAST(set_output_shapes),
	FAST(wait),
	{"slept_ns", server_slept_ns, METH_NOARGS, NULL},
	{"spins", server_spins, METH_O, NULL},
	FAST(record),
	TAKT_PY_SUCCESSION_METHODS,
	{NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
	{Py_tp_doc, "The lanes of one executor. Belongs to one thread. See _core.pyi."},
	{Py_tp_init, server_init},
	{Py_tp_dealloc, server_dealloc},
	{Py_tp_methods, methods},
	{0, NULL},
};

static PyType_Spec spec = {
	.name = "taktd.ipc._core.Server",
	.basicsize = sizeof(Server),
	.flags = Py_TPFLAGS_DEFAULT,
	.slots = slots,
};

int takt_py_server_init(PyObject *module)
{
	PyObject *type = PyType_FromSpec(&spec);

	if (!type || PyModule_AddObject(module, "Server", type) < 0) {
		Py_XDECREF(type);
		return -1;
	}
	return 0;
}
