/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is not a lane is refused, and a lane whose daemon writes nonsense crashes nobody. */
#include "fake.h"

static void spoil(struct fake *fake, uint8_t *map)
{
	map[fake->spoil_at] = fake->spoil_with;
}

/* Each byte of header and table, with a few values: attach works or says -EPROTO, and a lane that works is usable. */
static void test_every_spoilt_byte_is_survived(struct fake *fake)
{
	static const uint8_t values[] = {0x00, 0x01, 0x7f, 0xff};
	takt_node *node = fake_connect(fake);
	int refused = 0;

	fake->spoil = spoil;
	for (fake->spoil_at = 0; fake->spoil_at < 256 + 2 * 192 + 128; fake->spoil_at++) {
		for (size_t i = 0; i < sizeof(values); i++) {
			struct takt_tensor tensor;
			takt_lane *lane;
			int result;

			fake->spoil_with = values[i];
			result = takt_attach(node, "fake", TAKT_KIND_ANY, TAKT_WAIT_BLOCK, 0, &lane);
			CHECK(result == 0 || result == -EPROTO);
			refused += result == -EPROTO;
			if (result < 0)
				continue;
			if (takt_input_at(lane, 0, &tensor) == 0)
				memset(tensor.data, 1, tensor.bytes);
			takt_detach(lane);
		}
	}
	CHECK(refused > 200); /* the canary: it does look */
	fake->spoil = NULL;
	takt_close(node);
}

static void scribble(struct fake *fake, uint8_t *map)
{
	uint8_t *cursors = map + fake->layout.cursors_offset;

	memset(cursors + offsetof(struct takt_cursors, completion_tail), 0xff, 8);
	memset(map + fake->layout.completion_ring_offset, 0xff, 64);
}

static void test_nonsense_completions_are_no_replies(struct fake *fake)
{
	takt_node *node = fake_connect(fake);
	struct takt_reply reply;
	takt_lane *lane;

	fake->spoil = scribble;
	lane = fake_attach(node, TAKT_WAIT_BLOCK);
	fake->spoil = NULL;
	CHECK(takt_wait(lane, 0, 0, &reply) == -ENOENT);
	fill(lane, 1);
	CHECK(takt_infer(lane, 0, 1 * (int64_t)MS, &reply) == 0);
	CHECK(reply.status == TAKT_PENDING || reply.status == TAKT_OK);
	takt_detach(lane);
	takt_close(node);
}

int main(void)
{
	struct fake fake = {.mode = FAKE_ECHO};

	fake_start(&fake);
	test_every_spoilt_byte_is_survived(&fake);
	test_nonsense_completions_are_no_replies(&fake);
	fake_stop(&fake);
	return 0;
}
