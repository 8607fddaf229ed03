"""What gRPC and ZeroMQ must agree on: every datatype, bit by bit, and what became of a job, by the same words."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import msgpack
import numpy as np
import pytest
import zmq
from onnx import TensorProto, helper

from taktd.ipc import _core
from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import inference_pb2_grpc
from tests import models
from tests.chance import seed
from tests.running import Running, eventually, serving

YAML = """\
allow_faults: true
devices: {{cpu0: {{driver: cpu}}, sim0: {{driver: sim, cost: 20ms}}}}
models:
  all: {{path: {folder}/all.onnx, device: cpu0}}
  typed: {{path: {folder}/typed.onnx, device: cpu0}}
  20ms: {{path: {folder}/id.onnx, device: sim0}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
zmq: {{}}
limits: {{jobs_per_uid: 12, jobs: 100}}
"""
ONNX = {
    "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE, "FP16": TensorProto.FLOAT16, "BF16": TensorProto.BFLOAT16,
    "FP8E4M3FN": TensorProto.FLOAT8E4M3FN, "FP8E4M3FNUZ": TensorProto.FLOAT8E4M3FNUZ,
    "FP8E5M2": TensorProto.FLOAT8E5M2, "FP8E5M2FNUZ": TensorProto.FLOAT8E5M2FNUZ,
    **{name: getattr(TensorProto, name) for name in _core.DTYPES if "INT" in name or name == "BOOL"},
}  # fmt: skip
TYPED = {
    "BOOL": ("bool_contents", np.bool_), "INT8": ("int_contents", np.int8), "INT16": ("int_contents", np.int16),
    "INT32": ("int_contents", np.int32), "INT64": ("int64_contents", np.int64), "UINT8": ("uint_contents", np.uint8),
    "UINT16": ("uint_contents", np.uint16), "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64), "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}  # fmt: skip
ELEMENTS = 6
ALL = tuple(name for name in _core.DTYPES if "COMPLEX" not in name)  # which ONNX Runtime has no kernels for


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("alike")
    models.identity(folder / "id.onnx", (4,))
    for model, names in (("all", list(ALL)), ("typed", list(TYPED))):
        sides = [[models.value(f"{side}_{name}", ONNX[name], (ELEMENTS,)) for name in names] for side in "xy"]
        models.save(folder / f"{model}.onnx", [node for name in names for node in passed_through(name)], *sides)
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


def passed_through(name: str) -> list[Any]:
    """y = x. There is no Identity for 4-bit types, but a Cast there and back."""
    if name not in ("INT4", "UINT4"):
        return [helper.make_node("Identity", [f"x_{name}"], [f"y_{name}"])]
    return [
        helper.make_node("Cast", [f"x_{name}"], [f"h_{name}"], to=TensorProto.INT32),
        helper.make_node("Cast", [f"h_{name}"], [f"y_{name}"], to=ONNX[name]),
    ]


def some_bytes(name: str, chance: np.random.Generator) -> bytes:
    """Any bits, but for BOOL, which has two values."""
    if name == "BOOL":
        return chance.integers(0, 2, ELEMENTS, np.uint8).tobytes()
    return chance.bytes((ELEMENTS * _core.DTYPE_BITS[_core.DTYPES[name]] + 7) // 8)


# ---- the two doors, alike ----

Outcome = tuple[str, str, str, dict[str, Any]]
"""status, code, sentence, parameters of the reply"""


class GrpcDoor:
    def __init__(self, running: Running) -> None:
        self._channel = grpc.insecure_channel(f"unix:{running.runtime}/grpc.sock")
        self.stub = inference_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def start(self, model: str, deadline_us: int = 0, shape: int = 4, version: str = "") -> Callable[[], Outcome]:
        made = pb.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=[bytes(16)])
        made.inputs.add(name="x", datatype="FP32", shape=[shape])
        if deadline_us:
            made.parameters["takt_deadline_us"].int64_param = deadline_us
        call = self.stub.ModelInfer.future(made, timeout=60)

        def outcome() -> Outcome:
            if call.exception() is not None:
                trailers = dict(call.trailing_metadata())
                return trailers["takt_status"], call.code().name, call.details(), {"takt_cause": trailers["takt_cause"]}
            told = {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in call.result().parameters.items()}
            return "ok", "OK", "", {"takt_late": False, **told}

        return outcome

    def close(self) -> None:
        self._channel.close()


class ZmqDoor:
    def __init__(self, running: Running) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.RCVTIMEO, 60_000)
        self.socket.connect(f"ipc://{running.runtime}/zmq.sock")
        self._number = 0
        self._replies: dict[int, dict[str, Any]] = {}

    def start(self, model: str, deadline_us: int = 0, shape: int = 4, version: str = "") -> Callable[[], Outcome]:
        self._number += 1
        number = self._number
        header: dict[str, Any] = {"v": 1, "id": number, "model": model, "version": version}
        header["inputs"] = [{"name": "x", "datatype": "FP32", "shape": [shape]}]
        header["parameters"] = {"takt_deadline_us": deadline_us} if deadline_us else {}
        self.socket.send_multipart([msgpack.packb(header), bytes(16)])

        def outcome() -> Outcome:
            while number not in self._replies:
                reply = msgpack.unpackb(self.socket.recv_multipart()[0])
                self._replies[reply["id"]] = reply
            reply = self._replies.pop(number)
            if reply["status"] == "ok":
                return "ok", "OK", "", reply["parameters"]
            return reply["status"], reply["code"], reply["message"], {"takt_cause": reply["cause"]}

        return outcome

    def close(self) -> None:
        self._context.destroy(0)


Door = GrpcDoor | ZmqDoor


@pytest.fixture(params=[GrpcDoor, ZmqDoor], ids=["grpc", "zmq"])
def door(served: Running, request: pytest.FixtureRequest) -> Iterator[Door]:
    found = request.param(served)
    assert found.start("20ms")()[:2] == ("ok", "OK")
    yield found
    found.close()
    inject(served, "none")
    eventually(lambda: served.ask("status")["gateway"]["jobs"] == 0)


def inject(running: Running, *words: str) -> None:
    done = running.taktctl("fault", "inject", "sim0", *words, "--json")
    assert done.returncode == 0, done.stderr


# ---- datatypes ----


def test_every_datatype_comes_back_bit_by_bit_over_both_doors(served: Running) -> None:
    chance = np.random.default_rng(seed())
    given = {name: some_bytes(name, chance) for name in ALL}
    made = pb.ModelInferRequest(model_name="all", raw_input_contents=list(given.values()))
    for name in given:
        made.inputs.add(name=f"x_{name}", datatype=name, shape=[ELEMENTS])
    over_grpc = GrpcDoor(served)
    reply = over_grpc.stub.ModelInfer(made, timeout=60)
    assert [(t.name, t.datatype, list(t.shape)) for t in reply.outputs] == [(f"y_{n}", n, [ELEMENTS]) for n in given]
    assert list(reply.raw_output_contents) == list(given.values())
    over_grpc.close()
    over_zmq = ZmqDoor(served)
    about = [{"name": f"x_{name}", "datatype": name, "shape": [ELEMENTS]} for name in given]
    over_zmq.socket.send_multipart([msgpack.packb({"v": 1, "id": 1, "model": "all", "inputs": about}), *given.values()])
    head, *tensors = over_zmq.socket.recv_multipart()
    assert msgpack.unpackb(head)["status"] == "ok"
    assert tensors == list(given.values())
    over_zmq.close()


def test_typed_contents_of_every_datatype_that_has_them_are_the_same_bytes(served: Running) -> None:
    chance = np.random.default_rng(seed())
    over_grpc = GrpcDoor(served)
    made = pb.ModelInferRequest(model_name="typed")
    expected = []
    for name, (field, kind) in TYPED.items():
        made.inputs.add(name=f"x_{name}", datatype=name, shape=[ELEMENTS])
        values = np.frombuffer(some_bytes(name, chance), kind)
        if kind in (np.float32, np.float64):
            values = chance.standard_normal(ELEMENTS).astype(kind)
        getattr(made.inputs[-1].contents, field).extend(values.tolist())
        expected.append(values.tobytes())
    reply = over_grpc.stub.ModelInfer(made, timeout=60)
    assert list(reply.raw_output_contents) == expected
    over_grpc.close()


# ---- what became of a job ----


def test_a_result_after_its_deadline_is_a_result_and_says_so(served: Running, door: Door) -> None:
    inject(served, "slow=10x")
    status, code, _, told = door.start("20ms", deadline_us=100_000)()
    assert (status, code, told["takt_late"]) == ("ok", "OK", True)
    assert told["takt_cause"] in ("overrun", "machine", "wakeup")
    assert told["takt_run_us"] > 100_000
    inject(served, "none")
    assert door.start("20ms")()[3]["takt_late"] is False


def test_a_job_that_cannot_make_its_deadline_has_expired(door: Door) -> None:
    status, code, text, _ = door.start("20ms", deadline_us=1000)()
    assert (status, code) == ("expired", "DEADLINE_EXCEEDED")
    assert text


def test_one_job_too_many_is_refused_with_the_limit(served: Running, door: Door) -> None:
    inject(served, "slow=10x")  # or a busy machine sends no faster than it answers
    outcomes = [outcome() for outcome in [door.start("20ms") for _ in range(40)]]
    kinds = {(status, code) for status, code, _, _ in outcomes}
    assert kinds == {("ok", "OK"), ("refused", "RESOURCE_EXHAUSTED")}
    texts = {text for status, _, text, _ in outcomes if status == "refused"}
    assert all(re.search(r"too many jobs for .*12 held.*limits\.jobs_per_uid", text) for text in texts), texts


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({"model": "20m"}, "invalid", "NOT_FOUND"),
        ({"model": "20ms", "version": "9"}, "invalid", "NOT_FOUND"),
        ({"model": "20ms", "shape": 5}, "invalid", "INVALID_ARGUMENT"),
    ],
)
def test_what_is_wrong_or_unknown(door: Door, asked: dict[str, Any], status: str, code: str) -> None:
    assert door.start(**asked)()[:2] == (status, code)


def test_an_engine_that_fails_is_unavailable_and_never_the_clients_fault(served: Running, door: Door) -> None:
    inject(served, "error", "--runs", "1")
    status, code, text, _ = door.start("20ms")()
    assert (status, code) == ("failed", "UNAVAILABLE")
    assert "engine" in text
    assert door.start("20ms")()[:2] == ("ok", "OK")


GONE = {
    ("failed", "UNAVAILABLE"), ("lost", "UNAVAILABLE"), ("detached", "UNAVAILABLE"), ("expired", "DEADLINE_EXCEEDED"),
}  # fmt: skip


def is_back(served: Running, door: Door) -> None:
    eventually(lambda: bool(served.executor("sim0")["ready"]), within_s=60)
    served.remember_family()
    eventually(lambda: door.start("20ms")()[:2] == ("ok", "OK"), within_s=60)


def test_while_a_device_is_lost_jobs_end_as_unavailable_or_expired_never_as_the_clients_fault(
    served: Running, door: Door
) -> None:
    """Those without a deadline are run again when it is back."""
    before = served.executor("sim0")["restarts"]
    inject(served, "lost")
    patient = door.start("20ms")
    found = {door.start("20ms", deadline_us=150_000)()[:2] for _ in range(3)}
    assert found & GONE
    assert found <= GONE | {("ok", "OK")}, found
    eventually(lambda: served.executor("sim0")["restarts"] > before, within_s=30)
    is_back(served, door)
    assert patient()[:2] in GONE | {("ok", "OK")}


def test_what_an_executor_had_when_it_died_is_run_again_or_ends_with_a_status(served: Running, door: Door) -> None:
    pid = served.executor("sim0")["pid"]
    outcomes = [door.start("20ms", deadline_us=400_000) for _ in range(10)]
    os.kill(pid, signal.SIGKILL)
    found = {outcome()[:2] for outcome in outcomes}
    assert found & GONE
    assert found <= GONE | {("ok", "OK")}, found
    is_back(served, door)
