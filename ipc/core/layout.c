/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c: where things are in a lane's memory. The daemon computes it and writes the header; a client reads and checks
 * it once. Also the sealed anonymous files that lanes, ledgers and pages live in.
 *
 *     header | tensor table | names | cursors | submit ring | completion ring | slot 0 | slot 1 | ...
 *     slot: inputs | outputs, area 0 | outputs, area 1 | shapes block (lanes with dynamic shapes)
 *
 * Cursors, each ring, each slot and each tensor start on a page of their own: a GPU driver registers pages, and nothing a
 * client does to one tensor's pages touches another's.
 */
#include "lib.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t page_bytes(void)
{
	return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Sums here can't overflow: at most 3 * TAKT_TENSORS_MAX parts of at most TAKT_LANE_BYTES_MAX each. */
static uint64_t round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

int takt_tensor_bytes(uint32_t dtype, uint32_t rank, const int64_t *dims, uint64_t *bytes)
{
	uint64_t bits = takt_dtype_bits(dtype);

	if (bits == 0 || rank > TAKT_RANK_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < rank; i++) {
		if (dims[i] < 1)
			return -EINVAL;
		if (__builtin_mul_overflow(bits, (uint64_t)dims[i], &bits))
			return -EOVERFLOW;
	}
	*bytes = bits / 8 + (bits % 8 != 0);
	return *bytes > TAKT_LANE_BYTES_MAX ? -EOVERFLOW : 0;
}

static uint32_t power_of_two_from(uint32_t value)
{
	uint32_t power = 1;

	while (power < value)
		power *= 2;
	return power;
}

/* Places the tensors of one slot; returns its stride, 0 when a tensor is impossible. */
static int place_slot(struct takt_layout *layout, uint64_t page)
{
	uint64_t at = 0;
	int rc;

	for (uint32_t i = 0; i < layout->tensor_count; i++) {
		struct takt_tensor_entry *t = &layout->tensors[i];
		rc = takt_tensor_bytes(t->dtype, t->rank, t->dims, &t->bytes);
		if (rc < 0)
			return rc;
		t->offset_in_slot = at;
		t->offset_in_slot_1 = at;
		at += round_up(t->bytes, page);
	}
	for (uint32_t i = layout->input_count; i < layout->tensor_count; i++) {
		layout->tensors[i].offset_in_slot_1 = at;
		at += round_up(layout->tensors[i].bytes, page);
	}
	layout->shapes_offset_in_slot = 0;
	if (layout->dynamic) {
		if (at > UINT32_MAX) /* the header has 32 bits for it */
			return -E2BIG;
		layout->shapes_offset_in_slot = (uint32_t)at;
		at += round_up(layout->tensor_count * sizeof(struct takt_shape), page);
	}
	layout->slot_stride = at;
	return 0;
}

int takt_layout_compute(struct takt_layout *layout)
{
	uint64_t page = page_bytes(), at;
	int rc;

	if (layout->kind != TAKT_KIND_LOOP && layout->kind != TAKT_KIND_MODEL)
		return -EINVAL;
	if (layout->slot_count < TAKT_SLOTS_MIN || layout->slot_count > TAKT_SLOTS_MAX || layout->tensor_count < 1 ||
	    layout->tensor_count > TAKT_TENSORS_MAX || layout->input_count > layout->tensor_count)
		return -EINVAL;
	rc = place_slot(layout, page);
	if (rc < 0)
		return rc;
	/* Twice the slots, so that cancel entries find room behind a full lane. */
	layout->ring_entries = power_of_two_from(2 * layout->slot_count);
	layout->tensor_table_offset = TAKT_HEADER_BYTES;
	at = TAKT_HEADER_BYTES + layout->tensor_count * sizeof(struct takt_tensor_entry);
	layout->name_offset = (uint32_t)at;
	layout->model_name_offset = (uint32_t)at + TAKT_NAME_BYTES;
	layout->cursors_offset = round_up(at + 2 * TAKT_NAME_BYTES, page);
	layout->submit_ring_offset = layout->cursors_offset + page;
	at = layout->submit_ring_offset + round_up(layout->ring_entries * sizeof(struct takt_submission), page);
	layout->completion_ring_offset = at;
	layout->slots_offset = at + round_up(layout->ring_entries * sizeof(struct takt_completion), page);
	layout->total_size = layout->slots_offset + layout->slot_count * layout->slot_stride;
	return layout->total_size > TAKT_LANE_BYTES_MAX ? -E2BIG : 0;
}

int takt_memfd(const char *name, uint64_t size)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), rc;

	if (fd < 0)
		return -errno;
	/* The default mode 0777 would let any user reopen it through /proc. */
	if (fchmod(fd, 0600) < 0 || ftruncate(fd, (off_t)size) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		rc = -errno;
		close(fd);
		return rc;
	}
	return fd;
}

