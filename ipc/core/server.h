/* SPDX-License-Identifier: Apache-2.0 */
/*
 * server.h - the daemon's side of the lanes: one takt_server per executor, shared by server.c (lanes, entries,
 * completions), ledger.c (what was taken and done), doorbell.c (waiting and being woken), standby.c (lanes of ledgers that
 * another executor owns at present) and succession.c (how a ledger passes from one executor to another).
 *
 * Ownership: a takt_server belongs to the executor's one thread, during engine runs by turns to the watch (watch.c);
 * nothing in it is locked and nothing relies on Python's GIL for that. What another thread or process may look at meanwhile
 * is exactly the mapped files (lanes, ledger, statistics, journal), through the helpers of lib.h, and a takt_member, which
 * says itself who writes what.
 */
#ifndef TAKT_SERVER_H
#define TAKT_SERVER_H

#include <pthread.h>
#include <sched.h>

#include "lib.h"

/* ---- ledger.c: daemon-only memory that survives the executor -------------------------------------------------------- */

enum takt_ledger_state { TAKT_LEDGER_FREE = 0, TAKT_LEDGER_TAKEN = 1, TAKT_LEDGER_DONE = 2 };

struct takt_ledger_slot {
	uint32_t state; /* enum takt_ledger_state; written last, with release */
	uint32_t flags; /* of the submission */
	uint64_t sequence;
	uint64_t submit_index; /* where in the submit ring the entry was */
	uint64_t deadline_ns;
	uint64_t release_ns;
	uint64_t taken_ns;
	uint64_t started_ns;
	uint64_t completion_index; /* DONE: where in the completion ring the image goes or went */
	struct takt_completion image;
};
_Static_assert(sizeof(struct takt_ledger_slot) == 128, "ledger slot");

struct takt_ledger_lane {
	uint32_t used;
	uint32_t area; /* output area of the executor that serves it */
	uint64_t submit_head;
	uint64_t next_sequence;
	uint64_t completion_tail;
	uint64_t last_release_ns;
	uint64_t memory; /* inode of the lane's memfd: what is said here is about that memory and no other */
	uint64_t submitted; /* what the statistics say once the job taken last is counted */
	uint64_t answered;  /* and the job done last, of its status */
	struct takt_ledger_slot slots[TAKT_SLOTS_MAX];
};
_Static_assert(offsetof(struct takt_ledger_lane, slots) == 64, "ledger lane");

/* Who serves the ledger and who is next. Members are numbers above 0, given by the supervisor; 0 is nobody. */
struct takt_succession {
	uint32_t bell;          /* futex: counts changes in this line; everybody who waits for one sleeps on it */
	uint32_t successor;     /* supervisor: the member that may take the lock next */
	uint32_t release_asked; /* supervisor: the member that is asked to hand over */
	uint32_t owner;         /* whoever holds the lock; if it is not 0 when the lock is free, that owner died */
	uint32_t fenced;        /* successor: the owner that it has killed */
	uint32_t ping;          /* successor: counts questions whether the owner's one thread is alive */
	uint32_t how;           /* enum takt_news: how the owner came to it */
	uint32_t pong;          /* owner's member thread: the last ping it has heard */
	uint64_t since_ns;
	uint64_t takeovers;
	uint64_t fences;
	uint8_t pad1[8];
	/* the owner's one thread, on its path; a line of its own */
	uint64_t progress;       /* counts signs of life */
	uint64_t run_started_ns; /* 0: no run */
	uint64_t run_budget_ns;  /* written before run_started_ns */
	uint8_t pad2[40];
};
_Static_assert(sizeof(struct takt_succession) == 128, "succession");
_Static_assert(offsetof(struct takt_succession, progress) == 64, "succession");

struct takt_ledger_page {
	char magic[8]; /* "TAKTLDGR" */
	uint32_t version;
	uint32_t lane_count;
	uint8_t pad0[48];
	union {
		pthread_mutex_t mutex; /* robust, process-shared; held by a thread of the owner while it lives */
		uint8_t room[256];
	} owner_lock;
	struct takt_succession succession;
	uint8_t pad1[4096 - 448];
	struct takt_ledger_lane lanes[];
};
_Static_assert(offsetof(struct takt_ledger_page, owner_lock) == 64, "ledger page");
_Static_assert(sizeof(pthread_mutex_t) <= 256, "the lock's room");
_Static_assert(offsetof(struct takt_ledger_page, succession) == 320, "ledger page");
_Static_assert(offsetof(struct takt_ledger_page, lanes) == 4096, "ledger page");

