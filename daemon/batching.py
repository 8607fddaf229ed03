"""How large a best-effort batch may be: as large as its cost, its members' deadlines and everybody else's allow.

Pure functions over jobs and a cost table; called by best_effort.py when a dispatch is about to start. All times in ns.

The property: among the jobs known when the batch is formed, every one that would keep its deadline under unbatched EDF
from here on still keeps it with the batch. (A job that arrives later can find a longer dispatch running, at most as
long as the start rule allows; no rule that ever batches can prevent that.)
"""

from __future__ import annotations

from collections.abc import Sequence

from taktd.daemon.job import NEVER, Job


def kept_unbatched(now_ns: int, first: Job, others: Sequence[Job]) -> list[Job]:
    """Those of the jobs that keep their deadline if `first` starts now and `others` follow one by one, by deadline."""
    end_ns = now_ns + first.cost_ns
    kept = [first] if first.deadline_ns and end_ns <= first.deadline_ns else []
    for job in sorted(others, key=_by_deadline):
        if job.deadline_ns and end_ns + job.cost_ns > job.deadline_ns:
            continue  # it is answered as expired and takes no time
        end_ns += job.cost_ns
        if job.deadline_ns:
            kept.append(job)
    return kept


def batch_size(
    now_ns: int,
    candidates: Sequence[Job],
    others: Sequence[Job],
    cost_ns: Sequence[int],
    preferred: Sequence[int],
    limit_ns: int,
) -> int:
    """How many of `candidates` (the first is certain) go together, starting at now_ns.

    candidates: jobs of one model in the order in which they would join; others: all other queued best-effort jobs that
    have a deadline; cost_ns[n - 1]: cost of a batch of n; limit_ns: longest dispatch that may start now. The largest
    preferred size that can be had, else the largest size.
    """
    most = min(len(candidates), len(cost_ns))
    sizes = [size for size in range(most, 1, -1) if cost_ns[size - 1] <= limit_ns]
    if not sizes:
        return 1
    if preferred:
        sizes.sort(key=lambda size: (size not in preferred, -size))
    if not others and not any(job.deadline_ns for job in candidates):
        return sizes[0]
    kept = {id(job) for job in kept_unbatched(now_ns, candidates[0], [*candidates[1:], *others])}
    for size in sizes:
        if _keeps(now_ns, candidates[:size], [*candidates[size:], *others], cost_ns[size - 1], kept):
            return size
    return 1


def _keeps(now_ns: int, batch: Sequence[Job], rest: Sequence[Job], batch_cost_ns: int, kept: set[int]) -> bool:
    """Whether every member and all of `kept` make it when `batch` runs first and the rest follows one by one."""
    end_ns = now_ns + batch_cost_ns
    for job in batch:
        if job.deadline_ns and end_ns > job.deadline_ns:
            return False
    for job in sorted(rest, key=_by_deadline):
        if job.deadline_ns and end_ns + job.cost_ns > job.deadline_ns:
            if id(job) in kept:
                return False
            continue
        end_ns += job.cost_ns
    return True


def _by_deadline(job: Job) -> tuple[int, int, int]:
    return (job.deadline_ns or NEVER, job.lane, job.sequence)
