/* SPDX-License-Identifier: Apache-2.0
 *
 * _core.c: the Python module taktd.ipc._core. This file: small functions and what the other files share.
 * _core_layout.c: lane layouts. _core_server.c, _core_succession.c: the executor's side. _core_client.c: the client's side.
 */
#include "_core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "_core_server.h"

PyObject *takt_py_error(int rc)
{
	errno = -rc;
	return PyErr_SetFromErrno(PyExc_OSError);
}

int takt_py_u64(PyObject *value, uint64_t *out)
{
	*out = PyLong_AsUnsignedLongLong(value);
	return *out == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int read_below(PyObject *value, uint64_t limit, uint64_t *out)
{
	if (takt_py_u64(value, out) < 0)
		return -1;
	if (*out <= limit)
		return 0;
	PyErr_Format(PyExc_OverflowError, "%llu: at most %llu", (unsigned long long)*out, (unsigned long long)limit);
	return -1;
}

int takt_py_u32(PyObject *value, uint32_t *out)
{
	uint64_t wide;
	int rc = read_below(value, UINT32_MAX, &wide);

	*out = (uint32_t)wide;
	return rc;
}

int takt_py_u16(PyObject *value, uint16_t *out)
{
	uint64_t wide;
	int rc = read_below(value, UINT16_MAX, &wide);

	*out = (uint16_t)wide;
	return rc;
}

int takt_py_arguments(const char *function, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most)
{
	if (given >= least && given <= most)
		return 0;
	PyErr_Format(PyExc_TypeError, "%s() takes %zd to %zd arguments (%zd given)", function, least, most, given);
	return -1;
}

int takt_py_put(PyObject *dict, const char *key, PyObject *value)
{
	int rc = value ? PyDict_SetItemString(dict, key, value) : -1;

	Py_XDECREF(value);
	return rc;
}

PyObject *takt_py_tuple(Py_ssize_t count, PyObject **items)
{
	PyObject *tuple = PyTuple_New(count);
	int failed = !tuple;

	for (Py_ssize_t i = 0; i < count; i++)
		failed |= !items[i];
	for (Py_ssize_t i = 0; i < count; i++) {
		if (failed)
			Py_XDECREF(items[i]);
		else
			PyTuple_SetItem(tuple, i, items[i]);
	}
	if (failed)
		Py_CLEAR(tuple);
	return tuple;
}

static PyObject *descriptor(int fd)
{
	return fd < 0 ? takt_py_error(fd) : PyLong_FromLong(fd);
}

static PyObject *core_now(PyObject *module, PyObject *ignored)
{
	(void)module;
	(void)ignored;
	return PyLong_FromUnsignedLongLong(takt_clock_ns());
}

static PyObject *core_wake_pair(PyObject *module, PyObject *ignored)
{
	int fds[2];

	(void)module;
	(void)ignored;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) < 0)
		return takt_py_error(-errno);
	return Py_BuildValue("(ii)", fds[0], fds[1]);
}

static PyObject *core_create_ledger(PyObject *module, PyObject *lanes)
{
	uint32_t count;

	(void)module;
	return takt_py_u32(lanes, &count) < 0 ? NULL : descriptor(takt_ledger_create(count));
}

static PyObject *core_create_stats(PyObject *module, PyObject *blocks)
{
	uint32_t count;

	(void)module;
	return takt_py_u32(blocks, &count) < 0 ? NULL : descriptor(takt_stats_create(count));
}

static PyObject *core_create_journal(PyObject *module, PyObject *records)
{
	uint32_t count;

	(void)module;
	return takt_py_u32(records, &count) < 0 ? NULL : descriptor(takt_journal_create(count));
}

/* ---- statistics ---- */

static PyObject *describe_buckets(const struct takt_hist *hist)
{
	PyObject *list = PyList_New(0);

	for (uint32_t i = 0; list && i < TAKT_HIST_BUCKETS; i++) {
		uint64_t count = takt_load_u64(&hist->buckets[i]);
		PyObject *item;
		if (count == 0)
			continue;
		item = Py_BuildValue("(KK)", (unsigned long long)takt_hist_upper_ns(i), (unsigned long long)count);
		if (!item || PyList_Append(list, item) < 0)
			Py_CLEAR(list);
		Py_XDECREF(item);
	}
	return list;
}

