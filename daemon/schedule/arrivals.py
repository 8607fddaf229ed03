"""When the loops' jobs arrive: nominal arrivals, early jobs, and the beats of clock-triggered loops.

Nominal arrival: a_k = max(r_k - J, a_(k-1) + T). Only the first queued job of a loop has its final a_k, those behind it
an upper bound. A job that leaves before its a_k (ran early and ended, was cancelled, expired) consumes nothing: the
next may have that same a_k. One that leaves later has consumed it, run or not: otherwise its successor would appear in
the middle of a busy period with an earlier deadline than anybody was admitted against.

What it is not: it doesn't decide what runs; scheduler.py does and is the only caller. All times in ns.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from taktd.daemon.schedule.cause import STALE_INPUT
from taktd.daemon.schedule.expiry import Expiries
from taktd.daemon.schedule.job import CANCELLED, EXPIRED, OK, Job
from taktd.daemon.schedule.loop import Loop, first_beat

Entry = tuple[int, int, Loop]
"""(time, rank, loop): ranks are unique, so the loop itself is never compared."""


class Arrivals:
    """ready: (a_k + D, rank, loop) of loops whose first job has arrived; timers: (a_k or beat, rank, loop) of early
    first jobs and of coming beats; answers: inputs of clock loops that are answered without a run, with the status."""

    __slots__ = ("alarms", "answers", "expiries", "ready", "timers")

    def __init__(self, expiries: Expiries) -> None:
        self.expiries = expiries
        self.ready: list[Entry] = []
        self.timers: list[Entry] = []
        self.answers: list[tuple[Job, int]] = []
        self.alarms: list[tuple[int, int, int]] = []

    def rerank(self) -> None:
        """The loops' ranks have changed."""
        for entries in (self.ready, self.timers):
            entries[:] = sorted((time_ns, loop.rank, loop) for time_ns, _, loop in entries)

    # --- first jobs ----------------------------------------------------------------------------------------------

    def join(self, loop: Loop, job: Job) -> None:
        """A job queues behind others of its loop."""
        before = loop.tail[-1] if loop.tail else loop.head
        assert before is not None
        job.arrival_ns = max(job.release_ns - loop.jitter_ns, before.arrival_ns + loop.period_ns)
        loop.judge_by(job)
        loop.tail.append(job)
        loop.expected_ns = job.release_ns + loop.period_ns
        self.expiries.add(job)

    def next_head(self, loop: Loop) -> None:
        """The first of the tail, if any, becomes the head; loop.next_ns is final by now (but see not_consumed)."""
        loop.head = None
        if loop.tail:
            job = loop.tail.popleft()
            self.expiries.discard(job)
            loop.head = job
            self._place(loop, job)

    def not_consumed(self, loop: Loop, arrival_ns: int) -> None:
        """The job that had this nominal arrival ran early and has ended before it."""
        loop.next_ns = arrival_ns
        job = loop.head
        if job is not None:
            self.unplace(loop, job)
            self.expiries.discard(job)
            self._place(loop, job)

    def leave(self, loop: Loop, job: Job, now_ns: int) -> None:
        """A queued job goes without having run (the caller takes it out of the expiries)."""
        if job is loop.input:
            loop.input = None
        elif job is not loop.head:
            loop.tail.remove(job)
        else:
            self.unplace(loop, job)
            if now_ns >= job.arrival_ns:
                loop.next_ns = job.arrival_ns + loop.period_ns
            self.next_head(loop)

    def clear(self, loop: Loop) -> list[Job]:
        """Takes all jobs of a loop out, its beat too; returns them."""
        jobs = [job for job, _ in self.answers if job.source is loop]
        self.answers[:] = [answer for answer in self.answers if answer[0].source is not loop]
        for job in loop.waiting():
            self.expiries.discard(job)
            jobs.append(job)
        if loop.head is not None:
            self.unplace(loop, loop.head)
        if loop.clock:
            self._remove(self.timers, loop.beat_ns, loop)
        loop.head = loop.input = None
        loop.tail.clear()
        return jobs

    def _place(self, loop: Loop, job: Job) -> None:
        job.arrival_ns = max(job.release_ns - loop.jitter_ns, loop.next_ns)
        loop.judge_by(job)
        self.expiries.add(job)
        early = job.release_ns < job.arrival_ns
        if early != job.early:
            job.early = early
            loop.early += 1 if early else -1
        if early:
            insort(self.timers, (job.arrival_ns, loop.rank, loop))
        else:
            insort(self.ready, (job.arrival_ns + loop.deadline_ns, loop.rank, loop))

    def unplace(self, loop: Loop, job: Job) -> None:
        """The head is no longer in ready or timers."""
        if not self._remove(self.ready, job.arrival_ns + loop.deadline_ns, loop):
            self._remove(self.timers, job.arrival_ns, loop)

    @staticmethod
    def _remove(entries: list[Entry], time_ns: int, loop: Loop) -> bool:
        index = bisect_left(entries, (time_ns, loop.rank))
        if index < len(entries) and entries[index][2] is loop and entries[index][0] == time_ns:
            del entries[index]
            return True
        return False

    # --- time passes ---------------------------------------------------------------------------------------------

    def due(self, now_ns: int) -> None:
        """Everything whose time has come: early jobs arrive, beats hold."""
        timers = self.timers
        while timers and timers[0][0] <= now_ns:
            _, rank, loop = timers.pop(0)
            if loop.clock:
                self._beat(loop, now_ns)
            elif loop.head is not None:
                insort(self.ready, (loop.head.arrival_ns + loop.deadline_ns, rank, loop))

    # --- clock-triggered loops -----------------------------------------------------------------------------------

    def start_beats(self, loop: Loop, now_ns: int) -> None:
        self._arm(loop, first_beat(loop.task, now_ns))

    def new_input(self, loop: Loop, job: Job, now_ns: int) -> None:
        """The newest input of a clock loop; an older one that no beat took is given back."""
        if not loop.attached:
            loop.attached = True
            self.start_beats(loop, now_ns)
        if loop.input is not None:
            self.answers.append((loop.input, CANCELLED))
        loop.input = job
        if loop.skip:
            # For the watch only: at the beat it gets a deadline like any job.
            job.latest_start_ns = first_beat(loop.task, job.release_ns) + loop.deadline_ns - loop.shortest_ns

    def beat_of(self, loop: Loop, sequence: int, now_ns: int) -> None:
        """The beat that the newest input was for has passed during a run, if it is that one: it held nevertheless."""
        if loop.input is not None and loop.input.sequence == sequence:
            self.due(min(now_ns, first_beat(loop.task, loop.input.release_ns)))

    def take_answer(self, loop: Loop, sequence: int) -> Job | None:
        """An input that no run is for any more and that was not answered yet: somebody else has done it."""
        for index, (job, _) in enumerate(self.answers):
            if job.source is loop and job.sequence == sequence:
                return self.answers.pop(index)[0]
        return None

    def _arm(self, loop: Loop, beat_ns: int) -> None:
        loop.beat_ns = loop.expected_ns = beat_ns
        insort(self.timers, (beat_ns, loop.rank, loop))

    def _beat(self, loop: Loop, now_ns: int) -> None:
        """The beat that holds now; those before it that nobody was awake for are missed: their deadlines are past."""
        task = loop.task
        missed = (now_ns - loop.beat_ns) // task.period_ns
        beat_ns = loop.beat_ns + missed * task.period_ns
        self._arm(loop, beat_ns + task.period_ns)
        if loop.head is not None:
            missed += 1  # with on_late: run the job of an earlier beat still waits; this beat has none
        loop.missed_beats += missed
        for _ in range(min(missed, task.k)):
            self.outcome(loop, False, now_ns)
        if loop.head is not None:
            return
        job = loop.input
        loop.input = None
        stale = job is None or (task.max_age_ns > 0 and beat_ns - job.release_ns > task.max_age_ns)
        if stale:
            loop.stale += 1
        if job is None or (stale and task.on_stale != "run"):
            self.outcome(loop, False, now_ns)
            if job is not None:
                job.cause = STALE_INPUT
                self.answers.append((job, OK if task.on_stale == "hold" else EXPIRED))
            return
        job.stale = stale
        job.arrival_ns = beat_ns
        loop.judge_by(job)
        loop.head = job
        insort(self.ready, (beat_ns + loop.deadline_ns, loop.rank, loop))
        self.expiries.add(job)

    # --- promises ------------------------------------------------------------------------------------------------

    def outcome(self, loop: Loop, in_time: bool, now_ns: int) -> None:
        """One more job (or beat) of an (m, k)-firm loop was in time or not."""
        if loop.remember(in_time):
            self.alarms.append((loop.lane, loop.kept(), now_ns))
