"""TensorRT on the simulated GPU: builds in their own process, refusals, faults, and what a job costs the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from taktd.drivers.cuda import CudaDevice
from taktd.drivers.fault import FaultKind
from taktd.engines.engine import release
from taktd.engines.errors import DeviceFailure, FailureKind
from taktd.engines.gpu import GpuOptions, open_engine, plan_identity
from taktd.engines.plan_cache import PlanCache
from taktd.engines.tensorrt import TensorRtEngine, WarmTensorRtEngine
from taktd.engines.tensorrt_library import Library
from tests import models
from tests.conformance.test_engines import Slot, noise, plain, spec_of
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt.stand_in import built

SECOND = 1_000_000_000


@pytest.fixture
def warm(library: Library, device: CudaDevice, tmp_path: Path) -> Iterator[WarmTensorRtEngine]:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    yield engine
    engine.close()


# What a job costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrated", [0, 1])
@pytest.mark.parametrize("mem_ops", [1, 0])
def test_a_job_is_one_graph_launch_and_no_allocation(
    fake_cuda: Simulated, library: Library, tmp_path: Path, integrated: int, mem_ops: int
) -> None:
    fake_cuda.control.integrated, fake_cuda.control.mem_ops = integrated, mem_ops
    device = CudaDevice(0)
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    before = fake_cuda.live()
    for _ in range(20):
        mark = fake_cuda.mark()
        run()
        counts = fake_cuda.counts_since(mark)
        assert counts.pop("cuGraphLaunch") == 1
        assert set(counts) <= ({"cuStreamQuery"} if mem_ops else {"cuEventRecord", "cuEventQuery"})
    assert fake_cuda.live() == before
    assert run.completion == ("flag" if mem_ops else "event")
    assert engine.notes == []
    release(run)
    engine.close()
    device.close()


def test_the_copies_of_a_discrete_gpu_go_straight_to_the_slot(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    pinned = fake_cuda.live()["pinned"]
    run = engine.bind([obs.tensor], [actions.tensor])
    live = fake_cuda.live()
    assert live["registered"] == 2, "the pages of the slot's two tensors"
    assert live["pinned"] == pinned + 1, "the completion flag, and no staging memory"
    release(run)
    engine.close()


@pytest.mark.parametrize(("integrated", "contexts", "moves"), [(0, 2, 1), (1, 2 + 3, 0)])
def test_there_is_a_context_a_batch_size_and_a_graph_a_slot(
    fake_cuda: Simulated, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    integrated: int, contexts: int, moves: int,
) -> None:  # fmt: skip
    """Slots of a discrete GPU share the context; on an integrated one each has its own, since it works in place."""
    fake_cuda.control.integrated = integrated
    made = []
    create = library.module.ICudaEngine.create_execution_context
    monkeypatch.setattr(
        library.module.ICudaEngine, "create_execution_context", lambda *given: (made.append(1), create(*given))[1]
    )
    device = CudaDevice(0)
    spec = spec_of(models.mlp(tmp_path / "m.onnx", batch="N"), {}, 2)
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    slots = [(Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))) for _ in range(3)]
    runs, captures = [], []
    for obs, actions in slots:
        mark = fake_cuda.mark()
        runs.append(engine.bind([obs.tensor], [actions.tensor]))
        calls = fake_cuda.calls_since(mark)
        captures.append(calls[calls.index("cuStreamBeginCapture") + 1 : calls.index("cuStreamEndCapture")])
    copies = ["cuMemcpyAsync"] * moves
    assert captures == [[*copies, "cuLaunchHostFunc", *copies, "cuStreamWriteValue32"]] * 3
    assert len(made) == contexts
    assert fake_cuda.live()["exec"] == 3
    for run in runs:
        release(run)
    engine.close()
    device.close()


def test_an_integrated_gpu_copies_only_what_must_not_change_under_it(
    fake_cuda: Simulated, library: Library, tmp_path: Path
) -> None:
    """TopK sorts in its output: a client that writes there meanwhile would lead it astray, as with its input."""
    fake_cuda.control.integrated = 1
    device = CudaDevice(0)
    plain, sorting = spec_of(models.mlp(tmp_path / "m.onnx")), spec_of(models.topk(tmp_path / "t.onnx"))
    assert [t.bindable for t in (*plain.inputs, *plain.outputs)] == [True, True]
    assert [t.bindable for t in (*sorting.inputs, *sorting.outputs)] == [False, False, False]
    for spec, copies in ((plain, 0), (sorting, 3)):
        engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
        slots = [[Slot(np.ones(t.dims, t.dtype.numpy)) for t in side] for side in (spec.inputs, spec.outputs)]
        mark = fake_cuda.mark()
        run = engine.bind(*[[slot.tensor for slot in side] for side in slots])
        assert fake_cuda.counts_since(mark)["cuMemcpyAsync"] == copies
        mark = fake_cuda.mark()
        run()
        assert fake_cuda.counts_since(mark)["cuGraphLaunch"] == 1
        assert slots[1][0].array.any()
        release(run)
        engine.close()
    device.close()


def test_slots_share_pages_and_give_them_back(fake_cuda: Simulated, warm: WarmTensorRtEngine) -> None:
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    runs = [warm.bind([obs.tensor], [actions.tensor]) for _ in range(3)]
    assert fake_cuda.live()["registered"] == 2
    for run in runs:
        release(run)
        release(run)
    assert fake_cuda.live()["registered"] == 0


def test_where_nothing_can_be_captured_it_says_so(fake_cuda: Simulated, warm: WarmTensorRtEngine) -> None:
    fake_cuda.control.capture = 0
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = warm.bind([obs.tensor], [actions.tensor])
    run()
    assert actions.array.any()
    assert len(warm.notes) == 1
    assert "enqueued anew" in warm.notes[0]
    release(run)


@pytest.mark.parametrize("error", [1, 801, 900])
@pytest.mark.parametrize("call", ["cuStreamWriteValue32", "cuStreamBeginCapture", "cuGraphInstantiateWithFlags"])
def test_however_a_driver_says_that_it_can_not_capture_the_job_runs(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path, call: str, error: int
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    fake_cuda.inject(call, error)
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    run()
    assert actions.array.any()
    assert run.completion == ("event" if call == "cuStreamWriteValue32" else "")
    assert len(engine.notes) == (0 if call == "cuStreamWriteValue32" else 1)
    release(run)
    engine.close()


@pytest.mark.parametrize("integrated", [0, 1])
@pytest.mark.parametrize("error", [1, 205, 800, 801])
def test_where_a_lane_can_not_be_registered_its_jobs_run_all_the_same(
    fake_cuda: Simulated, library: Library, tmp_path: Path, error: int, integrated: int
) -> None:
    """Told, and by one copy more. Nobody has yet seen what each driver says to sealed shared memory."""
    fake_cuda.control.integrated = integrated
    device = CudaDevice(0)
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    fake_cuda.inject("cuMemHostRegister", error)
    slots = [(Slot(noise(1, 48, seed=i)), Slot(np.zeros((1, 12), np.float32))) for i in range(2)]
    runs = [engine.bind([obs.tensor], [actions.tensor]) for obs, actions in slots]
    for run, (obs, actions) in zip(runs, slots, strict=True):
        mark = fake_cuda.mark()
        run()
        assert fake_cuda.counts_since(mark)["cuGraphLaunch"] == 1
        np.testing.assert_allclose(actions.array, plain(Path(spec.path), {"obs": obs.array})[0], rtol=1e-6)
    assert len(engine.notes) == 1
    assert "can't be registered (cuMemHostRegister: " in engine.notes[0]
    for run in runs:
        release(run)
    engine.close()
    device.close()
    assert not any(fake_cuda.live().values())


def test_five_hundred_loads_leave_nothing(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    plan = built(library, spec)
    obs, actions = Slot(np.zeros((1, 4), np.float32)), Slot(np.zeros((1, 2), np.float32))
    before = fake_cuda.live()
    for _ in range(500):
        engine = TensorRtEngine(spec, device, library, plan).warm()
        run = engine.bind([obs.tensor], [actions.tensor])
        run()
        release(run)
        engine.close()
    assert fake_cuda.live() == before
    leaked = fake_cuda.leaked()
    device.close()
    assert fake_cuda.leaked() == leaked, "nothing was left to die with the context"
    assert not any(fake_cuda.live().values())


def test_urgency_is_the_priority_of_the_stream(library: Library, device: CudaDevice, tmp_path: Path) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    engine = TensorRtEngine(spec, device, library, built(library, spec), urgency=2).warm()
    assert engine.stream.priority == -2
    engine.close()


# Faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (simulated.ECC, FaultKind.ECC),
        (simulated.LAUNCH_TIMEOUT, FaultKind.LAUNCH_TIMEOUT),
        (simulated.UNKNOWN, FaultKind.DEVICE_LOST),
        (simulated.ILLEGAL_ADDRESS, FaultKind.LAUNCH_FAILED),
    ],
)
def test_a_fault_during_a_run_is_a_failure_that_sticks(
    fake_cuda: Simulated, warm: WarmTensorRtEngine, error: int, kind: FaultKind
) -> None:
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = warm.bind([obs.tensor], [actions.tensor])
    fake_cuda.inject("execute", error, times=1)
    for _ in range(2):
        with pytest.raises(DeviceFailure) as caught:
            run()
        assert caught.value.fault.kind is kind
        assert caught.value.fault.sticky


def test_a_lost_device_is_noticed_at_the_next_job(fake_cuda: Simulated, warm: WarmTensorRtEngine) -> None:
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = warm.bind([obs.tensor], [actions.tensor])
    fake_cuda.control.lost = simulated.UNKNOWN
    with pytest.raises(DeviceFailure) as caught:
        run()
    assert caught.value.fault.kind is FaultKind.DEVICE_LOST


def test_a_hanging_device_ends_the_run_in_time(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    engine = TensorRtEngine(spec, device, library, built(library, spec), timeout_ns=20_000_000).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    fake_cuda.control.hang = 1
    start = time.monotonic_ns()
    with pytest.raises(DeviceFailure) as caught:
        run()
    assert time.monotonic_ns() - start >= 20_000_000
    assert caught.value.fault.kind is FaultKind.LAUNCH_TIMEOUT


def test_what_a_run_may_take_is_not_asked_of_the_first_ones(
    library: Library, device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load code, and TensorRT-RTX compiles it: seconds on a card whose runs may take milliseconds."""
    trouble = tmp_path / "trouble"
    monkeypatch.setenv("FAKE_TENSORRT_TROUBLE", str(trouble))
    trouble.write_text("slow 0.05")
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(4, 2)))
    engine = TensorRtEngine(spec, device, library, built(library, spec), timeout_ns=1).warm()
    trouble.unlink()
    engine.close()


