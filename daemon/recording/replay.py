"""Replay: the same scheduler, driven by a recording, must decide the same.

`Replayer` applies each recorded event to a scheduler and compares each recorded decision with the one it makes. It
is run by `taktctl replay`, by the supervisor behind the files it writes (so that each file's start is a known
state), and by `why`, `trace` and the plots, which listen to what happens. No clock: every time is the recording's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from taktd.daemon.recording import record as rec
from taktd.daemon.recording.record import Record, Recording, Section
from taktd.daemon.recording.scheduler_state import StateMalformed, decode_plan, decode_state
from taktd.daemon.schedule.job import Action, Expire, Job, Start, Task
from taktd.daemon.schedule.loop import Loop
from taktd.daemon.scheduler import Scheduler

__all__ = ["Difference", "Listener", "Replayed", "Replayer", "replay"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that came out differently: record number (from 0), and both as text."""

    device: str
    index: int
    t_ns: int
    recorded: str
    replayed: str

    def text(self) -> str:
        return (
            f"{self.device}: decision at record {self.index} (t = {self.t_ns} ns) differs: "
            f"recorded {self.recorded}, replayed {self.replayed}"
        )


class Listener:
    """What a replay tells; each method does nothing here."""

    def submitted(self, job: Job) -> None: ...
    def started(self, jobs: Sequence[Job], now_ns: int) -> None: ...
    def finished(self, jobs: Sequence[Job], now_ns: int) -> None: ...
    def expired(self, job: Job, status: int, cause: int, detail: int, now_ns: int) -> None: ...
    def left(self, job: Job, now_ns: int) -> None: ...


