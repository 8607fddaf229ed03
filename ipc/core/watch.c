/* SPDX-License-Identifier: Apache-2.0
 *
 * watch.c: answers jobs that have become hopeless while the executor's one thread is inside an engine.
 *
 * An engine's run can't be interrupted, so without this a job whose deadline passes during a long run would be answered
 * only when that run ends. A second thread, without Python, looks every half millisecond: it takes what clients submit
 * meanwhile and completes as `expired` whatever can certainly not make its deadline any more. It decides nothing else.
 *
 * The server still belongs to one thread at a time. `run` says to whom: IDLE and the executor's thread outside runs; during
 * a run (RUNNING) the watch may claim it for some microseconds (WATCHING). The executor leaves a run by taking RUNNING
 * back, and waits out a claim. What the watch found is kept in a stash that the next poll hands out.
 *
 * The thread sleeps unless runs are going on and somebody else could be waiting: with one lane and one job in flight it
 * is never woken. Rejected: a lock around every call (the hot path pays for what happens once a day), a timer signal (its
 * handler would run in the middle of the engine).
 */
#include "server.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
	RUN_IDLE = 0,
	RUN_RUNNING = 1,
	RUN_WATCHING = 2,
	IDLE_TICKS_MAX = 20, /* this many looks without a run, and the thread parks until the next one */
};

struct takt_watch {
	pthread_t thread;
	struct takt_server *server;
	uint32_t run;    /* who owns the server; see above */
	uint32_t parked; /* futex: 1 while the thread waits to be needed */
	uint32_t stop;
	uint32_t running_lane;
	uint64_t run_started_ns;
	uint64_t run_cost_ns;  /* what the run was reckoned with; 0: not known */
	clockid_t run_clock;   /* time that the executor's thread has had a core */
	uint64_t looked_ns;    /* first look at this run, and what run_clock said; 0: none yet */
	uint64_t looked_cpu_ns;
	uint32_t stashed;
	struct takt_job stash[TAKT_POLL_ENTRIES_MAX];
};