/* ---- the server ------------------------------------------------------------------------------------------------------ */

#define TAKT_NS_PER_MS UINT64_C(1000000)
enum {
	TAKT_LOOK_NS = 100000,         /* while awake, descriptors are looked at this often */
	TAKT_TEND_NS = 10000000,       /* idle lanes are put to rest and muted ones heard again this often */
	TAKT_IDLE_NS = 100000000,      /* a lane without entries for this long (and 4 periods) is no longer scanned */
	TAKT_BELL_WINDOW_NS = 100000000,
	TAKT_BELL_BUDGET = 32,         /* doorbells beyond the jobs they announced, per lane and window */
	TAKT_BELL_DRAIN_MAX = 64,      /* messages taken off one descriptor at a time */
	TAKT_MUTE_NS = 20000000,       /* how long an abused descriptor is not listened to */
	TAKT_MUTED_SCAN_NS = 2000000,  /* and how often that lane's ring is then looked at while asleep */
	TAKT_EVENTS_MAX = 32,
	TAKT_WATCH_TICK_NS = 500000,   /* the watch looks this often during runs: an answer is that late, and a wake-up */
	TAKT_WATCH_AFTER_NS = 250000,  /* and leaves runs alone that have just begun */
	TAKT_WITNESS_LATE_NS = 50000,  /* a timer that goes off this late was kept from it; a wake-up takes less */
	TAKT_WITNESS_EVERY_NS = 100000,
	TAKT_THREAD_STACK_BYTES = 65536,
	TAKT_LEDGERS_MAX = 8,         /* that one executor can serve: its own and those it stands in for */
	TAKT_MEMBERS_MAX = 16,        /* of one ledger, that an executor knows how to fence */
	TAKT_TURN_STEP_NS = 1000000,  /* a successor looks this often at an owner that has something to do */
	TAKT_TURN_LAST_NS = 50000,    /* but as soon as the verdict is due, and never sooner than that again */
	TAKT_STANDSTILL_NS = 200000000, /* so much longer may an owner be silent whose core stands still */
	TAKT_TURN_REST_NS = 10000000, /* and this often once it had nothing to do for TAKT_TURN_REST_AFTER_NS */
	TAKT_TURN_REST_AFTER_NS = 1000000000,
	TAKT_BUDGET_UNKNOWN_NS = 1000000000, /* of a run on a lane whose budget nobody has told */
};
#define TAKT_HANG_NS_MAX (UINT64_C(1) << 62) /* so that the sum of two fits */
_Static_assert(TAKT_LEDGERS_MAX * TAKT_LANES_MAX <= UINT16_MAX, "a journal record has 16 bits for the lane");

enum {
	TAKT_WOKE_SUBMISSIONS = 1,
	TAKT_WOKE_CONTROL = 2,
	TAKT_WOKE_TIMEOUT = 4,
	TAKT_WOKE_HANGUP = 8,
	TAKT_WOKE_SUCCESSION = 16,
};
/* What a member's thread tells its executor: the ledger is ours now, and how that came; or that we are asked for it. */
enum takt_news { TAKT_NEWS_CLEAN = 1, TAKT_NEWS_DIED = 2, TAKT_NEWS_HUNG = 4, TAKT_NEWS_ASKED = 8 };
/* epoll data of the descriptors that belong to no lane */
#define TAKT_EPOLL_CONTROL UINT64_MAX
#define TAKT_EPOLL_SUCCESSION (UINT64_MAX - 1)
/* takt_job.flags: not a job, the lane's client broke the protocol; slot 0. Or: a job that the watch has answered; one that
 * came during a run is handed out twice, as the job that it was first. Or: a submission that poll has left to the executor
 * to record, since it comes together with something else and the record must keep their order. */
enum { TAKT_JOB_ENDED = 0x8000, TAKT_JOB_ANSWERED = 0x4000, TAKT_JOB_UNRECORDED = 0x2000 };

