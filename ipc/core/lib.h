/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lib.h - what the .c files of the core share and nobody else sees.
 *
 * Three kinds of memory are described here:
 *   lane        one sealed memfd per lane, shared with a client that is not trusted ("wire version 1");
 *   ledger      what was taken and what was done, daemon-only, outlives an executor;
 *   statistics, journal   daemon-only pages with one writer (the executor) and one reader (the supervisor).
 *
 * Fields are plain uint32_t/uint64_t. Everything that another process reads or writes while we run goes through the
 * named helpers below, each with the reason for its barrier. The memory model is C11's, so ARM64 is as right as x86-64.
 *
 * Errors: negative errno. Nothing here prints, and nothing but *_create, *_add and *_open allocates.
 */
#ifndef TAKT_LIB_H
#define TAKT_LIB_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "takt.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "wire version 1 is little endian and so are the machines taktd runs on"
#endif
_Static_assert(sizeof(void *) == 8, "64-bit cursors must be single-copy atomic");

/* ---- limits ------------------------------------------------------------------------------------------------------ */

enum {
	TAKT_HEADER_BYTES = 256,
	TAKT_CACHE_LINE_BYTES = 64,
	TAKT_AREAS = 2,             /* output areas per slot: a stand-in never writes where the dead primary may still write */
	TAKT_NAME_BYTES = TAKT_NAME_MAX + 1,
	TAKT_TENSOR_NAME_BYTES = TAKT_TENSOR_NAME_MAX + 1,
	TAKT_TENSORS_MAX = 128,     /* inputs and outputs of one lane together */
	TAKT_RING_ENTRIES_MAX = 128,
	TAKT_POLL_ENTRIES_MAX = 64, /* entries handed out by one poll, over all lanes */
	TAKT_POLL_LANE_MAX = 16,    /* of these from one lane, so that a flood can't starve its neighbours */
	TAKT_LANES_MAX = 4096,      /* per executor; its ledger has room for them */
};
#define TAKT_LANE_BYTES_MAX (UINT64_C(1) << 36)  /* 64 GiB: keeps every sum of offsets far from overflow */
_Static_assert(TAKT_SLOTS_MAX == 64, "a lane's pending slots are one bit each in a uint64_t");
#define TAKT_LANE_MAGIC "TAKTLANE"

/* ---- lane: the shared layout, wire version 1 ----------------------------------------------------------------------- */

/* Written once by the daemon before anybody else has the memory; the daemon never reads it back. */
struct takt_header {
	char magic[8];
	uint32_t version;
	uint32_t header_size;
	uint64_t total_size;
	uint32_t slot_count;
	uint32_t ring_entries;
	uint32_t tensor_count;
	uint32_t input_count;
	uint32_t kind;
	uint32_t area_count;
	uint64_t tensor_table_offset;
	uint64_t cursors_offset;
	uint64_t submit_ring_offset;
	uint64_t completion_ring_offset;
	uint64_t slots_offset;
	uint64_t slot_stride;
	uint64_t period_ns;
	uint64_t deadline_ns;
	uint64_t jitter_ns;
	uint64_t epoch;
	uint32_t trigger;
	uint32_t shapes_offset_in_slot;
	uint32_t name_offset;
	uint32_t model_name_offset;
	uint8_t reserved[112];
};
_Static_assert(sizeof(struct takt_header) == TAKT_HEADER_BYTES, "header");
_Static_assert(offsetof(struct takt_header, magic) == 0, "header");
_Static_assert(offsetof(struct takt_header, version) == 8, "header");
_Static_assert(offsetof(struct takt_header, header_size) == 12, "header");
_Static_assert(offsetof(struct takt_header, total_size) == 16, "header");
_Static_assert(offsetof(struct takt_header, slot_count) == 24, "header");
_Static_assert(offsetof(struct takt_header, ring_entries) == 28, "header");
_Static_assert(offsetof(struct takt_header, tensor_count) == 32, "header");
_Static_assert(offsetof(struct takt_header, input_count) == 36, "header");
_Static_assert(offsetof(struct takt_header, kind) == 40, "header");
_Static_assert(offsetof(struct takt_header, area_count) == 44, "header");
_Static_assert(offsetof(struct takt_header, tensor_table_offset) == 48, "header");
_Static_assert(offsetof(struct takt_header, cursors_offset) == 56, "header");
_Static_assert(offsetof(struct takt_header, submit_ring_offset) == 64, "header");
_Static_assert(offsetof(struct takt_header, completion_ring_offset) == 72, "header");
_Static_assert(offsetof(struct takt_header, slots_offset) == 80, "header");
_Static_assert(offsetof(struct takt_header, slot_stride) == 88, "header");
_Static_assert(offsetof(struct takt_header, period_ns) == 96, "header");
_Static_assert(offsetof(struct takt_header, deadline_ns) == 104, "header");
_Static_assert(offsetof(struct takt_header, jitter_ns) == 112, "header");
_Static_assert(offsetof(struct takt_header, epoch) == 120, "header");
_Static_assert(offsetof(struct takt_header, trigger) == 128, "header");
_Static_assert(offsetof(struct takt_header, shapes_offset_in_slot) == 132, "header");
_Static_assert(offsetof(struct takt_header, name_offset) == 136, "header");
_Static_assert(offsetof(struct takt_header, model_name_offset) == 140, "header");
_Static_assert(offsetof(struct takt_header, reserved) == 144, "header");

