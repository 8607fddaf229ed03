"""Admission against an oracle that knows no theory: it walks every reachable state of a small device, tick by tick."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taktd.daemon.admission import OFF, BestEffort, admit, feasible, first_failing, longest_dispatch_ns
from taktd.daemon.schedule.demand import Demand, Effort
from taktd.daemon.schedule.response_time import worst_case_response_ns


@dataclass(frozen=True)
class Loop:
    name: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    cost_ns: int
    criticality: int = 1
    order: int = 0


@dataclass(frozen=True)
class Explored:
    missed: bool
    responses: tuple[int, ...]  # longest seen, per loop


# Of one loop: (ticks since its last nominal arrival, at most T; phase), phase 0 nothing, 1 arrived, not released, 2
# waiting, 3 running.
Cell = tuple[int, int]


def explore(loops: Sequence[Loop], dispatch: int = 0, states_max: int = 150_000) -> Explored | None:
    """All sporadic release patterns, release jitters and best-effort starts of integer times; None if they are too
    many.

    A state is what can still matter: ages, phases and what is left of the running job. It stops at the first miss.
    """
    start = tuple((loop.period_ns, 0) for loop in loops)
    responses = [0 for _ in loops]
    # (cells, what is left of the running job; below 0: of best effort)
    todo: list[tuple[tuple[Cell, ...], int]] = [(start, 0)]
    seen = set(todo)
    while todo:
        cells, left = todo.pop()
        for choice in _arrivals(loops, cells):
            for after, rest in _started(loops, choice, left, dispatch):
                state = _tick(loops, after, rest, responses)
                if state is None:
                    return Explored(True, tuple(responses))
                if state not in seen:
                    if len(seen) >= states_max:
                        return None
                    seen.add(state)
                    todo.append(state)
    return Explored(False, tuple(responses))


def _arrivals(loops: Sequence[Loop], cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
    options = []
    for loop, (age, phase) in zip(loops, cells, strict=True):
        if phase == 0 and age == loop.period_ns:
            options.append([(age, 0), (0, 2), *([(0, 1)] if loop.jitter_ns else [])])
        elif phase == 1:
            options.append([(age, 2), *([(age, 1)] if age < loop.jitter_ns else [])])
        else:
            options.append([(age, phase)])
    yield from product(*options)


def _started(
    loops: Sequence[Loop], cells: tuple[Cell, ...], left: int, dispatch: int
) -> Iterator[tuple[tuple[Cell, ...], int]]:
    if left != 0:
        yield cells, left
        return
    waiting = [
        (loop.deadline_ns - age, loop.criticality, loop.order, index)
        for index, (loop, (age, phase)) in enumerate(zip(loops, cells, strict=True))
        if phase == 2
    ]
    if waiting:
        index = min(waiting)[3]
        running = (*cells[:index], (cells[index][0], 3), *cells[index + 1 :])
        yield running, loops[index].cost_ns
        return
    yield cells, 0
    if dispatch:
        yield cells, -dispatch


def _tick(
    loops: Sequence[Loop], cells: tuple[Cell, ...], left: int, responses: list[int]
) -> tuple[tuple[Cell, ...], int] | None:
    """The state one tick later; None if a job is late then."""
    left += (left < 0) - (left > 0)
    result = []
    for index, (loop, (age, phase)) in enumerate(zip(loops, cells, strict=True)):
        age += 1
        if phase == 3 and left == 0:
            responses[index] = max(responses[index], age)
            phase, late = 0, age > loop.deadline_ns
        else:
            late = phase != 0 and age >= loop.deadline_ns
        if late:
            return None
        result.append((min(age, loop.period_ns), phase))
    return tuple(result), left


def random_loops(draw: random.Random, count_max: int = 3, period_max: int = 9) -> list[Loop]:
    loops = []
    count = draw.randint(1, count_max)
    gentle = draw.random() < 0.6  # without it hardly a set of three loops would be admitted
    for index in range(count):
        period = draw.randint(4 if gentle else 2, period_max)
        deadline = period if draw.random() < 0.35 else draw.randint(period * 3 // 4 if gentle else 1, period)
        jitter = draw.randint(0, min(3, deadline - 1)) if draw.random() < 0.4 else 0
        cost = draw.randint(1, max(1, min(period // count if gentle else period // 2 + 1, deadline)))
        loops.append(Loop(f"loop{index}", period, deadline, jitter, cost, draw.choice((1, 1, 0)), index))
    return loops


@settings(max_examples=600, deadline=None)
@given(st.integers(0, 2**40))
def test_the_verdict_is_that_of_every_release_pattern(seed: int) -> None:
    draw = random.Random(seed)
    loops = random_loops(draw, count_max=4)
    dispatch = draw.choice((0, 0, 1, 2, 4))
    explored = explore(loops, dispatch)
    if explored is None:
        return
    assert feasible(loops, dispatch) is not explored.missed, (loops, dispatch)
    if not explored.missed:
        for index in range(len(loops)):
            response = worst_case_response_ns(loops, index, dispatch, Effort(10**8))
            assert response == explored.responses[index], (loops, dispatch, index)


def slow_horizon(loops: Sequence[Loop]) -> int:
    return 3 * max(loop.period_ns for loop in loops) + Demand(loops).hyper


def brute_first_failing(loops: Sequence[Loop], dispatch: int, limit: int) -> int | None:
    """The condition of the issue, at every t that is an instant, straight from its words."""
    for t in range(1, limit + 1):
        instants = [(t - e.deadline_ns + e.jitter_ns) for e in loops]
        if not any(ahead >= 0 and ahead % e.period_ns == 0 for e, ahead in zip(loops, instants, strict=True)):
            continue
        demand = sum(
            (ahead // e.period_ns + 1) * e.cost_ns for e, ahead in zip(loops, instants, strict=True) if ahead >= 0
        )
        block = max(0, dispatch - 1, *(e.cost_ns - 1 for e in loops if e.deadline_ns - e.jitter_ns > t), 0)
        if demand + block > t:
            return t
    return None


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**40))
def test_the_first_failing_instant_is_the_first(seed: int) -> None:
    draw = random.Random(seed)
    loops = random_loops(draw, count_max=6, period_max=12)
    dispatch = draw.choice((0, 0, 1, 3, 6))
    assert first_failing(loops, dispatch) == brute_first_failing(loops, dispatch, slow_horizon(loops)), (
        loops, dispatch,
    )  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**40))
def test_nothing_nearer_than_the_nearest_fits(seed: int) -> None:
    draw = random.Random(seed)
    loops = random_loops(draw, count_max=4)
    dispatch = draw.choice((0, 0, 2, 4))
    rule = BestEffort("limits", dispatch, draw.choice((0, 100_000))) if dispatch else OFF
    verdict = admit(loops, rule)
    if verdict.refusal is None:
        return
    refusal = verdict.refusal
    loop = next(e for e in loops if e.name == refusal.loop)
    assert refusal.exact

    def fits(period: int, deadline: int) -> bool:
        changed = Loop(loop.name, period, deadline, loop.jitter_ns, loop.cost_ns, loop.criticality, loop.order)
        others = [changed if e is loop else e for e in loops]
        busy, hyper = Demand(others).busy, Demand(others).hyper
        if busy * 10**6 > hyper * (10**6 - rule.share_ppm) or changed.cost_ns > deadline - changed.jitter_ns:
            return False
        if any(e.deadline_ns - e.jitter_ns < 1 for e in others):
            return False
        return brute_first_failing(others, dispatch, slow_horizon(others)) is None

    moves = loop.deadline_ns == loop.period_ns
    last = refusal.nearest_period_ns or loop.period_ns + 40
    fitting = [p for p in range(loop.period_ns + 1, min(last, 80) + 1) if fits(p, p if moves else loop.deadline_ns)]
    if refusal.nearest_period_ns is None or refusal.nearest_period_ns > 80:
        assert not fitting
    else:
        assert fitting == [refusal.nearest_period_ns], (loops, rule)
    deadlines = [d for d in range(loop.deadline_ns + 1, loop.period_ns + 1) if fits(loop.period_ns, d)]
    assert (deadlines[0] if deadlines else None) == refusal.nearest_deadline_ns, (loops, rule)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**40))
def test_the_longest_dispatch_fits_and_one_more_does_not(seed: int) -> None:
    draw = random.Random(seed)
    loops = random_loops(draw, count_max=4)
    if not feasible(loops):
        return
    longest = longest_dispatch_ns(loops, 50, Effort(10**7))
    assert feasible(loops, longest)
    if longest > 0 and longest < 50:
        assert not feasible(loops, longest + 1), (loops, longest)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**40))
def test_margins_are_a_safe_bound_of_the_exact_ones(seed: int) -> None:
    draw = random.Random(seed)
    loops = random_loops(draw, count_max=4)
    for rule in (OFF, BestEffort("auto"), BestEffort("limits", 3, 0)):
        quick, exact = admit(loops, rule), admit(loops, rule, wcrt=True)
        if quick.admitted:
            for bound, true in zip(quick.loops, exact.loops, strict=True):
                assert true.wcrt_ns is not None
                assert true.margin_ns == true.deadline_ns - true.wcrt_ns
                assert bound.margin_ns is not None
                assert 0 <= bound.margin_ns <= true.margin_ns, (loops, rule)


def test_the_oracle_finds_a_miss_where_there_is_one() -> None:
    # The canary: without it an oracle that never looks would agree with everything that is admitted.
    explored = explore([Loop("a", 4, 2, 0, 1, order=0), Loop("b", 9, 9, 0, 3, order=1)])
    assert explored is not None
    assert explored.missed


@pytest.mark.parametrize("dispatch", [0, 5])
def test_large_sets_agree_with_the_plain_formula(dispatch: int) -> None:
    draw = random.Random(dispatch)
    for _ in range(40):
        loops = []
        for index in range(draw.randint(4, 12)):
            period = draw.choice((20, 30, 40, 60, 120, 240))
            deadline = draw.randint(period // 2, period)
            loops.append(Loop(f"l{index}", period, deadline, draw.randint(0, 3), draw.randint(1, 5), order=index))
        assert first_failing(loops, dispatch) == brute_first_failing(loops, dispatch, 1200)