/* One served lane. Not in memory that a client can reach. */
struct takt_served {
	/* what each scan needs comes first: one cache line */
	struct takt_rings rings;
	uint64_t pending; /* a bit per slot whose job is not completed */
	uint64_t empty_ns; /* last time that its ring was found empty */
	uint64_t active_since_ns;
	uint64_t last_entry_ns;
	uint64_t idle_limit_ns;
	struct takt_ledger_lane *ledger;
	struct takt_stats_block *stats;
	uint8_t *base;
	struct takt_shape *shapes; /* dynamic lanes: slot_count * input_count private copies */
	uint64_t shaped;           /* a bit per slot whose submission carried shapes */
	uint64_t outputs_shaped;   /* a bit per slot whose completion carries shapes */
	uint64_t bell_window_ns;
	uint64_t muted_until_ns; /* 0: listened to */
	uint32_t bells;
	uint32_t bell_credit;
	uint32_t index;
	uint32_t area;
	uint32_t active_at; /* place in the active list; TAKT_DORMANT when only a doorbell wakes it */
	uint32_t closed;    /* ended for a broken protocol, waits for takt_server_remove */
	uint32_t listening; /* its descriptor is in the epoll set */
	uint32_t standby;   /* only mapped: ledger and client are another executor's business */
	uint32_t recover;   /* starts from what the ledger says */
	uint32_t home;      /* which of the server's ledgers */
	uint64_t memory;    /* as in takt_ledger_lane */
	uint64_t budget_ns; /* a run that begins with this lane is hung beyond it; 0: not known */
	uint32_t runs_late; /* on_late: run: the watch answers none of its jobs */
	uint32_t beats;     /* a clock loop whose phase is known */
	uint64_t phase_ns;  /* its beats are at phase + k * period */
	uint64_t next_arrival_ns;              /* a loop's next job arrives no earlier, as far as the scheduler has said */
	uint64_t hopeless_ns[TAKT_SLOTS_MAX];  /* a job not started by then can't make its deadline; 0: not known */
	int wake_fd;
	struct takt_layout layout;
};
#define TAKT_DORMANT UINT32_MAX

/* A ledger and its statistics; its lanes are first_lane .. first_lane + page->lane_count - 1 of the server. */
struct takt_home {
	struct takt_ledger_page *page;
	struct takt_stats_page *stats;
	uint64_t page_bytes;
	uint64_t stats_bytes;
	struct takt_member *member; /* NULL: we take no part in its succession, it is simply ours */
	uint32_t first_lane;
};

/* How a lane is to be served. */
struct takt_service {
	uint32_t stats_block;
	uint32_t area;
	int recover; /* go on from the ledger */
	int dormant; /* map it, no more */
};

struct takt_server {
	struct takt_served **lanes; /* by lane number; NULL where none */
	uint32_t *active;           /* dense list of the lanes that are scanned */
	uint32_t lane_limit;
	uint32_t lane_count; /* without those on standby */
	uint32_t active_count;
	uint32_t muted_count;
	uint32_t recording; /* poll writes what it hands out into the journal */
	uint32_t pending_count; /* jobs taken and not completed, over all lanes */
	struct takt_watch *watch;     /* NULL: none */
	struct takt_witness *witness; /* NULL: none; its owner's */
	uint32_t start;  /* round-robin start of the next poll */
	uint32_t events; /* TAKT_WOKE_* seen and not yet reported */
	uint64_t all_empty_ns; /* last time that all active rings were found empty */
	uint64_t looked_ns;
	uint64_t tended_ns;
	uint64_t slept_ns;
	int epoll_fd;
	int control_fd;
	int succession_fd; /* eventfd of this process alone, rung by its member threads; -1: none yet */
	uint32_t home_count;
	uint32_t owned_count;
	struct takt_succession *owned[TAKT_LEDGERS_MAX]; /* of the ledgers that have members, those that are ours now */
	struct takt_home homes[TAKT_LEDGERS_MAX];
	struct takt_journal_page *journal;
	uint64_t journal_bytes;
};

/* Kinds of journal records that poll writes; the others are the executor's. */
enum { TAKT_RECORD_SUBMIT = 1, TAKT_RECORD_DEADLINE = 2 };

struct takt_job {
	uint64_t sequence;
	uint64_t deadline_ns; /* as submitted: 0 = the loop's own, or none */
	uint64_t release_ns;
	uint32_t lane;
	uint32_t slot;
	uint32_t flags; /* TAKT_SUBMIT_*, or TAKT_JOB_ENDED: then deadline_ns is the enum takt_detach_reason */
};

/* What an executor says about a job that is over. deadline_ns 0: as recorded. */
struct takt_verdict {
	uint64_t ended_ns;
	uint64_t deadline_ns;
	uint16_t status;
	uint16_t flags;
	uint16_t path;
	uint16_t cause;
	uint32_t cause_detail;
};

