/* SPDX-License-Identifier: Apache-2.0
 *
 * rt.c: time, and the real-time rights of the calling thread.
 */
#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include "takt.h"

#define NS_PER_S 1000000000u

uint64_t takt_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

void takt_sleep_until(uint64_t until_ns)
{
	const struct timespec until = {(time_t)(until_ns / NS_PER_S), (long)(until_ns % NS_PER_S)};

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
		;
}

void takt_tick_next(struct takt_tick *tick, uint64_t period_ns)
{
	uint64_t now = takt_now();

	tick->missed = 0;
	if (!tick->release_ns || !period_ns) {
		tick->index = tick->release_ns ? tick->index + 1 : 0;
		tick->release_ns = now;
		return;
	}
	tick->index += 1;
	tick->release_ns += period_ns;
	if (now >= tick->release_ns + period_ns) {
		/* Whole periods have gone by: skip them, keep the phase. A start late by less than a period is no miss.
		 */
		tick->missed = (now - tick->release_ns) / period_ns;
		tick->index += tick->missed;
		tick->release_ns += tick->missed * period_ns;
	}
	if (now < tick->release_ns)
		takt_sleep_until(tick->release_ns);
}

int takt_realtime(int priority, int core)
{
	if (priority < 0 || priority > 99 || core < -1 || core >= CPU_SETSIZE)
		return -EINVAL;
	if (core >= 0) {
		cpu_set_t cores;

		CPU_ZERO(&cores);
		CPU_SET(core, &cores);
		if (sched_setaffinity(0, sizeof(cores), &cores) < 0)
			return -errno;
	}
	if (priority > 0) {
		const struct sched_param param = {.sched_priority = priority};

		if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &param) < 0)
			return -errno;
	}
	return 0;
}

int takt_lock_memory(void)
{
	return mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) < 0 ? -errno : 0;
}
