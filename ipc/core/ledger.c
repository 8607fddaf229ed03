/* SPDX-License-Identifier: Apache-2.0
 *
 * ledger.c: the daemon-only record of what an executor has taken and what it has done. It outlives the executor, so that
 * a successor goes on where a SIGKILL at any instruction left it: nothing is lost, nothing completes twice.
 *
 * Taking:     slot fields -> slot TAKEN -> lane's next sequence -> counted -> submit head -> the shared head
 * Completing: image, its index -> slot DONE -> ring entry -> the shared tail -> lane's completion tail -> counted ->
 *             slot FREE
 *
 * Each arrow is a release store, so the order holds for whoever takes over, on any CPU. The recorded index makes
 * publishing idempotent: DONE at or after the lane's tail is published again (same bytes, same place); DONE before it has
 * been published and is only freed. TAKEN at or after the lane's head moves the head past it. What the statistics must
 * say once the job is counted is in the ledger before: a successor counts it if they don't say so yet.
 */
#include "server.h"

#include <string.h>
#include <unistd.h>

#define LEDGER_MAGIC "TAKTLDGR"

int takt_ledger_create(uint32_t lanes)
{
	struct takt_ledger_page *page;
	void *map;
	int fd, rc;

	if (lanes < 1 || lanes > TAKT_LANES_MAX)
		return -EINVAL;
	fd = takt_memfd("takt-ledger", sizeof(*page) + lanes * sizeof(struct takt_ledger_lane));
	if (fd < 0)
		return fd;
	rc = takt_map(fd, sizeof(*page), 1, &map);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	page = map;
	memcpy(page->magic, LEDGER_MAGIC, sizeof(page->magic));
	page->version = 1;
	page->lane_count = lanes;
	rc = takt_succession_init(page);
	takt_unmap(map, sizeof(*page));
	if (rc < 0) {
		close(fd);
		return rc;
	}
	return fd;
}

int takt_ledger_open(int fd, struct takt_ledger_page **page, uint64_t *size)
{
	void *map;
	int rc = takt_memfd_size(fd, size);

	if (rc < 0)
		return rc;
	if (*size < sizeof(**page))
		return -EPROTO;
	rc = takt_map(fd, *size, 1, &map);
	if (rc < 0)
		return rc;
	*page = map;
	if (memcmp((*page)->magic, LEDGER_MAGIC, sizeof((*page)->magic)) != 0 || (*page)->version != 1 ||
	    *size < sizeof(**page) + (*page)->lane_count * sizeof(struct takt_ledger_lane)) {
		takt_unmap(map, *size);
		return -EPROTO;
	}
	return 0;
}

void takt_ledger_reset(struct takt_ledger_lane *lane, uint32_t area, uint64_t memory)
{
	memset(lane, 0, sizeof(*lane));
	lane->area = area;
	lane->memory = memory;
	lane->next_sequence = 1;
	takt_store_state(&lane->used, 1);
}

void takt_ledger_take(struct takt_served *lane, const struct takt_submission *entry, uint64_t release_ns, uint64_t now_ns)
{
	struct takt_ledger_lane *ledger = lane->ledger;
	struct takt_ledger_slot *slot = &ledger->slots[entry->slot];

	slot->flags = entry->flags;
	slot->sequence = entry->sequence;
	slot->submit_index = lane->rings.submit_head;
	slot->deadline_ns = entry->deadline_ns;
	if (entry->deadline_ns == 0 && lane->layout.kind == TAKT_KIND_LOOP)
		slot->deadline_ns = release_ns + lane->layout.deadline_ns; /* until the scheduler says better */
	slot->release_ns = release_ns;
	slot->taken_ns = now_ns;
	slot->started_ns = 0;
	ledger->submitted = takt_load_u64(&lane->stats->submitted) + 1;
	takt_store_state(&slot->state, TAKT_LEDGER_TAKEN);
	takt_store_u64(&ledger->last_release_ns, release_ns);
	takt_store_cursor(&ledger->next_sequence, entry->sequence + 1);
	takt_store_u64(&lane->stats->submitted, ledger->submitted);
	takt_store_cursor(&ledger->submit_head, lane->rings.submit_head + 1);
}

static void recover_slot(struct takt_served *lane, uint32_t index)
{
	struct takt_ledger_lane *ledger = lane->ledger;
	struct takt_ledger_slot *slot = &ledger->slots[index];

	if (takt_load_state(&slot->state) == TAKT_LEDGER_FREE)
		return;
	if (slot->submit_index >= ledger->submit_head) {
		if (takt_load_u64(&lane->stats->submitted) < ledger->submitted)
			takt_store_u64(&lane->stats->submitted, ledger->submitted);
		takt_store_cursor(&ledger->next_sequence, slot->sequence + 1);
		takt_store_cursor(&ledger->submit_head, slot->submit_index + 1);
	}
	if (slot->state == TAKT_LEDGER_TAKEN) {
		lane->pending |= UINT64_C(1) << index;
		return;
	}
	if (slot->completion_index >= ledger->completion_tail)
		takt_served_publish(lane, slot);
	else if (slot->image.status < TAKT_STATS_STATUSES &&
		 takt_load_u64(&lane->stats->status[slot->image.status]) < ledger->answered)
		takt_stats_job(lane->stats, &slot->image, slot->release_ns);
	takt_store_state(&slot->state, TAKT_LEDGER_FREE);
}

void takt_ledger_recover(struct takt_served *lane)
{
	struct takt_ledger_lane *ledger = lane->ledger;

	lane->rings.completion_tail = ledger->completion_tail;
	for (uint32_t i = 0; i < lane->layout.slot_count; i++)
		recover_slot(lane, i);
	ledger->area = lane->area;
	lane->rings.submit_head = ledger->submit_head;
	/* Nobody scanned since the predecessor died: the last release it saw is what a client can't go behind. */
	lane->empty_ns = ledger->last_release_ns;
	takt_store_cursor(&lane->rings.cursors->submit_head, ledger->submit_head);
	takt_store_cursor(&lane->rings.cursors->completion_tail, ledger->completion_tail);
	for (uint32_t i = 0; i < lane->layout.slot_count; i++) {
		if ((lane->pending >> i & 1) && (ledger->slots[i].flags & TAKT_SUBMIT_SHAPES) &&
		    takt_served_copy_shapes(lane, i) == 0)
			lane->shaped |= UINT64_C(1) << i;
	}
}
