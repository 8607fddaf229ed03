/* SPDX-License-Identifier: Apache-2.0
 *
 * succession.c: how a ledger passes from one executor to another, whether its owner lets go of it, dies or hangs.
 *
 * Each executor that can serve a ledger is a member, with a thread per ledger. The supervisor says which member is next
 * (successor); that one's thread waits for the ledger's robust mutex, and owning the mutex is owning the ledger. The
 * kernel gives it away when its holder dies, some 0.1 ms after a SIGKILL and before the holder's memory is torn down.
 *
 *   waiting for its turn -> waiting for the lock, an eye on the owner -> owner -> (asked) handed over -> waiting for its turn
 *
 * The owner's state is in the ledger's succession block. `owner` is 0 exactly when the last one handed over: whoever finds
 * the lock free and `owner` set knows that it died, even when somebody else got the lock in between and passed it on.
 *
 * A hang of the owner is seen by whoever is next: hang.c.
 *
 * The lock is held by the member thread while the executor's one thread does the work. SIGKILL stops all threads of a
 * process: the kernel marks them, the first one first, before any of them can begin to exit and so before the lock can
 * be given away. So there is no second lock between the two threads.
 *
 * Who writes what: takt_member's `stop` and `let_go` the executor's thread, `news` both (atomically), `view` the member
 * thread, lanes and fences whoever holds `guard`. The member thread touches nothing else of the server.
 *
 * Rejected: a lock held by the executor's own thread (it would have to wait for it as well), a heartbeat by timer (lives
 * on in an endless engine), the pidfd as the alarm (fires after the memory is gone: 5 to 170 ms).
 */
#include "member.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

