"""Plans for TensorRT on the simulated GPU: what is refused, and why; builds in their own process.

What a plan does once it is loaded is in test_tensorrt_engine.py.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_probe import probe
from taktd.engines.engine import EngineSpec, release
from taktd.engines.errors import ModelRefused
from taktd.engines.factory import engine_opener
from taktd.engines.gpu import GpuOptions, PlanMissing, build_request, open_engine, plan_identity
from taktd.engines.plan_build import PlanBuild
from taktd.engines.plan_cache import PlanCache
from taktd.engines.tensorrt import TensorRtEngine
from taktd.engines.tensorrt_build import profile_of
from taktd.engines.tensorrt_library import Library, Log, find_library
from taktd.engines.tensors import DTYPE_BY_NUMBER, TensorSpec
from tests import models
from tests.conformance.test_engines import Slot, noise, spec_of
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in
from tests.fakes.tensorrt.stand_in import built

SECOND = 1_000_000_000


def header(plan: bytes) -> dict[str, object]:
    return json.loads(plan[16 : 16 + int.from_bytes(plan[8:16], "little")])


# Refusals ---------------------------------------------------------------------------------------------------------


def test_a_plan_of_another_version_or_card_is_refused(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = built(library, spec)
    stand_in.install(monkeypatch, "10.3.0")
    with pytest.raises(ModelRefused, match=r"built with version 11\.4\.0\.106"):
        TensorRtEngine(spec, device, find_library(), plan)
    fake_cuda.control.compute_major = 9
    with pytest.raises(ModelRefused, match=r"built on Simulated GPU 8\.9"):
        TensorRtEngine(spec, device, library, plan)
    with pytest.raises(ModelRefused, match="magic tag"):
        TensorRtEngine(spec, device, library, b"no plan at all")


def test_a_plan_that_does_not_cover_the_shapes_is_refused(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", batch="N", sizes=(4, 2))
    plan = built(library, spec_of(path, {}, 2))
    TensorRtEngine(spec_of(path, {}, 2), device, library, plan)
    with pytest.raises(ModelRefused, match=r"does not cover the shape of input 'obs': found \[1, 4\] to \[2, 4\]"):
        TensorRtEngine(spec_of(path, {}, 3), device, library, plan)


def test_a_plan_of_another_model_is_refused(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    plan = built(library, spec_of(models.identity(tmp_path / "other.onnx", (1, 4))))
    with pytest.raises(ModelRefused, match="other tensors than declared"):
        TensorRtEngine(spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2))), device, library, plan)


def test_the_node_without_a_kernel_is_named(library: Library, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    model = onnx.load(spec.path)
    model.graph.node.insert(0, helper.make_node("Teleport", ["obs"], ["z"], name="beam", domain="custom"))
    onnx.save(model, spec.path)
    with pytest.raises(ModelRefused, match=r"node 0 'beam' \(Teleport\).*UNSUPPORTED_NODE"):
        built(library, spec)


def test_other_types_than_declared_are_refused(library: Library, tmp_path: Path) -> None:
    """An FP16 model whose tensors the configuration calls FP32."""
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Identity", ["x"], ["y"])],
        [models.value("x", 10, (1, 4))],
        [models.value("y", 10, (1, 4))],
    )
    spec = spec_of(path)
    fp32 = tuple(replace(t, dtype=DTYPE_BY_NUMBER[1]) for t in spec.inputs)
    with pytest.raises(ModelRefused, match=r"'x'.*found FP16; allowed: FP32"):
        built(library, replace(spec, inputs=fp32))


@pytest.mark.parametrize(
    ("warning", "refused"),
    [
        ("WeightsContext.cpp:73: Weight at index 0: 1099511627776 is out of range. Clamping to: 2147483647", True),
        ("WeightsContext.cpp:80: One or more weights outside the range of FLOAT was clamped", True),
        ("TopN (plugin) doesn't support INT64 for inputs, will cast to INT32.", True),
        ("ModelImporter.cpp:1071: Make sure input x has Int64 binding.", False),
        ("UINT8 data of w is being converted to INT32.", False),
    ],
)
def test_constants_that_would_be_narrowed_are_refused(
    library: Library, tmp_path: Path, warning: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of NVIDIA's parser; tests/rtx asks that itself."""
    spec = spec_of(models.identity(tmp_path / "m.onnx", (4,), models.INT64))
    parse = library.module.OnnxParser.parse_from_file

    def warned(self: object, model: str) -> bool:
        library.logger.log(library.module.ILogger.Severity.WARNING, warning)
        return bool(parse(self, model))

    monkeypatch.setattr(library.module.OnnxParser, "parse_from_file", warned)
    if not refused:
        assert built(library, spec)
        return
    with pytest.raises(ModelRefused, match=r"numbers that .* would change") as caught:
        built(library, spec)
    assert warning in str(caught.value)


