/* SPDX-License-Identifier: Apache-2.0
 *
 * takt.h: the public C API of taktd's clients (libtakt).
 *
 * A program connects to the daemon's lane socket, attaches a control loop (or a model) by name and from then on
 * calls it through shared memory: it writes the inputs where the engine reads them, submits, waits, and reads the
 * outputs where the engine wrote them. No copy, no socket and no lock is on that path.
 *
 *     takt_node *node; takt_lane *lane;
 *     struct takt_tensor obs, action; struct takt_reply reply;
 *     if (takt_connect(&node, NULL, 0) < 0)
 *         die(takt_error(node));
 *     if (takt_attach(node, "go1_walk", TAKT_KIND_ANY, TAKT_WAIT_HYBRID, 5000000000, &lane) < 0)
 *         die(takt_error(node));
 *     takt_input(lane, "obs", &obs);            fill obs.data
 *     takt_infer(lane, 0, TAKT_TIMEOUT_DEFAULT, &reply);
 *     if (reply.status == TAKT_OK)
 *         takt_output(lane, "action", &action); read action.data
 *
 * Rules
 * - Functions return 0 (or a count, or a sequence number) on success and a negative errno on failure. Nothing is
 *   printed; takt_error() and takt_lane_error() have a sentence for a person.
 * - Time is uint64_t/int64_t nanoseconds of CLOCK_MONOTONIC. Times given as `timeout_ns` are relative.
 * - A slot is the client's until takt_submit(), the daemon's until its completion has been received. The slot of the
 *   last reply stays untouched until the next reply is received.
 * - Threads: a lane belongs to one thread at a time; the lanes of one node may be in different threads, which may attach
 *   and detach at the same time. takt_close() must be alone. takt_error() is the text of the node's last failure in any
 *   thread. takt_now(), takt_sleep_until(), takt_realtime() and the name functions may be called from anywhere.
 * - fork: a child must not use its parent's nodes and lanes, except to takt_detach() and takt_close() them, which
 *   then only releases the child's copies. While a child keeps them open the daemon can't notice its parent's death.
 *   exec closes everything.
 *
 * The header is plain C99 and C++17 and uses fixed-width integers only, so that other languages can read it.
 * Numbers defined here are the same on the wire, in Python, in gRPC, in ZeroMQ and in metrics; they never change.
 */
#ifndef TAKT_H
#define TAKT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TAKT_API __attribute__((visibility("default")))
#else
#define TAKT_API
#endif

#define TAKT_WIRE_VERSION 1u

/* Limits that a client can meet. */
#define TAKT_SLOTS_MIN 3u        /* slots of a lane */
#define TAKT_SLOTS_MAX 64u       /* slots of a lane */
#define TAKT_RANK_MAX 8u         /* dimensions of a tensor */
#define TAKT_NAME_MAX 63u        /* bytes of a loop's, model's or client's name, without the NUL */
#define TAKT_TENSOR_NAME_MAX 95u /* bytes of a tensor's name, without the NUL */

/* What a lane is attached to. */
enum {
	TAKT_KIND_ANY = 0,  /* attach only: a loop of that name, else a model of that name */
	TAKT_KIND_LOOP = 1, /* a control loop: reserved place in the schedule, one client at a time */
	TAKT_KIND_MODEL = 2 /* best effort: no reservation, any number of clients */
};

/* How takt_wait() waits. */
enum {
	TAKT_WAIT_BLOCK = 0, /* sleeps in the kernel until the completion: the least CPU */
	TAKT_WAIT_SPIN = 1,  /* polls memory: the least latency, one core busy while waiting */
	TAKT_WAIT_HYBRID = 2 /* polls for TAKT_HYBRID_SPIN_NS, then sleeps */
};
#define TAKT_HYBRID_SPIN_NS 100000u