void takt_succession_ring(struct takt_succession *succession)
{
	__atomic_fetch_add(&succession->bell, 1, __ATOMIC_RELEASE); /* what was changed is seen by who sees the bell */
	syscall(SYS_futex, &succession->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Until the bell rings after `bell` was read. */
static void await_bell(struct takt_succession *succession, uint32_t bell)
{
	syscall(SYS_futex, &succession->bell, FUTEX_WAIT, bell, NULL, NULL, 0);
}

/* ---- the supervisor's side ---- */

int takt_succession_init(struct takt_ledger_page *page)
{
	pthread_mutexattr_t attributes;
	int rc;

	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	rc = pthread_mutex_init(&page->owner_lock.mutex, &attributes);
	pthread_mutexattr_destroy(&attributes);
	return -rc;
}

int takt_succession_open(int ledger_fd, struct takt_ledger_page **page)
{
	uint64_t size;
	int rc = takt_ledger_open(ledger_fd, page, &size);

	if (rc == 0 && size > sizeof(**page))
		takt_unmap((*page)->lanes, size - sizeof(**page));
	return rc;
}

void takt_succession_set(struct takt_succession *succession, uint32_t successor)
{
	takt_store_word(&succession->successor, successor);
	takt_succession_ring(succession);
}

void takt_succession_ask_release(struct takt_succession *succession, uint32_t member)
{
	takt_store_word(&succession->release_asked, member);
	takt_succession_ring(succession);
}

/* ---- the member thread: its turn ---- */

/* Wakes the executor's thread; it looks at `news`, and is alive. */
static void call_executor(struct takt_member *member)
{
	const uint64_t one = 1;

	(void)!write(member->event_fd, &one, sizeof(one)); /* can't fail or block before 2^64 - 1 calls are unheard */
}

static void tell(struct takt_member *member, uint32_t news)
{
	__atomic_fetch_or(&member->news, news, __ATOMIC_RELEASE); /* what the block says is seen with it */
	call_executor(member);
}

/* 0, or an error number: ETIMEDOUT. */
static int take_lock(struct takt_member *member, uint64_t step_ns)
{
	uint64_t until_ns = takt_clock_ns() + step_ns;
	struct timespec until = {(time_t)(until_ns / UINT64_C(1000000000)), (long)(until_ns % UINT64_C(1000000000))};
	int rc = pthread_mutex_clocklock(member->lock, CLOCK_MONOTONIC, &until);

	return rc == EOWNERDEAD ? pthread_mutex_consistent(member->lock) : rc;
}

static void become_owner(struct takt_member *member)
{
	struct takt_succession *succession = member->succession;
	uint32_t before = takt_load_state(&succession->owner);
	uint32_t how = TAKT_NEWS_CLEAN;

	if (before != 0)
		how = takt_load_word(&succession->fenced) == before ? TAKT_NEWS_HUNG : TAKT_NEWS_DIED;
	takt_store_u64(&succession->run_started_ns, 0);
	takt_store_word(&succession->fenced, 0);
	takt_store_word(&succession->release_asked, 0);
	takt_store_word(&succession->how, how);
	takt_store_u64(&succession->since_ns, takt_clock_ns());
	takt_count(&succession->takeovers, 1);
	takt_store_state(&succession->owner, member->id); /* release: the rest is there */
	tell(member, how);
}

/* Nothing to do but listen, until the executor's thread lets go. */
static void be_owner(struct takt_member *member)
{
	struct takt_succession *succession = member->succession;
	uint32_t ping = __atomic_load_n(&succession->ping, __ATOMIC_RELAXED);
	int asked = 0;

	takt_store_word(&succession->pong, ping);
	for (;;) {
		uint32_t bell = takt_load_state(&succession->bell); /* acquire: and then what it rang for */
		if (takt_load_word(&member->let_go) || takt_load_word(&member->stop))
			break;
		if (!asked && takt_load_word(&succession->release_asked) == member->id) {
			asked = 1;
			tell(member, TAKT_NEWS_ASKED);
		}
		if (takt_load_word(&succession->ping) != ping) {
			ping = takt_load_word(&succession->ping);
			takt_store_word(&succession->pong, ping);
			call_executor(member);
		}
		await_bell(succession, bell);
	}
	takt_store_word(&member->let_go, 0);
	takt_store_u64(&succession->run_started_ns, 0);
	takt_store_word(&succession->release_asked, 0);
	takt_store_state(&succession->owner, 0); /* release: all that was done is in the ledger */
	pthread_mutex_unlock(member->lock);
}

static void *member_main(void *argument)
{
	struct takt_member *member = argument;
	struct takt_succession *succession = member->succession;

	for (;;) {
		uint32_t bell = takt_load_state(&succession->bell); /* acquire: and then what it rang for */
		uint64_t step_ns = takt_member_step(member);
		if (takt_load_word(&member->stop))
			return NULL;
		if (takt_load_word(&succession->successor) != member->id) {
			await_bell(succession, bell);
			continue;
		}
		if (take_lock(member, step_ns) != 0) {
			takt_member_look(member, step_ns);
		} else if (takt_load_word(&succession->successor) != member->id || takt_load_word(&member->stop)) {
			pthread_mutex_unlock(member->lock); /* `owner` still says what became of the one before */
		} else {
			become_owner(member);
			be_owner(member);
		}
	}
}

/* ---- the executor's side ---- */

static struct takt_member *member_of(const struct takt_server *server, uint32_t home)
{
	return home < server->home_count ? server->homes[home].member : NULL;
}

int takt_home_is_ours(const struct takt_home *home)
{
	return !home->member || home->member->owned;
}

void takt_member_add_lane(struct takt_member *member, const struct takt_served *lane)
{
	pthread_mutex_lock(&member->guard);
	member->lanes[member->lane_count++] = (struct watched_lane){
		lane->rings.cursors, lane->ledger, lane->memory, lane->layout.slot_count};
	pthread_mutex_unlock(&member->guard);
}

void takt_member_drop_lane(struct takt_member *member, const struct takt_served *lane)
{
	pthread_mutex_lock(&member->guard);
	for (uint32_t i = 0; i < member->lane_count; i++)
		if (member->lanes[i].ledger == lane->ledger)
			member->lanes[i] = member->lanes[--member->lane_count];
	pthread_mutex_unlock(&member->guard);
}

static int open_event(struct takt_server *server)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = TAKT_EPOLL_SUCCESSION};

	if (server->succession_fd >= 0)
		return 0;
	server->succession_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (server->succession_fd < 0 || epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->succession_fd, &event) < 0)
		return -errno;
	return 0;
}

/* The executor's thread may be the lower one of the two: it must not be kept off its core while it holds the guard. */
static void init_guard(pthread_mutex_t *guard)
{
	pthread_mutexattr_t attributes;

	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
	pthread_mutex_init(guard, &attributes);
	pthread_mutexattr_destroy(&attributes);
}

int takt_server_join(struct takt_server *server, uint32_t number, uint32_t id, int priority, const cpu_set_t *cores,
		     uint64_t hang_after_ns)
{
	struct takt_home *home = number < server->home_count ? &server->homes[number] : NULL;
	struct takt_member *member;
	int rc;

	if (!home)
		return -ENOENT;
	if (home->member)
		return -EALREADY;
	if (id == 0 || hang_after_ns > TAKT_HANG_NS_MAX)
		return -EINVAL;
	for (uint32_t i = home->first_lane; i < home->first_lane + home->page->lane_count; i++)
		if (server->lanes[i] && !server->lanes[i]->standby)
			return -EBUSY;
	rc = open_event(server);
	if (rc < 0)
		return rc;
	member = calloc(1, sizeof(*member) + home->page->lane_count * sizeof(member->lanes[0]));
	if (!member)
		return -ENOMEM;
	member->succession = &home->page->succession;
	member->lock = &home->page->owner_lock.mutex;
	member->hang_after_ns = hang_after_ns;
	member->id = id;
	member->event_fd = server->succession_fd;
	init_guard(&member->guard);
	for (uint32_t i = home->first_lane; i < home->first_lane + home->page->lane_count; i++)
		if (server->lanes[i])
			takt_member_add_lane(member, server->lanes[i]);
	rc = takt_thread_start(&member->thread, priority, cores, member_main, member);
	if (rc < 0) {
		pthread_mutex_destroy(&member->guard);
		free(member);
		return rc;
	}
	home->member = member;
	return 0;
}

