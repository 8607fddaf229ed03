"""Engines of a GPU as an executor opens them: which library, which plan, which device.

Where the cache has no plan ``PlanMissing`` says which. ``build_missing`` builds it, in a process of its own; the caller
(``taktd.engines.factory``) does that only in an executor that serves nothing yet, on a GPU where no loop is served.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_probe import CudaInfo, probe
from taktd.drivers.cuda_selection import select
from taktd.engines.engine import BuiltEngine, EngineSpec
from taktd.engines.errors import ModelRefused
from taktd.engines.golden import facts_of
from taktd.engines.plan_build import PlanBuild
from taktd.engines.plan_cache import PlanCache, PlanIdentity, PlanRejected
from taktd.engines.tensorrt import TensorRtEngine
from taktd.engines.tensorrt_build import WORKSPACE_BYTES, BuildRequest, profile_of
from taktd.engines.tensorrt_library import Library, find_library
from taktd.engines.timeouts import RUN_TIMEOUT_NS

__all__ = [
    "GpuOptions",
    "PlanMissing",
    "build_missing",
    "build_request",
    "open_engine",
    "open_gpu",
    "plan_identity",
]


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """How one model's engine on a GPU is built and run.

    ``runtime``: "tensorrt", or "onnxruntime" for its CUDA provider. ``plan``: a prebuilt one, instead of a build from
    ONNX. ``urgency``: of its stream. ``timeout_ns``: a run that takes longer hangs. The rest is TensorRT's.
    """

    cache: str
    runtime: str = "tensorrt"
    flavour: str = "auto"
    plan: str = ""
    workspace_bytes: int = WORKSPACE_BYTES
    optimization_level: int | None = None
    timing_cache: str = ""
    pin_tactics: bool = False
    plugins: tuple[str, ...] = ()
    urgency: int = 0
    timeout_ns: int = RUN_TIMEOUT_NS

    @classmethod
    def of(cls, driver: Mapping[str, Any], model: str = "") -> GpuOptions:
        """From the driver's part of a plan: these fields, where they are there; those of one model under ``models``."""
        known = {f.name for f in fields(cls)}
        own = driver.get("models", {}).get(model, {})
        given = {key: value for key, value in {**driver, **own}.items() if key in known}
        return cls(**{**given, "plugins": tuple(given.get("plugins", ()))})


class PlanMissing(ModelRefused):
    """There is no usable plan yet. ``why``: empty, or what is wrong with the one that is there."""

    def __init__(self, spec: EngineSpec, identity: PlanIdentity, why: str) -> None:
        super().__init__(
            f"model {spec.model!r} has no engine for {identity.device}",
            found=why or "nothing in the cache",
            allowed="a built plan",
            hint="It is built when no loop is served on that GPU: give its loops a stand-in, or start taktd again.",
        )
        self.identity = identity
        self.why = why


def open_gpu(selector: str) -> tuple[CudaDevice, CudaInfo]:
    """By UUID, PCI address or index; looked at in a child process before it is let into this one.

    Raises ``DeviceFault``.
    """
    found = select(probe(selector), selector)
    found.raise_fault()
    return CudaDevice(found.index), found


def plan_identity(
    spec: EngineSpec, device: CudaDevice | CudaInfo, driver: int, library: Library, options: GpuOptions
) -> PlanIdentity:
    """What the plan of this model on this device is called."""
    # TensorRT-RTX builds for every card and compiles its kernels when it is loaded.
    portable = library.flavour == "tensorrt_rtx"
    name = device.identity.name if isinstance(device, CudaDevice) else device.name
    return PlanIdentity(
        model_digest=spec.digest,
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
            **({"tactics": _digest(options.timing_cache)} if options.pin_tactics else {}),
        },
    )


def _digest(path: str) -> str:
    """Of a file's content; "" while there is none."""
    file = Path(path)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


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


def open_engine(spec: EngineSpec, device: CudaDevice, options: GpuOptions) -> BuiltEngine:
    """The engine of a model on a GPU, loaded. Raises ``ModelRefused``, also ``PlanMissing``."""
    if options.runtime == "onnxruntime":
        from taktd.engines.onnx_cuda import OnnxCudaEngine

        return OnnxCudaEngine(spec, device, urgency=options.urgency, timeout_ns=options.timeout_ns)
    library = find_library(options.flavour)

    def engine(plan: bytes) -> TensorRtEngine:
        more = {"urgency": options.urgency, "timeout_ns": options.timeout_ns}
        return TensorRtEngine(spec, device, library, plan, **more, plugins=options.plugins)

    if options.plan:
        return engine(_given(spec, options.plan))
    identity = plan_identity(spec, device, device.driver_version, library, options)
    plan = _cached(spec, identity, options)
    try:
        return engine(plan)
    except ModelRefused as refused:  # it can't be what its name says: foreign all the same
        raise PlanMissing(spec, identity, str(refused)) from refused


def _given(spec: EngineSpec, path: str) -> bytes:
    """A plan that somebody else built. Its own library, card, tensors and shapes are judged when it is loaded."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ModelRefused(
            f"the plan of model {spec.model!r} can't be read",
            found=f"{path}: {error.strerror}",
            allowed="a file that taktd's user may read",
            hint="Correct the device's `gpu.plans`, or remove the entry: then the plan is built from the ONNX file.",
        ) from error


def _cached(spec: EngineSpec, identity: PlanIdentity, options: GpuOptions) -> bytes:
    try:
        found = PlanCache(Path(options.cache)).load(identity)
    except PlanRejected as rejected:
        raise PlanMissing(spec, identity, str(rejected)) from rejected
    if found is None:
        raise PlanMissing(spec, identity, "")
    return found.plan


def build_missing(
    spec: EngineSpec, device: CudaDevice, options: GpuOptions, identity: PlanIdentity, *, limit_ns: int,
    tell: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Builds the plan into the cache, in a process of its own, and waits for it: before an executor serves anything.

    What is in the cache under that name and can't be trusted is taken away first. Its manifest then says what it
    answered and took here. ``tell``: what it is doing, in words; empty at the end. Raises ``ModelRefused``,
    ``EngineFailure``, ``OSError``.
    """
    cache = PlanCache(Path(options.cache))
    cache.remove(identity)
    build = PlanBuild(build_request(spec, device.index, options), identity, cache, limit_ns=limit_ns)
    built = build.wait(lambda progress: tell(f"building {spec.model}: {progress}"))
    tell("")
    library = find_library(options.flavour)
    engine = TensorRtEngine(spec, device, library, built.plan, plugins=options.plugins).warm()
    try:
        cache.annotate(identity, **facts_of(engine))
    finally:
        engine.close()
