"""FAULTS 14: no descriptors left, clients that vanish, endless attachments: refused, survived, forgotten."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from taktd.ipc import LimitReached, Node, NotConnected, TaktError
from tests import models
from tests.chance import seed
from tests.conftest import Start
from tests.fakes.raw_connection import ATTACH, ERROR, HEADER, HELLO, MAGIC, RawConnection
from tests.running import Running, eventually

YAML = """\
devices:
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
loops:
  walk: {{model: id, period: 5ms, budget: 500us}}
admission: {{on_refusal: uncertified}}
limits: {{connections: 2000, connections_per_uid: 2000, lanes: 500, lanes_per_uid: 500}}
"""


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    models.identity(tmp_path / "id.onnx", (4,))
    return YAML.format(folder=tmp_path)


@pytest.fixture
def cramped(tmp_path: Path, yaml: str) -> Iterator[Running]:
    """A daemon with few descriptors."""
    folder = tmp_path / "cramped"
    folder.mkdir()
    running = Running(folder, yaml)
    try:
        yield running.start(["prlimit", "--nofile=96:96"]).await_ready()
    finally:
        running.close()


def works(running: Running) -> bool:
    with running.connect() as node, node.attach("walk") as lane:
        return lane.infer(timeout_us=10_000_000).status in ("ok", "expired")


def test_without_descriptors_clients_are_told_so_and_it_recovers(cramped: Running) -> None:
    before = cramped.descriptors()
    executor = cramped.executor()["pid"]
    for _ in range(3):
        nodes: list[Node] = []
        lanes = []
        refusals: list[TaktError] = []
        while len(refusals) < 3 and len(nodes) < 200:
            try:
                nodes.append(cramped.connect())
                lanes.append(nodes[-1].attach("id"))
            except TaktError as error:
                refusals.append(error)
        assert len(nodes) < 96
        assert any(isinstance(error, LimitReached) for error in refusals), refusals
        assert all(str(error) for error in refusals)
        for lane in lanes:
            lane.inputs["x"][:] = 1
            assert lane.infer(timeout_us=10_000_000).ok
        for node in nodes:
            node.close()
        eventually(lambda: cramped.descriptors() == before, what="descriptors are back")
        assert works(cramped)
    assert cramped.executor()["pid"] == executor


def test_a_thousand_connections_that_attach_and_vanish(taktd: Start, yaml: str) -> None:
    running = taktd(yaml)
    assert works(running)
    before = running.descriptors()
    chance = random.Random(seed())
    for _ in range(1000):
        raw = RawConnection(running.lanes_socket)
        steps = chance.randrange(4)
        with suppress(OSError):
            if steps > 0:
                raw.hello()
            if steps > 1:
                raw.attach(chance.choice(["id", "walk", "nobody"]))
            if steps > 2:
                raw.receive()
        raw.close()
    eventually(lambda: running.ask("status")["clients"] == 0, 30)
    eventually(lambda: running.descriptors() == before, 30, "descriptors are back")
    assert works(running)
    assert running.ask("status")["executors"][0]["restarts"] == 0


@pytest.mark.parametrize("cycles", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_attach_and_detach_leave_nothing(taktd: Start, yaml: str, cycles: int) -> None:
    running = taktd(yaml)
    with running.connect() as node:

        def cycle(count: int) -> None:
            for number in range(count):
                with node.attach("id" if number % 4 else "walk") as lane:
                    lane.inputs["x"][:] = number
                    if number % 8 == 0:
                        assert lane.infer(timeout_us=10_000_000).status in ("ok", "expired")

        cycle(100)
        before = (running.descriptors(), running.memory_bytes())
        cycle(cycles)
        eventually(lambda: running.descriptors() == before[0], what="descriptors are back")
        assert running.memory_bytes() < before[1] + (2 << 20)
    assert running.executor()["restarts"] == 0


def test_limits_of_connections(taktd: Start, yaml: str) -> None:
    running = taktd(yaml.replace("connections_per_uid: 2000", "connections_per_uid: 3"))
    nodes = [running.connect() for _ in range(3)]
    with pytest.raises(LimitReached, match=r"limits\.connections_per_uid"):
        running.connect()
    nodes.pop().close()
    eventually(lambda: running.ask("status")["clients"] == 2)
    running.connect().close()


@pytest.mark.parametrize(
    "message",
    [
        b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 16, b"\xff" * 8192,
        HEADER.pack(MAGIC, 0, 0, 1, 0), HEADER.pack(MAGIC, 99, 0, 1, 0), HEADER.pack(MAGIC, ATTACH, 0, 1, 0),
        HEADER.pack(MAGIC, ATTACH, 0, 1, 0) + struct.pack("<II64s", 0, 0, b"walk"),
        HEADER.pack(MAGIC, HELLO, 7, 1, 0) + struct.pack("<II64s", 1, 1, b"x"),
        HEADER.pack(MAGIC, HELLO, 0, 1, 0) + struct.pack("<II64s", 1, 1, b"x" * 64),
        HEADER.pack(MAGIC, HELLO, 0, 1, 0) + struct.pack("<II64s", 1, 1, b"\xff\xfe"),
        HEADER.pack(MAGIC, HELLO, 0, 1, 0) + struct.pack("<II64s", 2, 9, b"newer"),
    ],
    ids=range(13),
)  # fmt: skip
def test_garbage_is_answered_once_and_the_connection_ends(running_once: Running, message: bytes) -> None:
    raw = RawConnection(running_once.lanes_socket)
    raw.socket.send(message)
    kind, code, body, _ = raw.receive()
    if message:
        assert kind == ERROR
        assert code < 0
        assert body
        kind, *_ = raw.receive()
    assert kind == 0
    raw.close()
    assert works(running_once)


@pytest.fixture(scope="module")
def running_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("garbage")
    models.identity(folder / "id.onnx", (4,))
    running = Running(folder, YAML.format(folder=folder))
    try:
        yield running.start().await_ready()
    finally:
        running.close()


def test_a_client_that_does_not_read_is_disconnected(running_once: Running) -> None:
    raw = RawConnection(running_once.lanes_socket)
    raw.hello()
    raw.socket.settimeout(5)
    gone = False
    for _ in range(100_000):
        try:
            raw.send(7, struct.pack("<II", 1, 0))
        except OSError:
            gone = True
            break
    assert gone
    raw.close()
    assert works(running_once)


def test_a_control_client_that_says_nonsense(running_once: Running) -> None:
    for line in (
        b"\n",
        b"{\n",
        b"[]\n",
        b'{"op": 5}\n',
        b'{"op": "' + b"x" * 5000 + b'"}\n',
        b"[" * 50_000 + b"\n",
        b"\xff\n",
    ):
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(10)
            control.connect(str(running_once.runtime / "control.sock"))
            control.sendall(line)
            assert b'"ok":false' in control.recv(1 << 16)
    with socket.socket(socket.AF_UNIX) as control, suppress(OSError):
        control.settimeout(10)
        control.connect(str(running_once.runtime / "control.sock"))
        control.sendall(b"x" * (3 << 20))  # a line without an end
        assert control.recv(1) == b""
    assert works(running_once)


def test_nobody_there(tmp_path: Path) -> None:
    from taktd.ipc import connect

    with pytest.raises(NotConnected, match=str(tmp_path)):
        connect(str(tmp_path / "lanes.sock"))
