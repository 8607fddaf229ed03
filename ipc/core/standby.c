/* SPDX-License-Identifier: Apache-2.0
 *
 * standby.c: lanes that are mapped here and served elsewhere. An executor can hold several ledgers: its own device's and
 * those that it stands in for. A lane on standby has addresses, so that engines can be bound to it, and that is all:
 * its ledger, its cursors and its descriptor are its present executor's. Doorbells that ring between two owners stay in
 * the descriptor for the next one.
 *
 * Not here: whose turn it is (succession.c), what a successor makes of the ledger (ledger.c).
 */
#include "server.h"

#include <stdlib.h>
#include <string.h>

static int grow(struct takt_server *server, uint32_t by)
{
	uint32_t limit = server->lane_limit + by;
	struct takt_served **lanes;
	uint32_t *active = realloc(server->active, limit * sizeof(*active));

	if (!active)
		return -ENOMEM;
	server->active = active;
	lanes = realloc(server->lanes, limit * sizeof(*lanes));
	if (!lanes)
		return -ENOMEM;
	server->lanes = lanes;
	memset(&lanes[server->lane_limit], 0, by * sizeof(*lanes));
	server->lane_limit = limit;
	return 0;
}

int takt_server_open_ledger(struct takt_server *server, int ledger_fd, int stats_fd)
{
	struct takt_home *home = &server->homes[server->home_count];
	int rc;

	if (server->home_count == TAKT_LEDGERS_MAX)
		return -EMFILE;
	memset(home, 0, sizeof(*home));
	home->first_lane = server->lane_limit;
	rc = takt_ledger_open(ledger_fd, &home->page, &home->page_bytes);
	if (rc < 0)
		return rc;
	rc = takt_stats_open(stats_fd, 1, &home->stats, &home->stats_bytes);
	if (rc == 0) {
		rc = grow(server, home->page->lane_count);
		if (rc < 0)
			takt_unmap(home->stats, home->stats_bytes);
	}
	if (rc < 0) {
		takt_unmap(home->page, home->page_bytes);
		return rc;
	}
	return (int)server->home_count++;
}

struct takt_home *takt_server_home(struct takt_server *server, uint32_t lane)
{
	for (uint32_t i = 0; i < server->home_count; i++)
		if (lane - server->homes[i].first_lane < server->homes[i].page->lane_count)
			return &server->homes[i];
	return NULL;
}

int takt_served_start(struct takt_server *server, struct takt_served *lane)
{
	uint64_t now_ns = takt_clock_ns();
	int rc = takt_doorbell_listen(server, lane);

	if (rc < 0)
		return rc;
	takt_rings_init(&lane->rings, lane->base, &lane->layout);
	lane->pending = 0;
	lane->shaped = 0;
	lane->outputs_shaped = 0;
	lane->next_arrival_ns = 0;
	memset(lane->hopeless_ns, 0, sizeof(lane->hopeless_ns));
	lane->closed = 0;
	lane->standby = 0;
	if (lane->recover && lane->ledger->used && lane->ledger->memory == lane->memory) {
		takt_ledger_recover(lane);
		server->pending_count += (uint32_t)__builtin_popcountll(lane->pending);
	} else {
		takt_ledger_reset(lane->ledger, lane->area, lane->memory);
		lane->empty_ns = now_ns;
	}
	lane->recover = 1; /* whenever it comes back to us, the ledger knows */
	server->lane_count++;
	/* Scanned at first: entries may be there already, and their doorbell may have gone to a predecessor. */
	takt_doorbell_activate(server, lane, now_ns);
	return 0;
}

int takt_server_activate(struct takt_server *server, uint32_t index)
{
	struct takt_served *lane = takt_server_lane(server, index);
	int rc;

	if (!lane)
		return -ENOENT;
	if (!lane->standby)
		return -EALREADY;
	if (!takt_home_is_ours(&server->homes[lane->home]))
		return -EPERM;
	takt_server_alive(server);
	rc = takt_served_start(server, lane);
	return rc < 0 ? rc : __builtin_popcountll(lane->pending);
}

int takt_server_release(struct takt_server *server, uint32_t index)
{
	struct takt_served *lane = takt_server_lane(server, index);
	int left;

	if (!lane)
		return -ENOENT;
	if (lane->standby)
		return -EALREADY;
	left = __builtin_popcountll(lane->pending);
	takt_watch_forget(server, index);
	takt_doorbell_ignore(server, lane);
	takt_store_word(&lane->rings.cursors->daemon_sleeping, 1); /* nobody scans it until its next owner does */
	takt_doorbell_deactivate(server, lane);
	lane->pending = 0;
	lane->standby = 1;
	server->pending_count -= (uint32_t)left;
	server->lane_count--;
	return left;
}

int takt_server_set_area(struct takt_server *server, uint32_t index, uint32_t area)
{
	struct takt_served *lane = takt_server_lane(server, index);

	if (!lane)
		return -ENOENT;
	if (!lane->standby)
		return -EALREADY;
	if (area >= TAKT_AREAS)
		return -EINVAL;
	lane->area = area;
	return 0;
}