int takt_memfd_size(int fd, uint64_t *size)
{
	const int wanted = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0)
		return -errno;
	if ((seals & wanted) != wanted) /* it could be truncated under a mapping: SIGBUS */
		return -EPERM;
	if (fstat(fd, &st) < 0)
		return -errno;
	*size = (uint64_t)st.st_size;
	return 0;
}

int takt_map(int fd, uint64_t size, int writable, void **map)
{
	*map = mmap(NULL, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	return *map == MAP_FAILED ? -errno : 0;
}

void takt_unmap(void *map, uint64_t size)
{
	munmap(map, size);
}

static void write_header(uint8_t *map, const struct takt_layout *layout)
{
	struct takt_header header = {
		.version = TAKT_WIRE_VERSION,
		.header_size = TAKT_HEADER_BYTES,
		.total_size = layout->total_size,
		.slot_count = layout->slot_count,
		.ring_entries = layout->ring_entries,
		.tensor_count = layout->tensor_count,
		.input_count = layout->input_count,
		.kind = layout->kind,
		.area_count = TAKT_AREAS,
		.tensor_table_offset = layout->tensor_table_offset,
		.cursors_offset = layout->cursors_offset,
		.submit_ring_offset = layout->submit_ring_offset,
		.completion_ring_offset = layout->completion_ring_offset,
		.slots_offset = layout->slots_offset,
		.slot_stride = layout->slot_stride,
		.period_ns = layout->period_ns,
		.deadline_ns = layout->deadline_ns,
		.jitter_ns = layout->jitter_ns,
		.epoch = layout->epoch,
		.trigger = layout->trigger,
		.shapes_offset_in_slot = layout->shapes_offset_in_slot,
		.name_offset = layout->name_offset,
		.model_name_offset = layout->model_name_offset,
	};

	memcpy(header.magic, TAKT_LANE_MAGIC, sizeof(header.magic));
	memcpy(map, &header, sizeof(header));
	memcpy(map + layout->tensor_table_offset, layout->tensors,
	       layout->tensor_count * sizeof(struct takt_tensor_entry));
	memcpy(map + layout->name_offset, layout->name, TAKT_NAME_BYTES);
	memcpy(map + layout->model_name_offset, layout->model_name, TAKT_NAME_BYTES);
}

int takt_layout_create(const struct takt_layout *layout)
{
	int fd = takt_memfd("takt-lane", layout->total_size), rc;
	void *map;

	if (fd < 0)
		return fd;
	rc = takt_map(fd, layout->slots_offset, 1, &map);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	write_header(map, layout);
	/* Until somebody serves the lane there is nobody who would look without a doorbell. */
	((struct takt_cursors *)((uint8_t *)map + layout->cursors_offset))->daemon_sleeping = 1;
	takt_unmap(map, layout->slots_offset);
	return fd;
}

/* ---- reading, client side ---- */

/* Is [offset, offset + bytes) inside `size` and aligned? */
static int fits(uint64_t offset, uint64_t bytes, uint64_t size, uint64_t align)
{
	return offset % align == 0 && offset <= size && bytes <= size - offset;
}

static int header_fits(const struct takt_header *h, uint64_t size)
{
	if (h->header_size < TAKT_HEADER_BYTES || h->total_size != size || h->area_count != TAKT_AREAS)
		return 0;
	if (h->slot_count < TAKT_SLOTS_MIN || h->slot_count > TAKT_SLOTS_MAX || h->ring_entries < h->slot_count ||
	    h->ring_entries > TAKT_RING_ENTRIES_MAX || (h->ring_entries & (h->ring_entries - 1)) != 0)
		return 0;
	if (h->tensor_count < 1 || h->tensor_count > TAKT_TENSORS_MAX || h->input_count > h->tensor_count)
		return 0;
	if (h->slot_stride == 0 || h->slot_stride > size || h->slot_stride % TAKT_CACHE_LINE_BYTES != 0)
		return 0;
	return fits(h->tensor_table_offset, h->tensor_count * sizeof(struct takt_tensor_entry), size, 8) &&
	       fits(h->cursors_offset, sizeof(struct takt_cursors), size, TAKT_CACHE_LINE_BYTES) &&
	       fits(h->submit_ring_offset, h->ring_entries * sizeof(struct takt_submission), size, 64) &&
	       fits(h->completion_ring_offset, h->ring_entries * sizeof(struct takt_completion), size, 64) &&
	       fits(h->slots_offset, h->slot_count * h->slot_stride, size, TAKT_CACHE_LINE_BYTES) &&
	       fits(h->name_offset, TAKT_NAME_BYTES, size, 1) && fits(h->model_name_offset, TAKT_NAME_BYTES, size, 1) &&
	       (h->shapes_offset_in_slot == 0 ||
		fits(h->shapes_offset_in_slot, h->tensor_count * sizeof(struct takt_shape), h->slot_stride, 8));
}

static int tensor_fits(const struct takt_tensor_entry *t, uint64_t stride)
{
	uint64_t bytes;

	return memchr(t->name, 0, sizeof(t->name)) != NULL && takt_tensor_bytes(t->dtype, t->rank, t->dims, &bytes) == 0 &&
	       bytes == t->bytes && fits(t->offset_in_slot, bytes, stride, TAKT_CACHE_LINE_BYTES) &&
	       fits(t->offset_in_slot_1, bytes, stride, TAKT_CACHE_LINE_BYTES);
}

static void copy_header(struct takt_layout *layout, const struct takt_header *h)
{
	layout->total_size = h->total_size;
	layout->tensor_table_offset = h->tensor_table_offset;
	layout->cursors_offset = h->cursors_offset;
	layout->submit_ring_offset = h->submit_ring_offset;
	layout->completion_ring_offset = h->completion_ring_offset;
	layout->slots_offset = h->slots_offset;
	layout->slot_stride = h->slot_stride;
	layout->period_ns = h->period_ns;
	layout->deadline_ns = h->deadline_ns;
	layout->jitter_ns = h->jitter_ns;
	layout->epoch = h->epoch;
	layout->slot_count = h->slot_count;
	layout->ring_entries = h->ring_entries;
	layout->tensor_count = h->tensor_count;
	layout->input_count = h->input_count;
	layout->kind = h->kind;
	layout->trigger = h->trigger;
	layout->shapes_offset_in_slot = h->shapes_offset_in_slot;
	layout->dynamic = h->shapes_offset_in_slot != 0;
	layout->name_offset = h->name_offset;
	layout->model_name_offset = h->model_name_offset;
}

int takt_layout_read(const void *map, uint64_t size, struct takt_layout *layout)
{
	const uint8_t *base = map;
	struct takt_header header;
	size_t table_bytes;

	memset(layout, 0, sizeof(*layout));
	if (size < TAKT_HEADER_BYTES)
		return -EPROTO;
	memcpy(&header, base, sizeof(header));
	if (memcmp(header.magic, TAKT_LANE_MAGIC, sizeof(header.magic)) != 0 || header.version != TAKT_WIRE_VERSION)
		return -EPROTO;
	if (!header_fits(&header, size))
		return -EINVAL;
	copy_header(layout, &header);
	memcpy(layout->name, base + header.name_offset, TAKT_NAME_BYTES);
	memcpy(layout->model_name, base + header.model_name_offset, TAKT_NAME_BYTES);
	if (!memchr(layout->name, 0, TAKT_NAME_BYTES) || !memchr(layout->model_name, 0, TAKT_NAME_BYTES))
		return -EINVAL;
	table_bytes = header.tensor_count * sizeof(struct takt_tensor_entry);
	layout->tensors = malloc(table_bytes);
	if (!layout->tensors)
		return -ENOMEM;
	memcpy(layout->tensors, base + header.tensor_table_offset, table_bytes);
	for (uint32_t i = 0; i < header.tensor_count; i++) {
		if (!tensor_fits(&layout->tensors[i], header.slot_stride)) {
			takt_layout_free(layout);
			return -EINVAL;
		}
	}
	return 0;
}

void takt_layout_free(struct takt_layout *layout)
{
	free(layout->tensors);
	layout->tensors = NULL;
}