/* Outcome of a job. Each submitted job gets exactly one of these, or the client is gone. */
enum {
	TAKT_OK = 0,        /* answered; whether in time is a flag (TAKT_LATE) */
	TAKT_EXPIRED = 1,   /* not started: it could not have made its deadline any more */
	TAKT_REFUSED = 2,   /* limits, rights, not admitted */
	TAKT_INVALID = 3,   /* the submission was malformed: flags, deadline or shapes */
	TAKT_FAILED = 4,    /* the engine failed */
	TAKT_LOST = 5,      /* the executor died and there was no time to run the job again */
	TAKT_CANCELLED = 6, /* by takt_cancel(); or a newer input of a clocked loop took its place */
	TAKT_DETACHED = 7,  /* the lane ended */
	TAKT_PENDING = 100  /* local, never on the wire: the wait timed out, the job goes on and can be waited for again */
};

/* Flags of a reply. */
enum {
	TAKT_LATE = 1,     /* ended after its deadline */
	TAKT_OVERRUN = 2,  /* ran longer than its declared cost */
	TAKT_STAND_IN = 4, /* answered by the stand-in executor */
	TAKT_EARLY = 8,    /* submitted before the loop's period allowed it: it ran in slack only */
	TAKT_SHAPES = 16,  /* the outputs have actual shapes (model lanes) */
	TAKT_NOT_FINITE = 32 /* an output has NaN or infinity in it, which its model only flags */
};

/* Who answered. */
enum {
	TAKT_PATH_NONE = 0, /* nobody */
	TAKT_PATH_PRIMARY = 1,
	TAKT_PATH_STAND_IN = 2,
	TAKT_PATH_HOLD = 3,    /* the last answer, held */
	TAKT_PATH_CONSTANT = 4 /* a declared constant */
};

/* Why a deadline was missed. */
enum {
	TAKT_CAUSE_NONE = 0,
	TAKT_CAUSE_BLOCKED_BY = 1,   /* another job held the device; cause_detail is its lane */
	TAKT_CAUSE_OVERRUN = 2,      /* this job, or one before it, ran longer than declared */
	TAKT_CAUSE_LATE_RELEASE = 3, /* submitted too late to make it */
	TAKT_CAUSE_WAKEUP = 4,       /* the executor was woken late */
	TAKT_CAUSE_HANDOVER = 5,     /* the lane was passing to another executor */
	TAKT_CAUSE_STALE_INPUT = 6,  /* the newest input was older than allowed */
	TAKT_CAUSE_MACHINE = 7       /* the machine took the core away: throttling, hypervisor, interrupts */
};

/* Element types: the numbers of ONNX TensorProto.DataType; takt_dtype_name() gives KServe's names. */
enum {
	TAKT_FP32 = 1,
	TAKT_UINT8 = 2,
	TAKT_INT8 = 3,
	TAKT_UINT16 = 4,
	TAKT_INT16 = 5,
	TAKT_INT32 = 6,
	TAKT_INT64 = 7,
	TAKT_BOOL = 9, /* one byte each */
	TAKT_FP16 = 10,
	TAKT_FP64 = 11,
	TAKT_UINT32 = 12,
	TAKT_UINT64 = 13,
	TAKT_COMPLEX64 = 14,
	TAKT_COMPLEX128 = 15,
	TAKT_BF16 = 16,
	TAKT_FP8E4M3FN = 17,
	TAKT_FP8E4M3FNUZ = 18,
	TAKT_FP8E5M2 = 19,
	TAKT_FP8E5M2FNUZ = 20,
	TAKT_UINT4 = 21, /* two per byte, the first in the low half */
	TAKT_INT4 = 22   /* two per byte, the first in the low half */
};

/* Values for timeout_ns. Zero asks without waiting. */
#define TAKT_TIMEOUT_DEFAULT (-2) /* the job's deadline + one period, at least 20 ms */
#define TAKT_TIMEOUT_NEVER (-1)

