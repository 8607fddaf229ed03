"""A robot's loop on a simulated GPU with the CPU as stand-in: whatever the GPU does, the loop goes on and comes back.

The policy is the Unitree Go1's where it is at hand ($TAKTD_ROBOTS, else ../shared/robots); tests that need it skip
elsewhere. The driver is simulated and TensorRT a stand-in: no figure here is a GPU's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from taktd.ipc import Lane
from tests import models
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in
from tests.running import Running, eventually

Start = Callable[..., Running]
UUID = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00"
ROOT = Path(__file__).resolve().parents[2]
GO1 = Path(os.environ.get("TAKTD_ROBOTS") or ROOT.parent / "shared" / "robots") / "go1" / "policy.onnx"
BACK_S = 60


class Gpu:
    """The simulated card, and what a daemon needs to find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "gpu"
        self.folder.mkdir()
        self.trouble, self.nvml, self.xids = folder / "trouble", folder / "nvml", folder / "nvml.xids"
        self.nvml.write_text("{}")
        self.xids.write_text("")
        self.environment = {
            **simulated.environment(self.folder, lazy_queries=0),
            "PYTHONPATH": f"{stand_in.SITE}:{ROOT / 'tests' / 'fakes' / 'nvml_site'}",
            "FAKE_TENSORRT_TROUBLE": str(self.trouble),
            "FAKE_NVML": str(self.nvml),
        }

    @property
    def fake(self) -> Simulated:
        return Simulated(self.folder)

    def heal(self) -> None:
        self.trouble.unlink(missing_ok=True)
        self.fake.heal()
        self.fake.control.init_error = 0
        self.fake.control.memory_bytes = 1 << 30


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def yaml(path: Path, *, gpu: str = UUID, output: str = "actions") -> str:
    return f"""
devices:
  gpu0: {{driver: cuda, gpu: {gpu}}}
  cpu0: {{driver: cpu}}
models: {{policy: {{path: "{path}", non_finite: {{{output}: forbid}}}}}}
loops:
  walk: {{model: policy, device: gpu0, period: 20ms, on_late: run, fallback: [cpu0], fallback_uncertified: true}}
"""


class Loop:
    """Asks for actions and compares each with what ONNX Runtime says directly."""

    def __init__(self, lane: Lane, path: Path) -> None:
        self.lane = lane
        reference = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (self.input,), self.output = list(lane.inputs), reference.get_outputs()[0].name
        self.observation = np.random.default_rng(1).standard_normal(lane.inputs[self.input].shape).astype(np.float32)
        self.wanted = [reference.run([self.output], {self.input: self.observation})[0]]

    def step(self) -> tuple[str, str]:
        self.lane.inputs[self.input][:] = self.observation
        reply = self.lane.infer(timeout_us=20_000_000)
        if reply.status == "ok":
            found = self.lane.outputs[self.output]
            assert any(np.allclose(found, wanted, rtol=1e-4, atol=1e-5) for wanted in self.wanted)
        return reply.status, reply.path

    def until(self, path: str) -> list[str]:
        """Steps until that one answers; the statuses on the way."""
        seen: list[str] = []

        def there() -> bool:
            status, by = self.step()
            seen.append(status)
            return status == "ok" and by == path

        eventually(there, BACK_S, f"answered by the {path}")
        return seen


@contextmanager
def walking(running: Running, path: Path) -> Iterator[Loop]:
    with running.connect() as node, node.attach("walk") as lane:
        loop = Loop(lane, path)
        loop.until("primary")
        yield loop


# ---- every fault ----


def kill(running: Running, gpu: Gpu) -> None:
    os.kill(running.executor("gpu0")["pid"], signal.SIGKILL)


def out_of_memory(running: Running, gpu: Gpu) -> None:
    gpu.fake.inject("cuGraphLaunch", simulated.OUT_OF_MEMORY)


def out_of_memory_at_load(running: Running, gpu: Gpu) -> None:
    gpu.fake.control.memory_bytes = 8 << 10
    kill(running, gpu)


def ecc(running: Running, gpu: Gpu) -> None:
    gpu.fake.inject("execute", simulated.ECC, times=1)


def launch_timeout(running: Running, gpu: Gpu) -> None:
    gpu.fake.inject("execute", simulated.LAUNCH_TIMEOUT, times=1)


def hang(running: Running, gpu: Gpu) -> None:
    gpu.fake.control.hang = 1


def lost_device(running: Running, gpu: Gpu) -> None:
    gpu.fake.control.lost = simulated.UNKNOWN


def not_a_number(running: Running, gpu: Gpu) -> None:
    gpu.trouble.write_text("nan")


def throttled(running: Running, gpu: Gpu) -> None:
    gpu.trouble.write_text("slow 0.05")


