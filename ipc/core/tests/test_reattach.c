/* SPDX-License-Identifier: Apache-2.0 */
/* A lane that comes back by itself after its end. */
#include <unistd.h>

#include "fake.h"

static takt_lane *coming_back(takt_node *node, uint32_t wait_mode)
{
	takt_lane *lane = fake_attach(node, wait_mode);

	CHECK(takt_set_reattach(lane, 1) == 0);
	return lane;
}

static int64_t infer(takt_lane *lane, float value, struct takt_reply *reply)
{
	fill(lane, value);
	return takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, reply);
}

/* Ends the lane by a job, whose waiter is told. */
static void end(struct fake *fake, takt_lane *lane)
{
	struct takt_reply reply;

	fake_set_mode(fake, FAKE_END);
	CHECK(infer(lane, 1, &reply) == -EPIPE);
	CHECK_TEXT(takt_lane_error(lane), "somebody pulled it");
	fake_set_mode(fake, FAKE_ECHO);
}

static void test_it_is_there_again_after_its_end_was_told(struct fake *fake, uint32_t wait_mode)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = coming_back(node, wait_mode);
	struct takt_reply reply;
	struct takt_tensor old, x, y;

	for (int round = 0; round < 3; round++) {
		CHECK(infer(lane, 2, &reply) == 0 && reply.sequence == 1 && answer(lane) == 2);
		CHECK(takt_input(lane, "x", &old) == 0);
		end(fake, lane);
		CHECK(takt_submit(lane, 0) == -EPIPE && takt_wait(lane, 0, 0, &reply) < 0);
		CHECK(takt_output(lane, "y", &y) == 0 && ((float *)y.data)[0] == 2);
		CHECK(takt_input(lane, "x", &x) == 0 && x.data != old.data);
		((float *)old.data)[0] = 99; /* lost, and harmless */
		CHECK(takt_output(lane, "y", &y) == -ENODATA);
	}
	takt_detach(lane);
	takt_close(node);
}

