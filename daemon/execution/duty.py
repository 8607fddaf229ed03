"""Keeps an executor below the share of a core that the kernel leaves to real-time work.

``/proc/sys/kernel/sched_rt_runtime_us`` (950 000 of 1 000 000 by default) takes the core away from a real-time thread
that has used up its share: a hole of up to 50 ms in the middle of a control loop. An executor that runs and spins
without a break would get there, so it takes many small breaks itself, when nothing admitted is due: early jobs, best
effort and spinning wait until the debt is paid.

Pure arithmetic on times that are handed in: a leaky bucket that fills while awake and empties while asleep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["DutyLimiter", "real_time_share_ppm"]

RESERVE_PPM: Final = 20_000  # of the share: what the sleeping accounts can't see (interrupts, the wake-up itself)
BURST_NS: Final = 100_000_000  # awake at a stretch, at most; well within the kernel's period of 1 s


def real_time_share_ppm(proc: Path = Path("/proc/sys/kernel")) -> int | None:
    """The kernel's share for real-time work in parts per million; ``None`` if it does not throttle."""
    try:
        runtime = int((proc / "sched_rt_runtime_us").read_text())
        period = int((proc / "sched_rt_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if runtime < 0 or runtime >= period else runtime * 1_000_000 // period


class DutyLimiter:
    """``yielding`` says that only admitted jobs may keep the executor awake now; ``at_ease`` that half of what may be
    owed is left: what is only a comfort to best effort ends there, so that loops have the rest."""

    def __init__(self, share_ppm: int | None) -> None:
        self._awake_weight = 0 if share_ppm is None else 1_000_000 - share_ppm + RESERVE_PPM
        self._slept_weight = 1_000_000 - self._awake_weight
        self._limit = BURST_NS * self._awake_weight
        self._debt = 0
        self._last_ns = 0
        self._last_slept_ns = 0
        self.yielding = False
        self.at_ease = True

    def update(self, now_ns: int, slept_ns: int) -> bool:
        """``slept_ns``: all time blocked so far. Returns and keeps ``yielding``."""
        if not self._awake_weight:
            return False
        slept = slept_ns - self._last_slept_ns
        awake = now_ns - self._last_ns - slept if self._last_ns else 0
        self._last_ns, self._last_slept_ns = now_ns, slept_ns
        debt = self._debt + awake * self._awake_weight - slept * self._slept_weight
        self._debt = debt = max(0, debt)
        if self.yielding:
            self.yielding = debt > 0
        else:
            self.yielding = debt > self._limit
        self.at_ease = 2 * debt <= self._limit
        return self.yielding
