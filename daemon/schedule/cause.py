"""Why a deadline was missed: one of a closed set of causes for every job that was late or expired.

A cause is named by asking what would have to go away for the job to make its deadline. What no admitted schedule
contains (time off the core, time beyond a declared cost) is asked first, and named if it suffices, then the same with
the time that the device was idle although the job was there (wakeup); else the largest share of the delay is named,
be it what other jobs took of their costs (blocked_by). Pure; called only for jobs that missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Reversible

from taktd.daemon.schedule.job import Job

NONE, BLOCKED_BY, OVERRUN, LATE_RELEASE, WAKEUP, HANDOVER, STALE_INPUT, MACHINE = range(8)
"""Numbers as on the wire."""

NAMES = ("none", "blocked_by", "overrun", "late_release", "wakeup", "handover", "stale_input", "machine")


def cause_of_miss(
    job: Job,
    now_ns: int,
    before: Reversible[Job],
    running: Job | None,
    handover_ns: int = 0,
    switched_out_ns: int = 0,
) -> tuple[int, int]:
    """Cause and detail (the lane that blocked or overran, else 0) of a job that was late or is given up at `now_ns`.

    before: recent dispatches that have ended (one job each), the last one last; running: the one that runs, if any.
    handover_ns: time of the last handover (0: none); switched_out_ns: how long its own run had no core.
    """
    due_ns = max(job.release_ns, job.arrival_ns)
    started_ns = job.started_ns or now_ns
    ended_ns = job.ended_ns or now_ns + job.cost_ns
    missing_ns = max(1, ended_ns - job.deadline_ns)
    if due_ns <= handover_ns <= now_ns and handover_ns:
        return HANDOVER, 0
    admitted_ns = job.arrival_ns + job.source.deadline_ns if job.source is not None else 0
    if job.deadline_ns - due_ns < job.cost_ns and (job.deadline_ns < admitted_ns or job.release_ns > job.arrival_ns):
        return LATE_RELEASE, 0

    blocked_ns = beyond_ns = excess_ns = longest_ns = worst_ns = 0
    away_ns = switched_out_ns
    blocker = overrunner = 0
    for other in _overlapping(before, running, due_ns):
        if other is job:
            continue
        other_end_ns = other.ended_ns or now_ns
        overlap_ns = min(other_end_ns, started_ns) - max(other.started_ns, due_ns)
        if overlap_ns <= 0:
            continue
        blocked_ns += overlap_ns
        if overlap_ns > longest_ns:
            longest_ns, blocker = overlap_ns, other.lane
        over_ns = min(overlap_ns, other_end_ns - other.started_ns - other.cost_ns)
        if over_ns > 0:
            beyond_ns += over_ns
            # What the machine took from it is no overrun of its own.
            taken_ns = min(over_ns, other.away_ns)
            away_ns += taken_ns
            over_ns -= taken_ns
            excess_ns += over_ns
            if over_ns > worst_ns:
                worst_ns, overrunner = over_ns, other.lane
    own_ns = 0
    if job.ended_ns and job.started_ns:
        own_ns = max(0, job.ended_ns - job.started_ns - job.cost_ns)
        own_ns -= min(own_ns, switched_out_ns)
    beyond_cost = ((away_ns, MACHINE, 0), (own_ns, OVERRUN, job.lane), (excess_ns, OVERRUN, overrunner))
    within_cost = (blocked_ns - beyond_ns, BLOCKED_BY, blocker)
    idle = (max(0, started_ns - due_ns - blocked_ns), WAKEUP, 0)
    return _largest(missing_ns, beyond_cost, within_cost, idle)


Share = tuple[int, int, int]
"""(ns of the delay, cause, detail)"""


def _largest(missing_ns: int, beyond_cost: tuple[Share, ...], within_cost: Share, idle: Share) -> tuple[int, int]:
    for share_ns, cause, detail in beyond_cost:
        if share_ns >= missing_ns:
            return cause, detail
    shares = beyond_cost
    if sum(share[0] for share in shares) < missing_ns:
        shares = (*beyond_cost, idle)
        # What an admitted schedule contains is to blame only where the rest is not enough, or is less than that.
        if sum(share[0] for share in shares) < max(missing_ns, within_cost[0] + 1):
            shares = (*beyond_cost, within_cost, idle)
    largest_ns, cause, detail = max(shares, key=lambda share: share[0])
    return (cause, detail) if largest_ns > 0 else (LATE_RELEASE, 0)


def _overlapping(before: Reversible[Job], running: Job | None, due_ns: int) -> Iterator[Job]:
    """The dispatches that still ran at due_ns or began after it, the last one first."""
    if running is not None:
        yield running
    for other in reversed(before):
        if other.ended_ns <= due_ns:
            return  # one runs at a time: those before it ended earlier still
        yield other
