/* SPDX-License-Identifier: Apache-2.0
 *
 * server.c: the lanes that an executor serves: adding and removing them, taking submissions, publishing completions.
 *
 * Nothing that a client can write is believed: an entry is copied once, the copy is judged against the private layout and
 * the private slot bitmap, and the copy is used. Two kinds of judgement: an entry that breaks the protocol itself (cursor,
 * slot, sequence) ends the lane, since nothing after it can be trusted to mean what it says; an entry that asks for
 * something impossible completes `invalid`. On this path nothing allocates and the only system call is a wake-up that the
 * client asked for.
 */
#include "server.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEADLINE_MAX_NS (UINT64_C(1) << 63)

int takt_server_init(struct takt_server *server, int ledger_fd, int stats_fd, int journal_fd, int control_fd)
{
	int rc;

	memset(server, 0, sizeof(*server));
	server->control_fd = -1;
	server->succession_fd = -1;
	server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (server->epoll_fd < 0)
		return -errno;
	rc = takt_server_open_ledger(server, ledger_fd, stats_fd);
	if (rc == 0)
		rc = takt_journal_open(journal_fd, 1, &server->journal, &server->journal_bytes);
	if (rc == 0)
		rc = takt_server_set_control(server, control_fd);
	if (rc < 0)
		takt_server_destroy(server);
	return rc;
}

int takt_server_set_control(struct takt_server *server, int control_fd)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.u64 = TAKT_EPOLL_CONTROL};

	if (server->control_fd >= 0)
		epoll_ctl(server->epoll_fd, EPOLL_CTL_DEL, server->control_fd, NULL); /* it may be closed already */
	server->control_fd = -1;
	if (control_fd >= 0 && epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, control_fd, &event) < 0)
		return -errno;
	server->control_fd = control_fd;
	return 0;
}

static void free_lane(struct takt_served *lane)
{
	if (lane->base)
		takt_unmap(lane->base, lane->layout.total_size);
	if (lane->wake_fd >= 0)
		close(lane->wake_fd);
	free(lane->shapes);
	takt_layout_free(&lane->layout);
	free(lane);
}

void takt_server_destroy(struct takt_server *server)
{
	for (uint32_t i = 0; i < server->home_count; i++)
		takt_server_leave(server, i); /* before the memory goes that its thread looks at */
	for (uint32_t i = 0; server->lanes && i < server->lane_limit; i++)
		if (server->lanes[i])
			free_lane(server->lanes[i]);
	free(server->lanes);
	free(server->active);
	for (uint32_t i = 0; i < server->home_count; i++) {
		takt_unmap(server->homes[i].page, server->homes[i].page_bytes);
		takt_unmap(server->homes[i].stats, server->homes[i].stats_bytes);
	}
	if (server->journal)
		takt_unmap(server->journal, server->journal_bytes);
	if (server->succession_fd >= 0)
		close(server->succession_fd);
	if (server->epoll_fd >= 0)
		close(server->epoll_fd);
	memset(server, 0, sizeof(*server));
	server->succession_fd = -1;
	server->epoll_fd = -1;
}

struct takt_served *takt_server_lane(const struct takt_server *server, uint32_t lane)
{
	return lane < server->lane_limit ? server->lanes[lane] : NULL;
}

/* ---- adding and removing ---- */

/* Makes every page present, so that the path takes no fault. An atomic `or` of nothing changes no byte, whoever else
 * writes there. A model lane's slots come as they are used. */
static void touch_pages(struct takt_served *lane)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t end = lane->layout.kind == TAKT_KIND_LOOP ? lane->layout.total_size : lane->layout.slots_offset;

	for (uint64_t at = 0; at < end; at += page)
		__atomic_fetch_or(lane->base + at, 0, __ATOMIC_RELAXED);
}