class Replayer:
    """One device's scheduler under a recording. feed() returns the Difference if there is one."""

    def __init__(self, device: str, scheduler: Scheduler, listener: Listener | None = None) -> None:
        self.device = device
        self.scheduler = scheduler
        self.listener = listener or Listener()
        self.index = 0
        self.decisions = 0
        self.text = bytearray()
        self.names: dict[int, str] = names_of(scheduler)
        self._deadline_ns = 0
        self._expected: list[Record] = []
        self._running: tuple[Job, ...] = ()

    @classmethod
    def of(cls, section: Section, listener: Listener | None = None) -> Replayer:
        """Raises StateMalformed."""
        return cls(section.device, decode_state(section.state), listener)

    def feed(self, record: Record) -> Difference | None:
        """Applies one record. Raises StateMalformed for one that can't follow what came before."""
        t_ns, kind, lane, aux, a, b = record
        scheduler = self.scheduler
        index = self.index
        self.index += 1
        try:
            if kind == rec.SUBMIT:
                deadline_ns, self._deadline_ns = self._deadline_ns, 0
                self.listener.submitted(scheduler.submit(lane, a, aux, b, deadline_ns, t_ns))
            elif kind in rec.DECISIONS or kind == rec.MEMBER:
                return self._compare(record, index)
            elif kind == rec.FINISH:
                scheduler.finish(t_ns, a)
                self.listener.finished(self._running, t_ns)
                scheduler.alarms.clear()
            elif kind == rec.DEADLINE:
                self._deadline_ns = a
            else:
                return self._apply_rare(record, index)
        except (LookupError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
            if isinstance(error, StateMalformed):
                raise
            raise StateMalformed(
                f"{self.device}: record {index} (kind {kind}, lane {lane}) can't follow what came before: {error!r}"
            ) from error
        return None

    def _compare(self, record: Record, index: int) -> Difference | None:
        t_ns, kind, _, aux, _, _ = record
        if kind != rec.MEMBER or not self._expected:
            yielding = bool(aux & rec.YIELDING)
            action = self.scheduler.decide(t_ns, yielding)
            self._expected = rec.decision_records(action, t_ns, yielding)
            self.decisions += 1
            self._tell(action, t_ns)
        expected = self._expected.pop(0)
        if expected != record:
            return Difference(self.device, index, t_ns, self.say(record), self.say(expected))
        return None

    def _tell(self, action: Action, t_ns: int) -> None:
        if isinstance(action, Start):
            self._running = action.jobs
            self.listener.started(self._running, t_ns)
        elif isinstance(action, Expire):
            assert action.job is not None
            self.listener.expired(action.job, action.status, action.cause, action.detail, t_ns)

    def _apply_rare(self, record: Record, index: int) -> Difference | None:
        t_ns, kind, lane, aux, a, b = record
        scheduler = self.scheduler
        if kind in (rec.CANCEL, rec.ELSEWHERE):
            take = scheduler.cancel if kind == rec.CANCEL else scheduler.expired_elsewhere
            job = take(lane, a, t_ns)
            if (job is not None) is not bool(aux):
                return Difference(self.device, index, t_ns, f"queued: {bool(aux)}", f"queued: {job is not None}")
            if job is not None and kind == rec.CANCEL:
                self.listener.left(job, t_ns)
            elif job is not None:
                self.listener.expired(job, 1, job.cause, job.cause_detail, t_ns)
        elif kind == rec.TEXT:
            self.text += rec.text_of(aux, a, b)
        elif kind == rec.ADD:
            plan = decode_plan(self.text.decode())
            self.text.clear()
            if isinstance(plan, Task):
                scheduler.add_loop(lane, plan)
            else:
                scheduler.add_queue(lane, plan)
            self.names[lane] = plan.name
        elif kind in (rec.RESET, rec.REMOVE):
            dropped = scheduler.reset(lane, t_ns, bool(aux)) if kind == rec.RESET else scheduler.remove(lane)
            for job in dropped:
                self.listener.left(job, t_ns)
        elif kind == rec.WATCH:
            scheduler.next_certain_expiry()
        elif kind == rec.HANDOVER:
            scheduler.handover_ns = a
        else:
            raise StateMalformed(f"{self.device}: record {index} has kind {kind}, which this version doesn't know")
        return None

    @property
    def settled(self) -> bool:
        """Whether the scheduler's state is all there is to know: not within a batch, a definition, a submission."""
        return not (self._expected or self.text or self._deadline_ns)

    def say(self, record: Record) -> str:
        """A decision in words."""
        _, kind, lane, aux, a, b = record
        name = self.names.get(lane, f"lane {lane}")
        if kind == rec.STARTED:
            count = aux & ~rec.YIELDING
            return f"start of {name} job {a}" + (f" with {count - 1} more" if count > 1 else "")
        if kind == rec.MEMBER:
            return f"{name} job {a} in the batch"
        if kind == rec.EXPIRED:
            return f"{name} job {a} answered without a run (status {aux & 0xFF}, cause {aux >> 8 & 0xFF})"
        return f"wait until {a} ns, spin from {b} ns" if kind == rec.WAITING else f"record kind {kind}"


def names_of(scheduler: Scheduler) -> dict[int, str]:
    """Lane → name of its loop or model."""
    return {
        lane: source.task.name if isinstance(source, Loop) else source.queue.name
        for lane, source in scheduler._sources.items()
    }


@dataclass(frozen=True, slots=True)
class Replayed:
    """decisions: how many were compared (up to the difference, if there is one)."""

    records: int
    decisions: int
    difference: Difference | None


def replay(recording: Recording, listener: Listener | None = None) -> Replayed:
    """All parts of a recording. Raises StateMalformed."""
    records = decisions = 0
    for section in recording:
        replayer = Replayer.of(section, listener)
        difference = feed_all(replayer, section)
        records += replayer.index
        decisions += replayer.decisions
        if difference is not None:
            return Replayed(records, decisions, difference)
    return Replayed(records, decisions, None)


def feed_all(replayer: Replayer, records: Iterable[Record]) -> Difference | None:
    """Up to the first difference."""
    feed = replayer.feed
    for record in records:
        if (difference := feed(record)) is not None:
            return difference
    return None
