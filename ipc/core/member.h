/* SPDX-License-Identifier: Apache-2.0 */
/*
 * member.h - an executor's part in one ledger's succession: what succession.c (whose turn it is) and hang.c (an eye on the
 * owner) share.
 */
#ifndef TAKT_MEMBER_H
#define TAKT_MEMBER_H

#include "server.h"

/* What the thread needs of a lane to see whether its owner has something to do there. */
struct watched_lane {
	const struct takt_cursors *cursors;
	const struct takt_ledger_lane *ledger;
	uint64_t memory;
	uint32_t slot_count;
};

struct fence {
	uint32_t member; /* 0: free */
	int pidfd;
};

/* What the thread has seen of the present owner. */
struct owner_view {
	uint64_t progress;
	uint64_t run_started_ns;
	uint64_t heard_ns;   /* when it last changed */
	uint64_t looked_ns;
	uint64_t silent_ns;  /* how long we have watched it without a sign of life while it had something to do */
	uint64_t pinged_at;  /* silent_ns at the ping */
	uint32_t owner;
	uint32_t busy;       /* it had something to do when we looked last */
	uint32_t pinged;
	uint32_t ping;       /* its number */
};

struct takt_member {
	pthread_t thread;
	struct takt_succession *succession;
	pthread_mutex_t *lock;
	uint64_t hang_after_ns;
	uint32_t id;
	uint32_t stop;
	uint32_t let_go; /* hand the ledger over */
	uint32_t news;   /* enum takt_news, or-ed, not yet collected */
	uint32_t owned;  /* the executor's thread knows that the ledger is ours */
	int event_fd;
	struct owner_view view;
	pthread_mutex_t guard; /* of what follows */
	struct fence fences[TAKT_MEMBERS_MAX];
	uint32_t lane_count;
	struct watched_lane lanes[]; /* as many as the ledger has */
};

/* Something in the succession's first line has changed: wakes everybody who waits for that. */
void takt_succession_ring(struct takt_succession *succession);
/* hang.c: looks at the owner, step_ns after the last look; kills it if it hangs. */
void takt_member_look(struct takt_member *member, uint64_t step_ns);
/* How long until the next look, ns. */
uint64_t takt_member_step(const struct takt_member *member);

#endif
