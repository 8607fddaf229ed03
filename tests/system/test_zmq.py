"""ZeroMQ: frames written by hand as docs/zmq.md describes them, and taktd.ipc.zmq's own clients."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from taktd.ipc.errors import NotConnected
from taktd.ipc.zmq import AsyncClient, Client, ZmqRefused
from tests import models
from tests.running import Running, eventually, serving
from tests.system.test_supervisor import as_user

YAML = """\
devices: {{cpu0: {{driver: cpu}}, cpu1: {{driver: cpu}}, sim0: {{driver: sim, cost: 5ms}}}}
models:
  policy: {{path: {folder}/mlp.onnx, allow: {{users: ["12345"]}}}}
  id: {{path: {folder}/id.onnx, device: cpu0}}
  big: {{path: {folder}/big.onnx}}
  slow: {{path: {folder}/slow.onnx}}
  5ms: {{path: {folder}/id.onnx, device: sim0}}
loops:
  walk: {{model: id, device: cpu1, period: 200ms, budget: 2ms, publish: true}}
  quiet: {{model: id, device: cpu1, period: 200ms, budget: 2ms}}
admission: {{on_refusal: uncertified}}
zmq: {{events_high_water: 10}}
limits: {{message: 8MiB, connections_per_uid: 10}}
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("zmq")
    models.mlp(folder / "mlp.onnx")
    models.identity(folder / "id.onnx", (4,))
    models.identity(folder / "big.onnx", (1, 3, 224, 224))
    models.slow(folder / "slow.onnx")
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


@pytest.fixture
def client(served: Running) -> Iterator[Client]:
    with Client(f"ipc://{served.runtime}/zmq.sock") as client:
        yield client


@pytest.fixture
def dealer(served: Running) -> Iterator[zmq.Socket[Any]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVTIMEO, 20_000)
    socket.connect(f"ipc://{served.runtime}/zmq.sock")
    yield socket
    context.destroy(0)


def header(**changed: Any) -> bytes:
    """A request's header by hand; a key set to None is left out."""
    whole = {
        "v": 1, "id": 7, "op": "infer", "model": "id", "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
        **changed,
    }  # fmt: skip
    return bytes(msgpack.packb({key: value for key, value in whole.items() if value is not None}))


FOUR = struct.pack("<4f", 1, 2, 3, 4)


def ask(dealer: zmq.Socket[Any], *frames: bytes) -> tuple[dict[str, Any], list[bytes]]:
    dealer.send_multipart(frames)
    head, *tensors = dealer.recv_multipart()
    return msgpack.unpackb(head), tensors


