/* SPDX-License-Identifier: Apache-2.0 */
/* Actual shapes on model lanes. */
#include "fake.h"

static void infer_shape(takt_lane *lane, int64_t rows, int64_t columns)
{
	struct takt_tensor x, y;
	struct takt_reply reply;

	CHECK(takt_set_shape(lane, "x", (int64_t[]){rows, columns}, 2) == 0);
	CHECK(takt_input(lane, "x", &x) == 0 && x.dims[0] == rows && x.dims[1] == columns);
	CHECK(x.bytes == (uint64_t)(rows * columns) * sizeof(float));
	fill(lane, (float)rows);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.flags == TAKT_SHAPES);
	CHECK(takt_output(lane, "y", &y) == 0 && y.rank == 2 && y.dims[0] == rows && y.dims[1] == columns);
	CHECK(y.bytes == x.bytes && answer(lane) == (float)rows);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO, .dynamic = 1};
	struct takt_tensor x;
	takt_node *node;
	takt_lane *lane;

	fake_start(&fake);
	node = fake_connect(&fake);
	lane = fake_attach(node, TAKT_WAIT_BLOCK);
	CHECK(takt_input(lane, "x", &x) == 0 && x.dims[0] == 4 && x.bytes == 64);
	infer_shape(lane, 2, 3);
	infer_shape(lane, 4, 4);
	infer_shape(lane, 1, 1);
	CHECK(takt_set_shape(lane, "x", (int64_t[]){5, 1}, 2) == -EINVAL);
	CHECK_TEXT(takt_lane_error(lane), "at most 4 x 4");
	CHECK(takt_set_shape(lane, "x", (int64_t[]){0, 1}, 2) == 0); /* no elements is a shape */
	CHECK(takt_set_shape(lane, "x", (int64_t[]){-1, 1}, 2) == -EINVAL);
	CHECK(takt_set_shape(lane, "x", (int64_t[]){4}, 1) == -EINVAL);
	CHECK(takt_set_shape(lane, "z", (int64_t[]){4}, 1) == -ENOENT);
	CHECK(takt_set_shape(lane, "x", NULL, 0) == 0 && takt_input(lane, "x", &x) == 0 && x.bytes == 64);
	takt_detach(lane);
	takt_close(node);
	fake_stop(&fake);
	return 0;
}
