"""What happened to each job of a recording, and why a deadline was missed, in words.

Listens to a replay: the recording has events and decisions, the scheduler that runs along knows what they meant. Called
by `taktctl why`, `trace` and the plots. Keeps what it is asked for and no more: a long recording costs time only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from taktd.daemon.config.durations import format_duration
from taktd.daemon.recording.record import Recording
from taktd.daemon.recording.replay import Listener, Replayer, feed_all
from taktd.daemon.schedule import cause as causes
from taktd.daemon.schedule.job import EXPIRED, OK, Job

__all__ = ["Collector", "Incident", "Outcome", "collect_outcomes", "find_incident", "last_jobs", "tell"]

BEFORE: Final = 12  # jobs kept from before the one in question
AFTER: Final = 4
RAN, EXPIRED_UNRUN, ANSWERED, LEFT = "ran", "expired", "answered", "left"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One job from submission to end; times in ns, 0 where there is none. batch: jobs that ran with it."""

    device: str
    name: str
    lane: int
    sequence: int
    loop: bool
    kind: str
    release_ns: int
    arrival_ns: int
    deadline_ns: int
    started_ns: int
    ended_ns: int
    cost_ns: int
    early: bool
    late: bool
    overrun: bool
    cause: int
    detail: int
    batch: int

    @property
    def missed(self) -> bool:
        return self.late or self.kind == EXPIRED_UNRUN

    @property
    def title(self) -> str:
        return f"{self.name} job {self.sequence}"


class Collector(Listener):
    """Turns what a replay tells into Outcomes and hands each to `take`."""

    def __init__(self, take: Callable[[Outcome], None]) -> None:
        self.take = take
        self.replayer: Replayer | None = None

    def finished(self, jobs: Sequence[Job], now_ns: int) -> None:
        for job in jobs:
            self.take(self._outcome(job, RAN, now_ns, len(jobs)))

    def expired(self, job: Job, status: int, cause: int, detail: int, now_ns: int) -> None:
        kind = EXPIRED_UNRUN if status == EXPIRED else ANSWERED if status == OK else LEFT
        self.take(self._outcome(job, kind, now_ns, 1))

    def left(self, job: Job, now_ns: int) -> None:
        self.take(self._outcome(job, LEFT, now_ns, 1))

    def _outcome(self, job: Job, kind: str, now_ns: int, batch: int) -> Outcome:
        replayer = self.replayer
        assert replayer is not None
        return Outcome(
            replayer.device, replayer.names.get(job.lane, f"lane {job.lane}"), job.lane, job.sequence,
            bool(job.source.is_loop), kind, job.release_ns, job.arrival_ns, job.deadline_ns, job.started_ns, now_ns,
            job.cost_ns, job.early, job.late, job.overrun, job.cause, job.cause_detail, batch,
        )  # fmt: skip


def collect_outcomes(recording: Recording, take: Callable[[Outcome], None]) -> None:
    """Every job of every part; parts that replay differently are told up to there. Raises StateMalformed."""
    collector = Collector(take)
    for section in recording:
        collector.replayer = Replayer.of(section, collector)
        feed_all(collector.replayer, section)


# ---- why ----


@dataclass(frozen=True, slots=True)
class Incident:
    """A job with what its device did before and after.

    namesakes: earlier jobs of its name and number, since numbers begin again with each attach. end_ns: when the
    recording's last job ended.
    """

    job: Outcome
    before: tuple[Outcome, ...]
    after: tuple[Outcome, ...]
    namesakes: int
    end_ns: int


class _Seeker:
    """Keeps the last job that is wanted, with its surroundings."""

    def __init__(self, wanted: Callable[[Outcome], bool]) -> None:
        self.wanted = wanted
        self.recent: dict[str, deque[Outcome]] = {}
        self.job: Outcome | None = None
        self.before: tuple[Outcome, ...] = ()
        self.after: list[Outcome] = []
        self.end_ns = 0
        self.seen: Counter[tuple[str, int]] = Counter()

    def take(self, outcome: Outcome) -> None:
        self.end_ns = max(self.end_ns, outcome.ended_ns)
        recent = self.recent.setdefault(outcome.device, deque(maxlen=BEFORE))
        if self.job is not None and outcome.device == self.job.device and len(self.after) < AFTER:
            self.after.append(outcome)
        if self.wanted(outcome):
            self.seen[outcome.name, outcome.sequence] += 1
            self.job, self.before, self.after = outcome, tuple(recent), []
        recent.append(outcome)


