/* SPDX-License-Identifier: Apache-2.0
 *
 * local.c: the answer that the client library gives itself when a loop's deadline passes without a completion: the last
 * good outputs held (hold), or constants. The loop's configuration asks for it; the daemon says so at attach.
 *
 * It lies in one slot more than the lane has, in memory of the client's own that is laid out like the others, so that
 * inputs can be written and outputs read as ever while all the lane's slots are with a daemon that does not answer.
 * What is held is copied there only when its place is about to be used again: an answer that comes costs nothing.
 */
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "message.h"

static char *local_output(const struct takt_lane *lane, uint32_t index)
{
	return (char *)lane->local + lane->layout.tensors[index].offset_in_slot;
}

/* One output's values, or one value for all of its elements. */
static int fill(const struct takt_lane *lane, uint32_t index, const char *values, uint32_t bytes)
{
	const uint64_t wanted = lane->layout.tensors[index].bytes;
	char *to = local_output(lane, index);

	if (!bytes || wanted % bytes)
		return -EPROTO;
	for (uint64_t at = 0; at < wanted; at += bytes)
		memcpy(to + at, values, bytes);
	return 0;
}

static int fill_constants(struct takt_lane *lane, const char *body, size_t bytes)
{
	for (uint32_t i = lane->layout.input_count; i < lane->layout.tensor_count; i++) {
		struct takt_constant constant;
		size_t padded;

		if (bytes < sizeof(constant))
			return -EPROTO;
		memcpy(&constant, body, sizeof(constant));
		padded = (constant.bytes + 7u) & ~(size_t)7u;
		if (constant.bytes > TAKT_MESSAGE_MAX || padded > bytes - sizeof(constant) ||
		    fill(lane, i, body + sizeof(constant), constant.bytes) < 0)
			return -EPROTO;
		body += sizeof(constant) + padded;
		bytes -= sizeof(constant) + padded;
	}
	lane->local_good = 1;
	return 0;
}

int takt_local_init(struct takt_lane *lane, const char *body, size_t bytes)
{
	struct takt_local_answer asked;
	int rc;

	if (bytes < sizeof(asked))
		return 0;
	memcpy(&asked, body, sizeof(asked));
	if (asked.path != TAKT_PATH_HOLD && asked.path != TAKT_PATH_CONSTANT)
		return 0; /* nothing, or something newer than we are */
	lane->local_fd = takt_memfd("takt-local", lane->layout.slot_stride);
	if (lane->local_fd < 0)
		return lane->local_fd;
	rc = takt_map(lane->local_fd, lane->layout.slot_stride, 1, &lane->local);
	if (rc == 0 && asked.path == TAKT_PATH_CONSTANT)
		rc = fill_constants(lane, body + sizeof(asked), bytes - sizeof(asked));
	if (rc == 0)
		lane->local_path = asked.path;
	return rc;
}

void takt_local_free(struct takt_lane *lane)
{
	if (lane->local)
		takt_unmap(lane->local, lane->layout.slot_stride);
	if (lane->local_fd >= 0)
		close(lane->local_fd);
}

static int last_is_good(const struct takt_lane *lane)
{
	return lane->last_slot >= 0 && lane->last_slot < (int)lane->layout.slot_count &&
	       lane->slots[lane->last_slot].reply.status == TAKT_OK;
}

void takt_local_keep(struct takt_lane *lane)
{
	const struct takt_layout *layout = &lane->layout;

	if (lane->local_path != TAKT_PATH_HOLD || !last_is_good(lane))
		return;
	for (uint32_t i = layout->input_count; i < layout->tensor_count; i++)
		memcpy(local_output(lane, i),
		       takt_lane_slot(lane, lane->last_slot) + (lane->slots[lane->last_slot].reply.area
								    ? layout->tensors[i].offset_in_slot_1
								    : layout->tensors[i].offset_in_slot),
		       layout->tensors[i].bytes);
	lane->local_good = 1;
}

int takt_local_ready(const struct takt_lane *lane)
{
	return lane->local_path && (lane->local_good || last_is_good(lane));
}

uint64_t takt_local_due(const struct takt_lane *lane, uint64_t deadline_ns)
{
	if (!takt_local_ready(lane))
		return UINT64_MAX;
	return deadline_ns ? deadline_ns : takt_clock_ns() + lane->layout.deadline_ns;
}

int64_t takt_local_submit(struct takt_lane *lane, uint64_t deadline_ns, uint64_t due_ns)
{
	for (;;) {
		int64_t result = takt_submit(lane, deadline_ns);

		if (result != -EBUSY || due_ns == UINT64_MAX)
			return result;
		if (takt_clock_ns() >= due_ns)
			return 0;
		takt_lane_sleep(lane, due_ns);
	}
}

void takt_local_answer(struct takt_lane *lane, uint64_t sequence, uint64_t due_ns, struct takt_reply *reply)
{
	const int number = (int)lane->layout.slot_count;

	if (!sequence)
		memset(reply, 0, sizeof(*reply)); /* nothing could be submitted */
	else
		takt_lane_give_up(lane, sequence, reply);
	for (int i = 0; sequence && i < number; i++) {
		struct takt_client_slot *slot = &lane->slots[i];

		if (slot->state == TAKT_SLOT_PENDING && slot->reply.sequence == sequence) {
			slot->silent = 1;
			lane->silent += 1;
		}
	}
	reply->status = TAKT_OK;
	reply->path = lane->local_path;
	reply->slot = (uint32_t)number;
	reply->ended_ns = takt_clock_ns();
	reply->deadline_ns = due_ns;
	takt_local_keep(lane);
	if (lane->last_slot >= 0)
		lane->slots[lane->last_slot].state = TAKT_SLOT_FREE;
	lane->last_slot = number;
	lane->slots[number].state = TAKT_SLOT_LAST;
	lane->slots[number].reply = *reply;
}
