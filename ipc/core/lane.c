/* SPDX-License-Identifier: Apache-2.0
 *
 * lane.c: the client's side of an attached lane: slots, tensors, submit, wait. Connecting and attaching is client.c's.
 *
 * A slot goes FREE -> PENDING (submit) -> DONE (its completion was taken from the ring) -> LAST (its reply was handed
 * out) -> FREE (the next reply was handed out). The lowest free slot comes next, so that a client with one job at a
 * time alternates between two slots and finds them in its cache.
 *
 * A job whose waiter has given up keeps its slot until it is done; its reply then waits to be asked for, but only as
 * long as no slot is needed. A job that nobody has waited for yet keeps its slot in any case.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "client.h"

int takt_lane_fail(struct takt_lane *lane, int code, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(lane->error, sizeof(lane->error), format, arguments);
	va_end(arguments);
	return code;
}

int takt_lane_init(struct takt_lane *lane)
{
	takt_rings_init(&lane->rings, lane->map, &lane->layout);
	lane->next_sequence = 1;
	lane->next_slot = -1;
	lane->last_slot = -1;
	lane->input_slot = -1;
	if (lane->layout.shapes_offset_in_slot) {
		lane->shapes = calloc(lane->layout.input_count, sizeof(*lane->shapes));
		if (!lane->shapes)
			return -ENOMEM;
		for (uint32_t i = 0; i < lane->layout.input_count; i++) {
			lane->shapes[i].rank = lane->layout.tensors[i].rank;
			memcpy(lane->shapes[i].dims, lane->layout.tensors[i].dims, sizeof(lane->shapes[i].dims));
		}
	}
	takt_store_word(&lane->rings.cursors->client_wait_mode, lane->wait_mode);
	return 0;
}

/* ---- the end ------------------------------------------------------------------------------------------------- */

void takt_lane_end(struct takt_lane *lane, uint32_t reason, const char *text)
{
	if (!lane->ended) {
		lane->ended = 1;
		lane->end_reason = reason;
	}
	if (text && !lane->ended_text[0])
		snprintf(lane->ended_text, sizeof(lane->ended_text), "%s", text);
}

/* The daemon sets lane_state last, after all completions: look at it before a last collect. */
static int look_for_end(struct takt_lane *lane)
{
	if (!lane->ended && takt_load_state(&lane->rings.cursors->lane_state) != TAKT_LANE_OPEN)
		takt_lane_end(lane, takt_load_word(&lane->rings.cursors->detach_reason), NULL);
	return lane->ended;
}

static const char *reason_text(uint32_t reason)
{
	switch (reason) {
	case TAKT_DETACH_CURSOR:
	case TAKT_DETACH_SLOT:
	case TAKT_DETACH_PENDING:
	case TAKT_DETACH_SEQUENCE:
		return "its submissions broke the protocol (was its memory written by something else?)";
	default:
		return "the daemon detached it";
	}
}

int takt_lane_fail_ended(struct takt_lane *lane)
{
	if (lane->node && !lane->ended_text[0])
		takt_node_drain(lane->node);
	lane->end_told = 1;
	return takt_lane_fail(lane, -EPIPE, "the lane of \"%s\" has ended: %s; attach again", lane->layout.name,
			      lane->ended_text[0] ? lane->ended_text : reason_text(lane->end_reason));
}

/* ---- slots --------------------------------------------------------------------------------------------------- */

static int find(const struct takt_lane *lane, uint64_t sequence)
{
	for (uint32_t i = 0; i < lane->layout.slot_count; i++) {
		const struct takt_client_slot *slot = &lane->slots[i];

		if ((slot->state == TAKT_SLOT_PENDING || slot->state == TAKT_SLOT_DONE) && !slot->silent &&
		    slot->reply.sequence == sequence)
			return (int)i;
	}
	return -1;
}

/* The slot of this state with the smallest sequence number, -1 if there is none. */
static int oldest(const struct takt_lane *lane, enum takt_slot_state state, int given_up_only)
{
	int best = -1;

	for (uint32_t i = 0; i < lane->layout.slot_count; i++) {
		const struct takt_client_slot *slot = &lane->slots[i];

		if (slot->state == state && !slot->silent && (!given_up_only || slot->given_up) &&
		    (best < 0 || slot->reply.sequence < lane->slots[best].reply.sequence))
			best = (int)i;
	}
	return best;
}