def test_too_little_memory_at_load_is_told_and_leaves_nothing(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    spec = spec_of(models.identity(tmp_path / "m.onnx", (1 << 20,)))
    plan = built(library, spec)
    fake_cuda.control.memory_bytes = 6 << 20
    before = fake_cuda.live()
    with pytest.raises(DeviceFailure) as caught:
        TensorRtEngine(spec, device, library, plan).warm()
    assert caught.value.fault.kind is FaultKind.OUT_OF_MEMORY
    assert not caught.value.fault.sticky
    del caught  # its frames hold the engine
    assert fake_cuda.live() == before


def test_too_little_memory_for_the_weights_is_no_fault_of_the_plan(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    """TensorRT says both by giving nothing back. A plan that is to blame is thrown away and built again."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx", sizes=(64, 64)))
    options = GpuOptions(str(tmp_path / "cache"))
    identity = plan_identity(spec, device, device.driver_version, library, options)
    PlanCache(tmp_path / "cache").store(identity, built(library, spec))
    fake_cuda.control.memory_bytes = 4096
    with pytest.raises(DeviceFailure) as caught:
        open_engine(spec, device, options)
    assert (caught.value.kind, caught.value.sticky) == (FailureKind.OUT_OF_MEMORY, False)
    fake_cuda.control.memory_bytes = 1 << 30
    fake_cuda.inject("cuMemAlloc", simulated.ECC, sticky=True, times=1)
    with pytest.raises(DeviceFailure) as broken:
        open_engine(spec, device, options)
    assert broken.value.sticky


def test_a_broken_context_sticks_where_work_is_enqueued_too(
    fake_cuda: Simulated, library: Library, device: CudaDevice, tmp_path: Path
) -> None:
    """TensorRT says no more than False."""
    spec = spec_of(models.mlp(tmp_path / "m.onnx"))
    fake_cuda.control.capture = 0
    engine = TensorRtEngine(spec, device, library, built(library, spec)).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    fake_cuda.inject("cuLaunchHostFunc", simulated.ILLEGAL_ADDRESS, sticky=True, times=1)
    with pytest.raises(DeviceFailure) as caught:
        run()
    assert (caught.value.fault.kind, caught.value.sticky) == (FaultKind.LAUNCH_FAILED, True)