static int map_lane(struct takt_served *lane, int memfd)
{
	struct stat file;
	uint64_t size;
	void *map;
	int rc = takt_memfd_size(memfd, &size);

	if (rc < 0)
		return rc;
	if (fstat(memfd, &file) < 0)
		return -errno;
	lane->memory = file.st_ino;
	if (size != lane->layout.total_size)
		return -EINVAL;
	rc = takt_map(memfd, size, 1, &map);
	if (rc < 0)
		return rc;
	lane->base = map;
	takt_rings_init(&lane->rings, map, &lane->layout);
	if (lane->layout.dynamic) {
		lane->shapes = calloc((size_t)lane->layout.slot_count * lane->layout.input_count + 1, sizeof(*lane->shapes));
		if (!lane->shapes)
			return -ENOMEM;
	}
	touch_pages(lane);
	return 0;
}

int takt_server_add(struct takt_server *server, uint32_t index, int memfd, int wake_fd, struct takt_layout *layout,
		    const struct takt_service *service)
{
	struct takt_served *lane = aligned_alloc(64, (sizeof(*lane) + 63) / 64 * 64);
	struct takt_home *home = takt_server_home(server, index);
	int rc = 0;

	if (!lane) {
		close(memfd);
		close(wake_fd);
		takt_layout_free(layout);
		return -ENOMEM;
	}
	memset(lane, 0, sizeof(*lane));
	lane->layout = *layout;
	layout->tensors = NULL;
	lane->wake_fd = wake_fd;
	lane->index = index;
	lane->area = service->area;
	lane->recover = service->recover != 0;
	lane->idle_limit_ns = 4 * lane->layout.period_ns > TAKT_IDLE_NS ? 4 * lane->layout.period_ns : TAKT_IDLE_NS;
	lane->active_at = TAKT_DORMANT;
	lane->standby = 1;
	if (!home || service->stats_block >= home->stats->block_count)
		rc = -ERANGE;
	else if (server->lanes[index])
		rc = -EBUSY;
	else if (service->area >= TAKT_AREAS)
		rc = -EINVAL;
	else if (!service->dormant && !takt_home_is_ours(home))
		rc = -EPERM;
	if (rc == 0)
		rc = map_lane(lane, memfd);
	close(memfd);
	if (rc == 0) {
		lane->home = (uint32_t)(home - server->homes);
		lane->ledger = &home->page->lanes[index - home->first_lane];
		lane->stats = &home->stats->blocks[service->stats_block];
		if (!service->dormant)
			rc = takt_served_start(server, lane);
	}
	if (rc < 0) {
		free_lane(lane);
		return rc;
	}
	server->lanes[index] = lane;
	if (home->member)
		takt_member_add_lane(home->member, lane);
	return 0;
}

/* Tells the client that the lane has ended. The marker with sequence 0 is there because it moves the word that clients
 * futex-wait on: without it, one that has looked at lane_state but does not sleep yet would miss the wake. */
static void end_lane(struct takt_server *server, struct takt_served *lane, uint32_t reason, uint64_t now_ns)
{
	const struct takt_completion marker = {
		.slot = UINT32_MAX,
		.status = TAKT_DETACHED,
		.area = lane->area,
		.ended_ns = now_ns,
		.epoch = (uint32_t)lane->layout.epoch,
	};

	lane->closed = 1;
	takt_doorbell_deactivate(server, lane);
	takt_doorbell_ignore(server, lane);
	takt_store_word(&lane->rings.cursors->detach_reason, reason);
	takt_store_state(&lane->rings.cursors->lane_state, TAKT_LANE_DETACHED); /* release: the reason is there */
	takt_rings_complete(&lane->rings, &marker);
	takt_store_cursor(&lane->ledger->completion_tail, lane->rings.completion_tail);
	takt_doorbell_wake_client(lane);
}