def test_frames_by_hand(dealer: zmq.Socket[Any]) -> None:
    reply, tensors = ask(dealer, header(), FOUR)
    assert reply["v"] == 1
    assert (reply["id"], reply["status"], reply["model"]) == (7, "ok", "id")
    assert reply["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [4]}]
    assert reply["parameters"]["takt_path"] == "primary"
    assert tensors == [FOUR]


def test_a_req_socket_gets_its_delimiter_back(served: Running) -> None:
    context = zmq.Context()
    req = context.socket(zmq.REQ)
    req.set(zmq.RCVTIMEO, 20_000)
    req.connect(f"ipc://{served.runtime}/zmq.sock")
    req.send_multipart([header(id="text"), FOUR])
    assert msgpack.unpackb(req.recv_multipart()[0])["id"] == "text"
    context.destroy(0)


def test_replies_come_in_any_order_and_carry_their_id(dealer: zmq.Socket[Any]) -> None:
    slow = np.ones((512, 512), np.float32).tobytes()
    about = [{"name": "x", "datatype": "FP32", "shape": [512, 512]}]
    for number in range(4):
        dealer.send_multipart([header(id=number, model="slow", inputs=about), slow])
    for number in range(4, 8):
        dealer.send_multipart([header(id=number, op="ready")])
    ids = [msgpack.unpackb(dealer.recv_multipart()[0])["id"] for _ in range(8)]
    assert sorted(ids) == list(range(8))
    assert ids != list(range(8))


WRONG: list[tuple[list[bytes], str, str, str]] = [
    ([b"\xc1"], "invalid", "INVALID_ARGUMENT", "no MessagePack map"),
    ([b"\x93\x01\x02\x03"], "invalid", "INVALID_ARGUMENT", "list"),
    ([b"\x81" * 5000], "invalid", "INVALID_ARGUMENT", "no MessagePack map"),
    ([b"\x80" + bytes(1 << 17)], "invalid", "INVALID_ARGUMENT", "65536"),
    ([header(v=2), FOUR], "invalid", "INVALID_ARGUMENT", "speaks 1"),
    ([header(op="eval"), FOUR], "invalid", "INVALID_ARGUMENT", "infer, models, ready"),
    ([header(model=None), FOUR], "invalid", "INVALID_ARGUMENT", '"model" is missing'),
    ([header(model="idd"), FOUR], "invalid", "NOT_FOUND", "did you mean id"),
    ([header(model=3), FOUR], "invalid", "INVALID_ARGUMENT", "text is expected"),
    ([header(version="8"), FOUR], "invalid", "NOT_FOUND", "version 1"),
    ([header()], "invalid", "INVALID_ARGUMENT", "0 tensor frames for 1"),
    ([header(), FOUR, FOUR], "invalid", "INVALID_ARGUMENT", "2 tensor frames for 1"),
    ([header(), b"123"], "invalid", "INVALID_ARGUMENT", "found 3 bytes; 16 are expected"),
    ([header(inputs=[{"name": "x", "datatype": "FP32", "shape": [-4]}]), FOUR], "invalid", "INVALID_ARGUMENT", "0 or"),
    ([header(inputs=[{"name": "x", "datatype": "FP32", "shape": "4"}]), FOUR], "invalid", "INVALID_ARGUMENT", "list"),
    ([header(inputs=[7]), FOUR], "invalid", "INVALID_ARGUMENT", "a map is expected"),
    ([header(outputs=["z"]), FOUR], "invalid", "INVALID_ARGUMENT", '"z" does not exist'),
    ([header(parameters={"priority": "high"}), FOUR], "invalid", "INVALID_ARGUMENT", "integer"),
    ([header(parameters={"takt_deadline_us": 1}), FOUR], "expired", "DEADLINE_EXCEEDED", "deadline"),
    ([header(parameters=[1]), FOUR], "invalid", "INVALID_ARGUMENT", "a map"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_input_is_refused_with_what_was_expected(dealer: zmq.Socket[Any], number: int) -> None:
    frames, status, code, words = WRONG[number]
    reply, tensors = ask(dealer, *frames)
    assert (reply["status"], reply["code"], words in reply["message"]) == (status, code, True), reply
    assert not tensors
    assert ask(dealer, header(), FOUR)[0]["status"] == "ok"


def test_too_much_is_refused_or_cut_off(served: Running, dealer: zmq.Socket[Any], client: Client) -> None:
    parts = [bytes(5 << 20)] * 2
    about = [{"name": name, "datatype": "UINT8", "shape": [5 << 20]} for name in "ab"]
    reply, _ = ask(dealer, header(inputs=about), *parts)
    assert reply["code"] == "RESOURCE_EXHAUSTED"
    assert "limits.message" in reply["message"]
    dealer.send_multipart([header(), bytes(9 << 20)])  # libzmq ends this connection
    assert client.ready()


# ---- our clients ----


def test_client(client: Client) -> None:
    assert client.ready()
    assert {model["name"] for model in client.models()} == {"policy", "id", "big", "slow", "5ms"}
    obs = np.random.default_rng(1).standard_normal((1, 48)).astype(np.float32)
    result = client.infer("policy", obs=obs)
    assert result["actions"].shape == (1, 12)
    assert (result.path, result.late) == ("primary", False)
    assert result.run_us >= 0
    image = np.random.default_rng(2).standard_normal((1, 3, 224, 224)).astype(np.float32)
    np.testing.assert_array_equal(client.infer("big", x=image)["y"], image)
    with pytest.raises(ZmqRefused, match="FP32 is expected") as refused:
        client.infer("id", x=np.zeros(4))
    assert (refused.value.status, refused.value.code_name) == ("invalid", "INVALID_ARGUMENT")


def test_asyncio_client(served: Running) -> None:
    async def go() -> None:
        async with AsyncClient(f"ipc://{served.runtime}/zmq.sock") as client:
            numbers = np.arange(50, dtype=np.float32)
            results = await asyncio.gather(*(client.infer("id", x=np.full(4, n)) for n in numbers))
            assert [float(r["y"][0]) for r in results] == numbers.tolist()

    asyncio.run(go())


def test_nobody_there(tmp_path: Any) -> None:
    with (
        Client(f"ipc://{tmp_path}/none.sock", timeout_s=0.1) as client,
        pytest.raises(NotConnected, match=r"none\.sock"),
    ):
        client.ready()


# ---- who may ----


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
def test_the_uid_is_judged_by_allow(served: Running) -> None:
    for parent in [served.folder, *served.folder.parents]:
        if parent.stat().st_mode & 0o005 != 0o005 and parent.is_relative_to("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o055)

    def infer() -> str:
        said = []
        with Client(f"ipc://{served.runtime}/zmq.sock") as client:
            for model, name, shape in (("policy", "obs", (1, 48)), ("id", "x", (4,))):
                try:
                    client.infer(model, {name: np.zeros(shape, np.float32)})
                    said.append(f"{model} yes")
                except ZmqRefused as error:
                    said.append(f"{model} {error.code_name} {error}")
        return "\n".join(said)

    stranger = as_user(23456, infer).splitlines()
    assert [line.split()[:2] for line in stranger] == [["policy", "PERMISSION_DENIED"], ["id", "PERMISSION_DENIED"]]
    assert "uid 23456" in stranger[0]
    assert as_user(12345, infer).splitlines()[0] == "policy yes"


# ---- abuse ----


def test_garbage_on_the_socket_changes_nothing(served: Running, client: Client) -> None:
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        b"\xff" * 64 + bytes(64),
        b"\xff\0\0\0\0\0\0\0\1\x7f\3" + b"x" * 99,
    ):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(f"{served.runtime}/zmq.sock")
            raw.sendall(data)
            assert client.ready()


def test_jobs_of_a_client_that_leaves_are_cancelled(served: Running, client: Client) -> None:
    context = zmq.Context()
    leaver = context.socket(zmq.DEALER)
    leaver.connect(f"ipc://{served.runtime}/zmq.sock")

    def ok() -> int:
        found = next(m for m in served.ask("models")["models"] if m["name"] == "5ms")
        return int(found["statistics"]["ok"])

    def busy() -> bool:
        """The gateway counts once a second; so there is more to do until it has."""
        for _ in range(40):
            leaver.send_multipart([header(model="5ms"), FOUR])
        return bool(served.ask("status")["gateway"]["jobs"] > 30)

    eventually(busy, within_s=30)
    ran = ok()
    context.destroy(0)
    eventually(lambda: served.ask("status")["gateway"]["jobs"] == 0)
    assert ok() - ran < 30
    assert served.ask("status")["gateway"]["zmq_clients_gone"] > 0
    assert client.infer("id", x=np.zeros(4, np.float32)).path == "primary"


def test_a_client_that_does_not_read_loses_replies_and_they_are_counted(served: Running, client: Client) -> None:
    context = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.set(zmq.RCVHWM, 1)
    deaf.set(zmq.SNDTIMEO, 1000)
    deaf.connect(f"ipc://{served.runtime}/zmq.sock")
    image = np.zeros((1, 3, 224, 224), np.float32).tobytes()
    about = [{"name": "x", "datatype": "FP32", "shape": [1, 3, 224, 224]}]

    def flooded() -> bool:
        for _ in range(50):
            try:
                deaf.send_multipart([header(model="big", inputs=about), image])
            except zmq.Again:
                break
        return bool(served.ask("status")["gateway"]["zmq_replies_dropped"])

    eventually(flooded, within_s=60)
    assert client.infer("id", x=np.zeros(4, np.float32)).path == "primary"
    context.destroy(0)
    eventually(lambda: served.ask("status")["gateway"]["jobs"] == 0)


def test_connections_are_charged_to_the_uid_and_given_back(served: Running) -> None:
    context = zmq.Context()
    dealers = []
    for number in range(12):
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.RCVTIMEO, 20_000)
        dealer.connect(f"ipc://{served.runtime}/zmq.sock")
        reply, _ = ask(dealer, header(id=number), FOUR)
        if number < 10:
            assert reply["status"] == "ok"
            dealers.append(dealer)
        else:
            assert (reply["id"], reply["status"], reply["code"]) == (number, "refused", "RESOURCE_EXHAUSTED")
            assert f"too many connections for uid {os.geteuid()}: 10 held" in reply["message"]
            assert "limits.connections_per_uid" in reply["message"]
    dealers.pop().close(0)
    eventually(lambda: ask(dealer, header(), FOUR)[0]["status"] == "ok")
    context.destroy(0)
    eventually(lambda: served.ask("status")["gateway"]["zmq_connections"] == 0)
    with Client(f"ipc://{served.runtime}/zmq.sock") as client:
        assert client.infer("id", x=np.zeros(4, np.float32)).path == "primary"


@pytest.mark.parametrize("name", ["zmq.sock", "events.sock"])
def test_connections_that_say_nothing_are_bounded_and_whoever_asks_is_served(
    served: Running, client: Client, name: str
) -> None:
    """Raw connections: libzmq itself would come again. (After 5 s those end that have not said who they are.)"""
    assert client.infer("id", x=np.zeros(4, np.float32)).path == "primary"  # charged, and so none of those
    cut = served.ask("status")["gateway"]["zmq_connections_cut"]
    mute = [socket.socket(socket.AF_UNIX) for _ in range(40)]
    for one in mute:
        one.connect(f"{served.runtime}/{name}")
        one.setblocking(False)

    def left() -> int:
        still = 0
        for one in mute:
            try:
                still += one.recv(1 << 16) != b""
            except BlockingIOError:
                still += 1
            except ConnectionResetError:
                pass
        return still

    eventually(lambda: left() <= 10, within_s=60)
    assert client.infer("id", x=np.zeros(4, np.float32)).path == "primary"
    eventually(lambda: served.ask("status")["gateway"]["zmq_connections_cut"] > cut, within_s=60)
    assert "connections that have asked for nothing" in served.log
    for one in mute:
        one.close()
    with Client(f"ipc://{served.runtime}/zmq.sock") as late:
        assert late.infer("id", x=np.zeros(4, np.float32)).path == "primary"


# ---- events ----


def test_completions_of_published_loops_come_with_their_outputs(served: Running) -> None:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.set(zmq.RCVTIMEO, 10_000)
    subscriber.connect(f"ipc://{served.runtime}/events.sock")
    for topic in (b"completion.", b"miss.walk"):
        subscriber.subscribe(topic)
    seen = {}
    with served.connect() as node, node.attach("walk") as lane, node.attach("quiet") as other:
        for tick in lane.ticks():
            lane.inputs["x"][:] = tick.index
            lane.infer(timeout_us=2_000_000)
            other.infer(timeout_us=2_000_000)
            while subscriber.poll(0):
                topic, head, *tensors = subscriber.recv_multipart()
                if topic == b"completion.walk":
                    header = msgpack.unpackb(head)
                    seen[header["sequence"]] = (header, tensors)
            if len(seen) >= 3:
                break
            assert tick.index < 50, "no completions were published"
    context.destroy(0)
    for sequence, (header, tensors) in seen.items():
        assert header["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [4]}]
        assert (header["v"], header["loop"], header["status"]) == (1, "walk", "ok")
        assert np.frombuffer(tensors[0], np.float32).tolist() == [sequence - 1] * 4
