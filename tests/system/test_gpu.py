"""A whole taktd whose GPU is simulated: the driver, and TensorRT's stand-in on it. No figure here is a GPU's."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from taktd.daemon.doctor.preconditions import SAMPLE_PERIOD_NS
from taktd.daemon.doctor.watch import SETTLED_LOOKS
from tests import models
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in
from tests.running import Running, eventually

Start = Callable[..., Running]
UUID = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00"


@pytest.fixture
def gpu(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "gpu"
    folder.mkdir()
    return {**simulated.environment(folder, lazy_queries=0), "PYTHONPATH": str(stand_in.SITE)}


def yaml(path: Path, gpu: str = UUID) -> str:
    return f"""
devices: {{gpu0: {{driver: cuda, gpu: "{gpu}"}}}}
models: {{policy: {{path: "{path}"}}}}
loops: {{walk: {{model: policy, period: 20ms}}}}
"""


def test_a_loop_is_served_by_the_gpu(taktd: Start, gpu: dict[str, str], tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment=gpu)
    reference = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with running.connect() as node, node.attach("walk") as lane:
        for seed in range(20):
            obs = np.random.default_rng(seed).standard_normal((1, 48)).astype(np.float32)
            lane.inputs["obs"][:] = obs
            reply = lane.infer()
            assert reply.status == "ok"
            np.testing.assert_allclose(lane.outputs["actions"], reference.run(None, {"obs": obs})[0], rtol=1e-5)
    (plan,) = (running.state / "engines").glob("*.plan")
    manifest = json.loads(plan.with_suffix(".json").read_text())
    assert manifest["identity"]["device"] == "Simulated GPU 8.9"
    assert manifest["identity"]["shapes"] == {"obs": [[1, 48], [1, 48], [1, 48]]}
    assert len(manifest["golden"]["outputs"]["actions"]["first"]) == 8
    assert manifest["measured"]["runs"] >= 20


@pytest.mark.parametrize("error", [simulated.ECC, simulated.LAUNCH_TIMEOUT, simulated.UNKNOWN])
def test_a_broken_context_costs_a_process_and_the_loop_goes_on(
    taktd: Start, gpu: dict[str, str], tmp_path: Path, error: int
) -> None:
    """FAULTS: ECC, launch time-out, device lost. The next process finds the GPU usable."""
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment=gpu)
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.infer().status == "ok"
        before = running.executor("gpu0")["pid"]
        Simulated(tmp_path / "gpu").inject("execute", error, times=1)
        assert lane.infer(timeout_us=20_000_000).status in ("ok", "lost"), "answered by whoever serves next"
        assert lane.infer(timeout_us=20_000_000).status == "ok"
        assert running.executor("gpu0")["pid"] != before
    assert "this process ends" in running.log


def test_a_gpu_that_comes_late_is_waited_for(taktd: Start, gpu: dict[str, str], tmp_path: Path) -> None:
    """FAULTS: device nodes that appear long after a boot. No restart loop of the service, and no exit code 78."""
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment={**gpu, "FAKE_CUDA_DEVICES": "0"}, wait=False)
    eventually(lambda: running.log.count("no CUDA-capable device") >= 2, 60, "it is tried again")
    assert running.process.poll() is None
    running.await_notification("EXTEND_TIMEOUT_USEC=30000000", 20)
    Simulated(tmp_path / "gpu").control.devices = 1
    running.await_ready()
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.infer().status == "ok"


def test_a_gpu_that_is_throttled_while_it_serves_costs_the_certificate_and_not_the_answers(
    taktd: Start, gpu: dict[str, str], tmp_path: Path
) -> None:
    told = tmp_path / "nvml.json"
    fine, hot = {"throttle_reasons": 1}, {"throttle_reasons": 0x40}

    def tell(state: dict[str, int]) -> None:
        fresh = told.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.rename(told)

    tell(fine)
    site = Path(__file__).parents[1] / "fakes" / "nvml_site"
    environment = {**gpu, "PYTHONPATH": f"{gpu['PYTHONPATH']}:{site}", "FAKE_NVML": str(told)}
    running = taktd(yaml(models.mlp(tmp_path / "policy.onnx")), environment=environment)
    # The look after the certificate is its ground, and gives no sign: so the fault comes again until it is seen.
    states = cycle((fine, hot))

    def lost() -> bool:
        tell(next(states))
        time.sleep(SAMPLE_PERIOD_NS / 1e9)
        return "gpu_throttling of gpu0" in running.log

    with running.connect() as node, node.attach("walk") as lane:
        eventually(lost, 20, "the loss is seen")
        assert "slowed by hardware thermal slowdown" in running.executor("gpu0")["not_certified"]
        assert running.ask("status")["certified"] is False
        assert lane.infer().status == "ok"
        tell(fine)
        eventually(lambda: "measurements on gpu0 hold again" in running.log, 20 + SETTLED_LOOKS, "it is mended")


def test_what_can_not_be_captured_is_said(taktd: Start, gpu: dict[str, str], tmp_path: Path) -> None:
    running = taktd(yaml(models.mlp(tmp_path / "policy.onnx")), environment={**gpu, "FAKE_CUDA_CAPTURE": "0"})
    assert "not captured into a graph" in running.log
    with running.connect() as node, node.attach("walk") as lane:
        assert lane.infer().status == "ok"


def test_a_damaged_plan_is_built_again_at_the_next_start(taktd: Start, gpu: dict[str, str], tmp_path: Path) -> None:
    """FAULTS: a flipped byte in the engine cache."""
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment=gpu)
    running.stop()
    plan = next((running.state / "engines").glob("*.plan"))
    content = bytearray(plan.read_bytes())
    content[-1] ^= 1
    plan.write_bytes(content)
    running.start().await_ready()
    assert plan.read_bytes() != bytes(content)


@pytest.mark.parametrize(
    ("device", "said"), [("GPU-12345678", UUID), ("0000:07:00.0", UUID), ("3", UUID)], ids=["uuid", "pci", "index"]
)
def test_a_gpu_that_is_not_there_is_answered_with_those_that_are(
    taktd: Start, gpu: dict[str, str], tmp_path: Path, device: str, said: str
) -> None:
    running = taktd(yaml(models.mlp(tmp_path / "policy.onnx"), device), environment=gpu, wait=False)
    eventually(lambda: said in running.log, 30, "the UUIDs are listed")


def with_stand_in(path: Path) -> str:
    return f"""