static PyObject *describe_hist(const struct takt_hist *hist)
{
	PyObject *dict = PyDict_New();

	if (dict && (takt_py_put(dict, "count", PyLong_FromUnsignedLongLong(takt_load_u64(&hist->count))) < 0 ||
		     takt_py_put(dict, "sum_ns", PyLong_FromUnsignedLongLong(takt_load_u64(&hist->sum_ns))) < 0 ||
		     takt_py_put(dict, "max_ns", PyLong_FromUnsignedLongLong(takt_load_u64(&hist->max_ns))) < 0 ||
		     takt_py_put(dict, "buckets", describe_buckets(hist)) < 0))
		Py_CLEAR(dict);
	return dict;
}

static PyObject *describe_misses(const struct takt_stats_block *block)
{
	PyObject *dict = PyDict_New();

	for (uint32_t i = 0; dict && i < TAKT_STATS_CAUSES; i++) {
		const char *name = i == TAKT_CAUSE_NONE ? "none" : takt_cause_name(i);
		if (takt_py_put(dict, name, PyLong_FromUnsignedLongLong(takt_load_u64(&block->misses[i]))) < 0)
			Py_CLEAR(dict);
	}
	return dict;
}

static PyObject *describe_batches(const struct takt_stats_block *block)
{
	PyObject *list = PyList_New(0);

	for (uint32_t i = 0; list && i < TAKT_STATS_BATCH_SIZES; i++) {
		const struct takt_batches *batches = &block->batches[i];
		uint64_t dispatches = takt_load_u64(&batches->dispatches);
		PyObject *item;
		if (!dispatches)
			continue;
		item = Py_BuildValue("(IKK)", (unsigned int)takt_stats_batch_size(i), (unsigned long long)dispatches,
				     (unsigned long long)takt_load_u64(&batches->run_ns));
		if (!item || PyList_Append(list, item) < 0)
			Py_CLEAR(list);
		Py_XDECREF(item);
	}
	return list;
}

static PyObject *describe_block(const struct takt_stats_block *block)
{
	const struct {
		const char *key;
		const uint64_t *counter;
	} counters[] = {
		{"submitted", &block->submitted}, {"late", &block->late},	  {"early", &block->early},
		{"overrun", &block->overrun},	  {"stand_in", &block->stand_in}, {"orphaned", &block->orphaned},
		{"batched_jobs", &block->batched_jobs}, {"batched_run_ns", &block->batched_run_ns},
	};
	PyObject *dict = PyDict_New();

	for (size_t i = 0; dict && i < sizeof(counters) / sizeof(counters[0]); i++)
		if (takt_py_put(dict, counters[i].key, PyLong_FromUnsignedLongLong(takt_load_u64(counters[i].counter))) < 0)
			Py_CLEAR(dict);
	for (uint32_t i = 0; dict && i < TAKT_STATS_STATUSES; i++)
		if (takt_py_put(dict, takt_status_name(i), PyLong_FromUnsignedLongLong(takt_load_u64(&block->status[i]))) < 0)
			Py_CLEAR(dict);
	if (dict && (takt_py_put(dict, "misses", describe_misses(block)) < 0 ||
		     takt_py_put(dict, "batches", describe_batches(block)) < 0 ||
		     takt_py_put(dict, "queue_us", describe_hist(&block->queue)) < 0 ||
		     takt_py_put(dict, "run_us", describe_hist(&block->run)) < 0 ||
		     takt_py_put(dict, "total_us", describe_hist(&block->total)) < 0))
		Py_CLEAR(dict);
	return dict;
}

static PyObject *core_stats_read(PyObject *module, PyObject *args)
{
	struct takt_stats_page *page;
	unsigned int block;
	uint64_t size;
	PyObject *result;
	int fd, rc;

	(void)module;
	if (!PyArg_ParseTuple(args, "iI", &fd, &block))
		return NULL;
	rc = takt_stats_open(fd, 0, &page, &size);
	if (rc < 0)
		return takt_py_error(rc);
	if (block < page->block_count)
		result = describe_block(&page->blocks[block]);
	else
		result = PyErr_Format(PyExc_ValueError, "block %u: there are %u", block, page->block_count);
	takt_unmap(page, size);
	return result;
}

