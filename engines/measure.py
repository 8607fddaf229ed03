"""How long a run of an engine takes on this machine, in this state.

An adaptive number of runs within a time cap, with pauses, so that a real-time process stays below the kernel's throttle
(back-to-back runs under SCHED_FIFO end in a 50 ms hole that is no property of the engine). A loop's jobs have pauses
between them, in which others take the caches: where a pause is asked for, it comes so often that the tail is that of
runs after it. A run during which the thread was switched out, or its core stood still, says something about the
machine, not about the engine: it is counted, and left out. The witness itself switches the thread out to look; that
counts for nothing, or no long run would ever be left in.

Clock, pause, the count of involuntary switches and the witness of the core are handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypedDict

__all__ = ["DUTY_BESIDE_PERCENT", "DUTY_PERCENT", "PAUSE_NS_MAX", "CostJson", "Measurement", "measure"]

DUTY_PERCENT: Final = 80
DUTY_BESIDE_PERCENT: Final = 50  # where another one serves on the same core, and needs its share too
BLOCK_NS: Final = 5_000_000  # busy at a stretch before a pause, at most
BLOCK_RUNS: Final = 10  # and so many runs, where a pause is asked for: p99.9 is the p99 of those after one
PAUSE_NS_MAX: Final = 8_000_000  # longer ones make next to nothing colder (docs/scheduling.md)
RUNS_MIN: Final = 3  # whatever that takes
RUNS_MAX: Final = 20_000
WITNESSED_RUNS_MIN: Final = 16  # that say what is long
# A run that is longer than so many of those before, by so much, is one to ask the witness about. That costs a run that
# comes after a pause tens of microseconds, so most of those must not be asked about; one in ten comes after one.
LONG_PPM: Final = 950_000
LONG_PERCENT: Final = 150
LONG_NS_MIN: Final = 50_000  # shorter is what the witness can't see
WITNESS_EVERY_NS: Final = 100_000  # how often the witness looks from the moment on that it was told (ipc/core/server.h)
RUNS_STABLE: Final = 5_000  # p99.9 of that many runs rests on five of them; more only helps if time is left


class Witness(Protocol):
    """Sees that the core stood still beyond a moment at which a run should have been over."""

    def expect(self, due_ns: int, /) -> None: ...
    def over(self) -> None: ...
    def absent_ns(self, now_ns: int, /) -> int: ...


class CostJson(TypedDict):
    p50_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int
    runs: int
    switched_out: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Run times in ns, sorted, of runs that kept their core; if none did, of all runs."""

    times_ns: tuple[int, ...]
    switched_out: int

    def quantile_ns(self, ppm: int) -> int:
        """The smallest measured time that at least ``ppm`` millionths of the runs did not exceed."""
        count = len(self.times_ns)
        return self.times_ns[max(0, -(-ppm * count // 1_000_000) - 1)]

    def as_json(self) -> CostJson:
        return {
            "p50_ns": self.quantile_ns(500_000),
            "p99_ns": self.quantile_ns(990_000),
            "p999_ns": self.quantile_ns(999_000),
            "max_ns": self.times_ns[-1],
            "runs": len(self.times_ns),
            "switched_out": self.switched_out,
        }


def measure(
    run: Callable[[], object],
    *,
    cap_ns: int,
    clock: Callable[[], int],
    pause: Callable[[int], None],
    switches: Callable[[], int],
    pause_ns: int = 0,
    witness: Witness | None = None,
    duty_percent: int = DUTY_PERCENT,
) -> Measurement:
    """Runs ``run`` until ``RUNS_STABLE`` clean runs are in or ``cap_ns`` has passed, at least ``RUNS_MIN`` times.

    ``pause(ns)`` sleeps; ``switches()`` is the thread's count of involuntary context switches; ``pause_ns``: between
    the jobs of a loop that runs it (0: none does); ``witness``: of the core, where a hypervisor may stop it;
    ``duty_percent``: of the time, busy at most.
    An engine slower than the cap allows is run three times whatever that takes.
    """
    clean: list[int] = []
    disturbed: list[int] = []
    begin = block = clock()
    block_runs = runs = long_ns = 0
    while True:
        before = switches()
        if witness and runs >= WITNESSED_RUNS_MIN and not runs & (runs - 1):  # at each power of two
            before_ns = Measurement(tuple(sorted(clean or disturbed)), 0).quantile_ns(LONG_PPM)
            long_ns = max(LONG_NS_MIN, before_ns * LONG_PERCENT // 100)
        due_ns = clock() + long_ns
        if witness and long_ns:
            witness.expect(due_ns)
        start = clock()
        run()
        end = clock()
        looks = 0
        if witness:
            witness.over()
            looks = (clock() - due_ns) // WITNESS_EVERY_NS + 1 if long_ns else 0
        kept = switches() - before <= max(looks, 0) and not (witness and long_ns and witness.absent_ns(end))
        (clean if kept else disturbed).append(end - start)
        runs += 1
        spent = end - begin
        if runs >= RUNS_MAX or len(clean) >= RUNS_STABLE:
            break
        if spent >= cap_ns and runs >= RUNS_MIN:
            break
        block_runs += 1
        if end - block >= BLOCK_NS or (pause_ns and block_runs >= BLOCK_RUNS):
            duty_ns = (end - block) * (100 - duty_percent) // duty_percent
            pause(max(duty_ns, min(pause_ns, PAUSE_NS_MAX)))
            block, block_runs = clock(), 0
    return Measurement(tuple(sorted(clean or disturbed)), len(disturbed))
