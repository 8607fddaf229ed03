/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_lane.c: ClientLane, one attached lane for taktd.ipc.client.
 *
 * The GIL. Whoever gives it up while another Python thread computes waits out the switch interval (5 ms) to get it
 * back, which is worse than any tail of the lane itself. So a wait that may poll (spin, hybrid) first polls for
 * GIL_SPIN_NS with the GIL held, which is where a small policy's reply arrives, and only then lets other threads run.
 * They lose at most GIL_SPIN_NS per job. A blocking wait gives it up at once. Round trip to an echo beside a thread that
 * computes, both sides SCHED_FIFO with a core each: polled p50 3.8 us, p99 11 us; given up p50 24 us, p99 12 ms.
 */
#include "_core_client.h"

#define GIL_SPIN_NS    TAKT_HYBRID_SPIN_NS
#define SIGNAL_LOOK_NS 100000000u /* longest wait before Ctrl-C is looked for */

static PyTypeObject *lane_type;

typedef struct {
	PyObject_HEAD takt_lane *lane; /* NULL once detached */
	takt_py_node *node;
	int waiting; /* a thread is inside a wait without the GIL: nobody else may touch the lane */
} LaneObject;

PyObject *takt_py_lane(takt_py_node *node, takt_lane *lane)
{
	LaneObject *self = PyObject_New(LaneObject, lane_type);

	if (!self) {
		takt_detach(lane);
		return NULL;
	}
	self->lane = lane;
	self->waiting = 0;
	self->node = node;
	Py_INCREF((PyObject *)node);
	return (PyObject *)self;
}

static void lane_dealloc(PyObject *object)
{
	LaneObject *self = (LaneObject *)object;
	PyTypeObject *type = Py_TYPE(object);

	Py_BEGIN_ALLOW_THREADS
	takt_detach(self->lane);
	Py_END_ALLOW_THREADS
	Py_DECREF((PyObject *)self->node);
	PyObject_Free(self);
	Py_DECREF(type);
}

/* The lane, if it can be used now. */
static takt_lane *usable(LaneObject *self)
{
	if (self->lane && !self->waiting)
		return self->lane;
	if (!self->lane)
		takt_py_raise(EPIPE, "the lane was detached: attach again");
	else
		takt_py_raise(EBUSY, "another thread is waiting on this lane: a lane belongs to one thread");
	return NULL;
}

static PyObject *lane_detach(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;
	takt_lane *lane = self->lane;

	(void)unused;
	if (!lane)
		Py_RETURN_NONE;
	if (!usable(self))
		return NULL;
	self->lane = NULL;
	self->node->users++;
	Py_BEGIN_ALLOW_THREADS
	takt_detach(lane);
	Py_END_ALLOW_THREADS
	self->node->users--;
	Py_RETURN_NONE;
}

/* 1: a reply, 0: time over, below 0: an error of the lane, 1 << 30: a Python exception is set. */
#define INTERRUPTED (1 << 30)

static int poll_with_gil(takt_lane *lane, uint64_t sequence, uint64_t until_ns, struct takt_reply *reply)
{
	const uint64_t spin_until_ns = takt_clock_ns() + GIL_SPIN_NS;
	const uint64_t end_ns = spin_until_ns < until_ns ? spin_until_ns : until_ns;
	int got = 0;

	while (!got && takt_lane_spin(lane, end_ns))
		got = takt_lane_receive(lane, sequence, reply);
	return got;
}

static int wait_without_gil(LaneObject *self, uint64_t sequence, uint64_t until_ns, struct takt_reply *reply)
{
	takt_lane *lane = self->lane;
	int got = 0;

	while (!got) {
		const uint64_t now = takt_clock_ns();
		const uint64_t piece = until_ns - now > SIGNAL_LOOK_NS ? now + SIGNAL_LOOK_NS : until_ns;

		if (now >= until_ns)
			return 0;
		self->waiting = 1;
		Py_BEGIN_ALLOW_THREADS
		if (lane->wait_mode == TAKT_WAIT_SPIN)
			takt_lane_sleep(lane, piece);
		else
			takt_lane_block(lane, piece);
		Py_END_ALLOW_THREADS
		self->waiting = 0;
		if (lane->descriptor_used)
			takt_lane_arm(lane);
		got = takt_lane_receive(lane, sequence, reply);
		if (!got && PyErr_CheckSignals() < 0)
			return INTERRUPTED;
	}
	return got;
}

