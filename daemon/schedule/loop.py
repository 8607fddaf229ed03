"""One loop as the scheduler holds it: its arrival history, its queued jobs, its counters, its promise.

Only scheduler.py touches it. Times in ns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

from taktd.daemon.schedule.job import LONG_AGO, Job, Task


def first_beat(task: Task, now_ns: int) -> int:
    """The first beat at or after now_ns: the smallest phase + n * period that is not before it."""
    return now_ns + (task.phase_ns - now_ns) % task.period_ns


class Loop:
    """head: the first queued job, with its final a_k; tail: those behind it; input: a clock loop's newest input.

    next_ns: earliest nominal arrival of the next job (a_(k-1) + T); expected_ns: when the next release is predicted.
    """

    __slots__ = (
        "attached",
        "beat_ns",
        "cancelled",
        "clock",
        "completed",
        "cost_ns",
        "deadline_ns",
        "dropped",
        "early",
        "early_again_ns",
        "expected_ns",
        "expired",
        "head",
        "history",
        "input",
        "is_loop",
        "jitter_ns",
        "k",
        "lane",
        "missed_beats",
        "next_ns",
        "overruns",
        "period_ns",
        "rank",
        "shortest_ns",
        "skip",
        "stale",
        "submitted",
        "tail",
        "task",
    )

    def __init__(self, lane: int, task: Task) -> None:
        if task.period_ns <= 0 or task.deadline_ns <= 0 or min(task.jitter_ns, task.cost_ns, task.max_age_ns) < 0:
            raise ValueError(f"loop {task.name!r}: period, deadline must be > 0, jitter, cost, max_age ≥ 0")
        if not 0 <= task.m <= task.k:
            raise ValueError(f"loop {task.name!r}: m of k jobs with m={task.m}, k={task.k}; m must be 0 to k")
        self.lane = lane
        self.task = task
        self.is_loop: Literal[True] = True
        self.rank = 0
        self.period_ns = task.period_ns
        self.deadline_ns = task.deadline_ns
        self.jitter_ns = task.jitter_ns
        self.cost_ns = task.cost_ns
        self.shortest_ns = task.shortest_ns or task.cost_ns
        self.skip = not task.on_late_run
        self.clock = task.clock
        self.k = task.k
        self.submitted = self.completed = self.expired = self.cancelled = self.dropped = 0
        self.early = self.overruns = self.stale = self.missed_beats = 0
        self.tail: deque[Job] = deque()
        self.forget(False)

    def forget(self, attached: bool) -> None:
        """Another client, or none: no history, no queued jobs (the scheduler has taken them out)."""
        self.attached = attached
        self.head: Job | None = None
        self.input: Job | None = None
        self.next_ns = LONG_AGO
        self.early_again_ns = LONG_AGO
        self.expected_ns = 0
        self.beat_ns = 0
        self.history = (1 << self.k) - 1  # bit set: in time

    def waiting(self) -> Iterator[Job]:
        """Queued jobs in their order."""
        if self.head is not None:
            yield self.head
        yield from self.tail
        if self.input is not None:
            yield self.input

    def judge_by(self, job: Job) -> None:
        """Sets deadline and latest start from the nominal arrival; the job's own deadline may only be earlier."""
        place_ns = job.arrival_ns + self.deadline_ns
        own_ns = job.own_deadline_ns
        job.deadline_ns = own_ns if own_ns and own_ns < place_ns else place_ns
        if self.skip:
            job.latest_start_ns = job.deadline_ns - self.shortest_ns

    def remember(self, in_time: bool) -> bool:
        """Adds one outcome; True when the promise of m in k has just been broken."""
        if not self.k:
            return False
        was_kept = self.kept() >= self.task.m
        self.history = ((self.history << 1) | in_time) & ((1 << self.k) - 1)
        return was_kept and self.kept() < self.task.m

    def kept(self) -> int:
        """How many of the last k jobs were in time."""
        return self.history.bit_count()
