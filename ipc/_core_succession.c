/* SPDX-License-Identifier: Apache-2.0
 *
 * _core_succession.c: methods of taktd.ipc._core.Server for lanes on standby and for ledgers that pass from one executor
 * to another, and the supervisor's three functions for the same.
 */
#include "_core_server.h"

static PyObject *none_or(int rc, const char *what, uint32_t number)
{
	if (rc >= 0)
		Py_RETURN_NONE;
	if (rc == -ENOENT)
		return PyErr_Format(PyExc_ValueError, "%s %u: there is none, or it was not joined", what, number);
	return takt_py_error(rc);
}

/* ---- lanes on standby ---- */

PyObject *takt_py_open_ledger(PyObject *self, PyObject *args)
{
	struct takt_server *server = takt_py_enter(self);
	int ledger_fd, stats_fd, rc;

	if (!server || !PyArg_ParseTuple(args, "ii", &ledger_fd, &stats_fd))
		return NULL;
	rc = takt_server_open_ledger(server, ledger_fd, stats_fd);
	return rc < 0 ? takt_py_error(rc) : Py_BuildValue("(iI)", rc, server->homes[rc].first_lane);
}

static PyObject *change_lane(PyObject *self, PyObject *number, int (*change)(struct takt_server *, uint32_t))
{
	struct takt_server *server = takt_py_enter(self);
	uint32_t lane;
	int rc;

	if (!server || takt_py_u32(number, &lane) < 0)
		return NULL;
	rc = change(server, lane);
	if (rc == -ENOENT)
		return PyErr_Format(PyExc_ValueError, "lane %u is not served", lane);
	if (rc == -EALREADY)
		return PyErr_Format(PyExc_ValueError, "lane %u is %s already", lane,
				    change == takt_server_activate ? "active" : "dormant");
	return rc < 0 ? takt_py_error(rc) : PyLong_FromLong(rc);
}

PyObject *takt_py_activate(PyObject *self, PyObject *lane)
{
	return change_lane(self, lane, takt_server_activate);
}

PyObject *takt_py_release(PyObject *self, PyObject *lane)
{
	return change_lane(self, lane, takt_server_release);
}

PyObject *takt_py_set_area(PyObject *self, PyObject *args)
{
	struct takt_server *server = takt_py_enter(self);
	unsigned int lane, area;
	int rc;

	if (!server || !PyArg_ParseTuple(args, "II", &lane, &area))
		return NULL;
	rc = takt_server_set_area(server, lane, area);
	if (rc < 0)
		return PyErr_Format(PyExc_ValueError, "lane %u, area %u: the lane must be dormant, the area 0 or 1", lane, area);
	Py_RETURN_NONE;
}

PyObject *takt_py_set_budget(PyObject *self, PyObject *args)
{
	struct takt_server *server = takt_py_enter(self);
	struct takt_served *served;
	unsigned int lane;
	unsigned long long budget_ns;

	if (!server || !PyArg_ParseTuple(args, "IK", &lane, &budget_ns))
		return NULL;
	served = takt_server_lane(server, lane);
	if (!served || budget_ns > TAKT_HANG_NS_MAX)
		return PyErr_Format(PyExc_ValueError, "lane %u, budget %llu ns: the lane must be served, the budget at most 2^62",
				    lane, budget_ns);
	served->budget_ns = budget_ns;
	Py_RETURN_NONE;
}

/* ---- succession, an executor's side ---- */

PyObject *takt_py_join(PyObject *self, PyObject *args, PyObject *kwargs)
{
	static char *names[] = {"ledger", "member", "priority", "cores", "hang_after_ns", NULL};
	struct takt_server *server = takt_py_enter(self);
	unsigned int ledger, member;
	unsigned long long hang_after_ns;
	PyObject *cores;
	cpu_set_t set;
	Py_ssize_t count;
	int priority;

	if (!server || !PyArg_ParseTupleAndKeywords(args, kwargs, "IIiOK", names, &ledger, &member, &priority, &cores,
						    &hang_after_ns))
		return NULL;
	count = takt_py_cores(cores, &set);
	if (count < 0)
		return NULL;
	return none_or(takt_server_join(server, ledger, member, priority, count > 0 ? &set : NULL, hang_after_ns), "ledger",
		       ledger);
}

PyObject *takt_py_leave(PyObject *self, PyObject *number)
{
	struct takt_server *server = takt_py_enter(self);
	uint32_t ledger;

	if (!server || takt_py_u32(number, &ledger) < 0)
		return NULL;
	return none_or(takt_server_leave(server, ledger), "ledger", ledger);
}

