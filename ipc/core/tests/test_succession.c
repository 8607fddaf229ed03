/* SPDX-License-Identifier: Apache-2.0
 *
 * test_succession.c: a ledger that passes from process to process by SIGKILL, by SIGSTOP and by being handed over; each
 * job of its one lane completes once. Runs as it is and under the sanitizers.
 */
#include "../server.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                     \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

enum { IN_FLIGHT = 3, TURNS = 30, JOBS_MAX = TURNS * 80 };
#define PATIENCE_NS UINT64_C(60000000000)

struct bench {
	struct takt_layout layout;
	struct takt_ledger_page *page;
	struct takt_rings rings; /* the client's */
	void *map;
	uint64_t submitted, completed;
	uint8_t seen[JOBS_MAX]; /* by sequence number */
	int ledger_fd, stats_fd, journal_fd, memfd;
	int wake[2]; /* daemon's end, client's end */
};

static const struct takt_tensor_entry tensors[2] = {
    {.name = "obs", .dtype = TAKT_FP32, .rank = 1, .dims = {48}},
    {.name = "action", .dtype = TAKT_FP32, .rank = 1, .dims = {12}},
};

static void declare(struct takt_layout *layout)
{
	*layout = (struct takt_layout){.kind = TAKT_KIND_MODEL,
				       .slot_count = 2 * IN_FLIGHT,
				       .tensor_count = 2,
				       .input_count = 1,
				       .name = "m",
				       .model_name = "m"};
	layout->tensors = malloc(sizeof(tensors));
	CHECK(layout->tensors);
	memcpy(layout->tensors, tensors, sizeof(tensors));
	CHECK(takt_layout_compute(layout) == 0);
}

static void start(struct bench *bench)
{
	memset(bench, 0, sizeof(*bench));
	declare(&bench->layout);
	bench->ledger_fd = takt_ledger_create(1);
	bench->stats_fd = takt_stats_create(1);
	bench->journal_fd = takt_journal_create(64);
	bench->memfd = takt_layout_create(&bench->layout);
	CHECK(takt_succession_open(bench->ledger_fd, &bench->page) == 0);
	CHECK(takt_map(bench->memfd, bench->layout.total_size, 1, &bench->map) == 0);
	takt_rings_init(&bench->rings, bench->map, &bench->layout);
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, bench->wake) == 0);
}

static void finish(struct bench *bench)
{
	takt_unmap(bench->map, bench->layout.total_size);
	takt_unmap(bench->page, sizeof(*bench->page));
	takt_layout_free(&bench->layout);
	close(bench->ledger_fd);
	close(bench->stats_fd);
	close(bench->journal_fd);
	close(bench->memfd);
	close(bench->wake[0]);
	close(bench->wake[1]);
}

/* ---- a member ---- */

static void open_member(struct bench *bench, struct takt_server *server, uint32_t id, uint64_t hang_after_ns)
{
	const struct takt_service service = {.area = id % 2, .recover = 1, .dormant = 1};
	struct takt_layout layout;

	declare(&layout);
	CHECK(takt_server_init(server, bench->ledger_fd, bench->stats_fd, bench->journal_fd, -1) == 0);
	CHECK(takt_server_add(server, 0, dup(bench->memfd), dup(bench->wake[0]), &layout, &service) == 0);
	CHECK(takt_server_join(server, 0, id, 0, NULL, hang_after_ns) == 0);
}

static void complete(struct takt_server *server, uint32_t slot)
{
	struct takt_verdict verdict = {.ended_ns = takt_clock_ns()};

	CHECK(takt_server_begin(server, 0, slot, verdict.ended_ns, 0, 0, 0, 0) == 0);
	takt_server_end(server);
	CHECK(takt_server_complete(server, 0, slot, &verdict) == 0);
}

static void take_over(struct takt_server *server)
{
	struct takt_served *lane = takt_server_lane(server, 0);

	CHECK(takt_server_activate(server, 0) >= 0);
	for (uint64_t left = lane->pending; left != 0; left &= left - 1)
		complete(server, (uint32_t)__builtin_ctzll(left));
}

static void serve(struct bench *bench, uint32_t id, uint32_t other, int pidfd)
{
	struct takt_job jobs[TAKT_POLL_ENTRIES_MAX];
	struct takt_server server;

	open_member(bench, &server, id, UINT64_C(100000000));
	if (pidfd >= 0)
		CHECK(takt_server_set_pidfd(&server, 0, other, pidfd) == 0);
	for (;;) {
		uint32_t found, news = 0;
		if (takt_server_wait(&server, 0, 0) & TAKT_WOKE_SUCCESSION)
			news = takt_server_news(&server, 0);
		if (news & (TAKT_NEWS_CLEAN | TAKT_NEWS_DIED | TAKT_NEWS_HUNG))
			take_over(&server);
		if (news & TAKT_NEWS_ASKED)
			CHECK(takt_server_hand_over(&server, 0) == 0);
		found = takt_server_poll(&server, takt_clock_ns(), jobs);
		for (uint32_t i = 0; i < found; i++)
			complete(&server, jobs[i].slot);
	}
}

