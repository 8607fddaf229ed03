/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor.c: the tensors of a lane by name: where they are in the next free slot or in the last reply's, and their
 * actual shapes on model lanes.
 */
#include <stdio.h>
#include <string.h>

#include "client.h"

/* Bytes of an actual shape, which may have no elements at all; -EINVAL where it does not fit. */
static int actual_bytes(const struct takt_tensor_entry *entry, uint32_t rank, const int64_t *dims, uint64_t *bytes)
{
	int empty = 0;

	if (rank > TAKT_RANK_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < rank; i++) {
		if (dims[i] < 0)
			return -EINVAL;
		empty |= dims[i] == 0;
	}
	*bytes = 0;
	if (empty)
		return 0;
	return takt_tensor_bytes(entry->dtype, rank, dims, bytes) < 0 || *bytes > entry->bytes ? -EINVAL : 0;
}

/* The shape that the daemon wrote, if it is one that fits; else the declared maximum. */
static void output_shape(const struct takt_lane *lane, int slot, uint32_t index, struct takt_tensor *tensor)
{
	const struct takt_tensor_entry *entry = &lane->layout.tensors[index];
	const struct takt_shape *block =
	    (const void *)(takt_lane_slot(lane, slot) + lane->layout.shapes_offset_in_slot);
	struct takt_shape shape;
	uint64_t bytes;

	if (!lane->layout.shapes_offset_in_slot || !(lane->slots[slot].reply.flags & TAKT_SHAPES))
		return;
	memcpy(&shape, &block[index], sizeof(shape));
	if (actual_bytes(entry, shape.rank, shape.dims, &bytes) < 0)
		return;
	tensor->rank = shape.rank;
	memcpy(tensor->dims, shape.dims, sizeof(tensor->dims));
	tensor->bytes = bytes;
}

static void describe_tensor(const struct takt_lane *lane, uint32_t index, struct takt_tensor *tensor)
{
	const struct takt_tensor_entry *entry = &lane->layout.tensors[index];

	memset(tensor, 0, sizeof(*tensor));
	tensor->name = entry->name;
	tensor->dtype = entry->dtype;
	tensor->rank = entry->rank;
	memcpy(tensor->dims, entry->dims, sizeof(tensor->dims));
	tensor->bytes = entry->bytes;
}

int takt_input_at(takt_lane *lane, uint32_t index, struct takt_tensor *tensor)
{
	const int slot = takt_next_slot(lane);

	if (slot < 0)
		return slot;
	if (index >= lane->layout.input_count)
		return takt_lane_fail(lane, -ENOENT, "input %u of \"%s\": it has %u", index, lane->layout.name,
				      lane->layout.input_count);
	describe_tensor(lane, index, tensor);
	if (lane->shapes_set) {
		tensor->rank = lane->shapes[index].rank;
		memcpy(tensor->dims, lane->shapes[index].dims, sizeof(tensor->dims));
		actual_bytes(&lane->layout.tensors[index], tensor->rank, tensor->dims, &tensor->bytes);
	}
	tensor->index = index;
	tensor->data = takt_lane_slot(lane, slot) + lane->layout.tensors[index].offset_in_slot;
	return 0;
}

int takt_output_at(takt_lane *lane, uint32_t index, struct takt_tensor *tensor)
{
	const int slot = lane->last_slot;
	const uint32_t entry = lane->layout.input_count + index;

	if (slot < 0)
		return takt_lane_fail(lane, -ENODATA,
				      "the lane of \"%s\" has no reply yet: infer, or submit and wait, first",
				      lane->layout.name);
	if (index >= lane->layout.tensor_count - lane->layout.input_count)
		return takt_lane_fail(lane, -ENOENT, "output %u of \"%s\": it has %u", index, lane->layout.name,
				      lane->layout.tensor_count - lane->layout.input_count);
	describe_tensor(lane, entry, tensor);
	output_shape(lane, slot, entry, tensor);
	tensor->index = index;
	tensor->data =
	    takt_lane_slot(lane, slot) + (lane->slots[slot].reply.area ? lane->layout.tensors[entry].offset_in_slot_1
								       : lane->layout.tensors[entry].offset_in_slot);
	return 0;
}

static int find_tensor(struct takt_lane *lane, const char *name, uint32_t from, uint32_t to, const char *what)
{
	size_t used;

	for (uint32_t i = from; i < to; i++)
		if (!strcmp(lane->layout.tensors[i].name, name))
			return (int)(i - from);
	takt_lane_fail(lane, -ENOENT, "\"%s\" has no %s \"%s\"; it has", lane->layout.name, what, name);
	for (uint32_t i = from; i < to; i++) {
		used = strlen(lane->error);
		snprintf(lane->error + used, sizeof(lane->error) - used, "%s \"%s\"", i == from ? "" : ",",
			 lane->layout.tensors[i].name);
	}
	return -ENOENT;
}

int takt_input(takt_lane *lane, const char *name, struct takt_tensor *tensor)
{
	const int index = find_tensor(lane, name, 0, lane->layout.input_count, "input");

	return index < 0 ? index : takt_input_at(lane, (uint32_t)index, tensor);
}

int takt_output(takt_lane *lane, const char *name, struct takt_tensor *tensor)
{
	const int index = find_tensor(lane, name, lane->layout.input_count, lane->layout.tensor_count, "output");

	return index < 0 ? index : takt_output_at(lane, (uint32_t)index, tensor);
}

static int fail_shape(struct takt_lane *lane, const struct takt_tensor_entry *entry)
{
	size_t used;

	takt_lane_fail(lane, -EINVAL,
		       "input \"%s\" of \"%s\": the shape must have %u dimensions, each 0 or more and at most",
		       entry->name, lane->layout.name, entry->rank);
	for (uint32_t i = 0; i < entry->rank; i++) {
		used = strlen(lane->error);
		snprintf(lane->error + used, sizeof(lane->error) - used, "%s%lld", i ? " x " : " ",
			 (long long)entry->dims[i]);
	}
	return -EINVAL;
}

int takt_set_shape(takt_lane *lane, const char *name, const int64_t *dims, uint32_t rank)
{
	const int index = find_tensor(lane, name, 0, lane->layout.input_count, "input");
	const struct takt_tensor_entry *entry;

	if (index < 0)
		return index;
	if (!lane->shapes)
		return takt_lane_fail(lane, -EOPNOTSUPP,
				      "\"%s\" has fixed shapes (a loop, or a model without dynamic ones)",
				      lane->layout.name);
	entry = &lane->layout.tensors[index];
	if (!dims) {
		dims = entry->dims;
		rank = entry->rank;
	}
	if (rank != entry->rank)
		return fail_shape(lane, entry);
	for (uint32_t i = 0; i < rank; i++)
		if (dims[i] < 0 || dims[i] > entry->dims[i])
			return fail_shape(lane, entry);
	memcpy(lane->shapes[index].dims, dims, rank * sizeof(*dims));
	lane->shapes_set = 1;
	return 0;
}