int takt_server_remove(struct takt_server *server, uint32_t index, int status, uint64_t now_ns)
{
	struct takt_served *lane = takt_server_lane(server, index);
	struct takt_verdict verdict = {.status = (uint16_t)(status & 0xff), .ended_ns = now_ns};
	int dropped = 0;

	if (!lane)
		return -ENOENT;
	if (status >= TAKT_STATS_STATUSES)
		return -EINVAL;
	if (server->homes[lane->home].member)
		takt_member_drop_lane(server->homes[lane->home].member, lane);
	if (lane->standby) {
		server->lanes[index] = NULL;
		free_lane(lane);
		return 0;
	}
	for (uint32_t slot = 0; slot < lane->layout.slot_count; slot++) {
		if (!(lane->pending >> slot & 1))
			continue;
		if (status >= 0) {
			takt_server_complete(server, index, slot, &verdict);
		} else {
			takt_store_state(&lane->ledger->slots[slot].state, TAKT_LEDGER_FREE);
			takt_count(&lane->stats->orphaned, 1);
			server->pending_count--;
		}
		dropped++;
	}
	if (!lane->closed)
		end_lane(server, lane, TAKT_DETACH_ENDED, now_ns);
	takt_store_state(&lane->ledger->used, 0);
	server->lanes[index] = NULL;
	server->lane_count--;
	free_lane(lane);
	return dropped;
}

/* ---- taking submissions ---- */

/* r = submitted_ns, but not before the ring was last seen empty and not after now: honest about time spent queueing
 * behind a running job, and of no use to a liar. */
static uint64_t release_of(const struct takt_server *server, const struct takt_served *lane, uint64_t submitted_ns,
			   uint64_t now_ns)
{
	uint64_t empty_ns = lane->empty_ns;

	/* A clock decides when such a job runs; its stamp is the age of its input, which only its client can know. */
	if (lane->layout.trigger == TAKT_TRIGGER_CLOCK)
		return submitted_ns > now_ns ? now_ns : submitted_ns;
	if (server->all_empty_ns > empty_ns && server->all_empty_ns >= lane->active_since_ns)
		empty_ns = server->all_empty_ns;
	if (submitted_ns < empty_ns)
		submitted_ns = empty_ns;
	return submitted_ns > now_ns ? now_ns : submitted_ns;
}

int takt_served_copy_shapes(struct takt_served *lane, uint32_t slot)
{
	const struct takt_layout *layout = &lane->layout;
	const uint64_t *shared = (const uint64_t *)(lane->base + layout->slots_offset + slot * layout->slot_stride +
						    layout->shapes_offset_in_slot);
	struct takt_shape *own = &lane->shapes[(size_t)slot * layout->input_count];

	for (uint32_t i = 0; i < layout->input_count; i++) {
		uint64_t *words = (uint64_t *)&own[i];
		for (size_t w = 0; w < sizeof(struct takt_shape) / 8; w++)
			words[w] = takt_load_u64(&shared[i * (sizeof(struct takt_shape) / 8) + w]);
	}
	for (uint32_t i = 0; i < layout->input_count; i++) {
		if (own[i].rank != layout->tensors[i].rank)
			return -EINVAL;
		for (uint32_t d = 0; d < own[i].rank; d++)
			if (own[i].dims[d] < 0 || own[i].dims[d] > layout->tensors[i].dims[d])
				return -EINVAL;
	}
	return 0;
}

static int is_impossible(struct takt_served *lane, const struct takt_submission *entry)
{
	if ((entry->flags & ~(uint32_t)TAKT_SUBMIT_SHAPES) != 0 || entry->deadline_ns >= DEADLINE_MAX_NS)
		return 1;
	if ((entry->zero[0] | entry->zero[1] | entry->zero[2] | entry->zero[3]) != 0)
		return 1;
	if (!(entry->flags & TAKT_SUBMIT_SHAPES))
		return 0;
	if (!lane->layout.dynamic || takt_served_copy_shapes(lane, entry->slot) < 0)
		return 1;
	lane->shaped |= UINT64_C(1) << entry->slot;
	return 0;
}