typedef struct takt_node takt_node; /* one connection to one daemon */
typedef struct takt_lane takt_lane; /* one attached loop or model */

/* One tensor of one slot. `name` is valid as long as the lane, `data` as long as the slot is the client's. */
struct takt_tensor {
	const char *name;
	uint32_t dtype;
	uint32_t rank;
	int64_t dims[8]; /* actual; the declared maximum unless takt_set_shape() or the reply says otherwise */
	uint64_t bytes;  /* of the actual shape */
	void *data;
	uint32_t index;  /* among the inputs, or among the outputs */
	uint32_t reserved;
};

/* One answer. Times are CLOCK_MONOTONIC ns; zero where there is none. */
struct takt_reply {
	uint64_t sequence;
	uint32_t slot;
	uint32_t area; /* which output area of the slot holds the outputs */
	uint32_t status;
	uint32_t flags;
	uint32_t path;
	uint32_t cause;
	uint32_t cause_detail;
	uint32_t epoch; /* number of the configuration that answered */
	uint64_t submitted_ns; /* of a repeated input: when it was submitted first */
	uint64_t taken_ns;
	uint64_t started_ns;
	uint64_t ended_ns;
	uint64_t deadline_ns; /* as judged; 0: none */
	uint64_t queued_ns;   /* from submission to start (to the end, where it was not started) */
	uint64_t run_ns;      /* from start to end */
	uint64_t total_ns;    /* from submission to end; for TAKT_PENDING: until now */
};

/* What a lane is. */
struct takt_lane_info {
	const char *name;  /* of the loop, or of the model */
	const char *model;
	uint32_t kind;
	uint32_t slot_count;
	uint32_t input_count;
	uint32_t output_count;
	uint64_t period_ns; /* 0: model lane */
	uint64_t deadline_ns;
	uint64_t jitter_ns;
	uint64_t epoch;     /* configuration at the time of attaching */
	uint32_t trigger;   /* 0: the client's submission, 1: the daemon's clock */
	uint32_t dynamic;   /* 1: takt_set_shape() is allowed */
	uint64_t slot_stride;
	uint64_t slots_offset;
};

/* ---- connection ---------------------------------------------------------------------------------------------- */

/* Connects to the daemon that listens on `path`; NULL looks at $TAKTD_SOCKET, $TAKTD_RUNTIME_DIR/lanes.sock,
 * $XDG_RUNTIME_DIR/taktd/lanes.sock and /run/taktd/lanes.sock, in this order: the first variable that is set wins,
 * of the last two the first that exists. Waits up to timeout_ns for a daemon that is not there yet.
 * Like sqlite3_open(), it hands out a node even when it fails, so that takt_error() can say why: always
 * takt_close() it. (*node is NULL only when memory ran out.)
 * -ENOENT, -ECONNREFUSED: no daemon; -EACCES; -EPROTO: no common wire version; -ETIMEDOUT: it does not answer. */
TAKT_API int takt_connect(takt_node **node, const char *path, int64_t timeout_ns);

/* Ends the connection and its lanes. Lanes not yet detached must still be given to takt_detach(). NULL is allowed. */
TAKT_API void takt_close(takt_node *node);

/* A sentence about the last failure on this node, "" if there was none. Valid until the next call on the node. */
TAKT_API const char *takt_error(const takt_node *node);

TAKT_API const char *takt_node_name(const takt_node *node); /* the daemon's node name */
TAKT_API const char *takt_node_path(const takt_node *node); /* the socket that was used or tried last */
TAKT_API uint32_t takt_node_pid(const takt_node *node);     /* the daemon's process, as it says itself */

/* Names of the daemon's loops (TAKT_KIND_LOOP) or models (TAKT_KIND_MODEL): *json is an array of objects, UTF-8,
 * NUL-terminated, to be given to takt_free(). */
TAKT_API int takt_list(takt_node *node, uint32_t kind, char **json);
TAKT_API void takt_free(void *memory);

