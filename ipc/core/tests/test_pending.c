/* SPDX-License-Identifier: Apache-2.0 */
/* Waits that time out: the job goes on, its reply can be collected until its slot is needed. */
#include "fake.h"

static void test_a_wait_ends_in_time_and_the_reply_comes_later(struct fake *fake, uint32_t wait_mode)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, wait_mode);
	struct takt_reply reply;
	uint64_t began;

	fake_set_mode(fake, FAKE_HOLD);
	fill(lane, 5);
	began = takt_now();
	CHECK(takt_infer(lane, 0, 3 * (int64_t)MS, &reply) == 0);
	CHECK(reply.status == TAKT_PENDING && reply.sequence == 1 && takt_now() - began >= 3 * MS);
	began = takt_now();
	CHECK(takt_wait(lane, 1, TAKT_TIMEOUT_DEFAULT, &reply) == 0 && reply.status == TAKT_PENDING);
	CHECK(takt_now() - began >= 20 * MS); /* the least, for a deadline and a period of 1 ms */
	CHECK(takt_wait(lane, 1, 0, &reply) == 0 && reply.status == TAKT_PENDING && takt_pending(lane) == 1);
	fake_set_mode(fake, FAKE_ECHO);
	CHECK(takt_wait(lane, 1, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.status == TAKT_OK && answer(lane) == 5);
	takt_detach(lane);
	takt_close(node);
}

static void test_replies_nobody_waits_for_give_their_slots_up(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;

	fake_set_mode(fake, FAKE_HOLD);
	for (int i = 1; i <= 4; i++) {
		fill(lane, (float)i);
		CHECK(takt_infer(lane, 0, 0, &reply) == 0 && reply.status == TAKT_PENDING);
	}
	CHECK(takt_next_slot(lane) == -EBUSY && takt_submit(lane, 0) == -EBUSY);
	CHECK_TEXT(takt_lane_error(lane), "4 of its 4 are pending");
	fake_set_mode(fake, FAKE_ECHO);
	while (takt_pending(lane))
		;
	fill(lane, 9); /* takes the slot of job 1, the oldest */
	CHECK(takt_wait(lane, 1, 0, &reply) == -ENOENT);
	CHECK(takt_wait(lane, 2, 0, &reply) == 0 && reply.status == TAKT_OK && answer(lane) == 2);
	CHECK(takt_infer(lane, 0, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.sequence == 5 && answer(lane) == 9);
	takt_detach(lane);
	takt_close(node);
}

static void test_a_pending_job_can_be_cancelled(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_HYBRID);
	struct takt_reply reply;

	fake_set_mode(fake, FAKE_HOLD);
	fill(lane, 1);
	CHECK(takt_submit(lane, 0) == 1 && takt_cancel(lane, 1) == 0 && takt_cancel(lane, 2) == -ENOENT);
	CHECK(takt_wait(lane, 1, TAKT_TIMEOUT_NEVER, &reply) == 0 && reply.status == TAKT_CANCELLED);
	CHECK(!strcmp(takt_path_name(reply.path), "") && takt_cancel(lane, 1) == -ENOENT);
	takt_detach(lane);
	takt_close(node);
}

static void test_a_nonsense_timeout_is_refused(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	takt_lane *lane = fake_attach(node, TAKT_WAIT_BLOCK);
	struct takt_reply reply;

	CHECK(takt_wait(lane, 0, -3, &reply) == -EINVAL);
	takt_detach(lane);
	takt_close(node);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	for (uint32_t wait_mode = TAKT_WAIT_BLOCK; wait_mode <= TAKT_WAIT_HYBRID; wait_mode++)
		test_a_wait_ends_in_time_and_the_reply_comes_later(&fake, wait_mode);
	test_replies_nobody_waits_for_give_their_slots_up(&fake);
	test_a_pending_job_can_be_cancelled(&fake);
	test_a_nonsense_timeout_is_refused(&fake);
	fake_stop(&fake);
	return 0;
}
