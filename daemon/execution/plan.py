"""From the supervisor's messages to the scheduler's words: one place that knows both."""

from __future__ import annotations

from typing import Any, Final

from taktd.daemon.schedule.job import FIRM, HARD, SOFT, Queue, Task

__all__ = ["queue_of", "task_of"]

CRITICALITY: Final = {"hard": HARD, "firm": FIRM, "soft": SOFT}


def task_of(loop: dict[str, Any], order: int, cost: dict[str, Any]) -> Task:
    """A loop of the plan with the cost it was admitted for (``cost_ns``) and the least it needs (``shortest_ns``)."""
    m, k = loop.get("mk") or (0, 0)
    return Task(
        name=loop["name"],
        period_ns=loop["period_ns"],
        deadline_ns=loop["deadline_ns"],
        jitter_ns=loop["jitter_ns"],
        cost_ns=cost["cost_ns"],
        shortest_ns=cost["shortest_ns"],
        criticality=CRITICALITY[loop["criticality"]],
        order=order,
        on_late_run=loop["on_late"] == "run",
        m=m,
        k=k,
        clock=loop.get("trigger") == "clock",
        phase_ns=loop.get("phase_ns", 0),
        max_age_ns=loop.get("max_age_ns", 0),
        on_stale=loop.get("on_stale", "skip"),
    )


def queue_of(model: dict[str, Any], order: int, cost: dict[str, Any]) -> Queue:
    """A model of the plan as best-effort lanes see it; ``cost["cost_ns"][n - 1]`` is the cost of a batch of n."""
    return Queue(
        name=model["name"],
        cost_ns=tuple(cost["cost_ns"]),
        preferred=tuple(model.get("preferred", ())),
        max_delay_ns=model.get("max_delay_ns", 0),
        order=order,
        shortest_ns=cost["shortest_ns"],
    )
