/* SPDX-License-Identifier: Apache-2.0
 *
 * test_server.c: the daemon's side under memory that a hostile thread rewrites all the time, and under a client that
 * must be woken each time. Runs as it is and under the sanitizers. `test_server canary` must fail: it judges a lane
 * whose private slot bitmap has been tampered with, so that we know that the check below can see something.
 *
 * TAKTD_SEED: what the hostile thread writes is drawn from; FUZZ_SECONDS: for how long it does (1.5 s unless set).
 */
#include "../server.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                     \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

struct bench {
	struct takt_server server;
	struct takt_layout layout; /* as computed; its tensors are ours */
	void *map;		   /* the client's mapping */
	int ledger_fd, stats_fd, journal_fd;
	int wake_fd; /* the client's end */
	int stop;
	uint64_t seed; /* of what is written into this lane */
};

static void declare(struct takt_layout *layout, uint32_t dynamic)
{
	static const struct takt_tensor_entry tensors[2] = {
	    {.name = "obs", .dtype = TAKT_FP32, .rank = 2, .dims = {4, 48}},
	    {.name = "action", .dtype = TAKT_FP32, .rank = 1, .dims = {12}},
	};

	*layout = (struct takt_layout){.kind = TAKT_KIND_MODEL,
				       .slot_count = 4,
				       .tensor_count = 2,
				       .input_count = 1,
				       .dynamic = dynamic,
				       .name = "m",
				       .model_name = "m"};
	layout->tensors = malloc(sizeof(tensors));
	CHECK(layout->tensors);
	memcpy(layout->tensors, tensors, sizeof(tensors));
	CHECK(takt_layout_compute(layout) == 0);
}

/* A fresh lane, number 0, for both sides. */
static void add_lane(struct bench *bench)
{
	struct takt_layout served;
	int memfd, fds[2];

	declare(&served, 1);
	memfd = takt_layout_create(&served);
	CHECK(memfd >= 0);
	CHECK(takt_map(memfd, served.total_size, 1, &bench->map) == 0);
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, fds) == 0);
	bench->wake_fd = fds[1];
	CHECK(takt_server_add(&bench->server, 0, memfd, fds[0], &served, &(struct takt_service){0}) == 0);
}

static void drop_client(struct bench *bench)
{
	takt_unmap(bench->map, bench->layout.total_size);
	close(bench->wake_fd);
}

static void start(struct bench *bench)
{
	memset(bench, 0, sizeof(*bench));
	declare(&bench->layout, 1);
	bench->ledger_fd = takt_ledger_create(2);
	bench->stats_fd = takt_stats_create(2);
	bench->journal_fd = takt_journal_create(64);
	CHECK(takt_server_init(&bench->server, bench->ledger_fd, bench->stats_fd, bench->journal_fd, -1) == 0);
	add_lane(bench);
}

static void finish(struct bench *bench)
{
	takt_server_destroy(&bench->server);
	drop_client(bench);
	takt_layout_free(&bench->layout);
	close(bench->ledger_fd);
	close(bench->stats_fd);
	close(bench->journal_fd);
}

/* ---- hostile memory ---- */

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* Mostly small numbers, which get further than noise does. */
static uint64_t nasty(uint64_t *state)
{
	static const uint64_t words[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 63, 64, UINT32_MAX, UINT64_C(1) << 63, UINT64_MAX};
	uint64_t r = next_random(state);

	if (r % 8 == 0)
		return next_random(state);
	return words[r / 8 % (sizeof(words) / sizeof(words[0]))] + (r / 1024 % 4) * (UINT64_C(1) << 32);
}

/* Like a client for most of the time, so that jobs are taken; now and then a nasty word somewhere among the cursors, the
 * rings and the first slot, while the daemon reads them. Until told to stop. */