static pid_t start_member(struct bench *bench, uint32_t id, uint32_t other, pid_t other_pid)
{
	int pidfd = other_pid > 0 ? (int)syscall(SYS_pidfd_open, other_pid, 0) : -1;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0)
		serve(bench, id, other, pidfd);
	if (pidfd >= 0)
		close(pidfd);
	return pid;
}

/* ---- the client and the supervisor ---- */

static void submit(struct bench *bench)
{
	struct takt_submission entry = {.sequence = ++bench->submitted, .submitted_ns = takt_clock_ns()};
	int doorbell;

	CHECK(entry.sequence < JOBS_MAX);
	entry.slot = (uint32_t)(entry.sequence % bench->layout.slot_count);
	CHECK(takt_rings_submit(&bench->rings, &entry, &doorbell) == 0);
}

static void collect(struct bench *bench)
{
	struct takt_completion done;

	if (takt_load_word(&bench->rings.cursors->daemon_sleeping))
		(void)!send(bench->wake[1], "", 1, MSG_DONTWAIT);
	while (takt_rings_collect(&bench->rings, &done)) {
		CHECK(done.status == TAKT_OK);
		CHECK(done.sequence <= bench->submitted && !bench->seen[done.sequence]);
		bench->seen[done.sequence] = 1;
		bench->completed++;
	}
	sched_yield();
}

/* Keeps jobs in flight until that many more have completed and `owner` has the ledger. */
static void go_until(struct bench *bench, uint64_t jobs, uint32_t owner)
{
	uint64_t goal = bench->completed + jobs, late_ns = takt_clock_ns() + PATIENCE_NS;

	while (bench->completed < goal || takt_load_state(&bench->page->succession.owner) != owner) {
		CHECK(takt_clock_ns() < late_ns);
		if (bench->completed < goal)
			while (bench->submitted - bench->completed < IN_FLIGHT)
				submit(bench);
		collect(bench);
	}
}

static void drain(struct bench *bench)
{
	uint64_t late_ns = takt_clock_ns() + PATIENCE_NS;

	while (bench->completed < bench->submitted) {
		CHECK(takt_clock_ns() < late_ns);
		collect(bench);
	}
}

static void end_by(pid_t pid, int number)
{
	int status;

	kill(pid, number);
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void every_job_completes_once(void)
{
	struct bench bench;
	struct takt_succession *succession;
	pid_t owner, next;
	uint32_t id = 1;

	start(&bench);
	succession = &bench.page->succession;
	owner = start_member(&bench, id, 0, 0);
	takt_succession_set(succession, id);
	for (; id <= TURNS; id++) {
		go_until(&bench, 1 + id * 7 % 50, id);
		next = start_member(&bench, id + 1, id, owner);
		takt_succession_set(succession, id + 1);
		if (id % 3 == 0) {
			takt_succession_ask_release(succession, id);
			go_until(&bench, 5, id + 1);
			end_by(owner, SIGKILL);
		} else if (id % 10 == 0) {
			kill(owner, SIGSTOP);
			go_until(&bench, 5, id + 1);
			CHECK(takt_load_u64(&succession->fences) > 0);
			end_by(owner, 0);
		} else {
			end_by(owner, SIGKILL);
			go_until(&bench, 5, id + 1);
		}
		owner = next;
	}
	drain(&bench);
	end_by(owner, SIGKILL);
	CHECK(takt_load_u64(&succession->takeovers) == TURNS + 1);
	printf("  %u turns, %lu jobs\n", TURNS, (unsigned long)bench.completed);
	finish(&bench);
}

/* ---- coming and going ---- */

static void leaving_gives_everything_back(void)
{
	struct takt_server server;
	struct bench bench;

	start(&bench);
	for (uint32_t i = 1; i <= 50; i++) {
		open_member(&bench, &server, i, UINT64_C(100000000));
		CHECK(takt_server_set_pidfd(&server, 0, 99, dup(bench.memfd)) == 0);
		CHECK(takt_server_set_pidfd(&server, 0, 99, dup(bench.memfd)) == 0);
		CHECK(takt_server_set_pidfd(&server, 0, 98, dup(bench.memfd)) == 0);
		CHECK(takt_server_set_pidfd(&server, 0, 98, -1) == 0);
		if (i % 2) {
			takt_succession_set(&bench.page->succession, i);
			CHECK(takt_server_wait(&server, takt_clock_ns() + PATIENCE_NS, 0) == TAKT_WOKE_SUCCESSION);
			CHECK(takt_server_news(&server, 0) == TAKT_NEWS_CLEAN);
			CHECK(takt_server_activate(&server, 0) == 0);
		}
		if (i % 5 == 0)
			CHECK(takt_server_leave(&server, 0) == 0);
		takt_server_destroy(&server);
		CHECK(takt_load_state(&bench.page->succession.owner) == 0);
	}
	finish(&bench);
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	every_job_completes_once();
	leaving_gives_everything_back();
	return 0;
}
