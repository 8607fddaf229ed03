"""What one client of a lane sees: round trips through it and, interleaved, the same model called directly.

Called by `taktctl bench` and `bench/run.py`. It is a client like any other and runs in the caller's process; the direct
calls share its core, its rights and its seconds, in short blocks by turns, so that both meet the same machine.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from taktd.daemon.direct import Direct, fill_with_noise
from taktd.ipc import Lane

__all__ = [
    "Load", "Outcome", "Pace", "bench_lane", "quantiles", "read_rights", "take_core_and_priority", "time_direct",
    "without_gc",
]  # fmt: skip

BLOCK_NS: Final = 50_000_000
"""One turn of lane or direct calls; of a paced bench whole periods, four or more."""
WARM_JOBS: Final = 50
TIMEOUT_US: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True)
class Load:
    """How hard to ask. `period_ns` 0: closed loop, the next job as soon as the last one has answered."""

    seconds: float
    period_ns: int = 0


@dataclass
class Outcome:
    """Counts of jobs, and client-side round trips in ns: from before submit to after the reply, answered jobs only."""

    jobs: int = 0
    late: int = 0
    early: int = 0
    failed: int = 0
    missed: int = 0
    """Beats that went by while the job before them was out, or this process was kept from running."""
    lane_ns: array[int] = field(default_factory=lambda: array("q"))
    direct_ns: array[int] = field(default_factory=lambda: array("q"))
    lane_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        rate = self.jobs / self.lane_s if self.lane_s else 0.0
        found: dict[str, Any] = {"jobs": self.jobs, "late": self.late, "early": self.early, "failed": self.failed}
        found |= {"missed": self.missed, **quantiles(self.lane_ns), "rate_hz": round(rate, 1)}
        if self.direct_ns:
            found["direct"] = {"jobs": len(self.direct_ns), **quantiles(self.direct_ns)}
        return found


class Pace:
    """One grid of beats for all blocks of a bench; `period_ns` 0 is no pace, a beat is at once.

    A job is released at its beat or not at all: what comes off the grid would come early for the loop's arrival model,
    and a release that is only late would bring the next one closer than a period.
    """

    def __init__(
        self, period_ns: int, now: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.period_ns = period_ns
        self.missed = 0
        """Beats that went by while their caller was busy with the one before, or was kept from running."""
        self.now = now
        self._sleep = sleep
        self._due_ns = now()

    def next_ns(self) -> int:
        """The next beat. Those that went by between blocks were nobody's and are not missed."""
        if not self.period_ns:
            return self.now()
        self._skip()
        return self._due_ns

    def block_ns(self) -> int:
        """How long one turn takes: whole periods."""
        if not self.period_ns:
            return BLOCK_NS
        return max(-(-BLOCK_NS // self.period_ns), 4) * self.period_ns

    def beats(self, until_ns: int) -> Iterator[None]:
        """Yields at each beat before `until_ns`; the one at `until_ns` is left to the next block."""
        if not self.period_ns:
            while self.now() < until_ns:
                yield
            return
        self._skip()
        while self._due_ns < until_ns:
            if (ahead_ns := self._due_ns - self.now()) > 0:
                self._sleep(ahead_ns / NS_PER_S)
            if 2 * (self.now() - self._due_ns) > self.period_ns:  # woken nearer to the next beat than to this one
                self.missed += self._skip()
                continue
            self._due_ns += self.period_ns
            yield
            self.missed += self._skip()

    def _skip(self) -> int:
        """Moves on to a beat that is not over; returns how many are."""
        over = max(0, -((self._due_ns - self.now()) // self.period_ns))
        self._due_ns += over * self.period_ns
        return over


def bench_lane(
    lane: Lane,
    load: Load,
    direct: Direct | None = None,
    progress: Callable[[float], None] = lambda share: None,
    pace: Pace | None = None,
) -> Outcome:
    """Load a lane for `load.seconds`, half of them for `direct` if there is one.

    `progress` is told the share that is done, between blocks. Raises what the lane raises (`Detached`, …).
    """
    pace = Pace(load.period_ns) if pace is None else pace
    _warm(lane, direct, pace)
    outcome = Outcome()
    begun = pace.next_ns()
    end = begun + int(load.seconds * NS_PER_S)
    while (block := pace.next_ns()) < end:
        _lane_block(lane, pace, min(block + pace.block_ns(), end), outcome)
        outcome.lane_s += (pace.next_ns() - block) / NS_PER_S
        if direct is not None:
            time_direct(direct, pace, min(pace.next_ns() + pace.block_ns(), end), outcome.direct_ns)
        progress(min(1.0, (pace.now() - begun) / (end - begun)))
    return outcome


def _warm(lane: Lane, direct: Direct | None, pace: Pace) -> None:
    """A few jobs that are not counted, for about a second at most; afterwards every slot holds noise."""
    noise = np.random.default_rng(0)
    jobs = WARM_JOBS if not pace.period_ns else max(lane.slot_count + 1, min(WARM_JOBS, NS_PER_S // pace.period_ns))
    for number, _ in zip(range(jobs), pace.beats(sys.maxsize), strict=False):
        if number <= lane.slot_count:
            for value in lane.inputs.values():
                fill_with_noise(value, noise)
        lane.infer(TIMEOUT_US)
        if direct is not None:
            if number == 0:
                for value in direct.inputs.values():
                    fill_with_noise(value, noise)
            direct.run()


def _lane_block(lane: Lane, pace: Pace, until_ns: int, outcome: Outcome) -> None:
    now, infer, record = pace.now, lane.infer, outcome.lane_ns.append
    missed = pace.missed
    for _ in pace.beats(until_ns):
        begun = now()
        reply = infer(TIMEOUT_US)
        taken = now() - begun
        outcome.jobs += 1
        if reply.ok:
            record(taken)
            if reply.late:
                outcome.late += 1
        elif reply.status in ("expired", "pending"):
            outcome.late += 1
        else:
            outcome.failed += 1
        if reply.early:
            outcome.early += 1
    outcome.missed += pace.missed - missed


def time_direct(direct: Direct, pace: Pace, until_ns: int, taken_ns: array[int]) -> None:
    """Calls at each beat before `until_ns`; appends how long each took, in ns."""
    now, run, record = pace.now, direct.run, taken_ns.append
    for _ in pace.beats(until_ns):
        begun = now()
        run()
        record(now() - begun)


def quantiles(nanoseconds: array[int]) -> dict[str, float | None]:
    """p50, p90, p99, p99.9 and maximum in µs, by nearest rank; None where nothing was measured."""
    names = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9, "max_us": 100.0}
    if not nanoseconds:
        return dict.fromkeys(names)
    found = np.percentile(np.frombuffer(nanoseconds, np.int64), list(names.values()), method="inverted_cdf")
    return {name: round(float(value) / 1000, 2) for name, value in zip(names, found, strict=True)}


@contextmanager
def without_gc() -> Iterator[None]:
    """No garbage collection inside, as in an executor."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def take_core_and_priority(core: int | None, priority: int | None) -> list[str]:
    """Ask for a core and a SCHED_FIFO priority for this process; None asks for nothing. Returns what was refused."""
    refused = []
    if core is not None:
        try:
            os.sched_setaffinity(0, [core])
        except OSError as error:
            usable = sorted(os.sched_getaffinity(0))
            refused.append(f"core {core}: {error.strerror}; this process may use {usable}")
    if priority:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        except OSError as error:
            refused.append(f"SCHED_FIFO {priority}: {error.strerror}; it needs root, CAP_SYS_NICE or RLIMIT_RTPRIO")
    return refused


def read_rights(pid: int = 0) -> dict[str, Any]:
    """What the kernel says a process has: policy, priority, cores, and whether memory is locked."""
    names = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr", os.SCHED_BATCH: "batch"}
    policy = os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK
    with open(f"/proc/{pid or 'self'}/status", encoding="ascii", errors="replace") as status:
        locked = next((line for line in status if line.startswith("VmLck:")), "VmLck: 0 kB")
    return {
        "policy": names.get(policy, str(policy)),
        "priority": os.sched_getparam(pid).sched_priority,
        "affinity": sorted(os.sched_getaffinity(pid)),
        "mlocked": int(locked.split()[1]) > 0,
    }
