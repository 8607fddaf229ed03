"""Clock-triggered loops and (m, k)-firm promises."""

import pytest

from taktd.daemon.schedule import cause
from taktd.daemon.schedule.job import CANCELLED, EXPIRE, EXPIRED, OK, START, WAIT, Queue, Task
from taktd.daemon.schedule.loop import first_beat
from taktd.daemon.scheduler import Scheduler

MS = 1_000_000
PERIOD = 10 * MS


def beating(*, deadline_ns=PERIOD, **fields):
    """One loop with beats at 3, 13, 23 ms, attached at 0."""
    scheduler = Scheduler()
    fields = {"cost_ns": MS, "clock": True, "phase_ns": 3 * MS, "max_age_ns": 5 * MS} | fields
    scheduler.add_loop(0, Task("beat", PERIOD, deadline_ns, **fields))
    scheduler.reset(0, 0)
    return scheduler


@pytest.mark.parametrize(
    ("now_ns", "beat_ns"), [(0, 3), (3, 3), (4, 13), (1_000_003, 1_000_003), (1_000_004, 1_000_013)]
)
def test_beats_are_at_phase_plus_multiples_of_the_period(now_ns, beat_ns):
    assert first_beat(Task("beat", 10, 10, phase_ns=3), now_ns) == beat_ns


def test_a_job_starts_at_the_beat_with_the_newest_input():
    scheduler = beating()
    older = scheduler.submit(0, 1, 7, 1 * MS, 0, 1 * MS)
    newer = scheduler.submit(0, 2, 8, 2 * MS, 0, 2 * MS)
    action = scheduler.decide(2 * MS)
    assert (action.kind, action.job, action.status) == (EXPIRE, older, CANCELLED)
    action = scheduler.decide(2 * MS)
    assert (action.kind, action.until_ns, action.spin_from_ns) == (WAIT, 3 * MS, 3 * MS)
    action = scheduler.decide(3 * MS)
    assert action.kind == START
    assert action.jobs == (newer,)
    assert (newer.arrival_ns, newer.deadline_ns, newer.early) == (3 * MS, 13 * MS, False)


def test_a_beat_without_an_input_runs_nothing_and_answers_nothing():
    scheduler = beating()
    action = scheduler.decide(3 * MS)
    assert (action.kind, action.until_ns) == (WAIT, 13 * MS)


def test_a_beat_missed_under_a_long_run_is_not_made_up_for():
    scheduler = beating()
    scheduler.submit(0, 1, 0, 1 * MS, 0, 1 * MS)
    assert scheduler.decide(3 * MS).kind == START
    job = scheduler.submit(0, 2, 0, 22 * MS, 0, 22 * MS)
    scheduler.finish(25 * MS)
    assert scheduler.decide(25 * MS).kind == START
    assert job.arrival_ns == 23 * MS
    scheduler.finish(26 * MS)
    assert scheduler.decide(26 * MS).until_ns == 33 * MS


@pytest.mark.parametrize(("on_stale", "status"), [("skip", EXPIRED), ("hold", OK)])
def test_a_stale_input_is_answered_at_the_beat_without_a_run(on_stale, status):
    scheduler = beating(on_stale=on_stale)
    assert scheduler.decide(3 * MS).kind == WAIT
    job = scheduler.submit(0, 1, 0, 4 * MS, 0, 4 * MS)
    assert scheduler.decide(12 * MS).kind == WAIT
    action = scheduler.decide(13 * MS)
    assert (action.kind, action.job, action.status, action.cause) == (EXPIRE, job, status, cause.STALE_INPUT)
    assert scheduler.accounts().balanced


def test_a_stale_input_runs_all_the_same_when_asked_to():
    scheduler = beating(on_stale="run")
    assert scheduler.decide(3 * MS).kind == WAIT
    job = scheduler.submit(0, 1, 0, 4 * MS, 0, 4 * MS)
    assert scheduler.decide(13 * MS).kind == START
    assert job.stale


def test_a_beat_is_a_known_release_for_best_effort():
    scheduler = beating()
    scheduler.add_queue(1, Queue("m", (3 * MS,)))
    scheduler.submit(1, 1, 0, 0, 0, 0)
    assert scheduler.decide(0).kind == START
    scheduler.finish(1)
    scheduler.submit(1, 2, 0, 1, 0, 1)
    assert scheduler.decide(1).kind == WAIT, "it would end 1 ns after the beat"


def test_a_gone_client_stops_the_beats():
    scheduler = beating()
    job = scheduler.submit(0, 1, 0, 1 * MS, 0, 1 * MS)
    assert scheduler.reset(0, 2 * MS, attached=False) == [job]
    assert scheduler.decide(50 * MS).until_ns == 0


