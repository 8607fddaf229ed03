"""During a long engine run the watch answers jobs that can't make their deadline any more, and nothing else."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from taktd.ipc import _core
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon, RawLane

ANSWERED = 0x4000
MS = 1_000_000
BLOCKED_BY = 1
NOT_BEFORE = 1 << 62


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    it = Daemon()
    it.server.watch(0, sorted(os.sched_getaffinity(0)))
    yield it
    it.close()


def run_begins(daemon: Daemon, lane: int) -> tuple[int, ...]:
    """The job on ``lane`` starts; until ``end`` this thread is inside an engine."""
    (job,) = daemon.server.poll(_core.now())
    daemon.server.begin(lane, job[2], _core.now(), 0, _core.now() + 1000 * MS)
    return job


def completion_during_the_run(client: RawLane) -> dict[str, int]:
    """Waits as a client would: for the byte on its descriptor."""
    client.u32(raw.CLIENT_WAITING, 2)
    found = client.completions()
    if not found:
        assert select.select([client.wake], [], [], 30)[0], "no answer while the engine runs"
        found = client.completions()
    (one,) = found
    return one


def test_a_queued_job_is_answered_when_it_is_hopeless_not_when_the_run_ends(daemon: Daemon) -> None:
    busy, other = daemon.add(0, raw.MODEL), daemon.add(1, raw.MODEL)
    busy.submit()
    other.submit()
    first, second = sorted(daemon.server.poll(_core.now()))
    hopeless_ns = _core.now() + 3 * MS
    daemon.server.expect(1, second[2], hopeless_ns)
    daemon.server.begin(0, first[2], _core.now())
    answer = completion_during_the_run(other)
    assert (answer["status"], answer["cause"], answer["cause_detail"]) == (raw.EXPIRED, BLOCKED_BY, 0)
    assert answer["ended_ns"] > hopeless_ns
    assert answer["started_ns"] == 0
    daemon.server.end()
    assert daemon.server.poll(_core.now()) == [(1, second[1], second[2], 0, second[4], ANSWERED)]
    assert daemon.count(1)["expired"] == 1


def test_a_job_that_comes_during_the_run_is_taken_and_judged_by_its_own_deadline(daemon: Daemon) -> None:
    busy, other = daemon.add(0, raw.MODEL), daemon.add(1, raw.MODEL)
    busy.submit()
    run_begins(daemon, 0)
    sequence = other.submit(deadline_ns=_core.now() + 2 * MS, submitted_ns=_core.now())
    other.ring()
    answer = completion_during_the_run(other)
    assert (answer["sequence"], answer["status"]) == (sequence, raw.EXPIRED)
    assert answer["ended_ns"] > answer["deadline_ns"] > 0
    daemon.server.end()
    job, answered = daemon.server.poll(_core.now())
    assert (job[0], job[1], job[5]) == (1, sequence, 0), "the scheduler has to hear of the job first"
    assert (answered[0], answered[1], answered[5]) == (1, sequence, ANSWERED)


def test_a_loops_job_is_judged_by_the_latest_deadline_it_can_have(daemon: Daemon) -> None:
    busy = daemon.add(0, raw.MODEL)
    loop = daemon.add(1, raw.LOOP, period_ns=2 * MS, deadline_ns=MS)
    busy.submit()
    run_begins(daemon, 0)
    submitted_ns = _core.now()
    loop.submit(submitted_ns=submitted_ns)
    loop.ring()
    answer = completion_during_the_run(loop)
    assert answer["status"] == raw.EXPIRED
    assert answer["ended_ns"] > submitted_ns + MS
    daemon.server.end()


def test_a_clock_loops_input_is_judged_by_the_beat_that_takes_it(daemon: Daemon) -> None:
    busy = daemon.add(0, raw.MODEL)
    beating = daemon.add(1, raw.LOOP, period_ns=400 * MS, deadline_ns=MS, trigger=1)
    unknown = daemon.add(2, raw.LOOP, period_ns=2 * MS, deadline_ns=MS, trigger=1)
    busy.submit()
    run_begins(daemon, 0)
    beat_ns = _core.now() + 20 * MS
    daemon.server.beats(1, beat_ns % (400 * MS))
    for lane in (beating, unknown):
        lane.submit(submitted_ns=_core.now())
        lane.ring()
    answer = completion_during_the_run(beating)
    assert answer["status"] == raw.EXPIRED
    assert answer["ended_ns"] > beat_ns + MS
    assert not unknown.completions(), "nobody has said when it beats"
    daemon.server.end()


OVERRUN, MACHINE = 2, 7


@pytest.mark.parametrize(
    ("busy", "cost_ns", "cause"),
    [(True, 0, BLOCKED_BY), (True, 60_000 * MS, BLOCKED_BY), (True, MS, OVERRUN), (False, MS, MACHINE)],
)
def test_a_run_within_its_cost_blocks_and_a_longer_one_is_to_blame_unless_it_had_no_core(
    busy: bool, cost_ns: int, cause: int
) -> None:
    for _ in range(20):
        found, had_its_core = judged(busy, cost_ns)
        if had_its_core or not busy:
            break  # else this machine took the core away itself: once more
    assert found == (raw.EXPIRED, cause)


def judged(busy: bool, cost_ns: int) -> tuple[tuple[int, int], bool]:
    """What a job is told that is lost behind a run; whether the run's thread had a core nearly all the time."""
    daemon = Daemon()
    daemon.server.watch(0, sorted(os.sched_getaffinity(0)))
    try:
        running, other = daemon.add(0, raw.MODEL), daemon.add(1, raw.MODEL)
        running.submit()
        (job,) = daemon.server.poll(_core.now())
        begun_ns, used_ns = _core.now(), _core.thread_cpu_ns()
        daemon.server.begin(0, job[2], begun_ns, 0, 0, 0, cost_ns)
        other.submit(deadline_ns=begun_ns + 200 * MS)
        other.u32(raw.CLIENT_WAITING, 2)
        # A busy thread is what an engine looks like to the watch; one that sleeps looks like one without a core.
        while not select.select([other.wake], [], [], 0 if busy else 30)[0]:
            assert _core.now() < begun_ns + 30_000 * MS
        had_its_core = (_core.thread_cpu_ns() - used_ns) * 4 > (_core.now() - begun_ns) * 3
        (answer,) = other.completions()
        daemon.server.end()
        return (answer["status"], answer["cause"]), had_its_core
    finally:
        daemon.close()


