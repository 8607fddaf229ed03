"""What every engine promises (taktd.engines.engine), over all of them: ONNX Runtime, and TensorRT on the simulated GPU.

The stand-in for TensorRT is played in each supported version, on a discrete and an integrated GPU, with completion by
flag and by event, and where nothing can be captured.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from taktd.drivers.cuda import CudaDevice
from taktd.drivers.sim import SimDevice
from taktd.engines.engine import EngineSpec, Tensor, WarmEngine, release
from taktd.engines.errors import EngineFailure
from taktd.engines.gpu import GpuOptions, build_request
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.engines.simulated import Cost, SimulatedEngine, SimulatedOptions
from taktd.engines.tensorrt import TensorRtEngine
from taktd.engines.tensorrt_build import build_plan
from taktd.engines.tensorrt_library import find_library
from tests import models
from tests.fakes import onnx_cuda as onnx_cuda_stand_in
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in

# name → (version, settings of the simulated GPU)
GPUS: dict[str, tuple[str, dict[str, int]]] = {
    **{f"tensorrt-{v}": (v, {}) for v in stand_in.VERSIONS},
    "tensorrt-integrated": (stand_in.VERSIONS[0], {"integrated": 1}),
    "tensorrt-event": (stand_in.VERSIONS[0], {"mem_ops": 0}),
    "tensorrt-uncaptured": (stand_in.VERSIONS[0], {"capture": 0}),
    "tensorrt-rtx": (stand_in.RTX, {}),
}
Open = Callable[..., WarmEngine]


class Slot:
    """A tensor's pages, as in a lane."""

    def __init__(self, array: np.ndarray) -> None:
        self._pages = mmap.mmap(-1, max(1, array.nbytes))
        self.array = np.frombuffer(self._pages, array.dtype, array.size).reshape(array.shape)
        self.array[...] = array
        self.tensor = Tensor(self.array.ctypes.data, array.shape)


def spec_of(path: Path, shapes: dict[str, list[int]] | None = None, max_batch: int = 1) -> EngineSpec:
    found = inspect_model(path, shapes or {})
    tensors = specs_from_json(found["inputs"]), specs_from_json(found["outputs"])
    return EngineSpec("m", str(path), *tensors, max_batch, found["digest"])


@pytest.fixture(params=["onnx-cpu", "sim-onnx", "onnx-cuda", *GPUS])
def open_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """open_one(path, shapes, max_batch): a warm engine."""
    if request.param == "onnx-cpu":
        yield lambda *arguments: OnnxCpuEngine(spec_of(*arguments)).warm()
        return
    if request.param == "sim-onnx":
        options = SimulatedOptions(Cost.fixed(0), "onnx")
        yield lambda *arguments: SimulatedEngine(spec_of(*arguments), SimDevice(), options).warm()
        return
    fake: Simulated = request.getfixturevalue("fake_cuda")
    if request.param == "onnx-cuda":
        yield from onnx_cuda_engines(fake, monkeypatch)
        return
    version, settings = GPUS[request.param]
    for name, value in settings.items():
        setattr(fake.control, name, value)
    stand_in.install(monkeypatch, version)
    device, opened = CudaDevice(0), []
    library = find_library("tensorrt_rtx" if version == stand_in.RTX else "auto")

    def open_engine(*arguments: object) -> WarmEngine:
        spec = spec_of(*arguments)  # type: ignore[arg-type]
        plan = build_plan(library, build_request(spec, 0, GpuOptions("")), lambda *_: None, lambda: False)
        opened.append(TensorRtEngine(spec, device, library, plan).warm())
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()
    device.close()
    assert not any(fake.live().values()), f"not given back: {fake.live()}"


