"""What each device may promise: measured costs through admission, by the configured policy, to what is served.

A device is *certified* when its loops are admitted, its measurements were taken under real-time rights and hold on this
machine, its executor has these rights now, and the kernel's real-time throttle leaves it enough. Pure but for the two
kernel settings that are handed in. Called by the supervisor when every executor has loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal

from taktd.daemon import admission
from taktd.daemon.certification.costs import BudgetTooSmall, LoopCost, Measured, loads_of, loop_cost, model_costs
from taktd.daemon.certification.standby import CantStandIn, Standby, hang_after_ns, judge_standby
from taktd.daemon.config.configuration import BestEffort, Configuration
from taktd.daemon.config.durations import format_duration, format_ppm
from taktd.daemon.schedule.demand import LoopLoad

OnRefusal = Literal["refuse", "shed", "uncertified"]
REAL_TIME_POLICIES: Final = ("fifo", "rr")


class NotAdmitted(Exception):
    """The configuration promises what can't be kept; the message has every device's reason."""


@dataclass(frozen=True)
class Evidence:
    """What is known of one device: times per model and batch size, cost of a dispatch, rights now and when measured."""

    measured: Mapping[str, Measured]
    dispatch_ns: int
    rights: Mapping[str, Any]
    measured_real_time: bool

    @property
    def real_time(self) -> bool:
        return self.rights.get("policy") in REAL_TIME_POLICIES and bool(self.rights.get("mlocked"))


@dataclass(frozen=True)
class Judgement:
    """tasks and queues as the executor wants them; shed loops with the reason; reason says why not certified.

    standby_reason: why a loop's stand-in on this device can't promise its deadlines; loops that it can are not in it.
    """

    serve: dict[str, Any]
    shed: dict[str, str]
    certified: bool
    reason: str
    verdict: dict[str, Any]
    warnings: tuple[str, ...]
    standby_reason: dict[str, str]


def best_effort_rule(setting: BestEffort) -> admission.BestEffort:
    """The configuration's rule in admission's words."""
    if setting.mode == "auto":
        return admission.AUTO
    if setting.mode == "off":
        return admission.OFF
    return admission.BestEffort("limits", setting.max_dispatch_ns, setting.share_ppm)


def judge(
    configuration: Configuration, evidence: Mapping[str, Evidence], throttle_ppm: int | None
) -> dict[str, Judgement]:
    """One judgement per device, or NotAdmitted with all reasons. throttle_ppm: share the kernel leaves to real time."""
    judgements: dict[str, Judgement] = {}
    refusals: list[str] = []
    for name, known in evidence.items():
        try:
            judgements[name] = _judge_device(configuration, name, known, throttle_ppm, len(evidence))
        except (NotAdmitted, BudgetTooSmall, CantStandIn) as refusal:
            refusals.append(f"device {name}: {refusal}")
    if refusals:
        raise NotAdmitted("\n".join(refusals))
    for name, judgement in judgements.items():
        # Its own too: while it waits for its loops to come back it watches its stand-in, as that one watches it.
        homes = {name, *(loop.device for loop, _ in configuration.stand_ins_on(name))}
        judgement.serve["hang_after_ns"] = {
            home: hang_after_ns(configuration, home, _all_real_time(configuration, home, evidence), throttle_ppm)
            for home in homes
        }
    return judgements


def _all_real_time(configuration: Configuration, home: str, evidence: Mapping[str, Evidence]) -> bool:
    """Of everybody who may serve a device: who watches it does not know whom. Who is not there yet is like the rest."""
    names = {home, *(one.device for loop in configuration.loops_on(home) for one in loop.fallback if one.device)}
    return all(evidence[name].real_time for name in names if name in evidence)


def _judge_device(
    configuration: Configuration, device: str, known: Evidence, throttle_ppm: int | None, scale: int
) -> Judgement:
    margin = configuration.admission.margin_ppm
    costs: dict[str, LoopCost] = {
        loop.name: loop_cost(loop, known.measured[loop.model], margin, known.dispatch_ns)
        for loop in configuration.loops_on(device)
    }
    policy: OnRefusal = configuration.admission.on_refusal or ("refuse" if known.real_time else "uncertified")
    rule = best_effort_rule(configuration.devices[device].best_effort)
    outcome = admission.decide(loads_of(configuration, device, costs), policy, rule, scale=scale)
    refusal = outcome.verdict.refusal
    if not outcome.start:
        raise NotAdmitted(
            f"not admitted: {refusal.text() if refusal else 'no reason given'}\n"
            "  to do: change the loop, or set admission.on_refusal to shed or uncertified"
        )
    standby = judge_standby(
        configuration, device, known.measured, known.dispatch_ns, outcome, costs, rule, policy, scale
    )
    reason = _reason_not_certified(known, outcome, standby.verdict, throttle_ppm)
    return Judgement(
        serve=_serve_message(configuration, device, known, costs | standby.costs, outcome, standby),
        shed={name: why.text() for name, why in outcome.shed},
        certified=not reason,
        reason=reason,
        verdict=standby.verdict.as_json() | {"no_gap": _no_gap(configuration, device, known, costs, outcome)},
        warnings=tuple(cost.warning for cost in costs.values() if cost.warning),
        standby_reason=standby.reasons,
    )


def _reason_not_certified(
    known: Evidence, outcome: admission.Outcome, verdict: admission.Verdict, throttle_ppm: int | None
) -> str:
    """The first thing that stands against it, "" when nothing does. verdict: with the loops that it stands in for."""
    if not outcome.certified:
        refusal = outcome.verdict.refusal
        return f"not admitted: {refusal.text()}" if refusal else "not admitted"
    if not known.real_time:
        return "its executor has no real-time rights (SCHED_FIFO and locked memory)"
    if not known.measured_real_time:
        return "its engines were measured without real-time rights"
    if throttle_ppm is not None and verdict.utilization_ppm > throttle_ppm:
        used, left = format_ppm(verdict.utilization_ppm), format_ppm(throttle_ppm)
        return f"its loops need {used} of a core, the kernel leaves {left} to real time (sched_rt_runtime_us)"
    return ""


def _served_loads(
    configuration: Configuration, device: str, costs: Mapping[str, LoopCost], outcome: admission.Outcome
) -> list[LoopLoad]:
    return [load for load in loads_of(configuration, device, costs) if load.name in outcome.served]


def _no_gap(
    configuration: Configuration, device: str, known: Evidence, costs: Mapping[str, LoopCost],
    outcome: admission.Outcome,
) -> dict[str, str]:  # fmt: skip
    """Models that can never run as best effort beside the device's loops, with the numbers."""
    loads = _served_loads(configuration, device, costs, outcome)
    dispatch_ns = outcome.verdict.max_dispatch_ns
    limit_ns = admission.never_fits_ns(loads, dispatch_ns)
    result = {}
    for model in configuration.models_on(device):
        batches = model_costs(model, known.measured[model.name], configuration.admission.margin_ppm, known.dispatch_ns)
        if batches[0] < limit_ns:
            continue
        fastest = min(loads, key=lambda load: load.period_ns)
        result[model.name] = (
            f"model {model.name} can't run as best effort on {device}: a job is reckoned with "
            f"{format_duration(batches[0])}; without a known gap {format_duration(dispatch_ns)} are allowed there, and "
            f"every gap is shorter than {format_duration(fastest.period_ns)}, the period of loop {fastest.name}; move "
            f"one of them to another device, or allow more in devices.{device}.best_effort.max_dispatch"
        )
    return result