def test_loops_whose_late_jobs_run_are_left_alone(daemon: Daemon) -> None:
    running, other = daemon.add(0, raw.MODEL), daemon.add(1, raw.LOOP, period_ns=MS, deadline_ns=MS)
    daemon.server.runs_late(1)
    running.submit()
    run_begins(daemon, 0)
    other.submit()
    assert not select.select([other.wake], [], [], 0.05)[0]
    daemon.server.end()
    ((lane, *_rest),) = daemon.server.poll(_core.now())
    assert lane == 1


def test_a_job_that_can_still_make_it_is_left_alone(daemon: Daemon) -> None:
    busy, patient, doomed = (daemon.add(lane, raw.MODEL) for lane in range(3))
    for client in (busy, patient, doomed):
        client.submit()
    jobs = sorted(daemon.server.poll(_core.now()))
    daemon.server.expect(1, jobs[1][2], NOT_BEFORE)
    daemon.server.expect(2, jobs[2][2], _core.now())
    daemon.server.begin(0, jobs[0][2], _core.now())
    assert completion_during_the_run(doomed)["status"] == raw.EXPIRED  # so the watch has looked at all of them
    daemon.server.end()
    assert patient.completions() == []
    assert [entry[0] for entry in daemon.server.poll(_core.now())] == [2]
    daemon.server.begin(1, jobs[1][2], _core.now())
    daemon.server.end()
    daemon.server.complete(1, jobs[1][2], raw.OK, 0, 1, 0, 0, _core.now())
    assert patient.completions()[0]["status"] == raw.OK


def test_the_running_job_itself_is_never_answered(daemon: Daemon) -> None:
    busy, other = daemon.add(0, raw.MODEL), daemon.add(1, raw.MODEL)
    busy.submit(deadline_ns=_core.now() + MS)
    other.submit()
    jobs = sorted(daemon.server.poll(_core.now()))
    daemon.server.expect(0, jobs[0][2], 1)
    daemon.server.expect(1, jobs[1][2], 1)
    daemon.server.begin(0, jobs[0][2], _core.now())
    assert completion_during_the_run(other)["status"] == raw.EXPIRED
    daemon.server.end()
    assert busy.completions() == []


def test_accounts_hold_over_many_runs_with_jobs_coming_in_all_the_while(daemon: Daemon) -> None:
    """Four clients submit around every begin and end; each job ends exactly once."""
    clients = [daemon.add(lane, raw.MODEL) for lane in range(4)]
    waiting: dict[tuple[int, int], int] = {}

    def collect() -> None:
        while entries := daemon.server.poll(_core.now()):
            for lane, sequence, slot, _, _, flags in entries:
                if flags == ANSWERED:
                    del waiting[lane, sequence]
                else:
                    waiting[lane, sequence] = slot

    ended = [0] * 4
    free = [{0, 1, 2, 3} for _ in clients]

    def submit(number: int) -> None:
        client = clients[number]
        for completion in client.completions():
            free[number].add(completion["slot"])
            ended[number] += 1
        if free[number]:
            now_ns = _core.now()
            client.submit(free[number].pop(), deadline_ns=now_ns + (1 + number) * MS // 2, submitted_ns=now_ns)
            if client.u32(raw.DAEMON_SLEEPING):
                client.ring()

    for _ in range(300):
        for number in range(4):
            submit(number)
        collect()
        if not waiting:
            continue
        (lane, _), slot = waiting.popitem()
        daemon.server.begin(lane, slot, _core.now())
        begun_ns = _core.now()
        while _core.now() < begun_ns + 2 * MS:  # an engine
            submit((lane + 1) % 4)
        daemon.server.end()
        daemon.server.complete(lane, slot, raw.OK, 0, 1, 0, 0, _core.now())
    collect()
    for (lane, _), slot in waiting.items():
        daemon.server.complete(lane, slot, raw.CANCELLED, 0, 0, 0, 0, _core.now())
    for lane, client in enumerate(clients):
        ended[lane] += len(client.completions())
        counted = daemon.count(lane)
        assert client.sequence == ended[lane] == counted["submitted"]
        assert counted["submitted"] == counted["ok"] + counted["expired"] + counted["cancelled"]
