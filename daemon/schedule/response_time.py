"""Exact worst-case response time of a loop under non-preemptive EDF with jitter and blocking.

The analysis of George, Rivierre, Spuri (INRIA RR-2966, 1996, section 4.2.2: deadline busy periods), in integer time and
with the scheduler's own tie-breaking. A response counts from the nominal arrival to the end of the job, so a release
that comes J late is part of it. Called by admission.py on request: it visits every nominal arrival at which anything
changes, which for many loops near U = 1 are very many.

The scenario: at -1 a job that is none of the others' business starts (blocking, C - 1 left at 0); at 0 every other
loop is released for the first time, as late as its jitter allows, and then as soon as it may. The loop's own jobs
are placed so that one arrives at a. Jobs that come before the analysed one in the scheduler's order, and are
released no later than its start s, run first; s is the least fixed point. The worst a is among those where a count
changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from taktd.daemon.schedule.demand import Demand, Effort, Load

__all__ = ["worst_case_response_ns"]

# Of another loop: T, C, J, and the d from which a deadline counts as earlier (ties included where it wins them).
Other = tuple[int, int, int, int]


def worst_case_response_ns(loads: Sequence[Load], index: int, dispatch_ns: int, effort: Effort) -> int | None:
    """Of loads[index], in ns from nominal arrival. None at U > 1. Raises Undecided when the effort does not suffice."""
    me = loads[index]
    span = Demand(loads).busy_period()
    if span is None:
        demand = Demand(loads)
        if demand.overloaded:
            return None
        span = demand.hyper
    rank = (me.criticality, me.order)
    others: list[Other] = []
    for position, other in enumerate(loads):
        if position != index:
            wins_ties = (other.criticality, other.order) < rank
            due = other.deadline_ns - other.jitter_ns + (0 if wins_ties else 1)
            others.append((other.period_ns, other.cost_ns, other.jitter_ns, due))
    worst = me.cost_ns + me.jitter_ns
    for arrival in _arrivals(me, others, span, effort):
        worst = max(worst, _response(me, others, arrival, dispatch_ns, worst, effort))
    return worst


def _arrivals(me: Load, others: Sequence[Other], span: int, effort: Effort) -> Iterator[int]:
    """Nominal arrivals a in [-J, span - J) at which a count changes; R(a) ≤ R(a - span) beyond.

    That holds because a span of the busy period L0 costs no more than L0: shifting by it shifts the start by at most
    it.
    """
    low, high = -me.jitter_ns, span - me.jitter_ns
    effort.spend(sum(span // period for period, _, _, _ in others) + span // me.period_ns)
    yield from range(low, high, me.period_ns)
    for period, _, _, due in others:
        first = due - me.deadline_ns
        # A deadline of this loop that is at `due` or whole periods after it.
        if first < low:
            first += -((first - low) // period) * period
        yield from range(first, high, period)


def _response(me: Load, others: Sequence[Other], arrival: int, dispatch_ns: int, worst: int, effort: Effort) -> int:
    """R for the job that arrives (nominally) at arrival, or anything ≤ worst if it can't be worse than that."""
    effort.spend(2 * len(others) + 5)
    deadline = arrival + me.deadline_ns
    own = (arrival + me.jitter_ns) // me.period_ns * me.cost_ns
    block = max(0, dispatch_ns - 1)
    ahead: list[tuple[int, int, int, int]] = []
    total = 0
    for period, cost, jitter, due in others:
        count = (deadline - due) // period + 1
        if count > 0:
            ahead.append((period, cost, jitter, count))
            total += count * cost
        elif cost - 1 > block:
            block = cost - 1
    # Everything that may run before it is bounded by what is due before it.
    if block + own + total + me.cost_ns - arrival <= worst:
        return worst
    base = block + own
    start = base
    while True:
        effort.spend(len(ahead) + 5)
        longer = base
        for period, cost, jitter, count in ahead:
            released = (start + jitter) // period + 1
            longer += (released if released < count else count) * cost
        if longer == start:
            return start + me.cost_ns - arrival
        start = longer