static void *scribble(void *argument)
{
	struct bench *bench = argument;
	uint64_t *words = bench->map, state = bench->seed, sequence = 0;
	uint64_t from = bench->layout.cursors_offset / 8, to = (bench->layout.slots_offset + bench->layout.slot_stride) / 8;
	struct takt_rings rings;

	takt_rings_init(&rings, bench->map, &bench->layout);
	while (!__atomic_load_n(&bench->stop, __ATOMIC_RELAXED)) {
		static const uint32_t flags[] = {0, 0, 0, TAKT_SUBMIT_SHAPES, TAKT_SUBMIT_CANCEL, 4};
		struct takt_submission entry = {.deadline_ns = nasty(&state), .submitted_ns = nasty(&state)};
		int doorbell;

		takt_store_word(&rings.cursors->client_waiting, (uint32_t)(next_random(&state) % 3));
		entry.flags = flags[next_random(&state) % 6];
		entry.sequence = entry.flags == TAKT_SUBMIT_CANCEL ? sequence : ++sequence;
		entry.slot = (uint32_t)(entry.sequence % 4);
		(void)takt_rings_submit(&rings, &entry, &doorbell);
		if (doorbell || next_random(&state) % 4 == 0)
			(void)!send(bench->wake_fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		for (int i = 0; i < 2000 && takt_load_u64(&rings.cursors->completion_tail) < sequence; i++)
			takt_cpu_pause();
		for (uint64_t i = next_random(&state) % 64; i > 60; i--)
			takt_store_u64(&words[from + next_random(&state) % (to - from)], nasty(&state));
	}
	return NULL;
}

/* What a client can't reach must stay in order, whatever it writes. */
static void judge(const struct takt_served *lane)
{
	const struct takt_stats_block *count = lane->stats;
	uint64_t ended = count->orphaned;
	uint32_t taken = 0;

	for (int i = 0; i < TAKT_STATS_STATUSES; i++)
		ended += count->status[i];
	for (uint32_t i = 0; i < TAKT_SLOTS_MAX; i++)
		taken += lane->ledger->slots[i].state == TAKT_LEDGER_TAKEN;
	CHECK((uint32_t)__builtin_popcountll(lane->pending) == taken);
	CHECK((lane->pending >> lane->layout.slot_count) == 0);
	CHECK(count->submitted == ended + taken);
	CHECK(lane->ledger->submit_head == lane->rings.submit_head);
	CHECK(lane->ledger->completion_tail == lane->rings.completion_tail);
}

static void answer(struct takt_server *server, const struct takt_job *jobs, uint32_t found, uint64_t now_ns)
{
	struct takt_verdict verdict = {.ended_ns = now_ns, .path = TAKT_PATH_PRIMARY};

	for (uint32_t i = 0; i < found; i++) {
		if (jobs[i].flags & (TAKT_JOB_ENDED | TAKT_SUBMIT_CANCEL))
			continue;
		CHECK(jobs[i].slot < 4 && jobs[i].deadline_ns < UINT64_C(1) << 63 && jobs[i].release_ns <= now_ns);
		if (jobs[i].sequence % 3 == 0) /* some stay pending for a round */
			continue;
		server->lanes[0]->ledger->slots[jobs[i].slot].started_ns = now_ns;
		CHECK(takt_server_complete(server, 0, jobs[i].slot, &verdict) == 0);
	}
}

static void hostile_memory_changes_nothing_private(int canary)
{
	struct takt_job jobs[TAKT_POLL_ENTRIES_MAX];
	const struct takt_verdict failed = {.status = TAKT_FAILED};
	const char *asked = getenv("TAKTD_SEED"), *seconds = getenv("FUZZ_SECONDS");
	uint64_t seed = asked ? strtoull(asked, NULL, 0) : takt_clock_ns();
	uint64_t run_ns = seconds ? strtoull(seconds, NULL, 0) * UINT64_C(1000000000) : UINT64_C(1500000000);
	uint64_t until_ns = takt_clock_ns() + run_ns, lanes = 0, taken = 0;
	struct bench bench;

	printf("  TAKTD_SEED=%llu\n", (unsigned long long)seed);
	fflush(stdout);
	start(&bench);
	while (takt_clock_ns() < until_ns || lanes < 20) {
		struct takt_served *lane = takt_server_lane(&bench.server, 0);
		pthread_t thread;

		bench.stop = 0;
		bench.seed = (seed + lanes) * UINT64_C(0x9e3779b97f4a7c15) | 1;
		CHECK(pthread_create(&thread, NULL, scribble, &bench) == 0);
		for (int i = 0; i < 20000 && !lane->closed; i++) {
			uint64_t now_ns = takt_clock_ns();
			uint32_t found = takt_server_poll(&bench.server, now_ns, jobs);
			answer(&bench.server, jobs, found, now_ns);
			if (canary)
				lane->pending ^= 1;
			judge(lane);
			for (uint32_t slot = 0; slot < 4; slot++)
				takt_server_complete(&bench.server, 0, slot, &failed); /* what is still pending */
			if (i % 64 == 0)
				takt_server_wait(&bench.server, now_ns + 1000, 0);
		}
		taken += lane->ledger->next_sequence - 1;
		__atomic_store_n(&bench.stop, 1, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
		CHECK(takt_server_remove(&bench.server, 0, lanes % 2 ? -1 : TAKT_DETACHED, takt_clock_ns()) >= 0);
		CHECK(bench.server.active_count == 0 && bench.server.lane_count == 0 && bench.server.muted_count == 0);
		drop_client(&bench);
		add_lane(&bench);
		lanes++;
	}
	CHECK(taken > lanes);
	printf("  %llu lanes, %llu jobs\n", (unsigned long long)lanes, (unsigned long long)taken);
	finish(&bench);
}

/* ---- wake-ups ---- */

enum { WAKE_UPS = 20000 };

static void *submit_and_ring(void *argument)
{
	struct bench *bench = argument;
	struct takt_rings rings;
	struct takt_completion done;
	int doorbell;

	takt_rings_init(&rings, bench->map, &bench->layout);
	for (uint64_t sequence = 1; sequence <= WAKE_UPS; sequence++) {
		struct takt_submission entry = {.sequence = sequence, .slot = (uint32_t)(sequence % 4)};
		CHECK(takt_rings_submit(&rings, &entry, &doorbell) == 0);
		if (doorbell)
			CHECK(send(bench->wake_fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1);
		while (!takt_rings_collect(&rings, &done))
			takt_cpu_pause();
		CHECK(done.sequence == sequence && done.status == TAKT_OK);
	}
	return NULL;
}

static void no_wake_up_is_lost(void)
{
	struct takt_job jobs[TAKT_POLL_ENTRIES_MAX];
	struct takt_verdict verdict = {.path = TAKT_PATH_PRIMARY};
	struct bench bench;
	pthread_t thread;

	start(&bench);
	CHECK(pthread_create(&thread, NULL, submit_and_ring, &bench) == 0);
	for (uint64_t done = 0; done < WAKE_UPS;) {
		int woke = takt_server_wait(&bench.server, takt_clock_ns() + UINT64_C(30000000000), 0);
		CHECK(woke & TAKT_WOKE_SUBMISSIONS);
		for (uint32_t i = 0, found = takt_server_poll(&bench.server, takt_clock_ns(), jobs); i < found;
		     i++, done++)
			CHECK(takt_server_complete(&bench.server, 0, jobs[i].slot, &verdict) == 0);
	}
	pthread_join(thread, NULL);
	finish(&bench);
}

/* ---- layouts and histograms ---- */

static void mutated_header_is_never_followed_outside(void)
{
	static const uint32_t words[] = {0, 1, 8, 64, 4096, 4097, 65535, INT32_MAX, UINT32_MAX};
	struct takt_layout layout, read;
	uint32_t *copy, accepted = 0;
	size_t size;
	void *map;
	int memfd;

	declare(&layout, 1);
	size = layout.total_size;
	memfd = takt_layout_create(&layout);
	CHECK(takt_map(memfd, size, 1, &map) == 0);
	copy = malloc(size); /* the sanitizer sees a read past this one */
	CHECK(copy);
	for (size_t at = 0; at < (TAKT_HEADER_BYTES + 2 * sizeof(struct takt_tensor_entry)) / 4; at++) {
		for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
			memcpy(copy, map, size);
			copy[at] = words[i];
			if (takt_layout_read(copy, size, &read) == 0)
				accepted++;
			takt_layout_free(&read);
		}
	}
	memcpy(copy, map, size);
	for (size_t shorter = 0; shorter < size; shorter += 509)
		CHECK(takt_layout_read(copy, shorter, &read) < 0);
	CHECK(takt_layout_read(copy, size, &read) == 0);
	CHECK(memcmp(read.tensors, layout.tensors, 2 * sizeof(struct takt_tensor_entry)) == 0);
	CHECK(accepted > 0); /* periods, names: not everything is a structure */
	takt_layout_free(&read);
	takt_layout_free(&layout);
	takt_unmap(map, size);
	free(copy);
	close(memfd);
}

static void buckets_leave_no_gap(void)
{
	for (uint32_t i = 0; i + 1 < TAKT_HIST_BUCKETS; i++) {
		uint64_t upper = takt_hist_upper_ns(i);
		CHECK(takt_hist_index(upper) == i);
		CHECK(takt_hist_index(upper + 1) == i + 1);
	}
	CHECK(takt_hist_index(UINT64_MAX) == TAKT_HIST_BUCKETS - 1);
}

int main(int argc, char **argv)
{
	(void)argv;
	buckets_leave_no_gap();
	mutated_header_is_never_followed_outside();
	hostile_memory_changes_nothing_private(argc > 1);
	no_wake_up_is_lost();
	return 0;
}