/* The entry is over without a job: only the heads move. */
static void skip_entry(struct takt_served *lane)
{
	takt_store_cursor(&lane->ledger->submit_head, lane->rings.submit_head + 1);
	takt_rings_taken(&lane->rings);
}

static uint32_t protocol_error(const struct takt_served *lane, const struct takt_submission *entry)
{
	if (entry->slot >= lane->layout.slot_count)
		return TAKT_DETACH_SLOT;
	if (lane->pending >> entry->slot & 1)
		return TAKT_DETACH_PENDING;
	return entry->sequence != lane->ledger->next_sequence ? TAKT_DETACH_SEQUENCE : TAKT_DETACH_NONE;
}

static uint32_t end_hostile(struct takt_server *server, struct takt_served *lane, uint32_t reason, uint64_t now_ns,
			    struct takt_job *job)
{
	end_lane(server, lane, reason, now_ns);
	*job = (struct takt_job){
		.lane = lane->index, .deadline_ns = reason, .release_ns = now_ns, .flags = TAKT_JOB_ENDED};
	return 1;
}

/* Judges one copied entry. Returns 1 when *job is something for the executor. */
static uint32_t take_entry(struct takt_server *server, struct takt_served *lane, const struct takt_submission *entry,
			   uint64_t now_ns, struct takt_job *job)
{
	uint64_t release_ns = release_of(server, lane, entry->submitted_ns, now_ns);
	uint32_t reason;

	if (entry->flags & TAKT_SUBMIT_CANCEL) {
		*job = (struct takt_job){entry->sequence, 0, release_ns, lane->index, 0, entry->flags};
		skip_entry(lane);
		return entry->flags == TAKT_SUBMIT_CANCEL;
	}
	reason = protocol_error(lane, entry);
	if (reason != TAKT_DETACH_NONE)
		return end_hostile(server, lane, reason, now_ns, job);
	takt_ledger_take(lane, entry, release_ns, now_ns);
	lane->pending |= UINT64_C(1) << entry->slot;
	lane->hopeless_ns[entry->slot] = 0;
	server->pending_count++;
	lane->shaped &= ~(UINT64_C(1) << entry->slot);
	lane->outputs_shaped &= ~(UINT64_C(1) << entry->slot);
	lane->last_entry_ns = now_ns;
	lane->bell_credit++;
	takt_rings_taken(&lane->rings);
	if (is_impossible(lane, entry)) {
		struct takt_verdict verdict = {.status = TAKT_INVALID, .ended_ns = now_ns};
		takt_server_complete(server, lane->index, entry->slot, &verdict);
		return 0;
	}
	*job = (struct takt_job){entry->sequence, entry->deadline_ns, release_ns, lane->index, entry->slot, entry->flags};
	return 1;
}

static uint32_t poll_lane(struct takt_server *server, struct takt_served *lane, uint64_t now_ns, struct takt_job *jobs,
			  uint32_t room)
{
	struct takt_submission entry;
	uint32_t count = 0;

	for (uint32_t seen = 0; seen < TAKT_POLL_LANE_MAX && count < room; seen++) {
		int rc = takt_rings_peek(&lane->rings, &entry);
		if (rc == 0) {
			lane->empty_ns = now_ns;
			break;
		}
		if (rc < 0)
			return count + end_hostile(server, lane, TAKT_DETACH_CURSOR, now_ns, &jobs[count]);
		count += take_entry(server, lane, &entry, now_ns, &jobs[count]);
		if (lane->closed)
			break;
	}
	return count;
}

/* What the scheduler is about to hear goes into the journal here, where it costs some nanoseconds. */
static void record_submission(const struct takt_server *server, const struct takt_job *job, uint64_t now_ns)
{
	struct takt_record record = {.t_ns = now_ns, .kind = TAKT_RECORD_DEADLINE, .lane = (uint16_t)job->lane};

	if (job->deadline_ns != 0) {
		record.a = job->deadline_ns;
		takt_journal_write(server->journal, &record);
	}
	record.kind = TAKT_RECORD_SUBMIT;
	record.aux = job->slot;
	record.a = job->sequence;
	record.b = job->release_ns;
	takt_journal_write(server->journal, &record);
}

