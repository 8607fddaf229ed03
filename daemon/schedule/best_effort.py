"""Best-effort jobs: who goes next in slack, and with whom in one batch.

Order between lanes: earliest *eligible* deadline first, after EEVDF (Stoica, Abdel-Wahab 1995). A lane's virtual time
is the device time it has had (in ns); a lane is eligible while it is at most LEAD_NS ahead of the least served lane
with something to run, and among eligible lanes the earliest deadline goes first, then the least served. So a deadline
counts, but a lane that floods gets at most LEAD_NS plus one dispatch ahead of anybody else. A lane that was idle does
not save up: it rejoins at the virtual time of the lane served last. Within a lane: by deadline, then by sequence.

What it is not: it doesn't know loops. scheduler.py says when something may start and how long it may take.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

from taktd.daemon.schedule.batching import Dated, batch_size, nobody_minds
from taktd.daemon.schedule.job import NEVER, Job, Queue

LEAD_NS = 10_000_000
"""ns of device time that one lane may be ahead of another that waits."""


class BestEffortLane:
    """One client's queue for one model, with what it was given so far."""

    __slots__ = (
        "cancelled",
        "completed",
        "cost_ns",
        "deadline_ns",
        "dropped",
        "expired",
        "is_loop",
        "jobs",
        "lane",
        "max_delay_ns",
        "order",
        "peers",
        "period_ns",
        "queue",
        "shortest_ns",
        "submitted",
        "virtual_ns",
    )

    def __init__(self, lane: int, queue: Queue) -> None:
        if not queue.cost_ns:
            raise ValueError(f"queue {queue.name!r}: cost_ns needs at least one entry")
        self.lane = lane
        self.queue = queue
        # Of the queue, one attribute nearer to the hot path.
        self.order = queue.order
        self.max_delay_ns = queue.max_delay_ns
        self.cost_ns = queue.cost_ns[0]
        self.shortest_ns = queue.shortest_ns or queue.cost_ns[0]
        self.is_loop: Literal[False] = False
        self.deadline_ns = NEVER  # none of its own: see cause.py
        self.period_ns = 0
        self.jobs: list[Dated] = []  # sorted; NEVER where a job has no deadline
        self.peers: list[BestEffortLane] = []  # those of the backlog that share batches; one list for all of them
        self.virtual_ns = 0
        self.submitted = self.completed = self.expired = self.cancelled = self.dropped = 0


