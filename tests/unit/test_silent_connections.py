"""Connections that ask for nothing are counted by their user; one too many is hung up on, and nobody else."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from taktd.ipc.zmq.connections import SilentConnections
from taktd.ipc.zmq.server import EventPublisher, bind

Pair = tuple[socket.socket, socket.socket]
ME = f"uid {os.geteuid()}"


class Listener:
    """A listening socket, and connections at both their ends: (client's, accepted)."""

    def __init__(self, family: socket.AddressFamily, address: object) -> None:
        self._listening = socket.socket(family)
        self._listening.bind(address)  # type: ignore[arg-type]
        self._listening.listen(64)
        self._family = family
        self._open: list[socket.socket] = [self._listening]

    def endpoint(self) -> str:
        name = self._listening.getsockname()
        return f"ipc://{name}" if self._family == socket.AF_UNIX else f"tcp://0.0.0.0:{name[1]}"

    def connected(self) -> Pair:
        client = socket.socket(self._family)
        client.settimeout(10)
        client.connect(self._listening.getsockname())
        accepted, _ = self._listening.accept()
        self._open += [client, accepted]
        return client, accepted

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture(params=["unix", "tcp"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    found = (
        Listener(socket.AF_UNIX, str(tmp_path / "s"))
        if request.param == "unix"
        else Listener(socket.AF_INET, ("127.0.0.1", 0))
    )
    yield found
    found.close()


def hung_up(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


def test_one_too_many_is_hung_up_on_with_a_reason_and_the_others_stay(listener: Listener) -> None:
    silent = SilentConnections(3, 10, listener.endpoint)
    pairs = [listener.connected() for _ in range(4)]
    said = [silent.accepted(accepted.fileno()) for _, accepted in pairs]
    assert said[:3] == [""] * 3
    assert "limits.connections_per_uid" in said[3]
    assert "3 are allowed" in said[3]
    assert [hung_up(client) for client, _ in pairs] == [False, False, False, True]
    assert (len(silent), silent.cut) == (3, 1)


def test_who_asks_or_leaves_makes_room(listener: Listener) -> None:
    silent = SilentConnections(1, 10, listener.endpoint)
    first, second = listener.connected(), listener.connected()
    assert not silent.accepted(first[1].fileno())
    silent.gone(first[1].fileno())
    silent.gone(first[1].fileno())
    assert not silent.accepted(second[1].fileno())
    assert silent.accepted(listener.connected()[1].fileno())
    silent.gone(second[1].fileno())
    assert len(silent) == 0


def test_all_together_are_bounded_too(listener: Listener) -> None:
    silent = SilentConnections(10, 2, listener.endpoint)
    said = [silent.accepted(listener.connected()[1].fileno()) for _ in range(3)]
    assert [bool(text) for text in said] == [False, False, True]
    assert "limits.connections)" in said[2]


def test_a_number_that_is_something_else_by_now_is_left_alone(listener: Listener, tmp_path: Path) -> None:
    """libzmq tells of a descriptor late: it may be closed, a file, or a connection of somebody else's listener."""
    silent = SilentConnections(0, 10, listener.endpoint)
    stranger = Listener(socket.AF_UNIX, str(tmp_path / "another"))
    client, accepted = stranger.connected()
    ends = socket.socketpair()
    closed = os.dup(0)
    os.close(closed)
    descriptors = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("wb") as file:
        for descriptor in (accepted.fileno(), ends[0].fileno(), closed, file.fileno()):
            assert silent.accepted(descriptor) == ""
    assert not hung_up(client)
    assert not hung_up(ends[1])
    assert (len(silent), silent.cut) == (0, 0)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    for one in ends:
        one.close()
    stranger.close()


def test_a_unix_peer_is_its_user(tmp_path: Path) -> None:
    listener = Listener(socket.AF_UNIX, str(tmp_path / "s"))
    silent = SilentConnections(1, 10, listener.endpoint)
    silent.accepted(listener.connected()[1].fileno())
    assert silent.held(ME) == 1
    assert silent.accepted(listener.connected()[1].fileno()).startswith(ME)
    listener.close()


def test_a_publisher_notices_its_first_connections(tmp_path: Path) -> None:
    """libzmq wakes only whoever has looked and found nothing."""

    async def go() -> tuple[int, list[str]]:
        said: list[str] = []
        enough = asyncio.Event()

        def warn(complaint: str) -> None:
            said.append(complaint)
            if len(said) == 3:
                enough.set()

        context = zmq.Context()
        publisher = EventPublisher(context, 10, (2, 10), warn)
        bind(publisher.socket, str(tmp_path / "events"))
        clients = [socket.socket(socket.AF_UNIX) for _ in range(5)]
        for client in clients:
            client.connect(str(tmp_path / "events"))
        await asyncio.wait_for(enough.wait(), 30)
        cut = publisher.connections_cut
        publisher.close()
        for client in clients:
            client.close()
        context.destroy(0)
        return cut, said

    cut, said = asyncio.run(go())
    assert cut == len(said) == 3
