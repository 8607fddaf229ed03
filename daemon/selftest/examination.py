"""The self-test's steps on one GPU, in the order in which each needs the ones before.

Needs neither daemon nor configuration. Every figure is measured here and now; on a simulated driver (tests) the report
says so, and its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from taktd.daemon.selftest.report import Report, Step, card, described, quantiles_us
from taktd.drivers.conformance import CHECKS, NotConforming
from taktd.drivers.cuda import CudaDevice, CudaStream
from taktd.drivers.cuda_probe import CudaInfo
from taktd.drivers.fault import DeviceFault
from taktd.engines.engine import EngineSpec, Tensor, release
from taktd.engines.errors import EngineFailure, ModelRefused
from taktd.engines.gpu import GpuOptions, build_request, plan_identity
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.onnx_session import open_session
from taktd.engines.plan_build import PlanBuild
from taktd.engines.plan_cache import PlanCache
from taktd.engines.tensorrt import TensorRtEngine, WarmTensorRtEngine
from taktd.engines.tensorrt_library import find_library
from taktd.engines.tensorrt_runs import SlotRun, StagedRun

__all__ = ["RUNS", "examine"]

RUNS: Final = 100_000
SECOND: Final = 1_000_000_000
BUILD_LIMIT_NS: Final = 600 * SECOND
SACRIFICE_TIMEOUT_S: Final = 60.0
MODEL: Final = Path(__file__).resolve().parents[1] / "demo" / "pendulum.onnx"
TIMED_BY_DEVICE: Final = 20
SIZES: Final = (256, 64 << 10, 16 << 20)  # an observation, a small picture, what saturates the link
RELATIVE_MAX, ABSOLUTE_MAX = 1e-3, 1e-4  # FP32 with other summation orders
BLOCK: Final = 500  # runs at a stretch, then a pause: below the kernel's real-time throttle
Say = Callable[[str], None]


def _shared_pages(size: int) -> mmap.mmap:
    """Room for ``size`` bytes in a memfd, as a lane's."""
    size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create("taktd-selftest", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class _Slot:
    """Pages of their own, as a lane's."""

    def __init__(self, dims: tuple[int, ...], dtype: str) -> None:
        size = max(1, int(np.prod(dims)) * np.dtype(dtype).itemsize)
        self._pages = _shared_pages(size)
        self.array = np.frombuffer(self._pages, dtype, int(np.prod(dims))).reshape(dims)
        self.tensor = Tensor(self.array.ctypes.data, dims)


def _timed(run: Callable[[], object], runs: int, after: Callable[[], object] = lambda: None) -> dict[str, float]:
    """How long ``run`` takes; ``after`` it something whose time does not count."""
    clock = time.monotonic_ns
    times: list[int] = []
    gc.collect()
    gc.disable()
    try:
        while len(times) < runs:
            for _ in range(min(BLOCK, runs - len(times))):
                start = clock()
                run()
                times.append(clock() - start)
                after()
            time.sleep(0.0005)
    finally:
        gc.enable()
    return quantiles_us(times)


def examine(info: CudaInfo, *, runs: int = RUNS, say: Say = lambda _: None) -> Report:
    """All steps on one device that the probe found working. ``runs``: of the jitter step; others take a tenth."""
    report = Report()
    device = CudaDevice(info.index)
    report.device = described(info, device)
    report.card_before = card(info.uuid)

    def step(name: str, work: Callable[[Step], Any]) -> Any:
        say(name)
        made = Step(name)
        report.steps.append(made)
        try:
            return work(made)
        except (DeviceFault, EngineFailure, ModelRefused, NotConforming) as error:
            made.fail(str(error))
        return None

    few = max(1, runs // 10)
    step("driver conformance", lambda s: _conformance(s, device))
    step("launch overhead", lambda s: _launch(s, device, few))
    step("copies", lambda s: _copies(s, device))
    with tempfile.TemporaryDirectory(prefix="taktd-selftest-") as folder:
        engine = step("build and load the bundled model", lambda s: _engine(s, device, Path(folder)))
        needs_engine: tuple[tuple[str, Callable[[Step], Any]], ...] = (
            ("answers against ONNX Runtime on the CPU", lambda s: _answers(s, engine)),
            ("graph against plain enqueue", lambda s: _plain(s, engine, few)),
            ("completion by flag against event", lambda s: _completion(s, engine, device, few)),
            (f"jitter over {runs} runs", lambda s: _jitter(s, engine, runs)),
        )
        for name, work in needs_engine:
            step(name, work if engine is not None else lambda s: s.skip("no engine: see the step that builds it"))
        if engine is not None:
            engine.close()
    step("a broken context in a process of its own", lambda s: _sacrifice(s, device, info.index))
    report.card_after = card(info.uuid)
    with contextlib.suppress(DeviceFault):  # a context that broke is told by the step that met it
        device.close()
    return report


def _conformance(step: Step, device: CudaDevice) -> None:
    broken = []
    for check in CHECKS:
        try:
            check(device)
        except (NotConforming, DeviceFault) as error:
            broken.append(f"{check.__name__}: {error}")
            if isinstance(error, DeviceFault) and error.sticky:
                break  # nothing else would be found out
    step.figures = {"checks": len(CHECKS), "broken": len(broken)}
    if broken:
        step.fail("; ".join(broken))


def _launch(step: Step, device: CudaDevice, runs: int) -> None:
    """Of a graph that fills 256 bytes: the whole, what of it is the call, and what the device itself took."""
    block, stream = device.allocate(256), device.stream(1)
    graph = stream.capture(lambda: stream.fill(block.address, 0, 256), timeout_ns=SECOND)
    on_device = [stream.timed(lambda: stream.launch(graph), SECOND) for _ in range(TIMED_BY_DEVICE)]
    step.figures = {
        "completion": graph.completion,
        "launch to end": _timed(graph.launch, runs),
        "the call alone": _timed(lambda: stream.launch(graph), runs, lambda: stream.finish(SECOND)),
        "on the device": quantiles_us(on_device),
    }
    for thing in (graph, stream, block):
        thing.close()


def _copies(step: Step, device: CudaDevice) -> None:
    """Pinned memory of our own, and shared memory that is registered, as a lane's."""
    for size in SIZES:
        pages = _shared_pages(size)
        address = np.frombuffer(pages, np.uint8).ctypes.data
        whole = len(pages)
        block, stream = device.allocate(size), device.stream()
        for kind, host in (("pinned", device.allocate_host(size)), ("registered", device.register(address, whole))):
            there = _copy_ns(stream, block.address, host.host_address, size)
            back = _copy_ns(stream, host.host_address, block.address, size)
            step.figures[f"{size} bytes, {kind}"] = {
                "to_device_us": there / 1000,
                "to_host_us": back / 1000,
                "to_device_gb_s": size / max(1, there),
                "to_host_gb_s": size / max(1, back),
            }
            host.close()
        for thing in (block, stream):
            thing.close()


def _copy_ns(stream: CudaStream, target: int, source: int, size: int) -> int:
    times = [stream.timed(lambda: stream.copy(target, source, size), SECOND) for _ in range(TIMED_BY_DEVICE)]
    return sorted(times)[len(times) // 2]


def _engine(step: Step, device: CudaDevice, folder: Path) -> WarmTensorRtEngine | None:
    try:
        library = find_library()
    except ModelRefused as refused:
        step.skip(str(refused))
        return None
    found = inspect_model(MODEL, {})
    tensors = specs_from_json(found["inputs"]), specs_from_json(found["outputs"])
    spec = EngineSpec("selftest", str(MODEL), *tensors, 1, found["digest"])
    options = GpuOptions(str(folder), flavour=library.flavour)
    identity = plan_identity(spec, device, device.driver_version, library, options)
    request = build_request(spec, device.index, options)
    build = PlanBuild(request, identity, PlanCache(folder), limit_ns=BUILD_LIMIT_NS)
    plan = build.wait()
    step.figures = {"library": library.name, "build_s": plan.manifest["build_ns"] / 1e9, "plan_bytes": len(plan.plan)}
    return TensorRtEngine(spec, device, library, plan.plan, urgency=1).warm()


def _bound(engine: WarmTensorRtEngine) -> tuple[list[_Slot], list[_Slot], SlotRun | StagedRun]:
    inputs = [_Slot(t.dims, t.dtype.numpy) for t in engine.spec.inputs]
    outputs = [_Slot(t.dims, t.dtype.numpy) for t in engine.spec.outputs]
    return inputs, outputs, engine.bind([s.tensor for s in inputs], [s.tensor for s in outputs])


def _answers(step: Step, engine: WarmTensorRtEngine) -> None:
    session = open_session(engine.spec.path)
    inputs, outputs, run = _bound(engine)
    random = np.random.default_rng(1)
    absolute = relative = 0.0
    for _ in range(100):
        for slot in inputs:
            slot.array[...] = random.standard_normal(slot.array.shape)
        run()
        feed = {t.name: s.array for t, s in zip(engine.spec.inputs, inputs, strict=True)}
        names = [t.name for t in engine.spec.outputs]
        for slot, wanted in zip(outputs, session.run(names, feed), strict=True):
            error = np.abs(slot.array - wanted)
            absolute = max(absolute, float(error.max()))
            relative = max(relative, float((error / np.maximum(np.abs(wanted), 1e-3)).max()))
    release(run)
    step.figures = {"samples": 100, "absolute_error_max": absolute, "relative_error_max": relative}
    if not (absolute <= ABSOLUTE_MAX or relative <= RELATIVE_MAX):
        step.fail(f"found {absolute:.3g} (relative {relative:.3g}); allowed {ABSOLUTE_MAX:g} or {RELATIVE_MAX:g}")


def _plain(step: Step, engine: WarmTensorRtEngine, runs: int) -> None:
    """The same work over a slot, captured once or enqueued anew for each run."""
    for name, captures in (("graph", True), ("enqueue", False)):
        engine.captures = captures
        *_, run = _bound(engine)
        if captures == bool(run.completion):  # else there is no graph, and the notes say why
            step.figures[name] = _timed(run, runs)
        release(run)
    engine.captures = True
    step.text = "; ".join(engine.notes)


def _completion(step: Step, engine: WarmTensorRtEngine, device: CudaDevice, runs: int) -> None:
    able = device.mem_ops
    for name, by_flag in (("flag", True), ("event", False)):
        device.mem_ops = able and by_flag
        *_, run = _bound(engine)
        if run.completion == name:
            step.figures[name] = _timed(run, runs)
        release(run)
    device.mem_ops = able
    if not step.figures:
        step.text = "; ".join(engine.notes)
    elif "flag" not in step.figures:
        step.text = "this device or driver writes no flags from a graph: completion is by event"


def _jitter(step: Step, engine: WarmTensorRtEngine, runs: int) -> None:
    *_, run = _bound(engine)
    step.figures = {"completion": run.completion or "plain enqueue", **_timed(run, runs)}
    release(run)


def _sacrifice(step: Step, device: CudaDevice, index: int) -> None:
    """A child breaks its context; we, in ours on the same card, go on, and a second child finds that it serves."""
    block, stream = device.allocate(256), device.stream()
    for mode in ("trap", "serve"):
        command = [sys.executable, "-m", "taktd.daemon.selftest.sacrifice", str(index), mode]
        start = time.monotonic_ns()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SACRIFICE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            step.fail(f"the process ({mode}) did not end within {SACRIFICE_TIMEOUT_S:g} s")
            return
        if done.returncode != 0:
            words = (done.stderr or done.stdout).strip().splitlines()
            step.fail(f"the process ({mode}) ended with {done.returncode}: {words[-1] if words else 'no word'}")
            return
        step.figures[mode] = {**json.loads(done.stdout), "process_ms": (time.monotonic_ns() - start) / 1e6}
        start = time.monotonic_ns()
        stream.fill(block.address, 0, 256)
        stream.finish(SECOND)
        step.figures[f"beside it, after {mode}"] = {"run_us": (time.monotonic_ns() - start) / 1000}
    for thing in (stream, block):
        thing.close()
