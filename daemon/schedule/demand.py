"""Processor demand of sporadic loops under non-preemptive EDF: the arithmetic that admission rests on.

What it is: h(t), b(t), the instants at which they matter, how far one has to look, and QPA to look quickly. All of
it in integers, so that equal means equal. What it is not: a verdict; admission.py makes one of it. Nothing here
reads a clock: work is bounded by counting evaluations (`Effort`), so that the same set has the same answer on every
machine.

Sources: Jeffay, Stanat, Martel, "On Non-Preemptive Scheduling of Periodic and Sporadic Tasks" (RTSS 1991), for sporadic
tasks with blocking C - 1; George, Rivierre, Spuri, "Preemptive and Non-Preemptive Real-Time UniProcessor Scheduling"
(INRIA RR-2966, 1996), section 4, for constrained deadlines; Zhang and Burns, "Schedulability Analysis for Real-Time
Systems with EDF Scheduling" (IEEE TC 2009), for QPA. Jitter enters as d_i = D_i - J_i: the worst first job is
released J_i after its nominal arrival, and has d_i left.

Rejected: QPA over t as if b were constant. b falls where t passes a d_j, so below that point demand plus blocking
can be *larger*; the search here goes segment by segment of constant b.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, Protocol

__all__ = ["Demand", "Effort", "Load", "LoopLoad", "Undecided"]

# A step of the search costs as much as evaluating this many loops, besides the loops themselves.
STEP_OVERHEAD: Final = 5
# Near U = 1 the fixed point of the busy period creeps; the other bounds are used if it is not found in so many rounds.
BUSY_ROUNDS_MAX: Final = 200
# A horizon of so many of the latest d is short enough: computing the busy period would cost more than it saves.
NEAR: Final = 4


class Load(Protocol):
    """What a loop asks of a device; scheduler.Task is one."""

    @property
    def name(self) -> str: ...
    @property
    def period_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def jitter_ns(self) -> int: ...
    @property
    def cost_ns(self) -> int: ...
    @property
    def criticality(self) -> int: ...
    @property
    def order(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LoopLoad:
    """A load and nothing else."""

    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    cost_ns: int
    criticality: int
    order: int


class Undecided(Exception):
    """The effort was used up before there was an answer; passed_ns: no instant up to it fails."""

    def __init__(self, passed_ns: int = 0) -> None:
        super().__init__(passed_ns)
        self.passed_ns = passed_ns


@dataclass(slots=True)
class Effort:
    """Evaluations (of one loop at one instant) that may still be spent."""

    left: int

    def spend(self, evaluations: int) -> None:
        self.left -= evaluations
        if self.left < 0:
            raise Undecided

    def portion(self, divisor: int) -> Effort:
        """A part of what is left; the caller gives back what it did not use with `settle`."""
        part = Effort(max(self.left, 0) // divisor)
        self.left -= part.left
        return part

    def settle(self, part: Effort) -> None:
        self.left += max(part.left, 0)


class Demand:
    """Demand and blocking of a set of loops; needs 1 ≤ D - J and D ≤ T for each.

    dispatch_ns is B, the longest best-effort dispatch (0: none). With blocking=False b(t) is 0 everywhere.
    """

    __slots__ = ("busy", "earliest", "hyper", "latest", "reach", "rows", "segments", "tail")

    def __init__(self, loads: Sequence[Load], dispatch_ns: int = 0, *, blocking: bool = True) -> None:
        # (T - d, T, C): the number of jobs with release and deadline in a span t is (t + T - d) // T, also for t < d.
        self.rows = [(e.period_ns - e.deadline_ns + e.jitter_ns, e.period_ns, e.cost_ns) for e in loads]
        self.hyper = lcm(*(period for _, period, _ in self.rows))
        self.busy = sum(cost * (self.hyper // period) for _, period, cost in self.rows)  # U = busy / hyper
        # reach / hyper is X in h(t) ≤ U·t + X, the line that demand never crosses.
        self.reach = sum(cost * offset * (self.hyper // period) for offset, period, cost in self.rows)
        edges = sorted((period - offset, cost) for offset, period, cost in self.rows)
        self.earliest = edges[0][0] if edges else 1
        self.latest = edges[-1][0] if edges else 1
        self.tail = max(0, dispatch_ns - 1) if blocking else 0
        self.segments = self._segments(edges, blocking)

    def _segments(self, edges: list[tuple[int, int]], blocking: bool) -> list[tuple[int, int]]:
        """(start, b): b(t) from start to the next start; one segment per distinct d."""
        segments: list[tuple[int, int]] = []
        block = self.tail
        for index in range(len(edges) - 1, -1, -1):
            start = edges[index][0]
            if not segments or segments[-1][0] != start:
                segments.append((start, block))
            # This loop blocks only before its own d: from there on its jobs are demand.
            if blocking and (index == 0 or edges[index - 1][0] != start):
                block = max(block, *(c - 1 for d, c in edges if d == start))
        return segments[::-1]

    @property
    def overloaded(self) -> bool:
        return self.busy > self.hyper

    def demand(self, t: int) -> int:
        """h(t): execution time of jobs that can be released and due within a span of t."""
        return sum([(t + offset) // period * cost for offset, period, cost in self.rows])

    def blocking(self, t: int) -> int:
        """b(t): what a job with a later deadline, started just before, can take; t ≥ the earliest d."""
        return self.segments[bisect_right(self.segments, (t, 1 << 256)) - 1][1]

    def last_instant(self, t: int) -> int:
        """The largest k·T_i + d_i that is ≤ t; t ≥ the earliest d."""
        return max([t - (t + offset) % period for offset, period, _ in self.rows if t + offset >= period])

    def busy_period(self) -> int | None:
        """L0, length of the busy period when all loops start together, without jitter or blocking; None if far away."""
        if self.overloaded:
            return None
        length = sum(cost for _, _, cost in self.rows)
        for _ in range(BUSY_ROUNDS_MAX):
            longer = sum([-(-length // period) * cost for _, period, cost in self.rows])
            if longer == length:
                return length
            length = longer
        return None

    def horizon(self, slack_ns: int = 0, start: int | None = None) -> int | None:
        """Beyond it every t has t - h(t) - b(t) ≥ slack_ns if every t from start (default: earliest d) to it has.

        The least of three: the hyperperiod (demand repeats); where the line U·t + X + tail + slack meets t; and L0 +
        start, since h(t) ≤ L0 + h(t - L0) and b never grows. None at U > 1.
        """
        if self.overloaded:
            return None
        if start is None:
            start = self.earliest
        bounds = [self.hyper + (0 if slack_ns == 0 else start)]
        above = self.reach + (self.tail + slack_ns) * self.hyper
        if above <= 0:
            bounds.append(0)
        elif self.busy < self.hyper:
            bounds.append(-(-above // (self.hyper - self.busy)))
        if min(bounds) > NEAR * self.latest and (length := self.busy_period()) is not None:
            bounds.append(length + start)
        # The line's bound knows the tail only, which is all the blocking there is from the latest d on.
        return max(self.latest, min(bounds))

    def failing(self, limit: int, effort: Effort, above: int = 0) -> int | None:
        """The largest instant t in (above, limit] with h(t) + b(t) > t, else None (QPA, Zhang and Burns 2009)."""
        rows, price = self.rows, len(self.rows) + STEP_OVERHEAD
        t = limit
        for start, block in reversed(self.segments):
            low = max(start, above + 1)
            if t >= low:
                while t >= low:
                    effort.spend(price)
                    need = block + sum([(t + offset) // period * cost for offset, period, cost in rows])
                    if need > t:
                        # Between instants demand stays and t grows: if t fails, so does the instant before it.
                        found = self.last_instant(t)
                        return found if found > above else None
                    # All of [need, t) passes: demand there is no larger. A step never crosses a change of blocking.
                    t = need if need < t else self.last_instant(t - 1) if t > self.earliest else 0
                t = low - 1
            if t <= above:
                return None
        return None

    def first_failing(self, effort: Effort) -> int | None:
        """The smallest instant with h(t) + b(t) > t, None if there is none.

        Where the smallest is too far to search for, one that fails. Raises Undecided if none is known, but there may
        be.
        """
        if not self.rows:
            return None
        horizon = self.horizon()
        passed, limit = 0, self.latest
        found: int | None = None
        try:
            while (found := self.failing(limit, effort, passed)) is None:
                if horizon is not None and limit >= horizon:
                    return None
                passed, limit = limit, 2 * limit if horizon is None else min(2 * limit, horizon)
            while passed < found - 1:
                middle = (passed + found) // 2
                if (earlier := self.failing(middle, effort, passed)) is None:
                    passed = middle
                else:
                    found = earlier
        except Undecided:
            if found is None and not self.overloaded:
                raise Undecided(passed) from None
            return self._doomed() if found is None else found
        return found

    def _doomed(self) -> int:
        """At U > 1, an instant that surely fails: h(t) > Σ C·(t - d)/T = U·t - Σ U_i·d_i."""
        behind = sum(cost * (period - offset) * (self.hyper // period) for offset, period, cost in self.rows)
        return self.last_instant(max(self.latest, -(-behind // (self.busy - self.hyper))))

    def slack(self, effort: Effort, cap: int | None = None) -> dict[int, int]:
        """Per distinct d: the least t - h(t) - b(t) over t ≥ d, at most cap. For sets that pass. Raises Undecided."""
        rows, price = self.rows, len(self.rows) + STEP_OVERHEAD
        least = self.latest - self.demand(self.latest) - self.tail
        if cap is not None:
            least = min(least, cap)
        horizon = self.horizon(max(least, 0), self.latest)
        if horizon is None:
            raise Undecided
        result: dict[int, int] = {}
        t = self.last_instant(horizon)
        for start, block in reversed(self.segments):
            while t >= start:
                effort.spend(2 * price)
                need = block + sum([(t + offset) // period * cost for offset, period, cost in rows])
                least = min(least, t - need)
                # Every t' in [need + least, t) has t' - h(t') - b ≥ t' - need ≥ least.
                t = min(t, need + least) - 1
                if t >= start:
                    t = self.last_instant(t)
            result[start] = least
            t = start - 1
            if t >= self.earliest:
                t = self.last_instant(t)
        return result
