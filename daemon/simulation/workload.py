"""From a configuration and measured costs to the load that the simulation runs, device by device.

Called by `taktctl simulate`. Pure; reads no files.
"""

from __future__ import annotations

from taktd.daemon.admission import admit
from taktd.daemon.certification.certification import best_effort_rule
from taktd.daemon.certification.cost_file import Costs, CostUnknown, loop_costs, queue_costs
from taktd.daemon.certification.costs import CRITICALITY, LoopCost, Measured, loads_of
from taktd.daemon.config.configuration import Configuration, Loop
from taktd.daemon.config.durations import PPM
from taktd.daemon.schedule.job import Queue, Task
from taktd.daemon.simulation.simulation import Distribution, Workload

__all__ = ["task_of", "workloads"]


def task_of(loop: Loop, cost: LoopCost, order: int) -> Task:
    """The loop in the scheduler's words."""
    m, k = loop.mk or (0, 0)
    return Task(
        loop.name, loop.period_ns, loop.deadline_ns, loop.jitter_ns, cost.cost_ns, CRITICALITY[loop.criticality], order,
        on_late_run=loop.on_late == "run", m=m, k=k, clock=loop.trigger == "clock", phase_ns=loop.phase_ns,
        max_age_ns=loop.max_age_ns, on_stale=loop.on_stale, shortest_ns=cost.shortest_ns,
    )  # fmt: skip


def workloads(configuration: Configuration, costs: Costs, best_effort_hz: int, worst: bool) -> dict[str, Workload]:
    """Each device's load. Execution times are drawn where the costs say how, else (and if worst) each is its C.

    Best effort goes to the first device that has a model for it. Raises CostUnknown, InvalidLoop."""
    known = loop_costs(configuration, costs)
    result = {}
    for device, settings in configuration.devices.items():
        loops = configuration.loops_on(device)
        verdict = admit(loads_of(configuration, device, known), best_effort_rule(settings.best_effort))
        tasks = tuple(task_of(loop, known[loop.name], order) for order, loop in enumerate(loops))
        drawn = tuple(None if worst else _distribution(costs, device, loop.model) for loop in loops)
        queues = _queues(configuration, costs, device, verdict.max_dispatch_ns) if best_effort_hz else ()
        result[device] = Workload(
            tasks, drawn, queues, best_effort_hz if queues else 0, verdict.max_dispatch_ns, verdict.share_ppm
        )
        if queues:
            best_effort_hz = 0
    if best_effort_hz:
        raise CostUnknown(
            "no cost is known for best-effort jobs, and no device admits any beside its loops: give measured costs "
            "with --costs FILE (`taktctl costs --json` prints them)"
        )
    return result


def _queues(configuration: Configuration, costs: Costs, device: str, max_dispatch_ns: int) -> tuple[Queue, ...]:
    """The device's models with their measured costs; where none is known, jobs of the longest admitted dispatch."""
    queues: list[Queue] = []
    for model in configuration.models.values():
        cost_ns = queue_costs(configuration, costs, device, model.name) if model.device == device else ()
        if cost_ns:
            preferred, delay_ns = (model.batching.preferred, model.batching.max_delay_ns) if model.batching else ((), 0)
            queues.append(Queue(model.name, cost_ns, preferred, delay_ns, len(queues)))
    if not queues and max_dispatch_ns:
        queues.append(Queue("longest dispatch", (max_dispatch_ns,)))
    return tuple(queues)


def _distribution(costs: Costs, device: str, model: str) -> Distribution | None:
    """Measured times with the cost of a dispatch; below the median nothing is known, so the median is taken."""
    part = costs.get(device)
    if part is None or model not in part.measured:
        return None
    measured: Measured = part.measured[model]
    single, dispatch_ns = measured["1"], part.dispatch_ns
    points = ((0, "p50_ns"), (500_000, "p50_ns"), (990_000, "p99_ns"), (999_000, "p999_ns"), (PPM, "max_ns"))
    return Distribution(tuple((ppm, single[name] + dispatch_ns) for ppm, name in points))
