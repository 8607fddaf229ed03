"""The scheduler against an obvious one: the same events, and every decision must be the same.

The reference keeps plain lists, looks at everything each time, and knows one sentence of the specification per line.
It covers loops (but not clock-triggered ones), early jobs, expiry, cancellation, and best effort.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.daemon.schedule.best_effort import LEAD_NS
from taktd.daemon.schedule.job import EXPIRE, NEVER, START, Queue, Task
from taktd.daemon.scheduler import Scheduler

START_NS = 1_000_000


@dataclass
class Queued:
    lane: int
    sequence: int
    release: int
    own: int
    arrival: int = 0
    deadline: int = 0
    latest: int = NEVER
    early: bool = False


@dataclass
class Lane:
    task: Task | None
    queue: Queue | None
    jobs: list[Queued] = field(default_factory=list)
    next: int = -NEVER
    early_again: int = -NEVER
    attached: bool = True
    virtual: int = 0


class Reference:
    def __init__(self, dispatch: int) -> None:
        self.dispatch = dispatch
        self.lanes: dict[int, Lane] = {}
        self.running: Queued | None = None
        self.served = 0

    def submit(self, lane: int, sequence: int, release: int, own: int) -> None:
        entry = self.lanes[lane]
        job = Queued(lane, sequence, release, own, release, own)
        if entry.task is None:
            assert entry.queue is not None
            if not entry.jobs:
                entry.virtual = max(entry.virtual, self.served)
            if own:
                job.latest = own - entry.queue.cost_ns[0]
            entry.jobs.append(job)
            entry.jobs.sort(key=lambda each: (each.own or NEVER, each.sequence))
            return
        before = entry.jobs[-1].arrival + entry.task.period_ns if entry.jobs else entry.next
        self.judge(entry.task, job, max(release - entry.task.jitter_ns, before))
        entry.jobs.append(job)

    @staticmethod
    def judge(task: Task, job: Queued, arrival: int) -> None:
        job.arrival = arrival
        job.early = job.release < arrival
        job.deadline = min(arrival + task.deadline_ns, job.own or NEVER)
        job.latest = NEVER if task.on_late_run else job.deadline - (task.shortest_ns or task.cost_ns)

    def first_again(self, entry: Lane) -> None:
        """The head has changed, or what came before it."""
        if entry.task is not None and entry.jobs:
            head = entry.jobs[0]
            self.judge(entry.task, head, max(head.release - entry.task.jitter_ns, entry.next))

    def leave(self, job: Queued, now: int) -> None:
        entry = self.lanes[job.lane]
        was_head = entry.jobs[0] is job
        entry.jobs.remove(job)
        if entry.task is not None and was_head:
            if now >= job.arrival:
                entry.next = job.arrival + entry.task.period_ns
            self.first_again(entry)

    def cancel(self, lane: int, sequence: int, now: int) -> bool:
        for job in self.lanes[lane].jobs:
            if job.sequence == sequence:
                self.leave(job, now)
                return True
        return False

    def finish(self, now: int) -> None:
        job, self.running = self.running, None
        assert job is not None
        entry = self.lanes[job.lane]
        if entry.task is not None and job.early and now < job.arrival:
            entry.next = job.arrival
            self.first_again(entry)

    def start(self, job: Queued) -> tuple[Any, ...]:
        entry = self.lanes[job.lane]
        entry.jobs.remove(job)
        self.running = job
        if entry.task is not None:
            entry.next = job.arrival + entry.task.period_ns
            self.first_again(entry)
        else:
            assert entry.queue is not None
            self.served = max(self.served, entry.virtual)
            entry.virtual += entry.queue.cost_ns[0]
        return ("start", job.lane, job.sequence)

    def next_release(self, now: int, besides: int | None) -> int:
        """No loop's job can arrive before this."""
        times = [
            max(now, entry.jobs[0].arrival if entry.jobs else entry.next)
            for lane, entry in self.lanes.items()
            if entry.task is not None and entry.attached and lane != besides
        ]
        return min(times, default=NEVER)

    def may_start(self, cost: int, now: int, besides: int | None = None) -> bool:
        return cost <= self.dispatch or now + cost <= self.next_release(now, besides)

    def decide(self, now: int) -> tuple[Any, ...]:
        certain = [
            (job.latest, job.lane, job.sequence)
            for entry in self.lanes.values()
            for job in entry.jobs
            if job.latest < now
        ]
        if certain:
            _, lane, sequence = min(certain)
            self.leave(next(job for job in self.lanes[lane].jobs if job.sequence == sequence), now)
            return ("expire", lane, sequence)
        if self.running is not None:
            return ("wait",)
        heads = [(entry, entry.task, entry.jobs[0]) for entry in self.lanes.values() if entry.task and entry.jobs]
        arrived = [(entry, task, job) for entry, task, job in heads if job.arrival <= now]
        if arrived:
            first = min(
                arrived, key=lambda h: (h[2].arrival + h[1].deadline_ns, h[1].criticality, h[1].order, h[2].lane)
            )
            return self.start(first[2])
        early = [(entry, task, job) for entry, task, job in heads if self.may_start(task.cost_ns, now, job.lane)]
        early.sort(key=lambda h: (h[2].arrival, h[1].criticality, h[1].order, h[2].lane))
        for entry, task, job in early:
            if now >= entry.early_again:
                entry.early_again = now + task.period_ns
                return self.start(job)
        fitting = [
            (entry, entry.queue, entry.jobs[0])
            for entry in self.lanes.values()
            if entry.queue and entry.jobs and self.may_start(entry.queue.cost_ns[0], now)
        ]
        if fitting:
            least = min(entry.virtual for entry, _, _ in fitting)
            eligible = [each for each in fitting if each[0].virtual <= least + LEAD_NS]
            best_effort = min(eligible, key=lambda e: (e[2].own or NEVER, e[0].virtual, e[1].order, e[2].lane))
            return self.start(best_effort[2])
        if early:
            return self.start(early[0][2])
        return ("wait",)


