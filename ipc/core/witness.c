/* SPDX-License-Identifier: Apache-2.0
 *
 * witness.c: sees that the executor's core stood still.
 *
 * A hypervisor takes cores away and often tells nobody: no steal time, no context switch, and the thread's own clock runs
 * on, so that a run which stood still looks like one that computed for too long. But no timer goes off on a core that is
 * not there. Before each run a timer is set to the moment at which the run will have used up three quarters of what it may
 * cost, which most never reach, and from then on to every 0.1 ms; a thread of higher priority on the same core notes when
 * it goes off. Late by more than a wake-up takes: the core stood still meanwhile.
 *
 * It doesn't see an absence that was over before that moment, so it errs to the run's disadvantage; one that is longer
 * than the run's cost it always sees. It costs one system call a run, and wake-ups of some microseconds where a run takes
 * longer than that; one where it is followed by a pause.
 *
 * The executor's thread and the witness share a core and the witness goes first: where one writes, the other stands still.
 * The watch, on another core, reads only.
 *
 * Rejected: steal time (not reported everywhere, and in ticks of 10 ms), performance events (need rights of their own, and
 * guests have no cycle counter), a timer that is cyclic from the start (wakes up in runs that nobody has doubts about).
 */
#include "server.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/timerfd.h>
#include <unistd.h>

struct takt_witness {
	pthread_t thread;
	int timer_fd;
	uint32_t stop;
	uint32_t running;   /* the executor's thread is in a run that is asked about */
	uint64_t next_ns;   /* when the timer goes off next */
	uint64_t absent_ns; /* how much too late it went off in this run, in all */
};

/* due_ns 0: never */
static void set_timer(const struct takt_witness *witness, uint64_t due_ns)
{
	const struct itimerspec at = {.it_value = {(time_t)(due_ns / (1000 * TAKT_NS_PER_MS)),
						   (long)(due_ns % (1000 * TAKT_NS_PER_MS))},
				      .it_interval = {0, TAKT_WITNESS_EVERY_NS}};

	timerfd_settime(witness->timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static void note(struct takt_witness *witness, uint64_t expirations, uint64_t now_ns)
{
	uint64_t next_ns = takt_load_u64(&witness->next_ns);

	if (now_ns < next_ns)
		return; /* the timer of the run before, while this one's was being set */
	if (now_ns - next_ns >= TAKT_WITNESS_LATE_NS)
		takt_store_u64(&witness->absent_ns, takt_load_u64(&witness->absent_ns) + now_ns - next_ns);
	takt_store_u64(&witness->next_ns, next_ns + expirations * TAKT_WITNESS_EVERY_NS);
}

static void *witness_main(void *argument)
{
	struct takt_witness *witness = argument;
	uint64_t expirations;

	while (!__atomic_load_n(&witness->stop, __ATOMIC_ACQUIRE)) {
		if (read(witness->timer_fd, &expirations, sizeof(expirations)) < 0)
			continue;
		if (__atomic_load_n(&witness->running, __ATOMIC_RELAXED))
			note(witness, expirations, takt_clock_ns());
		else
			set_timer(witness, 0);
	}
	return NULL;
}

int takt_witness_start(struct takt_witness **out, int priority, const cpu_set_t *cores)
{
	struct takt_witness *witness = calloc(1, sizeof(*witness));
	int rc;

	if (!witness)
		return -ENOMEM;
	witness->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
	rc = witness->timer_fd < 0 ? -errno : takt_thread_start(&witness->thread, priority, cores, witness_main, witness);
	if (rc < 0) {
		if (witness->timer_fd >= 0)
			close(witness->timer_fd);
		free(witness);
		return rc;
	}
	*out = witness;
	return 0;
}

void takt_witness_stop(struct takt_witness *witness)
{
	__atomic_store_n(&witness->stop, 1, __ATOMIC_RELEASE);
	__atomic_store_n(&witness->running, 1, __ATOMIC_RELAXED); /* or the thread would switch the timer off again */
	set_timer(witness, 1); /* long ago: at once */
	pthread_join(witness->thread, NULL);
	close(witness->timer_fd);
	free(witness);
}

void takt_witness_expect(struct takt_witness *witness, uint64_t due_ns)
{
	takt_store_u64(&witness->absent_ns, 0);
	takt_store_u64(&witness->next_ns, due_ns);
	__atomic_store_n(&witness->running, 1, __ATOMIC_RELAXED);
	set_timer(witness, due_ns);
}

void takt_witness_over(struct takt_witness *witness)
{
	__atomic_store_n(&witness->running, 0, __ATOMIC_RELAXED);
}

uint64_t takt_witness_absent_ns(const struct takt_witness *witness, uint64_t now_ns)
{
	uint64_t next_ns = takt_load_u64(&witness->next_ns), absent_ns = takt_load_u64(&witness->absent_ns);

	/* From another core: perhaps it stands still at this moment. */
	if (__atomic_load_n(&witness->running, __ATOMIC_RELAXED) && now_ns >= next_ns + TAKT_WITNESS_LATE_NS)
		absent_ns += now_ns - next_ns;
	return absent_ns;
}
