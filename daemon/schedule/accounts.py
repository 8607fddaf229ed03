"""What became of all jobs: counted where it happens, summed here when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from taktd.daemon.schedule.best_effort import BestEffortLane
from taktd.daemon.schedule.job import Job
from taktd.daemon.schedule.loop import Loop

Source = Loop | BestEffortLane


@dataclass(frozen=True, slots=True)
class Accounts:
    """Jobs by what became of them: submitted = completed + expired + cancelled + dropped + queued + running, always."""

    submitted: int = 0
    completed: int = 0
    expired: int = 0
    cancelled: int = 0
    dropped: int = 0
    queued: int = 0
    running: int = 0

    @property
    def balanced(self) -> bool:
        ended = self.completed + self.expired + self.cancelled + self.dropped
        return self.submitted == ended + self.queued + self.running

    def __add__(self, other: Accounts) -> Accounts:
        return Accounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def accounts_of(source: Source, running: Iterable[Job], answers: Iterable[tuple[Job, int]]) -> Accounts:
    """One lane's accounts. `running` and `answers` (decided, but not answered yet) may hold other lanes' jobs too."""
    waiting = sum(1 for _ in source.waiting()) if source.is_loop else len(source.jobs)
    return Accounts(
        source.submitted,
        source.completed,
        source.expired,
        source.cancelled,
        source.dropped,
        waiting + sum(1 for job, _ in answers if job.source is source),
        sum(1 for job in running if job.source is source),
    )
