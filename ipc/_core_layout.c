/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_layout.c: lane layouts between Python and C: create_lane() makes one, Server.add() reads it back.
 */
#include "_core.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

PyObject *takt_py_dims(uint32_t rank, const int64_t *dims)
{
	PyObject *tuple = PyTuple_New((Py_ssize_t)rank);

	for (uint32_t i = 0; tuple && i < rank; i++) {
		PyObject *dim = PyLong_FromLongLong(dims[i]);
		if (!dim || PyTuple_SetItem(tuple, (Py_ssize_t)i, dim) < 0)
			Py_CLEAR(tuple);
	}
	return tuple;
}

static int read_dims(PyObject *value, struct takt_tensor_entry *tensor)
{
	Py_ssize_t rank = PySequence_Size(value);

	if (rank < 0)
		return -1;
	if (rank > (Py_ssize_t)TAKT_RANK_MAX) {
		PyErr_Format(PyExc_ValueError, "tensor '%s' has %zd dimensions; a lane's tensors have at most %d",
			     tensor->name, rank, (int)TAKT_RANK_MAX);
		return -1;
	}
	tensor->rank = (uint32_t)rank;
	for (Py_ssize_t i = 0; i < rank; i++) {
		PyObject *dim = PySequence_GetItem(value, i);
		if (!dim)
			return -1;
		tensor->dims[i] = PyLong_AsLongLong(dim);
		Py_DECREF(dim);
		if (tensor->dims[i] == -1 && PyErr_Occurred())
			return -1;
		if (tensor->dims[i] < 1) {
			PyErr_Format(PyExc_ValueError, "tensor '%s': dimension %zd is %lld; it must be at least 1",
				     tensor->name, i, (long long)tensor->dims[i]);
			return -1;
		}
	}
	return 0;
}

/* Copies a str into a NUL-terminated field. */
static int read_name(PyObject *value, const char *what, char *out, size_t room)
{
	Py_ssize_t size;
	const char *text = PyUnicode_AsUTF8AndSize(value, &size);

	if (!text)
		return -1;
	if ((size_t)size >= room || memchr(text, 0, (size_t)size)) {
		PyErr_Format(PyExc_ValueError, "%s name '%s' has %zd bytes (UTF-8); at most %zu without a NUL fit a lane", what,
			     text, size, room - 1);
		return -1;
	}
	memset(out, 0, room);
	memcpy(out, text, (size_t)size);
	return 0;
}

static int read_tensor(PyObject *name, PyObject *dtype, PyObject *dims, struct takt_tensor_entry *tensor)
{
	uint64_t bytes;

	memset(tensor, 0, sizeof(*tensor));
	if (read_name(name, "tensor", tensor->name, sizeof(tensor->name)) < 0 || takt_py_u32(dtype, &tensor->dtype) < 0)
		return -1;
	if (takt_dtype_bits(tensor->dtype) == 0) {
		PyErr_Format(PyExc_ValueError, "tensor '%s' has ONNX dtype %u; a lane carries numbers and bools, no strings",
			     tensor->name, tensor->dtype);
		return -1;
	}
	if (read_dims(dims, tensor) < 0)
		return -1;
	if (takt_tensor_bytes(tensor->dtype, tensor->rank, tensor->dims, &bytes) < 0) {
		PyErr_Format(PyExc_ValueError, "tensor '%s' is larger than a lane may be (%llu bytes)", tensor->name,
			     (unsigned long long)TAKT_LANE_BYTES_MAX);
		return -1;
	}
	return 0;
}

/* One tensor: a sequence (name, dtype, dims) or a dict with these keys. */
static int read_tensor_item(PyObject *item, struct takt_tensor_entry *tensor)
{
	static const char *const keys[3] = {"name", "dtype", "dims"};
	PyObject *parts[3] = {NULL, NULL, NULL};
	int rc = 0;

	for (int i = 0; i < 3; i++) {
		parts[i] = PyDict_Check(item) ? PyMapping_GetItemString(item, keys[i]) : PySequence_GetItem(item, i);
		if (!parts[i])
			rc = -1;
	}
	if (rc == 0)
		rc = read_tensor(parts[0], parts[1], parts[2], tensor);
	for (int i = 0; i < 3; i++)
		Py_XDECREF(parts[i]);
	return rc;
}

