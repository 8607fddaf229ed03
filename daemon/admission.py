"""Admission: whether a device's loops all meet their deadlines, always, and what to change where they don't.

Pure functions over loops (scheduler.Task, or anything with its fields): no clock, no floats, no I/O. The test is
exact for sporadic loops with D ≤ T, release jitter and non-preemptive EDF: a set is admitted if and only if no
pattern of releases makes a job miss (docs/scheduling.md). Work is bounded by counting, not by time: where the bound
is reached the set is refused as not provable, never admitted on trust.

Called by the supervisor (start, reload), by `taktctl check` and by the simulator; demand.py holds the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, Final, Literal

from taktd.daemon.config.durations import PPM, format_duration
from taktd.daemon.schedule.demand import Demand, Effort, Load, LoopLoad, Undecided
from taktd.daemon.schedule.response_time import worst_case_response_ns

__all__ = [
    "AUTO", "OFF", "BestEffort", "Collision", "InvalidLoop", "LoopVerdict", "OnRefusal", "Outcome", "Refusal",
    "Verdict", "admit", "decide", "feasible", "first_failing", "never_fits_ns", "utilization_ppm",
]  # fmt: skip

AUTO_DISPATCH_NS_MAX: Final = 10_000_000
AUTO_SHARE_PPM_MAX: Final = 100_000
SHARE_SPAN_NS: Final = 1_000_000_000  # the span over which a share that can't be kept is explained
PERIOD_NS_MAX: Final = 1 << 62  # where the search for a nearest period ends; 146 years

# Evaluations of one loop at one instant, some 0.1 µs each. Together they keep `check` well below 5 s.
VERDICT_EFFORT: Final = 6_000_000
SEARCH_EFFORT: Final = 8_000_000
BEST_EFFORT_EFFORT: Final = 2_000_000
MARGIN_EFFORT: Final = 1_000_000
RESPONSE_EFFORT: Final = 200_000_000  # on request only
PROBE_EFFORT_MAX: Final = 150_000  # for one candidate of a search

OnRefusal = Literal["refuse", "shed", "uncertified"]


class InvalidLoop(ValueError):
    """A loop whose numbers mean nothing: which, what was found, what is allowed."""


@dataclass(frozen=True, slots=True)
class BestEffort:
    """What a device promises to work without a reservation; `limits` takes the two numbers as they are."""

    mode: Literal["auto", "off", "limits"] = "auto"
    max_dispatch_ns: int = 0
    share_ppm: int = 0


AUTO: Final = BestEffort("auto")
OFF: Final = BestEffort("off")


@dataclass(frozen=True, slots=True)
class Collision:
    """One loop's part in a refusal: count jobs due by the instant, or one that blocks them (what is left of it)."""

    loop: str | None  # None: best effort
    count: int
    cost_ns: int
    last_deadline_ns: int | None  # counted like at_ns; None for a blocker
    blocking: bool

    def text(self) -> str:
        name = "best effort" if self.loop is None else self.loop
        if self.blocking:
            return f"{name} (just started: {format_duration(self.cost_ns)})"
        return f"{self.count} × {name} ({format_duration(self.cost_ns)})"

    def as_json(self) -> dict[str, Any]:
        return {
            "loop": self.loop, "count": self.count, "cost_ns": self.cost_ns,
            "last_deadline_ns": self.last_deadline_ns, "blocking": self.blocking,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a set is not admitted. at_ns counts from the start of the worst busy period.

    reason: `alone` (a job takes missing_ns longer than the at_ns that deadline and jitter leave it), `demand` (work due
    by at_ns exceeds it by missing_ns), `share` (the loops fit, the share kept free for best effort does not: over 1 s
    missing_ns are missing), `horizon` (no failure up to at_ns, but what follows could not be searched). loop is the one
    to change; nearest_* are proven to fit, and nearest if exact.
    """

    reason: Literal["alone", "demand", "share", "horizon"]
    at_ns: int
    missing_ns: int
    jobs: tuple[Collision, ...]
    loop: str
    nearest_period_ns: int | None
    nearest_deadline_ns: int | None
    exact: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason, "at_ns": self.at_ns, "missing_ns": self.missing_ns,
            "jobs": [job.as_json() for job in self.jobs], "loop": self.loop,
            "nearest_period_ns": self.nearest_period_ns, "nearest_deadline_ns": self.nearest_deadline_ns,
            "nearest_exact": self.exact,
        }  # fmt: skip

    def text(self) -> str:
        """For the person who has to act."""
        names = ", ".join(job.text() for job in self.jobs)
        at, missing = format_duration(self.at_ns), format_duration(self.missing_ns)
        if self.reason == "alone":
            first = f"a job of {self.loop} takes {format_duration(self.jobs[0].cost_ns)} and has {at} to its deadline"
        elif self.reason == "demand":
            first = f"{at} after the worst start, {names} together need {missing} more than there is"
        elif self.reason == "share":
            first = f"the loops fit, but with the share kept free for best effort {missing} are missing in each {at}"
        else:
            first = f"no deadline is missed up to {at}, but utilisation is so close to 1 that more can't be proven"
        choices = []
        if self.nearest_period_ns is not None:
            choices.append(f"a period of {format_duration(self.nearest_period_ns)}")
        if self.nearest_deadline_ns is not None:
            choices.append(f"a deadline of {format_duration(self.nearest_deadline_ns)}")
        if choices:
            return f"{first}; {self.loop} fits with {' or '.join(choices)}"
        return f"{first}; no longer period or deadline of {self.loop} alone helps: make a job shorter or move a loop"


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """One loop of a verdict.

    wcrt_ns: exact worst-case response time from nominal arrival, if asked for. margin_ns: how long before its deadline
    every job is proven to end; D - wcrt_ns where that is known, else a lower bound of it. None where nothing is proven.
    """

    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    cost_ns: int
    wcrt_ns: int | None
    margin_ns: int | None

    def as_json(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one device. max_dispatch_ns and share_ppm are what best effort has; utilization_ppm is rounded up."""

    admitted: bool
    utilization_ppm: int
    max_dispatch_ns: int
    share_ppm: int
    loops: tuple[LoopVerdict, ...]
    refusal: Refusal | None

    def as_json(self) -> dict[str, Any]:
        return {
            "admitted": self.admitted,
            "utilization_ppm": self.utilization_ppm,
            "best_effort": {"max_dispatch_ns": self.max_dispatch_ns, "share_ppm": self.share_ppm},
            "loops": [loop.as_json() for loop in self.loops],
            "refusal": None if self.refusal is None else self.refusal.as_json(),
        }


# ---- the parts of a verdict ----


def validate(loads: Sequence[Load]) -> None:
    """Raises InvalidLoop for numbers that describe no loop."""
    for load in loads:
        for field, minimum in (("period_ns", 1), ("deadline_ns", 1), ("jitter_ns", 0), ("cost_ns", 1)):
            value = getattr(load, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise InvalidLoop(f"loop {load.name}: {field} is {value!r}; allowed is a whole number ≥ {minimum}")
        if load.deadline_ns > load.period_ns:
            raise InvalidLoop(
                f"loop {load.name}: deadline {format_duration(load.deadline_ns)} is longer than the period "
                f"{format_duration(load.period_ns)}; allowed is at most the period"
            )


def utilization(loads: Sequence[Load]) -> tuple[int, int]:
    """ΣC/T as an exact fraction (numerator, denominator), not reduced."""
    hyper = lcm(*(load.period_ns for load in loads))
    return sum(load.cost_ns * (hyper // load.period_ns) for load in loads), hyper


def utilization_ppm(loads: Sequence[Load]) -> int:
    """Rounded up, so that it never looks less than it is."""
    busy, hyper = utilization(loads)
    return -(-busy * PPM // hyper)


def _keeps_share(demand: Demand, share_ppm: int) -> bool:
    return demand.busy * PPM <= demand.hyper * (PPM - share_ppm)


def first_failing(loads: Sequence[Load], dispatch_ns: int = 0, effort: Effort | None = None) -> int | None:
    """The first t with h(t) + b(t) > t, None if there is none; Demand.first_failing has the fine print."""
    if (hopeless := _hopeless(loads)) is not None:
        return max(hopeless.deadline_ns - hopeless.jitter_ns, 0)
    return Demand(loads, dispatch_ns).first_failing(effort or Effort(VERDICT_EFFORT))


def _hopeless(loads: Sequence[Load]) -> Load | None:
    """A loop whose job can't even end alone: D - J < 1, where the demand test has no instant to look at."""
    return next((load for load in loads if load.deadline_ns - load.jitter_ns < 1), None)


def feasible(loads: Sequence[Load], dispatch_ns: int = 0, share_ppm: int = 0, effort: Effort | None = None) -> bool:
    """Whether no release pattern makes a job miss and the share stays free. Raises Undecided."""
    if any(load.cost_ns > load.deadline_ns - load.jitter_ns for load in loads):
        return False
    if not loads:
        return True
    demand = Demand(loads, dispatch_ns)
    if not _keeps_share(demand, share_ppm):
        return False
    effort = effort or Effort(VERDICT_EFFORT)
    if demand.failing(demand.latest, effort) is not None:
        return False
    horizon = demand.horizon()
    return horizon is not None and demand.failing(horizon, effort, demand.latest) is None


def longest_dispatch_ns(loads: Sequence[Load], cap_ns: int, effort: Effort) -> int:
    """The longest best-effort dispatch that an admitted set can bear, at most cap_ns.

    B - 1 ≤ t - h(t) at every instant. Where the least is too far to find, the longest that could be proven.
    """
    if not loads:
        return cap_ns
    demand = Demand(loads, blocking=False)
    if demand.busy == demand.hyper:
        return 0  # after a hyperperiod no time at all is left over
    while cap_ns > 0:
        part = effort.portion(3)
        try:
            return 1 + demand.slack(part, cap_ns - 1)[demand.earliest]
        except Undecided:
            cap_ns //= 4
        finally:
            effort.settle(part)
    return 0


def never_fits_ns(loads: Sequence[Load], dispatch_ns: int) -> int:
    """The cost from which a best-effort dispatch can never start while all loops are attached.

    It starts at any time up to dispatch_ns, else in a gap that is known: from one job of a loop to the next possible
    arrival, so shorter than the least period.
    """
    return max(dispatch_ns + 1, min((load.period_ns for load in loads), default=PERIOD_NS_MAX))


def _margins(loads: Sequence[Load], dispatch_ns: int, effort: Effort) -> list[int]:
    """A job due at t ends by h(t) + b(t): margin is at least the least t - h(t) - b(t) over t ≥ D - J."""
    if not loads:
        return []
    try:
        least = Demand(loads, dispatch_ns).slack(effort)
    except Undecided:
        return [0 for _ in loads]  # admitted, so nothing is late; more is not proven
    return [least[load.deadline_ns - load.jitter_ns] for load in loads]


# ---- refusals ----


def _collisions(loads: Sequence[Load], dispatch_ns: int, t: int) -> tuple[Collision, ...]:
    """Who is due by t, and the one that blocks them; in configuration order."""
    due: list[tuple[int, Collision]] = []
    blocker: tuple[int, int, str | None] | None = (dispatch_ns - 1, 1 << 62, None) if dispatch_ns > 1 else None
    for load in loads:
        own = load.deadline_ns - load.jitter_ns
        if own <= t:
            count = (t - own) // load.period_ns + 1
            last = own + (count - 1) * load.period_ns
            due.append((load.order, Collision(load.name, count, count * load.cost_ns, last, False)))
        elif load.cost_ns > 1 and (blocker is None or load.cost_ns - 1 > blocker[0]):
            blocker = (load.cost_ns - 1, load.order, load.name)
    if blocker is not None:
        due.append((blocker[1], Collision(blocker[2], 1, blocker[0], None, True)))
    return tuple(collision for _, collision in sorted(due, key=lambda item: item[0]))


def _least(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least value in (low, high] that fits, None if high does not; fits is monotone."""
    if high <= low or not fits(high):
        return None
    step = 1
    while low + step < high and not fits(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


class _Search:
    """Feasibility of a set with one loop changed, within an effort; remembers whether every probe was decided.

    A longer period or deadline never raises h(t) + b(t) at any t (a loop that stops being demand becomes a blocker
    of one unit less), and never adds an instant before the others: so what fits is everything from some value on.
    """

    def __init__(self, loads: Sequence[Load], loop: Load, dispatch_ns: int, share_ppm: int, effort: Effort) -> None:
        self.loads, self.loop = loads, loop
        self.dispatch_ns, self.share_ppm, self.effort = dispatch_ns, share_ppm, effort
        self.exact = True

    def fits(self, period_ns: int, deadline_ns: int) -> bool:
        loop = self.loop
        changed = LoopLoad(
            loop.name, period_ns, deadline_ns, loop.jitter_ns, loop.cost_ns, loop.criticality, loop.order
        )
        loads = [changed if load is loop else load for load in self.loads]
        probe = Effort(min(PROBE_EFFORT_MAX, max(self.effort.left, 0)))
        before = probe.left
        try:
            return feasible(loads, self.dispatch_ns, self.share_ppm, probe)
        except Undecided:
            self.exact = False
            return False
        finally:
            self.effort.left -= before - max(probe.left, 0)

    def period_ns(self) -> int | None:
        loop = self.loop
        moves = loop.deadline_ns == loop.period_ns
        return _least(
            lambda period: self.fits(period, period if moves else loop.deadline_ns), loop.period_ns, PERIOD_NS_MAX
        )

    def deadline_ns(self) -> int | None:
        loop = self.loop
        return _least(lambda deadline: self.fits(loop.period_ns, deadline), loop.deadline_ns, loop.period_ns)


def _refusal(
    loads: Sequence[Load], dispatch_ns: int, share_ppm: int, reason: Literal["demand", "share", "horizon"], at_ns: int,
    missing_ns: int, effort: Effort,
) -> Refusal:  # fmt: skip
    jobs = _collisions(loads, dispatch_ns, at_ns)
    part = {job.loop for job in jobs}
    loop = max((load for load in loads if load.name in part), key=lambda load: load.order)
    search = _Search(loads, loop, dispatch_ns, share_ppm, effort)
    period, deadline = search.period_ns(), search.deadline_ns()
    return Refusal(reason, at_ns, missing_ns, jobs, loop.name, period, deadline, search.exact)


def _explain(loads: Sequence[Load], dispatch_ns: int, share_ppm: int, scale: int) -> Refusal | None:
    """None if the set is admitted."""
    search = Effort(SEARCH_EFFORT // scale)
    # Before the schedule is looked at: no other loop is to be named for one that can't be served even alone.
    too_long = next((load for load in loads if load.cost_ns > load.deadline_ns - load.jitter_ns), None)
    if too_long is not None:
        left_ns = too_long.deadline_ns - too_long.jitter_ns
        found = _Search(loads, too_long, dispatch_ns, share_ppm, search)
        return Refusal(
            "alone", max(left_ns, 0), too_long.cost_ns - left_ns,
            (Collision(too_long.name, 1, too_long.cost_ns, max(left_ns, 0), False),),
            too_long.name, found.period_ns(), found.deadline_ns(), found.exact,
        )  # fmt: skip
    demand = Demand(loads, dispatch_ns)
    try:
        at_or_none = demand.first_failing(Effort(VERDICT_EFFORT // scale))
    except Undecided as undecided:
        at = max(undecided.passed_ns, demand.latest)
        return _refusal(loads, dispatch_ns, share_ppm, "horizon", at, 0, search)
    if at_or_none is not None:
        missing = demand.demand(at_or_none) + demand.blocking(at_or_none) - at_or_none
        return _refusal(loads, dispatch_ns, share_ppm, "demand", at_or_none, missing, search)
    if not _keeps_share(demand, share_ppm):
        missing = -(-demand.busy * SHARE_SPAN_NS // demand.hyper) - SHARE_SPAN_NS * (PPM - share_ppm) // PPM
        return _refusal(loads, dispatch_ns, share_ppm, "share", SHARE_SPAN_NS, missing, search)
    return None


# ---- verdicts ----


def admit(loads: Sequence[Load], best_effort: BestEffort = AUTO, *, wcrt: bool = False, scale: int = 1) -> Verdict:
    """Judge the loops of one device. scale divides the effort, where several devices are judged in one go.

    Raises InvalidLoop. With wcrt, response times are exact, or None where they are too far to find.
    """
    validate(loads)
    dispatch_ns = best_effort.max_dispatch_ns if best_effort.mode == "limits" else 0
    share_ppm = best_effort.share_ppm if best_effort.mode == "limits" else 0
    ppm = utilization_ppm(loads)
    refusal = _explain(loads, dispatch_ns, share_ppm, scale) if loads else None
    if refusal is not None:
        plain = tuple(_loop_verdict(load, None, None) for load in loads)
        return Verdict(False, ppm, dispatch_ns, share_ppm, plain, refusal)
    if best_effort.mode == "auto":
        dispatch_ns = longest_dispatch_ns(loads, AUTO_DISPATCH_NS_MAX, Effort(BEST_EFFORT_EFFORT // scale))
        share_ppm = min(AUTO_SHARE_PPM_MAX, PPM - ppm)
    margins = _margins(loads, dispatch_ns, Effort(MARGIN_EFFORT // scale))
    effort = Effort(RESPONSE_EFFORT // scale)
    loops = []
    for index, load in enumerate(loads):
        response = _response_or_none(loads, index, dispatch_ns, effort) if wcrt else None
        margin = margins[index] if response is None else load.deadline_ns - response
        loops.append(_loop_verdict(load, response, margin))
    return Verdict(True, ppm, dispatch_ns, share_ppm, tuple(loops), None)


def _response_or_none(loads: Sequence[Load], index: int, dispatch_ns: int, effort: Effort) -> int | None:
    try:
        return worst_case_response_ns(loads, index, dispatch_ns, effort)
    except Undecided:
        return None


def _loop_verdict(load: Load, wcrt_ns: int | None, margin_ns: int | None) -> LoopVerdict:
    return LoopVerdict(load.name, load.period_ns, load.deadline_ns, load.jitter_ns, load.cost_ns, wcrt_ns, margin_ns)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to start. verdict is of the loops that are served, or the refusal; shed has those left out, with why."""

    start: bool
    certified: bool
    served: tuple[str, ...]
    shed: tuple[tuple[str, Refusal], ...]
    verdict: Verdict


def decide(loads: Sequence[Load], on_refusal: OnRefusal, best_effort: BestEffort = AUTO, *, scale: int = 1) -> Outcome:
    """Admission with its consequence. certified here means the schedule only; rights and measurements come on top.

    shed serves, in the order of criticality and then of configuration, each loop that fits beside those before it: no
    loop is left out for the sake of a less critical one.
    """
    names = tuple(load.name for load in loads)
    verdict = admit(loads, best_effort, scale=scale)
    if verdict.admitted:
        return Outcome(True, True, names, (), verdict)
    if on_refusal == "refuse":
        return Outcome(False, False, (), (), verdict)
    if on_refusal == "uncertified":
        return Outcome(True, False, names, (), verdict)
    served: list[Load] = []
    shed: list[tuple[str, Refusal]] = []
    rule = OFF if best_effort.mode == "auto" else best_effort
    for load in sorted(loads, key=lambda load: (load.criticality, load.order)):
        attempt = admit([*served, load], rule, scale=scale * len(loads))
        if attempt.refusal is None:
            served.append(load)
        else:
            shed.append((load.name, attempt.refusal))
    served.sort(key=lambda load: load.order)
    final = admit(served, best_effort, scale=scale)
    return Outcome(True, final.admitted, tuple(load.name for load in served), tuple(shed), final)
