"""``python -m taktd.engines.tensorrt_build PARENT``: an ONNX model becomes a TensorRT plan, in a process of its own.

Reads one JSON request from standard input, writes JSON lines to standard output: ``{"progress": …}`` as often as the
builder tells, then ``{"built": …}``, or ``{"error": {what, found, allowed, hint}}`` and exit 1. SIGTERM cancels at the
builder's next step. The plan goes to the path of the request; who started this puts it into the cache.

Precision is the model's: networks are strongly typed, FP16 and BF16 come from the ONNX types, INT8 and FP8 from its
QuantizeLinear/DequantizeLinear pairs. There is no builder flag to lower it silently.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from taktd.drivers.ordinary import become_ordinary
from taktd.engines.engine import EngineSpec
from taktd.engines.errors import ModelRefused
from taktd.engines.tensorrt_library import Library, find_library
from taktd.engines.tensorrt_types import dtype_name

__all__ = ["BuildRequest", "Profile", "build_plan", "load_plugins", "profile_of"]

WORKSPACE_BYTES: Final = 1 << 30
Profile = dict[str, list[list[int]]]  # input → [least, optimal, most] dimensions

# What the parser warns of where a constant, or a plugin's 64-bit input, does not survive. In its words: "Weight at
# index 0: … is out of range. Clamping to: …", "… outside the range of INT32 was clamped", "… doesn't support INT64 for
# inputs, will cast to INT32".
_NARROWED: Final = re.compile(r"is out of range\. Clamping|outside the range of \w+ was clamped|INT64.*will cast to")


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """What to build. ``types``: the declared element type of each input and output; they must be the model's."""

    model: str
    output: str
    shapes: Profile
    types: dict[str, str]
    flavour: str = "auto"
    device: int | None = 0  # None: no device is opened (TensorRT-RTX builds without one)
    workspace_bytes: int = WORKSPACE_BYTES
    optimization_level: int | None = None
    timing_cache: str = ""
    pin_tactics: bool = False
    plugins: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def profile_of(spec: EngineSpec) -> Profile:
    """The shapes an engine must cover: from one to ``max_batch`` jobs, open dimensions from 1 to their maximum."""
    shapes: Profile = {}
    for tensor in spec.inputs:
        least = [1 if open_ else dim for dim, open_ in zip(tensor.dims, tensor.symbolic, strict=True)]
        best = list(tensor.dims)
        if spec.max_batch > 1 and best:
            best[0] *= spec.max_batch
        shapes[tensor.name] = [least, best, best]
    return shapes


class _Cancelled(Exception):
    pass


def build_plan(library: Library, request: BuildRequest, tell: Any, cancelled: Any) -> bytes:
    """The serialised plan. ``tell(phase, step, steps)``; ``cancelled()`` is asked at each step.

    Raises ``ModelRefused``: the model does not parse (which node), does not build, or is not what was declared.
    """
    trt = library.module
    library.log.clear()
    builder = library.made("Builder")
    load_plugins(library, builder.get_plugin_registry(), request.plugins)
    network = builder.create_network(library.network_flags)
    parser = trt.OnnxParser(network, library.logger)
    if not parser.parse_from_file(request.model):
        raise _parse_refusal(library, parser, request.model)
    _check_narrowing(library, request.model)
    _check_types(network, request)
    config = builder.create_builder_config()
    _configure(library, builder, network, config, request)
    config.progress_monitor = _monitor(trt, tell, cancelled)
    plan = builder.build_serialized_network(network, config)
    if cancelled():
        raise _Cancelled
    if plan is None:
        raise ModelRefused(
            f"{library.name} can't build an engine from {request.model}",
            found=library.log.errors(),
            allowed="a model whose every operator has an implementation on this device, within the workspace",
            hint="Raise the workspace limit, or export the model with other operators.",
        )
    _save_timing_cache(config, request)
    return bytes(plan)


def load_plugins(library: Library, registry: Any, paths: list[str]) -> None:
    """Plugin libraries from the paths that the configuration lists, and no others. Raises ``ModelRefused``."""
    for path in paths:
        handle = registry.load_library(path) if Path(path).is_absolute() and Path(path).is_file() else None
        if handle is None:
            raise ModelRefused(
                "a plugin library can't be loaded",
                found=f"{path} ({library.log.errors()})",
                allowed="absolute paths of shared libraries that contain TensorRT plugins",
                hint="Correct the device's `plugins`.",
            )


def _parse_refusal(library: Library, parser: Any, model: str) -> ModelRefused:
    told = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        where = f"node {error.node()} {error.node_name()!r} ({error.node_operator()}): " if error.node() >= 0 else ""
        told.append(f"{where}{error.desc()} [{getattr(error.code(), 'name', error.code())}]")
    return ModelRefused(
        f"{library.name} can't read {model}",
        found="; ".join(told) or library.log.errors(),
        allowed="ONNX operators that TensorRT implements, or that a listed plugin does",
        hint="Export the model with other operators, list a plugin, or run it on the CPU (`driver: cpu`).",
    )


def _check_narrowing(library: Library, model: str) -> None:
    narrowed = [line for line in library.log.lines if _NARROWED.search(line)]
    if narrowed:
        raise ModelRefused(
            f"{model} holds numbers that {library.name} would change",
            found="; ".join(narrowed[:4]),
            allowed="constants that it keeps exactly: INT64 within the range that it names, FP64 within that of FP32",
            hint="Export the model with INT32 and FP32, or with constants within their range.",
        )


