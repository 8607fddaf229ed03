"""From measured times to the costs that admission and the scheduler reckon with. Pure; integers only.

C of a loop is its declared budget, or p99.9 × margin + dispatch cost of what was measured. Called by the supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from taktd.daemon.config.configuration import Configuration, Loop, Model
from taktd.daemon.config.durations import PPM, format_duration
from taktd.daemon.schedule.demand import LoopLoad

Measured = Mapping[str, Mapping[str, int]]  # batch size → {"p50_ns", "p99_ns", "p999_ns", "max_ns", "runs", …}


@dataclass(frozen=True)
class LoopCost:
    """cost_ns is C; shortest_ns what a job needs at the least; warnings are for people."""

    cost_ns: int
    shortest_ns: int
    warning: str = ""


class BudgetTooSmall(Exception):
    """A declared budget that the engine does not even keep in the middle."""


def engine_cost_ns(measured: Mapping[str, int], margin_ppm: int, dispatch_ns: int) -> int:
    """p99.9 × margin, rounded up, and the cost of dispatching it."""
    return -(-measured["p999_ns"] * margin_ppm // PPM) + dispatch_ns


def loop_cost(loop: Loop, measured: Measured, margin_ppm: int, dispatch_ns: int) -> LoopCost:
    """What one job of the loop costs. Raises BudgetTooSmall."""
    single = measured["1"]
    if loop.budget_ns is None:
        return LoopCost(engine_cost_ns(single, margin_ppm, dispatch_ns), single["p50_ns"])
    budget, p50, p99 = loop.budget_ns, single["p50_ns"], single["p99_ns"]
    if budget < p50:
        raise BudgetTooSmall(
            f"loops.{loop.name}.budget: {format_duration(budget)} is less than the model {loop.model} takes in the "
            f"middle (p50 {format_duration(p50)}); declare at least its p99, {format_duration(p99)}, or leave it out"
        )
    warning = ""
    if budget < p99:
        warning = (
            f"loops.{loop.name}.budget: {format_duration(budget)} is less than the p99 of {loop.model}, "
            f"{format_duration(p99)}: one job in a hundred will overrun"
        )
    return LoopCost(budget, min(p50, budget), warning)


def standby_cost(loop: Loop, measured: Measured, margin_ppm: int, dispatch_ns: int) -> LoopCost:
    """What a job of a loop costs on a device that stands in for its own, as measured there.

    A declared budget was declared for the loop's own device: it holds here only where it is no less than the p99.
    """
    single = measured["1"]
    if loop.budget_ns is not None and loop.budget_ns >= single["p99_ns"]:
        return LoopCost(loop.budget_ns, min(single["p50_ns"], loop.budget_ns))
    return LoopCost(engine_cost_ns(single, margin_ppm, dispatch_ns), single["p50_ns"])


def model_costs(model: Model, measured: Measured, margin_ppm: int, dispatch_ns: int) -> tuple[int, ...]:
    """What a batch of 1, 2, … max_batch jobs costs; never less than a smaller one, whatever chance measured."""
    largest = model.batching.max_batch if model.batching else 1
    costs = (
        engine_cost_ns(measured[str(size)], margin_ppm, dispatch_ns)
        for size in range(1, largest + 1)
        if str(size) in measured
    )
    return tuple(accumulate(costs, max))


CRITICALITY = {"hard": 0, "firm": 1, "soft": 2}


def loads_of(configuration: Configuration, device: str, costs: Mapping[str, LoopCost]) -> tuple[LoopLoad, ...]:
    """The device's loops in configuration order."""
    return tuple(
        LoopLoad(
            loop.name, loop.period_ns, loop.deadline_ns, loop.jitter_ns, costs[loop.name].cost_ns,
            CRITICALITY[loop.criticality], order,
        )
        for order, loop in enumerate(configuration.loops_on(device))
    )  # fmt: skip


def as_json(
    driver: str, measured: Mapping[str, Measured], digests: Mapping[str, str], dispatch_ns: int
) -> dict[str, Any]:
    """One device's part of `taktctl costs --json`, which `taktctl check --costs` reads."""
    return {
        "driver": driver,
        "dispatch_ns": dispatch_ns,
        "models": {
            name: {"digest": digests.get(name, ""), "batches": {size: dict(cost) for size, cost in batches.items()}}
            for name, batches in measured.items()
        },
    }
