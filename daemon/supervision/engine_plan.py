"""What an executor is told about its device's driver and its models' engines: from the configuration to plain JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from taktd.daemon.config.configuration import Device, Model
from taktd.daemon.logbook import log
from taktd.daemon.supervision.fault_commands import fault_file

__all__ = ["driver_plan", "engine_rules"]


def driver_plan(device: Device, state_folder: Path, *, allow_faults: bool) -> dict[str, Any]:
    """The ``driver`` of a plan, as ``taktd.engines.factory`` takes it."""
    if device.gpu is not None:
        gpu = device.gpu
        return {
            "kind": "cuda", "device": gpu.device, "runtime": gpu.runtime, "cache": str(state_folder / "engines"),
            "workspace_bytes": gpu.workspace_bytes, "optimization_level": gpu.optimization_level,
            "plugins": list(gpu.plugins), "build_limit_ns": gpu.build_limit_ns,
        }  # fmt: skip
    if device.driver != "sim":
        return {"kind": device.driver}
    faults = None
    if allow_faults:
        try:
            faults = str(fault_file(state_folder, device.name))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            log("warning", f"no faults can be injected on {device.name}: {reason}", device=device.name)
    return {
        "kind": "sim", "cost": [list(point) for point in device.cost], "outputs": device.outputs.kind,
        "constant": device.outputs.constant, "seed": device.seed, "faults": faults,
    }  # fmt: skip


def engine_rules(model: Model) -> dict[str, Any]:
    """Of one model of a plan: how its engine is verified, what its outputs may hold."""
    verify = model.verify
    return {
        "verify": {"samples": verify.samples, "rtol": verify.rtol, "atol": verify.atol},
        "non_finite": dict(model.non_finite),
    }