/* due_ns: when the job is answered here, UINT64_MAX for never. */
static PyObject *wait_for(LaneObject *self, uint64_t sequence, int64_t timeout_ns, uint64_t due_ns)
{
	takt_lane *lane = self->lane;
	struct takt_reply reply;
	uint64_t until_ns;
	int got;

	if (lane->descriptor_used)
		takt_lane_arm(lane);
	got = takt_lane_receive(lane, sequence, &reply);
	if (!got && timeout_ns) {
		until_ns = takt_lane_until(lane, sequence, timeout_ns);
		if (due_ns < until_ns)
			until_ns = due_ns;
		if (lane->wait_mode != TAKT_WAIT_BLOCK)
			got = poll_with_gil(lane, sequence, until_ns, &reply);
		if (!got)
			got = wait_without_gil(self, sequence, until_ns, &reply);
	}
	if (got == INTERRUPTED)
		return NULL;
	if (got < 0)
		return takt_py_raise(got, takt_lane_error(lane));
	if (!got && takt_clock_ns() >= due_ns)
		takt_local_answer(lane, sequence, due_ns, &reply);
	else if (!got)
		takt_lane_give_up(lane, sequence, &reply);
	return takt_py_reply(&reply);
}

static int take_numbers(PyObject *const *args, Py_ssize_t count, uint64_t *first, int64_t *second)
{
	if (count != 2) {
		PyErr_SetString(PyExc_TypeError, "takes two arguments");
		return -1;
	}
	*first = PyLong_AsUnsignedLongLong(args[0]);
	*second = PyLong_AsLongLong(args[1]);
	return PyErr_Occurred() ? -1 : 0;
}

static PyObject *lane_infer(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
	LaneObject *self = (LaneObject *)object;
	takt_lane *lane;
	struct takt_reply reply;
	uint64_t deadline_ns, due_ns;
	int64_t timeout_ns, sequence;

	if (take_numbers(args, count, &deadline_ns, &timeout_ns) < 0 || !(lane = usable(self)))
		return NULL;
	due_ns = takt_local_due(lane, deadline_ns);
	sequence = takt_submit(lane, deadline_ns);
	if (sequence == -EBUSY && due_ns != UINT64_MAX) {
		self->waiting = 1;
		Py_BEGIN_ALLOW_THREADS
		sequence = takt_local_submit(lane, deadline_ns, due_ns);
		Py_END_ALLOW_THREADS
		self->waiting = 0;
	}
	if (sequence < 0)
		return takt_py_raise((int)sequence, takt_lane_error(lane));
	if (sequence > 0)
		return wait_for(self, (uint64_t)sequence, timeout_ns, due_ns);
	takt_local_answer(lane, 0, due_ns, &reply);
	return takt_py_reply(&reply);
}

static PyObject *lane_wait(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
	LaneObject *self = (LaneObject *)object;
	uint64_t sequence;
	int64_t timeout_ns;

	if (take_numbers(args, count, &sequence, &timeout_ns) < 0 || !usable(self))
		return NULL;
	return wait_for(self, sequence, timeout_ns, UINT64_MAX);
}

static PyObject *lane_submit(PyObject *object, PyObject *deadline)
{
	LaneObject *self = (LaneObject *)object;
	const uint64_t deadline_ns = PyLong_AsUnsignedLongLong(deadline);
	int64_t sequence;

	if (PyErr_Occurred() || !usable(self))
		return NULL;
	sequence = takt_submit(self->lane, deadline_ns);
	if (sequence < 0)
		return takt_py_raise((int)sequence, takt_lane_error(self->lane));
	return PyLong_FromLongLong(sequence);
}

static PyObject *lane_repeat(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;
	int64_t sequence;

	(void)unused;
	if (!usable(self))
		return NULL;
	sequence = takt_repeat(self->lane);
	if (sequence < 0)
		return takt_py_raise((int)sequence, takt_lane_error(self->lane));
	return PyLong_FromLongLong(sequence);
}

static PyObject *lane_cancel(PyObject *object, PyObject *number)
{
	LaneObject *self = (LaneObject *)object;
	const uint64_t sequence = PyLong_AsUnsignedLongLong(number);
	int result;

	if (PyErr_Occurred() || !usable(self))
		return NULL;
	result = takt_cancel(self->lane, sequence);
	if (result < 0)
		return takt_py_raise(result, takt_lane_error(self->lane));
	Py_RETURN_NONE;
}