static int read_tensors(PyObject *inputs, PyObject *outputs, struct takt_layout *layout)
{
	PyObject *lists[2] = {inputs, outputs};
	Py_ssize_t counts[2] = {PySequence_Size(inputs), PySequence_Size(outputs)};
	uint32_t at = 0;

	if (counts[0] < 0 || counts[1] < 0)
		return -1;
	if (counts[0] + counts[1] < 1 || counts[0] + counts[1] > TAKT_TENSORS_MAX) {
		PyErr_Format(PyExc_ValueError, "%zd inputs and %zd outputs; a lane has 1 to %d tensors", counts[0], counts[1],
			     TAKT_TENSORS_MAX);
		return -1;
	}
	layout->input_count = (uint32_t)counts[0];
	layout->tensor_count = (uint32_t)(counts[0] + counts[1]);
	layout->tensors = calloc(layout->tensor_count, sizeof(*layout->tensors));
	if (!layout->tensors) {
		PyErr_NoMemory();
		return -1;
	}
	for (int list = 0; list < 2; list++) {
		for (Py_ssize_t i = 0; i < counts[list]; i++) {
			PyObject *item = PySequence_GetItem(lists[list], i);
			int rc = item ? read_tensor_item(item, &layout->tensors[at++]) : -1;
			Py_XDECREF(item);
			if (rc < 0)
				return -1;
		}
	}
	return 0;
}

static int compute(struct takt_layout *layout)
{
	int rc = takt_layout_compute(layout);

	if (rc == -E2BIG)
		PyErr_Format(PyExc_ValueError, "lane '%s' would need %llu bytes; a lane has at most %llu", layout->name,
			     (unsigned long long)layout->total_size, (unsigned long long)TAKT_LANE_BYTES_MAX);
	else if (rc < 0)
		PyErr_Format(PyExc_ValueError, "lane '%s': kind %u (1 loop, 2 model) and %u slots (%d to %d) don't make a lane",
			     layout->name, layout->kind, layout->slot_count, (int)TAKT_SLOTS_MIN, (int)TAKT_SLOTS_MAX);
	return rc < 0 ? -1 : 0;
}

/* ---- to Python ---- */

static PyObject *describe_tensor(const struct takt_tensor_entry *t, int is_output)
{
	PyObject *dict = PyDict_New();

	if (!dict)
		return NULL;
	if (takt_py_put(dict, "name", PyUnicode_FromString(t->name)) < 0 ||
	    takt_py_put(dict, "dtype", PyLong_FromUnsignedLong(t->dtype)) < 0 ||
	    takt_py_put(dict, "dims", takt_py_dims(t->rank, t->dims)) < 0 ||
	    takt_py_put(dict, "bytes", PyLong_FromUnsignedLongLong(t->bytes)) < 0 ||
	    takt_py_put(dict, "offset",
			is_output ? Py_BuildValue("[KK]", (unsigned long long)t->offset_in_slot,
						  (unsigned long long)t->offset_in_slot_1)
				  : PyLong_FromUnsignedLongLong(t->offset_in_slot)) < 0)
		Py_CLEAR(dict);
	return dict;
}

static PyObject *describe_tensors(const struct takt_layout *layout, uint32_t from, uint32_t to)
{
	PyObject *list = PyList_New(0);

	for (uint32_t i = from; list && i < to; i++) {
		PyObject *item = describe_tensor(&layout->tensors[i], i >= layout->input_count);
		if (!item || PyList_Append(list, item) < 0)
			Py_CLEAR(list);
		Py_XDECREF(item);
	}
	return list;
}

static PyObject *describe_layout(const struct takt_layout *layout, int fd)
{
	const struct {
		const char *key;
		uint64_t value;
	} numbers[] = {
		{"fd", (uint64_t)fd},
		{"total_size", layout->total_size},
		{"slot_count", layout->slot_count},
		{"slot_stride", layout->slot_stride},
		{"slots_offset", layout->slots_offset},
		{"cursors_offset", layout->cursors_offset},
		{"submit_ring_offset", layout->submit_ring_offset},
		{"completion_ring_offset", layout->completion_ring_offset},
		{"ring_entries", layout->ring_entries},
		{"shapes_offset_in_slot", layout->shapes_offset_in_slot},
		{"kind", layout->kind},
		{"trigger", layout->trigger},
		{"period_ns", layout->period_ns},
		{"deadline_ns", layout->deadline_ns},
		{"jitter_ns", layout->jitter_ns},
		{"epoch", layout->epoch},
	};
	PyObject *dict = PyDict_New();

	for (size_t i = 0; dict && i < sizeof(numbers) / sizeof(numbers[0]); i++)
		if (takt_py_put(dict, numbers[i].key, PyLong_FromUnsignedLongLong(numbers[i].value)) < 0)
			Py_CLEAR(dict);
	if (!dict)
		return NULL;
	if (takt_py_put(dict, "name", PyUnicode_FromString(layout->name)) < 0 ||
	    takt_py_put(dict, "model", PyUnicode_FromString(layout->model_name)) < 0 ||
	    takt_py_put(dict, "dynamic", PyBool_FromLong(layout->dynamic)) < 0 ||
	    takt_py_put(dict, "inputs", describe_tensors(layout, 0, layout->input_count)) < 0 ||
	    takt_py_put(dict, "outputs", describe_tensors(layout, layout->input_count, layout->tensor_count)) < 0)
		Py_CLEAR(dict);
	return dict;
}

