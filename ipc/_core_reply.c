/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_reply.c: Reply, the outcome of one job. It copies the C reply and works out each value when it is asked for, so
 * that making one costs an allocation and nothing else.
 */
#include "_core_client.h"

static PyTypeObject *reply_type;

/* Names as Python strings, made once: a reply hands out what is already there. */
static PyObject *status_strings[TAKT_DETACHED + 1], *pending_string, *unknown_string;
static PyObject *path_strings[TAKT_PATH_CONSTANT + 1], *cause_strings[TAKT_CAUSE_MACHINE + 1];

typedef struct {
	PyObject_HEAD struct takt_reply reply;
} ReplyObject;

PyObject *takt_py_reply(const struct takt_reply *reply)
{
	ReplyObject *self = PyObject_New(ReplyObject, reply_type);

	if (self)
		self->reply = *reply;
	return (PyObject *)self;
}

static void reply_dealloc(PyObject *self)
{
	PyTypeObject *type = Py_TYPE(self);

	PyObject_Free(self);
	Py_DECREF(type);
}

#define REPLY(self) (&((ReplyObject *)(self))->reply)

static PyObject *pick(PyObject *const *strings, size_t count, uint32_t number)
{
	PyObject *string = number < count ? strings[number] : unknown_string;

	Py_INCREF(string);
	return string;
}

static PyObject *reply_status(PyObject *self, void *closure)
{
	(void)closure;
	if (REPLY(self)->status == TAKT_PENDING) {
		Py_INCREF(pending_string);
		return pending_string;
	}
	return pick(status_strings, TAKT_DETACHED + 1, REPLY(self)->status);
}

static PyObject *reply_path(PyObject *self, void *closure)
{
	(void)closure;
	return pick(path_strings, TAKT_PATH_CONSTANT + 1, REPLY(self)->path);
}

static PyObject *reply_cause(PyObject *self, void *closure)
{
	(void)closure;
	return pick(cause_strings, TAKT_CAUSE_MACHINE + 1, REPLY(self)->cause);
}

static PyObject *reply_is(PyObject *self, void *closure)
{
	return PyBool_FromLong(REPLY(self)->status == (uint32_t)(uintptr_t)closure);
}

static PyObject *reply_flag(PyObject *self, void *closure)
{
	return PyBool_FromLong((REPLY(self)->flags & (uint32_t)(uintptr_t)closure) != 0);
}

static PyObject *reply_u32(PyObject *self, void *closure)
{
	return PyLong_FromUnsignedLong(*(const uint32_t *)((const char *)REPLY(self) + (uintptr_t)closure));
}

static PyObject *reply_u64(PyObject *self, void *closure)
{
	return PyLong_FromUnsignedLongLong(*(const uint64_t *)((const char *)REPLY(self) + (uintptr_t)closure));
}

static PyObject *reply_us(PyObject *self, void *closure)
{
	const uint64_t ns = *(const uint64_t *)((const char *)REPLY(self) + (uintptr_t)closure);

	return PyFloat_FromDouble((double)ns / 1000.0);
}

static PyObject *reply_repr(PyObject *self)
{
	const struct takt_reply *r = REPLY(self);
	const char *path = takt_path_name(r->path), *cause = takt_cause_name(r->cause);
	char text[256];

	snprintf(text, sizeof(text), "<Reply %llu %s%s%s%s%s%s%s queued %.1f us, run %.1f us, total %.1f us>",
		 (unsigned long long)r->sequence, takt_status_name(r->status), r->flags & TAKT_LATE ? " late" : "",
		 r->flags & TAKT_EARLY ? " early" : "", *path ? " by " : "", path, *cause ? " because of " : "", cause,
		 (double)r->queued_ns / 1e3, (double)r->run_ns / 1e3, (double)r->total_ns / 1e3);
	return PyUnicode_FromString(text);
}