/* ---- lanes --------------------------------------------------------------------------------------------------- */

/* Attaches a loop or a model by name. While the daemon is booting it waits up to timeout_ns. When the daemon was started
 * again since, the node connects again; lanes that are there go on meanwhile and are claimed after one of their next jobs.
 * A lane that has ended (-EPIPE) stays so unless takt_set_reattach() was called: takt_detach() it, attach another one.
 * -ENOENT: no such name; -EBUSY: another client has the loop; -EACCES; -ENOSPC, -EMFILE: limits; -EAGAIN: still
 * booting; -EPROTO: the lane's memory is not what this library understands; -ENOTCONN: the daemon has gone. */
TAKT_API int takt_attach(takt_node *node, const char *name, uint32_t kind, uint32_t wait_mode, int64_t timeout_ns,
			 takt_lane **lane);

/* Gives the lane back and frees it; every pointer into it is invalid afterwards. NULL is allowed. */
TAKT_API void takt_detach(takt_lane *lane);

/* on: a lane that has ended comes back by itself, whatever ended it: the daemon is gone, the configuration has changed.
 * The end is told once, by -EPIPE from whatever was called; then takt_input(), takt_input_at() and takt_next_slot() ask
 * for a lane of the same name and go on with that one. As long as there is none they fail with -EPIPE, and ask again
 * after 50 ms, 100 ms, ... at most 2 s, without waiting in between; one try waits as takt_attach() does with a timeout
 * of 0. Afterwards numbers of jobs begin at 1 again, replies that were not received are gone, takt_fileno() is another
 * one, and pointers are to be asked for anew: what is written through old ones is lost. -EPROTO: it has other tensors by
 * now; such a lane is attached anew by the program. Begin each cycle with takt_input(). Always 0. */
TAKT_API int takt_set_reattach(takt_lane *lane, int on);

TAKT_API void takt_describe(const takt_lane *lane, struct takt_lane_info *info);
TAKT_API const char *takt_lane_error(const takt_lane *lane);

/* The next free slot's input, or the last reply's output, by name or by index.
 * -ENOENT: no such tensor; -EBUSY: every slot is pending; -ENODATA: no reply yet; -EPIPE: detached. */
TAKT_API int takt_input(takt_lane *lane, const char *name, struct takt_tensor *tensor);
TAKT_API int takt_output(takt_lane *lane, const char *name, struct takt_tensor *tensor);
TAKT_API int takt_input_at(takt_lane *lane, uint32_t index, struct takt_tensor *tensor);
TAKT_API int takt_output_at(takt_lane *lane, uint32_t index, struct takt_tensor *tensor);

/* The number of the slot that takt_submit() will send, -EBUSY or -EPIPE. */
TAKT_API int takt_next_slot(takt_lane *lane);

/* Model lanes: the actual shape of an input within its declared maximum, for this and later submissions until changed.
 * rank 0 with dims NULL returns to the declared maximum. -EOPNOTSUPP: the lane has fixed shapes; -EINVAL: it does not
 * fit; -ENOENT: no such input. */
TAKT_API int takt_set_shape(takt_lane *lane, const char *name, const int64_t *dims, uint32_t rank);

/* Submits the next free slot. deadline_ns is absolute; 0 means the loop's own, or none for a model.
 * Returns the job's sequence number (1, 2, 3, ...). -EBUSY, -EPIPE. */
TAKT_API int64_t takt_submit(takt_lane *lane, uint64_t deadline_ns);

/* Submits a copy of the inputs submitted last, as old as they are. For loops with `trigger: clock`, which take an input
 * per beat: when nothing is pending and there is no newer input, repeat the last one to get this beat's answer too; how
 * old an input may be is the configuration's `max_age`. A slot that takt_input() has handed out stays as it is.
 * Returns the job's sequence number. -ENODATA: nothing was submitted yet; -EBUSY: no slot is free; -EPIPE. */