/* Tensor table: inputs first, then outputs. */
struct takt_tensor_entry {
	char name[TAKT_TENSOR_NAME_BYTES];
	uint32_t dtype;
	uint32_t rank;
	int64_t dims[TAKT_RANK_MAX]; /* the maximum */
	uint64_t offset_in_slot;     /* inputs: the one place; outputs: area 0 */
	uint64_t bytes;              /* of the maximum shape */
	uint64_t offset_in_slot_1;   /* outputs: area 1; inputs: offset_in_slot again */
};
_Static_assert(sizeof(struct takt_tensor_entry) == 192, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, name) == 0, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, dtype) == 96, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, rank) == 100, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, dims) == 104, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, offset_in_slot) == 168, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, bytes) == 176, "tensor entry");
_Static_assert(offsetof(struct takt_tensor_entry, offset_in_slot_1) == 184, "tensor entry");

/* One cache line per cursor, so that the two sides share a line only when they hand something over. */
struct takt_cursors {
	uint64_t submit_tail; /* client */
	uint8_t pad0[56];
	uint64_t completion_head; /* client */
	uint8_t pad1[56];
	uint32_t client_waiting;   /* client: enum takt_client_waiting */
	uint32_t client_wait_mode; /* client: 0 block, 1 spin, 2 hybrid; a hint */
	uint8_t pad2[120];
	uint64_t submit_head; /* daemon */
	uint8_t pad3[56];
	uint64_t completion_tail; /* daemon; clients futex-wait on its low 32 bits */
	uint8_t pad4[56];
	uint32_t daemon_sleeping; /* daemon: 1 = send a doorbell after you moved submit_tail */
	uint32_t lane_state;      /* daemon: enum takt_lane_state */
	uint32_t detach_reason;   /* daemon: enum takt_detach_reason, valid once lane_state is detached */
	uint8_t pad5[52];
};
_Static_assert(sizeof(struct takt_cursors) == 448, "cursors");
_Static_assert(offsetof(struct takt_cursors, submit_tail) == 0, "cursors");
_Static_assert(offsetof(struct takt_cursors, completion_head) == 64, "cursors");
_Static_assert(offsetof(struct takt_cursors, client_waiting) == 128, "cursors");
_Static_assert(offsetof(struct takt_cursors, client_wait_mode) == 132, "cursors");
_Static_assert(offsetof(struct takt_cursors, submit_head) == 256, "cursors");
_Static_assert(offsetof(struct takt_cursors, completion_tail) == 320, "cursors");
_Static_assert(offsetof(struct takt_cursors, daemon_sleeping) == 384, "cursors");
_Static_assert(offsetof(struct takt_cursors, lane_state) == 388, "cursors");
_Static_assert(offsetof(struct takt_cursors, detach_reason) == 392, "cursors");

