"""What an executor is told about its device's driver and its models' engines: from the configuration to plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Loop, Model
from taktd.daemon.config.gpu import Gpu
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import DevicePlan
from taktd.daemon.supervision.fault_commands import fault_file

__all__ = ["driver_plan", "engine_rules", "run_limit_ns"]

# Criticality → urgency of a model's stream. Jobs run one at a time: it matters against other processes on the card.
URGENCY: Final = {"hard": 2, "firm": 1, "soft": 0}

# A hang is told by the stand-in long before (standby.hang_after_ns); this ends the run where nobody stands in.
RUN_LIMIT_TIMES: Final = 10  # of what a job was promised to take, or of its deadline: a slow card is no dead one
RUN_LIMIT_NS_MIN: Final = 50_000_000
RUN_LIMIT_NS_MAX: Final = 2_000_000_000


def run_limit_ns(loops: Sequence[Loop]) -> int:
    """How long a run of the model of these loops may take before it counts as hung."""
    shortest_ns = min(
        (loop.budget_ns or loop.deadline_ns or loop.period_ns for loop in loops), default=RUN_LIMIT_NS_MAX
    )
    return min(max(RUN_LIMIT_TIMES * shortest_ns, RUN_LIMIT_NS_MIN), RUN_LIMIT_NS_MAX)


def driver_plan(plan: DevicePlan, state_folder: Path) -> dict[str, Any]:
    """The ``driver`` of a plan, as ``taktd.engines.factory`` takes it."""
    device = plan.device
    if device.gpu is not None:
        return _gpu_plan(device.gpu, state_folder, plan.loops_by_model())
    if device.driver != "sim":
        return {"kind": device.driver}
    faults = None
    if plan.allow_faults:
        try:
            faults = str(fault_file(state_folder, device.name))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            log("warning", f"no faults can be injected on {device.name}: {reason}", device=device.name)
    return {
        "kind": "sim", "cost": [list(point) for point in device.cost], "outputs": device.outputs.kind,
        "constant": device.outputs.constant, "seed": device.seed, "faults": faults,
    }  # fmt: skip


def _gpu_plan(gpu: Gpu, state_folder: Path, loops: Mapping[str, list[Loop]]) -> dict[str, Any]:
    models = {
        name: {
            "urgency": max((URGENCY[loop.criticality] for loop in served), default=0),
            "timeout_ns": gpu.run_limit_ns or run_limit_ns(served),
            "plan": gpu.plans.get(name, ""),
        }
        for name, served in loops.items()
    }
    return {
        "kind": "cuda", "device": gpu.device, "runtime": gpu.runtime, "cache": str(state_folder / "engines"),
        "workspace_bytes": gpu.workspace_bytes, "optimization_level": gpu.optimization_level,
        "plugins": list(gpu.plugins), "timing_cache": gpu.timing_cache or "", "pin_tactics": gpu.pin_tactics,
        "build_limit_ns": gpu.build_limit_ns, "models": models,
        **({"timeout_ns": gpu.run_limit_ns} if gpu.run_limit_ns else {}),
    }  # fmt: skip


def engine_rules(model: Model) -> dict[str, Any]:
    """Of one model of a plan: how its engine is verified, what its outputs may hold."""
    verify = model.verify
    return {
        "verify": {"samples": verify.samples, "rtol": verify.rtol, "atol": verify.atol},
        "non_finite": dict(model.non_finite),
    }