def find_incident(recording: Recording, name: str | None = None, sequence: int | None = None) -> Incident | None:
    """The latest job called so, or without a name the last missed deadline."""
    if name is None:
        seeker = _Seeker(lambda outcome: outcome.missed)
    else:
        seeker = _Seeker(lambda outcome: outcome.name == name and outcome.sequence == sequence)
    collect_outcomes(recording, seeker.take)
    job = seeker.job
    if job is None:
        return None
    namesakes = seeker.seen[job.name, job.sequence] - 1 if name is not None else 0
    return Incident(job, seeker.before, tuple(seeker.after), namesakes, seeker.end_ns)


def last_jobs(recording: Recording) -> dict[str, int]:
    """Number of the last job that ended of each loop and model in the recording."""
    found: dict[str, int] = {}

    def take(outcome: Outcome) -> None:
        found[outcome.name] = outcome.sequence

    collect_outcomes(recording, take)
    return found


def tell(incident: Incident) -> str:
    """A sentence or three for the person who has to do something about it."""
    job = incident.job
    if job.kind == LEFT:
        return f"{job.title} left without having run: it was cancelled, replaced by newer input, or its client went."
    if job.kind == ANSWERED:
        return f"{job.title} was answered without a run, with the outputs of the last one: its input was stale."
    if not job.missed:
        spare = f", {format_duration(job.deadline_ns - job.ended_ns)} before its deadline" if job.deadline_ns else ""
        waited = format_duration(job.started_ns - job.release_ns)
        return (
            f"{job.title} missed nothing: it waited {waited}, ran {format_duration(job.ended_ns - job.started_ns)} "
            f"and ended {format_duration(max(0, job.ended_ns - job.release_ns))} after its release{spare}."
        )
    return f"{_miss(job)} {_reason(incident)}"


def _miss(job: Outcome) -> str:
    allowed = format_duration(job.deadline_ns - job.arrival_ns)
    if job.kind == EXPIRED_UNRUN:
        return f"{job.title} was not run: it could no longer end by its deadline, {allowed} after its nominal arrival."
    late = format_duration(job.ended_ns - job.deadline_ns)
    return f"{job.title} ended {late} after its deadline, which was {allowed} after its nominal arrival."


def _reason(incident: Incident) -> str:
    job = incident.job
    other = _blamed(incident)
    took = format_duration(other.ended_ns - other.started_ns) if other and other.started_ns else "?"
    if job.cause == causes.BLOCKED_BY:
        if other is None:
            return "The device was busy with other jobs while it waited."
        due = max(job.release_ns, job.arrival_ns)
        held = min(other.ended_ns, job.started_ns or job.ended_ns) - max(other.started_ns, due)
        return (
            f"While it waited, {_called(other)} held the device for {format_duration(max(held, 0))} of its {took}: "
            "more than admission had counted on together with what else ran."
        )
    if job.cause == causes.OVERRUN:
        if other is None or other == job:
            ran, cost = format_duration(job.ended_ns - job.started_ns), format_duration(job.cost_ns)
            return f"It ran {ran}, longer than the {cost} that it was admitted with."
        cost = format_duration(other.cost_ns)
        return f"While it waited, {_called(other)} ran {took}, longer than the {cost} counted for it."
    if job.cause == causes.LATE_RELEASE:
        left = format_duration(job.deadline_ns - job.release_ns)
        return (
            f"It was submitted {format_duration(max(0, job.release_ns - job.arrival_ns))} after its nominal arrival, "
            f"when {left} was left, and a job takes up to {format_duration(job.cost_ns)}: the client was late."
        )
    if job.cause == causes.WAKEUP:
        due = max(job.release_ns, job.arrival_ns)
        idle = format_duration(max(0, (job.started_ns or job.ended_ns) - due))
        return f"The device was free, but {idle} passed until the executor looked: it woke up late."
    return {
        causes.HANDOVER: "Its lane was just passed from one executor to another.",
        causes.STALE_INPUT: "The newest input was older than max_age when its beat came.",
        causes.MACHINE: "The machine took the core away from the executor meanwhile: no job is to blame.",
    }.get(job.cause, "No cause is known.")


def _blamed(incident: Incident) -> Outcome | None:
    """The job on the lane that the cause names, nearest before the one in question."""
    job = incident.job
    if job.cause == causes.OVERRUN and job.detail == job.lane:
        return job
    wanted = [o for o in (*incident.before, *incident.after) if o.lane == job.detail and o.started_ns and o != job]
    due = max(job.release_ns, job.arrival_ns)
    until = job.started_ns or job.ended_ns
    overlapping = [o for o in wanted if o.started_ns < until and o.ended_ns > due]
    return max(overlapping, key=lambda o: min(o.ended_ns, until) - max(o.started_ns, due), default=None)


def _called(job: Outcome) -> str:
    kind = "" if job.loop else " (best effort)"
    return f"{job.title}{kind}"
