"""Each missed deadline gets one cause of the closed set, and who it was."""

from taktd.daemon.schedule import cause
from taktd.daemon.schedule.job import Queue, Task
from taktd.daemon.scheduler import Scheduler

MS = 1_000_000
START_NS = 100 * MS


def two_loops(**fields):
    scheduler = Scheduler()
    for lane, name in enumerate(("long", "short")):
        scheduler.add_loop(lane, Task(name, 10 * MS, (10, 4)[lane] * MS, cost_ns=(3, 2)[lane] * MS, **fields))
        scheduler.reset(lane, 0)
    return scheduler


def run_long_then_short(long_ns, short_ns, *, short_release_ns=START_NS + 1, idle_ns=0, long_away_ns=0, **finish):
    """The long loop's job runs first; the short one's is released 1 ns later, has 4 ms, and misses."""
    scheduler = two_loops(on_late_run=True)
    scheduler.submit(0, 1, 0, START_NS, 0, START_NS)
    scheduler.decide(START_NS)
    job = scheduler.submit(1, 1, 0, short_release_ns, 0, short_release_ns)
    now_ns = START_NS + long_ns
    scheduler.finish(now_ns, long_away_ns)
    now_ns += idle_ns
    scheduler.decide(now_ns)
    now_ns += short_ns
    scheduler.finish(now_ns, **finish)
    assert job.late
    return job.cause, job.cause_detail


def test_blocked_by_names_the_lane():
    assert run_long_then_short(3 * MS, 2 * MS) == (cause.BLOCKED_BY, 0)


def test_an_own_overrun():
    assert run_long_then_short(1 * MS, 4 * MS) == (cause.OVERRUN, 1)


def test_the_overrun_of_the_one_before():
    assert run_long_then_short(5 * MS, 1 * MS) == (cause.OVERRUN, 0)


def test_time_off_the_core_is_the_machines():
    assert run_long_then_short(1 * MS, 4 * MS, switched_out_ns=3 * MS) == (cause.MACHINE, 0)


def test_time_that_the_one_before_had_no_core_is_the_machines_too():
    assert run_long_then_short(5 * MS, 1 * MS, long_away_ns=2 * MS) == (cause.MACHINE, 0)
    assert run_long_then_short(5 * MS, 1 * MS, long_away_ns=MS // 2) == (cause.OVERRUN, 0)


def test_what_the_machine_took_of_its_own_run_is_no_overrun_even_where_that_alone_would_do():
    # 3.5 ms too long, 2 ms of it without a core; 2.5 ms would have been enough to miss.
    assert run_long_then_short(1 * MS, 5 * MS + MS // 2, switched_out_ns=2 * MS) == (cause.MACHINE, 0)


def test_a_stall_and_a_late_wakeup_together_are_not_put_down_to_what_was_admitted():
    # 3 ms within the cost of the one before, 1 ms of a stall in it, 2.5 ms idle; the last two are more, and suffice.
    found = run_long_then_short(4 * MS, 1 * MS, long_away_ns=1 * MS, idle_ns=5 * MS // 2)
    assert found == (cause.WAKEUP, 0)


def test_an_idle_device_is_a_late_wakeup():
    assert run_long_then_short(1 * MS, 1 * MS, idle_ns=3 * MS) == (cause.WAKEUP, 0)


def test_a_deadline_that_was_impossible_at_release_is_a_late_release():
    scheduler = two_loops(on_late_run=True)
    job = scheduler.submit(1, 1, 0, START_NS, START_NS + MS, START_NS)
    scheduler.decide(START_NS)
    scheduler.finish(START_NS + 2 * MS)
    assert (job.cause, job.cause_detail) == (cause.LATE_RELEASE, 0)


def test_best_effort_asked_too_late():
    scheduler = Scheduler()
    scheduler.add_queue(0, Queue("m", (2 * MS,)))
    job = scheduler.submit(0, 1, 0, START_NS, START_NS + MS, START_NS)
    assert scheduler.decide(START_NS).job is job
    assert job.cause == cause.LATE_RELEASE


def test_a_handover_between_release_and_end():
    scheduler = two_loops(on_late_run=True)
    scheduler.handover_ns = START_NS + 3 * MS
    job = scheduler.submit(1, 1, 0, START_NS, 0, START_NS)
    scheduler.decide(START_NS + 3 * MS)
    scheduler.finish(START_NS + 5 * MS)
    assert job.cause == cause.HANDOVER


def test_a_job_in_time_has_no_cause():
    scheduler = two_loops()
    job = scheduler.submit(1, 1, 0, START_NS, 0, START_NS)
    scheduler.decide(START_NS)
    scheduler.finish(START_NS + 2 * MS)
    assert (job.late, job.cause) == (False, cause.NONE)


def test_the_names_are_as_many_as_the_numbers():
    assert cause.NAMES[cause.MACHINE] == "machine"
    assert len(cause.NAMES) == cause.MACHINE + 1
