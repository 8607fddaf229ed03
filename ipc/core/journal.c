/* SPDX-License-Identifier: Apache-2.0
 *
 * journal.c: the executor's record ring. It writes and never waits: the newest records overwrite the oldest. The
 * supervisor drains the ring; each record carries its number, so that a reader knows what it missed and never takes a
 * half-written record for a whole one.
 *
 * Each record is a seqlock of its own. Prior art: Boehm, "Can seqlocks get along with programming language memory
 * models?" (MSPC 2012), whose fences these are.
 */
#include "lib.h"

#include <string.h>
#include <unistd.h>

#define JOURNAL_MAGIC "TAKTJRNL"
#define JOURNAL_RECORDS_MAX (1u << 22)
enum { RECORD_WORDS = 4 }; /* of a record, without its number */

int takt_journal_create(uint32_t records)
{
	struct takt_journal_page *page;
	void *map;
	int fd, rc;

	if (records < 2 || records > JOURNAL_RECORDS_MAX || (records & (records - 1)) != 0)
		return -EINVAL;
	fd = takt_memfd("takt-journal", sizeof(*page) + records * sizeof(struct takt_record));
	if (fd < 0)
		return fd;
	rc = takt_map(fd, sizeof(*page), 1, &map);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	page = map;
	memcpy(page->magic, JOURNAL_MAGIC, sizeof(page->magic));
	page->version = 1;
	page->capacity = records;
	takt_unmap(map, sizeof(*page));
	return fd;
}

int takt_journal_open(int fd, int writable, struct takt_journal_page **page, uint64_t *size)
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
	if (memcmp((*page)->magic, JOURNAL_MAGIC, sizeof((*page)->magic)) != 0 || (*page)->version != 1 ||
	    (*page)->capacity == 0 || ((*page)->capacity & ((*page)->capacity - 1)) != 0 ||
	    *size < sizeof(**page) + (*page)->capacity * sizeof(struct takt_record)) {
		takt_unmap(map, *size);
		return -EPROTO;
	}
	return 0;
}

void takt_journal_write(struct takt_journal_page *page, const struct takt_record *record)
{
	uint64_t tail = takt_load_u64(&page->tail);
	struct takt_record *to = &page->records[tail & (page->capacity - 1)];
	uint64_t words[RECORD_WORDS];

	memcpy(words, record, sizeof(words));
	takt_store_u64(&to->number, 0);
	/* "Being written" before any new word: a reader that sees a new word then sees 0 or the new number. */
	__atomic_thread_fence(__ATOMIC_RELEASE);
	for (int i = 0; i < RECORD_WORDS; i++)
		takt_store_u64((uint64_t *)to + i, words[i]);
	takt_store_cursor(&to->number, tail + 1); /* release: all words before the number */
	takt_store_cursor(&page->tail, tail + 1);
}

/* Copies record `number` out; 0 when it has been overwritten meanwhile. */
static int copy_record(const struct takt_record *from, uint64_t number, struct takt_record *out)
{
	uint64_t words[RECORD_WORDS];

	if (takt_load_cursor(&from->number) != number)
		return 0;
	for (int i = 0; i < RECORD_WORDS; i++)
		words[i] = takt_load_u64((const uint64_t *)from + i);
	/* The words before the second look at the number, which an acquire load alone would not order. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (takt_load_u64(&from->number) != number)
		return 0;
	memcpy(out, words, sizeof(words));
	out->number = number;
	return 1;
}

uint32_t takt_journal_read(const struct takt_journal_page *page, uint64_t *cursor, struct takt_record *out, uint32_t max,
			   uint64_t *lost)
{
	const uint64_t mask = page->capacity - 1;
	uint64_t tail = takt_load_cursor(&page->tail);
	uint32_t count = 0;

	if (*cursor > tail) /* a cursor of another journal: start with what is there */
		*cursor = tail > page->capacity ? tail - page->capacity : 0;
	if (tail - *cursor > page->capacity) {
		*lost += tail - page->capacity - *cursor;
		*cursor = tail - page->capacity;
	}
	while (count < max && *cursor < tail) {
		if (copy_record(&page->records[*cursor & mask], *cursor + 1, &out[count]))
			count++;
		else
			(*lost)++;
		(*cursor)++;
	}
	return count;
}
