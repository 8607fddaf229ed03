"""How late the kernel wakes a thread on the loop's core: clock_nanosleep at the executor's priority, each millisecond.

Runs as its own process (`python -m taktd.daemon.doctor.wakeup`), so that the priority, the core and the locked memory
end with it. One sleep in a thousand that is late is what a 1 kHz loop sees once a second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Final

from taktd.daemon.doctor.finding import AS_ROOT, Finding, Level

PERIOD_NS: Final = 1_000_000
SECONDS_MAX: Final = 600
# The p99.9 up to which a 1 kHz loop is comfortable, and beyond which it misses deadlines of half a period.
GOOD_P999_NS: Final = 100_000
BAD_P999_NS: Final = 500_000
_CLOCK_MONOTONIC: Final = 1
_TIMER_ABSTIME: Final = 1
_MCL_CURRENT: Final = 1


@dataclass(frozen=True, slots=True)
class WakeUps:
    """Lateness over count sleeps in ns. problem: what was refused ("" for nothing), so that it counts for less."""

    core: int
    priority: int
    count: int
    p50_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int
    problem: str


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def measure(core: int, priority: int, seconds: float) -> WakeUps:
    """Sleep until each full period for that long. Changes this process's core, policy and memory lock."""
    problems: list[str] = []
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        problems.append(f"core {core}: {error.strerror}")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError as error:
        problems.append(f"SCHED_FIFO {priority}: {error.strerror}")
    libc.mlockall(_MCL_CURRENT)
    now, until = _Timespec(), _Timespec()
    wanted = int(min(seconds, SECONDS_MAX) * 1_000_000_000) // PERIOD_NS
    late_ns: list[int] = []
    libc.clock_gettime(_CLOCK_MONOTONIC, ctypes.byref(now))
    start_ns = now.seconds * 1_000_000_000 + now.nanoseconds
    for turn in range(1, max(wanted, 1) + 1):
        due_ns = start_ns + turn * PERIOD_NS
        until.seconds, until.nanoseconds = divmod(due_ns, 1_000_000_000)
        libc.clock_nanosleep(_CLOCK_MONOTONIC, _TIMER_ABSTIME, ctypes.byref(until), None)
        libc.clock_gettime(_CLOCK_MONOTONIC, ctypes.byref(now))
        late_ns.append(now.seconds * 1_000_000_000 + now.nanoseconds - due_ns)
    late_ns.sort()

    def percentile(ppm: int) -> int:
        return late_ns[min(len(late_ns) - 1, len(late_ns) * ppm // 1_000_000)]

    return WakeUps(
        core=core,
        priority=priority,
        count=len(late_ns),
        p50_ns=percentile(500_000),
        p99_ns=percentile(990_000),
        p999_ns=percentile(999_000),
        max_ns=late_ns[-1],
        problem="; ".join(problems),
    )


def measure_apart(core: int, priority: int, seconds: float) -> WakeUps:
    """measure() in a process of its own. Raises RuntimeError with its message if that one fails."""
    command = [
        sys.executable,
        "-m",
        __name__,
        "--core",
        str(core),
        "--priority",
        str(priority),
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return WakeUps(**json.loads(done.stdout))


def judge(found: WakeUps) -> Finding:
    """A finding from a measurement; lateness without real-time rights is a warning at best."""
    why = "a job can't start before its executor is awake: this is the least jitter any loop on this core will see"
    evidence = (
        f"core {found.core}, FIFO {found.priority}, {found.count} wake-ups: p50 {found.p50_ns / 1000:.0f} us, "
        f"p99 {found.p99_ns / 1000:.0f} us, p99.9 {found.p999_ns / 1000:.0f} us, max {found.max_ns / 1000:.0f} us"
    )
    if found.problem:
        return Finding("wake-up", "warning", f"{evidence} (without real-time rights: {found.problem})", why, AS_ROOT)
    if found.p999_ns <= GOOD_P999_NS:
        return Finding("wake-up", "ok", evidence, why)
    level: Level = "fail" if found.p999_ns > BAD_P999_NS else "warning"
    return Finding("wake-up", level, evidence, why, "taktctl doctor   (again, once what is above is mended)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="taktd-wakeup", description=__doc__)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--priority", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    print(json.dumps(asdict(measure(arguments.core, arguments.priority, arguments.seconds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
