"""Every parser that strangers reach, fed with damaged messages: it answers or refuses, and nothing else ever happens.

`FUZZ_INPUTS` inputs for each target (100 000 unless set; `make fuzz` sets more), from `TAKTD_SEED`. Each target has a
canary: the same inputs against the same parser with one planted defect, which has to be found.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from taktd.daemon.doors import lane_protocol
from taktd.daemon.doors.control_door import ControlDoor, ControlError
from taktd.daemon.doors.peers import Peer
from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.grpc import messages
from taktd.ipc.grpc.repository import version_asked
from taktd.ipc.inference import Model, Refusal, TensorSpec, fit, wanted_outputs
from taktd.ipc.zmq import protocol
from tests.chance import seed

INPUTS = int(os.environ.get("FUZZ_INPUTS", "100000"))
SEED = seed(1)
MODEL = Model(
    "policy", "1", "onnx",
    (TensorSpec("obs", "FP32", (4, 8), (True, False)), TensorSpec("mask", "BOOL", (4,), (False,))),
    (TensorSpec("actions", "FP32", (4, 2), (True, False)),), dynamic=True,
)  # fmt: skip
INTERESTING = [
    0,
    1,
    2,
    3,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -1,
    -(2**63),
]


class Planted(Exception):
    """The canary's defect."""


# ---- damage ----