class BestEffort:
    """All best-effort lanes of one device."""

    __slots__ = ("_dated", "_dated_cost_ns", "_lanes", "_served_ns", "backlog", "hold_until_ns", "longest_ns")

    def __init__(self) -> None:
        self._lanes: list[BestEffortLane] = []
        self.backlog: list[BestEffortLane] = []  # those that have jobs
        self._dated: list[Dated] = []  # all queued jobs that have a deadline, sorted
        self._dated_cost_ns = 0  # what they take one by one
        self._served_ns = 0  # virtual time of the lane served last
        self.hold_until_ns = 0  # when a held batch goes at the latest (0: none is held); valid after pick()
        self.longest_ns = 0  # no dispatch of these lanes takes longer: lets the scheduler skip looking for a gap

    def add(self, lane: int, queue: Queue) -> BestEffortLane:
        entry = BestEffortLane(lane, queue)
        for other in self._lanes:
            if other.queue.name == queue.name:
                entry.peers = other.peers
        self._lanes.append(entry)
        self.longest_ns = max(self.longest_ns, *queue.cost_ns)
        return entry

    def remove(self, entry: BestEffortLane) -> None:
        """An empty lane goes."""
        self._lanes.remove(entry)
        self.longest_ns = max((max(entry.queue.cost_ns) for entry in self._lanes), default=0)

    def push(self, entry: BestEffortLane, job: Job) -> None:
        if not entry.jobs:
            self.backlog.append(entry)
            entry.peers.append(entry)
            if entry.virtual_ns < self._served_ns:
                entry.virtual_ns = self._served_ns
        if not job.deadline_ns:
            entry.jobs.append((NEVER, job.sequence, job.lane, job))  # sequences only grow
            return
        dated = (job.deadline_ns, job.sequence, job.lane, job)
        insort(entry.jobs, dated)
        insort(self._dated, dated)
        self._dated_cost_ns += job.cost_ns

    def discard(self, entry: BestEffortLane, job: Job) -> None:
        """Takes a queued job out."""
        key = (job.deadline_ns or NEVER, job.sequence, job.lane)
        del entry.jobs[bisect_left(entry.jobs, key)]
        if job.deadline_ns:
            self._forget_date(key, job)
        if not entry.jobs:
            self._empty(entry)

    def _empty(self, entry: BestEffortLane) -> None:
        self.backlog.remove(entry)
        entry.peers.remove(entry)

    def _forget_date(self, key: tuple[int, int, int], job: Job) -> None:
        del self._dated[bisect_left(self._dated, key)]
        self._dated_cost_ns -= job.cost_ns

    def pick(self, now_ns: int, limit_ns: int) -> tuple[Job, ...]:
        """The jobs of the next dispatch, none longer than limit_ns; () if none may start. They leave their queues."""
        self.hold_until_ns = 0
        first: BestEffortLane | None = None
        best_deadline_ns = best_virtual_ns = least_ns = NEVER + 1
        for entry in self.backlog:
            if entry.cost_ns > limit_ns or (entry.max_delay_ns and self._held(now_ns, entry)):
                continue
            virtual_ns = entry.virtual_ns
            if virtual_ns < least_ns:
                least_ns = virtual_ns
            deadline_ns = entry.jobs[0][0]
            if deadline_ns > best_deadline_ns:
                continue
            if deadline_ns == best_deadline_ns:
                if virtual_ns > best_virtual_ns:
                    continue
                if virtual_ns == best_virtual_ns and first is not None and _order(first) < _order(entry):
                    continue
            first, best_deadline_ns, best_virtual_ns = entry, deadline_ns, virtual_ns
        if first is None:
            return ()
        if best_virtual_ns > least_ns + LEAD_NS:
            first = self._first(now_ns, limit_ns, least_ns + LEAD_NS)
        cost_ns = first.queue.cost_ns
        jobs: tuple[Job, ...] = (first.jobs[0][3],)
        if len(cost_ns) > 1 and cost_ns[1] <= limit_ns:
            jobs = self._batch(now_ns, first, limit_ns)
        self._take(jobs, cost_ns[len(jobs) - 1])
        return jobs

    def _first(self, now_ns: int, limit_ns: int, eligible_ns: int) -> BestEffortLane:
        """Among the eligible lanes the one with the earliest deadline, then the least served one."""
        return min(
            (
                entry
                for entry in self.backlog
                if entry.cost_ns <= limit_ns
                and entry.virtual_ns <= eligible_ns
                and not (entry.max_delay_ns and self._held(now_ns, entry))
            ),
            key=lambda entry: (entry.jobs[0][0], entry.virtual_ns, entry.order, entry.lane),
        )

    def _held(self, now_ns: int, entry: BestEffortLane) -> bool:
        """Whether this lane's model still waits for company. A job with a deadline never waits: it could cost it."""
        queue = entry.queue
        count = 0
        oldest_ns = NEVER
        for other in entry.peers:
            if other.jobs[0][0] != NEVER:
                return False
            count += len(other.jobs)
            oldest_ns = min(oldest_ns, other.jobs[0][3].release_ns)
        until_ns = oldest_ns + queue.max_delay_ns
        if count >= (max(queue.preferred) if queue.preferred else len(queue.cost_ns)) or until_ns <= now_ns:
            return False
        if not self.hold_until_ns or until_ns < self.hold_until_ns:
            self.hold_until_ns = until_ns
        return True

    def _batch(self, now_ns: int, first: BestEffortLane, limit_ns: int) -> tuple[Job, ...]:
        """The first lane's first job and those that may join it: by deadline, then in turn, least served first."""
        queue = first.queue
        most = len(queue.cost_ns)
        while queue.cost_ns[most - 1] > limit_ns and most > 1:
            most -= 1
        candidates = [first.jobs[0][3], *_others(first, most)]
        costs = queue.cost_ns
        if not queue.preferred and nobody_minds(now_ns, costs[len(candidates) - 1], self._dated, self._dated_cost_ns):
            return tuple(candidates)
        size = batch_size(now_ns, candidates, self._dated, self._dated_cost_ns, costs, queue.preferred, limit_ns)
        return tuple(candidates[:size])

    def _take(self, jobs: tuple[Job, ...], cost_ns: int) -> None:
        share_ns = cost_ns // len(jobs)
        for job in jobs:
            entry: BestEffortLane = job.source
            virtual_ns = entry.virtual_ns
            if virtual_ns > self._served_ns:
                self._served_ns = virtual_ns
            entry.virtual_ns = virtual_ns + share_ns
            if entry.jobs[0][3] is job:
                del entry.jobs[0]
                if job.deadline_ns:
                    self._forget_date((job.deadline_ns, job.sequence, job.lane), job)
                if not entry.jobs:
                    self._empty(entry)
            else:
                self.discard(entry, job)


def _order(entry: BestEffortLane) -> tuple[int, int]:
    return entry.order, entry.lane


def _others(first: BestEffortLane, most: int) -> list[Job]:
    """Who may join the lane's first job, at most most - 1, in the order in which they join."""
    if len(first.peers) == 1:
        return [job for _, _, _, job in first.jobs[1:most]]
    # No two jobs of a lane have one turn: jobs are never compared.
    ranked: list[tuple[int, int, int, int, Job]] = []
    for entry in first.peers:
        turn = int(entry is first)  # its first job goes anyway
        for deadline_ns, _, lane, job in entry.jobs[turn : turn + most - 1]:
            ranked.append((deadline_ns, turn, entry.virtual_ns, lane, job))
            turn += 1
    ranked.sort()
    return [item[4] for item in ranked[: most - 1]]
