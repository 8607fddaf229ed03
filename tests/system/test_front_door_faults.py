"""What clients of the front doors see when executors die, and the events that tell of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import zmq

from taktd.ipc import _core
from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from taktd.ipc.zmq import Client
from tests import models
from tests.running import Running, eventually, serving

YAML = """\
devices: {{cpu0: {{driver: cpu}}, cpu1: {{driver: cpu}}}}
models:
  id: {{path: {folder}/id.onnx, device: cpu1}}
  slow: {{path: {folder}/slow.onnx, device: cpu0}}
loops: {{walk: {{model: id, device: cpu1, fallback: [cpu0], period: 100ms, budget: 5ms}}}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
zmq: {{}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("faults")
    models.identity(folder / "id.onnx", (1, 4))
    models.slow(folder / "slow.onnx")
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


class Subscriber:
    """Events by topic, as they come."""

    def __init__(self, running: Running) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(f"ipc://{running.runtime}/events.sock")
        self._socket.subscribe(b"")
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def has(self, topic: str, of: Callable[[dict[str, Any]], bool] = lambda event: True) -> bool:
        while self._socket.poll(0):
            name, header, *_ = self._socket.recv_multipart()
            self.seen.append((name.decode(), msgpack.unpackb(header)))
        return any(name == topic and of(event) for name, event in self.seen)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(0)


def slow() -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name="slow", raw_input_contents=[np.ones((512, 512), np.float32).tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=[512, 512])
    return made


def kill(served: Running, device: str) -> int:
    pid = served.executor(device)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    return pid


def recovered(served: Running) -> bool:
    served.remember_family()
    return bool(served.ask("status")["ready"]) and all(e["ready"] for e in served.ask("status")["executors"])


def test_a_dead_executor_is_unavailable_never_the_clients_fault_and_comes_back(served: Running) -> None:
    with Subscriber(served) as events, grpc.insecure_channel(f"unix:{served.runtime}/grpc.sock") as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(slow())
        calls = [stub.ModelInfer.future(slow(), timeout=60) for _ in range(40)]
        calls[0].result()
        kill(served, "cpu0")
        codes = {call.code().name for call in calls}
        assert codes <= {"OK", "UNAVAILABLE"}, codes
        for call in calls:
            if call.code() is not grpc.StatusCode.OK:
                assert dict(call.trailing_metadata())["takt_status"] in ("lost", "detached")
        eventually(lambda: recovered(served), within_s=60)
        eventually(lambda: events.has("executor.cpu0", lambda e: e["ready"] and e["restarts"] >= 1), within_s=30)
        assert stub.ModelInfer(slow(), timeout=60).outputs[0].name == "y"
        with Client(f"ipc://{served.runtime}/zmq.sock", timeout_s=60) as client:
            assert client.infer("slow", x=np.ones((512, 512), np.float32)).path == "primary"


def test_misses_switches_and_epochs_are_told_to_whoever_subscribes(served: Running) -> None:
    eventually(lambda: recovered(served), within_s=60)
    with Subscriber(served) as events, served.connect() as node, node.attach("walk") as lane:

        def missed() -> bool:
            """Again and again: a subscriber hears nothing of before it was heard of itself."""
            assert lane.infer(timeout_us=5e6, deadline_ns=_core.now() + 1).status in ("expired", "ok")
            return events.has("miss.walk", lambda e: e["count"] >= 1 and e["loop"] == "walk")

        eventually(missed, within_s=30)
        kill(served, "cpu1")
        assert lane.infer(timeout_us=30e6).status in ("ok", "expired", "lost")
        eventually(lambda: events.has("switch.walk", lambda e: e["total"] >= 1), within_s=30)
        eventually(lambda: recovered(served), within_s=60)
        epoch = served.ask("status")["epoch"]
        text = served.file.read_text()
        served.file.write_text(text.replace("device: cpu1}", 'device: cpu1, allow: {users: ["12345"]}}', 1))
        served.ask("reload")
        eventually(lambda: events.has("epoch", lambda e: e["epoch"] > epoch), within_s=30)
    numbers = [event["n"] for _, event in events.seen]
    assert numbers == sorted(set(numbers)), "each has a number, and they count up"
