/* SPDX-License-Identifier: Apache-2.0
 *
 * loop.c: a complete control loop at 1 kHz in one file.
 *
 *     cc -Wall -Wextra -Werror loop.c $(pkg-config --cflags --libs takt) -o loop
 *     ./loop LOOP [SECONDS]
 *
 * Each cycle it writes an observation into shared memory, lets taktd run the policy, and uses the action if it came in
 * time; else it acts safely on its own. At the end it says how the cycles went. SIGINT and SIGTERM end it early.
 *
 * Real-time rights, core and wait mode are asked for, and gone without where they are not permitted: see main().
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <takt.h>

#define PERIOD_NS 1000000u           /* used where the loop has no period of its own (a model) */
#define PRIORITY 70                  /* SCHED_FIFO; executors run at 80 */
#define ATTACH_TIMEOUT_NS 5000000000 /* a daemon that is booting */
#define US_MAX 100000u               /* histogram of round trips in microseconds; longer ones are in its last bucket */

static volatile sig_atomic_t stopping;
static uint32_t histogram[US_MAX + 1];

struct summary {
	uint64_t cycles;   /* that took place */
	uint64_t missed;   /* that were skipped because the one before took too long */
	uint64_t late;     /* answered after the deadline */
	uint64_t answered; /* in time */
	uint64_t other;    /* not answered: expired, failed, pending, ... */
};

static void stop(int signal_number)
{
	(void)signal_number;
	stopping = 1;
}

/* The sensors. A real robot reads them here; this one makes numbers up, for any tensors. */
static void observe(takt_lane *lane, uint32_t inputs, uint64_t cycle)
{
	for (uint32_t i = 0; i < inputs; i++) {
		struct takt_tensor tensor;
		float *values;

		if (takt_input_at(lane, i, &tensor) < 0)
			return;
		if (tensor.dtype != TAKT_FP32) {
			memset(tensor.data, 0, tensor.bytes);
			continue;
		}
		values = tensor.data;
		for (uint64_t k = 0; k < tensor.bytes / sizeof(float); k++)
			values[k] = (float)((cycle + k) % 100) / 100.0f;
	}
}

/* The actuators. Reads the action where the engine wrote it; returns a checksum instead of moving anything. */
static double act(takt_lane *lane, uint32_t outputs)
{
	double sum = 0.0;

	for (uint32_t i = 0; i < outputs; i++) {
		struct takt_tensor tensor;
		const float *values;

		if (takt_output_at(lane, i, &tensor) < 0 || tensor.dtype != TAKT_FP32)
			continue;
		values = tensor.data;
		for (uint64_t k = 0; k < tensor.bytes / sizeof(float); k++)
			sum += (double)values[k];
	}
	return sum;
}

/* What the robot does when no action came: brake, hold, whatever is safe. Here: nothing. */
static void act_safely(void)
{
}

static uint64_t percentile(uint64_t count, double share)
{
	uint64_t seen = 0, us = 0;

	while (us < US_MAX && (double)(seen += histogram[us]) < share * (double)count)
		us++;
	return us;
}

static int run(takt_lane *lane, double seconds, struct summary *summary)
{
	struct takt_tick tick = {0, 0, 0};
	struct takt_lane_info info;
	double checksum = 0.0;
	uint64_t end_ns;

	takt_describe(lane, &info);
	if (!info.period_ns)
		info.period_ns = PERIOD_NS;
	end_ns = takt_now() + (uint64_t)(seconds * 1e9);
	while (!stopping && takt_now() < end_ns) {
		struct takt_reply reply;
		uint64_t began_ns, us;
		int result;

		takt_tick_next(&tick, info.period_ns);
		summary->missed += tick.missed;
		summary->cycles += 1;
		began_ns = takt_now();
		observe(lane, info.input_count, tick.index);
		result = takt_infer(lane, 0, TAKT_TIMEOUT_DEFAULT, &reply);
		if (result == -EBUSY) { /* no answer to any of the jobs before: an executor is being replaced */
			act_safely();
			summary->other += 1;
			histogram[US_MAX] += 1;
			continue;
		}
		if (result < 0) { /* the lane has ended */
			act_safely();
			fprintf(stderr, "cycle %llu: %s\n", (unsigned long long)tick.index, takt_lane_error(lane));
			return result;
		}
		if (reply.status == TAKT_OK && !(reply.flags & TAKT_LATE)) {
			checksum += act(lane, info.output_count);
			summary->answered += 1;
		} else {
			act_safely();
			summary->late += reply.status == TAKT_OK;
			summary->other += reply.status != TAKT_OK;
		}
		us = (takt_now() - began_ns) / 1000;
		histogram[us < US_MAX ? us : US_MAX] += 1;
	}
	printf("checksum of the actions %g\n", checksum);
	return 0;
}

int main(int argc, char **argv)
{
	const double seconds = argc > 2 ? atof(argv[2]) : 5.0;
	struct summary summary = {0, 0, 0, 0, 0};
	takt_node *node;
	takt_lane *lane;
	int result;

	if (argc < 2 || argv[1][0] == '-') {
		fprintf(stderr, "usage: %s LOOP [SECONDS]\n", argv[0]);
		return 2;
	}
	signal(SIGINT, stop);
	signal(SIGTERM, stop);
	if (takt_connect(&node, NULL, 0) < 0 ||
	    takt_attach(node, argv[1], TAKT_KIND_ANY, TAKT_WAIT_HYBRID, ATTACH_TIMEOUT_NS, &lane) < 0) {
		fprintf(stderr, "%s\n", takt_error(node));
		takt_close(node);
		return 1;
	}
	/* Give a core number instead of -1 to keep the loop away from other work, and from the executor's core. */
	if (takt_lock_memory() < 0 || takt_realtime(PRIORITY, -1) < 0)
		fprintf(stderr, "without real-time rights (CAP_SYS_NICE, CAP_IPC_LOCK): expect jitter\n");

	result = run(lane, seconds, &summary);

	printf("cycles %llu, missed %llu, late %llu, without answer %llu\n", (unsigned long long)summary.cycles,
	       (unsigned long long)summary.missed, (unsigned long long)summary.late, (unsigned long long)summary.other);
	printf("round trip p50 %llu us, p99 %llu us, p99.9 %llu us\n",
	       (unsigned long long)percentile(summary.cycles, 0.5),
	       (unsigned long long)percentile(summary.cycles, 0.99),
	       (unsigned long long)percentile(summary.cycles, 0.999));
	takt_detach(lane);
	takt_close(node);
	return result < 0;
}
