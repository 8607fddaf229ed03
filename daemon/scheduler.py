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

Nominal arrival: a_k = max(r_k - J, a_(k-1) + T). Only the first queued job of a loop has its final a_k, those behind it
an upper bound. A job that leaves the scheduler before its a_k (ran early and ended, was cancelled, expired) consumes
nothing: the next one may have that same a_k. One that leaves later has consumed it, run or not: otherwise its successor
would appear in the middle of a busy period with an earlier deadline than anybody was admitted against. An early job
that is still running at a_k is job k itself, and its demand is in the test: therefore its own loop's next arrival does
not bound how long it may take, only those of the others do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from taktd.daemon import cause as causes
from taktd.daemon.best_effort import BestEffort, BestEffortLane
from taktd.daemon.job import (
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
from taktd.daemon.loop import Loop, first_beat

REMEMBERED_DISPATCHES = 32
"""Past dispatches kept to tell what blocked a job."""

SHARE_WINDOW_NS = 1_000_000_000
"""ns over which best effort's share is kept."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """Jobs by what became of them: submitted = completed + expired + cancelled + dropped + queued + running, always."""

    submitted: int
    completed: int
    expired: int
    cancelled: int
    dropped: int
    queued: int
    running: int

    @property
    def balanced(self) -> bool:
        ended = self.completed + self.expired + self.cancelled + self.dropped
        return self.submitted == ended + self.queued + self.running


class Scheduler:
    """Decides for one device. Actions are reused: they are valid until the next call of `decide`."""

    __slots__ = (
        "_best_effort",
        "_best_effort_lanes",
        "_expire",
        "_expiries",
        "_fresh",
        "_gone",
        "_leaving",
        "_loops",
        "_max_dispatch_ns",
        "_order",
        "_ready",
        "_recent",
        "_running",
        "_running_cost_ns",
        "_share_ppm",
        "_start",
        "_timers",
        "_verdicts",
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
        self._loops: dict[int, Loop] = {}
        self._order: list[Loop] = []
        self._best_effort = BestEffort()
        self._best_effort_lanes = self._best_effort.lanes
        self._ready: list[tuple[int, int, Loop]] = []  # (a_k + D, rank, loop): arrived, by EDF
        self._timers: list[tuple[int, int, Loop]] = []  # (a_k or beat, rank, loop): early jobs and next beats
        self._expiries: list[tuple[int, int, int, Job]] = []  # (latest start, lane, sequence, job)
        self._fresh: Job | None = None  # the newest job, not in _expiries yet: most start before that
        self._verdicts: dict[int, int] = {}  # id(job) -> status, of jobs given up
        self._running: tuple[Job, ...] = ()
        self._running_cost_ns = 0
        self._recent: deque[Job] = deque(maxlen=REMEMBERED_DISPATCHES)
        self._window_end_ns = LONG_AGO
        self._window_ns = 0  # best effort's device time in this window
        self._gone = [0, 0, 0, 0, 0]  # submitted, completed, expired, cancelled, dropped of lanes that were removed
        self._leaving: list[Loop | BestEffortLane] = []  # removed, but one of their jobs runs
        self._start, self._expire, self._wait = Start(), Expire(), Wait()
        self.alarms: list[tuple[int, int, int]] = []
        """(lane, jobs in time among the last k, now_ns) of promises just broken; the caller clears it."""
        self.handover_ns = 0
        """When the lanes last came from another executor (0: never); the caller sets it."""

    # --- lanes ---------------------------------------------------------------------------------------------------

    def add_loop(self, lane: int, task: Task) -> None:
        """A loop without a client: it has no releases until `reset` says one is attached, or it submits."""
        self._refuse_known(lane)
        loop = self._loops[lane] = Loop(lane, task)
        self._order.append(loop)
        self._order.sort(key=lambda entry: (entry.task.criticality, entry.task.order, entry.lane))
        # Ranks are part of the sorted entries: give them anew and sort again where something is queued.
        for rank, entry in enumerate(self._order):
            entry.rank = rank
        self._ready = sorted((key, entry.rank, entry) for key, _, entry in self._ready)
        self._timers = sorted((key, entry.rank, entry) for key, _, entry in self._timers)

    def add_queue(self, lane: int, queue: Queue) -> None:
        """A best-effort lane of one client; lanes with a queue of the same name are batched together."""
        self._refuse_known(lane)
        self._best_effort.add(lane, queue)

    def _refuse_known(self, lane: int) -> None:
        if lane in self._loops or lane in self._best_effort_lanes:
            raise ValueError(f"lane {lane} is known already; remove it first")

    def remove(self, lane: int) -> list[Job]:
        """Forgets a lane; returns its queued jobs, which are counted as dropped. A running one still finishes."""
        loop = self._loops.get(lane)
        if loop is not None:
            dropped = self._drop(loop)
            del self._loops[lane]
            self._order.remove(loop)
            self._leaving.append(loop)
            self._count_gone()
            return dropped
        entry = self._best_effort_lanes[lane]
        dropped = self._drop_queue(entry)
        self._best_effort.remove(lane)
        self._leaving.append(entry)
        self._count_gone()
        return dropped

    def reset(self, lane: int, now_ns: int, attached: bool = True) -> list[Job]:
        """A client came (attached) or went: its predecessor's jobs leave, the arrival history is forgotten."""
        loop = self._loops.get(lane)
        if loop is None:
            return self._drop_queue(self._best_effort_lanes[lane])
        dropped = self._drop(loop)
        loop.forget(attached)
        if attached and loop.clock:
            self._arm(loop, first_beat(loop.task, now_ns))
        return dropped

    # --- events --------------------------------------------------------------------------------------------------

    def submit(self, lane: int, sequence: int, slot: int, release_ns: int, deadline_ns: int, now_ns: int) -> Job:
        """A job is there since release_ns; deadline_ns is its own absolute deadline (0: the loop's, or none).

        For a clock loop it is the newest input, which the next beat takes. KeyError for an unknown lane."""
        loop = self._loops.get(lane)
        if loop is None:
            return self._submit_best_effort(lane, sequence, slot, release_ns, deadline_ns, now_ns)
        job = Job(loop, lane, sequence, slot, release_ns, deadline_ns, now_ns)
        job.cost_ns = loop.cost_ns
        loop.submitted += 1
        if loop.head is not None or loop.clock:
            self._submit_behind(loop, job, now_ns)
            return job
        loop.attached = True
        arrival_ns = release_ns - loop.jitter_ns
        if arrival_ns < loop.next_ns:
            arrival_ns = loop.next_ns
        job.arrival_ns = arrival_ns
        place_ns = arrival_ns + loop.deadline_ns
        if deadline_ns == 0 or deadline_ns > place_ns:
            job.deadline_ns = place_ns
        loop.head = job
        loop.expected_ns = release_ns + loop.period_ns
        if loop.skip:
            job.latest_start_ns = job.deadline_ns - loop.shortest_ns
        fresh = self._fresh
        if fresh is not None:
            self._list(fresh)
        self._fresh = job
        if release_ns >= arrival_ns:
            insort(self._ready, (place_ns, loop.rank, loop))
        else:
            job.early = True
            loop.early += 1
            insort(self._timers, (arrival_ns, loop.rank, loop))
        return job

    def _submit_behind(self, loop: Loop, job: Job, now_ns: int) -> None:
        if loop.clock:
            self._new_input(loop, job, now_ns)
            return
        before = loop.tail[-1] if loop.tail else loop.head
        assert before is not None
        job.arrival_ns = max(job.release_ns - loop.jitter_ns, before.arrival_ns + loop.period_ns)
        loop.judge_by(job)
        loop.tail.append(job)
        loop.expected_ns = job.release_ns + loop.period_ns
        self._list(job)

    def _new_input(self, loop: Loop, job: Job, now_ns: int) -> None:
        """The newest input of a clock loop; an older one that no beat took is given back."""
        if not loop.attached:
            loop.attached = True
            self._arm(loop, first_beat(loop.task, now_ns))
        if loop.input is not None:
            self._give_up(loop.input, CANCELLED)
        loop.input = job
        job.deadline_ns = job.own_deadline_ns

    def _submit_best_effort(
        self, lane: int, sequence: int, slot: int, release_ns: int, deadline_ns: int, now_ns: int
    ) -> Job:
        entry = self._best_effort_lanes[lane]
        job = Job(entry, lane, sequence, slot, release_ns, deadline_ns, now_ns)
        job.cost_ns = entry.queue.cost_ns[0]
        entry.submitted += 1
        if deadline_ns:
            job.latest_start_ns = deadline_ns - entry.shortest_ns
            if self._fresh is not None:
                self._list(self._fresh)
            self._fresh = job
        self._best_effort.push(entry, job)
        return job

    def cancel(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        """Takes a queued job out; None if it isn't queued (any more)."""
        job = self._take_out(lane, sequence, now_ns)
        if job is not None:
            job.source.cancelled += 1
        return job

    def expired_elsewhere(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        """The executor's watch has answered a queued job as expired during a run; None if it wasn't queued."""
        job = self._take_out(lane, sequence, now_ns)
        if job is not None:
            self._count_expired(job, now_ns)
        return job

    def finish(self, now_ns: int, switched_out_ns: int = 0) -> None:
        """The running dispatch has ended; its jobs' ended_ns, late, overrun and cause are set."""
        jobs = self._running
        if not jobs:
            raise RuntimeError("finish without a running dispatch")
        self._running = ()
        first = jobs[0]
        overrun = now_ns - first.started_ns > self._running_cost_ns
        for job in jobs:
            job.ended_ns = now_ns
            source = job.source
            source.running -= 1
            source.completed += 1
            if overrun:
                job.overrun = True
            if job.deadline_ns and now_ns > job.deadline_ns:
                job.late = True
                job.cause, job.cause_detail = causes.cause_of_miss(
                    job, now_ns, self._recent, self.handover_ns, switched_out_ns
                )
        source = first.source
        if source.is_loop:
            if overrun:
                source.overruns += 1
            if source.k:
                self._promise(source, not first.late, now_ns)
            if first.early and now_ns < first.arrival_ns and source.last is first:
                # It ended before its nominal arrival and has consumed nothing: the next one may have that arrival.
                source.next_ns = first.arrival_ns
                if source.head is not None:
                    self._replace_head(source)
        else:
            self._count_share(first.started_ns, now_ns)
        self._recent.append(first)
        if self._leaving:
            self._count_gone()

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now_ns: int, yielding: bool = False) -> Action:
        """What to do now. `yielding`: the executor has to stay off its core for a while: nothing starts in slack."""
        expiries = self._expiries
        if expiries and expiries[0][0] < now_ns:
            return self._expire_job(expiries[0][3], now_ns)
        fresh = self._fresh
        if fresh is not None and fresh.latest_start_ns < now_ns:
            return self._expire_job(fresh, now_ns)
        timers = self._timers
        if timers and timers[0][0] <= now_ns:
            self._due(now_ns)
            return self.decide(now_ns, yielding)
        if self._running:
            return self._waiting(now_ns, 0)
        ready = self._ready
        if ready:
            loop = ready[0][2]
            del ready[0]
            return self._start_loop(loop, now_ns)
        if not yielding and (timers or self._best_effort.backlog):
            if self._start_in_slack(now_ns):
                return self._start
            return self._waiting(now_ns, self._best_effort.hold_until_ns)
        return self._waiting(now_ns, 0)

    def _start_loop(self, loop: Loop, now_ns: int) -> Start:
        """The head of the loop (already out of _ready and _timers) starts."""
        job = loop.head
        assert job is not None
        if job is self._fresh:
            self._fresh = None
        else:
            self._unlist(job)
        job.queued = False
        job.started_ns = now_ns
        loop.last = job
        loop.running = 1
        loop.next_ns = job.arrival_ns + loop.period_ns
        loop.head = None
        if loop.tail:
            self._next_head(loop)
        jobs = self._running = (job,)
        self._running_cost_ns = job.cost_ns
        start = self._start
        start.jobs = jobs
        return start

    def _start_in_slack(self, now_ns: int) -> bool:
        """Starts an early or a best-effort dispatch if one may; rule 4 above."""
        waiting = self._best_effort.backlog
        self._best_effort.hold_until_ns = 0
        if waiting and self._share_owed(now_ns) and self._start_best_effort(now_ns):
            return True
        further: Loop | None = None
        for _, _, loop in self._timers:
            if loop.clock or not self._may_start_early(loop, now_ns):
                continue
            if now_ns < loop.early_again_ns:
                further = further or loop
                continue
            loop.early_again_ns = now_ns + loop.period_ns
            self._start_early(loop, now_ns)
            return True
        if waiting and self._start_best_effort(now_ns):
            return True
        if further is not None:
            self._start_early(further, now_ns)
            return True
        return False

    def _may_start_early(self, loop: Loop, now_ns: int) -> bool:
        cost_ns = loop.cost_ns
        return cost_ns <= self._max_dispatch_ns or now_ns + cost_ns <= self._next_release(now_ns, loop)

    def _start_early(self, loop: Loop, now_ns: int) -> None:
        assert loop.head is not None
        self._remove_entry(self._timers, loop.head.arrival_ns, loop)
        self._start_loop(loop, now_ns)

    def _start_best_effort(self, now_ns: int) -> bool:
        best_effort = self._best_effort
        limit_ns = self._max_dispatch_ns
        if best_effort.longest_ns > limit_ns:
            limit_ns = max(limit_ns, self._next_release(now_ns, None) - now_ns)
        jobs = best_effort.pick(now_ns, limit_ns)
        if not jobs:
            return False
        for job in jobs:
            if job.latest_start_ns != NEVER:
                self._unlist(job)
            job.queued = False
            job.started_ns = now_ns
            job.source.running += 1
        self._running = self._start.jobs = jobs
        self._running_cost_ns = jobs[0].source.queue.cost_ns[len(jobs) - 1]
        if len(jobs) > 1:
            for job in jobs:
                job.cost_ns = self._running_cost_ns
        return True

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
            self._window_end_ns = now_ns + SHARE_WINDOW_NS
            self._window_ns = 0
        elapsed_ns = now_ns - self._window_end_ns + SHARE_WINDOW_NS
        return self._window_ns * 1_000_000 <= self._share_ppm * elapsed_ns

    def _count_share(self, started_ns: int, ended_ns: int) -> None:
        self._window_ns += ended_ns - started_ns

    def _waiting(self, now_ns: int, hold_until_ns: int) -> Wait:
        fresh = self._fresh
        if fresh is not None:
            self._list(fresh)
            self._fresh = None
        until_ns = hold_until_ns or NEVER
        if self._expiries and self._expiries[0][0] < until_ns:
            until_ns = self._expiries[0][0] + 1  # it is certain one nanosecond after the latest start
        if self._timers and self._timers[0][0] < until_ns:
            until_ns = self._timers[0][0]
        spin_ns = NEVER
        for loop in self._order:
            if now_ns < loop.expected_ns < spin_ns:
                spin_ns = loop.expected_ns
        wait = self._wait
        wait.until_ns = 0 if until_ns == NEVER else until_ns
        wait.spin_from_ns = 0 if spin_ns == NEVER else spin_ns
        return wait

    # --- arrivals ------------------------------------------------------------------------------------------------

    def _due(self, now_ns: int) -> None:
        """The first timer has come: an early job arrives, or a beat."""
        _, _, loop = self._timers.pop(0)
        if loop.clock:
            self._beat(loop, now_ns)
        elif loop.head is not None:
            insort(self._ready, (loop.head.arrival_ns + loop.deadline_ns, loop.rank, loop))

    def _beat(self, loop: Loop, now_ns: int) -> None:
        """The beat that holds now; beats before it that nobody could see come are missed."""
        task = loop.task
        missed = (now_ns - loop.beat_ns) // task.period_ns
        beat_ns = loop.beat_ns + missed * task.period_ns
        self._arm(loop, beat_ns + task.period_ns)
        for _ in range(min(missed, task.k)):
            self._promise(loop, False, now_ns)
        loop.missed_beats += missed
        if loop.head is not None:  # on_late: run, and it has not run yet: this beat is lost
            loop.missed_beats += 1
            self._promise(loop, False, now_ns)
            return
        job = loop.input
        stale = job is None or (task.max_age_ns > 0 and beat_ns - job.release_ns > task.max_age_ns)
        if stale:
            loop.stale += 1
        if job is None or (stale and task.on_stale != "run"):
            self._promise(loop, False, now_ns)
            if job is not None:
                job.cause = causes.STALE_INPUT
                self._give_up(job, OK if task.on_stale == "hold" else EXPIRED)
                loop.input = None
            return
        loop.input = None
        job.stale = stale
        job.arrival_ns = beat_ns
        loop.judge_by(job)
        loop.head = job
        insort(self._ready, (beat_ns + loop.deadline_ns, loop.rank, loop))
        self._list(job)

    def _arm(self, loop: Loop, beat_ns: int) -> None:
        loop.beat_ns = loop.expected_ns = beat_ns
        insort(self._timers, (beat_ns, loop.rank, loop))

    def _next_head(self, loop: Loop) -> None:
        """The first of the tail becomes the head; now its nominal arrival is final, but see _replace_head."""
        job = loop.tail.popleft()
        self._unlist(job)
        loop.head = job
        self._place_head(loop)

    def _replace_head(self, loop: Loop) -> None:
        assert loop.head is not None
        self._unplace_head(loop)
        self._unlist(loop.head)
        self._place_head(loop)

    def _place_head(self, loop: Loop) -> None:
        job = loop.head
        assert job is not None
        job.arrival_ns = max(job.release_ns - loop.jitter_ns, loop.next_ns)
        loop.judge_by(job)
        self._list(job)
        early = job.release_ns < job.arrival_ns
        if early != job.early:
            job.early = early
            loop.early += 1 if early else -1
        if early:
            insort(self._timers, (job.arrival_ns, loop.rank, loop))
        else:
            insort(self._ready, (job.arrival_ns + loop.deadline_ns, loop.rank, loop))

    def _unplace_head(self, loop: Loop) -> None:
        assert loop.head is not None
        arrival_ns = loop.head.arrival_ns
        if not self._remove_entry(self._ready, arrival_ns + loop.deadline_ns, loop):
            self._remove_entry(self._timers, arrival_ns, loop)

    @staticmethod
    def _remove_entry(entries: list[tuple[int, int, Loop]], key_ns: int, loop: Loop) -> bool:
        index = bisect_left(entries, (key_ns, loop.rank))
        if index < len(entries) and entries[index][2] is loop and entries[index][0] == key_ns:
            del entries[index]
            return True
        return False

    # --- leaving -------------------------------------------------------------------------------------------------

    def _list(self, job: Job) -> None:
        if job is self._fresh:
            self._fresh = None
        if job.latest_start_ns != NEVER:
            insort(self._expiries, (job.latest_start_ns, job.lane, job.sequence, job))

    def _unlist(self, job: Job) -> None:
        if job is self._fresh:
            self._fresh = None
            return
        if job.latest_start_ns == NEVER:
            return
        index = bisect_left(self._expiries, (job.latest_start_ns, job.lane, job.sequence))
        if index < len(self._expiries) and self._expiries[index][3] is job:
            del self._expiries[index]

    def _leave_loop(self, loop: Loop, job: Job, now_ns: int) -> None:
        """A queued job of a loop leaves without having run."""
        if job is loop.input:
            loop.input = None
        elif job is not loop.head:
            loop.tail.remove(job)
        else:
            self._unplace_head(loop)
            if now_ns >= job.arrival_ns:
                loop.next_ns = job.arrival_ns + loop.period_ns
            loop.head = None
            if loop.tail:
                self._next_head(loop)

    def _take_out(self, lane: int, sequence: int, now_ns: int) -> Job | None:
        loop = self._loops.get(lane)
        if loop is None:
            entry = self._best_effort_lanes[lane]
            for _, number, job in entry.jobs:
                if number == sequence:
                    self._best_effort.discard(entry, job)
                    break
            else:
                return None
        else:
            for job in loop.waiting():
                if job.sequence == sequence:
                    self._leave_loop(loop, job, now_ns)
                    break
            else:
                return None
        self._unlist(job)
        job.queued = False
        return job

    def _give_up(self, job: Job, status: int) -> None:
        """The next decide() answers this job with this status, whatever the time."""
        self._unlist(job)
        self._verdicts[id(job)] = status
        job.latest_start_ns = LONG_AGO
        self._list(job)

    def _expire_job(self, job: Job, now_ns: int) -> Expire:
        self._unlist(job)
        job.queued = False
        source = job.source
        action = self._expire
        action.job = job
        action.status = EXPIRED
        if job.latest_start_ns == LONG_AGO:
            action.status = self._verdicts.pop(id(job))
            if action.status == CANCELLED:
                source.cancelled += 1
            elif action.status == OK:
                source.completed += 1
            else:
                source.expired += 1
        else:
            if source.is_loop:
                self._leave_loop(source, job, now_ns)
            else:
                self._best_effort.discard(source, job)
            self._count_expired(job, now_ns)
        action.cause, action.detail = job.cause, job.cause_detail
        return action

    def _count_expired(self, job: Job, now_ns: int) -> None:
        source = job.source
        source.expired += 1
        job.cause, job.cause_detail = causes.cause_of_miss(
            job, now_ns, (*self._recent, *self._running[:1]), self.handover_ns
        )
        if source.is_loop and source.k:
            self._promise(source, False, now_ns)

    def _promise(self, loop: Loop, kept: bool, now_ns: int) -> None:
        if loop.k and loop.remember(kept):
            self.alarms.append((loop.lane, loop.kept(), now_ns))

    def _drop(self, loop: Loop) -> list[Job]:
        jobs = list(loop.waiting())
        for job in jobs:
            self._unlist(job)
            job.queued = False
        answered = [entry[3] for entry in self._expiries if entry[3].source is loop]
        for job in answered:  # given up, but not yet answered
            self._unlist(job)
            del self._verdicts[id(job)]
            job.queued = False
        loop.dropped += len(jobs) + len(answered)
        if loop.head is not None:
            self._unplace_head(loop)
        if loop.clock:
            self._remove_entry(self._timers, loop.beat_ns, loop)
        loop.head = loop.input = None
        loop.tail.clear()
        return answered + jobs

    def _drop_queue(self, entry: BestEffortLane) -> list[Job]:
        jobs = [job for _, _, job in entry.jobs]
        for job in jobs:
            self._unlist(job)
            job.queued = False
            self._best_effort.discard(entry, job)
        entry.dropped += len(jobs)
        return jobs

    # --- what is known -------------------------------------------------------------------------------------------

    def next_certain_expiry(self) -> int:
        """ns; the first time at which a queued job is certain to miss its deadline (0: none will)."""
        if self._fresh is not None:
            self._list(self._fresh)
        return self._expiries[0][0] + 1 if self._expiries else 0

    def expiries(self) -> Iterator[Job]:
        """Queued jobs that can expire, the first to expire first: what a watch during a long run has to know."""
        if self._fresh is not None:
            self._list(self._fresh)
        return (entry[3] for entry in self._expiries if entry[0] != LONG_AGO)

    def _count_gone(self) -> None:
        """Folds the counters of removed lanes into the sums, once nothing of theirs runs any more."""
        for source in [source for source in self._leaving if not source.running]:
            self._leaving.remove(source)
            counts = (source.submitted, source.completed, source.expired, source.cancelled, source.dropped)
            for index, count in enumerate(counts):
                self._gone[index] += count

    def accounts(self, lane: int | None = None) -> Accounts:
        """Jobs of one lane, or of all lanes there ever were, by what became of them."""
        if lane is not None:
            return self._accounts_of(self._loops.get(lane) or self._best_effort_lanes[lane])
        sums = [*self._gone, 0, 0]
        sources: list[Loop | BestEffortLane] = [*self._order, *self._best_effort_lanes.values(), *self._leaving]
        for source in sources:
            one = self._accounts_of(source)
            values = (one.submitted, one.completed, one.expired, one.cancelled, one.dropped, one.queued, one.running)
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        return Accounts(*sums)

    def _accounts_of(self, source: Loop | BestEffortLane) -> Accounts:
        given_up = sum(1 for entry in self._expiries if entry[0] == LONG_AGO and entry[3].source is source)
        queued = given_up + (sum(1 for _ in source.waiting()) if isinstance(source, Loop) else len(source.jobs))
        return Accounts(
            source.submitted,
            source.completed,
            source.expired,
            source.cancelled,
            source.dropped,
            queued,
            source.running,
        )
