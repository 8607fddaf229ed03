"""What a start of taktd would say to a configuration, from costs that are known beforehand. Pure; for `taktctl check`.

The daemon judges what its executors have measured (certification.py); here the same is asked of budgets, of a cost file
and of what simulated devices declare. on_refusal doesn't count: a loop that it would shed or leave uncertified is
refused here, since it is what somebody who plans has to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taktd.daemon import admission
from taktd.daemon.certification.certification import best_effort_rule
from taktd.daemon.certification.cost_file import Costs, known_times, loop_costs
from taktd.daemon.certification.costs import LoopCost, Measured, loads_of, loop_cost
from taktd.daemon.certification.standby import cant_stand_in, judge_standby
from taktd.daemon.config.configuration import Configuration

__all__ = ["Foresight", "StandbyUnknown", "foresee"]


class StandbyUnknown(ValueError):
    """Stand-ins whose cost nobody knows: (loop, model, device) each. A budget is one for the loop's own device."""

    def __init__(self, stand_ins: tuple[tuple[str, str, str], ...]) -> None:
        listed = ", ".join(f"{loop} (model {model} on {device})" for loop, model, device in stand_ins)
        super().__init__(f"no cost is known for the stand-in of {listed}")
        self.stand_ins = stand_ins


@dataclass(frozen=True)
class Foresight:
    """One device. verdict is of its own loops and of those that it can promise to stand in for, or of its own alone
    where they are refused; stand_ins: loops that it stands in for, and why it can't promise it ("": it can);
    refused: those that a start would be refused for, as the daemon says it.
    """

    verdict: admission.Verdict
    stand_ins: Mapping[str, str]
    refused: tuple[str, ...]

    @property
    def admitted(self) -> bool:
        return self.verdict.admitted and not self.refused

    def as_json(self) -> dict[str, Any]:
        stand_ins = {loop: {"certified": not why, "reason": why} for loop, why in self.stand_ins.items()}
        return self.verdict.as_json() | {"stand_ins": stand_ins, "stand_ins_refused": list(self.refused)}


def foresee(configuration: Configuration, costs: Costs, *, wcrt: bool = False) -> dict[str, Foresight]:
    """By device. Raises CostUnknown, StandbyUnknown, BudgetTooSmall."""
    own = loop_costs(configuration, costs)
    margin = configuration.admission.margin_ppm
    for loop in configuration.loops.values():
        times = known_times(configuration, costs, loop.device, loop.model)
        if times is not None:  # then a budget is held against it
            own[loop.name] = loop_cost(loop, times[0], margin, times[1])
    standby = {name: _standby_times(configuration, costs, name) for name in configuration.devices}
    unknown = tuple(
        (loop.name, model, device)
        for device, measured in standby.items()
        for loop, model in configuration.stand_ins_on(device)
        if model not in measured and not loop.fallback_uncertified
    )
    if unknown:
        raise StandbyUnknown(unknown)
    return {name: _device(configuration, costs, own, standby[name], name, wcrt) for name in configuration.devices}


def _standby_times(configuration: Configuration, costs: Costs, device: str) -> dict[str, Measured]:
    """Of the models by which a device stands in for others; those that are known."""
    models = {model for _, model in configuration.stand_ins_on(device)}
    found = {model: known_times(configuration, costs, device, model) for model in models}
    return {model: times[0] for model, times in found.items() if times is not None}


def _device(
    configuration: Configuration, costs: Costs, own: Mapping[str, LoopCost], times: Mapping[str, Measured], name: str,
    wcrt: bool,
) -> Foresight:  # fmt: skip
    rule, scale = best_effort_rule(configuration.devices[name].best_effort), len(configuration.devices)
    outcome = admission.decide(loads_of(configuration, name, own), "refuse", rule, scale=scale)
    if not outcome.certified:
        return Foresight(outcome.verdict, {}, ())
    dispatch_ns = costs[name].dispatch_ns if name in costs else 0
    standby = judge_standby(configuration, name, times, dispatch_ns, outcome, own, rule, "uncertified", scale)
    verdict = admission.admit(standby.loads, rule, wcrt=True, scale=scale) if wcrt else standby.verdict
    stand_ins, refused = {}, []
    for loop, model in configuration.stand_ins_on(name):
        unmeasured = "" if model in times else f"what {model} costs on {name} is not known"
        why = stand_ins[loop.name] = unmeasured or standby.reasons.get(loop.name, "")
        if why and not loop.fallback_uncertified:
            refused.append(cant_stand_in(loop.name, why))
    return Foresight(verdict, stand_ins, tuple(refused))
