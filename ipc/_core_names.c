/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_names.c: the numbers of takt.h and the layout of wire version 1 as dicts, so that Python has no table of its
 * own and a test can compare docs/wire.md with what the compiler made.
 */
#include "_core_client.h"
#include "core/message.h"

static PyObject *name_table(const char *(*name)(uint32_t), uint32_t from, uint32_t to)
{
	PyObject *dict = PyDict_New();

	for (uint32_t number = from; dict && number <= to; number++)
		if (strcmp(name(number), "unknown") != 0 &&
		    takt_py_put(dict, name(number), PyLong_FromUnsignedLong(number)) < 0)
			Py_CLEAR(dict);
	return dict;
}

/* clang-format off */
#define OFFSET(type, field) {#type "." #field, offsetof(struct type, field)}
#define SIZE(type) {#type, sizeof(struct type)}
static const struct {
	const char *name;
	size_t value;
} wire[] = {
	SIZE(takt_header), OFFSET(takt_header, magic), OFFSET(takt_header, version),
	OFFSET(takt_header, header_size), OFFSET(takt_header, total_size), OFFSET(takt_header, slot_count),
	OFFSET(takt_header, ring_entries), OFFSET(takt_header, tensor_count), OFFSET(takt_header, input_count),
	OFFSET(takt_header, kind), OFFSET(takt_header, area_count), OFFSET(takt_header, tensor_table_offset),
	OFFSET(takt_header, cursors_offset), OFFSET(takt_header, submit_ring_offset),
	OFFSET(takt_header, completion_ring_offset), OFFSET(takt_header, slots_offset),
	OFFSET(takt_header, slot_stride), OFFSET(takt_header, period_ns), OFFSET(takt_header, deadline_ns),
	OFFSET(takt_header, jitter_ns), OFFSET(takt_header, epoch), OFFSET(takt_header, trigger),
	OFFSET(takt_header, shapes_offset_in_slot), OFFSET(takt_header, name_offset),
	OFFSET(takt_header, model_name_offset), OFFSET(takt_header, reserved),
	SIZE(takt_tensor_entry), OFFSET(takt_tensor_entry, name), OFFSET(takt_tensor_entry, dtype),
	OFFSET(takt_tensor_entry, rank), OFFSET(takt_tensor_entry, dims), OFFSET(takt_tensor_entry, offset_in_slot),
	OFFSET(takt_tensor_entry, bytes), OFFSET(takt_tensor_entry, offset_in_slot_1),
	SIZE(takt_cursors), OFFSET(takt_cursors, submit_tail), OFFSET(takt_cursors, completion_head),
	OFFSET(takt_cursors, client_waiting), OFFSET(takt_cursors, client_wait_mode),
	OFFSET(takt_cursors, submit_head), OFFSET(takt_cursors, completion_tail),
	OFFSET(takt_cursors, daemon_sleeping), OFFSET(takt_cursors, lane_state),
	OFFSET(takt_cursors, detach_reason),
	SIZE(takt_submission), OFFSET(takt_submission, sequence), OFFSET(takt_submission, deadline_ns),
	OFFSET(takt_submission, submitted_ns), OFFSET(takt_submission, slot), OFFSET(takt_submission, flags),
	OFFSET(takt_submission, zero),
	SIZE(takt_completion), OFFSET(takt_completion, sequence), OFFSET(takt_completion, slot),
	OFFSET(takt_completion, status), OFFSET(takt_completion, flags), OFFSET(takt_completion, path),
	OFFSET(takt_completion, cause), OFFSET(takt_completion, area), OFFSET(takt_completion, taken_ns),
	OFFSET(takt_completion, started_ns), OFFSET(takt_completion, ended_ns),
	OFFSET(takt_completion, deadline_ns), OFFSET(takt_completion, cause_detail), OFFSET(takt_completion, epoch),
	SIZE(takt_shape), OFFSET(takt_shape, rank), OFFSET(takt_shape, pad), OFFSET(takt_shape, dims),
	SIZE(takt_message), OFFSET(takt_message, magic), OFFSET(takt_message, type), OFFSET(takt_message, reserved),
	OFFSET(takt_message, request_id), OFFSET(takt_message, code),
	SIZE(takt_hello), OFFSET(takt_hello, min_version), OFFSET(takt_hello, max_version),
	OFFSET(takt_hello, client),
	SIZE(takt_welcome), OFFSET(takt_welcome, version), OFFSET(takt_welcome, pid), OFFSET(takt_welcome, node),
	SIZE(takt_attach_request), OFFSET(takt_attach_request, kind), OFFSET(takt_attach_request, wait_mode),
	OFFSET(takt_attach_request, name),
	SIZE(takt_attached), OFFSET(takt_attached, lane_id), OFFSET(takt_attached, total_size),
	OFFSET(takt_attached, memfd_bytes), OFFSET(takt_attached, token),
	SIZE(takt_claim), OFFSET(takt_claim, lane_id), OFFSET(takt_claim, token),
	SIZE(takt_local_answer), OFFSET(takt_local_answer, path), OFFSET(takt_local_answer, reserved),
	SIZE(takt_constant), OFFSET(takt_constant, bytes), OFFSET(takt_constant, reserved),
	SIZE(takt_lane_id), OFFSET(takt_lane_id, lane_id),
	SIZE(takt_list_request), OFFSET(takt_list_request, kind), OFFSET(takt_list_request, offset),
	SIZE(takt_listing), OFFSET(takt_listing, total), OFFSET(takt_listing, next_offset),
};
/* clang-format on */

static PyObject *wire_table(void)
{
	PyObject *dict = PyDict_New();

	for (size_t i = 0; dict && i < sizeof(wire) / sizeof(wire[0]); i++)
		if (takt_py_put(dict, wire[i].name, PyLong_FromSize_t(wire[i].value)) < 0)
			Py_CLEAR(dict);
	return dict;
}

static PyObject *dtype_bits_table(void)
{
	PyObject *dict = PyDict_New();

	for (uint32_t number = 0; dict && number <= 63; number++) {
		PyObject *key = takt_dtype_bits(number) ? PyLong_FromUnsignedLong(number) : NULL;
		PyObject *bits = key ? PyLong_FromUnsignedLong(takt_dtype_bits(number)) : NULL;

		if (bits && PyDict_SetItem(dict, key, bits) < 0)
			Py_CLEAR(dict);
		Py_XDECREF(bits);
		Py_XDECREF(key);
	}
	return dict;
}

static int add(PyObject *module, const char *name, PyObject *value)
{
	int result = value ? PyModule_AddObjectRef(module, name, value) : -1;

	Py_XDECREF(value);
	return result;
}

int takt_py_names_init(PyObject *module)
{
	if (add(module, "STATUSES", name_table(takt_status_name, 0, TAKT_PENDING)) < 0 ||
	    add(module, "PATHS", name_table(takt_path_name, 0, TAKT_PATH_CONSTANT)) < 0 ||
	    add(module, "CAUSES", name_table(takt_cause_name, 0, TAKT_CAUSE_MACHINE)) < 0 ||
	    add(module, "DTYPES", name_table(takt_dtype_name, 0, 63)) < 0 ||
	    add(module, "DTYPE_BITS", dtype_bits_table()) < 0 || add(module, "WIRE", wire_table()) < 0)
		return -1;
	return 0;
}