static int clocked(const struct takt_lane *lane)
{
	return lane->layout.trigger == TAKT_TRIGGER_CLOCK;
}

/* The lowest free slot besides these two, -1 if there is none. */
static int free_slot(const struct takt_lane *lane, int besides, int and_besides)
{
	for (int i = 0; i < (int)lane->layout.slot_count; i++)
		if (lane->slots[i].state == TAKT_SLOT_FREE && i != besides && i != and_besides)
			return i;
	return -1;
}

int takt_next_slot(takt_lane *lane)
{
	if (lane->next_slot >= 0 && !lane->ended)
		return lane->next_slot;
	look_for_end(lane);
	takt_lane_collect(lane);
	if (lane->ended) {
		const int result = lane->reattach && lane->end_told ? takt_lane_again(lane) : takt_lane_fail_ended(lane);

		if (result < 0)
			return result;
	}
	lane->next_slot = free_slot(lane, clocked(lane) ? lane->input_slot : -1, -1);
	if (lane->next_slot < 0)
		lane->next_slot = free_slot(lane, -1, -1);
	if (lane->next_slot < 0 && (lane->next_slot = oldest(lane, TAKT_SLOT_DONE, 1)) >= 0)
		lane->slots[lane->next_slot].state = TAKT_SLOT_FREE;
	/* The client goes on writing observations while the daemon has all the slots. */
	if (lane->next_slot < 0 && takt_local_ready(lane))
		lane->next_slot = (int)lane->layout.slot_count;
	if (lane->next_slot < 0)
		return takt_lane_fail(
		    lane, -EBUSY,
		    "no free slot on the lane of \"%s\": %u of its %u are pending, the others hold replies; "
		    "wait for one before filling the next",
		    lane->layout.name, lane->pending, lane->layout.slot_count);
	return lane->next_slot;
}

int takt_pending(takt_lane *lane)
{
	takt_lane_collect(lane);
	return (int)(lane->pending - lane->silent);
}

char *takt_lane_slot(const struct takt_lane *lane, int slot)
{
	if (slot == (int)lane->layout.slot_count)
		return lane->local;
	return (char *)lane->map + lane->layout.slots_offset + (uint64_t)slot * lane->layout.slot_stride;
}

/* ---- submitting ---------------------------------------------------------------------------------------------- */

