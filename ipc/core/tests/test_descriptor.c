/* SPDX-License-Identifier: Apache-2.0 */
/* The descriptor for event loops. */
#include <poll.h>

#include "fake.h"

static int readable(int fd, int timeout_ms)
{
	struct pollfd poll_fd = {fd, POLLIN, 0};

	return poll(&poll_fd, 1, timeout_ms) == 1;
}

static void test_it_is_readable_once_per_batch_of_replies(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	const int fd = takt_fileno(lane);
	struct takt_reply reply;

	CHECK(fd >= 0 && takt_fileno(lane) == fd && !readable(fd, 0));
	for (int i = 1; i <= 50; i++) {
		fill(lane, (float)i);
		CHECK(takt_submit(lane, 0) == i && readable(fd, 5000));
		CHECK(takt_wait(lane, 0, 0, &reply) == 0 && reply.status == TAKT_OK && answer(lane) == (float)i);
		CHECK(takt_wait(lane, 0, 0, &reply) == -ENOENT && !readable(fd, 0));
	}
	takt_detach(lane);
	takt_close(node);
}

static void test_it_can_be_mixed_with_blocking_waits(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	const int fd = takt_fileno(lane);
	struct takt_reply reply;

	for (int i = 1; i <= 50; i++) {
		fill(lane, (float)i);
		CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && answer(lane) == (float)i);
		fill(lane, (float)-i);
		CHECK(takt_submit(lane, 0) > 0 && readable(fd, 5000));
		CHECK(takt_wait(lane, 0, 0, &reply) == 0 && reply.status == TAKT_OK && answer(lane) == (float)-i);
	}
	takt_detach(lane);
	takt_close(node);
}

static void test_it_is_readable_when_the_daemon_goes(void)
{
	struct fake fake = {.mode = FAKE_HOLD};
	struct takt_reply reply;
	takt_node *node;
	takt_lane *lane;
	int fd;

	fake_start(&fake);
	node = fake_connect(&fake);
	lane = fake_attach(node, TAKT_WAIT_BLOCK);
	fd = takt_fileno(lane);
	fill(lane, 1);
	CHECK(takt_submit(lane, 0) == 1 && !readable(fd, 0));
	fake_stop(&fake);
	CHECK(readable(fd, 5000) && takt_wait(lane, 1, 0, &reply) == -EPIPE);
	takt_detach(lane);
	takt_close(node);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	test_it_is_readable_once_per_batch_of_replies(&fake);
	test_it_can_be_mixed_with_blocking_waits(&fake);
	fake_stop(&fake);
	test_it_is_readable_when_the_daemon_goes();
	return 0;
}
