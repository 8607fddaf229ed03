"""What one client of a lane sees: round trips through it and, interleaved, the same model called directly.

Called by `taktctl bench` and `bench/run.py`. It is a client like any other and runs in the caller's process; the direct
calls share its core, its rights and its seconds, in short blocks by turns, so that both meet the same machine.
"""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from taktd.daemon.direct import Direct, fill_with_noise
from taktd.ipc import Lane

__all__ = ["Load", "Outcome", "bench_lane", "quantiles", "read_rights", "take_core_and_priority", "without_gc"]

BLOCK_NS: Final = 50_000_000
"""One turn of lane or direct calls."""
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


def bench_lane(
    lane: Lane,
    load: Load,
    direct: Direct | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Load a lane for `load.seconds`, half of them for `direct` if there is one.

    `progress` is told the share that is done, between blocks. Raises what the lane raises (`Detached`, …).
    """
    _warm(lane, direct, load.period_ns)
    outcome = Outcome()
    now = time.monotonic_ns
    begun = now()
    end = begun + int(load.seconds * NS_PER_S)
    while (block := now()) < end:
        until = min(block + max(BLOCK_NS, 4 * load.period_ns), end)
        _lane_block(lane, load.period_ns, until, outcome)
        outcome.lane_s += (now() - block) / NS_PER_S
        if direct is not None:
            block = now()
            _direct_block(direct, load.period_ns, min(block + max(BLOCK_NS, 4 * load.period_ns), end), outcome)
        progress(min(1.0, (now() - begun) / (end - begun)))
    return outcome


def _warm(lane: Lane, direct: Direct | None, period_ns: int) -> None:
    """A few jobs that are not counted; afterwards every slot holds noise."""
    noise = np.random.default_rng(0)
    for number in range(WARM_JOBS):
        if number <= lane.slot_count:
            for value in lane.inputs.values():
                fill_with_noise(value, noise)
        lane.infer(TIMEOUT_US)
        if direct is not None:
            if number == 0:
                for value in direct.inputs.values():
                    fill_with_noise(value, noise)
            direct.run()
        time.sleep(min(period_ns / NS_PER_S, 0.02))


def _beats(period_ns: int, until_ns: int) -> Iterator[int]:
    """Yield at each beat how many were skipped before it; with period 0 at once. Ends at `until_ns`."""
    now = time.monotonic_ns
    due = now()
    while True:
        at = now()
        if at >= until_ns:
            return
        if not period_ns:
            yield 0
            continue
        skipped = max(0, at - due) // period_ns
        due += skipped * period_ns
        if due > at:
            time.sleep((due - at) / 1e9)
        yield skipped
        due += period_ns


def _lane_block(lane: Lane, period_ns: int, until_ns: int, outcome: Outcome) -> None:
    now, infer, record = time.monotonic_ns, lane.infer, outcome.lane_ns.append
    for skipped in _beats(period_ns, until_ns):
        begun = now()
        reply = infer(TIMEOUT_US)
        taken = now() - begun
        outcome.jobs += 1
        outcome.missed += skipped
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


def _direct_block(direct: Direct, period_ns: int, until_ns: int, outcome: Outcome) -> None:
    now, run, record = time.monotonic_ns, direct.run, outcome.direct_ns.append
    for _ in _beats(period_ns, until_ns):
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
