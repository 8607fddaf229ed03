"""How large a best-effort batch may be: as large as its cost, its members' deadlines and everybody else's allow.

Pure functions over jobs and a cost table; called by best_effort.py when a dispatch is about to start. All times in ns.

The property: among the jobs known when the batch is formed, every one that would keep its deadline under unbatched EDF
from here on still keeps it with the batch. (A job that arrives later can find a longer dispatch running, at most as
long as the start rule allows; no rule that ever batches can prevent that.)
"""

from __future__ import annotations

from collections.abc import Sequence

from taktd.daemon.schedule.job import NEVER, Job

Dated = tuple[int, int, int, Job]
"""(deadline, sequence, lane, job): sorts by deadline, and two jobs are never compared."""


def batch_size(
    now_ns: int,
    candidates: Sequence[Job],
    dated: Sequence[Dated],
    dated_cost_ns: int,
    cost_ns: Sequence[int],
    preferred: Sequence[int],
    limit_ns: int,
) -> int:
    """How many of `candidates` (the first is certain) go together, starting at now_ns.

    candidates: jobs of one model in the order in which they would join; dated: every queued
    best-effort job that has a deadline, candidates too, sorted; dated_cost_ns: what they take one by one;
    cost_ns[n - 1]: cost of a batch of n; limit_ns: longest dispatch that may start now. The largest preferred size that
    can be had, else the largest size; where that breaks a deadline, half of it and so on.
    """
    most = min(len(candidates), len(cost_ns))
    while most > 1 and cost_ns[most - 1] > limit_ns:
        most -= 1
    if not (harmless := nobody_minds(now_ns, cost_ns[most - 1], dated, dated_cost_ns)):
        most = _members_in_time(now_ns, candidates[:most], cost_ns)
    if most == 1:
        return 1
    for size in _sizes(most, preferred):
        if harmless or _keeps(now_ns + cost_ns[size - 1], now_ns, candidates[:size], dated, dated_cost_ns):
            return size
    return 1


def nobody_minds(now_ns: int, longest_ns: int, dated: Sequence[Dated], dated_cost_ns: int) -> bool:
    """Whether a dispatch of longest_ns, and after it each job that has a deadline, ends before the first deadline."""
    return not dated or now_ns + longest_ns + dated_cost_ns <= dated[0][0]


def _members_in_time(now_ns: int, candidates: Sequence[Job], cost_ns: Sequence[int]) -> int:
    """The largest batch whose members all make it. Larger ones only cost more, so the first that breaks one ends it."""
    deadline_ns = NEVER
    for index, job in enumerate(candidates):
        deadline_ns = min(deadline_ns, job.deadline_ns or NEVER)
        if index and now_ns + cost_ns[index] > deadline_ns:
            return index
    return len(candidates)


def _sizes(most: int, preferred: Sequence[int]) -> list[int]:
    """The sizes to try, best first; few, so that a decision stays short."""
    sizes = sorted([size for size in preferred if 1 < size <= most], reverse=True) if preferred else []
    while most > 1:
        sizes.append(most)
        most //= 2
    return sizes


def _keeps(batched_ns: int, now_ns: int, batch: Sequence[Job], dated: Sequence[Dated], dated_cost_ns: int) -> bool:
    """Whether everybody makes it who would if the batch's first job went alone and all others followed, one by one, by
    deadline; the batch ends at batched_ns.

    Jobs without a deadline come after all others then and need no look; who can't make it takes no time. The look ends
    where all that is left is done by the next deadline: then everybody left makes it, whoever else would have."""
    first = batch[0]
    members = {id(job) for job in batch}
    alone_ns = now_ns + first.cost_ns
    rest_ns = dated_cost_ns
    for deadline_ns, _, _, job in dated:
        if batched_ns + rest_ns <= deadline_ns:
            return True
        cost_ns = job.cost_ns
        rest_ns -= cost_ns
        if job is first:
            continue
        makes_it = alone_ns + cost_ns <= deadline_ns
        if makes_it:
            alone_ns += cost_ns
        if id(job) in members:
            continue
        if batched_ns + cost_ns <= deadline_ns:
            batched_ns += cost_ns
        elif makes_it:
            return False
    return True