def onnx_cuda_engines(fake: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    from taktd.engines import onnx_cuda

    monkeypatch.setattr(onnx_cuda, "onnxruntime", onnx_cuda_stand_in.module())
    device, opened = CudaDevice(0), []

    def open_engine(*arguments: object) -> WarmEngine:
        spec = spec_of(*arguments)  # type: ignore[arg-type]
        opened.append(onnx_cuda.OnnxCudaEngine(spec, device, timeout_ns=1_000_000_000).warm())
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()
    device.close()
    assert not any(fake.live().values()), f"not given back: {fake.live()}"


def plain(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)


def noise(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def test_a_bound_run_reads_and_writes_the_slot(open_one: Open, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx")
    engine = open_one(path)
    obs, actions = Slot(np.zeros((1, 48), np.float32)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    for seed in range(5):
        obs.array[:] = noise(1, 48, seed=seed)
        run()
        np.testing.assert_allclose(actions.array, plain(path, {"obs": obs.array})[0], rtol=1e-6)
    release(run)


def test_slots_do_not_mix(open_one: Open, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx")
    engine = open_one(path)
    slots = [(Slot(noise(1, 48, seed=i)), Slot(np.zeros((1, 12), np.float32))) for i in range(4)]
    runs = [engine.bind([i.tensor], [o.tensor]) for i, o in slots]
    for run in reversed(runs):
        run()
    for i, o in slots:
        np.testing.assert_allclose(o.array, plain(path, {"obs": i.array})[0], rtol=1e-6)
    for run in runs:
        release(run)


def test_one_slot_serves_two_output_areas(open_one: Open, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx")
    engine = open_one(path)
    obs, areas = Slot(noise(1, 48)), [Slot(np.zeros((1, 12), np.float32)) for _ in range(2)]
    first, second = (engine.bind([obs.tensor], [area.tensor]) for area in areas)
    first()
    assert not areas[1].array.any()
    release(first)
    second()
    assert np.array_equal(areas[0].array, areas[1].array)
    release(second)


def test_integers_come_through_exactly(open_one: Open, tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", (4,), models.INT64)
    engine = open_one(path)
    x = Slot(np.array([0, -1, 2**62 + 1, -(2**63)], np.int64))
    y = Slot(np.zeros(4, np.int64))
    run = engine.bind([x.tensor], [y.tensor])
    run()
    assert np.array_equal(y.array, x.array)
    release(run)


def test_a_batch_gives_each_member_its_own_answer(open_one: Open, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", batch="N")
    engine = open_one(path, {}, 4)
    for size in (1, 3, 4):
        members = [(Slot(noise(1, 48, seed=i)), Slot(np.zeros((1, 12), np.float32))) for i in range(size)]
        batch = engine.batch(size)
        assert batch.size == size
        batch.run_bound()
        batch.run([[i.tensor.address] for i, _ in members], [[o.tensor.address] for _, o in members])
        for i, o in members:
            np.testing.assert_allclose(o.array, plain(path, {"obs": i.array})[0], rtol=1e-4, atol=1e-6)
        release(batch)


@pytest.mark.parametrize("size", [0, 5])
def test_a_batch_of_no_known_size_is_refused(open_one: Open, tmp_path: Path, size: int) -> None:
    engine = open_one(models.mlp(tmp_path / "m.onnx", batch="N"), {}, 4)
    with pytest.raises(ValueError, match="allowed 1 to 4"):
        engine.batch(size)


def dynamic(path: Path) -> Path:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return models.save(path, [node], [models.value("x", 1, ("N", 3))], [models.value("y", 1, ("N", 3))])


def test_a_job_may_bring_its_own_shape(open_one: Open, tmp_path: Path) -> None:
    path = dynamic(tmp_path / "m.onnx")
    engine = open_one(path, {"x": [8, 3]})
    x, y = Slot(np.zeros((8, 3), np.float32)), Slot(np.zeros((8, 3), np.float32))
    for rows in (1, 5, 8):
        x.array[:rows] = noise(rows, 3, seed=rows)
        actual = engine.run_shaped([Tensor(x.tensor.address, (rows, 3))], [y.tensor])
        assert actual == (((rows, 3),), False)
        np.testing.assert_allclose(y.array[:rows], 2 * x.array[:rows])


def test_a_result_that_does_not_fit_is_a_failure(open_one: Open, tmp_path: Path) -> None:
    engine = open_one(dynamic(tmp_path / "m.onnx"), {"x": [8, 3]})
    x, y = Slot(noise(8, 3)), Slot(np.zeros((2, 3), np.float32))
    with pytest.raises(EngineFailure, match="does not fit"):
        engine.run_shaped([x.tensor], [y.tensor])


def test_a_failure_leaves_the_engine_usable(open_one: Open, tmp_path: Path) -> None:
    engine = open_one(dynamic(tmp_path / "m.onnx"), {"x": [8, 3]})
    x, y, small = Slot(noise(8, 3)), Slot(np.zeros((8, 3), np.float32)), Slot(np.zeros((2, 3), np.float32))
    with pytest.raises(EngineFailure):
        engine.run_shaped([x.tensor], [small.tensor])
    assert engine.run_shaped([x.tensor], [y.tensor]) == (((8, 3),), False)


def test_an_input_with_indices_is_copied_before_it_is_used(open_one: Open, tmp_path: Path) -> None:
    """A client that rewrites it during the run must not lead an operator astray."""
    path = models.topk(tmp_path / "m.onnx")
    engine = open_one(path)
    x, top, at = Slot(noise(4096)), Slot(np.zeros(64, np.float32)), Slot(np.zeros(64, np.int64))
    run = engine.bind([x.tensor], [top.tensor, at.tensor])
    run()
    assert np.array_equal(x.array[at.array], top.array)
    release(run)


def test_bound_runs_may_be_let_go_without_release(open_one: Open, tmp_path: Path) -> None:
    engine = open_one(models.mlp(tmp_path / "m.onnx"))
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    for _ in range(10):
        engine.bind([obs.tensor], [actions.tensor])()


def test_private_memory_may_lie_anywhere(open_one: Open, tmp_path: Path) -> None:
    """Verification binds arrays of its own, which share pages and straddle them."""
    path = models.mlp(tmp_path / "m.onnx", sizes=(1500, 12))
    engine = open_one(path)
    memory = np.zeros(3 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096 + 16
    obs = memory[start : start + 6000].view(np.float32).reshape(1, 1500)
    actions = memory[start + 6000 : start + 6048].view(np.float32).reshape(1, 12)
    run = engine.bind(
        [Tensor(obs.ctypes.data, (1, 1500), shared=False)], [Tensor(actions.ctypes.data, (1, 12), shared=False)]
    )
    for seed in range(2):
        obs[:] = noise(1, 1500, seed=seed)
        run()
        np.testing.assert_allclose(actions, plain(path, {"obs": obs})[0], rtol=1e-4, atol=1e-5)
    release(run)


def test_what_a_run_needs_lives_as_long_as_the_run(open_one: Open, tmp_path: Path) -> None:
    """A captured graph refers to its context without owning it. What is made afterwards would take its place."""
    engine = open_one(models.mlp(tmp_path / "m.onnx"))
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    gc.collect()
    trampolines = [ctypes.CFUNCTYPE(None)(lambda: pytest.fail("another function ran")) for _ in range(200)]
    run()
    assert actions.array.any()
    assert trampolines
    release(run)


def test_opset_and_names_are_the_models(tmp_path: Path) -> None:
    """The test models are what the suite thinks they are."""
    assert [i.name for i in onnx.load(str(models.mlp(tmp_path / "m.onnx"))).graph.input] == ["obs"]
    assert ctypes.sizeof(ctypes.c_float) == 4
