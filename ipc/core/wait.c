/* SPDX-License-Identifier: Apache-2.0
 *
 * wait.c: how a client waits for a completion: by polling memory, on a futex, or through a descriptor.
 *
 * The futex word is the low half of completion_tail, which only the daemon moves; it carries no state of its own, so a
 * wake-up can't be lost as long as both sides follow the same order (Dekker): the client says that it waits, then looks
 * at the tail once more; the daemon moves the tail, then looks whether somebody waits.
 *
 * A futex does not notice that the waker has died. The wake-up descriptor does (its other end closes with the last
 * process that serves the lane), so long sleeps are cut into pieces of TAKT_LIVENESS_NS, and each piece ends with a
 * look at it. Rejected: poll() on the descriptor alone (one syscall and one skb more on every wake-up), futex_waitv
 * (not there on the Jetson's 5.15).
 */
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client.h"

#define NS_PER_S       1000000000u
#define SPINS_PER_LOOK 32u /* polls between two looks at the clock and at the lane's state: about 1 us */

static int has_completion(const struct takt_lane *lane)
{
	return takt_load_cursor(&lane->rings.cursors->completion_tail) != lane->rings.completion_head;
}

static int has_ended(const struct takt_lane *lane)
{
	return takt_load_state(&lane->rings.cursors->lane_state) != TAKT_LANE_OPEN;
}

int takt_lane_spin(struct takt_lane *lane, uint64_t until_ns)
{
	for (;;) {
		for (uint32_t i = 0; i < SPINS_PER_LOOK; i++) {
			if (has_completion(lane))
				return 1;
			takt_cpu_pause();
		}
		if (has_ended(lane))
			return 1;
		if (takt_clock_ns() >= until_ns)
			return 0;
	}
}

static void futex_sleep(uint32_t *word, uint32_t seen, uint64_t until_ns)
{
	const struct timespec until = {(time_t)(until_ns / NS_PER_S), (long)(until_ns % NS_PER_S)};

	/* Not FUTEX_PRIVATE: the word is shared between processes. Bitset for its absolute CLOCK_MONOTONIC time. */
	syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static int daemon_has_gone(const struct takt_lane *lane)
{
	struct pollfd poll_fd = {.fd = lane->wake_fd, .events = POLLIN};

	return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLHUP | POLLERR | POLLNVAL));
}

int takt_lane_block(struct takt_lane *lane, uint64_t until_ns)
{
	struct takt_cursors *cursors = lane->rings.cursors;
	uint32_t *word = (uint32_t *)(void *)&cursors->completion_tail; /* little endian: the low half comes first */
	int arrived;

	takt_store_word(&cursors->client_waiting, TAKT_WAITING_FUTEX);
	for (;;) {
		uint64_t now, piece;

		takt_dekker_fence();
		if ((arrived = has_completion(lane) || has_ended(lane)))
			break;
		now = takt_clock_ns();
		if (now >= until_ns)
			break;
		piece = until_ns - now > TAKT_LIVENESS_NS ? now + TAKT_LIVENESS_NS : until_ns;
		futex_sleep(word, (uint32_t)lane->rings.completion_head, piece);
		if (takt_clock_ns() >= piece && daemon_has_gone(lane)) {
			takt_lane_end(lane, 0, "the daemon has gone");
			arrived = 1;
			break;
		}
		/* The daemon may take the word back when it wakes us; a spurious wake-up must not sleep on without it.
		 */
		takt_store_word(&cursors->client_waiting, TAKT_WAITING_FUTEX);
	}
	takt_store_word(&cursors->client_waiting, lane->descriptor_used ? TAKT_WAITING_BYTE : TAKT_WAITING_NO);
	return arrived;
}

int takt_lane_sleep(struct takt_lane *lane, uint64_t until_ns)
{
	if (lane->ended)
		return 1;
	if (lane->wait_mode == TAKT_WAIT_SPIN) {
		for (;;) {
			const uint64_t now = takt_clock_ns();
			const uint64_t piece = until_ns - now > TAKT_LIVENESS_NS ? now + TAKT_LIVENESS_NS : until_ns;

			if (takt_lane_spin(lane, now < until_ns ? piece : now))
				return 1;
			if (daemon_has_gone(lane)) {
				takt_lane_end(lane, 0, "the daemon has gone");
				return 1;
			}
			if (piece >= until_ns)
				return 0;
		}
	}
	if (lane->wait_mode == TAKT_WAIT_HYBRID) {
		const uint64_t spin_until_ns = takt_clock_ns() + TAKT_HYBRID_SPIN_NS;

		if (takt_lane_spin(lane, spin_until_ns < until_ns ? spin_until_ns : until_ns))
			return 1;
	}
	return takt_lane_block(lane, until_ns);
}

void takt_lane_arm(struct takt_lane *lane)
{
	char bytes[16];
	ssize_t got;

	/* Swallow first, ask afterwards: a byte sent after the asking belongs to a completion that is collected next.
	 */
	while ((got = recv(lane->wake_fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
		;
	if (got == 0 || (errno != EAGAIN && errno != EINTR))
		takt_lane_end(lane, 0, "the daemon has gone");
	takt_store_word(&lane->rings.cursors->client_waiting, TAKT_WAITING_BYTE);
	takt_dekker_fence();
}
