"""Queued jobs by the time from which it is certain that they miss their deadline.

Only the scheduler and its parts use it. All times in ns.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from taktd.daemon.schedule.job import NEVER, Job


class Expiries:
    """entries: (latest start, lane, sequence, job), sorted. fresh: the newest job, which is not among them yet.

    Most jobs start in the decision that follows their submission; those never need to be sorted in.
    """

    __slots__ = ("entries", "fresh")

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int, Job]] = []
        self.fresh: Job | None = None

    def add(self, job: Job) -> None:
        if job.latest_start_ns != NEVER:
            insort(self.entries, (job.latest_start_ns, job.lane, job.sequence, job))

    def settle(self) -> None:
        """Sorts the fresh job in: it stays for a while."""
        if self.fresh is not None:
            self.add(self.fresh)
            self.fresh = None

    def discard(self, job: Job) -> None:
        if job is self.fresh:
            self.fresh = None
            return
        if job.latest_start_ns == NEVER:
            return
        entries = self.entries
        index = bisect_left(entries, (job.latest_start_ns, job.lane, job.sequence))
        if index < len(entries) and entries[index][3] is job:
            del entries[index]