static void test_what_was_written_on_one_lane_is_not_submitted_on_another(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = coming_back(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;
	struct takt_tensor x;

	fake_set_mode(fake, FAKE_END);
	fill(lane, 1);
	CHECK(takt_submit(lane, 0) == 1);
	takt_sleep_until(takt_clock_ns() + 50 * MS);
	fake_set_mode(fake, FAKE_ECHO);
	/* It has ended, which nobody was told: whoever asks first is. */
	CHECK(takt_input(lane, "x", &x) == -EPIPE);
	CHECK(takt_submit(lane, 0) == -EPIPE);
	CHECK(infer(lane, 5, &reply) == 0 && reply.sequence == 1 && answer(lane) == 5);
	takt_detach(lane);
	takt_close(node);
}

static void test_it_is_asked_for_less_and_less_often(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = coming_back(node, TAKT_WAIT_BLOCK);
	const uint64_t began = takt_clock_ns();
	struct takt_reply reply;
	struct takt_tensor x;
	int calls = 0;

	end(fake, lane);
	takt_store_word(&fake->booting, 3);
	CHECK(takt_input(lane, "x", &x) == -EPIPE);
	CHECK_TEXT(takt_lane_error(lane), "there is no other one yet: ");
	CHECK_TEXT(takt_lane_error(lane), "still booting");
	CHECK(takt_input(lane, "x", &x) == -EPIPE && takt_load_word(&fake->booting) == 2);
	CHECK_TEXT(takt_lane_error(lane), "it is asked for again in ");
	while (takt_input(lane, "x", &x) == -EPIPE) {
		calls += 1;
		takt_sleep_until(takt_clock_ns() + MS);
	}
	/* 50 ms, 100 ms, 200 ms */
	CHECK(takt_clock_ns() - began >= 350 * (uint64_t)MS && calls > 10 && takt_load_word(&fake->booting) == 0);
	CHECK(infer(lane, 6, &reply) == 0 && answer(lane) == 6);
	takt_detach(lane);
	takt_close(node);
}

static void test_another_daemon_at_the_same_path_has_it(void)
{
	struct fake first = {.mode = FAKE_HOLD}, second = {.mode = FAKE_ECHO};
	char path[sizeof(first.path) + 8];
	struct takt_reply reply;
	struct takt_tensor x;
	takt_node *node;
	takt_lane *lane;

	fake_start(&first);
	snprintf(path, sizeof(path), "%s.link", first.path);
	CHECK(symlink(first.path, path) == 0);
	CHECK(takt_connect(&node, path, 0) == 0);
	lane = coming_back(node, TAKT_WAIT_BLOCK);
	fill(lane, 1);
	CHECK(takt_submit(lane, 0) == 1);
	fake_stop(&first);
	CHECK(takt_wait(lane, 1, TAKT_TIMEOUT_NEVER, &reply) == -EPIPE);
	CHECK(takt_input(lane, "x", &x) == -EPIPE);
	CHECK_TEXT(takt_lane_error(lane), "there is no other one yet");
	fake_start(&second);
	CHECK(unlink(path) == 0 && symlink(second.path, path) == 0);
	while (takt_input(lane, "x", &x) == -EPIPE)
		takt_sleep_until(takt_clock_ns() + MS);
	CHECK(infer(lane, 7, &reply) == 0 && reply.sequence == 1 && answer(lane) == 7);
	takt_detach(lane);
	takt_close(node);
	CHECK(unlink(path) == 0);
	fake_stop(&second);
}

static void test_one_with_other_tensors_is_not_taken(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = coming_back(node, TAKT_WAIT_BLOCK);
	const uint32_t detached = takt_load_word(&fake->detached);
	struct takt_reply reply;
	struct takt_tensor x;

	end(fake, lane);
	fake->dynamic = 1;
	CHECK(takt_input(lane, "x", &x) == -EPROTO);
	CHECK_TEXT(takt_lane_error(lane), "other tensors");
	CHECK(takt_load_word(&fake->detached) == detached + 1);
	CHECK(takt_input(lane, "x", &x) == -EPIPE);
	fake->dynamic = 0;
	while (takt_input(lane, "x", &x) < 0)
		takt_sleep_until(takt_clock_ns() + MS);
	CHECK(infer(lane, 8, &reply) == 0 && answer(lane) == 8);
	takt_detach(lane);
	takt_close(node);
}

static void test_shapes_that_were_set_stay_set(void)
{
	struct fake fake = {.mode = FAKE_ECHO, .dynamic = 1};
	const int64_t dims[2] = {2, 3};
	struct takt_reply reply;
	struct takt_tensor x;
	takt_node *node;
	takt_lane *lane;

	fake_start(&fake);
	node = fake_connect(&fake);
	lane = coming_back(node, TAKT_WAIT_BLOCK);
	CHECK(takt_set_shape(lane, "x", dims, 2) == 0);
	end(&fake, lane);
	CHECK(takt_input(lane, "x", &x) == 0 && x.dims[0] == 2 && x.dims[1] == 3);
	CHECK(infer(lane, 9, &reply) == 0 && answer(lane) == 9);
	takt_detach(lane);
	takt_close(node);
	fake_stop(&fake);
}

static void test_without_being_asked_to_it_stays_away(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = coming_back(node, TAKT_WAIT_BLOCK);
	struct takt_tensor x;

	CHECK(takt_set_reattach(lane, 0) == 0);
	end(fake, lane);
	CHECK(takt_input(lane, "x", &x) == -EPIPE && takt_input(lane, "x", &x) == -EPIPE);
	takt_set_reattach(lane, 1);
	CHECK(takt_input(lane, "x", &x) == 0);
	end(fake, lane);
	takt_close(node);
	CHECK(takt_input(lane, "x", &x) == -EPIPE);
	takt_detach(lane);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	for (uint32_t mode = TAKT_WAIT_BLOCK; mode <= TAKT_WAIT_HYBRID; mode++)
		test_it_is_there_again_after_its_end_was_told(&fake, mode);
	test_what_was_written_on_one_lane_is_not_submitted_on_another(&fake);
	test_it_is_asked_for_less_and_less_often(&fake);
	test_another_daemon_at_the_same_path_has_it();
	test_one_with_other_tensors_is_not_taken(&fake);
	test_shapes_that_were_set_stay_set();
	test_without_being_asked_to_it_stays_away(&fake);
	fake_stop(&fake);
	return 0;
}
