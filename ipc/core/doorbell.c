/* SPDX-License-Identifier: Apache-2.0
 *
 * doorbell.c: how an executor is woken by its clients and wakes them.
 *
 * A lane is either active (on the dense list that every scan reads; its client need not ring) or dormant (its
 * daemon_sleeping word stays 1, so its client rings, and only its descriptor is watched). Lanes without entries for a
 * while become dormant, so that hundreds of registered lanes cost a busy loop nothing. Before the executor sleeps it sets
 * daemon_sleeping on the active lanes too, and looks at their rings once more (Dekker: lib.h).
 *
 * A client can ring without end. Doorbells beyond the jobs they announce are counted per lane; beyond the budget the
 * descriptor leaves the epoll set for TAKT_MUTE_NS and the lane's ring is looked at by timer instead: bounded work, and
 * nothing that is really there is missed.
 *
 * Rejected: one descriptor shared by all clients (one of them scribbles on it for all), futex_waitv (Linux 5.16), an
 * eventfd (its O_NONBLOCK belongs to the client as well, and then the daemon's write hangs).
 */
#include "server.h"

#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

void takt_doorbell_wake_client(const struct takt_served *lane)
{
	struct takt_cursors *cursors = lane->rings.cursors;
	uint32_t waiting;

	takt_dekker_fence(); /* completion_tail before client_waiting; the client: waiting before tail */
	waiting = takt_load_word(&cursors->client_waiting);
	if (waiting == TAKT_WAITING_FUTEX) {
		/* One waiter: a client that queues up thousands must not have us walk them all. */
		syscall(SYS_futex, (uint32_t *)&cursors->completion_tail, FUTEX_WAKE, 1, NULL, NULL, 0);
	} else if (waiting == TAKT_WAITING_BYTE) {
		/* A full buffer is fine: then the descriptor is readable already. */
		(void)!send(lane->wake_fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
	}
}

/* ---- the epoll set and the active list ---- */

int takt_doorbell_listen(struct takt_server *server, struct takt_served *lane)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = lane->index};

	if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, lane->wake_fd, &event) < 0)
		return -errno;
	lane->listening = 1;
	return 0;
}

void takt_doorbell_ignore(struct takt_server *server, struct takt_served *lane)
{
	if (lane->muted_until_ns != 0) {
		lane->muted_until_ns = 0;
		server->muted_count--;
	}
	if (lane->listening)
		epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, lane->wake_fd, NULL);
	lane->listening = 0;
}

void takt_doorbell_activate(struct takt_server *server, struct takt_served *lane, uint64_t now_ns)
{
	if (lane->active_at != TAKT_DORMANT || lane->closed)
		return;
	takt_store_word(&lane->rings.cursors->daemon_sleeping, 0);
	lane->active_at = server->active_count;
	lane->active_since_ns = now_ns;
	lane->last_entry_ns = now_ns;
	server->active[server->active_count++] = lane->index;
}

void takt_doorbell_deactivate(struct takt_server *server, struct takt_served *lane)
{
	uint32_t last;

	if (lane->active_at == TAKT_DORMANT)
		return;
	last = server->active[--server->active_count];
	server->active[lane->active_at] = last;
	server->lanes[last]->active_at = lane->active_at;
	lane->active_at = TAKT_DORMANT;
}

/* Lanes that nobody uses leave the list; a client that submits right now either sees the flag or is seen. */
static void rest_idle(struct takt_server *server, uint64_t now_ns)
{
	for (uint32_t i = server->active_count; i-- > 0;) {
		struct takt_served *lane = server->lanes[server->active[i]];
		if (lane->muted_until_ns != 0 || !lane->listening || now_ns < lane->last_entry_ns + lane->idle_limit_ns)
			continue;
		takt_store_word(&lane->rings.cursors->daemon_sleeping, 1);
		takt_dekker_fence(); /* sleeping before tail; the client: tail before sleeping */
		if (takt_served_has_entries(lane))
			takt_store_word(&lane->rings.cursors->daemon_sleeping, 0);
		else
			takt_doorbell_deactivate(server, lane);
	}
}

static void unmute(struct takt_server *server, uint64_t now_ns)
{
	for (uint32_t i = 0; server->muted_count > 0 && i < server->active_count; i++) {
		struct takt_served *lane = server->lanes[server->active[i]];
		if (lane->muted_until_ns == 0 || now_ns < lane->muted_until_ns)
			continue;
		lane->muted_until_ns = 0;
		server->muted_count--;
		takt_doorbell_listen(server, lane); /* cannot fail for want of a slot: it just gave one up; else it stays active */
	}
}

/* ---- being woken ---- */

static uint32_t drain(const struct takt_served *lane)
{
	uint32_t bells = 0;
	char byte;

	/* A longer message is cut off by the kernel, and gone. */
	while (bells < TAKT_BELL_DRAIN_MAX && recv(lane->wake_fd, &byte, 1, MSG_DONTWAIT) >= 0)
		bells++;
	return bells;
}

static void count_bells(struct takt_server *server, struct takt_served *lane, uint32_t bells, uint64_t now_ns)
{
	if (now_ns >= lane->bell_window_ns + TAKT_BELL_WINDOW_NS) {
		lane->bell_window_ns = now_ns;
		lane->bells = 0;
		lane->bell_credit = 0;
	}
	lane->bells += bells;
	if (lane->bells <= lane->bell_credit + TAKT_BELL_BUDGET)
		return;
	takt_doorbell_ignore(server, lane);
	lane->muted_until_ns = now_ns + TAKT_MUTE_NS;
	server->muted_count++;
	takt_doorbell_activate(server, lane, now_ns); /* its ring is scanned while nobody hears it ring */
}

