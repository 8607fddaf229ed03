"""The words the scheduler speaks: tasks, queues, jobs, and the three actions it can answer with.

What it is not: no decisions are made here (scheduler.py, best_effort.py), nothing reads a clock.
Who uses it: the scheduler and whoever drives it (executor, simulation, replay).
All times are integer nanoseconds of one monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

NEVER = 1 << 62
"""ns; later than any time: no deadline, no time-out."""

LONG_AGO = -(1 << 62)
"""ns; earlier than any time: a loop without a history."""

OK, EXPIRED, CANCELLED = 0, 1, 6
"""The statuses (of the closed set) that a scheduler can decide on."""

HARD, FIRM, SOFT = 0, 1, 2
"""Criticalities: the smaller one goes first in a tie and is shed last."""


@dataclass(frozen=True, slots=True)
class Task:
    """A loop as admitted. Times in ns.

    `cost_ns` is C, which admission counted with; `shortest_ns` is what a job needs at least (0: taken to be C): a job
    is given up for certain when even that doesn't fit before its deadline any more.
    `clock`: the daemon holds the beat at phase_ns + n * period_ns of the monotonic clock.
    `max_age_ns` 0: an input never becomes stale. `on_stale`: skip, hold or run. At least `m` of any `k` jobs
    in time; k = 0: no such promise.
    """

    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int = 0
    cost_ns: int = 0
    criticality: int = FIRM
    order: int = 0
    on_late_run: bool = False
    m: int = 0
    k: int = 0
    clock: bool = False
    phase_ns: int = 0
    max_age_ns: int = 0
    on_stale: str = "skip"
    shortest_ns: int = 0


@dataclass(frozen=True, slots=True)
class Queue:
    """A model as best-effort lanes see it; lanes whose queue has the same name share their batches.

    `cost_ns[n - 1]` is the cost of a batch of n in ns (one entry: no batching). `preferred`: batch sizes to aim at.
    A job without a deadline waits up to `max_delay_ns` for company; one with a deadline never does.
    """

    name: str
    cost_ns: tuple[int, ...]
    preferred: tuple[int, ...] = ()
    max_delay_ns: int = 0
    order: int = 0
    shortest_ns: int = 0


class Job:
    """One activation of a loop or one best-effort request; made by `Scheduler.submit`, filled in as it goes.

    release_ns: when it was there; arrival_ns: nominal arrival a_k (best effort: the release); deadline_ns: what it is
    judged by (0: nothing), the earlier of its own and a_k + D; own_deadline_ns: as submitted (0: none);
    latest_start_ns: started later than this it can't make it (NEVER: it is run however late);
    early: released before a_k; stale: its input is older than allowed and runs all the same;
    late, overrun, cause, cause_detail: set when it ended, as is away_ns, how long its run had no core. `source` belongs
    to the scheduler.

    It has no __init__ on purpose: the two places that make one set every field in line, 0.1 µs faster a job.
    """

    __slots__ = (
        "arrival_ns",
        "away_ns",
        "cause",
        "cause_detail",
        "cost_ns",
        "deadline_ns",
        "early",
        "ended_ns",
        "lane",
        "late",
        "latest_start_ns",
        "overrun",
        "own_deadline_ns",
        "release_ns",
        "sequence",
        "slot",
        "source",
        "stale",
        "started_ns",
    )

    source: Any
    lane: int
    sequence: int
    slot: int
    release_ns: int
    arrival_ns: int
    own_deadline_ns: int
    deadline_ns: int
    cost_ns: int
    latest_start_ns: int
    started_ns: int
    ended_ns: int
    away_ns: int
    early: bool
    stale: bool
    late: bool
    overrun: bool
    cause: int
    cause_detail: int

    def __repr__(self) -> str:
        return f"Job({self.lane}:{self.sequence}, arrival_ns={self.arrival_ns}, deadline_ns={self.deadline_ns})"


START: Final = 0
EXPIRE: Final = 1
WAIT: Final = 2
"""`kind` of an action: an int compare is the cheapest way to tell them apart."""


class Start:
    """Run these jobs as one dispatch (a single one unless it is a best-effort batch), then call `finish`."""

    __slots__ = ("jobs",)
    kind: Literal[0] = START

    def __init__(self) -> None:
        self.jobs: tuple[Job, ...] = ()


class Expire:
    """Answer this job without running it; it has left the scheduler.

    status: EXPIRED; CANCELLED when a newer input of a clock loop took its place; OK for `on_stale: hold` (answer with
    the outputs of the last run, path *hold*). cause and detail as in cause.py.
    """

    __slots__ = ("cause", "detail", "job", "status")
    kind: Literal[1] = EXPIRE

    def __init__(self) -> None:
        self.job: Job | None = None
        self.status = EXPIRED
        self.cause = 0
        self.detail = 0


class Wait:
    """Nothing to do before `until_ns` (0: until an event); a release on `lane` is predicted for `spin_from_ns` (0: none
    is)."""

    __slots__ = ("lane", "spin_from_ns", "until_ns")
    kind: Literal[2] = WAIT

    def __init__(self) -> None:
        self.lane = 0
        self.until_ns = 0
        self.spin_from_ns = 0


Action = Start | Expire | Wait
