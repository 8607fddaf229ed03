"""How large a best-effort batch may be: as large as its cost, its members' deadlines and everybody else's allow.

Pure functions over jobs and a cost table; called by best_effort.py when a dispatch is about to start. All times in ns.

The property: among the jobs known when the batch is formed, every one that would keep its deadline under unbatched EDF
from here on still keeps it with the batch. (A job that arrives later can find a longer dispatch running, at most as
long as the start rule allows; no rule that ever batches can prevent that.)
"""

from __future__ import annotations

from collections.abc import Sequence

from taktd.daemon.job import NEVER, Job


def choose_size(available: int, preferred: Sequence[int]) -> int:
    """The largest preferred size that `available` jobs can fill, or all of them where none is."""
    best = 0
    for size in preferred:
        if best < size <= available:
            best = size
    return best or available


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


def largest_batch(
    now_ns: int, candidates: Sequence[Job], others: Sequence[Job], cost_ns: Sequence[int], limit_ns: int
) -> int:
    """How many of `candidates` (the first is certain) may go together, starting at now_ns.

    candidates: jobs of one model in the order in which they would join; others: all other queued best-effort jobs that
    have a deadline; cost_ns[n - 1]: cost of a batch of n; limit_ns: longest dispatch that may start now.
    """
    most = min(len(candidates), len(cost_ns))
    while most > 1 and cost_ns[most - 1] > limit_ns:
        most -= 1
    if most == 1:
        return 1
    deadline_ns = NEVER
    size = 0
    while size < most:
        # Members only ever get tighter, costs only grow: the first size that breaks a member ends the search.
        mine_ns = candidates[size].deadline_ns or NEVER
        deadline_ns = min(deadline_ns, mine_ns)
        if size and now_ns + cost_ns[size] > deadline_ns:
            break
        size += 1
    rivals = [job for job in others if job.deadline_ns]
    if not rivals and all(not job.deadline_ns for job in candidates):
        return size
    kept = kept_unbatched(now_ns, candidates[0], [*candidates[1:], *rivals])
    while size > 1 and not _keeps(now_ns, candidates[:size], [*candidates[size:], *rivals], cost_ns[size - 1], kept):
        size -= 1
    return size


def _keeps(now_ns: int, batch: Sequence[Job], rest: Sequence[Job], batch_cost_ns: int, kept: Sequence[Job]) -> bool:
    """Whether all of `kept` still make it when `batch` runs first and the rest follows one by one."""
    end_ns = now_ns + batch_cost_ns
    must = {id(job) for job in kept}
    for job in batch:
        if job.deadline_ns and end_ns > job.deadline_ns:
            return False
    for job in sorted(rest, key=_by_deadline):
        if job.deadline_ns and end_ns + job.cost_ns > job.deadline_ns:
            if id(job) in must:
                return False
            continue
        end_ns += job.cost_ns
    return True


def _by_deadline(job: Job) -> tuple[int, int, int]:
    return (job.deadline_ns or NEVER, job.lane, job.sequence)
