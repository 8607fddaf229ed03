/* SPDX-License-Identifier: Apache-2.0 */
/* One job after the other, in each wait mode. */
#include "fake.h"

static void test_each_wait_mode_brings_the_answer(struct fake *fake, uint32_t wait_mode)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, wait_mode);
	struct takt_reply reply;

	for (int i = 1; i <= 200; i++) {
		fill(lane, (float)i);
		CHECK(takt_infer(lane, 0, 5000 * (int64_t)MS, &reply) == 0);
		CHECK(reply.status == TAKT_OK && reply.sequence == (uint64_t)i && reply.path == TAKT_PATH_PRIMARY);
		CHECK(reply.submitted_ns <= reply.started_ns && reply.started_ns <= reply.ended_ns);
		CHECK(reply.total_ns == reply.ended_ns - reply.submitted_ns);
		CHECK(reply.queued_ns + reply.run_ns == reply.total_ns);
		CHECK(answer(lane) == (float)i);
	}
	CHECK(takt_pending(lane) == 0);
	takt_detach(lane);
	takt_close(node);
}

static void test_the_last_outputs_stay_while_the_next_inputs_are_filled(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;
	int last;

	fill(lane, 1);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0);
	last = (int)reply.slot;
	for (int i = 0; i < 3; i++) { /* the other three slots */
		CHECK(takt_next_slot(lane) != last);
		fill(lane, 100);
		CHECK(takt_submit(lane, 0) > 0);
	}
	CHECK(takt_next_slot(lane) == -EBUSY);
	CHECK_TEXT(takt_lane_error(lane), "no free slot");
	CHECK(answer(lane) == 1);
	CHECK(takt_wait(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.sequence == 2);
	CHECK(answer(lane) == 100 && takt_next_slot(lane) == last);
	takt_detach(lane);
	takt_close(node);
}

static void test_replies_are_found_by_number(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;

	fake_set_mode(fake, FAKE_HOLD);
	for (int i = 1; i <= 3; i++) {
		fill(lane, (float)i);
		CHECK(takt_submit(lane, 0) == i);
	}
	fake_set_mode(fake, FAKE_ECHO); /* answers 3, 2, 1 */
	CHECK(takt_wait(lane, 2, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.sequence == 2 && answer(lane) == 2);
	CHECK(takt_wait(lane, 3, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.sequence == 3 && answer(lane) == 3);
	CHECK(takt_wait(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.sequence == 1 && answer(lane) == 1);
	CHECK(takt_wait(lane, 2, 0, &reply) == -ENOENT && takt_wait(lane, 0, 0, &reply) == -ENOENT);
	takt_detach(lane);
	takt_close(node);
}

static void test_tensors_have_names_and_shapes(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_lane_info info;
	struct takt_tensor tensor;

	takt_describe(lane, &info);
	CHECK(!strcmp(info.name, "fake") && !strcmp(info.model, "identity") && info.kind == TAKT_KIND_LOOP);
	CHECK(info.input_count == 1 && info.output_count == 1 && info.period_ns == MS && !info.dynamic);
	CHECK(takt_input(lane, "x", &tensor) == 0 && tensor.dtype == TAKT_FP32 && tensor.rank == 2);
	CHECK(tensor.dims[0] == 4 && tensor.dims[1] == 4 && tensor.bytes == 64 && (uintptr_t)tensor.data % 4096 == 0);
	CHECK(takt_input(lane, "y", &tensor) == -ENOENT);
	CHECK_TEXT(takt_lane_error(lane), "no input \"y\"; it has \"x\"");
	CHECK(takt_output(lane, "y", &tensor) == -ENODATA);
	CHECK(takt_input_at(lane, 1, &tensor) == -ENOENT);
	CHECK(takt_set_shape(lane, "x", (int64_t[]){2, 2}, 2) == -EOPNOTSUPP);
	takt_detach(lane);
	takt_close(node);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	for (uint32_t wait_mode = TAKT_WAIT_BLOCK; wait_mode <= TAKT_WAIT_HYBRID; wait_mode++)
		test_each_wait_mode_brings_the_answer(&fake, wait_mode);
	test_the_last_outputs_stay_while_the_next_inputs_are_filled(&fake);
	test_replies_are_found_by_number(&fake);
	test_tensors_have_names_and_shapes(&fake);
	CHECK(fake.detached == 6);
	fake_stop(&fake);
	return 0;
}
