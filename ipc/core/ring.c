/* SPDX-License-Identifier: Apache-2.0
 *
 * ring.c: the two single-producer single-consumer rings of a lane. Cursors run freely in 64 bits; an entry's place is its
 * cursor modulo the ring's size. Each side keeps its own cursors privately and only publishes them: what a peer writes
 * over them changes nothing for their owner.
 *
 * Prior art: io_uring's rings as liburing reads them. Rejected: a sequence word per entry (bounded MPMC queues), which
 * needs no tail but makes the daemon poll lines that the client writes piecemeal.
 */
#include "lib.h"

void takt_rings_init(struct takt_rings *rings, void *map, const struct takt_layout *layout)
{
	uint8_t *base = map;

	*rings = (struct takt_rings){
		.cursors = (struct takt_cursors *)(base + layout->cursors_offset),
		.submit = (struct takt_submission *)(base + layout->submit_ring_offset),
		.completion = (struct takt_completion *)(base + layout->completion_ring_offset),
		.mask = layout->ring_entries - 1,
	};
}

int takt_rings_submit(struct takt_rings *rings, const struct takt_submission *entry, int *doorbell)
{
	uint64_t head = takt_load_cursor(&rings->cursors->submit_head);

	if (rings->submit_tail - head > rings->mask)
		return -EAGAIN;
	takt_store_entry(&rings->submit[rings->submit_tail & rings->mask], entry);
	rings->submit_tail++;
	takt_store_cursor(&rings->cursors->submit_tail, rings->submit_tail);
	takt_dekker_fence(); /* tail before daemon_sleeping; the daemon: sleeping before tail */
	*doorbell = takt_load_word(&rings->cursors->daemon_sleeping) != 0;
	return 0;
}

int takt_rings_collect(struct takt_rings *rings, struct takt_completion *entry)
{
	uint64_t tail = takt_load_cursor(&rings->cursors->completion_tail);

	if (tail == rings->completion_head)
		return 0;
	takt_load_entry(entry, &rings->completion[rings->completion_head & rings->mask]);
	rings->completion_head++;
	takt_store_cursor(&rings->cursors->completion_head, rings->completion_head);
	return 1;
}

int takt_rings_peek(struct takt_rings *rings, struct takt_submission *entry)
{
	uint64_t tail = takt_load_cursor(&rings->cursors->submit_tail);

	if (tail == rings->submit_head)
		return 0;
	/* Unsigned: a tail that went back is as impossible as one that is too far ahead. */
	if (tail - rings->submit_head > rings->mask + 1)
		return -EPROTO;
	takt_load_entry(entry, &rings->submit[rings->submit_head & rings->mask]);
	return 1;
}

void takt_rings_taken(struct takt_rings *rings)
{
	rings->submit_head++;
	takt_store_cursor(&rings->cursors->submit_head, rings->submit_head);
}

void takt_rings_complete(struct takt_rings *rings, const struct takt_completion *entry)
{
	takt_store_entry(&rings->completion[rings->completion_tail & rings->mask], entry);
	rings->completion_tail++;
	takt_store_cursor(&rings->cursors->completion_tail, rings->completion_tail);
}