TAKT_API int64_t takt_repeat(takt_lane *lane);

/* Asks for a job not to be run. Its reply still comes: TAKT_CANCELLED, or what it ended with before.
 * -ENOENT: it is not pending; -EBUSY: too many submissions are unread. */
TAKT_API int takt_cancel(takt_lane *lane, uint64_t sequence);

/* Waits for the reply of one job; sequence 0 means the oldest one not yet received. Returns 0 with *reply filled in.
 * When the time is over the reply's status is TAKT_PENDING: the job goes on, and its reply can be waited for again
 * until the lane needs its slot. -ENOENT: nothing is pending under that number; -EPIPE: the lane ended without a
 * reply; -EINTR never. */
TAKT_API int takt_wait(takt_lane *lane, uint64_t sequence, int64_t timeout_ns, struct takt_reply *reply);
TAKT_API int takt_wait_until(takt_lane *lane, uint64_t sequence, uint64_t until_ns, struct takt_reply *reply);

/* takt_submit() and takt_wait(). Where the loop's fallback ends in hold or constant, an answer that has not come by the
 * deadline is given here: TAKT_OK on that path, with the last good outputs or the constants (takt_output()). The job goes
 * on; its completion is then swallowed. reply->sequence is 0 where every slot was still with the daemon, and nothing was
 * submitted. */
TAKT_API int takt_infer(takt_lane *lane, uint64_t deadline_ns, int64_t timeout_ns, struct takt_reply *reply);

/* A descriptor for poll(), epoll or an event loop: from the first call on it becomes readable when a job has ended (or
 * the lane has). Take it before submitting; when it is readable call takt_wait(lane, 0, 0, &reply) until it says
 * TAKT_PENDING or -ENOENT, which also makes it unreadable again. Don't read from it, don't close it. */
TAKT_API int takt_fileno(takt_lane *lane);

/* Jobs submitted whose completion has not been received. */
TAKT_API int takt_pending(takt_lane *lane);

/* ---- time and rights of the calling thread ------------------------------------------------------------------- */

TAKT_API uint64_t takt_now(void);

/* Sleeps until an absolute time; signals don't cut it short. */
TAKT_API void takt_sleep_until(uint64_t until_ns);

/* A beat. Zero it, then call takt_tick_next() once per cycle. */
struct takt_tick {
	uint64_t index;      /* 0, 1, 2, ...; counts missed ones too */
	uint64_t release_ns; /* when this cycle was due; 0 before the first */
	uint64_t missed;     /* cycles that were skipped just before this one */
};

/* Sleeps until the next multiple of the period after the first call; never re-aligns the phase. */
TAKT_API void takt_tick_next(struct takt_tick *tick, uint64_t period_ns);

/* Gives the calling thread SCHED_FIFO at `priority` (1..99; 0 leaves it alone) on one core (-1 leaves it alone).
 * Children don't inherit the priority. Clients stay at 70 or below: the executors run at 80. -EPERM, -EINVAL. */
TAKT_API int takt_realtime(int priority, int core);

/* Locks the process's memory as it is touched (MCL_ONFAULT). -EPERM, -ENOMEM. */
TAKT_API int takt_lock_memory(void);

/* ---- names --------------------------------------------------------------------------------------------------- */

/* Names as used in Python, logs and metrics; "unknown" for a number that is none. */
TAKT_API const char *takt_status_name(uint32_t status);
TAKT_API const char *takt_path_name(uint32_t path);   /* "" for TAKT_PATH_NONE */
TAKT_API const char *takt_cause_name(uint32_t cause); /* "" for TAKT_CAUSE_NONE */
TAKT_API const char *takt_dtype_name(uint32_t dtype);
TAKT_API uint32_t takt_dtype_bits(uint32_t dtype);    /* bits per element, 0 for a number that is none */

#ifdef __cplusplus
}
#endif

#endif