static int is_submission(const struct takt_job *job)
{
	return (job->flags & ~(uint32_t)TAKT_SUBMIT_SHAPES) == 0;
}

/* Cancellations and the watch's answers are recorded by the executor, which knows what the scheduler said. Where there
 * are any, it records the submissions around them as well: the record has the order in which the scheduler heard it. */
static void record_submissions(const struct takt_server *server, struct takt_job *jobs, uint32_t count, uint64_t now_ns)
{
	int alone = 1;

	for (uint32_t i = 0; i < count; i++)
		alone &= is_submission(&jobs[i]);
	for (uint32_t i = 0; i < count; i++)
		if (alone)
			record_submission(server, &jobs[i], now_ns);
		else if (is_submission(&jobs[i]))
			jobs[i].flags |= TAKT_JOB_UNRECORDED;
}

uint32_t takt_server_poll(struct takt_server *server, uint64_t now_ns, struct takt_job *jobs)
{
	uint32_t count = takt_watch_collect(server, jobs);

	takt_server_alive(server);
	if (count == 0)
		count = takt_server_poll_rings(server, now_ns, jobs, TAKT_POLL_ENTRIES_MAX);
	if (server->recording)
		record_submissions(server, jobs, count, now_ns);
	return count;
}

uint32_t takt_server_poll_rings(struct takt_server *server, uint64_t now_ns, struct takt_job *jobs, uint32_t room)
{
	uint32_t count = 0, lanes;

	takt_doorbell_tend(server, now_ns);
	lanes = server->active_count;
	if (server->start >= lanes)
		server->start = 0;
	for (uint32_t i = server->start, left = lanes; left > 0 && count < room; left--) {
		struct takt_served *lane;
		if (i >= server->active_count) /* the end, or a lane that ended left the list */
			i = 0;
		if (server->active_count == 0)
			break;
		lane = server->lanes[server->active[i]];
		count += poll_lane(server, lane, now_ns, &jobs[count], room - count);
		i += !lane->closed; /* the last lane of the list took a closed one's place */
	}
	server->start++;
	return count;
}

/* ---- finishing jobs ---- */

void takt_server_set_epoch(struct takt_server *server, uint64_t epoch)
{
	for (uint32_t i = 0; i < server->lane_limit; i++)
		if (server->lanes[i])
			server->lanes[i]->layout.epoch = epoch;
}

int takt_server_expect(struct takt_server *server, uint32_t index, uint32_t slot, uint64_t hopeless_ns)
{
	struct takt_served *lane = takt_server_lane(server, index);

	if (!lane || slot >= lane->layout.slot_count)
		return -ENOENT;
	/* Not pending: the watch answered it during the run before it was handed out; its entry says so next. */
	if (lane->pending >> slot & 1)
		lane->hopeless_ns[slot] = hopeless_ns;
	return 0;
}

int takt_server_runs_late(struct takt_server *server, uint32_t index)
{
	struct takt_served *lane = takt_server_lane(server, index);

	if (!lane)
		return -ENOENT;
	lane->runs_late = 1;
	return 0;
}

int takt_server_beats(struct takt_server *server, uint32_t index, uint64_t phase_ns)
{
	struct takt_served *lane = takt_server_lane(server, index);

	if (!lane || lane->layout.period_ns == 0)
		return -ENOENT;
	lane->beats = 1;
	lane->phase_ns = phase_ns % lane->layout.period_ns;
	return 0;
}