def _check_types(network: Any, request: BuildRequest) -> None:
    found = [network.get_input(i) for i in range(network.num_inputs)]
    found += [network.get_output(i) for i in range(network.num_outputs)]
    types = {tensor.name: dtype_name(tensor.dtype) for tensor in found}
    for name, declared in request.types.items():
        if types.get(name) != declared:
            raise ModelRefused(
                f"tensor {name!r} of {request.model} has another type on the GPU than declared",
                found=types.get(name, "no such tensor"),
                allowed=declared,
                hint="Networks are strongly typed: inputs and outputs keep the types of the ONNX file.",
            )
    if set(types) != set(request.types):
        raise ModelRefused(
            f"{request.model} has other tensors than declared",
            found=", ".join(sorted(types)),
            allowed=", ".join(sorted(request.types)),
            hint="Inspect the model again.",
        )


def _configure(library: Library, builder: Any, network: Any, config: Any, request: BuildRequest) -> None:
    config.set_memory_pool_limit(library.member("MemoryPoolType", "WORKSPACE"), request.workspace_bytes)
    if hasattr(config, "max_aux_streams"):
        config.max_aux_streams = 0  # one stream: what is captured is one chain, and timing does not vary by overlap
    tf32 = library.member("BuilderFlag", "TF32")
    if tf32 is not None:
        config.clear_flag(tf32)  # FP32 means FP32
    if request.optimization_level is not None:
        config.builder_optimization_level = request.optimization_level
    _use_timing_cache(library, config, request)
    profile = builder.create_optimization_profile()
    dynamic = False
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if -1 in tuple(tensor.shape):
            least, best, most = request.shapes[tensor.name]
            profile.set_shape(tensor.name, least, best, most)
            dynamic = True
    if dynamic and config.add_optimization_profile(profile) < 0:
        raise ModelRefused(
            "the shapes make no valid optimization profile",
            found=f"{request.shapes} ({library.log.errors()})",
            allowed="least ≤ optimal ≤ most in every dimension",
            hint="Correct models.<name>.shapes.",
        )


def _use_timing_cache(library: Library, config: Any, request: BuildRequest) -> None:
    """The tactics measured before; pinned: those and no others. Raises ``ModelRefused`` where that can't be."""
    if not request.timing_cache:
        return
    path = Path(request.timing_cache)
    known = path.read_bytes() if path.is_file() else b""
    flags = [library.member("BuilderFlag", n) for n in ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")]
    able = hasattr(config, "create_timing_cache")
    if request.pin_tactics and (not able or None in flags or not known):
        raise ModelRefused(
            "tactics can't be pinned",
            found=f"no timing cache at {path}" if not known else f"{library.name}, which can't",
            allowed="a timing cache that a build before wrote, and TensorRT 10.13 or newer",
            hint="Build once without `pin_tactics`, or leave it out.",
        )
    if not able:
        return  # TensorRT-RTX measures on the card, when it is loaded
    cache = config.create_timing_cache(known)
    taken = cache is not None and config.set_timing_cache(cache, False)
    if not taken and request.pin_tactics:
        raise ModelRefused(
            "tactics can't be pinned",
            found=f"a timing cache at {path} that {library.name} does not take ({library.log.errors()})",
            allowed="one that was written by this version, on this card",
            hint="Build once without `pin_tactics`, which writes it anew, or leave it out.",
        )
    if not taken and known:  # damaged, or of another version or card: what is in it is measured anew
        fresh = config.create_timing_cache(b"")
        if fresh is not None:
            config.set_timing_cache(fresh, False)
    for flag in flags if request.pin_tactics else ():
        config.set_flag(flag)


def _save_timing_cache(config: Any, request: BuildRequest) -> None:
    if not request.timing_cache or request.pin_tactics or not hasattr(config, "get_timing_cache"):
        return
    cache = config.get_timing_cache()
    if cache is not None:
        path = Path(request.timing_cache)
        half = path.with_name(f".{path.name}.{os.getpid()}")
        half.write_bytes(bytes(cache.serialize()))
        half.replace(path)


def _monitor(trt: Any, tell: Any, cancelled: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            tell(phase_name, step + 1, self.steps.get(phase_name, 0))
            return not cancelled()

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    become_ordinary(int(sys.argv[1]))
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = BuildRequest(**json.loads(sys.stdin.readline()))
    started_ns = time.monotonic_ns()
    try:
        library = find_library(request.flavour)
        if request.device is not None:
            from taktd.drivers.cuda import CudaDevice
            from taktd.drivers.cuda_memory import DirectMemory

            CudaDevice(request.device, lambda _: DirectMemory())
        plan = build_plan(
            library,
            request,
            lambda phase, step, steps: _say({"progress": {"phase": phase, "step": step, "steps": steps}}),
            lambda: bool(terminated),
        )
        Path(request.output).write_bytes(plan)
    except ModelRefused as refused:
        _say({"error": refused.refusal})
        return 1
    except _Cancelled:
        _say({"cancelled": True})
        return 1
    _say({"built": {"library": library.name, "bytes": len(plan), "build_ns": time.monotonic_ns() - started_ns}})
    return 0


if __name__ == "__main__":
    # The plan is on disk and the answer is given: how NVIDIA's libraries take leave of Python is of no interest.
    os._exit(main())
