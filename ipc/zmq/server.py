"""ROUTER for requests, PUB for events, in an asyncio loop. Protocol code over `taktd.ipc.inference.Backend`.

Requests of a client that hangs up are cancelled, and those of its that are read later are dropped: a job that nobody
waits for does not reach the device. libzmq tells of connections by their descriptors, on a monitor socket, and a
descriptor can be used again; so connections are numbered here. A client that does not read loses replies, which are
counted.

`zmq.asyncio` is not used: it makes a future for each receive, and a poll for each send.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from taktd.ipc.inference import Answer, Backend, Handle, Outcome, Principal, Raw, Refusal, Request, Rights
from taktd.ipc.zmq import protocol
from taktd.ipc.zmq.connections import SilentConnections

MESSAGES_PER_TURN: Final = 32
HIGH_WATER: Final = 256  # messages of one client, each way
BACKLOG: Final = 256
HANDSHAKE_MS_MAX: Final = 5_000
COPY_BELOW_BYTES: Final = 1 << 16
# As plain numbers: the flags' own `|` takes as long as sending a frame.
NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
HEARTBEAT_MS: Final = 15_000

ROUTING_ID_BYTES: Final = 5  # of one that libzmq made up: 0 and a number
ORIGINS_MAX: Final = 4096

Frames = Sequence[Raw]
SilentMax = tuple[int, int]  # of one peer, of all together


class Origin(NamedTuple):
    """Where a message came from. connection: its number, 0 for one that had gone when its first message was read."""

    descriptor: int
    connection: int
    address: str
    user: str


class RequestServer:
    """The ROUTER. `principal_of(address, user)` judges a peer: by its address, "localhost:uid:gid:pid" behind a unix
    socket, or by the user that authentication gave it."""

    def __init__(
        self, context: zmq.Context[Any], backend: Backend, principal_of: Callable[[str, str], Principal],
        clock: Callable[[], int], message_bytes_max: int, silent: SilentMax, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """silent: how many connections may be there that ask for nothing; warn: hears of those that are cut."""
        self._backend, self._principal_of, self._clock = backend, principal_of, clock
        self._message_bytes_max = message_bytes_max
        self.socket = context.socket(zmq.ROUTER)
        _harden(self.socket, message_bytes_max)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._loop = asyncio.get_running_loop()
        self._reader = protocol.RequestReader()
        self._origins: dict[bytes, Origin] = {}  # by routing id, where libzmq made it up: it makes each up once
        self._open: dict[int, int] = {}  # descriptor → number of its connection
        self._numbers = count(1)
        self._silent, self._warn = SilentConnections(*silent, partial(_endpoint, self.socket)), warn
        self._charged: dict[int, Principal] = {}  # by connection, from its first request for inference on
        self._jobs: dict[int, set[Handle]] = {}  # by connection
        self._telling = True
        self._again: asyncio.Handle | None = None
        self.requests = self.replies_dropped = self.clients_gone = 0
        self._loop.add_reader(self.socket.get(zmq.FD), self._readable)
        self._loop.add_reader(self._monitor.get(zmq.FD), self._read_monitor)
        self._read_monitor()  # libzmq wakes only whoever has looked and found nothing

    # ---- receiving ----

    def _readable(self) -> None:
        """Descriptors of ZeroMQ are edge-triggered: read until there is nothing, or come back by ourselves."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        receive = self.socket.recv
        for _ in range(MESSAGES_PER_TURN):
            try:
                routing_id = receive(NOBLOCK)
                frames = [receive(NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(receive(NOBLOCK, copy=False))
            except zmq.Again:
                return
            self._received(routing_id, frames)
            self._read_monitor()  # what comes next may be of a client that has gone
        self._again = self._loop.call_soon(self._readable)

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def connections_cut(self) -> int:
        return self._silent.cut

    def _read_monitor(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._open[event["value"]] = next(self._numbers)
                if complaint := self._silent.accepted(event["value"]):
                    self._warn(complaint)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                number = self._open.pop(event["value"], 0)
                self._silent.gone(event["value"])
                self._hung_up(self._jobs.pop(number, set()))
                if (principal := self._charged.pop(number, None)) is not None:
                    self._backend.leave(principal)

    def _hung_up(self, jobs: set[Handle]) -> None:
        """Nobody is there to be told."""
        self._telling = False
        for job in jobs:
            self.clients_gone += 1
            job.cancel()
        self._telling = True

    def _received(self, routing_id: bytes, frames: list[zmq.Frame]) -> None:
        self.requests += 1
        origin = self._origins.get(routing_id) or self._origin_of(routing_id, frames[-1])
        if origin.connection != self._open.get(origin.descriptor):
            self.clients_gone += 1
            return
        # A REQ socket puts an empty frame before its message, and expects it back.
        first = 1 if not len(frames[0]) else 0
        envelope = [routing_id, b""] if first else [routing_id]
        request_id = None
        try:
            if len(frames) <= first:
                raise Refusal(Outcome.INVALID, "no header; [header, tensor, …] is expected: see docs/zmq.md")
            head = frames[first].buffer
            tensors = [frame.buffer for frame in frames[first + 1 :]]
            remembered = self._reader.remembered(head, tensors, self._clock())
            if remembered is not None:
                request_id, request = remembered
                self._infer(request, origin, envelope, request_id)
                return
            header = protocol.unpack(head)
            request_id = protocol.id_of(header)
            operation = protocol.operation_of(header)
            if operation == "infer":
                request = self._reader.read(head, header, tensors, self._clock())
                self._infer(request, origin, envelope, request_id)
            else:
                self._send([*envelope, *self._asked(operation, request_id)])
        except Refusal as refusal:
            self._send([*envelope, *protocol.refusal_reply(refusal, request_id)])

    def _origin_of(self, routing_id: bytes, frame: zmq.Frame) -> Origin:
        self._read_monitor()  # it may be news that there is such a connection
        descriptor, address, user = _origin(frame)
        origin = Origin(descriptor, self._open.get(descriptor, 0), address, user)
        if len(routing_id) == ROUTING_ID_BYTES and routing_id[0] == 0:
            if len(self._origins) >= ORIGINS_MAX:
                self._origins.clear()
            self._origins[routing_id] = origin
        return origin

    def _asked(self, operation: str, request_id: Any) -> Frames:
        backend = self._backend
        if operation == "models":
            return protocol.models_reply(backend.models(), request_id)
        return protocol.ready_reply(backend.live(), backend.ready(), backend.node, backend.version, request_id)

    def _infer(self, request: Request, origin: Origin, envelope: list[bytes], request_id: Any) -> None:
        principal = self._principal_of(origin.address, origin.user)
        if origin.connection not in self._charged:
            self._backend.enter(principal)
            self._charged[origin.connection] = principal
            self._silent.gone(origin.descriptor)
        size = sum([tensor.nbytes for tensor in request.inputs])
        if size > self._message_bytes_max:
            text = (
                f"the tensors have {size} bytes; {self._message_bytes_max} are allowed (limits.message): attach a lane"
            )
            raise Refusal(Outcome.FULL, text)
        if not principal.rights.include(Rights.INFER):
            raise Refusal(Outcome.DENIED, f"{principal.name} may not ask for inference")
        handle: Handle | None = None

        def encode(answer: Answer) -> Frames:
            return protocol.reply(answer, request_id)

        def done(result: Frames | Refusal) -> None:
            if handle is not None and (jobs := self._jobs.get(origin.connection)):
                jobs.discard(handle)
                if not jobs:
                    del self._jobs[origin.connection]
            if not self._telling:
                return
            if isinstance(result, Refusal):
                result = protocol.refusal_reply(result, request_id)
            self._send([*envelope, *result])

        started = self._backend.start(request, principal, encode, done)
        if not started.ended:
            handle = started
            self._jobs.setdefault(origin.connection, set()).add(handle)

    # ---- sending ----

    def _send(self, frames: Frames) -> None:
        try:
            _send(self.socket, frames)
        except zmq.Again:
            self.replies_dropped += 1  # it has not read the last HIGH_WATER replies
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.clients_gone += 1
        # Sending may have swallowed the edge of something that came in.
        if self._again is None and self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            self._again = self._loop.call_soon(self._readable)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        for sock in (self.socket, self._monitor):
            self._loop.remove_reader(sock.get(zmq.FD))
        for principal in self._charged.values():
            self._backend.leave(principal)
        jobs, self._jobs = self._jobs, {}
        for of_one in jobs.values():
            self._hung_up(of_one)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


def _endpoint(socket: zmq.Socket[Any]) -> str:
    """Where it is bound."""
    found: Any = socket.get(zmq.LAST_ENDPOINT)
    return bytes(found).decode().rstrip("\0")


def _origin(frame: zmq.Frame) -> tuple[int, str, str]:
    """(descriptor, address, user) of the connection that a message came from."""
    descriptor, address, user = -1, "", ""
    with suppress(zmq.ZMQError):
        descriptor = int(frame.get(zmq.SRCFD))
    with suppress(zmq.ZMQError):
        address = str(frame.get("Peer-Address"))
    with suppress(zmq.ZMQError):
        user = str(frame.get("User-Id"))
    return descriptor, address, user


def uid_of(address: str) -> tuple[int, int] | None:
    """(uid, gid) in the address of a peer behind a unix socket; None for any other."""
    parts = address.split(":")
    if len(parts) != 4 or parts[0] != "localhost" or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(parts[1]), int(parts[2])


class EventPublisher:
    """The PUB. A frame with the topic, a header with a number that counts up, then tensors.

    XPUB, so that a message which some subscriber has no room for is noticed and counted before it is dropped for that
    one. Publishing never waits. Subscribers are no more than `silent` allows: there is nothing that they would ask.
    """

    def __init__(
        self, context: zmq.Context[Any], high_water: int, silent: SilentMax, warn: Callable[[str], None]
    ) -> None:
        self.socket = context.socket(zmq.XPUB)
        _harden(self.socket, protocol.HEADER_BYTES_MAX)
        self.socket.set(zmq.SNDHWM, high_water)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self.sent = self.dropped = 0
        self._silent, self._warn = SilentConnections(*silent, partial(_endpoint, self.socket)), warn
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self.socket.get(zmq.FD), self._subscriptions)
        self._loop.add_reader(self._monitor.get(zmq.FD), self._read_monitor)
        self._read_monitor()  # libzmq wakes only whoever has looked and found nothing

    @property
    def connections_cut(self) -> int:
        return self._silent.cut

    def _read_monitor(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._silent.gone(event["value"])
            elif event["event"] == zmq.EVENT_ACCEPTED and (complaint := self._silent.accepted(event["value"])):
                self._warn(complaint)

    def _subscriptions(self) -> None:
        """Nobody needs them, but they must not pile up."""
        for _ in range(1 << 16):
            if not self.socket.get(zmq.EVENTS) & zmq.POLLIN:
                return
            self.socket.recv(zmq.NOBLOCK)

    def publish(self, topic: str, header: protocol.Header, tensors: Sequence[Raw] = ()) -> None:
        self._number += 1
        frames = [topic.encode(), protocol.pack({"v": protocol.VERSION, "n": self._number, **header}), *tensors]
        self.sent += 1
        self.socket.set(zmq.XPUB_NODROP, 1)
        try:
            _send(self.socket, frames)
        except zmq.Again:
            self.dropped += 1
            self.socket.set(zmq.XPUB_NODROP, 0)
            _send(self.socket, frames)
        self._subscriptions()

    def close(self) -> None:
        for sock in (self.socket, self._monitor):
            self._loop.remove_reader(sock.get(zmq.FD))
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


def _send(socket: zmq.Socket[Any], frames: Frames) -> None:
    """All frames or none, without waiting; big ones without a copy."""
    *before, last = frames
    for frame in before:
        socket.send(frame, MORE, copy=_small(frame))
    socket.send(last, NOBLOCK, copy=_small(last))


def _small(frame: Raw) -> bool:
    return (frame.nbytes if isinstance(frame, memoryview) else len(frame)) < COPY_BELOW_BYTES


def _harden(socket: zmq.Socket[Any], message_bytes_max: int) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, message_bytes_max)  # of one frame; a peer that sends more is disconnected
    socket.set(zmq.RCVHWM, HIGH_WATER)
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.BACKLOG, BACKLOG)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS_MAX)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)


def bind(socket: zmq.Socket[Any], path: str) -> None:
    """At a unix path that nobody listens at, for everybody: rights are judged by the peer's uid. OSError if not."""
    before = os.umask(0o111)
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from None
    finally:
        os.umask(before)