def test_an_input_that_sets_sizes_is_refused(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    """TensorRT reads it on the host, in a process that has it in device memory only."""
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node("Reshape", ["x", "sizes"], ["y"])],
        [models.value("x", 1, (2, 3)), models.value("sizes", models.INT64, (2,))],
        [models.value("y", 1, (2, 3))],
    )
    types = {"x": 1, "sizes": models.INT64, "y": 1}
    dims = {"x": (2, 3), "sizes": (2,), "y": (2, 3)}
    x, sizes, y = (TensorSpec(n, DTYPE_BY_NUMBER[types[n]], d, (False,) * len(d), True) for n, d in dims.items())
    spec = EngineSpec("m", str(path), (x, sizes), (y,))
    with pytest.raises(ModelRefused, match=r"reads sizes from tensor 'sizes'"):
        TensorRtEngine(spec, device, library, built(library, spec))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"formats": {"obs": "CHW32"}}, r"'obs' in another memory layout: found CHW32; allowed: LINEAR"),
        ({"inputs": [["obs", "HALF", [1, 4]]]}, r"'obs' of another type: found FP16; allowed: FP32"),
    ],
)
def test_a_plan_that_somebody_built_otherwise_is_refused(
    library: Library, device: CudaDevice, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = built(library, spec)
    told = json.dumps(header(plan) | change).encode()
    model = plan[16 + int.from_bytes(plan[8:16], "little") :]
    with pytest.raises(ModelRefused, match=said):
        TensorRtEngine(spec, device, library, plan[:8] + len(told).to_bytes(8, "little") + told + model)


def test_what_the_library_warns_of_a_plan_is_told(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    """Another card of the same generation: TensorRT takes the plan, and is not sure of it."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = built(library, spec)
    assert TensorRtEngine(spec, device, library, plan).warm().notes == []
    fake_cuda.control.memory_bytes = 2 << 30
    engine = TensorRtEngine(spec, device, library, plan).warm()
    assert "different models of devices is not recommended" in engine.notes[0]
    engine.close()


def test_a_driver_that_the_library_does_not_work_with_is_told(
    library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bindings raise TypeError, with a word about factories."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = built(library, spec)
    monkeypatch.setenv("FAKE_TENSORRT_OLD_DRIVER", "1")
    for use in (lambda: built(library, spec), lambda: TensorRtEngine(spec, device, library, plan)):
        with pytest.raises(ModelRefused, match=r"does not work with this driver: found .*error: 35.*r580"):
            use()


def test_whoever_is_loaded_second_has_its_words_too(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    """The library goes on telling the logger that it was given first."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    first = TensorRtEngine(spec, device, find_library(), built(library, spec))
    with pytest.raises(ModelRefused, match="magic tag does not match"):
        TensorRtEngine(spec, device, find_library(), b"no plan at all")
    assert first.spec is spec


def test_a_library_that_complains_at_each_job_fills_no_memory() -> None:
    log = Log()
    for number in range(3000):
        log.add("WARNING", str(number))
    assert len(log.lines) == 1000
    assert log.errors().endswith("warning: 2999")


def test_operators_that_the_librarys_own_plugins_bring_are_known(library: Library, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    model = onnx.load(spec.path)
    model.graph.node.insert(0, helper.make_node("EfficientNMS_TRT", ["obs"], ["z"], domain="nvidia"))
    onnx.save(model, spec.path)
    assert built(library, spec)


@pytest.mark.parametrize("content", [b"damaged", b"timing of 9.9"])
def test_a_timing_cache_of_something_else_is_measured_anew(library: Library, tmp_path: Path, content: bytes) -> None:
    """Of another version after an upgrade, or damaged: no reason to build nothing any more."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    cache = tmp_path / "timing"
    cache.write_bytes(content)
    with pytest.raises(ModelRefused, match=r"can't be pinned.*does not take.*written by this version"):
        built(library, spec, timing_cache=str(cache), pin_tactics=True)
    assert built(library, spec, timing_cache=str(cache))
    assert cache.read_bytes() == b"timing of 11.4.0.106"


def test_kernels_for_shapes_are_compiled_in_the_warm_up_or_never(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX would compile them beside the runs, in threads of its own."""
    stand_in.install(monkeypatch, stand_in.RTX)
    library = find_library("tensorrt_rtx")
    spec = spec_of(models.mlp(tmp_path / "m.onnx", batch="N", sizes=(4, 2)), {}, 2)
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    obs, actions = Slot(noise(1, 4)), Slot(np.zeros((1, 2), np.float32))
    engine.run_shaped([obs.tensor], [actions.tensor])
    assert {size: context._told["kernels"] for size, context in engine._contexts.items()} == {
        1: "EAGER", 2: "EAGER", 0: "NONE",
    }  # fmt: skip
    engine.close()


def test_plugins_come_from_listed_absolute_paths_only(library: Library, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    there = tmp_path / "plugin.so"
    there.touch()
    built(library, spec, plugins=[str(there)])
    for wrong in (str(tmp_path / "missing.so"), "plugin.so"):
        with pytest.raises(ModelRefused, match="plugin library"):
            built(library, spec, plugins=[wrong])


def test_a_missing_library_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelRefused, match="apt install python3-libnvinfer"):
        find_library()


def test_the_builder_is_told_what_makes_timing_deterministic(library: Library, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", batch="N", sizes=(4, 2)), {}, 4)
    cache = tmp_path / "timing"
    told = header(built(library, spec, timing_cache=str(cache), optimization_level=5, workspace_bytes=123456))
    assert told["aux_streams"] == 0
    assert told["limits"] == {"WORKSPACE": 123456}
    assert told["level"] == 5
    assert told["flags"] == []
    assert told["profiles"] == [{"obs": [[1, 4], [4, 4], [4, 4]]}]
    assert cache.read_bytes()
    pinned = header(built(library, spec, timing_cache=str(cache), pin_tactics=True))
    assert pinned["flags"] == ["EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS"]


@pytest.mark.parametrize(
    ("version", "written", "said"),
    [("11.4.0.106", False, "no timing cache at"), ("10.3.0", True, "tensorrt 10.3.0, which can't")],
)
def test_tactics_that_can_not_be_pinned_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, written: bool, said: str
) -> None:
    """A build that looks pinned and is not would choose otherwise one day."""
    stand_in.install(monkeypatch, version)
    cache = tmp_path / "timing"
    if written:
        cache.write_bytes(b"timing of 10.3.0")
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    with pytest.raises(ModelRefused, match=said):
        built(find_library(), spec, timing_cache=str(cache), pin_tactics=True)


def test_pinned_tactics_are_part_of_what_a_plan_is_called(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    cache = tmp_path / "timing"

    def called(**more: bool) -> str:
        return plan_identity(spec, device, 0, library, GpuOptions("", timing_cache=str(cache), **more)).digest

    cache.write_bytes(b"one")
    free, pinned = called(), called(pin_tactics=True)
    cache.write_bytes(b"two")
    assert called() == free
    assert called(pin_tactics=True) != pinned


def test_the_profile_covers_one_job_to_a_full_batch(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", batch="N", sizes=(4, 2))
    assert profile_of(spec_of(path)) == {"obs": [[1, 4], [1, 4], [1, 4]]}
    assert profile_of(spec_of(path, {}, 8)) == {"obs": [[1, 4], [8, 4], [8, 4]]}


# Builds -----------------------------------------------------------------------------------------------------------


def start(
    library: Library, device: CudaDevice, spec: EngineSpec, folder: Path, limit_ns: int = 60 * SECOND
) -> tuple[PlanBuild, GpuOptions]:
    options = GpuOptions(str(folder / "cache"))
    identity = plan_identity(spec, device, device.driver_version, library, options)
    request = build_request(spec, device.index, options)
    return PlanBuild(request, identity, PlanCache(folder / "cache"), limit_ns=limit_ns), options


def test_a_build_goes_from_missing_to_serving(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    options = GpuOptions(str(tmp_path / "cache"))
    with pytest.raises(PlanMissing) as missing:
        open_engine(spec, device, options)
    assert missing.value.why == ""
    build, _ = start(library, device, spec, tmp_path)
    assert build.wait().manifest["identity"]["library"] == "tensorrt 11.4.0.106"
    assert (build.progress.phase, build.progress.step, build.progress.steps) == ("Building Engine", 5, 5)
    engine = open_engine(spec, device, options).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    run()
    assert actions.array.any()
    release(run)
    engine.close()  # type: ignore[attr-defined]
    path = next((tmp_path / "cache").glob("*.plan"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(PlanMissing, match="damaged"):
        open_engine(spec, device, options)


def test_a_plan_that_only_the_library_knows_for_foreign_is_built_again(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under its own name, with a checksum that is right."""
    (info,) = probe("0")
    monkeypatch.setattr("taktd.engines.gpu.open_gpu", lambda selector: (device, info))
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    driver = {"kind": "cuda", "device": "0", "cache": str(tmp_path / "cache"), "build_limit_ns": 60 * SECOND}
    identity = plan_identity(spec, device, device.driver_version, library, GpuOptions.of(driver))
    PlanCache(tmp_path / "cache").store(identity, b"a plan of another card")
    with pytest.raises(PlanMissing, match="magic tag"):
        open_engine(spec, device, GpuOptions.of(driver))
    told: list[str] = []
    with pytest.raises(PlanMissing):
        engine_opener(driver, alone=False)(spec)
    opened = engine_opener(driver, tell=told.append)
    opened(spec).warm().close()  # type: ignore[attr-defined]
    assert told[0].startswith("building ")
    assert told[-1] == ""
    assert opened.gpu is not None
    assert opened.gpu["pci"] == "0000:01:00.0"


def test_a_prebuilt_plan_serves_without_a_build(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = tmp_path / "go1.plan"
    options = GpuOptions(str(tmp_path / "cache"), plan=str(plan))
    with pytest.raises(ModelRefused, match=r"go1\.plan: No such file.*gpu\.plans"):
        open_engine(spec, device, options)
    plan.write_bytes(b"nonsense")
    with pytest.raises(ModelRefused, match="magic tag") as caught:
        open_engine(spec, device, options)
    assert not isinstance(caught.value, PlanMissing), "it is not ours to build again"
    plan.write_bytes(built(library, spec))
    open_engine(spec, device, options).warm().close()  # type: ignore[attr-defined]
    assert not (tmp_path / "cache").exists()


def test_a_builder_ends_with_whom_it_builds_for(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT_STEP_S", "60")
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    request = replace(build_request(spec, 0, GpuOptions("")), output=str(tmp_path / "o.plan"))
    script = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-m', 'taktd.engines.tensorrt_build', str(os.getpid())],"
        " stdin=subprocess.PIPE)\n"
        "child.stdin.write(sys.argv[1].encode() + b'\\n'); child.stdin.close()\n"
        "print(child.pid, flush=True); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, request.as_json()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    builder = os.pidfd_open(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    assert select.select([builder], [], [], 30)[0], "the builder still runs"
    os.close(builder)


def test_a_build_can_be_cancelled(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT_STEP_S", "0.2")
    build, _ = start(library, device, spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2))), tmp_path)
    while build.progress.step == 0:
        assert build.poll() is None
        time.sleep(0.01)
    build.cancel()
    with pytest.raises(ModelRefused, match="found cancelled"):
        build.wait()
    assert build.progress.step < build.progress.steps, "it went on to the end"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_build_ends_at_its_limit(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT_STEP_S", "5")
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    build, _ = start(library, device, spec, tmp_path, limit_ns=SECOND)
    monkeypatch.setattr("taktd.engines.plan_build.CANCEL_GRACE_NS", 100_000_000)
    with pytest.raises(ModelRefused, match="not finished within 1 s"):
        build.wait()


def test_a_build_that_fails_says_why(children: Path, library: Library, device: CudaDevice, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    Path(spec.path).write_bytes(b"rubbish")
    options = GpuOptions(str(tmp_path / "cache"))
    identity = plan_identity(spec, device, 0, library, options)
    build = PlanBuild(build_request(spec, 0, options), identity, PlanCache(tmp_path / "cache"), limit_ns=60 * SECOND)
    with pytest.raises(ModelRefused, match="MODEL_DESERIALIZE_FAILED"):
        build.wait()


def test_a_crash_when_the_library_takes_leave_spoils_no_plan(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT_LEAVES_BADLY", "1")
    build, _ = start(library, device, spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2))), tmp_path)
    assert build.wait().plan


def test_a_builder_that_dies_is_told(
    children: Path, library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_CRASH", "1")
    monkeypatch.setenv("FAKE_CUDA_CONTROL", "")
    build, _ = start(library, device, spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2))), tmp_path)
    with pytest.raises(ModelRefused, match="signal"):
        build.wait()