@st.composite
def tasks(draw: st.DrawFn, order: int) -> Task:
    period = draw(st.integers(4, 60))
    deadline = draw(st.integers(2, period))
    cost = draw(st.integers(1, max(1, deadline // 2)))
    return Task(
        f"loop{order}", period, deadline, draw(st.integers(0, deadline - cost)), cost, draw(st.integers(0, 2)), order,
        on_late_run=draw(st.integers(0, 4)) == 0, shortest_ns=draw(st.sampled_from([0, 1])),
    )  # fmt: skip


steps = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 6 + ["finish"] * 5 + ["cancel", "elsewhere", "reset", "gone"]),
        st.integers(0, 5),  # which lane, which sequence back
        st.integers(0, 9),  # time that passes before
        st.integers(0, 30),  # own deadline from now; 0: none
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_decision_is_that_of_the_obvious_scheduler(data: st.DataObject) -> None:
    loops = data.draw(st.integers(1, 4))
    dispatch = data.draw(st.sampled_from([0, 3, 8]))
    scheduler, reference = Scheduler(dispatch), Reference(dispatch)
    for lane in range(loops):
        task = data.draw(tasks(order=lane))
        scheduler.add_loop(lane, task)
        scheduler.reset(lane, 0)
        reference.lanes[lane] = Lane(task, None)
    for lane in range(loops, loops + data.draw(st.integers(0, 2))):
        queue = Queue(f"model{lane}", (data.draw(st.integers(1, 12)),))
        scheduler.add_queue(lane, queue)
        reference.lanes[lane] = Lane(None, queue)
    now, sequences = START_NS, dict.fromkeys(reference.lanes, 0)
    for kind, which, passing, own in data.draw(steps):
        now += passing
        lane = which % len(reference.lanes)
        if kind == "submit":
            sequences[lane] += 1
            release = max(now - own % 3, START_NS)
            deadline = now + own if own % 3 == 1 else 0
            scheduler.submit(lane, sequences[lane], 0, release, deadline, now)
            reference.submit(lane, sequences[lane], release, deadline)
            reference.lanes[lane].attached = True
        elif kind == "finish" and reference.running is not None:
            scheduler.finish(now)
            reference.finish(now)
        elif kind in ("cancel", "elsewhere"):
            sequence = sequences[lane] - own % 4
            remove = scheduler.cancel if kind == "cancel" else scheduler.expired_elsewhere
            assert (remove(lane, sequence, now) is not None) == reference.cancel(lane, sequence, now)
        elif kind in ("reset", "gone"):
            entry = reference.lanes[lane]
            dropped = scheduler.reset(lane, now, attached=kind == "reset")
            assert [job.sequence for job in dropped] == [job.sequence for job in entry.jobs]
            entry.jobs.clear()
            entry.next = entry.early_again = -NEVER
            entry.attached = kind == "reset"
            if reference.running is not None and reference.running.lane == lane:
                reference.running.early = False
        while True:
            expected = reference.decide(now)
            action = scheduler.decide(now)
            if action.kind == START:
                (job,) = action.jobs
                assert ("start", job.lane, job.sequence) == expected
            elif action.kind == EXPIRE:
                assert action.job is not None
                assert ("expire", action.job.lane, action.job.sequence) == expected
            else:
                assert expected == ("wait",)
                break
        accounts = scheduler.accounts()
        assert accounts.balanced
        assert accounts.queued == sum(len(entry.jobs) for entry in reference.lanes.values())
        assert accounts.running == (reference.running is not None)
