/* SPDX-License-Identifier: Apache-2.0
 *
 * hang.c: an eye on the owner of a ledger, by the member thread of whoever is next.
 *
 * An owner counts signs of life (progress) whenever its one thread polls, waits, begins or ends a run. It is hung
 * when it has something to do and shows none for hang_after_ns; inside a run, when that takes longer than its budget and
 * hang_after_ns. Before the verdict it is asked (ping): its member thread wakes its one thread, so that an owner that sleeps
 * rightly (a job that waits for its beat; a client that wrote an entry and never rang) is heard of. Time in which the
 * watcher itself did not run isn't counted against the owner. The verdict is carried out by SIGKILL through a pidfd, and
 * the lock is waited for as in any other death.
 *
 * A core that stands still (taken by a hypervisor, or by the kernel's real-time throttle) is no hang of its owner. The
 * member thread comes before the owner's one thread, on the same core: where it has not even heard the ping, and the
 * process is not stopped, nothing runs there at all, and the verdict waits TAKT_STANDSTILL_NS longer.
 */
#include "member.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static int has_work(const struct watched_lane *lane)
{
	const struct takt_ledger_lane *ledger = lane->ledger;

	if (!takt_load_state(&ledger->used) || takt_load_u64(&ledger->memory) != lane->memory)
		return 0;
	/* The cursor is the client's to lie about; a lie gets an answer to the ping. */
	if (takt_load_u64(&lane->cursors->submit_tail) != takt_load_u64(&ledger->submit_head) &&
	    takt_load_word(&lane->cursors->lane_state) == TAKT_LANE_OPEN)
		return 1;
	for (uint32_t i = 0; i < lane->slot_count; i++)
		if (takt_load_word(&ledger->slots[i].state) != TAKT_LEDGER_FREE)
			return 1;
	return 0;
}

static int owner_has_work(struct takt_member *member)
{
	int found = 0;

	pthread_mutex_lock(&member->guard);
	for (uint32_t i = 0; i < member->lane_count && !found; i++)
		found = has_work(&member->lanes[i]);
	pthread_mutex_unlock(&member->guard);
	return found;
}

/* Kills the owner, once. Without a pidfd it is left to the supervisor; one that is dead already gives up the lock. */
static void fence(struct takt_member *member, uint32_t owner)
{
	struct takt_succession *succession = member->succession;

	if (takt_load_word(&succession->fenced) == owner)
		return;
	pthread_mutex_lock(&member->guard);
	for (uint32_t i = 0; i < TAKT_MEMBERS_MAX; i++) {
		struct fence *known = &member->fences[i];
		if (known->member != owner)
			continue;
		takt_store_word(&succession->fenced, owner); /* before: its death may pass the lock on at once */
		if (syscall(SYS_pidfd_send_signal, known->pidfd, SIGKILL, NULL, 0) == 0)
			takt_count(&succession->fences, 1);
		else
			takt_store_word(&succession->fenced, 0);
		break;
	}
	pthread_mutex_unlock(&member->guard);
}

static int has_moved(const struct owner_view *view, const struct owner_view *now)
{
	if (view->owner != now->owner || view->run_started_ns != now->run_started_ns)
		return 1;
	/* Inside a run it is the run's length that counts, whatever its watch does meanwhile. */
	return now->run_started_ns == 0 && view->progress != now->progress;
}

/* How long the owner may be silent, inside a run or not. */
static uint64_t limit_of(const struct takt_member *member, uint64_t run_started_ns)
{
	uint64_t budget_ns = run_started_ns != 0 ? takt_load_u64(&member->succession->run_budget_ns) : 0;

	return takt_load_u64(&member->hang_after_ns) + budget_ns;
}

/* Whether nothing at all runs where the owner is to run. */
static int stands_still(struct takt_member *member)
{
	const struct owner_view *view = &member->view;
	int stopped = 1;

	if (!view->pinged || takt_load_word(&member->succession->pong) == view->ping)
		return 0;
	pthread_mutex_lock(&member->guard);
	for (uint32_t i = 0; i < TAKT_MEMBERS_MAX; i++)
		if (member->fences[i].member == view->owner)
			stopped = takt_process_is_stopped(member->fences[i].pidfd);
	pthread_mutex_unlock(&member->guard);
	return !stopped;
}

static void ping_owner(struct takt_member *member)
{
	struct owner_view *view = &member->view;

	view->pinged = 1;
	view->pinged_at = view->silent_ns;
	view->ping = __atomic_add_fetch(&member->succession->ping, 1, __ATOMIC_RELAXED);
	takt_succession_ring(member->succession);
}

static void judge(struct takt_member *member, uint64_t run_started_ns)
{
	struct owner_view *view = &member->view;
	uint64_t limit_ns = limit_of(member, run_started_ns);

	if (!view->pinged) {
		if (view->silent_ns >= (run_started_ns == 0 ? limit_ns / 4 : limit_ns / 4 * 3))
			ping_owner(member);
		return;
	}
	if (run_started_ns == 0 && view->silent_ns - view->pinged_at < limit_ns / 2)
		return;
	if (view->silent_ns < limit_ns)
		return;
	if (view->silent_ns < limit_ns + TAKT_STANDSTILL_NS && stands_still(member))
		return;
	fence(member, view->owner);
}

void takt_member_look(struct takt_member *member, uint64_t step_ns)
{
	const struct takt_succession *succession = member->succession;
	struct owner_view *view = &member->view;
	uint64_t now_ns = takt_clock_ns(), passed_ns = now_ns - view->looked_ns;
	struct owner_view now = {
		.owner = takt_load_state(&succession->owner),
		.run_started_ns = takt_load_cursor(&succession->run_started_ns),
		.progress = takt_load_u64(&succession->progress),
		.heard_ns = now_ns,
		.looked_ns = now_ns,
	};

	if (has_moved(view, &now)) {
		*view = now;
		return;
	}
	view->looked_ns = now_ns;
	if (now.owner == 0 || (now.run_started_ns == 0 && !owner_has_work(member))) {
		view->silent_ns = 0;
		view->busy = 0;
		view->pinged = 0;
		return;
	}
	if (!view->busy) {
		view->busy = 1; /* since when, we don't know */
		return;
	}
	/* If we slept longer than we meant to, so may the owner have: the machine was stopped, or out of breath. */
	view->silent_ns += passed_ns < 2 * step_ns ? passed_ns : 2 * step_ns;
	judge(member, now.run_started_ns);
}

uint64_t takt_member_step(const struct takt_member *member)
{
	const struct owner_view *view = &member->view;
	uint64_t limit_ns = limit_of(member, view->run_started_ns), left_ns;

	if (!view->busy)
		return view->looked_ns - view->heard_ns > TAKT_TURN_REST_AFTER_NS ? TAKT_TURN_REST_NS : TAKT_TURN_STEP_NS;
	/* The last step ends with the verdict. */
	left_ns = limit_ns > view->silent_ns ? limit_ns - view->silent_ns : TAKT_TURN_STEP_NS;
	return left_ns > TAKT_TURN_STEP_NS ? TAKT_TURN_STEP_NS : left_ns < TAKT_TURN_LAST_NS ? TAKT_TURN_LAST_NS : left_ns;
}