def xid(running: Running, gpu: Gpu) -> None:
    gpu.xids.write_text(gpu.xids.read_text() + "79\n")


def driver_upgraded(running: Running, gpu: Gpu) -> None:
    """Who runs goes on; who starts finds a library that does not fit the kernel module."""
    gpu.fake.control.init_error = simulated.MISMATCH
    kill(running, gpu)


def foreign_plan(running: Running, gpu: Gpu) -> None:
    """Under its own name, with a checksum that is right: only TensorRT can tell. A crash lets it be read."""
    (plan,) = (running.state / "engines").glob("*.plan")
    content = plan.read_bytes()
    size = int.from_bytes(content[8:16], "little")
    header = json.dumps(json.loads(content[16 : 16 + size]) | {"device": "Another GPU 9.0"}).encode()
    content = content[:8] + len(header).to_bytes(8, "little") + header + content[16 + size :]
    manifest = plan.with_suffix(".json")
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"plan_sha256": hashlib.sha256(content).hexdigest()})
    )
    plan.write_bytes(content)
    kill(running, gpu)


FAULTS = {
    kill: "", out_of_memory: "out of memory", out_of_memory_at_load: "", ecc: "ECC", launch_timeout: "timed out",
    hang: "", lost_device: "", not_a_number: "NaN", throttled: "took", xid: "XID 79", driver_upgraded: "",
    foreign_plan: "",
}  # fmt: skip


@pytest.fixture(scope="module")
def go1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Gpu]]:
    """One daemon for all faults: it must be as good as new after each."""
    if not GO1.is_file():
        pytest.skip(f"no {GO1} (set TAKTD_ROBOTS)")
    folder = tmp_path_factory.mktemp("go1")
    gpu = Gpu(folder)
    running = Running(folder, yaml(GO1, output="continuous_actions"), gpu.environment)
    try:
        yield running.start().await_ready(), gpu
    finally:
        running.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_the_go1_goes_on_from_the_cpu_and_comes_back(go1: tuple[Running, Gpu], fault: Callable[..., None]) -> None:
    """FAULTS 9, 18, 19. Every job has an answer, none a wrong one; the way there and back is announced."""
    running, gpu = go1
    try:
        with walking(running, GO1) as loop:
            before, read = running.executor("gpu0"), len(running.log)
            fault(running, gpu)
            statuses = loop.until("stand-in")
            # A fault that is an answer (out of memory, NaN) fails jobs until the loop's rule is fulfilled. Who waits
            # for a card that hangs has lost that job's deadline.
            assert set(statuses) <= {"ok", "lost" if fault is hang else "failed"}
            assert len(statuses) - statuses.count("ok") <= 3
            assert {loop.step()[0] for _ in range(20)} == {"ok"}
            log = running.log[read:]
            assert "gpu0 is served by executor cpu0 (stand-in)" in log
            assert FAULTS[fault] in log
            gpu.heal()
            assert set(loop.until("primary")) == {"ok"}
            after = running.executor("gpu0")
        assert after["pid"] != before["pid"]
        assert after["switches"]["hand-back"] > before["switches"].get("hand-back", 0)
        assert running.process.poll() is None
    finally:
        gpu.heal()


def test_a_job_is_one_graph_launch_and_no_allocation(go1: tuple[Running, Gpu]) -> None:
    running, gpu = go1
    with walking(running, GO1) as loop:
        seen = gpu.fake.observed(running.executor("gpu0")["pid"])
        names = [bytes(name.value).decode() for name in seen.names[: seen.calls]]

        def counted() -> dict[str, int]:
            return dict(zip(names, seen.count, strict=False))

        before, live = counted(), list(seen.live)
        for _ in range(100):
            assert loop.step() == ("ok", "primary")
        after, still = counted(), list(seen.live)  # when the client leaves, its lane is exchanged
    new = {name: after[name] - before[name] for name in names if after[name] != before[name]}
    # Between jobs that are awaited an engine is kept warm by a run of its own, in slack.
    assert 100 <= new.pop("cuGraphLaunch") <= 200
    assert set(new) <= {"cuStreamQuery", "execute"}
    assert still == live


def test_a_fault_of_a_program_is_no_fault_of_the_card(go1: tuple[Running, Gpu]) -> None:
    running, gpu = go1
    with walking(running, GO1) as loop:
        before = running.executor("gpu0")["pid"]
        gpu.xids.write_text(gpu.xids.read_text() + "31\n")
        eventually(lambda: "XID 31" in running.log, 10, "it is told")
        assert loop.step() == ("ok", "primary")
        assert running.executor("gpu0")["pid"] == before


# ---- start, change, end ----


