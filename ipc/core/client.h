/* SPDX-License-Identifier: Apache-2.0
 *
 * client.h: what the client's .c files share (client.c, message.c, lane.c, reattach.c, tensor.c, wait.c) and the Python binding
 * needs. Private.
 */
#ifndef TAKT_CLIENT_H
#define TAKT_CLIENT_H

#include <pthread.h>
#include <sys/types.h>

#include "lib.h"
#include "takt.h"

#define TAKT_ERROR_BYTES	1024u
#define TAKT_CONTROL_TIMEOUT_NS 5000000000u /* for an answer on lanes.sock: the supervisor is an ordinary process */
#define TAKT_TIMEOUT_MIN_NS	20000000u   /* TAKT_TIMEOUT_DEFAULT is at least this */
#define TAKT_TIMEOUT_MODEL_NS	1000000000u /* TAKT_TIMEOUT_DEFAULT where there is neither period nor deadline */
#define TAKT_LIVENESS_NS	100000000u  /* longest sleep before looking whether the daemon is still there */

/* The life of a slot on the client's side. One of them may also be `next` (free, its inputs handed out), one `last`. */
enum takt_slot_state {
	TAKT_SLOT_FREE,	   /* ours; may be written */
	TAKT_SLOT_PENDING, /* the daemon's */
	TAKT_SLOT_DONE,	   /* ours; its reply has not been asked for yet */
	TAKT_SLOT_LAST	   /* ours; the reply handed out last, its outputs must stay */
};

struct takt_client_slot {
	enum takt_slot_state state;
	uint32_t
	    given_up; /* a wait for it has timed out: once done, it may be reclaimed without having been received */
	uint32_t silent; /* it has been answered here: its completion is nobody's news */
	uint64_t submitted_ns;
	uint64_t deadline_ns; /* as submitted; 0: the loop's own */
	struct takt_reply reply;
};

struct takt_node {
	int fd;	     /* -1: not connected */
	pid_t owner; /* the process that connected */
	uint32_t request_id;
	uint32_t daemon_pid;
	uint64_t tend_due_ns;	/* when the connection is looked at next; read without the lock */
	uint64_t tend_pause_ns; /* between two tries to connect again */
	char name[TAKT_NAME_BYTES];
	char path[108];
	char error[TAKT_ERROR_BYTES];
	struct takt_lane *lanes;
	pthread_mutex_t lock; /* over the socket and the list of lanes: lanes may live in threads of their own */
};

struct takt_lane {
	struct takt_node *node; /* NULL once the node was closed */
	struct takt_lane *sibling;
	uint64_t lane_id; /* 0: the daemon that is there now doesn't know it */
	uint64_t token; /* claims the lane from a daemon that was started again; 0: it gave none */
	void *map;
	uint64_t size;
	int memfd;
	int wake_fd;
	struct takt_layout layout;
	struct takt_rings rings;
	uint32_t wait_mode;
	int descriptor_used; /* takt_fileno() was called: ask for a byte instead of a futex wake */
	int ended;	     /* no more submissions; what was completed can still be received */
	uint32_t end_reason;
	int end_told;		 /* by -EPIPE: from now on it may come back */
	int reattach;		 /* takt_set_reattach() */
	uint64_t again_ns;	 /* not to be asked for before */
	uint64_t again_pause_ns; /* then to wait so long */
	struct takt_lane *before; /* the one that ended, still mapped; NULL: none */
	uint64_t next_sequence;
	int next_slot; /* -1: not chosen yet */
	int last_slot; /* -1: no reply yet */
	int input_slot; /* where the last submitted inputs are; -1: nowhere yet */
	uint64_t input_ns; /* since when they are known */
	uint32_t pending;
	int shapes_set;
	struct takt_shape *shapes; /* of the inputs; NULL for a lane with fixed shapes */
	uint32_t local_path; /* what infer answers itself when the deadline has passed: hold, constant, or nothing */
	int local_fd;	     /* -1: none */
	void *local;	     /* one slot more: number slot_count */
	int local_good;	     /* there is an answer in it */
	uint32_t silent;     /* pending slots that are */
	struct takt_client_slot slots[TAKT_SLOTS_MAX + 1];
	char ended_text[TAKT_ERROR_BYTES / 2]; /* what the daemon said about the end */
	char error[TAKT_ERROR_BYTES];
};

