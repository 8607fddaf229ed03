/* SPDX-License-Identifier: Apache-2.0
 *
 * reattach.c: a lane that comes back by itself after its end, for programs that asked for it (takt_set_reattach()).
 *
 * There is no thread for it. The end is told once, by -EPIPE, so that no cycle is begun on one lane and submitted on
 * another; from then on each new cycle, which begins with takt_input() or takt_next_slot(), may ask the daemon for the
 * lane, less and less often while it is not to be had. What ended stays mapped until the next end, since a program may
 * still hold pointers into it: what it writes there is lost, and nothing else.
 */
#include <stdlib.h>
#include <string.h>

#include "client.h"

#define PAUSE_FIRST_NS 50000000u
#define PAUSE_MAX_NS   2000000000u

int takt_set_reattach(takt_lane *lane, int on)
{
	lane->reattach = on != 0;
	lane->again_ns = 0;
	lane->again_pause_ns = PAUSE_FIRST_NS;
	return 0;
}

static int same_tensors(const struct takt_layout *one, const struct takt_layout *other)
{
	if (one->input_count != other->input_count || one->tensor_count != other->tensor_count ||
	    one->dynamic != other->dynamic)
		return 0;
	for (uint32_t i = 0; i < one->tensor_count; i++) {
		const struct takt_tensor_entry *a = &one->tensors[i], *b = &other->tensors[i];

		if (strcmp(a->name, b->name) || a->dtype != b->dtype || a->rank != b->rank ||
		    memcmp(a->dims, b->dims, sizeof(a->dims)))
			return 0;
	}
	return 1;
}

static void unlink_lane(struct takt_node *node, const struct takt_lane *lane)
{
	for (struct takt_lane **link = &node->lanes; *link; link = &(*link)->sibling)
		if (*link == lane) {
			*link = lane->sibling;
			return;
		}
}

/* The program's lane becomes the fresh one; what it was moves to a place of its own. */
static int take_over(struct takt_lane *lane, struct takt_lane *fresh)
{
	struct takt_node *node = lane->node;
	struct takt_lane *before = malloc(sizeof(*before));

	if (!before) {
		takt_detach(fresh);
		return takt_lane_fail(lane, -ENOMEM, "out of memory");
	}
	takt_set_reattach(fresh, 1);
	if (lane->shapes_set) {
		memcpy(fresh->shapes, lane->shapes, lane->layout.input_count * sizeof(*lane->shapes));
		fresh->shapes_set = 1;
	}
	pthread_mutex_lock(&node->lock);
	unlink_lane(node, fresh);
	takt_lane_free(lane->before);
	*before = *lane;
	before->node = NULL;
	before->before = NULL;
	*lane = *fresh;
	lane->sibling = before->sibling;
	lane->before = before;
	pthread_mutex_unlock(&node->lock);
	free(fresh); /* all that it held is the program's lane's now */
	return 0;
}

int takt_lane_again(struct takt_lane *lane)
{
	const uint64_t now = takt_clock_ns();
	struct takt_node *node = lane->node;
	struct takt_lane *fresh;
	int result;

	if (!node)
		return takt_lane_fail_ended(lane);
	if (now < lane->again_ns)
		return takt_lane_fail(lane, -EPIPE, "the lane of \"%s\" has ended; it is asked for again in %llu ms",
				      lane->layout.name, (unsigned long long)((lane->again_ns - now) / 1000000u));
	result = takt_attach(node, lane->layout.name, lane->layout.kind, lane->wait_mode, 0, &fresh);
	if (result == 0 && !same_tensors(&lane->layout, &fresh->layout)) {
		takt_detach(fresh);
		result = takt_lane_fail(lane, -EPROTO, "\"%s\" has other tensors than the lane that ended: detach it and "
					"attach it anew, and look at what it has", lane->layout.name);
	} else if (result < 0) {
		result = takt_lane_fail(lane, -EPIPE, "the lane of \"%s\" has ended, and there is no other one yet: %s",
					lane->layout.name, takt_error(node));
	}
	if (result < 0) {
		lane->again_ns = takt_clock_ns() + lane->again_pause_ns;
		lane->again_pause_ns =
		    lane->again_pause_ns * 2 < PAUSE_MAX_NS ? lane->again_pause_ns * 2 : PAUSE_MAX_NS;
		return result;
	}
	return take_over(lane, fresh);
}
