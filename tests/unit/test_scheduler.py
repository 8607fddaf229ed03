"""The scheduler, rule by rule: order, early jobs, expiry, best effort, accounts."""

import pytest

from taktd.daemon.schedule.job import EXPIRE, EXPIRED, HARD, NEVER, SOFT, START, WAIT, Queue, Task
from taktd.daemon.scheduler import Scheduler

US = 1_000
MS = 1_000_000


def loop(name="walk", period=10 * MS, cost=1 * MS, **fields):
    fields.setdefault("deadline_ns", period)
    return Task(name, period, cost_ns=cost, **fields)


def scheduler_with(*tasks, max_dispatch_ns=0, share_ppm=0):
    scheduler = Scheduler(max_dispatch_ns, share_ppm)
    for lane, task in enumerate(tasks):
        scheduler.add_loop(lane, task)
        scheduler.reset(lane, 0)
    return scheduler


def start(scheduler, now_ns, **how):
    """What starts now, as (lane, sequence) of each job."""
    action = scheduler.decide(now_ns, **how)
    assert action.kind == START
    return [(job.lane, job.sequence) for job in action.jobs]


def waits(scheduler, now_ns, **how):
    action = scheduler.decide(now_ns, **how)
    assert action.kind == WAIT
    return action.until_ns


# --- loops ---------------------------------------------------------------------------------------------------------


def test_the_earliest_deadline_goes_first_and_is_not_preempted():
    scheduler = scheduler_with(loop(period=20 * MS), loop(period=10 * MS), loop(period=15 * MS))
    for lane in (0, 1, 2):
        scheduler.submit(lane, 1, 0, 100, 0, 100)
    assert start(scheduler, 100) == [(1, 1)]
    waits(scheduler, 200)
    scheduler.finish(1 * MS)
    assert start(scheduler, 1 * MS) == [(2, 1)]
    scheduler.finish(2 * MS)
    assert start(scheduler, 2 * MS) == [(0, 1)]


def test_ties_go_by_criticality_then_configuration_order():
    scheduler = scheduler_with(
        loop(criticality=SOFT, order=0), loop(order=2), loop(order=1), loop(criticality=HARD, order=3)
    )
    for lane in range(4):
        scheduler.submit(lane, 1, 0, 0, 0, 0)
    order = []
    for now_ns in range(0, 4 * MS, MS):
        order += start(scheduler, now_ns)
        scheduler.finish(now_ns + MS)
    assert order == [(3, 1), (2, 1), (1, 1), (0, 1)]


def test_one_loops_jobs_go_in_their_sequence():
    scheduler = scheduler_with(loop(jitter_ns=5 * MS))
    for sequence in (1, 2, 3):
        scheduler.submit(0, sequence, 0, 0, 0, 0)
    for sequence in (1, 2, 3):
        assert start(scheduler, sequence * 20 * US) == [(0, sequence)]
        scheduler.finish(sequence * 20 * US + 10)