enum takt_trigger { TAKT_TRIGGER_CLIENT = 0, TAKT_TRIGGER_CLOCK = 1 };
enum takt_client_waiting { TAKT_WAITING_NO = 0, TAKT_WAITING_FUTEX = 1, TAKT_WAITING_BYTE = 2 };
enum takt_lane_state { TAKT_LANE_OPEN = 0, TAKT_LANE_DETACHED = 1 };
/* Why a lane ended; the first four mean that the client broke the protocol. */
enum takt_detach_reason {
	TAKT_DETACH_NONE = 0,
	TAKT_DETACH_CURSOR = 1,   /* submit_tail jumped by more than the ring holds, or went back */
	TAKT_DETACH_SLOT = 2,     /* a slot that the lane doesn't have */
	TAKT_DETACH_PENDING = 3,  /* a slot whose job has not ended */
	TAKT_DETACH_SEQUENCE = 4, /* a sequence number that is not the next one */
	TAKT_DETACH_ENDED = 5,    /* the daemon ended the lane */
};

struct takt_submission {
	uint64_t sequence;
	uint64_t deadline_ns;
	uint64_t submitted_ns;
	uint32_t slot;
	uint32_t flags; /* TAKT_SUBMIT_* */
	uint64_t zero[4];
};
_Static_assert(sizeof(struct takt_submission) == 64, "submission");
_Static_assert(offsetof(struct takt_submission, sequence) == 0, "submission");
_Static_assert(offsetof(struct takt_submission, deadline_ns) == 8, "submission");
_Static_assert(offsetof(struct takt_submission, submitted_ns) == 16, "submission");
_Static_assert(offsetof(struct takt_submission, slot) == 24, "submission");
_Static_assert(offsetof(struct takt_submission, flags) == 28, "submission");
_Static_assert(offsetof(struct takt_submission, zero) == 32, "submission");
enum { TAKT_SUBMIT_SHAPES = 1u, TAKT_SUBMIT_CANCEL = 2u };

struct takt_completion {
	uint64_t sequence;
	uint32_t slot;
	uint16_t status;
	uint16_t flags;
	uint16_t path;
	uint16_t cause;
	uint32_t area;
	uint64_t taken_ns;
	uint64_t started_ns;
	uint64_t ended_ns;
	uint64_t deadline_ns;
	uint32_t cause_detail;
	uint32_t epoch;
};
_Static_assert(sizeof(struct takt_completion) == 64, "completion");
_Static_assert(offsetof(struct takt_completion, sequence) == 0, "completion");
_Static_assert(offsetof(struct takt_completion, slot) == 8, "completion");
_Static_assert(offsetof(struct takt_completion, status) == 12, "completion");
_Static_assert(offsetof(struct takt_completion, flags) == 14, "completion");
_Static_assert(offsetof(struct takt_completion, path) == 16, "completion");
_Static_assert(offsetof(struct takt_completion, cause) == 18, "completion");
_Static_assert(offsetof(struct takt_completion, area) == 20, "completion");
_Static_assert(offsetof(struct takt_completion, taken_ns) == 24, "completion");
_Static_assert(offsetof(struct takt_completion, started_ns) == 32, "completion");
_Static_assert(offsetof(struct takt_completion, ended_ns) == 40, "completion");
_Static_assert(offsetof(struct takt_completion, deadline_ns) == 48, "completion");
_Static_assert(offsetof(struct takt_completion, cause_detail) == 56, "completion");
_Static_assert(offsetof(struct takt_completion, epoch) == 60, "completion");

/* The shapes block of a slot is one of these per tensor, in table order. */
struct takt_shape {
	uint32_t rank;
	uint32_t pad;
	int64_t dims[TAKT_RANK_MAX];
};
_Static_assert(sizeof(struct takt_shape) == 72, "shape");
_Static_assert(offsetof(struct takt_shape, rank) == 0, "shape");
_Static_assert(offsetof(struct takt_shape, dims) == 8, "shape");

