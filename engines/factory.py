"""From a device's driver to the engines on it: the one place that knows every kind.

Called once by an executor with the ``driver`` of its plan; what it returns opens one model after the other on that
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from taktd.drivers.fault import DeviceFault
from taktd.drivers.sim import SimDevice
from taktd.engines.engine import BuiltEngine, EngineSpec
from taktd.engines.errors import DeviceFailure
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.engines.simulated import SimulatedEngine, SimulatedOptions

__all__ = ["computes_the_model", "engine_opener"]


def engine_opener(driver: Mapping[str, Any], *, alone: bool = True) -> Callable[[EngineSpec], BuiltEngine]:
    """``{"kind": "cpu"}``, ``{"kind": "cuda", "device": UUID, …}`` (``GpuOptions.of``), or ``{"kind": "sim", "faults":
    path or None, …}`` (``SimulatedOptions.of``).

    ``alone``: no loop is served on this device meanwhile, so that an engine may be built on it.
    Raises ``EngineFailure`` where the device can't be opened; what is returned raises ``ModelRefused``.
    """
    match driver["kind"]:
        case "cpu":
            return OnnxCpuEngine
        case "sim":
            options = SimulatedOptions.of(driver)
            faults = driver.get("faults")
            try:
                device = SimDevice(Path(faults) if faults else None)
            except DeviceFault as fault:
                raise DeviceFailure(fault) from fault
            return lambda spec: SimulatedEngine(spec, device, options)
        case "cuda":
            return _gpu_opener(driver, alone)
        case other:
            raise ValueError(f"no engines for driver {other!r}: known are cpu, cuda, sim")


def _gpu_opener(driver: Mapping[str, Any], alone: bool) -> Callable[[EngineSpec], BuiltEngine]:
    # Not loaded where there is no GPU.
    from taktd.engines.gpu import GpuOptions, PlanMissing, build_missing, open_engine, open_gpu

    options = GpuOptions.of(driver)
    try:
        device = open_gpu(str(driver["device"]))
    except DeviceFault as fault:
        raise DeviceFailure(fault) from fault

    def opened(spec: EngineSpec) -> BuiltEngine:
        try:
            return open_engine(spec, device, options)
        except PlanMissing as missing:
            if not alone or options.plan:
                raise
            build_missing(spec, device, options, missing.identity, limit_ns=driver["build_limit_ns"])
        return open_engine(spec, device, options)

    return opened


def computes_the_model(driver: Mapping[str, Any]) -> bool:
    """Whether outputs come from the model itself, so that they can be compared with ONNX Runtime's."""
    return bool(driver["kind"] != "sim" or driver["outputs"] == "onnx")
