"""Where an executor gets its device and its engines, whatever they are.

``open_device`` then ``open_engine``: nothing is built here. An engine for a GPU needs a plan; where the cache has none
``PlanMissing`` says which, and the supervisor builds it (``taktd.engines.plan_build``) while no loop runs on that GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from taktd.drivers.cpu import CpuDevice
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_probe import CudaInfo, probe
from taktd.drivers.cuda_selection import select
from taktd.drivers.device import Device
from taktd.engines.engine import BoundRun, BuiltEngine, EngineSpec
from taktd.engines.errors import ModelRefused
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.engines.plan_cache import PlanCache, PlanIdentity, PlanRejected
from taktd.engines.tensorrt import RUN_TIMEOUT_NS, TensorRtEngine
from taktd.engines.tensorrt_build import WORKSPACE_BYTES, BuildRequest, profile_of
from taktd.engines.tensorrt_library import Library, find_library

__all__ = [
    "URGENCY",
    "GpuOptions",
    "PlanMissing",
    "build_request",
    "open_device",
    "open_engine",
    "plan_identity",
    "release",
]

# Criticality → stream urgency. Jobs run one at a time: it matters against other processes on the card.
URGENCY: Final = {"hard": 2, "firm": 1, "soft": 0}


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How engines of one GPU are built and run. ``plan``: a prebuilt one, instead of a build from ONNX."""

    cache: str
    flavour: str = "auto"
    plan: str = ""
    workspace_bytes: int = WORKSPACE_BYTES
    optimization_level: int | None = None
    timing_cache: str = ""
    pin_tactics: bool = False
    plugins: tuple[str, ...] = ()
    urgency: int = 0
    timeout_ns: int = RUN_TIMEOUT_NS


class PlanMissing(ModelRefused):
    """There is no usable plan yet. ``why``: empty, or what is wrong with the one that is there."""

    def __init__(self, spec: EngineSpec, identity: PlanIdentity, why: str) -> None:
        super().__init__(
            f"model {spec.model!r} has no engine for {identity.device}",
            found=why or "nothing in the cache",
            allowed="a built plan",
            hint="It is built in the background; until then its loops run on their stand-in.",
        )
        self.identity = identity
        self.why = why


def open_device(driver: Mapping[str, Any]) -> Device:
    """``{"kind": "cpu"}`` or ``{"kind": "cuda", "device": UUID, PCI address or index}``. Raises ``DeviceFault``.

    A CUDA driver is looked at in a child process before it is let into this one.
    """
    if driver["kind"] == "cuda":
        return CudaDevice(select(probe(), str(driver["device"])).index)
    return CpuDevice()


def plan_identity(
    spec: EngineSpec,
    model_digest: str,
    device: CudaDevice | CudaInfo,
    driver: int,
    library: Library,
    options: GpuOptions,
) -> PlanIdentity:
    """What the plan of this model on this device is called."""
    # TensorRT-RTX builds for every card and compiles its kernels when it is loaded.
    portable = library.flavour == "tensorrt_rtx"
    name = device.identity.name if isinstance(device, CudaDevice) else device.name
    return PlanIdentity(
        model_digest=model_digest,
        library=library.name,
        device="any" if portable else name,
        compute=(0, 0) if portable else device.compute,
        driver=0 if portable else driver,
        shapes=profile_of(spec),
        options={
            "workspace_bytes": options.workspace_bytes,
            "optimization_level": options.optimization_level,
            "pin_tactics": options.pin_tactics,
            "plugins": list(options.plugins),
        },
    )


def build_request(spec: EngineSpec, device: int | None, options: GpuOptions) -> BuildRequest:
    """What ``PlanBuild`` is to build for this engine."""
    return BuildRequest(
        model=spec.path,
        output="",
        shapes=profile_of(spec),
        types={t.name: t.dtype.name for t in (*spec.inputs, *spec.outputs)},
        flavour=options.flavour,
        device=device,
        workspace_bytes=options.workspace_bytes,
        optimization_level=options.optimization_level,
        timing_cache=options.timing_cache,
        pin_tactics=options.pin_tactics,
        plugins=list(options.plugins),
    )


def open_engine(
    spec: EngineSpec, device: Device, *, model_digest: str = "", options: GpuOptions | None = None
) -> BuiltEngine:
    """The engine of a model on a device, loaded. Raises ``ModelRefused``, on a GPU also ``PlanMissing``."""
    if not isinstance(device, CudaDevice):
        return OnnxCpuEngine(spec)
    if options is None:
        raise ValueError("an engine on a GPU needs its options")
    library = find_library(options.flavour)
    plan = Path(options.plan).read_bytes() if options.plan else _cached(spec, model_digest, device, library, options)
    return TensorRtEngine(
        spec, device, library, plan, urgency=options.urgency, timeout_ns=options.timeout_ns, plugins=options.plugins
    )


def _cached(spec: EngineSpec, model_digest: str, device: CudaDevice, library: Library, options: GpuOptions) -> bytes:
    identity = plan_identity(spec, model_digest, device, device.driver_version, library, options)
    try:
        found = PlanCache(Path(options.cache)).load(identity)
    except PlanRejected as rejected:
        raise PlanMissing(spec, identity, str(rejected)) from rejected
    if found is None:
        raise PlanMissing(spec, identity, "")
    return found.plan


def release(run: BoundRun) -> None:
    """Gives back what a bound run holds (a graph, registered pages). Must come before its slot is unmapped."""
    close = getattr(run, "close", None)
    if close is not None:
        close()