static void disown(struct takt_server *server, struct takt_home *home)
{
	for (uint32_t i = home->first_lane; i < home->first_lane + home->page->lane_count; i++)
		if (server->lanes[i] && !server->lanes[i]->standby)
			takt_server_release(server, i);
	for (uint32_t i = 0; i < server->owned_count; i++)
		if (server->owned[i] == &home->page->succession)
			server->owned[i] = server->owned[--server->owned_count];
	home->member->owned = 0;
}

int takt_server_hand_over(struct takt_server *server, uint32_t number)
{
	struct takt_member *member = member_of(server, number);

	if (!member)
		return -ENOENT;
	if (!member->owned)
		return -EPERM;
	disown(server, &server->homes[number]);
	takt_store_word(&member->let_go, 1);
	takt_succession_ring(member->succession); /* release: the lanes are let go of */
	return 0;
}

int takt_server_leave(struct takt_server *server, uint32_t number)
{
	struct takt_member *member = member_of(server, number);

	if (!member)
		return -ENOENT;
	if (member->owned)
		disown(server, &server->homes[number]);
	takt_store_word(&member->stop, 1);
	takt_succession_ring(member->succession);
	pthread_join(member->thread, NULL);
	for (uint32_t i = 0; i < TAKT_MEMBERS_MAX; i++)
		if (member->fences[i].member != 0)
			close(member->fences[i].pidfd);
	pthread_mutex_destroy(&member->guard);
	free(member);
	server->homes[number].member = NULL;
	return 0;
}

int takt_server_set_hang_after(struct takt_server *server, uint32_t number, uint64_t hang_after_ns)
{
	struct takt_member *member = member_of(server, number);

	if (!member)
		return -ENOENT;
	if (hang_after_ns > TAKT_HANG_NS_MAX)
		return -EINVAL;
	takt_store_u64(&member->hang_after_ns, hang_after_ns);
	return 0;
}

/* -ENFILE: more members than anybody needs. */
static int put_fence(struct takt_member *member, uint32_t id, int pidfd)
{
	struct fence *place = NULL;

	for (uint32_t i = 0; i < TAKT_MEMBERS_MAX && !(place && place->member == id); i++)
		if (member->fences[i].member == id || (!place && member->fences[i].member == 0))
			place = &member->fences[i];
	if (pidfd >= 0 && !place)
		return -ENFILE;
	if (place && place->member == id)
		close(place->pidfd);
	if (pidfd >= 0)
		*place = (struct fence){id, pidfd};
	else if (place && place->member == id)
		place->member = 0;
	return 0;
}

int takt_server_set_pidfd(struct takt_server *server, uint32_t number, uint32_t id, int pidfd)
{
	struct takt_member *member = member_of(server, number);
	int rc = !member ? -ENOENT : id == 0 ? -EINVAL : 0;

	if (rc == 0) {
		/* The thread may be about to use it: a number that was closed could be another process by then. */
		pthread_mutex_lock(&member->guard);
		rc = put_fence(member, id, pidfd);
		pthread_mutex_unlock(&member->guard);
	}
	if (rc < 0 && pidfd >= 0)
		close(pidfd);
	return rc;
}

uint32_t takt_server_news(struct takt_server *server, uint32_t number)
{
	struct takt_member *member = member_of(server, number);
	uint32_t news;

	if (!member)
		return 0;
	news = __atomic_exchange_n(&member->news, 0, __ATOMIC_ACQUIRE);
	if ((news & (TAKT_NEWS_CLEAN | TAKT_NEWS_DIED | TAKT_NEWS_HUNG)) && !member->owned) {
		member->owned = 1;
		server->owned[server->owned_count++] = member->succession;
		takt_server_alive(server);
	}
	return news;
}

void takt_succession_heard(struct takt_server *server, uint64_t now_ns)
{
	uint64_t rings;

	(void)!read(server->succession_fd, &rings, sizeof(rings));
	takt_server_alive(server);
	for (uint32_t i = 0; i < server->home_count; i++)
		if (server->homes[i].member && takt_load_word(&server->homes[i].member->news) != 0)
			server->events |= TAKT_WOKE_SUCCESSION;
	/* If it was a ping: an entry whose client did not ring is what we are asked about. */
	for (uint32_t i = 0; i < server->lane_limit; i++) {
		struct takt_served *lane = server->lanes[i];
		if (lane && !lane->standby && !lane->closed && takt_served_has_entries(lane))
			takt_doorbell_activate(server, lane, now_ns);
	}
}
