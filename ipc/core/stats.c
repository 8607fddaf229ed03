/* SPDX-License-Identifier: Apache-2.0
 *
 * stats.c: the statistics page: counters and latency histograms, one block per loop or model. The executor that serves
 * the block is its only writer; the supervisor reads it from its own process, without asking. Every word is a relaxed
 * 64-bit load or store: a reader sees no torn number, but may see a job in one counter and not yet in the next.
 */
#include "lib.h"

#include <string.h>
#include <unistd.h>

#define STATS_MAGIC "TAKTSTAT"

uint32_t takt_hist_index(uint64_t value_ns)
{
	uint32_t octave;

	if (value_ns < TAKT_HIST_SUB)
		return (uint32_t)value_ns;
	octave = 63u - (uint32_t)__builtin_clzll(value_ns);
	if (octave >= TAKT_HIST_TOP_BITS)
		return TAKT_HIST_BUCKETS - 1;
	return (octave - TAKT_HIST_SUB_BITS) * TAKT_HIST_SUB + (uint32_t)(value_ns >> (octave - TAKT_HIST_SUB_BITS));
}

uint64_t takt_hist_upper_ns(uint32_t index)
{
	uint32_t octave = index / TAKT_HIST_SUB, sub = index % TAKT_HIST_SUB;

	if (octave == 0)
		return index;
	return ((uint64_t)(TAKT_HIST_SUB + sub + 1) << (octave - 1)) - 1;
}

void takt_hist_add(struct takt_hist *hist, uint64_t value_ns)
{
	takt_count(&hist->buckets[takt_hist_index(value_ns)], 1);
	takt_count(&hist->sum_ns, value_ns);
	if (value_ns > takt_load_u64(&hist->max_ns))
		takt_store_u64(&hist->max_ns, value_ns);
	takt_count(&hist->count, 1);
}

static uint64_t since(uint64_t later_ns, uint64_t earlier_ns)
{
	return later_ns > earlier_ns ? later_ns - earlier_ns : 0;
}

void takt_stats_job(struct takt_stats_block *block, const struct takt_completion *done, uint64_t release_ns)
{
	if (done->status < TAKT_STATS_STATUSES)
		takt_count(&block->status[done->status], 1);
	if (done->flags & TAKT_LATE)
		takt_count(&block->late, 1);
	if (done->flags & TAKT_OVERRUN)
		takt_count(&block->overrun, 1);
	if (done->flags & TAKT_STAND_IN)
		takt_count(&block->stand_in, 1);
	if (done->flags & TAKT_EARLY)
		takt_count(&block->early, 1);
	if (((done->flags & TAKT_LATE) || done->status == TAKT_EXPIRED) && done->cause < TAKT_STATS_CAUSES)
		takt_count(&block->misses[done->cause], 1);
	if (done->started_ns == 0)
		return;
	takt_hist_add(&block->queue, since(done->started_ns, release_ns));
	takt_hist_add(&block->run, since(done->ended_ns, done->started_ns));
	takt_hist_add(&block->total, since(done->ended_ns, release_ns));
}

uint32_t takt_stats_batch_size(uint32_t index)
{
	if (index + 2 <= TAKT_STATS_BATCH_EXACT)
		return index + 2;
	if (index == TAKT_STATS_BATCH_SIZES - 1)
		return UINT32_MAX;
	return (uint32_t)TAKT_STATS_BATCH_EXACT << (index + 2 - TAKT_STATS_BATCH_EXACT);
}

void takt_stats_batch(struct takt_stats_block *block, uint32_t size, uint64_t run_ns)
{
	uint32_t index = 0;

	while (takt_stats_batch_size(index) < size)
		index++;
	takt_count(&block->batched_jobs, size);
	takt_count(&block->batched_run_ns, size * run_ns);
	takt_count(&block->batches[index].dispatches, 1);
	takt_count(&block->batches[index].run_ns, run_ns);
}

int takt_stats_create(uint32_t blocks)
{
	struct takt_stats_page *page;
	void *map;
	int fd, rc;

	if (blocks < 1 || blocks > TAKT_STATS_BLOCKS_MAX)
		return -EINVAL;
	fd = takt_memfd("takt-stats", sizeof(*page) + blocks * sizeof(struct takt_stats_block));
	if (fd < 0)
		return fd;
	rc = takt_map(fd, sizeof(*page), 1, &map);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	page = map;
	memcpy(page->magic, STATS_MAGIC, sizeof(page->magic));
	page->version = 1;
	page->block_count = blocks;
	page->block_bytes = sizeof(struct takt_stats_block);
	takt_unmap(map, sizeof(*page));
	return fd;
}

int takt_stats_open(int fd, int writable, struct takt_stats_page **page, uint64_t *size)
{
	void *map;
	int rc = takt_memfd_size(fd, size);

	if (rc < 0)
		return rc;
	if (*size < sizeof(**page))
		return -EPROTO;
	rc = takt_map(fd, *size, writable, &map);
	if (rc < 0)
		return rc;
	*page = map;
	if (memcmp((*page)->magic, STATS_MAGIC, sizeof((*page)->magic)) != 0 || (*page)->version != 1 ||
	    (*page)->block_bytes != sizeof(struct takt_stats_block) ||
	    *size < sizeof(**page) + (*page)->block_count * sizeof(struct takt_stats_block)) {
		takt_unmap(map, *size);
		return -EPROTO;
	}
	return 0;
}