int takt_ledger_create(uint32_t lanes);
int takt_ledger_open(int fd, struct takt_ledger_page **page, uint64_t *size);
void takt_ledger_reset(struct takt_ledger_lane *lane, uint32_t area, uint64_t memory);
void takt_ledger_take(struct takt_served *lane, const struct takt_submission *entry, uint64_t release_ns, uint64_t now_ns);
/* Continues a lane from its ledger: publishes what was done and maybe not published, finds what was taken. */
void takt_ledger_recover(struct takt_served *lane);

/* Maps the three files and makes the epoll set. The descriptors stay the caller's. control_fd may be -1. */
int takt_server_init(struct takt_server *server, int ledger_fd, int stats_fd, int journal_fd, int control_fd);
/* Another supervisor, or none for now (-1). Call it before the old descriptor is closed. */
int takt_server_set_control(struct takt_server *server, int control_fd);
/* Unmaps everything. Pending jobs are left in the ledger for a successor. */
void takt_server_destroy(struct takt_server *server);
/* Serves a lane. Owns memfd, wake_fd and layout->tensors from the call on, also when it fails.
 * -ERANGE lane or block number, -EBUSY lane number in use, -EINVAL layout and memfd don't agree, -EPERM not sealed, or
 * not dormant while the ledger isn't ours. */
int takt_server_add(struct takt_server *server, uint32_t lane, int memfd, int wake_fd, struct takt_layout *layout,
		    const struct takt_service *service);
/* A job of this lane is run however late it is (on_late: run). */
int takt_server_runs_late(struct takt_server *server, uint32_t lane);
int takt_server_beats(struct takt_server *server, uint32_t lane, uint64_t phase_ns);
/* Ends a lane: pending jobs are completed with `status`, or dropped silently when it is negative. Returns their number.
 * One on standby is only unmapped. */
int takt_server_remove(struct takt_server *server, uint32_t lane, int status, uint64_t now_ns);
uint32_t takt_server_poll(struct takt_server *server, uint64_t now_ns, struct takt_job *jobs);
uint32_t takt_server_poll_rings(struct takt_server *server, uint64_t now_ns, struct takt_job *jobs, uint32_t room);
/* Completions of the lanes there are say this epoch from now on: a configuration was applied that changes nothing here. */
void takt_server_set_epoch(struct takt_server *server, uint64_t epoch);
/* The job can't make its deadline if it has not started by hopeless_ns (0: never mind): for the watch. */
int takt_server_expect(struct takt_server *server, uint32_t lane, uint32_t slot, uint64_t hopeless_ns);
/* A run begins: until takt_server_end the watch may answer other jobs. next_arrival_ns: of the lane's loop, 0: none.
 * more: further jobs of the same run follow; it begins with the last. cost_ns: as reckoned with, 0: not known. */
int takt_server_begin(struct takt_server *server, uint32_t lane, uint32_t slot, uint64_t now_ns, uint64_t deadline_ns,
		      uint64_t next_arrival_ns, int more, uint64_t cost_ns);
void takt_server_end(struct takt_server *server);
int takt_server_complete(struct takt_server *server, uint32_t lane, uint32_t slot, const struct takt_verdict *verdict);
int takt_server_wait(struct takt_server *server, uint64_t until_ns, uint64_t spin_until_ns); /* TAKT_WOKE_*; 0: a signal */
struct takt_served *takt_server_lane(const struct takt_server *server, uint32_t lane); /* NULL: no such lane */

/* standby.c. -ENOENT: no such lane; -EALREADY: it is on standby, or served, already; -EPERM: the ledger is not ours. */
int takt_server_open_ledger(struct takt_server *server, int ledger_fd, int stats_fd); /* its number; -EMFILE */
struct takt_home *takt_server_home(struct takt_server *server, uint32_t lane); /* that the number falls into, or NULL */
int takt_server_activate(struct takt_server *server, uint32_t lane); /* number of unfinished jobs */
int takt_server_release(struct takt_server *server, uint32_t lane);  /* number of jobs left to the next owner */
int takt_server_set_area(struct takt_server *server, uint32_t lane, uint32_t area);
int takt_served_start(struct takt_server *server, struct takt_served *lane);