devices:
  gpu0: {{driver: cuda, gpu: "{UUID}"}}
  cpu1: {{driver: cpu}}
models: {{policy: {{path: "{path}"}}}}
loops:
  walk: {{model: policy, device: gpu0, period: 400ms, on_late: run, fallback: [cpu1], fallback_uncertified: true}}
"""


def break_context(running: Running, fake: Simulated) -> None:
    fake.inject("execute", simulated.ECC, times=1)


def time_out(running: Running, fake: Simulated) -> None:
    fake.inject("execute", simulated.LAUNCH_TIMEOUT, times=1)


def lose_device(running: Running, fake: Simulated) -> None:
    fake.control.lost = simulated.UNKNOWN


def kill(running: Running, fake: Simulated) -> None:
    os.kill(running.executor("gpu0")["pid"], signal.SIGKILL)


@pytest.mark.parametrize("fault", [break_context, time_out, lose_device, kill], ids=lambda f: f.__name__)
def test_the_loop_goes_on_from_the_cpu_and_comes_back(
    taktd: Start, gpu: dict[str, str], tmp_path: Path, fault: Callable[[Running, Simulated], None]
) -> None:
    """FAULTS: ECC, launch time-out, device lost, a killed executor: each next job is answered, loudly by the CPU."""
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(with_stand_in(path), environment=gpu)
    fake = Simulated(tmp_path / "gpu")
    obs = np.random.default_rng(1).standard_normal((1, 48)).astype(np.float32)
    with running.connect() as node, node.attach("walk") as lane:

        def infer() -> tuple[str, str]:
            lane.inputs["obs"][:] = obs
            reply = lane.infer(timeout_us=20_000_000)
            return reply.status, reply.path

        # Ready is who can answer every loop: while the engine is built, that is the CPU.
        eventually(lambda: infer() == ("ok", "primary"), 40, "the GPU serves")
        wanted = lane.outputs["actions"].copy()
        fault(running, fake)
        assert infer() == ("ok", "stand-in")
        for _ in range(5):
            assert infer()[0] == "ok"
            np.testing.assert_allclose(lane.outputs["actions"], wanted, rtol=1e-5)
        fake.heal()
        eventually(lambda: infer() == ("ok", "primary"), 40, "the GPU serves again")
        np.testing.assert_allclose(lane.outputs["actions"], wanted, rtol=1e-5)