static PyObject *number_or_error(LaneObject *self, int result)
{
	return result < 0 ? takt_py_raise(result, takt_lane_error(self->lane)) : PyLong_FromLong(result);
}

static PyObject *lane_next_slot(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;

	(void)unused;
	return usable(self) ? number_or_error(self, takt_next_slot(self->lane)) : NULL;
}

static PyObject *lane_last_place(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;
	const takt_lane *lane = usable(self);

	(void)unused;
	if (!lane)
		return NULL;
	if (lane->last_slot < 0)
		return PyLong_FromLong(-1);
	return PyLong_FromLong(2 * lane->last_slot + (long)lane->slots[lane->last_slot].reply.area);
}

static PyObject *lane_fileno(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;

	(void)unused;
	return usable(self) ? number_or_error(self, takt_fileno(self->lane)) : NULL;
}

/* Undoes fileno(): neither side makes a system call for a descriptor that nobody looks at. */
static PyObject *lane_unwatch(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;
	takt_lane *lane = usable(self);

	(void)unused;
	if (!lane)
		return NULL;
	lane->descriptor_used = 0;
	takt_store_word(&lane->rings.cursors->client_waiting, TAKT_WAITING_NO);
	Py_RETURN_NONE;
}

static PyObject *lane_pending(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;

	(void)unused;
	return usable(self) ? number_or_error(self, takt_pending(self->lane)) : NULL;
}

static PyObject *lane_memfd(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;

	(void)unused;
	return usable(self) ? PyLong_FromLong(self->lane->memfd) : NULL;
}

static PyObject *lane_local_fd(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;

	(void)unused;
	return usable(self) ? PyLong_FromLong(self->lane->local_fd) : NULL;
}

static PyObject *shape_tuple(const int64_t *dims, uint32_t rank)
{
	PyObject *tuple = PyTuple_New((Py_ssize_t)rank);

	for (uint32_t i = 0; tuple && i < rank; i++)
		if (PyTuple_SetItem(tuple, (Py_ssize_t)i, PyLong_FromLongLong(dims[i])) < 0)
			Py_CLEAR(tuple);
	return tuple;
}

static PyObject *lane_output_shape(PyObject *object, PyObject *number)
{
	LaneObject *self = (LaneObject *)object;
	const unsigned long index = PyLong_AsUnsignedLong(number);
	struct takt_tensor tensor;
	int result;

	if (PyErr_Occurred() || !usable(self))
		return NULL;
	result = takt_output_at(self->lane, (uint32_t)index, &tensor);
	if (result < 0)
		return takt_py_raise(result, takt_lane_error(self->lane));
	return shape_tuple(tensor.dims, tensor.rank);
}

static PyObject *lane_set_shape(PyObject *object, PyObject *args)
{
	LaneObject *self = (LaneObject *)object;
	int64_t dims[TAKT_RANK_MAX];
	Py_ssize_t rank;
	const char *name;
	PyObject *shape;
	int result;

	if (!PyArg_ParseTuple(args, "sO!", &name, &PyTuple_Type, &shape) || !usable(self))
		return NULL;
	rank = PyTuple_Size(shape);
	for (Py_ssize_t i = 0; i < rank && i < (Py_ssize_t)TAKT_RANK_MAX; i++)
		dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
	if (PyErr_Occurred())
		return NULL;
	result = takt_set_shape(self->lane, name, dims, (uint32_t)rank);
	if (result < 0)
		return takt_py_raise(result, takt_lane_error(self->lane));
	Py_RETURN_NONE;
}

static PyObject *describe_tensor(const struct takt_tensor_entry *entry, int is_output)
{
	PyObject *dict = PyDict_New();

	if (!dict)
		return NULL;
	if (takt_py_put(dict, "name", PyUnicode_DecodeUTF8(entry->name, (Py_ssize_t)strlen(entry->name), "replace")) <
		0 ||
	    takt_py_put(dict, "dtype", PyLong_FromUnsignedLong(entry->dtype)) < 0 ||
	    takt_py_put(dict, "dims", shape_tuple(entry->dims, entry->rank)) < 0 ||
	    takt_py_put(dict, "bytes", PyLong_FromUnsignedLongLong(entry->bytes)) < 0 ||
	    takt_py_put(dict, "offsets",
			is_output ? Py_BuildValue("(KK)", entry->offset_in_slot, entry->offset_in_slot_1)
				  : Py_BuildValue("(K)", entry->offset_in_slot)) < 0)
		Py_CLEAR(dict);
	return dict;
}