def _serve_message(
    configuration: Configuration,
    device: str,
    known: Evidence,
    costs: Mapping[str, LoopCost],
    outcome: admission.Outcome,
    standby: Standby,
) -> dict[str, Any]:
    verdict = standby.verdict
    served = (*outcome.served, *standby.served)
    tasks = {name: {"cost_ns": costs[name].cost_ns, "shortest_ns": costs[name].shortest_ns} for name in served}
    margin = configuration.admission.margin_ppm
    limit_ns = admission.never_fits_ns(_served_loads(configuration, device, costs, outcome), verdict.max_dispatch_ns)
    queues = {}
    for model in [m for m in configuration.models.values() if m.name in known.measured]:
        measured = known.measured[model.name]
        batches = model_costs(model, measured, margin, known.dispatch_ns)
        # A batch that no gap can hold is none; where the single job doesn't fit, nobody may attach the model at all.
        batches = tuple(takewhile(lambda cost: cost < limit_ns, batches)) or batches[:1]
        queues[model.name] = {"cost_ns": list(batches), "shortest_ns": measured["1"]["p50_ns"]}
    return {
        "op": "serve", "max_dispatch_ns": verdict.max_dispatch_ns, "share_ppm": verdict.share_ppm,
        "tasks": tasks, "queues": queues,
    }  # fmt: skip