/* ---- journal ---- */

enum { JOURNAL_READ_MAX = 4096 }; /* records per call */

static PyObject *core_journal_read(PyObject *module, PyObject *args)
{
	struct takt_journal_page *page;
	struct takt_record *records;
	unsigned long long cursor_in;
	uint64_t cursor, size, lost = 0;
	PyObject *result = NULL;
	uint32_t count;
	int fd, rc;

	(void)module;
	if (!PyArg_ParseTuple(args, "iK", &fd, &cursor_in))
		return NULL;
	rc = takt_journal_open(fd, 0, &page, &size);
	if (rc < 0)
		return takt_py_error(rc);
	cursor = cursor_in;
	records = malloc(JOURNAL_READ_MAX * sizeof(*records));
	if (records) {
		count = takt_journal_read(page, &cursor, records, JOURNAL_READ_MAX, &lost);
		result = Py_BuildValue("(y#KK)", records, (Py_ssize_t)(count * sizeof(*records)), (unsigned long long)cursor,
				       (unsigned long long)lost);
	} else {
		PyErr_NoMemory();
	}
	free(records);
	takt_unmap(page, size);
	return result;
}

/* ---- rights of the calling thread ---- */

static PyObject *core_lock_memory(PyObject *module, PyObject *ignored)
{
	(void)module;
	(void)ignored;
	return PyLong_FromLong(-takt_lock_memory());
}

static PyObject *core_realtime(PyObject *module, PyObject *args)
{
	int priority, core, rc;

	(void)module;
	if (!PyArg_ParseTuple(args, "ii", &priority, &core))
		return NULL;
	rc = takt_realtime(priority, core);
	if (rc < 0)
		return takt_py_error(rc);
	Py_RETURN_NONE;
}

static PyObject *core_switched_out(PyObject *module, PyObject *ignored)
{
	struct rusage usage;

	(void)module;
	(void)ignored;
	if (getrusage(RUSAGE_THREAD, &usage) < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	return PyLong_FromLong(usage.ru_nivcsw);
}

static PyObject *core_thread_cpu_ns(PyObject *module, PyObject *ignored)
{
	struct timespec used;

	(void)module;
	(void)ignored;
	if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) < 0)
		return PyErr_SetFromErrno(PyExc_OSError);
	return PyLong_FromUnsignedLongLong((uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec);
}

static PyMethodDef functions[] = {
	{"now", core_now, METH_NOARGS, NULL},
	{"create_lane", (PyCFunction)(void (*)(void))takt_py_create_lane, METH_VARARGS | METH_KEYWORDS, NULL},
	{"wake_pair", core_wake_pair, METH_NOARGS, NULL},
	{"create_ledger", core_create_ledger, METH_O, NULL},
	{"create_stats", core_create_stats, METH_O, NULL},
	{"create_journal", core_create_journal, METH_O, NULL},
	{"stats_read", core_stats_read, METH_VARARGS, NULL},
	{"journal_read", core_journal_read, METH_VARARGS, NULL},
	TAKT_PY_SUCCESSION_FUNCTIONS,
	{"lock_memory", core_lock_memory, METH_NOARGS, NULL},
	{"realtime", core_realtime, METH_VARARGS, NULL},
	{"switched_out", core_switched_out, METH_NOARGS, NULL},
	{"thread_cpu_ns", core_thread_cpu_ns, METH_NOARGS, NULL},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module_def = {
	PyModuleDef_HEAD_INIT,
	.m_name = "taktd.ipc._core",
	.m_doc = "The C core of taktd's lanes. See _core.pyi.",
	.m_size = -1,
	.m_methods = functions,
};

PyMODINIT_FUNC PyInit__core(void)
{
	PyObject *module = PyModule_Create(&module_def);

	if (module && (takt_py_server_init(module) < 0 || takt_py_witness_init(module) < 0))
		Py_CLEAR(module);
#ifdef TAKT_CORE_CLIENT
	if (module && takt_py_client_init(module) < 0)
		Py_CLEAR(module);
#endif
	return module;
}