static int publish(struct takt_lane *lane, const struct takt_submission *entry)
{
	static const char byte = 1;
	int doorbell = 0;

	if (takt_rings_submit(&lane->rings, entry, &doorbell) < 0)
		return takt_lane_fail(lane, -EBUSY, "the submissions of \"%s\" are not being read: %u places are full",
				      lane->layout.name, lane->layout.ring_entries);
	/* A full buffer is as good as a byte: the daemon has something to wake up for. A peer that has gone is noticed
	 * by the wait, which still finds what was completed before. */
	if (doorbell)
		send(lane->wake_fd, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
	return 0;
}

/* Submits a slot whose inputs are written. input_ns: since when they are known. */
static int64_t submit_slot(struct takt_lane *lane, int number, uint64_t deadline_ns, uint64_t input_ns)
{
	struct takt_submission entry = {
	    .sequence = lane->next_sequence, .deadline_ns = deadline_ns, .submitted_ns = input_ns, .slot = (uint32_t)number};
	struct takt_client_slot *slot = &lane->slots[number];
	int result;

	if (lane->shapes_set) {
		memcpy(takt_lane_slot(lane, number) + lane->layout.shapes_offset_in_slot, lane->shapes,
		       lane->layout.input_count * sizeof(*lane->shapes));
		entry.flags = TAKT_SUBMIT_SHAPES;
	}
	if (lane->descriptor_used && takt_load_word(&lane->rings.cursors->client_waiting) != TAKT_WAITING_BYTE)
		takt_store_word(&lane->rings.cursors->client_waiting, TAKT_WAITING_BYTE);
	result = publish(lane, &entry);
	if (result < 0)
		return result;
	slot->state = TAKT_SLOT_PENDING;
	slot->given_up = 0;
	slot->silent = 0;
	slot->submitted_ns = input_ns;
	slot->deadline_ns = deadline_ns;
	slot->reply.sequence = entry.sequence;
	lane->pending += 1;
	lane->next_sequence += 1;
	lane->input_slot = number;
	lane->input_ns = input_ns;
	return (int64_t)entry.sequence;
}

static void copy_inputs(struct takt_lane *lane, int to, int from)
{
	const struct takt_layout *layout = &lane->layout;

	for (uint32_t i = 0; i < layout->input_count; i++)
		memcpy(takt_lane_slot(lane, to) + layout->tensors[i].offset_in_slot,
		       takt_lane_slot(lane, from) + layout->tensors[i].offset_in_slot, layout->tensors[i].bytes);
}

/* The slot to submit: inputs that were written in local.c's own go to a real one. */
static int real_slot(struct takt_lane *lane, int number)
{
	int real;

	if (number != (int)lane->layout.slot_count)
		return number;
	takt_lane_collect(lane);
	real = free_slot(lane, -1, -1);
	if (real < 0)
		return takt_lane_fail(lane, -EBUSY, "no free slot on the lane of \"%s\": all of its %u are pending",
				      lane->layout.name, lane->layout.slot_count);
	copy_inputs(lane, real, number);
	return real;
}

int64_t takt_submit(takt_lane *lane, uint64_t deadline_ns)
{
	int64_t result;
	int number;

	if (look_for_end(lane))
		return takt_lane_fail_ended(lane);
	number = takt_next_slot(lane);
	if (number >= 0)
		number = real_slot(lane, number);
	if (number < 0)
		return number;
	result = submit_slot(lane, number, deadline_ns, takt_clock_ns());
	if (result >= 0)
		lane->next_slot = -1;
	return result;
}

int64_t takt_repeat(takt_lane *lane)
{
	const struct takt_layout *layout = &lane->layout;
	int number;

	if (look_for_end(lane))
		return takt_lane_fail_ended(lane);
	/* The last input's own slot may have become the next one, and then the client has it and may write there. */
	if (lane->input_slot < 0 || lane->input_slot == lane->next_slot)
		return takt_lane_fail(lane, -ENODATA, "the lane of \"%s\" has no last input to repeat: submit one first",
				      layout->name);
	takt_lane_collect(lane);
	number = free_slot(lane, lane->input_slot, lane->next_slot);
	if (number < 0)
		return takt_lane_fail(lane, -EBUSY, "no free slot on the lane of \"%s\" for a copy of its last input: "
				      "%u of its %u are pending; wait for one first",
				      layout->name, lane->pending, layout->slot_count);
	copy_inputs(lane, number, lane->input_slot);
	return submit_slot(lane, number, 0, lane->input_ns);
}

int takt_cancel(takt_lane *lane, uint64_t sequence)
{
	const struct takt_submission entry = {.sequence = sequence, .flags = TAKT_SUBMIT_CANCEL};
	int slot;

	look_for_end(lane);
	takt_lane_collect(lane);
	slot = find(lane, sequence);
	if (slot < 0 || lane->slots[slot].state != TAKT_SLOT_PENDING)
		return takt_lane_fail(lane, -ENOENT, "job %llu of \"%s\" is not pending", (unsigned long long)sequence,
				      lane->layout.name);
	return lane->ended ? takt_lane_fail_ended(lane) : publish(lane, &entry);
}

/* ---- receiving ----------------------------------------------------------------------------------------------- */

static uint64_t between(uint64_t from_ns, uint64_t to_ns)
{
	return from_ns && to_ns > from_ns ? to_ns - from_ns : 0;
}

static void fill_reply(struct takt_client_slot *slot, const struct takt_completion *entry)
{
	struct takt_reply *reply = &slot->reply;

	reply->slot = entry->slot;
	reply->area = entry->area ? 1 : 0;
	reply->status = entry->status;
	reply->flags = entry->flags;
	reply->path = entry->path;
	reply->cause = entry->cause;
	reply->cause_detail = entry->cause_detail;
	reply->epoch = entry->epoch;
	reply->submitted_ns = slot->submitted_ns;
	reply->taken_ns = entry->taken_ns;
	reply->started_ns = entry->started_ns;
	reply->ended_ns = entry->ended_ns;
	reply->deadline_ns = entry->deadline_ns;
	reply->queued_ns = between(slot->submitted_ns, entry->started_ns ? entry->started_ns : entry->ended_ns);
	reply->run_ns = between(entry->started_ns, entry->ended_ns);
	reply->total_ns = between(slot->submitted_ns, entry->ended_ns);
}

void takt_lane_collect(struct takt_lane *lane)
{
	struct takt_completion entry;

	/* Bounded, whatever the tail says. */
	for (uint32_t i = 0; i < lane->layout.ring_entries && takt_rings_collect(&lane->rings, &entry) > 0; i++) {
		struct takt_client_slot *slot;

		/* A completion that fits no job of ours is none; what follows it still counts. */
		if (entry.slot >= lane->layout.slot_count)
			continue;
		slot = &lane->slots[entry.slot];
		if (slot->state != TAKT_SLOT_PENDING || slot->reply.sequence != entry.sequence)
			continue;
		fill_reply(slot, &entry);
		slot->state = slot->silent ? TAKT_SLOT_FREE : TAKT_SLOT_DONE;
		lane->silent -= slot->silent;
		slot->silent = 0;
		lane->pending -= 1;
	}
}

int takt_lane_receive(struct takt_lane *lane, uint64_t sequence, struct takt_reply *reply)
{
	int slot;

	look_for_end(lane);
	takt_lane_collect(lane);
	slot = sequence ? find(lane, sequence) : oldest(lane, TAKT_SLOT_DONE, 0);
	if (slot < 0 && (sequence || lane->pending == lane->silent))
		return takt_lane_fail(
		    lane, -ENOENT,
		    "job %llu of \"%s\" is not pending: it was received before, never submitted, or its slot "
		    "was needed after a wait had timed out",
		    (unsigned long long)sequence, lane->layout.name);
	if (slot < 0 || lane->slots[slot].state != TAKT_SLOT_DONE)
		return lane->ended ? takt_lane_fail_ended(lane) : 0;
	if (lane->slots[slot].reply.status != TAKT_OK)
		takt_local_keep(lane);
	if (lane->last_slot >= 0)
		lane->slots[lane->last_slot].state = TAKT_SLOT_FREE;
	lane->last_slot = slot;
	lane->slots[slot].state = TAKT_SLOT_LAST;
	*reply = lane->slots[slot].reply;
	if (lane->node)
		takt_node_tend(lane->node, reply->ended_ns);
	return 1;
}

int takt_lane_give_up(struct takt_lane *lane, uint64_t sequence, struct takt_reply *reply)
{
	const int slot = sequence ? find(lane, sequence) : oldest(lane, TAKT_SLOT_PENDING, 0);

	memset(reply, 0, sizeof(*reply));
	reply->status = TAKT_PENDING;
	if (slot >= 0) {
		lane->slots[slot].given_up = 1;
		reply->sequence = lane->slots[slot].reply.sequence;
		reply->slot = (uint32_t)slot;
		reply->submitted_ns = lane->slots[slot].submitted_ns;
		reply->deadline_ns = lane->slots[slot].deadline_ns;
		reply->total_ns = between(reply->submitted_ns, takt_clock_ns());
		reply->queued_ns = reply->total_ns;
	}
	return 0;
}

uint64_t takt_lane_until(const struct takt_lane *lane, uint64_t sequence, int64_t timeout_ns)
{
	const uint64_t now = takt_clock_ns();
	const struct takt_layout *layout = &lane->layout;
	uint64_t until = now + TAKT_TIMEOUT_MIN_NS;
	uint64_t deadline_ns = 0;
	int slot;

	if (timeout_ns == TAKT_TIMEOUT_NEVER)
		return UINT64_MAX;
	if (timeout_ns >= 0)
		return now + (uint64_t)timeout_ns;
	if (clocked(lane)) /* until the next beat, and its answer */
		return now + 2 * layout->period_ns + layout->deadline_ns + TAKT_TIMEOUT_MIN_NS;
	slot = sequence ? find(lane, sequence) : oldest(lane, TAKT_SLOT_PENDING, 0);
	if (slot >= 0)
		deadline_ns = lane->slots[slot].deadline_ns;
	if (slot >= 0 && !deadline_ns && layout->deadline_ns)
		deadline_ns = lane->slots[slot].submitted_ns + layout->deadline_ns;
	if (!deadline_ns && !layout->period_ns)
		return now + TAKT_TIMEOUT_MODEL_NS;
	return deadline_ns + layout->period_ns > until ? deadline_ns + layout->period_ns : until;
}

static int wait_until(struct takt_lane *lane, uint64_t sequence, uint64_t until_ns, int ask_only,
		      struct takt_reply *reply)
{
	for (;;) {
		int got;

		if (lane->descriptor_used)
			takt_lane_arm(lane);
		got = takt_lane_receive(lane, sequence, reply);
		if (got)
			return got < 0 ? got : 0;
		if (ask_only || !takt_lane_sleep(lane, until_ns))
			break;
	}
	return takt_lane_give_up(lane, sequence, reply);
}

int takt_wait_until(takt_lane *lane, uint64_t sequence, uint64_t until_ns, struct takt_reply *reply)
{
	return wait_until(lane, sequence, until_ns, 0, reply);
}

int takt_wait(takt_lane *lane, uint64_t sequence, int64_t timeout_ns, struct takt_reply *reply)
{
	if (timeout_ns < TAKT_TIMEOUT_DEFAULT)
		return takt_lane_fail(lane, -EINVAL,
				      "time-out of %lld ns: must be 0 or more, or one of takt.h's constants",
				      (long long)timeout_ns);
	return wait_until(lane, sequence, takt_lane_until(lane, sequence, timeout_ns), timeout_ns == 0, reply);
}

int takt_infer(takt_lane *lane, uint64_t deadline_ns, int64_t timeout_ns, struct takt_reply *reply)
{
	const uint64_t due_ns = takt_local_due(lane, deadline_ns);
	const int64_t sequence = takt_local_submit(lane, deadline_ns, due_ns);
	uint64_t until_ns;
	int result;

	if (sequence < 0)
		return (int)sequence;
	if (sequence > 0 && (due_ns == UINT64_MAX || timeout_ns < TAKT_TIMEOUT_DEFAULT))
		return takt_wait(lane, (uint64_t)sequence, timeout_ns, reply);
	if (sequence > 0) {
		until_ns = takt_lane_until(lane, (uint64_t)sequence, timeout_ns);
		result = wait_until(lane, (uint64_t)sequence, until_ns < due_ns ? until_ns : due_ns, timeout_ns == 0, reply);
		if (result < 0 || reply->status != TAKT_PENDING || takt_clock_ns() < due_ns)
			return result;
	}
	takt_local_answer(lane, (uint64_t)sequence, due_ns, reply);
	return 0;
}

int takt_fileno(takt_lane *lane)
{
	if (!lane->descriptor_used) {
		lane->descriptor_used = 1;
		takt_lane_arm(lane);
	}
	return lane->wake_fd;
}

/* ---- what it is ---------------------------------------------------------------------------------------------- */

void takt_describe(const takt_lane *lane, struct takt_lane_info *info)
{
	const struct takt_layout *layout = &lane->layout;

	*info = (struct takt_lane_info){
	    .name = layout->name,
	    .model = layout->model_name,
	    .kind = layout->kind,
	    .slot_count = layout->slot_count,
	    .input_count = layout->input_count,
	    .output_count = layout->tensor_count - layout->input_count,
	    .period_ns = layout->period_ns,
	    .deadline_ns = layout->deadline_ns,
	    .jitter_ns = layout->jitter_ns,
	    .epoch = layout->epoch,
	    .trigger = layout->trigger,
	    .dynamic = layout->shapes_offset_in_slot != 0,
	    .slot_stride = layout->slot_stride,
	    .slots_offset = layout->slots_offset,
	};
}

const char *takt_lane_error(const takt_lane *lane)
{
	return lane ? lane->error : "";
}