PyObject *takt_py_create_lane(PyObject *module, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"name",      "model",       "kind",      "inputs", "outputs", "slot_count", "dynamic",
				"period_ns", "deadline_ns", "jitter_ns", "epoch",  "trigger", NULL};
	struct takt_layout layout = {.slot_count = 4};
	unsigned long long period_ns = 0, deadline_ns = 0, jitter_ns = 0, epoch = 0;
	PyObject *name, *model, *inputs, *outputs, *result = NULL;
	int dynamic = 0, fd;

	(void)module;
	if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUIOO|$IpKKKKI", names, &name, &model, &layout.kind, &inputs,
					 &outputs, &layout.slot_count, &dynamic, &period_ns, &deadline_ns, &jitter_ns, &epoch,
					 &layout.trigger))
		return NULL;
	layout.dynamic = (uint32_t)dynamic;
	layout.period_ns = period_ns;
	layout.deadline_ns = deadline_ns;
	layout.jitter_ns = jitter_ns;
	layout.epoch = epoch;
	if (read_name(name, "lane", layout.name, sizeof(layout.name)) < 0 ||
	    read_name(model, "model", layout.model_name, sizeof(layout.model_name)) < 0 ||
	    read_tensors(inputs, outputs, &layout) < 0 || compute(&layout) < 0) {
		takt_layout_free(&layout);
		return NULL;
	}
	fd = takt_layout_create(&layout);
	if (fd < 0)
		result = takt_py_error(fd);
	else
		result = describe_layout(&layout, fd);
	if (fd >= 0 && !result)
		close(fd);
	takt_layout_free(&layout);
	return result;
}

/* ---- from Python ---- */

static int get_number(PyObject *dict, const char *key, uint64_t *out)
{
	PyObject *value = PyMapping_GetItemString(dict, key);
	int rc = value ? takt_py_u64(value, out) : -1;

	Py_XDECREF(value);
	return rc;
}

static int get_name(PyObject *dict, const char *key, char *out, size_t room)
{
	PyObject *value = PyMapping_GetItemString(dict, key);
	int rc = value ? read_name(value, key, out, room) : -1;

	Py_XDECREF(value);
	return rc;
}

static int get_tensors(PyObject *dict, struct takt_layout *layout)
{
	PyObject *inputs = PyMapping_GetItemString(dict, "inputs");
	PyObject *outputs = inputs ? PyMapping_GetItemString(dict, "outputs") : NULL;
	int rc = outputs ? read_tensors(inputs, outputs, layout) : -1;

	Py_XDECREF(inputs);
	Py_XDECREF(outputs);
	return rc;
}

int takt_py_read_layout(PyObject *dict, struct takt_layout *layout)
{
	uint64_t kind, trigger, slot_count, shapes, total_size;

	memset(layout, 0, sizeof(*layout));
	if (get_number(dict, "kind", &kind) < 0 || get_number(dict, "trigger", &trigger) < 0 ||
	    get_number(dict, "slot_count", &slot_count) < 0 || get_number(dict, "shapes_offset_in_slot", &shapes) < 0 ||
	    get_number(dict, "total_size", &total_size) < 0 || get_number(dict, "period_ns", &layout->period_ns) < 0 ||
	    get_number(dict, "deadline_ns", &layout->deadline_ns) < 0 ||
	    get_number(dict, "jitter_ns", &layout->jitter_ns) < 0 || get_number(dict, "epoch", &layout->epoch) < 0 ||
	    get_name(dict, "name", layout->name, sizeof(layout->name)) < 0 ||
	    get_name(dict, "model", layout->model_name, sizeof(layout->model_name)) < 0)
		return -1;
	layout->kind = kind > UINT32_MAX ? 0 : (uint32_t)kind;
	layout->trigger = (uint32_t)trigger;
	layout->slot_count = slot_count > UINT32_MAX ? 0 : (uint32_t)slot_count;
	layout->dynamic = shapes != 0;
	if (get_tensors(dict, layout) < 0 || compute(layout) < 0) {
		takt_layout_free(layout);
		return -1;
	}
	if (layout->total_size != total_size) {
		PyErr_Format(PyExc_ValueError, "layout of lane '%s' says %llu bytes, its tensors make %llu: another version's?",
			     layout->name, (unsigned long long)total_size, (unsigned long long)layout->total_size);
		takt_layout_free(layout);
		return -1;
	}
	return 0;
}