def test_an_input_superseded_before_the_client_went_is_dropped_once():
    scheduler = beating()
    jobs = [scheduler.submit(0, sequence, 0, sequence * MS, 0, sequence * MS) for sequence in (1, 2)]
    assert scheduler.accounts().queued == 2
    assert scheduler.reset(0, 2 * MS, attached=False) == jobs
    accounts = scheduler.accounts()
    assert (accounts.dropped, accounts.queued) == (2, 0)


# --- (m, k) --------------------------------------------------------------------------------------------------------


def run_one(scheduler, sequence, late):
    now_ns = sequence * PERIOD
    scheduler.submit(0, sequence, 0, now_ns, 0, now_ns)
    assert scheduler.decide(now_ns).kind == START
    scheduler.finish(now_ns + (PERIOD + 1 if late else MS))


@pytest.mark.parametrize(
    ("on_stale", "age_ms", "stale"), [("skip", 1, 0), ("skip", 6, 1), ("hold", 6, 1), ("run", 6, 1)]
)
def test_an_input_whose_deadline_passed_during_a_run_is_answered_once_and_its_beat_counts_once(
    on_stale: str, age_ms: int, stale: int
) -> None:
    scheduler = beating(on_stale=on_stale, m=1, k=3, deadline_ns=2 * MS)
    scheduler.add_queue(1, Queue("other", (MS,)))
    scheduler.submit(1, 1, 0, 4 * MS, 0, 4 * MS)
    assert scheduler.decide(4 * MS).kind == START
    job = scheduler.submit(0, 1, 0, (13 - age_ms) * MS, 0, (13 - age_ms) * MS)
    assert job.latest_start_ns == 13 * MS + 2 * MS - MS
    scheduler.finish(18 * MS)
    assert scheduler.expired_elsewhere(0, 1, 18 * MS) is job
    assert scheduler.decide(18 * MS).kind == WAIT
    accounts = scheduler.accounts(0)
    assert (accounts.submitted, accounts.expired, accounts.completed, accounts.queued) == (1, 1, 0, 0)
    assert scheduler.accounts(0).cancelled == 0
    loop = scheduler._sources[0]
    assert (loop.stale, loop.kept()) == (1 + stale, 1), "the beats at 3 and at 13 ms, each counted once"


def test_an_input_that_a_newer_one_replaced_can_have_been_answered_meanwhile() -> None:
    scheduler = beating()
    scheduler.submit(0, 1, 0, 1 * MS, 0, 1 * MS)
    assert scheduler.decide(3 * MS).kind == START
    older = scheduler.submit(0, 2, 1, 4 * MS, 0, 4 * MS)
    newer = scheduler.submit(0, 3, 2, 12 * MS, 0, 12 * MS)
    scheduler.finish(24 * MS)
    assert scheduler.expired_elsewhere(0, 2, 24 * MS) is older
    assert scheduler.expired_elsewhere(0, 3, 24 * MS) is newer
    assert scheduler.decide(24 * MS).kind == WAIT
    accounts = scheduler.accounts(0)
    assert (accounts.submitted, accounts.completed, accounts.expired, accounts.cancelled) == (3, 1, 2, 0)


def test_a_promise_is_broken_once_and_can_be_broken_again_after_it_held():
    scheduler = Scheduler()
    scheduler.add_loop(0, Task("firm", PERIOD, PERIOD, cost_ns=MS, m=2, k=3))
    alarms = []
    for sequence, late in enumerate("..x.xx..xx", start=1):
        run_one(scheduler, 2 * sequence, late == "x")
        alarms.append(len(scheduler.alarms))
    assert alarms == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert scheduler.alarms[0][:2] == (0, 1)


def test_an_expired_job_counts_against_the_promise_and_a_cancelled_one_does_not():
    scheduler = Scheduler()
    scheduler.add_loop(0, Task("firm", PERIOD, PERIOD, cost_ns=MS, m=1, k=1))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    scheduler.cancel(0, 1, 0)
    assert not scheduler.alarms
    scheduler.submit(0, 2, 0, PERIOD, 0, PERIOD)
    assert scheduler.decide(3 * PERIOD).kind == EXPIRE
    assert scheduler.alarms == [(0, 0, 3 * PERIOD)]


def test_without_a_promise_there_is_no_alarm():
    scheduler = Scheduler()
    scheduler.add_loop(0, Task("soft", PERIOD, PERIOD, cost_ns=MS))
    run_one(scheduler, 1, late=True)
    assert not scheduler.alarms