/* lane.c: prepares what attach has mapped. */
int takt_lane_init(struct takt_lane *lane);
/* lane.c: takes over completions that have arrived. */
void takt_lane_collect(struct takt_lane *lane);
/* lane.c: 1 with the reply handed out, 0 when there is none yet, -ENOENT, -EPIPE. Never waits. */
int takt_lane_receive(struct takt_lane *lane, uint64_t sequence, struct takt_reply *reply);
/* lane.c: fills in a pending reply, and remembers that its waiter has given up. */
int takt_lane_give_up(struct takt_lane *lane, uint64_t sequence, struct takt_reply *reply);
/* lane.c: the absolute end of a wait that begins now. UINT64_MAX: never. */
uint64_t takt_lane_until(const struct takt_lane *lane, uint64_t sequence, int64_t timeout_ns);
/* lane.c: records that the lane is over, whoever found out. */
void takt_lane_end(struct takt_lane *lane, uint32_t reason, const char *text);
/* lane.c: the lane is over: -EPIPE, with the reason in lane->error. */
int takt_lane_fail_ended(struct takt_lane *lane);
/* reattach.c: the lane that has ended is another one now, or an error with its text in lane->error. */
int takt_lane_again(struct takt_lane *lane);
/* client.c: unmaps and frees, without a word to the daemon. NULL is allowed. */
void takt_lane_free(struct takt_lane *lane);
/* lane.c: where a slot's tensors are. */
char *takt_lane_slot(const struct takt_lane *lane, int slot);
/* lane.c: sets lane->error and returns code. */
int takt_lane_fail(struct takt_lane *lane, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* local.c: takes in what the daemon said behind takt_attached; 0 where that is nothing. */
int takt_local_init(struct takt_lane *lane, const char *body, size_t bytes);
void takt_local_free(struct takt_lane *lane);
/* local.c: whether there is an answer to give. */
int takt_local_ready(const struct takt_lane *lane);
/* local.c: until when a job that is submitted now is waited for; UINT64_MAX: there is nothing to answer it with. */
uint64_t takt_local_due(const struct takt_lane *lane, uint64_t deadline_ns);
/* local.c: takt_submit(), waiting until due_ns for a slot; 0: none became free. */
int64_t takt_local_submit(struct takt_lane *lane, uint64_t deadline_ns, uint64_t due_ns);
/* local.c: answers a job (0: one that could not even be submitted); its completion will be swallowed. */
void takt_local_answer(struct takt_lane *lane, uint64_t sequence, uint64_t due_ns, struct takt_reply *reply);
/* local.c: the last reply's slot is about to be used again. */
void takt_local_keep(struct takt_lane *lane);

/* wait.c: polls memory for a completion or the end of the lane; 1 when there is one, 0 at until_ns. */
int takt_lane_spin(struct takt_lane *lane, uint64_t until_ns);
/* wait.c: the same, on the futex. */
int takt_lane_block(struct takt_lane *lane, uint64_t until_ns);
/* wait.c: the same, waiting in the lane's wait mode. */
int takt_lane_sleep(struct takt_lane *lane, uint64_t until_ns);
/* wait.c: descriptor in use: swallow the daemon's bytes, ask for another one. */
void takt_lane_arm(struct takt_lane *lane);

/* claim.c: after a job: now and then, and never waiting, sees to a connection whose daemon was started again. */
void takt_node_tend(struct takt_node *node, uint64_t now_ns);
/* claim.c: connects again, if the connection has ended. 0, or what connect() said. With the node's lock. */
int takt_node_reconnect(struct takt_node *node);

/* message.c: takes in what the daemon said without being asked (LANE_ENDED), never waits. */
void takt_node_drain(struct takt_node *node);

#endif