static void futex(uint32_t *word, int op, uint32_t value)
{
	syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/* ---- the watch's side ---- */

/* When a loop's job arrives that the scheduler has not seen: a_k <= max(r_k, next arrival); a clock loop's, at the first
 * beat after it. */
static uint64_t arrival_of(struct takt_served *lane, uint64_t release_ns)
{
	uint64_t period_ns = lane->layout.period_ns;

	if (lane->layout.trigger == TAKT_TRIGGER_CLOCK)
		return release_ns + (lane->phase_ns + period_ns - release_ns % period_ns) % period_ns;
	if (lane->next_arrival_ns > release_ns)
		release_ns = lane->next_arrival_ns;
	lane->next_arrival_ns = release_ns + period_ns;
	return release_ns;
}

/* The latest deadline that a job can have which the scheduler has not seen. */
static void bound_new_job(struct takt_served *lane, const struct takt_job *job)
{
	uint64_t deadline_ns = job->deadline_ns;

	if (lane->layout.kind == TAKT_KIND_LOOP) {
		uint64_t arrival_ns = arrival_of(lane, job->release_ns);
		if (deadline_ns == 0 || deadline_ns > arrival_ns + lane->layout.deadline_ns)
			deadline_ns = arrival_ns + lane->layout.deadline_ns;
	}
	if (lane->runs_late || (lane->layout.trigger == TAKT_TRIGGER_CLOCK && !lane->beats))
		deadline_ns = 0;
	lane->hopeless_ns[job->slot] = deadline_ns;
}

static void take_new(struct takt_watch *watch, uint64_t now_ns)
{
	struct takt_job *jobs = &watch->stash[watch->stashed];
	uint32_t count = takt_server_poll_rings(watch->server, now_ns, jobs, TAKT_POLL_ENTRIES_MAX - watch->stashed);

	for (uint32_t i = 0; i < count; i++)
		if ((jobs[i].flags & ~(uint32_t)TAKT_SUBMIT_SHAPES) == 0)
			bound_new_job(watch->server->lanes[jobs[i].lane], &jobs[i]);
	watch->stashed += count;
}

static uint64_t run_cpu_ns(const struct takt_watch *watch)
{
	struct timespec used = {0};

	clock_gettime(watch->run_clock, &used);
	return (uint64_t)used.tv_sec * 1000 * TAKT_NS_PER_MS + (uint64_t)used.tv_nsec;
}

/* Why a job was lost behind the run: the run is what was admitted; or longer, by itself or because its thread has had no
 * core, or the core itself stood still. Half of the excess is enough for that: a first look comes some time after the
 * start. */
static void blame(const struct takt_watch *watch, uint64_t now_ns, struct takt_verdict *verdict)
{
	uint64_t ran_ns = now_ns - watch->run_started_ns, away_ns = now_ns - watch->looked_ns, had_ns;

	verdict->cause = TAKT_CAUSE_BLOCKED_BY;
	verdict->cause_detail = watch->running_lane;
	if (watch->run_cost_ns == 0 || ran_ns <= watch->run_cost_ns)
		return;
	had_ns = run_cpu_ns(watch) - watch->looked_cpu_ns;
	away_ns = away_ns > had_ns ? away_ns - had_ns : 0;
	if (watch->server->witness)
		away_ns += takt_witness_absent_ns(watch->server->witness, now_ns);
	if (2 * away_ns < ran_ns - watch->run_cost_ns) {
		verdict->cause = TAKT_CAUSE_OVERRUN;
		return;
	}
	verdict->cause = TAKT_CAUSE_MACHINE;
	verdict->cause_detail = 0;
}

static void answer_hopeless(struct takt_watch *watch, struct takt_served *lane, uint64_t now_ns)
{
	for (uint64_t left = lane->pending; left != 0; left &= left - 1) {
		uint32_t slot = (uint32_t)__builtin_ctzll(left);
		struct takt_ledger_slot *taken = &lane->ledger->slots[slot];
		struct takt_verdict verdict = {.status = TAKT_EXPIRED, .ended_ns = now_ns};

		if (taken->started_ns != 0 || lane->hopeless_ns[slot] == 0 || lane->hopeless_ns[slot] >= now_ns)
			continue;
		if (watch->stashed == TAKT_POLL_ENTRIES_MAX)
			return;
		watch->stash[watch->stashed++] = (struct takt_job){
			.sequence = taken->sequence, .deadline_ns = taken->deadline_ns, .release_ns = taken->release_ns,
			.lane = lane->index, .slot = slot, .flags = TAKT_JOB_ANSWERED};
		blame(watch, now_ns, &verdict);
		takt_server_complete(watch->server, lane->index, slot, &verdict);
	}
}

static void look(struct takt_watch *watch)
{
	struct takt_server *server = watch->server;
	uint64_t now_ns = takt_clock_ns();

	if (now_ns < watch->run_started_ns + TAKT_WATCH_AFTER_NS)
		return;
	if (watch->looked_ns == 0) {
		watch->looked_ns = now_ns;
		watch->looked_cpu_ns = run_cpu_ns(watch);
	}
	take_new(watch, now_ns);
	for (uint32_t i = 0; i < server->lane_limit; i++)
		if (server->lanes[i] && server->lanes[i]->pending != 0)
			answer_hopeless(watch, server->lanes[i], now_ns);
}

static int claim(struct takt_watch *watch)
{
	uint32_t expected = RUN_RUNNING;

	/* acquire: what the executor's thread wrote before the run is seen */
	return __atomic_compare_exchange_n(&watch->run, &expected, RUN_WATCHING, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

static void park(struct takt_watch *watch)
{
	__atomic_store_n(&watch->parked, 1, __ATOMIC_RELAXED);
	takt_dekker_fence(); /* parked before run; the executor: run before parked */
	if (__atomic_load_n(&watch->run, __ATOMIC_RELAXED) != RUN_IDLE)
		__atomic_store_n(&watch->parked, 0, __ATOMIC_RELAXED);
	while (__atomic_load_n(&watch->parked, __ATOMIC_ACQUIRE))
		futex(&watch->parked, FUTEX_WAIT, 1);
}

static void *watch_main(void *argument)
{
	struct takt_watch *watch = argument;
	uint32_t idle = IDLE_TICKS_MAX;

	while (!__atomic_load_n(&watch->stop, __ATOMIC_ACQUIRE)) {
		if (idle >= IDLE_TICKS_MAX) {
			park(watch);
			idle = 0;
		}
		takt_sleep_until(takt_clock_ns() + TAKT_WATCH_TICK_NS);
		if (!claim(watch)) {
			idle++;
			continue;
		}
		idle = 0;
		look(watch);
		__atomic_store_n(&watch->run, RUN_RUNNING, __ATOMIC_RELEASE); /* what was done is seen by the executor */
	}
	return NULL;
}

/* ---- the executor's side ---- */

int takt_thread_start(pthread_t *thread, int priority, const cpu_set_t *cores, void *(*entry)(void *), void *argument)
{
	const struct sched_param param = {.sched_priority = priority};
	pthread_attr_t attributes;
	sigset_t all, before;
	int rc;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, TAKT_THREAD_STACK_BYTES);
	if (cores)
		pthread_attr_setaffinity_np(&attributes, sizeof(*cores), cores);
	if (priority > 0) {
		pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
		pthread_attr_setschedpolicy(&attributes, SCHED_FIFO);
		pthread_attr_setschedparam(&attributes, &param);
	}
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* the new thread inherits it */
	rc = pthread_create(thread, &attributes, entry, argument);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return -rc;
}

int takt_watch_start(struct takt_server *server, int priority, const cpu_set_t *cores)
{
	struct takt_watch *watch;
	int rc;

	if (server->watch)
		return -EALREADY;
	watch = calloc(1, sizeof(*watch));
	if (!watch)
		return -ENOMEM;
	watch->server = server;
	if (pthread_getcpuclockid(pthread_self(), &watch->run_clock) != 0)
		watch->run_clock = CLOCK_MONOTONIC; /* then nothing is put down to the machine */
	rc = takt_thread_start(&watch->thread, priority, cores, watch_main, watch);
	if (rc < 0) {
		free(watch);
		return rc;
	}
	server->watch = watch;
	return 0;
}

void takt_watch_stop(struct takt_server *server)
{
	struct takt_watch *watch = server->watch;

	if (!watch)
		return;
	__atomic_store_n(&watch->stop, 1, __ATOMIC_RELEASE);
	__atomic_store_n(&watch->parked, 0, __ATOMIC_RELEASE);
	futex(&watch->parked, FUTEX_WAKE, INT_MAX);
	pthread_join(watch->thread, NULL);
	server->watch = NULL;
	free(watch);
}

void takt_watch_begin(struct takt_server *server, uint32_t lane, uint64_t now_ns, uint64_t cost_ns)
{
	struct takt_watch *watch = server->watch;

	/* Nobody else can be waiting, or become waiting: leave the thread alone. */
	if (!watch || watch->run != RUN_IDLE || (server->lane_count < 2 && server->pending_count < 2))
		return;
	watch->running_lane = lane;
	watch->run_started_ns = now_ns;
	watch->run_cost_ns = cost_ns;
	watch->looked_ns = 0;
	__atomic_store_n(&watch->run, RUN_RUNNING, __ATOMIC_RELEASE); /* everything before the run is seen by the watch */
	takt_dekker_fence(); /* run before parked; the watch: parked before run */
	if (__atomic_load_n(&watch->parked, __ATOMIC_RELAXED)) {
		__atomic_store_n(&watch->parked, 0, __ATOMIC_RELEASE);
		futex(&watch->parked, FUTEX_WAKE, 1);
	}
}

void takt_watch_end(struct takt_server *server)
{
	struct takt_watch *watch = server->watch;
	uint32_t expected = RUN_RUNNING;

	if (!watch || __atomic_load_n(&watch->run, __ATOMIC_RELAXED) == RUN_IDLE)
		return;
	/* acquire: what the watch did is seen. It holds the server for microseconds, at a higher priority than ours. */
	while (!__atomic_compare_exchange_n(&watch->run, &expected, RUN_IDLE, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		expected = RUN_RUNNING;
		sched_yield();
	}
}

uint32_t takt_watch_collect(struct takt_server *server, struct takt_job *jobs)
{
	struct takt_watch *watch = server->watch;
	uint32_t count;

	if (!watch || watch->stashed == 0)
		return 0;
	count = watch->stashed;
	for (uint32_t i = 0; i < count; i++)
		jobs[i] = watch->stash[i];
	watch->stashed = 0;
	return count;
}

void takt_watch_forget(struct takt_server *server, uint32_t lane)
{
	struct takt_watch *watch = server->watch;
	uint32_t kept = 0;

	if (!watch)
		return;
	for (uint32_t i = 0; i < watch->stashed; i++)
		if (watch->stash[i].lane != lane)
			watch->stash[kept++] = watch->stash[i];
	watch->stashed = kept;
}
