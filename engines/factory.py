"""From a device's driver to the engines on it: the one place that knows every kind.

Called once by an executor with the ``driver`` of its plan; what it returns opens one model after the other on that
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from taktd.drivers.fault import DeviceFault
from taktd.drivers.sim import SimDevice
from taktd.engines.engine import BuiltEngine, EngineSpec
from taktd.engines.errors import DeviceFailure
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.engines.simulated import SimulatedEngine, SimulatedOptions

__all__ = ["Opener", "computes_the_model", "engine_opener"]

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Opener:
    """Opens one model after the other on one device. ``gpu``: which card that is, None where it is none."""

    open: Callable[[EngineSpec], BuiltEngine]
    gpu: dict[str, Any] | None = None

    def __call__(self, spec: EngineSpec) -> BuiltEngine:
        return self.open(spec)


def engine_opener(driver: Mapping[str, Any], *, alone: bool = True, tell: Tell = lambda _: None) -> Opener:
    """``{"kind": "cpu"}``, ``{"kind": "cuda", "device": UUID, …}`` (``GpuOptions.of``), or ``{"kind": "sim", "faults":
    path or None, …}`` (``SimulatedOptions.of``).

    ``alone``: no loop is served on this device meanwhile, so that an engine may be built on it; ``tell`` hears how far
    that is. Raises ``EngineFailure`` where the device can't be opened; what is returned raises ``ModelRefused``.
    """
    match driver["kind"]:
        case "cpu":
            return Opener(OnnxCpuEngine)
        case "sim":
            options = SimulatedOptions.of(driver)
            faults = driver.get("faults")
            try:
                device = SimDevice(Path(faults) if faults else None)
            except DeviceFault as fault:
                raise DeviceFailure(fault) from fault
            return Opener(lambda spec: SimulatedEngine(spec, device, options))
        case "cuda":
            return _gpu_opener(driver, alone, tell)
        case other:
            raise ValueError(f"no engines for driver {other!r}: known are cpu, cuda, sim")


def _gpu_opener(driver: Mapping[str, Any], alone: bool, tell: Tell) -> Opener:
    # Not loaded where there is no GPU.
    from taktd.engines.gpu import GpuOptions, PlanMissing, build_missing, open_engine, open_gpu

    try:
        device, info = open_gpu(str(driver["device"]))
    except DeviceFault as fault:
        raise DeviceFailure(fault) from fault

    def opened(spec: EngineSpec) -> BuiltEngine:
        options = GpuOptions.of(driver, spec.model)
        try:
            return open_engine(spec, device, options)
        except PlanMissing as missing:
            if not alone:
                raise
            build_missing(
                spec, device, options, missing.identity, limit_ns=driver["build_limit_ns"], tell=tell
            )  # fmt: skip
        return open_engine(spec, device, options)

    return Opener(opened, asdict(info))


def computes_the_model(driver: Mapping[str, Any]) -> bool:
    """Whether outputs come from the model itself, so that they can be compared with ONNX Runtime's."""
    return bool(driver["kind"] != "sim" or driver["outputs"] == "onnx")
