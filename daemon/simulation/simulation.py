"""The schedule under virtual time: the very scheduler object of the executor, with drawn arrivals and execution times.

Two levels. `simulate` takes every release and execution time from its caller and says what became of each job: it is
the reference for admission. `rehearse` draws them from a seed for some virtual seconds and sums up: it is what
`taktctl simulate` shows. Same arguments, same result, to the last byte; nothing here reads a clock. Times in ns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from random import Random
from typing import Any

from taktd.daemon.schedule.job import EXPIRE, NEVER, OK, START, Job, Queue, Task
from taktd.daemon.scheduler import Scheduler
from taktd.daemon.simulation.histogram import Histogram

Release = tuple[int, int, int]
"""(time, lane, the job's own absolute deadline or 0)"""

PPM = 1_000_000
SPORADIC_PPM = 10_000
"""One release in a hundred comes later than the period asks for, by up to one period."""

EPOCH_NS = 1_000_000_000
"""Virtual time starts here, so that nothing depends on zero."""


@dataclass(frozen=True, slots=True)
class Response:
    """What became of one job. started_ns and ended_ns are 0 where it did not run; status as on the wire.

    response_ns counts from the nominal arrival, as deadlines do (negative: an early job that ended before it)."""

    lane: int
    sequence: int
    release_ns: int
    arrival_ns: int
    started_ns: int
    ended_ns: int
    deadline_ns: int
    status: int
    early: bool
    cause: int

    @property
    def missed(self) -> bool:
        return self.status != OK or (self.deadline_ns > 0 and self.ended_ns > self.deadline_ns)

    @property
    def response_ns(self) -> int:
        return self.ended_ns - self.arrival_ns


def drive(
    scheduler: Scheduler,
    releases: Iterator[Release],
    execution_ns: Callable[[tuple[Job, ...]], int],
    ended: Callable[[Job, int], None],
    started: Callable[[tuple[Job, ...]], None] | None = None,
    until_ns: int = NEVER,
) -> int:
    """Runs the scheduler until all is done or until_ns; returns the time of the last event.

    releases: sorted by time. execution_ns: how long a dispatch takes. ended: told each job once, with its status.
    At one instant a dispatch ends first, then jobs are released, then decisions are made.
    """
    submit, decide = scheduler.submit, scheduler.decide
    sequences: dict[int, int] = {}
    release_ns, lane, deadline_ns = next(releases, (NEVER, 0, 0))
    running: tuple[Job, ...] = ()
    end_ns = wake_ns = NEVER
    now_ns = 0
    while True:
        next_ns = end_ns if end_ns < wake_ns else wake_ns
        if release_ns < next_ns:
            next_ns = release_ns
        if next_ns >= until_ns:
            return now_ns
        now_ns = next_ns
        if end_ns == now_ns:
            scheduler.finish(now_ns)
            for job in running:
                ended(job, OK)
            running, end_ns = (), NEVER
        while release_ns == now_ns:
            sequence = sequences[lane] = sequences.get(lane, 0) + 1
            submit(lane, sequence, 0, release_ns, deadline_ns, now_ns)
            release_ns, lane, deadline_ns = next(releases, (NEVER, 0, 0))
        while True:
            action = decide(now_ns)
            kind = action.kind
            if kind == START:
                running = action.jobs  # type: ignore[union-attr]
                end_ns = now_ns + execution_ns(running)
                if started is not None:
                    started(running)
            elif kind == EXPIRE:
                ended(action.job, action.status)  # type: ignore[union-attr, arg-type]
            else:
                wake_ns = action.until_ns or NEVER  # type: ignore[union-attr]
                break


def simulate(
    tasks: Sequence[Task],
    releases: Sequence[Sequence[int]],
    executions: Sequence[Sequence[int]] | None = None,
    *,
    max_dispatch_ns: int = 0,
    share_ppm: int = 0,
    queues: Sequence[Queue] = (),
    queue_releases: Sequence[Sequence[tuple[int, int]]] = (),
    queue_executions: Sequence[Sequence[int]] | None = None,
) -> list[Response]:
    """What becomes of each job, in the order in which they end.

    releases[i]: release times of task i, ascending. executions[i][k]: execution time of its k-th job; default its cost.
    queue_releases[j]: (release, own absolute deadline or 0) of queue j's jobs, ascending; a batch takes as long as its
    longest member's execution or, by default, as its cost table says. Lanes: tasks first, then queues.
    Note that a task's admitted releases are those with r_k in [a_k, a_k + jitter]; others come early and run in slack.
    Clock-triggered tasks: releases are the times of their inputs. Until nothing is queued and no release is left.
    """
    scheduler = Scheduler(max_dispatch_ns, share_ppm)
    first_ns = min((times[0] for times in releases if times), default=0)
    for lane, task in enumerate(tasks):
        scheduler.add_loop(lane, task)
        scheduler.reset(lane, first_ns)
    for index, queue in enumerate(queues):
        scheduler.add_queue(len(tasks) + index, queue)
    lists: list[list[Release]] = [[(time, lane, 0) for time in times] for lane, times in enumerate(releases)]
    lists += [[(t, len(tasks) + j, deadline) for t, deadline in pairs] for j, pairs in enumerate(queue_releases)]
    every = sorted((release for each in lists for release in each), key=lambda release: release[:2])
    known = dict(enumerate(executions or ())) | {len(tasks) + j: each for j, each in enumerate(queue_executions or ())}

    def execution_ns(jobs: tuple[Job, ...]) -> int:
        if jobs[0].lane not in known:
            return jobs[0].cost_ns
        return max(known[job.lane][job.sequence - 1] for job in jobs)

    responses: list[Response] = []

    def ended(job: Job, status: int) -> None:
        responses.append(
            Response(
                job.lane, job.sequence, job.release_ns, job.arrival_ns, job.started_ns, job.ended_ns,
                job.deadline_ns, status, job.early, job.cause,
            )
        )  # fmt: skip

    clocks = any(task.clock for task in tasks)
    last_ns = every[-1][0] if every else 0
    # Beats never end; without them everything ends by itself.
    until_ns = last_ns + 2 * max(task.period_ns + task.deadline_ns for task in tasks) if clocks else NEVER
    drive(scheduler, iter(every), execution_ns, ended, until_ns=until_ns)
    return responses


# --- drawn from a seed -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Distribution:
    """Execution times by percentile: ascending (ppm, ns) from (0, least) to (1_000_000, most); linear in between."""

    table: tuple[tuple[int, int], ...]

    def draw_ns(self, random: Random) -> int:
        """Integers only: the same seed gives the same times on every machine."""
        ppm = random.getrandbits(32) * PPM >> 32
        low_ppm, low_ns = self.table[0]
        for high_ppm, high_ns in self.table[1:]:
            if ppm < high_ppm:
                return low_ns + (high_ns - low_ns) * (ppm - low_ppm) // (high_ppm - low_ppm)
            low_ppm, low_ns = high_ppm, high_ns
        return low_ns


@dataclass(frozen=True, slots=True)
class Workload:
    """One device's load. distributions[i] belongs to tasks[i], None: always its cost (the worst).

    best_effort_hz: jobs per second, spread over the queues in turn, at random distances."""

    tasks: tuple[Task, ...]
    distributions: tuple[Distribution | None, ...] = ()
    queues: tuple[Queue, ...] = ()
    best_effort_hz: int = 0
    max_dispatch_ns: int = 0
    share_ppm: int = 0
    sporadic_ppm: int = SPORADIC_PPM


@dataclass(slots=True)
class LaneTally:
    name: str
    deadline_ns: int
    released: int = 0
    completed: int = 0
    expired: int = 0
    late: int = 0
    early: int = 0
    other: int = 0
    busy_ns: int = 0
    response: Histogram = field(default_factory=Histogram)

    def as_json(self, span_ns: int) -> dict[str, Any]:
        percentile = self.response.percentile
        return {
            "name": self.name,
            "deadline_ns": self.deadline_ns,
            "jobs": self.completed + self.expired + self.other,
            "completed": self.completed,
            "expired": self.expired,
            "late": self.late,
            "misses": self.expired + self.late,
            "early": self.early,
            "utilization_ppm": self.busy_ns * PPM // span_ns,
            "response_ns": {
                "p50": percentile(500_000),
                "p90": percentile(900_000),
                "p99": percentile(990_000),
                "p999": percentile(999_000),
                "max": self.response.largest,
            },
        }


class _Rehearsal:
    """The run of one workload: draws, and tallies what it is told."""

    def __init__(self, workload: Workload, seed: int, span_ns: int, observe: Callable[[Job, int], None] | None) -> None:
        self.workload, self.span_ns, self.observe = workload, span_ns, observe
        self.arrivals_random, self.execution_random = Random(seed), Random(seed ^ 0x7461_6B74)
        tasks, queues = workload.tasks, workload.queues
        self.tallies = [LaneTally(task.name, task.deadline_ns) for task in tasks]
        self.tallies += [LaneTally(queue.name, 0) for queue in queues]
        self.distributions = (*workload.distributions, *[None] * (len(tasks) + len(queues)))[: len(self.tallies)]
        self.scheduler = Scheduler(workload.max_dispatch_ns, workload.share_ppm)
        for lane, task in enumerate(tasks):
            self.scheduler.add_loop(lane, task)
            self.scheduler.reset(lane, EPOCH_NS)
        for index, queue in enumerate(queues):
            self.scheduler.add_queue(len(tasks) + index, queue)

    def releases(self) -> Iterator[Release]:
        """All lanes' releases in order of time, each lane's next drawn when its last is due."""
        draw = self.arrivals_random.getrandbits
        workload, tasks = self.workload, self.workload.tasks
        arrivals = [EPOCH_NS + (draw(32) * task.period_ns >> 32) for task in tasks]
        last = [0] * len(tasks)
        hz = workload.best_effort_hz
        queues = len(workload.queues)
        distance_ns = 2 * queues * 1_000_000_000 // hz if hz and queues else 0
        heap: list[Release] = [(time, lane, 0) for lane, time in enumerate(arrivals)]
        if distance_ns:
            first = len(tasks)
            heap += [(EPOCH_NS + (draw(32) * distance_ns >> 32), first + index, 0) for index in range(queues)]
        heapify(heap)
        while heap:
            release = heap[0]
            yield release
            now_ns, lane, _ = release
            if lane >= len(tasks):
                heapreplace(heap, (now_ns + 1 + (draw(32) * distance_ns >> 32), lane, 0))
                continue
            task = tasks[lane]
            arrival_ns = arrivals[lane] + task.period_ns
            if workload.sporadic_ppm and draw(32) * PPM >> 32 < workload.sporadic_ppm:
                arrival_ns += draw(32) * task.period_ns >> 32
            arrivals[lane] = arrival_ns
            next_ns = arrival_ns + (draw(32) * (task.jitter_ns + 1) >> 32 if task.jitter_ns else 0)
            last[lane] = max(next_ns, last[lane])  # jobs of one loop are submitted in their order
            heapreplace(heap, (last[lane], lane, 0))

    def execution_ns(self, jobs: tuple[Job, ...]) -> int:
        lane = jobs[0].lane
        distribution = self.distributions[lane]
        time_ns = jobs[0].cost_ns if distribution is None else distribution.draw_ns(self.execution_random)
        self.tallies[lane].busy_ns += time_ns
        return time_ns

    def ended(self, job: Job, status: int) -> None:
        if self.observe is not None:
            self.observe(job, status)
        tally = self.tallies[job.lane]
        if job.early:
            tally.early += 1
        if status == OK and job.ended_ns:
            tally.completed += 1
            tally.response.add(job.ended_ns - job.arrival_ns)
            if job.late:
                tally.late += 1
        elif status == OK or job.deadline_ns == 0:
            tally.other += 1
        else:
            tally.expired += 1

    def run(self) -> None:
        drive(self.scheduler, self.releases(), self.execution_ns, self.ended, until_ns=EPOCH_NS + self.span_ns)


def rehearse(
    workload: Workload, span_ns: int, seed: int, observe: Callable[[Job, int], None] | None = None
) -> dict[str, Any]:
    """Simulates span_ns of virtual time; a JSON object that depends on nothing but the arguments.

    observe: told each job that ended, with its status. Raises ValueError for a span that is not positive."""
    if span_ns <= 0:
        raise ValueError(f"span_ns: {span_ns} is not a span of time; it must be positive")
    rehearsal = _Rehearsal(workload, seed, span_ns, observe)
    rehearsal.run()
    count = len(workload.tasks)
    loops = [tally.as_json(span_ns) for tally in rehearsal.tallies[:count]]
    best_effort = [tally.as_json(span_ns) for tally in rehearsal.tallies[count:]]
    accounts = rehearsal.scheduler.accounts()
    return {
        "span_ns": span_ns,
        "jobs": accounts.submitted,
        "misses": sum(loop["misses"] for loop in loops),
        "utilization_ppm": _sum(loops, "utilization_ppm") + _sum(best_effort, "utilization_ppm"),
        "queued_at_end": accounts.queued + accounts.running,
        "loops": loops,
        "best_effort": best_effort,
    }


def _sum(rows: Iterable[dict[str, Any]], key: str) -> int:
    return sum(int(row[key]) for row in rows)