int takt_server_begin(struct takt_server *server, uint32_t index, uint32_t slot, uint64_t now_ns, uint64_t deadline_ns,
		      uint64_t next_arrival_ns, int more, uint64_t cost_ns)
{
	struct takt_served *lane = takt_server_lane(server, index);

	if (!lane || slot >= lane->layout.slot_count || !(lane->pending >> slot & 1))
		return -ENOENT;
	if (deadline_ns != 0)
		takt_store_u64(&lane->ledger->slots[slot].deadline_ns, deadline_ns);
	takt_store_u64(&lane->ledger->slots[slot].started_ns, now_ns);
	lane->next_arrival_ns = next_arrival_ns;
	if (!more) {
		takt_server_running(server, now_ns, lane->budget_ns != 0 ? lane->budget_ns : TAKT_BUDGET_UNKNOWN_NS);
		if (server->witness && cost_ns != 0)
			takt_witness_expect(server->witness, now_ns + cost_ns / 4 * 3);
		takt_watch_begin(server, index, now_ns, cost_ns);
	}
	return 0;
}

void takt_server_end(struct takt_server *server)
{
	takt_watch_end(server);
	if (server->witness)
		takt_witness_over(server->witness);
	takt_server_running(server, 0, 0);
}

void takt_served_publish(struct takt_served *lane, struct takt_ledger_slot *slot)
{
	lane->rings.completion_tail = slot->completion_index;
	takt_rings_complete(&lane->rings, &slot->image);
	takt_doorbell_wake_client(lane); /* before the bookkeeping: somebody waits for it */
	takt_store_cursor(&lane->ledger->completion_tail, lane->rings.completion_tail);
	takt_stats_job(lane->stats, &slot->image, slot->release_ns); /* its status first: it is that which is made up for */
	takt_store_state(&slot->state, TAKT_LEDGER_FREE);
}

static uint16_t completion_flags(const struct takt_served *lane, uint32_t slot, const struct takt_verdict *verdict,
				 uint64_t started_ns, uint64_t deadline_ns)
{
	uint32_t flags = verdict->flags & (TAKT_OVERRUN | TAKT_STAND_IN | TAKT_EARLY | TAKT_NOT_FINITE);
	int answered = started_ns != 0 || verdict->status == TAKT_OK;

	if (answered && deadline_ns != 0 && verdict->ended_ns > deadline_ns)
		flags |= TAKT_LATE;
	if (lane->outputs_shaped >> slot & 1)
		flags |= TAKT_SHAPES;
	return (uint16_t)flags;
}

int takt_server_complete(struct takt_server *server, uint32_t index, uint32_t slot_index,
			 const struct takt_verdict *verdict)
{
	struct takt_served *lane = takt_server_lane(server, index);
	struct takt_ledger_slot *slot;
	uint64_t deadline_ns;

	if (!lane || slot_index >= lane->layout.slot_count || !(lane->pending >> slot_index & 1))
		return -ENOENT;
	if (verdict->status > TAKT_DETACHED || verdict->path > TAKT_PATH_CONSTANT || verdict->cause > TAKT_CAUSE_MACHINE)
		return -EINVAL;
	slot = &lane->ledger->slots[slot_index];
	deadline_ns = verdict->deadline_ns ? verdict->deadline_ns : slot->deadline_ns;
	slot->image = (struct takt_completion){
		.sequence = slot->sequence,
		.slot = slot_index,
		.status = verdict->status,
		.flags = completion_flags(lane, slot_index, verdict, slot->started_ns, deadline_ns),
		.path = verdict->path,
		.cause = verdict->cause,
		.area = lane->area,
		.taken_ns = slot->taken_ns,
		.started_ns = slot->started_ns,
		.ended_ns = verdict->ended_ns,
		.deadline_ns = deadline_ns,
		.cause_detail = verdict->cause_detail,
		.epoch = (uint32_t)lane->layout.epoch,
	};
	slot->completion_index = lane->rings.completion_tail;
	lane->ledger->answered = takt_load_u64(&lane->stats->status[verdict->status]) + 1;
	takt_store_state(&slot->state, TAKT_LEDGER_DONE);
	takt_served_publish(lane, slot);
	lane->pending &= ~(UINT64_C(1) << slot_index);
	server->pending_count--;
	return 0;
}
