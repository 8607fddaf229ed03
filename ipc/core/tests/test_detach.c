/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a lane, whoever brings it about. */
#include <sys/wait.h>
#include <unistd.h>

#include "fake.h"

static void test_a_lane_that_the_daemon_ends_says_why(struct fake *fake, uint32_t wait_mode)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, wait_mode);
	struct takt_reply reply;
	struct takt_tensor x;

	fake_set_mode(fake, FAKE_END);
	fill(lane, 1);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == -EPIPE);
	CHECK_TEXT(takt_lane_error(lane), "somebody pulled it");
	CHECK_TEXT(takt_lane_error(lane), "attach again");
	CHECK(takt_submit(lane, 0) == -EPIPE && takt_input(lane, "x", &x) == -EPIPE && takt_next_slot(lane) == -EPIPE);
	takt_detach(lane);
	fake_set_mode(fake, FAKE_ECHO);
	lane = fake_attach(node, wait_mode);
	fill(lane, 2);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && answer(lane) == 2);
	takt_detach(lane);
	takt_close(node);
}

static void test_a_daemon_that_goes_ends_a_wait_without_end(uint32_t wait_mode)
{
	struct fake fake = {.mode = FAKE_HOLD};
	struct takt_reply reply;
	takt_node *node;
	takt_lane *lane;

	fake_start(&fake);
	node = fake_connect(&fake);
	lane = fake_attach(node, wait_mode);
	fill(lane, 1);
	CHECK(takt_submit(lane, 0) == 1);
	fake_stop(&fake);
	CHECK(takt_wait(lane, 1, TAKT_TIMEOUT_NEVER, &reply) == -EPIPE);
	CHECK_TEXT(takt_lane_error(lane), "the daemon has gone");
	takt_detach(lane);
	CHECK(takt_attach(node, "fake", TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 0, &lane) == -ENOTCONN && !lane);
	takt_close(node);
}

static void test_a_lane_may_outlive_its_node(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;

	fill(lane, 3);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0);
	takt_close(node);
	CHECK(answer(lane) == 3 && takt_submit(lane, 0) == -EPIPE);
	takt_detach(lane);
	takt_close(NULL);
	takt_detach(NULL);
}

static void test_a_forked_child_does_not_take_its_parents_lane(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;
	pid_t child = fork();
	int status;

	if (child == 0) {
		takt_detach(lane);
		takt_close(node);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	fill(lane, 4);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && answer(lane) == 4);
	takt_detach(lane);
	takt_close(node);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	for (uint32_t wait_mode = TAKT_WAIT_BLOCK; wait_mode <= TAKT_WAIT_HYBRID; wait_mode++) {
		test_a_lane_that_the_daemon_ends_says_why(&fake, wait_mode);
		test_a_daemon_that_goes_ends_a_wait_without_end(wait_mode);
	}
	test_a_lane_may_outlive_its_node(&fake);
	test_a_forked_child_does_not_take_its_parents_lane(&fake);
	fake_stop(&fake);
	return 0;
}
