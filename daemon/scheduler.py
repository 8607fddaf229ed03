"""The schedule of one device: events in, decisions out, time only as an argument.

What it is not: it knows no clock, no process, no memory, no engine. Who calls it: the executor with the real clock, the
simulation with a virtual one, replay with a recorded log; all three run this code.

After each event (submit, cancel, finish, reset, remove, expired_elsewhere, or time passing) call `decide` until it
answers Wait. The rules, in their order:

1. A job that certainly can't make its deadline is answered (Expire); with `on_late: run` it stays.
2. While a dispatch runs, nothing else starts.
3. Loops' jobs that have arrived (now >= a_k) by non-preemptive EDF over a_k + D; ties by criticality, configuration
   order, sequence. A submission's own deadline may be earlier: then the job is *judged* by it (skipped, late), but its
   *place* stays a_k + D, because the other loops were admitted against that. A later one changes nothing.
4. In slack, that is when no loop's job has arrived: a dispatch may start if its cost <= the longest dispatch that
   admission counted as blocking, or if it ends before the next release that is possible at all. First each loop's
   early jobs (released before a_k), at most one per period; then best effort; then further early jobs. Best effort that
   has had less than its share lately goes before all of them. So a client that floods its loop takes slack from nobody.

Arrivals are arrivals.py's. An early job that still runs at its a_k is job k itself, and its demand is in the test:
therefore its own loop's next arrival does not bound how long it may take, only those of the others do.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from taktd.daemon.schedule.accounts import Accounts, Source, accounts_of
from taktd.daemon.schedule.arrivals import Arrivals
from taktd.daemon.schedule.best_effort import BestEffort, BestEffortLane
from taktd.daemon.schedule.cause import cause_of_miss
from taktd.daemon.schedule.expiry import Expiries
from taktd.daemon.schedule.job import (
    CANCELLED,
    EXPIRED,
    LONG_AGO,
    NEVER,
    OK,
    Action,
    Expire,
    Job,
    Queue,
    Start,
    Task,
    Wait,
)
from taktd.daemon.schedule.loop import Loop

__all__ = ["Accounts", "Action", "Expire", "Job", "Queue", "Scheduler", "Start", "Task", "Wait"]

REMEMBERED_DISPATCHES = 32
"""Past dispatches kept to tell what blocked a job."""

SHARE_WINDOW_NS = 1_000_000_000
"""ns over which best effort's share is kept."""