def test_an_own_deadline_tightens_the_judgement_but_not_the_place():
    scheduler = scheduler_with(loop(period=10 * MS), loop(period=20 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    tight = scheduler.submit(1, 1, 0, 0, 5 * MS, 0)
    assert tight.deadline_ns == 5 * MS
    assert start(scheduler, 0) == [(0, 1)], "its place is that of its admitted deadline, 20 ms"
    scheduler.finish(6 * MS)
    action = scheduler.decide(6 * MS)
    assert (action.kind, action.job, action.status) == (EXPIRE, tight, EXPIRED)


def test_a_later_own_deadline_changes_nothing():
    scheduler = scheduler_with(loop())
    assert scheduler.submit(0, 1, 0, 0, 50 * MS, 0).deadline_ns == 10 * MS


def test_a_late_job_with_on_late_run_runs_and_is_marked():
    scheduler = scheduler_with(loop(on_late_run=True, deadline_ns=2 * MS))
    job = scheduler.submit(0, 1, 0, 0, 0, 5 * MS)
    assert start(scheduler, 5 * MS) == [(0, 1)]
    scheduler.finish(6 * MS)
    assert job.late
    assert scheduler.accounts().completed == 1


def test_a_job_that_may_still_make_it_is_started_though_its_worst_case_would_not():
    scheduler = scheduler_with(loop(cost=4 * MS, shortest_ns=1 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    assert start(scheduler, 9 * MS) == [(0, 1)]


def test_an_overrun_is_counted_and_marked():
    scheduler = scheduler_with(loop(cost=1 * MS))
    job = scheduler.submit(0, 1, 0, 0, 0, 0)
    scheduler.decide(0)
    scheduler.finish(1 * MS + 1)
    assert job.overrun
    assert not job.late


def test_finish_without_a_running_dispatch_is_the_callers_mistake():
    with pytest.raises(RuntimeError, match="without a running"):
        scheduler_with(loop()).finish(0)


def test_a_lane_cannot_be_added_twice():
    scheduler = scheduler_with(loop())
    with pytest.raises(ValueError, match="lane 0"):
        scheduler.add_queue(0, Queue("m", (1,)))


@pytest.mark.parametrize(
    "fields", [{"period": 0}, {"deadline_ns": 0}, {"jitter_ns": -1}, {"m": 3, "k": 2}, {"cost": -1}]
)
def test_a_task_without_sense_is_refused_by_name(fields):
    with pytest.raises(ValueError, match="walk"):
        Scheduler().add_loop(0, loop(**fields))


# --- early jobs ----------------------------------------------------------------------------------------------------


def test_an_early_job_that_ends_before_its_arrival_consumes_nothing():
    scheduler = scheduler_with(loop(period=10 * MS, cost=1 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(1 * MS)
    early = scheduler.submit(0, 2, 0, 2 * MS, 0, 2 * MS)
    assert early.early
    assert early.arrival_ns == 10 * MS
    start(scheduler, 2 * MS)
    scheduler.finish(3 * MS)
    third = scheduler.submit(0, 3, 0, 10 * MS, 0, 10 * MS)
    assert (third.early, third.arrival_ns, third.deadline_ns) == (False, 10 * MS, 20 * MS)


def test_an_early_job_that_still_runs_at_its_arrival_is_that_job():
    scheduler = scheduler_with(loop(period=10 * MS, cost=1 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(1 * MS)
    scheduler.submit(0, 2, 0, 9_500 * US, 0, 9_500 * US)
    start(scheduler, 9_500 * US)
    scheduler.finish(10_500 * US)
    assert scheduler.submit(0, 3, 0, 11 * MS, 0, 11 * MS).arrival_ns == 20 * MS


def test_an_early_job_waits_while_it_could_harm_another_loop():
    scheduler = scheduler_with(loop(period=10 * MS, cost=3 * MS), loop(period=5 * MS, cost=1 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(3 * MS)
    scheduler.submit(0, 2, 0, 4 * MS, 0, 4 * MS)
    assert waits(scheduler, 4 * MS) == 10 * MS, "the other loop may submit at any time"
    scheduler.submit(1, 1, 0, 5 * MS, 0, 5 * MS)
    assert start(scheduler, 5 * MS) == [(1, 1)]
    scheduler.finish(6 * MS)
    assert start(scheduler, 6 * MS) == [(0, 2)], "now nothing can come before 10 ms"


def test_a_short_early_job_counts_as_the_blocking_that_was_admitted():
    scheduler = scheduler_with(loop(cost=1 * MS), loop(), max_dispatch_ns=1 * MS)
    for sequence in (1, 2):
        scheduler.submit(0, sequence, 0, 0, 0, 0)
        assert start(scheduler, sequence * MS) == [(0, sequence)]
        scheduler.finish(sequence * MS + 10)


def test_a_loop_that_slipped_by_more_than_its_jitter_is_on_time_again_at_once():
    scheduler = scheduler_with(loop(period=10 * MS, jitter_ns=1 * MS))
    first = scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(1 * MS)
    slipped = scheduler.submit(0, 2, 0, 17 * MS, 0, 17 * MS)
    assert slipped.arrival_ns == 16 * MS > first.arrival_ns + 10 * MS
    assert not slipped.early
    start(scheduler, 17 * MS)
    scheduler.finish(18 * MS)
    assert not scheduler.submit(0, 3, 0, 26 * MS, 0, 26 * MS).early


def test_jitter_within_what_was_declared_makes_no_job_early():
    period, jitter = 1 * MS, 600 * US
    scheduler = scheduler_with(loop(period=period, cost=100 * US, jitter_ns=jitter))
    for k in range(1000):
        release_ns = k * period + (300 * US if k * 7 % 3 else -300 * US) + MS
        job = scheduler.submit(0, k + 1, 0, release_ns, 0, release_ns)
        assert not job.early
        assert start(scheduler, release_ns) == [(0, k + 1)]
        scheduler.finish(release_ns + 100 * US)
        assert not job.late


def test_attaching_resets_the_history_and_drops_the_predecessors_jobs():
    scheduler = scheduler_with(loop())
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.submit(0, 2, 0, 1 * MS, 0, 1 * MS)
    assert [job.sequence for job in scheduler.reset(0, 2 * MS)] == [2]
    scheduler.finish(2 * MS)
    assert not scheduler.submit(0, 1, 0, 3 * MS, 0, 3 * MS).early
    assert scheduler.accounts().dropped == 1


def test_yielding_starts_nothing_in_slack_but_admitted_jobs_go():
    scheduler = scheduler_with(loop(), max_dispatch_ns=5 * MS)
    scheduler.add_queue(1, Queue("m", (1 * MS,)))
    scheduler.submit(1, 1, 0, 0, 0, 0)
    assert waits(scheduler, 0, yielding=True) == 0
    scheduler.submit(0, 1, 0, 0, 0, 0)
    assert start(scheduler, 0, yielding=True) == [(0, 1)]
    scheduler.finish(1 * MS)
    scheduler.submit(0, 2, 0, 2 * MS, 0, 2 * MS)
    assert waits(scheduler, 2 * MS, yielding=True) == 10 * MS, "its arrival, when it is early no more"
    assert start(scheduler, 2 * MS) == [(0, 2)]


# --- expiry --------------------------------------------------------------------------------------------------------


def test_a_job_is_given_up_as_soon_as_that_is_certain_while_another_runs():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("long", (900 * MS,)))
    scheduler.add_queue(1, Queue("short", (1 * MS,)))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    short = scheduler.submit(1, 1, 0, 0, 10 * MS, 1)
    assert waits(scheduler, 1) == 9 * MS + 1
    assert scheduler.next_certain_expiry() == 9 * MS + 1
    assert list(scheduler.expiries()) == [short]
    waits(scheduler, 9 * MS)
    action = scheduler.decide(9 * MS + 1)
    assert (action.kind, action.job) == (EXPIRE, short)
    assert (action.cause, action.detail) == (1, 0), "blocked by lane 0"


def test_what_the_watch_has_answered_is_counted_once():
    scheduler = scheduler_with(loop(), loop())
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    job = scheduler.submit(1, 1, 0, 0, 2 * MS, 0)
    assert scheduler.expired_elsewhere(1, 1, 2 * MS) is job
    assert scheduler.expired_elsewhere(1, 1, 2 * MS) is None
    scheduler.finish(5 * MS)
    assert waits(scheduler, 5 * MS) == 0
    accounts = scheduler.accounts()
    assert (accounts.expired, accounts.completed) == (1, 1)
    assert accounts.balanced


def test_cancelling_frees_a_queued_job_and_not_a_running_one():
    scheduler = scheduler_with(loop(), loop())
    scheduler.submit(0, 1, 0, 0, 0, 0)
    queued = scheduler.submit(1, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    assert scheduler.cancel(0, 1, 10) is None
    assert scheduler.cancel(1, 1, 10) is queued
    scheduler.finish(20)
    assert scheduler.decide(20).kind == WAIT
    assert scheduler.accounts().cancelled == 1


def test_cancelling_does_not_let_a_loop_ask_for_more():
    scheduler = scheduler_with(loop(period=10 * MS), loop(period=9 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    second = scheduler.submit(0, 2, 0, 0, 0, 0)
    scheduler.cancel(0, 1, 1 * MS)
    assert second.arrival_ns == 10 * MS, "the cancelled job had arrived: its place is gone"


def test_removing_a_lane_keeps_the_accounts_and_lets_the_running_job_end():
    scheduler = scheduler_with(loop(), loop())
    for sequence in (1, 2):
        scheduler.submit(0, sequence, 0, 0, 0, 0)
    start(scheduler, 0)
    assert [job.sequence for job in scheduler.remove(0)] == [2]
    assert scheduler.accounts().running == 1
    scheduler.finish(1 * MS)
    accounts = scheduler.accounts()
    assert (accounts.submitted, accounts.completed, accounts.dropped) == (2, 1, 1)
    with pytest.raises(KeyError):
        scheduler.submit(0, 3, 0, 0, 0, 0)


# --- best effort ---------------------------------------------------------------------------------------------------


def test_best_effort_longer_than_the_admitted_dispatch_waits_for_a_known_gap():
    scheduler = scheduler_with(loop(period=10 * MS, cost=1 * MS), max_dispatch_ns=2 * MS)
    scheduler.add_queue(1, Queue("long", (5 * MS,)))
    scheduler.submit(1, 1, 0, 0, 0, 0)
    waits(scheduler, 0)
    scheduler.submit(0, 1, 0, 1 * MS, 0, 1 * MS)
    assert start(scheduler, 1 * MS) == [(0, 1)]
    scheduler.finish(2 * MS)
    assert start(scheduler, 2 * MS) == [(1, 1)], "nothing can arrive before 11 ms"


def test_best_effort_does_not_start_in_a_gap_it_would_outlast():
    scheduler = scheduler_with(loop(period=10 * MS, cost=1 * MS))
    scheduler.add_queue(1, Queue("long", (9 * MS + 1,)))
    scheduler.submit(1, 1, 0, 0, 0, 0)
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(1 * MS)
    waits(scheduler, 1 * MS)


def test_a_loop_without_a_client_bounds_no_gap():
    scheduler = scheduler_with(loop())
    scheduler.add_queue(1, Queue("long", (50 * MS,)))
    scheduler.submit(1, 1, 0, 0, 0, 0)
    waits(scheduler, 0)
    scheduler.reset(0, 0, attached=False)
    assert start(scheduler, 0) == [(1, 1)]


def test_a_flooding_best_effort_lane_does_not_starve_another():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", (1 * MS,)))
    scheduler.add_queue(1, Queue("m2", (1 * MS,)))
    for sequence in range(1, 200):
        scheduler.submit(0, sequence, 0, 0, 100 * MS + sequence, 0)
    scheduler.submit(1, 1, 0, 0, 0, 0)
    now_ns = 0
    while start(scheduler, now_ns) != [(1, 1)]:
        now_ns += MS
        scheduler.finish(now_ns)
    assert now_ns <= 12 * MS


def test_a_flooding_loop_does_not_starve_best_effort():
    scheduler = scheduler_with(loop(period=100 * MS, cost=1 * MS))
    scheduler.add_queue(1, Queue("m", (1 * MS,)))
    for sequence in range(1, 50):
        scheduler.submit(0, sequence, 0, 0, 0, 0)
        scheduler.submit(1, sequence, 0, 0, 0, 0)
    lanes = []
    for now_ns in range(0, 20 * MS, MS):
        lanes += [lane for lane, _ in start(scheduler, now_ns)]
        scheduler.finish(now_ns + MS - 1)
    assert lanes == [0, 0, *[1] * 18], "its admitted job and one early one, then the others' turn"


def test_best_effort_below_its_share_goes_before_early_jobs():
    scheduler = scheduler_with(loop(cost=1 * MS), max_dispatch_ns=1 * MS, share_ppm=500_000)
    scheduler.add_queue(1, Queue("m", (1 * MS,)))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    start(scheduler, 0)
    scheduler.finish(1 * MS)
    scheduler.submit(0, 2, 0, 1 * MS, 0, 1 * MS)
    scheduler.submit(1, 1, 0, 1 * MS, 0, 1 * MS)
    assert start(scheduler, 1 * MS) == [(1, 1)]


def test_a_batch_takes_what_is_there_over_all_lanes_of_a_model():
    scheduler = scheduler_with(max_dispatch_ns=4 * MS)
    queue = Queue("m", (1 * MS, 2 * MS, 3 * MS, 4 * MS, 5 * MS))
    for lane in (0, 1):
        scheduler.add_queue(lane, queue)
        for sequence in (1, 2, 3):
            scheduler.submit(lane, sequence, 0, 0, 0, 0)
    scheduler.add_loop(9, loop())
    scheduler.reset(9, 0)
    assert sorted(start(scheduler, 0)) == [(0, 1), (0, 2), (1, 1), (1, 2)], "5 would exceed the admitted dispatch"


def test_a_batch_prefers_its_preferred_sizes():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", tuple(n * MS for n in range(1, 9)), preferred=(2, 4)))
    for sequence in range(1, 8):
        scheduler.submit(0, sequence, 0, 0, 0, 0)
    sizes = []
    for now_ns in (0, 4 * MS, 6 * MS):
        sizes.append(len(start(scheduler, now_ns)))
        scheduler.finish(now_ns + 1)
    assert sizes == [4, 2, 1]


def test_a_batch_waits_for_company_but_not_beyond_max_delay():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", (1 * MS, 1 * MS), max_delay_ns=3 * MS))
    scheduler.submit(0, 1, 0, 0, 0, 0)
    assert waits(scheduler, 1 * MS) == 3 * MS
    assert start(scheduler, 3 * MS) == [(0, 1)]
    scheduler.finish(4 * MS)
    for sequence in (2, 3):
        scheduler.submit(0, sequence, 0, 5 * MS, 0, 5 * MS)
    assert start(scheduler, 5 * MS) == [(0, 2), (0, 3)]


def test_a_job_with_a_deadline_does_not_wait_for_company():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", (1 * MS, 1 * MS), max_delay_ns=3 * MS))
    scheduler.submit(0, 1, 0, 0, 50 * MS, 0)
    assert start(scheduler, 0) == [(0, 1)]


def test_a_batch_stops_where_a_member_would_miss_its_deadline():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", (2 * MS, 3 * MS, 4 * MS)))
    scheduler.submit(0, 1, 0, 0, 3 * MS, 0)
    scheduler.submit(0, 2, 0, 0, 0, 0)
    scheduler.submit(0, 3, 0, 0, 0, 0)
    assert start(scheduler, 0) == [(0, 1), (0, 2)]


def test_a_wait_predicts_the_next_release():
    scheduler = scheduler_with(loop(period=10 * MS), loop(period=7 * MS))
    for lane in (0, 1):
        scheduler.submit(lane, 1, 0, 0, 0, 0)
    for now_ns in (0, MS):
        start(scheduler, now_ns)
        scheduler.finish(now_ns + MS)
    action = scheduler.decide(2 * MS)
    assert (action.kind, action.until_ns, action.spin_from_ns) == (WAIT, 0, 7 * MS)


def test_a_job_without_a_deadline_never_expires():
    scheduler = scheduler_with()
    scheduler.add_queue(0, Queue("m", (1 * MS,)))
    assert scheduler.submit(0, 1, 0, 0, 0, 0).latest_start_ns == NEVER
    assert scheduler.next_certain_expiry() == 0