PyObject *takt_py_set_hang_after(PyObject *self, PyObject *args)
{
	struct takt_server *server = takt_py_enter(self);
	unsigned int ledger;
	unsigned long long hang_after_ns;

	if (!server || !PyArg_ParseTuple(args, "IK", &ledger, &hang_after_ns))
		return NULL;
	return none_or(takt_server_set_hang_after(server, ledger, hang_after_ns), "ledger", ledger);
}

PyObject *takt_py_set_pidfd(PyObject *self, PyObject *args)
{
	struct takt_server *server = takt_py_enter(self);
	unsigned int ledger, member;
	int pidfd;

	if (!server || !PyArg_ParseTuple(args, "IIi", &ledger, &member, &pidfd))
		return NULL;
	return none_or(takt_server_set_pidfd(server, ledger, member, pidfd), "ledger", ledger);
}

static const char *name_of(uint32_t news)
{
	switch (news) {
	case TAKT_NEWS_CLEAN:
		return "clean";
	case TAKT_NEWS_DIED:
		return "died";
	case TAKT_NEWS_HUNG:
		return "hung";
	case TAKT_NEWS_ASKED:
		return "asked";
	default:
		return "";
	}
}

PyObject *takt_py_successions(PyObject *self, PyObject *ignored)
{
	struct takt_server *server = takt_py_enter(self);
	PyObject *list = server ? PyList_New(0) : NULL;

	(void)ignored;
	for (uint32_t i = 0; list && i < server->home_count; i++) {
		/* In the order in which they can happen: first it is ours, then we are asked for it. */
		for (uint32_t news = takt_server_news(server, i); list && news != 0; news &= news - 1) {
			PyObject *item = Py_BuildValue("(Is)", i, name_of(news & -news));
			if (!item || PyList_Append(list, item) < 0)
				Py_CLEAR(list);
			Py_XDECREF(item);
		}
	}
	return list;
}

PyObject *takt_py_hand_over(PyObject *self, PyObject *number)
{
	struct takt_server *server = takt_py_enter(self);
	uint32_t ledger;

	if (!server || takt_py_u32(number, &ledger) < 0)
		return NULL;
	return none_or(takt_server_hand_over(server, ledger), "ledger", ledger);
}

PyObject *takt_py_set_control(PyObject *self, PyObject *descriptor)
{
	struct takt_server *server = takt_py_enter(self);
	const long control_fd = server ? PyLong_AsLong(descriptor) : -1;
	int rc;

	if (!server || (control_fd == -1 && PyErr_Occurred()))
		return NULL;
	rc = takt_server_set_control(server, (int)control_fd);
	if (rc < 0)
		return takt_py_error(rc);
	Py_RETURN_NONE;
}

/* ---- succession, the supervisor's side ---- */

static PyObject *change_succession(PyObject *args, void (*change)(struct takt_succession *, uint32_t))
{
	struct takt_ledger_page *page;
	unsigned int member;
	int ledger_fd, rc;

	if (!PyArg_ParseTuple(args, "iI", &ledger_fd, &member))
		return NULL;
	rc = takt_succession_open(ledger_fd, &page);
	if (rc < 0)
		return takt_py_error(rc);
	change(&page->succession, member);
	takt_unmap(page, sizeof(*page));
	Py_RETURN_NONE;
}

PyObject *takt_py_succession_set(PyObject *module, PyObject *args)
{
	(void)module;
	return change_succession(args, takt_succession_set);
}

PyObject *takt_py_succession_ask_release(PyObject *module, PyObject *args)
{
	(void)module;
	return change_succession(args, takt_succession_ask_release);
}

PyObject *takt_py_succession_state(PyObject *module, PyObject *descriptor)
{
	struct takt_ledger_page *page;
	struct takt_succession *now;
	PyObject *dict;
	uint32_t ledger_fd;
	int rc;

	(void)module;
	if (takt_py_u32(descriptor, &ledger_fd) < 0)
		return NULL;
	rc = takt_succession_open((int)ledger_fd, &page);
	if (rc < 0)
		return takt_py_error(rc);
	now = &page->succession;
	dict = Py_BuildValue(
		"{sIsIsIsIsKsssKsKsKsKsK}", "owner", takt_load_state(&now->owner), "successor", takt_load_word(&now->successor),
		"release_asked", takt_load_word(&now->release_asked), "fenced", takt_load_word(&now->fenced), "since_ns",
		(unsigned long long)takt_load_u64(&now->since_ns), "how", name_of(takt_load_word(&now->how)), "takeovers",
		(unsigned long long)takt_load_u64(&now->takeovers), "fences", (unsigned long long)takt_load_u64(&now->fences),
		"progress", (unsigned long long)takt_load_u64(&now->progress), "run_started_ns",
		(unsigned long long)takt_load_u64(&now->run_started_ns), "run_budget_ns",
		(unsigned long long)takt_load_u64(&now->run_budget_ns));
	takt_unmap(page, sizeof(*page));
	return dict;
}