class Scheduler:
    """Decides for one device. Actions are reused: each is valid until the next call of `decide`."""

    __slots__ = (
        "_answers",
        "_arrivals",
        "_backlog",
        "_best_effort",
        "_expire",
        "_expiries",
        "_expiry_entries",
        "_gone",
        "_leaving",
        "_max_dispatch_ns",
        "_order",
        "_ready",
        "_recent",
        "_running",
        "_running_cost_ns",
        "_share_ppm",
        "_sources",
        "_start",
        "_timers",
        "_wait",
        "_window_end_ns",
        "_window_ns",
        "alarms",
        "handover_ns",
    )

    def __init__(self, max_dispatch_ns: int = 0, share_ppm: int = 0) -> None:
        """max_dispatch_ns: the blocking term admission counted for best effort (0: only known gaps are used);
        share_ppm: millionths of the device's time that best effort gets before early jobs do."""
        self._max_dispatch_ns = max_dispatch_ns
        self._share_ppm = share_ppm
        self._sources: dict[int, Source] = {}
        self._order: list[Loop] = []  # loops by rank
        self._best_effort = BestEffort()
        self._expiries = Expiries()
        self._arrivals = Arrivals(self._expiries)
        # The same lists once more, one attribute nearer to the hot path.
        self._backlog = self._best_effort.backlog
        self._ready, self._timers = self._arrivals.ready, self._arrivals.timers
        self._answers = self._arrivals.answers
        self._expiry_entries = self._expiries.entries
        self._running: tuple[Job, ...] = ()
        self._running_cost_ns = 0
        self._recent: deque[Job] = deque(maxlen=REMEMBERED_DISPATCHES)
        self._window_end_ns = LONG_AGO
        self._window_ns = 0  # best effort's device time in this window
        self._gone = Accounts()  # of lanes that were removed
        self._leaving: list[Source] = []  # removed, but one of their jobs still runs
        self._start, self._expire, self._wait = Start(), Expire(), Wait()
        self.alarms = self._arrivals.alarms
        """(lane, jobs in time among the last k, now_ns) of (m, k) promises just broken; the caller clears it."""
        self.handover_ns = 0
        """When the lanes last came from another executor (0: never); the caller sets it."""

    # --- lanes ---------------------------------------------------------------------------------------------------

    def add_loop(self, lane: int, task: Task) -> None:
        """A loop without a client: it has no releases until `reset` says that one is attached, or it submits."""
        self._refuse_known(lane)
        loop = self._sources[lane] = Loop(lane, task)
        self._order.append(loop)
        self._order.sort(key=lambda entry: (entry.task.criticality, entry.task.order, entry.lane))
        for rank, entry in enumerate(self._order):
            entry.rank = rank
        self._arrivals.rerank()

    def add_queue(self, lane: int, queue: Queue) -> None:
        """A best-effort lane of one client; lanes with a queue of the same name are batched together."""
        self._refuse_known(lane)
        self._sources[lane] = self._best_effort.add(lane, queue)

    def _refuse_known(self, lane: int) -> None:
        if lane in self._sources:
            raise ValueError(f"lane {lane} is known already; remove it first")

    def knows(self, lane: int) -> bool:
        """Whether the lane was added and not removed since."""
        return lane in self._sources

    def attached(self, lane: int) -> bool:
        """Whether a loop has a client, as far as anybody has said or submitted."""
        source = self._sources[lane]
        return source.is_loop and source.attached

    def remove(self, lane: int) -> list[Job]:
        """Forgets a lane; returns its queued jobs, which are counted as dropped. A running one still finishes."""
        source = self._sources[lane]
        dropped = self._drop(source)
        del self._sources[lane]
        if source.is_loop:
            self._order.remove(source)
        else:
            self._best_effort.remove(source)
        self._leaving.append(source)
        self._count_gone()
        return dropped

    def reset(self, lane: int, now_ns: int, attached: bool = True) -> list[Job]:
        """A client came (attached) or went: its predecessor's jobs leave, the arrival history is forgotten."""
        source = self._sources[lane]
        dropped = self._drop(source)
        if source.is_loop:
            source.forget(attached)
            for job in self._running:
                if job.source is source:
                    job.early = False  # its nominal arrival means nothing to the new client
            if attached and source.clock:
                self._arrivals.start_beats(source, now_ns)
        return dropped

    def _drop(self, source: Source) -> list[Job]:
        if source.is_loop:
            jobs = self._arrivals.clear(source)
        else:
            jobs = [entry[3] for entry in source.jobs]
            for job in jobs:
                self._expiries.discard(job)
                self._best_effort.discard(source, job)
        source.dropped += len(jobs)
        return jobs

    # --- events --------------------------------------------------------------------------------------------------

    def submit(self, lane: int, sequence: int, slot: int, release_ns: int, deadline_ns: int, now_ns: int) -> Job:
        """A job is there since release_ns; deadline_ns is its own absolute deadline (0: the loop's, or none).

        For a clock loop it is the newest input, which the next beat takes. KeyError for an unknown lane."""
        source = self._sources[lane]
        job = Job()
        job.source = source
        job.lane = lane
        job.sequence = sequence
        job.slot = slot
        job.release_ns = job.arrival_ns = release_ns
        job.own_deadline_ns = job.deadline_ns = deadline_ns
        job.early = job.stale = job.late = job.overrun = False
        job.started_ns = job.ended_ns = job.away_ns = job.cause = job.cause_detail = 0
        job.latest_start_ns = NEVER
        source.submitted += 1
        if not source.is_loop:
            self._submit_best_effort(source, job)
            return job
        job.cost_ns = source.cost_ns
        if source.clock:
            self._arrivals.new_input(source, job, now_ns)
            return job
        if source.head is not None:
            self._arrivals.join(source, job)
            return job
        source.attached = True
        source.expected_ns = release_ns + source.period_ns
        arrival_ns = release_ns - source.jitter_ns
        if arrival_ns < source.next_ns:
            arrival_ns = source.next_ns
        job.arrival_ns = arrival_ns
        place_ns = arrival_ns + source.deadline_ns
        if deadline_ns == 0 or deadline_ns > place_ns:
            job.deadline_ns = place_ns
        source.head = job
        if source.skip:
            job.latest_start_ns = job.deadline_ns - source.shortest_ns
        if self._expiries.fresh is not None:
            self._expiries.settle()
        self._expiries.fresh = job
        if release_ns >= arrival_ns:
            if self._ready:
                insort(self._ready, (place_ns, source.rank, source))
            else:
                self._ready.append((place_ns, source.rank, source))
        else:
            job.early = True
            source.early += 1
            insort(self._timers, (arrival_ns, source.rank, source))
        return job

    def _submit_best_effort(self, source: BestEffortLane, job: Job) -> None:
        job.cost_ns = source.queue.cost_ns[0]
        if job.deadline_ns:
            job.latest_start_ns = job.deadline_ns - source.shortest_ns
            self._expiries.settle()
            self._expiries.fresh = job
        self._best_effort.push(source, job)

    def cancel(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        """Takes a queued job out; None if it isn't queued (any more)."""
        job = self._take_out(lane, sequence, now_ns)
        if job is not None:
            job.source.cancelled += 1
        return job

    def expired_elsewhere(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        """The executor's watch has answered a queued job as expired during a run; None if it wasn't queued."""
        source = self._sources[lane]
        if source.is_loop and source.clock:
            self._arrivals.beat_of(source, sequence, now_ns)
            answered = self._arrivals.take_answer(source, sequence)
            if answered is not None:
                source.expired += 1  # its beat has counted as missed, or had a newer one
                return answered
        job = self._take_out(lane, sequence, now_ns)
        if job is not None:
            self._count_expired(job, now_ns)
        return job

    def finish(self, now_ns: int, switched_out_ns: int = 0) -> None:
        """The running dispatch has ended; its jobs' ended_ns, late, overrun and cause are set.

        switched_out_ns: how long of it the executor was off its core."""
        jobs = self._running
        if not jobs:
            raise RuntimeError("finish without a running dispatch")
        self._running = ()
        first = jobs[0]
        source = first.source
        overrun = now_ns - first.started_ns > self._running_cost_ns
        first.away_ns = switched_out_ns
        for job in jobs:
            job.ended_ns = now_ns
            job.source.completed += 1
            if overrun:
                job.overrun = True
            if now_ns > job.deadline_ns and job.deadline_ns:
                job.late = True
                job.cause, job.cause_detail = cause_of_miss(
                    job, now_ns, self._recent, None, self.handover_ns, switched_out_ns
                )
        self._recent.append(first)
        if source.is_loop:
            if overrun:
                source.overruns += 1
            if source.k:
                self._arrivals.outcome(source, not first.late, now_ns)
            if first.early and now_ns < first.arrival_ns:
                self._arrivals.not_consumed(source, first.arrival_ns)
        else:
            self._window_ns += now_ns - first.started_ns
        if self._leaving:
            self._count_gone()

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now_ns: int, yielding: bool = False) -> Action:
        """What to do now. `yielding`: the executor has to stay off its core for a while: nothing starts in slack."""
        if self._timers and self._timers[0][0] <= now_ns:
            self._arrivals.due(now_ns)
        if self._answers:
            return self._answer(*self._answers.pop(0))
        fresh = self._expiries.fresh
        if fresh is not None and fresh.latest_start_ns < now_ns:
            self._expiries.settle()
        if self._expiry_entries and self._expiry_entries[0][0] < now_ns:
            return self._expire_job(self._expiry_entries[0][3], now_ns)
        if self._running:
            return self._waiting(now_ns, 0)
        if self._ready:
            return self._start_loop(self._ready.pop(0)[2], now_ns)
        if not yielding and (self._timers or self._backlog):
            if self._start_in_slack(now_ns):
                return self._start
            return self._waiting(now_ns, self._best_effort.hold_until_ns)
        return self._waiting(now_ns, 0)

    def _start_loop(self, loop: Loop, now_ns: int) -> Start:
        """The head of the loop, out of ready and timers already, starts."""
        job = loop.head
        assert job is not None
        if job is self._expiries.fresh:
            self._expiries.fresh = None
        else:
            self._expiries.discard(job)
        job.started_ns = now_ns
        loop.next_ns = job.arrival_ns + loop.period_ns
        if loop.tail:
            self._arrivals.next_head(loop)
        else:
            loop.head = None
        self._running_cost_ns = loop.cost_ns
        start = self._start
        start.jobs = self._running = (job,)
        return start

    def _start_in_slack(self, now_ns: int) -> bool:
        """Starts an early or a best-effort dispatch if one may; rule 4 above."""
        self._best_effort.hold_until_ns = 0
        if self._backlog and self._share_owed(now_ns) and self._start_best_effort(now_ns):
            return True
        further = -1
        timers = self._timers
        admitted_ns = self._max_dispatch_ns
        for index, (_, _, loop) in enumerate(timers):
            cost_ns = loop.cost_ns
            if loop.clock or (cost_ns > admitted_ns and now_ns + cost_ns > self._next_release(now_ns, loop)):
                continue
            if now_ns >= loop.early_again_ns:
                loop.early_again_ns = now_ns + loop.period_ns
                del timers[index]
                self._start_loop(loop, now_ns)
                return True
            if further < 0:
                further = index
        if self._backlog and self._start_best_effort(now_ns):
            return True
        if further >= 0:
            self._start_loop(timers.pop(further)[2], now_ns)
            return True
        return False

    def _start_best_effort(self, now_ns: int) -> bool:
        limit_ns = self._max_dispatch_ns
        if self._best_effort.longest_ns > limit_ns:
            limit_ns = max(limit_ns, self._next_release(now_ns, None) - now_ns)
        jobs = self._best_effort.pick(now_ns, limit_ns)
        if not jobs:
            return False
        cost_ns = jobs[0].source.queue.cost_ns[len(jobs) - 1]
        for job in jobs:
            if job.deadline_ns:
                self._expiries.discard(job)
            job.started_ns = now_ns
            job.cost_ns = cost_ns
        self._running_cost_ns = cost_ns
        self._start.jobs = self._running = jobs
        return True

    def next_release(self, now_ns: int) -> int:
        """The earliest time at which a job of any loop can arrive; now_ns if that is any time, NEVER if none will."""
        return self._next_release(now_ns, None)

    def _next_release(self, now_ns: int, besides: Loop | None) -> int:
        """The earliest time at which a job of any (other) loop can arrive; now_ns if that is any time."""
        earliest_ns = NEVER
        for loop in self._order:
            if not loop.attached or loop is besides:
                continue
            next_ns = loop.next_ns
            if loop.clock:
                next_ns = loop.beat_ns
            elif loop.head is not None:
                next_ns = loop.head.arrival_ns
            if next_ns <= now_ns:
                return now_ns
            if next_ns < earliest_ns:
                earliest_ns = next_ns
        return earliest_ns

    def _share_owed(self, now_ns: int) -> bool:
        """Whether best effort has had less than its share of the window so far."""
        if not self._share_ppm:
            return False
        if now_ns >= self._window_end_ns:
            # Windows begin at fixed times, so that it does not matter who looked first (a recording has fewer looks).
            self._window_end_ns = now_ns - now_ns % SHARE_WINDOW_NS + SHARE_WINDOW_NS
            self._window_ns = 0
        elapsed_ns = now_ns - self._window_end_ns + SHARE_WINDOW_NS
        return self._window_ns * 1_000_000 <= self._share_ppm * elapsed_ns

    def _waiting(self, now_ns: int, hold_until_ns: int) -> Wait:
        if self._expiries.fresh is not None:
            self._expiries.settle()
        until_ns = hold_until_ns or NEVER
        if self._expiry_entries and self._expiry_entries[0][0] < until_ns:
            until_ns = self._expiry_entries[0][0] + 1  # it is certain one nanosecond after the latest start
        if self._timers and self._timers[0][0] < until_ns:
            until_ns = self._timers[0][0]
        spin_ns = NEVER
        wait = self._wait
        if not self._running:
            for loop in self._order:
                if now_ns < loop.expected_ns < spin_ns:
                    spin_ns = loop.expected_ns
                    wait.lane = loop.lane
        wait.until_ns = 0 if until_ns == NEVER else until_ns
        wait.spin_from_ns = 0 if spin_ns == NEVER else spin_ns
        return wait

    # --- leaving without a run -----------------------------------------------------------------------------------

    def _take_out(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        source = self._sources[lane]
        waiting = source.waiting() if source.is_loop else (entry[3] for entry in source.jobs)
        for job in waiting:
            if job.sequence == sequence:
                self._leave(job, now_ns)
                return job
        return None

    def _leave(self, job: Job, now_ns: int) -> None:
        self._expiries.discard(job)
        source: Source = job.source
        if source.is_loop:
            self._arrivals.leave(source, job, now_ns)
        else:
            self._best_effort.discard(source, job)

    def _answer(self, job: Job, status: int) -> Expire:
        """An input of a clock loop that nothing is run for."""
        if status == CANCELLED:
            job.source.cancelled += 1
        elif status == OK:
            job.source.completed += 1
        else:
            job.source.expired += 1
        return self._expired(job, status)

    def _expire_job(self, job: Job, now_ns: int) -> Expire:
        self._leave(job, now_ns)
        self._count_expired(job, now_ns)
        return self._expired(job, EXPIRED)

    def _expired(self, job: Job, status: int) -> Expire:
        action = self._expire
        action.job, action.status = job, status
        action.cause, action.detail = job.cause, job.cause_detail
        return action

    def _count_expired(self, job: Job, now_ns: int) -> None:
        source: Source = job.source
        source.expired += 1
        running = self._running[0] if self._running else None
        job.cause, job.cause_detail = cause_of_miss(job, now_ns, self._recent, running, self.handover_ns)
        if source.is_loop:
            self._arrivals.outcome(source, False, now_ns)

    # --- what is known -------------------------------------------------------------------------------------------

    def next_certain_expiry(self) -> int:
        """ns; the first time at which a queued job is certain to miss its deadline (0: none will)."""
        self._expiries.settle()
        return self._expiry_entries[0][0] + 1 if self._expiry_entries else 0

    def expiries(self) -> Iterator[Job]:
        """Queued jobs that can expire, the first to expire first: what a watch during a long run has to know."""
        self._expiries.settle()
        return (entry[3] for entry in self._expiry_entries)

    def accounts(self, lane: int | None = None) -> Accounts:
        """Jobs of one lane, or of all lanes there ever were, by what became of them."""
        if lane is not None:
            return accounts_of(self._sources[lane], self._running, self._answers)
        total = self._gone
        for source in (*self._sources.values(), *self._leaving):
            total += accounts_of(source, self._running, self._answers)
        return total

    def _count_gone(self) -> None:
        """Folds the counters of removed lanes into the sum, once nothing of theirs runs any more."""
        for source in tuple(self._leaving):
            accounts = accounts_of(source, self._running, self._answers)
            if not accounts.running:
                self._leaving.remove(source)
                self._gone += accounts
