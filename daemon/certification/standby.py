"""Whether a device can stand in for loops of others, and what they cost there. Pure; part of certification.

The device's own promises come first: a loop of another device is taken in only where all that were taken in before, and
the device's own, keep their deadlines with it, at the cost that its model was measured to have here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from taktd.daemon import admission
from taktd.daemon.certification.costs import CRITICALITY, LoopCost, Measured, loads_of, standby_cost
from taktd.daemon.config.configuration import Configuration
from taktd.daemon.schedule.demand import LoopLoad

THROTTLED_NS: Final = 50_000_000  # the kernel's real-time throttle keeps a healthy executor still for as long
# Without real-time rights, or without cores of its own, others may keep it still for longer than that.
UNPRIVILEGED_NS: Final = 1_000_000_000


class CantStandIn(Exception):
    """A stand-in that was asked for and is not admissible; with the analysis, and what to do."""


@dataclass(frozen=True)
class Standby:
    """Loops of other devices on this one: what they cost here, those it serves if need be, why not certified."""

    costs: dict[str, LoopCost]
    served: tuple[str, ...]
    reasons: dict[str, str]
    loads: tuple[LoopLoad, ...]  # the device's own loops together with those that it can promise to stand in for
    verdict: admission.Verdict  # of these


def judge_standby(
    configuration: Configuration, device: str, measured: Mapping[str, Measured], dispatch_ns: int,
    own: admission.Outcome, costs: Mapping[str, LoopCost], rule: admission.BestEffort, policy: admission.OnRefusal,
    scale: int,
) -> Standby:  # fmt: skip
    """Takes in one loop after the other, the most critical first; the device's own promises come before all of them."""
    # Who plans may judge before each stand-in is measured (foresight.py); an executor has measured them all.
    loops = [(loop, model) for loop, model in configuration.stand_ins_on(device) if model in measured]
    margin = configuration.admission.margin_ppm
    there = {loop.name: standby_cost(loop, measured[model], margin, dispatch_ns) for loop, model in loops}
    loads = [load for load in loads_of(configuration, device, costs) if load.name in own.served]
    verdict = own.verdict
    reasons: dict[str, str] = {}
    served: list[str] = []
    order = len(configuration.loops)
    for loop, _ in sorted(loops, key=lambda entry: (entry[0].fallback_uncertified, CRITICALITY[entry[0].criticality])):
        load = LoopLoad(
            loop.name, loop.period_ns, loop.deadline_ns, loop.jitter_ns, there[loop.name].cost_ns,
            CRITICALITY[loop.criticality], order,
        )  # fmt: skip
        attempt = admission.admit([*loads, load], rule, scale=scale) if own.certified else own.verdict
        order += 1
        if attempt.admitted:
            loads, verdict = [*loads, load], attempt
            served.append(loop.name)
            continue
        reasons[loop.name] = attempt.refusal.text() if attempt.refusal else "not admitted"
        if loop.fallback_uncertified or policy == "uncertified":
            served.append(loop.name)
        elif policy == "refuse":
            raise CantStandIn(cant_stand_in(loop.name, reasons[loop.name]))
    return Standby(there, tuple(served), reasons, tuple(loads), verdict)


def cant_stand_in(loop: str, reason: str) -> str:
    """For the person who has to act."""
    return (
        f"can't stand in for loop {loop}: {reason}\n"
        f"  to do: give loops.{loop}.fallback a faster device or a smaller model, or accept it with "
        "fallback_uncertified: true"
    )


def hang_after_ns(configuration: Configuration, device: str, real_time: bool, throttle_ppm: int | None) -> int:
    """How long an executor with work may make no progress, beside the time its running job was admitted for."""
    shortest = min((loop.deadline_ns for loop in configuration.loops_on(device)), default=0)
    if not real_time or not configuration.devices[device].cores:
        return shortest + UNPRIVILEGED_NS
    return shortest + (THROTTLED_NS if throttle_ppm is not None else 0)