def damaged(data: bytes, chance: random.Random) -> bytes:
    """One to four edits of the kinds that find most: flips, runs, cuts, copies, interesting numbers, bad lengths."""
    work = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        if not work:
            return chance.randbytes(8)
        at, kind = chance.randrange(len(work)), chance.randrange(7)
        if kind == 0:
            work[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            work[at] = chance.randrange(256)
        elif kind == 2:
            del work[at : at + chance.choice((1, 2, 8, 64))]
        elif kind == 3:
            work[at:at] = work[at : at + chance.choice((1, 4, 16, 64))]
        elif kind == 4:
            number = chance.choice(INTERESTING) & (2**64 - 1)
            work[at : at + 8] = number.to_bytes(8, chance.choice(("little", "big")))[: chance.choice((1, 2, 4, 8))]
        elif kind == 5:
            work[at:at] = b"\xff" * chance.randrange(1, 11)
        else:
            del work[at:]
    return bytes(work)


def run(target: Callable[[Any], object], make: Callable[[random.Random], Any], inputs: int) -> int:
    """How many were accepted. Whatever but an answer or a refusal comes out of the target, fails with the input."""
    print(f"TAKTD_SEED={SEED}")
    chance, accepted = random.Random(SEED), 0
    for number in range(inputs):
        given = make(chance)
        try:
            target(given)
            accepted += 1
        except (Refusal, ControlError, lane_protocol.Malformed):
            pass
        except Planted:
            raise
        except BaseException as error:
            raise AssertionError(f"input {number} of TAKTD_SEED={SEED}: {error!r} from {given!r}") from error
    return accepted


def finds(target: Callable[[Any], object], make: Callable[[random.Random], Any]) -> None:
    """The canary has to die within a tenth of the inputs."""
    with pytest.raises(Planted):
        run(target, make, max(INPUTS // 10, 10_000))


# ---- gRPC: bytes to a job ----


def grpc_seeds() -> list[bytes]:
    request = pb.ModelInferRequest(model_name="policy", id="7")
    request.inputs.add(name="obs", datatype="FP32", shape=[2, 8])
    request.inputs.add(name="mask", datatype="BOOL", shape=[4])
    request.outputs.add(name="actions")
    request.parameters["timeout"].int64_param = 1000
    request.parameters["priority"].uint64_param = 2
    raw = pb.ModelInferRequest()
    raw.CopyFrom(request)
    raw.raw_input_contents.extend([np.zeros((2, 8), np.float32).tobytes(), bytes(4)])
    request.inputs[0].contents.fp32_contents.extend([0.5] * 16)
    request.inputs[1].contents.bool_contents.extend([True] * 4)
    return [bytes(m.SerializeToString()) for m in (raw, request)]


GRPC_SEEDS = grpc_seeds()


def grpc_input(chance: random.Random) -> bytes:
    return damaged(chance.choice(GRPC_SEEDS), chance) if chance.random() < 0.99 else chance.choice(GRPC_SEEDS)


READER = messages.RequestReader()


def grpc_job(data: bytes) -> None:
    try:
        request = READER.read(data, 1_000)
    except Refusal as refusal:
        with pytest.raises(Refusal, match=re.escape(str(refusal))):
            messages.request_from(data, 1_000)
        raise
    assert request == messages.request_from(data, 1_000), "remembered is as read anew"
    tensors = fit(request, MODEL)
    wanted_outputs(request, MODEL)
    assert all(len(t.data) == (4 if t.name == "mask" else 32 * t.shape[0]) for t in tensors)
    assert request.deadline_ns >= 0
    assert request.priority >= 0


def test_grpc_requests() -> None:
    assert run(grpc_job, grpc_input, INPUTS) > INPUTS // 200


def test_grpc_canary() -> None:
    def careless(data: bytes) -> None:
        request = messages.request_from(data, 1_000)
        if len(request.inputs) > 2:  # an index out of range, in a parser that trusted the count
            raise Planted
        fit(request, MODEL)

    finds(careless, grpc_input)


def test_what_is_cut_out_and_what_is_left_are_the_message() -> None:
    """Against protobuf itself: whatever it accepts, we read the same."""
    chance = random.Random(SEED)
    agreed = 0
    for _ in range(INPUTS // 5):
        data = grpc_input(chance)
        try:
            whole = pb.ModelInferRequest.FromString(data)
        except Exception:
            continue
        try:
            head, request_id, raw = messages.split(data)
        except Refusal:
            continue  # groups and the like: stricter than protobuf is right
        rest = pb.ModelInferRequest.FromString(head)
        assert [bytes(view) for view in raw] == list(whole.raw_input_contents)
        assert request_id.decode() == whole.id
        del whole.raw_input_contents[:]
        whole.id = ""
        assert rest == whole or rest.SerializeToString(deterministic=True) == whole.SerializeToString(
            deterministic=True
        )
        agreed += 1
    assert agreed > INPUTS // 100


# ---- gRPC: what a load asks for ----


def load_seeds() -> list[bytes]:
    seeds = []
    for config in ('{"version_policy": {"specific": {"versions": [3]}}, "name": "policy"}', "{}", "[[]]", '{"a": 1e9}'):
        request = pb.RepositoryModelLoadRequest(model_name="policy")
        request.parameters["config"].string_param = config
        seeds.append(bytes(request.SerializeToString()))
    for number in (0, 1, 2**63 - 1):
        request = pb.RepositoryModelLoadRequest(model_name="policy")
        request.parameters["version"].int64_param = number
        seeds.append(bytes(request.SerializeToString()))
    request.parameters["file:1/model.onnx"].bytes_param = b"x"
    return [*seeds, bytes(request.SerializeToString())]


LOAD_SEEDS = load_seeds()


def load_input(chance: random.Random) -> bytes:
    return damaged(chance.choice(LOAD_SEEDS), chance)


def load_asked(data: bytes) -> int | None:
    try:
        request = pb.RepositoryModelLoadRequest.FromString(data)
    except DecodeError:
        return None
    version = version_asked(request.model_name, request.parameters)
    assert version is None or 1 <= version <= 999_999_999
    return version


def test_loads() -> None:
    run(load_asked, load_input, INPUTS)


def test_load_canary() -> None:
    def careless(data: bytes) -> None:
        if (version := load_asked(data)) is not None and version > 9:  # a version that nobody sent
            raise Planted

    finds(careless, load_input)


# ---- ZeroMQ: frames to a job ----


def zmq_seed() -> dict[str, Any]:
    return {
        "v": 1, "id": 7, "op": "infer", "model": "policy", "version": "1",
        "inputs": [
            {"name": "obs", "datatype": "FP32", "shape": [2, 8]}, {"name": "mask", "datatype": "BOOL", "shape": [4]},
        ],
        "outputs": ["actions"], "parameters": {"takt_deadline_us": 1000, "priority": 1},
    }  # fmt: skip


STRANGE: list[Any] = [
    None,
    True,
    -1,
    2**63,
    1.5,
    float("nan"),
    "",
    "x" * 200,
    b"\xff",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    "policy",
]


def zmq_input(chance: random.Random) -> list[bytes]:
    header = zmq_seed()
    if chance.random() < 0.5:
        where: Any = chance.choice((header, header["inputs"][0], header["parameters"]))
        where[chance.choice(list(where))] = chance.choice(STRANGE)
    packed = bytes(msgpack.packb(header))
    if chance.random() < 0.5:
        packed = damaged(packed, chance)
    tensors = [bytes(64), bytes(4)]
    if chance.random() < 0.2:
        tensors = tensors[: chance.randrange(3)] + [chance.randbytes(chance.randrange(5))] * chance.randrange(3)
    return [packed, *tensors]


ZMQ_READER = protocol.RequestReader()


def zmq_job(frames: list[bytes]) -> None:
    tensors = [memoryview(frame) for frame in frames[1:]]
    remembered = ZMQ_READER.remembered(frames[0], tensors, 1_000)
    header = protocol.unpack(frames[0])
    request_id = protocol.id_of(header)
    assert request_id is None or isinstance(request_id, (int, str, bytes))
    if protocol.operation_of(header) != "infer":
        assert remembered is None
        return
    request = protocol.request_from(header, tensors, 1_000)
    assert remembered in (None, (request_id, request)), "remembered is as read anew"
    assert ZMQ_READER.read(frames[0], header, tensors, 1_000) == request
    fit(request, MODEL)
    wanted_outputs(request, MODEL)


def test_zmq_requests() -> None:
    assert run(zmq_job, zmq_input, INPUTS) > INPUTS // 200


def test_zmq_replies_can_be_packed_whatever_the_id() -> None:
    chance = random.Random(SEED)
    for value in [*STRANGE, *INTERESTING, *(chance.randbytes(4) for _ in range(100))]:
        try:
            packed = msgpack.packb({"id": value})
        except OverflowError:
            continue
        assert protocol.pack({"id": protocol.id_of(protocol.unpack(packed))})


def test_zmq_canary() -> None:
    def careless(frames: list[bytes]) -> None:
        header = protocol.unpack(frames[0])
        if not isinstance(header.get("inputs", []), list):
            raise Planted
        zmq_job(frames)

    finds(careless, zmq_input)


# ---- the control socket ----


def control_seeds() -> list[bytes]:
    asked = [
        {"op": "status"},
        {"op": "record", "from_s": 1, "name": "x"},
        {"op": "reload"},
        {"op": "x", "a": [1, {"b": None}]},
    ]
    return [json.dumps(one).encode() + b"\n" for one in asked]


CONTROL_SEEDS = control_seeds()


def control_input(chance: random.Random) -> bytes:
    return damaged(chance.choice(CONTROL_SEEDS), chance)


def control_answer(operations: dict[str, Any]) -> Callable[[bytes], object]:
    """ControlDoor's judgement of one line, without its socket."""
    rule = SimpleNamespace(admits=lambda peer, uid: False)
    door = SimpleNamespace(_asking=operations, _changing={"reload": None}, _changers=rule)
    door._operation = lambda peer, name: ControlDoor._operation(cast(ControlDoor, door), peer, name)
    peer = Peer(1, 2, frozenset())

    def answer(line: bytes) -> object:
        try:
            ControlDoor._answer(cast(ControlDoor, door), peer, line).send(None)
        except StopIteration as stop:
            said = stop.value
        else:
            raise AssertionError("it waited")
        assert isinstance(said["ok"], bool)
        return json.dumps(said)

    return answer


async def _nothing(request: dict[str, Any]) -> dict[str, Any]:
    return {}


def test_control_lines() -> None:
    run(control_answer({"status": _nothing, "record": _nothing}), control_input, INPUTS)


def test_control_canary() -> None:
    async def careless(request: dict[str, Any]) -> dict[str, Any]:
        if "from_s" not in request:
            raise Planted
        return {}

    finds(control_answer({"status": _nothing, "record": careless}), control_input)


# ---- the lane socket ----

LANE_SEEDS = [
    lane_protocol.HEADER.pack(lane_protocol.MAGIC, kind, 0, 7, 0) + body
    for kind, body in (
        (1, (1).to_bytes(4, "little") * 2 + b"client".ljust(64, b"\0")),
        (3, bytes(8) + b"walk".ljust(64, b"\0")), (5, bytes(8)), (7, (1).to_bytes(4, "little") + bytes(4)),
    )
]  # fmt: skip


def lane_input(chance: random.Random) -> bytes:
    return damaged(chance.choice(LANE_SEEDS), chance)


def test_lane_messages() -> None:
    def parse(data: bytes) -> None:
        request = lane_protocol.unpack(data)
        assert 0 <= request.request_id < 2**32

    for message in LANE_SEEDS:
        parse(message)
    run(parse, lane_input, INPUTS)


def test_lane_canary() -> None:
    def careless(data: bytes) -> None:
        if len(data) < lane_protocol.HEADER.size:
            raise Planted
        lane_protocol.unpack(data)

    finds(careless, lane_input)


def test_the_loop_is_not_needed() -> None:
    """The parsers run without an event loop: nothing in them waits."""
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
