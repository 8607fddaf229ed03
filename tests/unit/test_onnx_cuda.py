"""ONNX Runtime on a GPU: never silently elsewhere. That it computes right is in tests/conformance/test_engines.py."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from taktd.drivers.cuda import CudaDevice
from taktd.drivers.fault import FaultKind
from taktd.engines import onnx_cuda
from taktd.engines.engine import release
from taktd.engines.errors import DeviceFailure, ModelRefused
from taktd.engines.onnx_cuda import OnnxCudaEngine
from tests import models
from tests.conformance.test_engines import Slot, noise, spec_of
from tests.fakes import onnx_cuda as stand_in
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated

SECOND = 1_000_000_000


def test_without_the_provider_the_model_is_refused(device: CudaDevice, fake_cuda: Simulated, tmp_path: Path) -> None:
    """The ONNX Runtime of this environment has none, in truth."""
    if onnx_cuda.PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has a CUDA provider")
    with pytest.raises(ModelRefused, match="no CUDA provider"):
        OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND)
    assert fake_cuda.live()["stream"] == 0


def test_a_silent_fall_to_the_cpu_is_refused(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ONNX Runtime does where the provider's library does not load: a session on the CPU, and no exception."""

    class Fallen(stand_in.InferenceSession):
        def get_providers(self) -> list[str]:
            return [stand_in.CPU]

    monkeypatch.setattr(onnx_cuda, "onnxruntime", stand_in.module(InferenceSession=Fallen))
    with pytest.raises(ModelRefused, match=r"fell back.*found CPUExecutionProvider"):
        OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND)


def test_a_library_of_cuda_s_that_is_missing_is_named(
    device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fallen(stand_in.InferenceSession):
        def get_providers(self) -> list[str]:
            return [stand_in.CPU]

    def preload() -> None:
        print("Failed to load libcublasLt.so.13: cannot open shared object file\nPlease follow a link.")

    monkeypatch.setattr(onnx_cuda, "onnxruntime", stand_in.module(InferenceSession=Fallen, preload_dlls=preload))
    with pytest.raises(ModelRefused, match=r"found CPUExecutionProvider; Failed to load libcublasLt\.so\.13"):
        OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND)
    assert capsys.readouterr().out == ""


def test_nodes_may_not_fall_back_either(device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watched(stand_in.InferenceSession):
        def __init__(
            self, path: str, sess_options: onnxruntime.SessionOptions, providers: object, enable_fallback: int = 1
        ) -> None:
            seen.append(sess_options.get_session_config_entry("session.disable_cpu_ep_fallback"))
            raise RuntimeError("node Loop_3 has no kernel on CUDAExecutionProvider")

    monkeypatch.setattr(onnx_cuda, "onnxruntime", stand_in.module(InferenceSession=Watched))
    with pytest.raises(ModelRefused, match="Loop_3"):
        OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND)
    assert seen == ["1"]


def test_onnx_runtimes_own_second_try_is_off(tmp_path: Path) -> None:
    """It takes another provider and goes on. That the switch exists is asked of the real one."""
    source = inspect.getsource(onnxruntime.InferenceSession.__init__)
    assert 'kwargs.get("enable_fallback", 1)' in source


def test_a_broken_context_is_a_device_failure_that_sticks(
    device: CudaDevice, fake_cuda: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_cuda, "onnxruntime", stand_in.module())
    engine = OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND).warm()
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    fake_cuda.inject("execute", simulated.ECC, times=1)
    with pytest.raises(DeviceFailure) as caught:
        run()
    assert (caught.value.fault.kind, caught.value.sticky) == (FaultKind.ECC, True)


def test_where_a_lane_can_not_be_registered_its_jobs_run_all_the_same(
    device: CudaDevice, fake_cuda: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_cuda, "onnxruntime", stand_in.module())
    engine = OnnxCudaEngine(spec_of(models.mlp(tmp_path / "m.onnx")), device, timeout_ns=SECOND).warm()
    fake_cuda.inject("cuMemHostRegister", 801)
    obs, actions = Slot(noise(1, 48)), Slot(np.zeros((1, 12), np.float32))
    run = engine.bind([obs.tensor], [actions.tensor])
    run()
    assert actions.array.any()
    assert len(engine.notes) == 1
    release(run)
    engine.close()


def test_the_stand_in_has_the_real_calls() -> None:
    for kind in ("InferenceSession", "IOBinding"):
        ours = getattr(stand_in, kind)
        theirs = getattr(onnxruntime, kind)
        for name in [n for n in vars(ours) if not n.startswith("_")]:
            real = list(inspect.signature(getattr(theirs, name)).parameters)
            mine = list(inspect.signature(getattr(ours, name)).parameters)
            assert real[: len(mine)] == mine, f"{kind}.{name}{tuple(mine)}: real {real}"
    assert "disable_fallback" in dir(onnxruntime.InferenceSession)
    for name in ("shape", "data_ptr"):
        assert name in dir(onnxruntime.OrtValue)