static void hear(struct takt_server *server, struct takt_served *lane, uint32_t events, uint64_t now_ns)
{
	if (events & EPOLLIN)
		count_bells(server, lane, drain(lane), now_ns);
	if (events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) {
		takt_doorbell_ignore(server, lane); /* once: it would be readable for ever */
		server->events |= TAKT_WOKE_HANGUP;
	}
	if (takt_served_has_entries(lane))
		takt_doorbell_activate(server, lane, now_ns);
}

static int look(struct takt_server *server, const struct timespec *timeout)
{
	struct epoll_event events[TAKT_EVENTS_MAX];
	uint64_t now_ns;
	int count = (int)syscall(SYS_epoll_pwait2, server->epoll_fd, events, TAKT_EVENTS_MAX, timeout, NULL, 0);

	if (count < 0 && (errno == ENOSYS || errno == EPERM)) {
		/* Before Linux 5.11, or a sandbox that does not know it: ppoll has nanoseconds too. */
		struct pollfd ready = {.fd = server->epoll_fd, .events = POLLIN};
		count = ppoll(&ready, 1, timeout, NULL);
		if (count > 0)
			count = epoll_wait(server->epoll_fd, events, TAKT_EVENTS_MAX, 0);
	}
	now_ns = takt_clock_ns();
	server->looked_ns = now_ns;
	if (count < 0)
		return -errno;
	for (int i = 0; i < count; i++) {
		if (events[i].data.u64 == TAKT_EPOLL_CONTROL)
			server->events |= TAKT_WOKE_CONTROL;
		else if (events[i].data.u64 == TAKT_EPOLL_SUCCESSION)
			takt_succession_heard(server, now_ns);
		else if (server->lanes[events[i].data.u64])
			hear(server, server->lanes[events[i].data.u64], events[i].events, now_ns);
	}
	return count;
}

void takt_doorbell_tend(struct takt_server *server, uint64_t now_ns)
{
	static const struct timespec at_once = {0, 0};

	if (now_ns >= server->tended_ns + TAKT_TEND_NS) {
		server->tended_ns = now_ns;
		unmute(server, now_ns);
		rest_idle(server, now_ns);
	}
	/* Dormant lanes are heard only here while the executor never sleeps. */
	if (now_ns >= server->looked_ns + TAKT_LOOK_NS && server->lane_count > server->active_count)
		look(server, &at_once);
}

/* ---- waiting ---- */

static int any_entries(const struct takt_server *server)
{
	for (uint32_t i = 0; i < server->active_count; i++)
		if (takt_served_has_entries(server->lanes[server->active[i]]))
			return 1;
	return 0;
}

static void set_sleeping(const struct takt_server *server, uint32_t sleeping)
{
	for (uint32_t i = 0; i < server->active_count; i++)
		takt_store_word(&server->lanes[server->active[i]]->rings.cursors->daemon_sleeping, sleeping);
}

static uint64_t wake_up_ns(const struct takt_server *server, uint64_t now_ns, uint64_t until_ns)
{
	uint64_t scan_ns = now_ns + TAKT_MUTED_SCAN_NS;

	return server->muted_count > 0 && (until_ns == 0 || scan_ns < until_ns) ? scan_ns : until_ns;
}

/* Sleeps once, if nothing is there. -EINTR: a signal came. */
static int sleep_until(struct takt_server *server, uint64_t until_ns)
{
	struct timespec timeout;
	uint64_t now_ns, wake_ns;
	int rc = 0;

	set_sleeping(server, 1);
	takt_dekker_fence(); /* sleeping before tails; the client: tail before sleeping */
	now_ns = takt_clock_ns();
	wake_ns = wake_up_ns(server, now_ns, until_ns);
	if (!any_entries(server) && (wake_ns == 0 || wake_ns > now_ns)) {
		server->all_empty_ns = now_ns;
		if (wake_ns != 0) {
			timeout.tv_sec = (time_t)((wake_ns - now_ns) / UINT64_C(1000000000));
			timeout.tv_nsec = (long)((wake_ns - now_ns) % UINT64_C(1000000000));
		}
		rc = look(server, wake_ns != 0 ? &timeout : NULL);
		server->slept_ns += server->looked_ns - now_ns;
	}
	set_sleeping(server, 0);
	return rc;
}

int takt_server_wait(struct takt_server *server, uint64_t until_ns, uint64_t spin_until_ns)
{
	static const struct timespec at_once = {0, 0};

	for (;;) {
		uint64_t now_ns = takt_clock_ns();
		uint32_t woke = 0;

		takt_server_alive(server);
		/* Before the rings: a client that always has entries there must not keep the supervisor out. */
		if (now_ns >= server->looked_ns + TAKT_LOOK_NS)
			look(server, &at_once);
		if (now_ns >= server->tended_ns + TAKT_TEND_NS)
			takt_doorbell_tend(server, now_ns);
		if (any_entries(server))
			woke = TAKT_WOKE_SUBMISSIONS;
		else
			server->all_empty_ns = now_ns;
		woke |= server->events;
		server->events = 0;
		if (woke != 0)
			return (int)woke;
		if (until_ns != 0 && now_ns >= until_ns)
			return TAKT_WOKE_TIMEOUT;
		if (now_ns < spin_until_ns)
			takt_cpu_pause();
		else if (sleep_until(server, until_ns) == -EINTR)
			return 0;
	}
}