/* succession.c: the supervisor's side, */
int takt_succession_init(struct takt_ledger_page *page);
int takt_succession_open(int ledger_fd, struct takt_ledger_page **page); /* unmap sizeof(**page) of it */
void takt_succession_set(struct takt_succession *succession, uint32_t successor);
void takt_succession_ask_release(struct takt_succession *succession, uint32_t member);
/* and an executor's. -ENOENT: no such ledger, or not joined. */
int takt_server_join(struct takt_server *server, uint32_t home, uint32_t id, int priority, const cpu_set_t *cores,
		     uint64_t hang_after_ns);
int takt_server_leave(struct takt_server *server, uint32_t home);
int takt_server_set_hang_after(struct takt_server *server, uint32_t home, uint64_t hang_after_ns);
int takt_server_set_pidfd(struct takt_server *server, uint32_t home, uint32_t id, int pidfd); /* owns pidfd */
uint32_t takt_server_news(struct takt_server *server, uint32_t home); /* enum takt_news, or-ed; makes the ledger ours */
int takt_server_hand_over(struct takt_server *server, uint32_t home); /* -EPERM: it is not ours */
int takt_home_is_ours(const struct takt_home *home);
void takt_member_add_lane(struct takt_member *member, const struct takt_served *lane);
void takt_member_drop_lane(struct takt_member *member, const struct takt_served *lane);
void takt_succession_heard(struct takt_server *server, uint64_t now_ns);

/* The executor's one thread passed by: no successor need worry. */
static inline void takt_server_alive(const struct takt_server *server)
{
	for (uint32_t i = 0; i < server->owned_count; i++)
		takt_count(&server->owned[i]->progress, 1);
}

/* It goes into an engine and won't be heard of for up to the budget; 0: it is back. */
static inline void takt_server_running(const struct takt_server *server, uint64_t started_ns, uint64_t budget_ns)
{
	for (uint32_t i = 0; i < server->owned_count; i++) {
		takt_store_u64(&server->owned[i]->run_budget_ns, budget_ns);
		takt_store_cursor(&server->owned[i]->run_started_ns, started_ns); /* release: the budget is there */
		takt_count(&server->owned[i]->progress, 1);
	}
}

/* watch.c. cores NULL: wherever the caller runs; priority 0: SCHED_OTHER. */
int takt_watch_start(struct takt_server *server, int priority, const cpu_set_t *cores);
void takt_watch_stop(struct takt_server *server);
void takt_watch_begin(struct takt_server *server, uint32_t lane, uint64_t now_ns, uint64_t cost_ns);
void takt_watch_end(struct takt_server *server);
uint32_t takt_watch_collect(struct takt_server *server, struct takt_job *jobs);
void takt_watch_forget(struct takt_server *server, uint32_t lane); /* what it found there and poll has not handed out */
/* A thread without Python: `priority` FIFO on `cores`; signals are for other threads. */
int takt_thread_start(pthread_t *thread, int priority, const cpu_set_t *cores, void *(*entry)(void *), void *argument);

/* process.c. By a signal or a debugger, or dying, or in the kernel for good; also where nothing can be learnt. */
int takt_process_is_stopped(int pidfd);

/* witness.c. On the executor's own core, above its priority; due_ns: when most runs are over. */
int takt_witness_start(struct takt_witness **out, int priority, const cpu_set_t *cores);
void takt_witness_stop(struct takt_witness *witness);
void takt_witness_expect(struct takt_witness *witness, uint64_t due_ns);
void takt_witness_over(struct takt_witness *witness); /* the run is */
/* For how long the core stood still in this run from due_ns on; what is no longer than a wake-up takes counts for nothing. */
uint64_t takt_witness_absent_ns(const struct takt_witness *witness, uint64_t now_ns);

/* Between the files */
void takt_served_publish(struct takt_served *lane, struct takt_ledger_slot *slot);
int takt_served_copy_shapes(struct takt_served *lane, uint32_t slot);
void takt_doorbell_wake_client(const struct takt_served *lane);
int takt_doorbell_listen(struct takt_server *server, struct takt_served *lane);
void takt_doorbell_ignore(struct takt_server *server, struct takt_served *lane);
void takt_doorbell_activate(struct takt_server *server, struct takt_served *lane, uint64_t now_ns);
void takt_doorbell_deactivate(struct takt_server *server, struct takt_served *lane);
/* Bounded upkeep on the poll path: at most one epoll_pwait2 without waiting per TAKT_LOOK_NS. */
void takt_doorbell_tend(struct takt_server *server, uint64_t now_ns);

static inline int takt_served_has_entries(const struct takt_served *lane)
{
	return takt_load_cursor(&lane->rings.cursors->submit_tail) != lane->rings.submit_head;
}

#endif