static PyObject *describe_tensors(const struct takt_layout *layout, uint32_t from, uint32_t to)
{
	PyObject *list = PyList_New(0);

	for (uint32_t i = from; list && i < to; i++) {
		PyObject *tensor = describe_tensor(&layout->tensors[i], from > 0 || layout->input_count == 0);

		if (!tensor || PyList_Append(list, tensor) < 0)
			Py_CLEAR(list);
		Py_XDECREF(tensor);
	}
	return list;
}

static PyObject *lane_describe(PyObject *object, PyObject *unused)
{
	LaneObject *self = (LaneObject *)object;
	struct takt_lane_info info;
	const takt_lane *lane = usable(self);
	PyObject *dict;

	(void)unused;
	if (!lane)
		return NULL;
	takt_describe(lane, &info);
	dict = Py_BuildValue("{sssssIsIsKsKsKsKsIsOsKsKsKsI}", "name", info.name, "model", info.model, "kind", info.kind,
			     "slot_count", info.slot_count, "period_ns", info.period_ns, "deadline_ns",
			     info.deadline_ns, "jitter_ns", info.jitter_ns, "epoch", info.epoch, "trigger",
			     info.trigger, "dynamic", info.dynamic ? Py_True : Py_False, "slot_stride",
			     info.slot_stride, "slots_offset", info.slots_offset, "size", lane->size, "local_path", lane->local_path);
	if (dict &&
	    (takt_py_put(dict, "inputs", describe_tensors(&lane->layout, 0, lane->layout.input_count)) < 0 ||
	     takt_py_put(dict, "outputs",
			 describe_tensors(&lane->layout, lane->layout.input_count, lane->layout.tensor_count)) < 0))
		Py_CLEAR(dict);
	return dict;
}

#define FAST(function) (PyCFunction)(void (*)(void)) function
static PyMethodDef lane_methods[] = {
    {"infer", FAST(lane_infer), METH_FASTCALL, "infer(deadline_ns, timeout_ns) -> Reply"},
    {"wait", FAST(lane_wait), METH_FASTCALL, "wait(sequence, timeout_ns) -> Reply"},
    {"submit", lane_submit, METH_O, "submit(deadline_ns) -> sequence"},
    {"repeat", lane_repeat, METH_NOARGS, "repeat() -> sequence"},
    {"cancel", lane_cancel, METH_O, "cancel(sequence)"},
    {"next_slot", lane_next_slot, METH_NOARGS, "next_slot() -> number of the next free slot"},
    {"last_place", lane_last_place, METH_NOARGS, "last_place() -> 2 * slot + area of the last reply, -1 for none"},
    {"fileno", lane_fileno, METH_NOARGS, "fileno() -> descriptor that becomes readable with a completion"},
    {"unwatch", lane_unwatch, METH_NOARGS, "unwatch(): completions leave the descriptor alone until fileno()"},
    {"pending", lane_pending, METH_NOARGS, "pending() -> jobs without a completion"},
    {"memfd", lane_memfd, METH_NOARGS, "memfd() -> descriptor of the lane's memory, still the lane's own"},
    {"local_fd", lane_local_fd, METH_NOARGS,
     "local_fd() -> descriptor of the memory of a slot more, for answers given here; -1: none are"},
    {"output_shape", lane_output_shape, METH_O, "output_shape(index) -> actual shape in the last reply"},
    {"set_shape", lane_set_shape, METH_VARARGS, "set_shape(name, dims)"},
    {"describe", lane_describe, METH_NOARGS, "describe() -> dict"},
    {"detach", lane_detach, METH_NOARGS, "gives the lane back"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lane_slots[] = {
    {Py_tp_dealloc, lane_dealloc},
    {Py_tp_methods, lane_methods},
    {Py_tp_doc, "An attached lane; made by ClientNode.attach."},
    {0, NULL},
};
static PyType_Spec lane_spec = {"taktd.ipc._core.ClientLane", sizeof(LaneObject), 0,
				Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, lane_slots};

int takt_py_lane_init(PyObject *module)
{
	lane_type = takt_py_type(module, &lane_spec);
	return lane_type ? 0 : -1;
}