/* ---- access to memory that another process uses at the same time ---------------------------------------------------- */

/* A cursor of the other side. Acquire: whatever it wrote before it moved the cursor (entries, tensors) is visible to
 * every load that follows. */
static inline uint64_t takt_load_cursor(const uint64_t *cursor) { return __atomic_load_n(cursor, __ATOMIC_ACQUIRE); }

/* Our own cursor. Release: entries and tensors written before are visible to whoever sees the new value; for a head,
 * our reads of the entry are over before the other side may reuse its place. */
static inline void takt_store_cursor(uint64_t *cursor, uint64_t value)
{
	__atomic_store_n(cursor, value, __ATOMIC_RELEASE);
}

/* Words that carry no data with them (hints, counters, a flag that is re-checked after a fence). */
static inline uint32_t takt_load_word(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline void takt_store_word(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
static inline uint64_t takt_load_u64(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline void takt_store_u64(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

/* A state word that says "what I wrote before is complete" (lane_state, ledger slot states), and its reader. */
static inline uint32_t takt_load_state(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void takt_store_state(uint32_t *word, uint32_t value)
{
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Between "I announce" (tail moved, sleeping = 1, waiting = 1) and "I look at the other side's word": both sides do
 * store - fence - load (Dekker), so at least one of them sees the other. Neither acquire nor release orders a store
 * before a later load; only a sequentially consistent fence does, also on x86. */
static inline void takt_dekker_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* A 64-byte ring entry: copied once, word by word, so that the compiler can neither read it twice nor invent a read.
 * Relaxed: the acquire of the tail came before. The words may still change under us (a hostile writer); then the copy
 * is garbage, and garbage is judged like everything else. */
static inline void takt_load_entry(void *copy, const void *shared)
{
	uint64_t *to = copy;
	const uint64_t *from = shared;
	for (int i = 0; i < 8; i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

/* Relaxed: the release of the tail comes after. */
static inline void takt_store_entry(void *shared, const void *image)
{
	uint64_t *to = shared;
	const uint64_t *from = image;
	for (int i = 0; i < 8; i++)
		__atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
}

static inline void takt_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ __volatile__("isb" ::: "memory"); /* yield is a nop on most cores; isb really makes it wait a little */
#endif
}

static inline uint64_t takt_clock_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts); /* can't fail: a fixed valid clock and a valid pointer */
	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* ---- layout.c --------------------------------------------------------------------------------------------------------- */

/* A private description of one lane: what the header says, but in memory no peer can write. */
struct takt_layout {
	uint64_t total_size;
	uint64_t tensor_table_offset;
	uint64_t cursors_offset;
	uint64_t submit_ring_offset;
	uint64_t completion_ring_offset;
	uint64_t slots_offset;
	uint64_t slot_stride;
	uint64_t period_ns;
	uint64_t deadline_ns;
	uint64_t jitter_ns;
	uint64_t epoch;
	uint32_t slot_count;
	uint32_t ring_entries;
	uint32_t tensor_count;
	uint32_t input_count;
	uint32_t kind;
	uint32_t trigger;
	uint32_t shapes_offset_in_slot;
	uint32_t dynamic; /* 1: submissions may carry shapes (the shapes block, if any, is at shapes_offset_in_slot) */
	uint32_t name_offset;
	uint32_t model_name_offset;
	char name[TAKT_NAME_BYTES];
	char model_name[TAKT_NAME_BYTES];
	struct takt_tensor_entry *tensors; /* tensor_count of them; owned, see takt_layout_free */
};

/* Bytes of a tensor (4-bit types are packed, rounded up); -EINVAL, -EOVERFLOW. */
int takt_tensor_bytes(uint32_t dtype, uint32_t rank, const int64_t *dims, uint64_t *bytes);
/* Fills in every offset and size from what was declared (names, dtypes, dims, counts). -EINVAL, -EOVERFLOW, -E2BIG. */
int takt_layout_compute(struct takt_layout *layout);
/* Makes the sealed memfd of a computed layout and writes header, table and names. Returns the descriptor. */
int takt_layout_create(const struct takt_layout *layout);
/* Reads and checks a header (client side: `map` is the mapped lane of `size` bytes). Fills `layout`, which must be freed
 * by takt_layout_free. -EPROTO: not a lane, or a version we don't know; -EINVAL: does not add up. */
int takt_layout_read(const void *map, uint64_t size, struct takt_layout *layout);
void takt_layout_free(struct takt_layout *layout);
/* An anonymous file: mode 0600, close-on-exec, `size` bytes, sealed against shrinking, growing and further seals. */
int takt_memfd(const char *name, uint64_t size);
/* Size of a descriptor that must be such a file: -EBADF, -EPERM when a seal is missing. */
int takt_memfd_size(int fd, uint64_t *size);

/* ---- ring.c ----------------------------------------------------------------------------------------------------------- */

/* Both rings of one mapped lane. The cursors in here are private; each side uses its own pair and never believes what it
 * finds in its own shared words. */
struct takt_rings {
	struct takt_cursors *cursors;
	struct takt_submission *submit;
	struct takt_completion *completion;
	uint64_t mask; /* ring_entries - 1 */
	/* client */
	uint64_t submit_tail;
	uint64_t completion_head;
	/* daemon */
	uint64_t submit_head;
	uint64_t completion_tail;
};

void takt_rings_init(struct takt_rings *rings, void *map, const struct takt_layout *layout);
/* Client: -EAGAIN when the ring is full. On success the entry is published; *doorbell is 1 when the daemon sleeps and
 * wants a byte on the wake-up descriptor. */
int takt_rings_submit(struct takt_rings *rings, const struct takt_submission *entry, int *doorbell);
/* Client: 1 and a copy when there is a completion, else 0. */
int takt_rings_collect(struct takt_rings *rings, struct takt_completion *entry);
/* Daemon: 1 and a private copy of the next entry, 0 when empty, -EPROTO when the cursor is impossible. The head does not
 * move: see takt_rings_taken. */
int takt_rings_peek(struct takt_rings *rings, struct takt_submission *entry);
/* Daemon: the entry that peek returned is over; its place is the client's again. */
void takt_rings_taken(struct takt_rings *rings);
/* Daemon: writes the completion at the private tail and publishes it. Waking is the caller's. */
void takt_rings_complete(struct takt_rings *rings, const struct takt_completion *entry);

/* ---- stats.c ------------------------------------------------------------------------------------------------------------ */

/* Histograms are log-linear over nanoseconds: values below 64 ns each have a bucket of their own, above that each octave
 * (2^e .. 2^(e+1)) is cut into 64 equal parts, so a bucket is at most 1/64 of its value wide and its middle is within
 * 0.8 % of every value in it: two significant digits. 2^37 ns (137 s) and more land in the last bucket. */
enum {
	TAKT_HIST_SUB_BITS = 6,
	TAKT_HIST_SUB = 1 << TAKT_HIST_SUB_BITS,
	TAKT_HIST_TOP_BITS = 37,
	TAKT_HIST_BUCKETS = (TAKT_HIST_TOP_BITS - TAKT_HIST_SUB_BITS + 1) * TAKT_HIST_SUB, /* 2048 */
	TAKT_STATS_STATUSES = 8,
	TAKT_STATS_CAUSES = 8,
	TAKT_STATS_BLOCKS_MAX = 8192,
	TAKT_STATS_BATCH_EXACT = 16, /* sizes up to here have an entry each; above: up to 32, 64, 128, 256, more */
	TAKT_STATS_BATCH_SIZES = 20,
};
struct takt_hist {
	uint64_t count;
	uint64_t sum_ns;
	uint64_t max_ns;
	uint64_t pad[5];
	uint64_t buckets[TAKT_HIST_BUCKETS];
};
/* Dispatches of several jobs together, by size. */
struct takt_batches {
	uint64_t dispatches;
	uint64_t run_ns;
};
/* One block per loop or model. One writer (the executor that serves it), any number of readers. */
struct takt_stats_block {
	uint64_t submitted;
	uint64_t status[TAKT_STATS_STATUSES];
	uint64_t late;
	uint64_t early;
	uint64_t overrun;
	uint64_t stand_in;
	uint64_t orphaned;
	uint64_t misses[TAKT_STATS_CAUSES];
	uint64_t batched_jobs;	 /* in dispatches of two or more: what the histograms have beyond, ran alone */
	uint64_t batched_run_ns; /* as the histogram counts it: once for each job */
	struct takt_batches batches[TAKT_STATS_BATCH_SIZES];
	struct takt_hist queue;
	struct takt_hist run;
	struct takt_hist total;
};
_Static_assert(offsetof(struct takt_stats_block, queue) == 512, "statistics block");
struct takt_stats_page {
	char magic[8]; /* "TAKTSTAT" */
	uint32_t version;
	uint32_t block_count;
	uint64_t block_bytes;
	uint8_t pad[4096 - 24];
	struct takt_stats_block blocks[];
};
_Static_assert(offsetof(struct takt_stats_page, blocks) == 4096, "statistics page");

uint32_t takt_hist_index(uint64_t value_ns);
uint64_t takt_hist_upper_ns(uint32_t index); /* the largest value that lands in this bucket */
void takt_hist_add(struct takt_hist *hist, uint64_t value_ns);
int takt_stats_create(uint32_t blocks);
/* Maps a statistics file. *page must be unmapped with takt_unmap(*page, *size). */
int takt_stats_open(int fd, int writable, struct takt_stats_page **page, uint64_t *size);
/* Counts a finished job: its status, flags, cause of a miss, and its times when it was started. */
void takt_stats_job(struct takt_stats_block *block, const struct takt_completion *done, uint64_t release_ns);
/* Counts a dispatch of size >= 2 jobs together, each of which takt_stats_job counts too. */
void takt_stats_batch(struct takt_stats_block *block, uint32_t size, uint64_t run_ns);
/* The largest size that entry `index` of block->batches counts. */
uint32_t takt_stats_batch_size(uint32_t index);
/* One counter that has one writer: no read-modify-write instruction needed, but no torn value for the reader either. */
static inline void takt_count(uint64_t *counter, uint64_t by) { takt_store_u64(counter, takt_load_u64(counter) + by); }

/* ---- journal.c ---------------------------------------------------------------------------------------------------------- */

struct takt_record {
	uint64_t t_ns;
	uint16_t kind;
	uint16_t lane;
	uint32_t aux;
	uint64_t a;
	uint64_t b;
	uint64_t number; /* 1, 2, 3, ... ; in the ring also the record's own seqlock, 0 while it is being written */
};
_Static_assert(sizeof(struct takt_record) == 40, "journal record");
_Static_assert(offsetof(struct takt_record, number) == 32, "journal record");
struct takt_journal_page {
	char magic[8]; /* "TAKTJRNL" */
	uint32_t version;
	uint32_t capacity; /* records, a power of two */
	uint8_t pad0[48];
	uint64_t tail; /* writer: records ever written */
	uint8_t pad1[4096 - 72];
	struct takt_record records[];
};
_Static_assert(offsetof(struct takt_journal_page, tail) == 64, "journal page");
_Static_assert(offsetof(struct takt_journal_page, records) == 4096, "journal page");

int takt_journal_create(uint32_t records);
int takt_journal_open(int fd, int writable, struct takt_journal_page **page, uint64_t *size);
void takt_journal_write(struct takt_journal_page *page, const struct takt_record *record);
/* Copies up to `max` records from *cursor on, moves *cursor, adds what was overwritten before it could be read to *lost.
 * Returns the number of records copied. */
uint32_t takt_journal_read(const struct takt_journal_page *page, uint64_t *cursor, struct takt_record *out, uint32_t max,
						   uint64_t *lost);

int takt_map(int fd, uint64_t size, int writable, void **map);
void takt_unmap(void *map, uint64_t size);

#endif
