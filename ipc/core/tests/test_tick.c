/* SPDX-License-Identifier: Apache-2.0 */
/* The beat, and names. No upper bounds: the machine may be busy. */
#include "fake.h"

static void test_ticks_keep_their_phase_and_count_what_was_missed(void)
{
	struct takt_tick tick = {0};
	uint64_t first, period = 2 * MS;

	takt_tick_next(&tick, period);
	first = tick.release_ns;
	CHECK(tick.index == 0 && tick.missed == 0 && first <= takt_now());
	for (int i = 0; i < 20; i++) {
		const uint64_t before = tick.index;

		takt_tick_next(&tick, period);
		CHECK(takt_now() >= tick.release_ns && tick.index == before + 1 + tick.missed);
		CHECK(tick.release_ns == first + tick.index * period);
	}
	takt_sleep_until(tick.release_ns + 3 * period + period / 2);
	takt_tick_next(&tick, period);
	CHECK(tick.missed >= 2 && tick.release_ns == first + tick.index * period && tick.release_ns <= takt_now());
}

static void test_rights_that_can_not_be_are_refused(void)
{
	CHECK(takt_realtime(0, -1) == 0 && takt_realtime(100, -1) == -EINVAL && takt_realtime(-1, 0) == -EINVAL);
	CHECK(takt_realtime(0, 1 << 20) == -EINVAL);
}

static void test_numbers_have_names(void)
{
	CHECK(!strcmp(takt_status_name(TAKT_OK), "ok") && !strcmp(takt_status_name(TAKT_PENDING), "pending"));
	CHECK(!strcmp(takt_status_name(99), "unknown") && !strcmp(takt_path_name(TAKT_PATH_STAND_IN), "stand-in"));
	CHECK(!strcmp(takt_cause_name(TAKT_CAUSE_MACHINE), "machine") && !strcmp(takt_cause_name(0), ""));
	CHECK(!strcmp(takt_dtype_name(TAKT_BF16), "BF16") && !strcmp(takt_dtype_name(8), "unknown"));
	CHECK(takt_dtype_bits(TAKT_INT4) == 4 && takt_dtype_bits(TAKT_COMPLEX128) == 128 && takt_dtype_bits(8) == 0);
}

int main(void)
{
	test_ticks_keep_their_phase_and_count_what_was_missed();
	test_rights_that_can_not_be_are_refused();
	test_numbers_have_names();
	return 0;
}
