"""Whether a device does worse after a change than before: failures and misses of its loops, from the counters.

A change is judged by what it does, not by what it says: jobs that fail, are lost, late or expire. Before it, some of
that may have been normal; it is compared with as many jobs. Pure but for the statistics page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from taktd.daemon.supervision.served_device import ServedDevice
from taktd.ipc import _core

FAILURES_FREE: Final = 0
MISSES_FREE: Final = 3  # the first jobs on a cold cache
MISSES_ONE_IN: Final = 20  # of the jobs since: less than this is the machine's noise
WORSE_TIMES: Final = 2  # than before


@dataclass(frozen=True)
class Count:
    """Of all loops of a device, ever."""

    jobs: int = 0
    failures: int = 0
    misses: int = 0

    def __sub__(self, other: Count) -> Count:
        return Count(self.jobs - other.jobs, self.failures - other.failures, self.misses - other.misses)


def worse(before: Count, after: Count) -> str:
    """Why it is worse, "" while it is not. Both are counts since some start."""
    for what, was, found, free in (
        ("failures", before.failures, after.failures, FAILURES_FREE),
        ("misses", before.misses, after.misses, MISSES_FREE + after.jobs // MISSES_ONE_IN),
    ):
        expected = WORSE_TIMES * was * after.jobs // max(1, before.jobs)
        if found > expected + free:
            return f"{found} {what} in {after.jobs} jobs, {was} in {before.jobs} before"
    return ""


class Probation:
    """One device from the moment that its loops passed over."""

    def __init__(self, device: ServedDevice) -> None:
        self._device = device
        self._start = self._count()

    def _count(self) -> Count:
        jobs = failures = misses = 0
        for loop in self._device.member.plan.loops:
            lanes = self._device.lanes
            read = _core.stats_read(lanes.stats_fd, lanes.stats_block("loop", loop.name))
            jobs += read["submitted"]
            failures += read["failed"] + read["lost"]
            misses += read["late"] + read["expired"]
        return Count(jobs, failures, misses)

    def trouble(self, serves: bool) -> str:
        """What speaks against the new executor, "" while nothing does. serves: it is the one that serves."""
        if not serves:
            return "it does not serve any more"
        return worse(self._start, self._count() - self._start)