def test_the_cpu_serves_at_once_where_the_gpu_comes_late(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    """FAULTS 19: device nodes long after a boot. Ready with the stand-in; no restart loop; the GPU is then adopted."""
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment={**gpu.environment, "FAKE_CUDA_DEVICES": "0"})
    with running.connect() as node, node.attach("walk") as lane:
        loop = Loop(lane, path)
        assert set(loop.until("stand-in")) == {"ok"}
        told = running.ask("status")
        assert told["ready"] is True
        assert "no CUDA-capable device" in next(e for e in told["executors"] if e["device"] == "gpu0")["error"]
        gpu.fake.control.devices = 1
        assert set(loop.until("primary")) == {"ok"}


def test_a_gpus_loops_run_on_the_cpu_while_another_engine_is_built_there(
    taktd: Start, gpu: Gpu, tmp_path: Path
) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment={**gpu.environment, "FAKE_TENSORRT_STEP_S": "0.4"})
    with walking(running, path) as loop:
        models.mlp(path, seed=2)
        loop.wanted += Loop(loop.lane, path).wanted
        replies, told = [], ""
        with ThreadPoolExecutor() as pool:
            reload = pool.submit(running.taktctl, "reload")
            while not reload.done():
                replies.append(loop.step())
                told = told or running.executor("gpu0")["progress"]
        assert reload.result().returncode == 0, reload.result().stderr
        loop.wanted = loop.wanted[1:]
        assert loop.step() == ("ok", "primary"), "by the new one"
    assert {status for status, _ in replies} == {"ok"}
    paths = [path for _, path in replies]
    assert [by for n, by in enumerate(paths) if n == 0 or paths[n - 1] != by] == ["primary", "stand-in", "primary"]
    assert "gpu0 is served by executor cpu0 (stand-in): loading" in running.log
    assert told.startswith("building policy: ")


def test_nothing_is_built_beside_loops_that_nobody_can_take(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    text = (
        yaml(path).replace("  cpu0: {driver: cpu}\n", "").replace(", fallback: [cpu0], fallback_uncertified: true", "")
    )
    running = taktd(text, environment=gpu.environment)
    with walking(running, path) as loop:
        before = running.executor("gpu0")
        models.mlp(path, seed=2)
        told = running.taktctl("reload")
        assert told.returncode != 0
        # What was promised is not disturbed at all; what was not is loaded beside, but never built beside.
        promised, not_promised = "nothing may be loaded on a GPU beside loops", "has no engine for Simulated GPU"
        assert (promised if before["certified"] else not_promised) in told.stderr, told.stderr
        assert loop.step() == ("ok", "primary")
        assert running.executor("gpu0")["pid"] == before["pid"]


def test_a_change_that_is_refused_gives_the_loops_back(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment=gpu.environment)
    with walking(running, path) as loop:
        plan = tmp_path / "another.plan"
        plan.write_bytes(b"no plan at all")
        running.file.write_text(
            yaml(path, gpu=f"{{device: {UUID}, plans: {{policy: {plan}}}}}") + "grpc: off\nzmq: off\n"
        )
        told = running.taktctl("reload")
        assert told.returncode != 0
        assert "the plan of model 'policy' can't be used" in told.stderr
        assert "magic tag does not match" in told.stderr
        assert set(loop.until("primary")) == {"ok"}


def test_a_second_name_for_a_gpu_is_refused_before_anything_touches_it(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment=gpu.environment)
    with walking(running, path) as loop:
        text = running.file.read_text()
        running.file.write_text(text.replace("  cpu0:", "  left: {driver: cuda, gpu: 0}\n  cpu0:"))
        told = running.taktctl("reload")
        assert told.returncode != 0
        assert "devices left and gpu0 are the same GPU" in told.stderr
        assert loop.step() == ("ok", "primary")


def test_a_second_name_for_a_gpu_is_refused_at_start(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    text = yaml(models.mlp(tmp_path / "policy.onnx")).replace("  cpu0:", "  left: {driver: cuda, gpu: 0}\n  cpu0:")
    running = taktd(text, environment=gpu.environment, wait=False)
    assert running.process.wait(30) == 78
    assert re.search("devices (gpu0 and left|left and gpu0) are the same GPU", running.log), running.log
    assert UUID in running.log


def test_nobody_is_left_when_it_ends_while_an_engine_is_built(taktd: Start, gpu: Gpu, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "policy.onnx")
    running = taktd(yaml(path), environment={**gpu.environment, "FAKE_TENSORRT_STEP_S": "30"})
    eventually(lambda: running.executor("gpu0")["progress"].startswith("building policy"), 20, "it is built")
    assert running.ask("status")["ready"] is True, "by the CPU"
    running.remember_family()
    assert running.stop() == 0
    assert not list((running.state / "engines").glob("*.plan"))