#define FIELD(name) (void *)offsetof(struct takt_reply, name)
static PyGetSetDef reply_fields[] = {
    {"status", reply_status, NULL, "name of the outcome: \"ok\", \"expired\", ..., \"pending\"", NULL},
    {"ok", reply_is, NULL, "status is \"ok\" (look at `late` too)", (void *)(uintptr_t)TAKT_OK},
    {"pending", reply_is, NULL, "the wait timed out; the job goes on", (void *)(uintptr_t)TAKT_PENDING},
    {"late", reply_flag, NULL, "ended after its deadline", (void *)(uintptr_t)TAKT_LATE},
    {"overrun", reply_flag, NULL, "ran longer than declared", (void *)(uintptr_t)TAKT_OVERRUN},
    {"stand_in", reply_flag, NULL, "answered by the stand-in executor", (void *)(uintptr_t)TAKT_STAND_IN},
    {"early", reply_flag, NULL, "submitted before the period allowed it", (void *)(uintptr_t)TAKT_EARLY},
    {"not_finite", reply_flag, NULL, "an output has NaN or infinity in it", (void *)(uintptr_t)TAKT_NOT_FINITE},
    {"path", reply_path, NULL, "who answered: \"primary\", \"stand-in\", \"hold\", \"constant\", \"\"", NULL},
    {"cause", reply_cause, NULL, "why a deadline was missed, \"\" for none", NULL},
    {"status_code", reply_u32, NULL, "number of the status", FIELD(status)},
    {"cause_detail", reply_u32, NULL, "number that goes with the cause", FIELD(cause_detail)},
    {"epoch", reply_u32, NULL, "configuration that answered", FIELD(epoch)},
    {"slot", reply_u32, NULL, "slot of the lane", FIELD(slot)},
    {"area", reply_u32, NULL, "output area of the slot", FIELD(area)},
    {"sequence", reply_u64, NULL, "number of the job", FIELD(sequence)},
    {"submitted_ns", reply_u64, NULL, "CLOCK_MONOTONIC, 0 for none", FIELD(submitted_ns)},
    {"taken_ns", reply_u64, NULL, "CLOCK_MONOTONIC, 0 for none", FIELD(taken_ns)},
    {"started_ns", reply_u64, NULL, "CLOCK_MONOTONIC, 0 for none", FIELD(started_ns)},
    {"ended_ns", reply_u64, NULL, "CLOCK_MONOTONIC, 0 for none", FIELD(ended_ns)},
    {"deadline_ns", reply_u64, NULL, "CLOCK_MONOTONIC, 0 for none", FIELD(deadline_ns)},
    {"queued_us", reply_us, NULL, "from submission to start, in us", FIELD(queued_ns)},
    {"run_us", reply_us, NULL, "from start to end, in us", FIELD(run_ns)},
    {"total_us", reply_us, NULL, "from submission to end, in us", FIELD(total_ns)},
    {NULL, NULL, NULL, NULL, NULL},
};
#undef FIELD

static PyType_Slot reply_slots[] = {
    {Py_tp_dealloc, reply_dealloc},
    {Py_tp_repr, reply_repr},
    {Py_tp_getset, reply_fields},
    {Py_tp_doc, "Outcome of one job; times are worked out when they are asked for."},
    {0, NULL},
};
static PyType_Spec reply_spec = {"taktd.ipc._core.Reply", sizeof(ReplyObject), 0,
				 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, reply_slots};

static int make_strings(PyObject **strings, uint32_t count, const char *(*name)(uint32_t))
{
	for (uint32_t i = 0; i < count; i++)
		if (!(strings[i] = PyUnicode_InternFromString(name(i))))
			return -1;
	return 0;
}

int takt_py_reply_init(PyObject *module)
{
	pending_string = PyUnicode_InternFromString("pending");
	unknown_string = PyUnicode_InternFromString("unknown");
	if (!pending_string || !unknown_string ||
	    make_strings(status_strings, TAKT_DETACHED + 1, takt_status_name) < 0 ||
	    make_strings(path_strings, TAKT_PATH_CONSTANT + 1, takt_path_name) < 0 ||
	    make_strings(cause_strings, TAKT_CAUSE_MACHINE + 1, takt_cause_name) < 0)
		return -1;
	reply_type = takt_py_type(module, &reply_spec);
	return reply_type ? 0 : -1;
}
