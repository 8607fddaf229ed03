"""ROUTER for requests, PUB for events, in an asyncio loop. Protocol code over `taktd.ipc.inference.Backend`.

Requests of a client that hangs up are cancelled: a job that nobody waits for does not reach the device. libzmq tells of
a hang-up by the descriptor alone, on a monitor socket; it does so before the descriptor can be used again, and the
monitor is always read before the requests. A client that does not read loses replies, which are counted.

`zmq.asyncio` is not used: it makes a future for each receive, and a poll for each send.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from taktd.ipc.inference import Answer, Backend, Handle, Outcome, Principal, Raw, Refusal, Rights
from taktd.ipc.zmq import protocol

MESSAGES_PER_TURN: Final = 32
HIGH_WATER: Final = 256  # messages of one client, each way
BACKLOG: Final = 256
HANDSHAKE_MS_MAX: Final = 5_000
COPY_BELOW_BYTES: Final = 1 << 16
HEARTBEAT_MS: Final = 15_000

Frames = Sequence[Raw]


class RequestServer:
    """The ROUTER. `principal_of(address, user)` judges a peer: by its address, "localhost:uid:gid:pid" behind a unix
    socket, or by the user that authentication gave it."""

    def __init__(
        self, context: zmq.Context[Any], backend: Backend, principal_of: Callable[[str, str], Principal],
        clock: Callable[[], int], message_bytes_max: int,
    ) -> None:  # fmt: skip
        self._backend, self._principal_of, self._clock = backend, principal_of, clock
        self._message_bytes_max = message_bytes_max
        self.socket = context.socket(zmq.ROUTER)
        _harden(self.socket, message_bytes_max)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, set[Handle]] = {}  # by the client's descriptor
        self._telling = True
        self._again: asyncio.Handle | None = None
        self.connections = 0
        self.requests = self.replies_dropped = self.clients_gone = 0
        for sock in (self.socket, self._monitor):
            self._loop.add_reader(sock.get(zmq.FD), self._readable)

    # ---- receiving ----

    def _readable(self) -> None:
        """Descriptors of ZeroMQ are edge-triggered: read until there is nothing, or come back by ourselves."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for _ in range(MESSAGES_PER_TURN):
            self._read_monitor()
            try:
                frames: list[zmq.Frame] = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._received(frames)
        self._again = self._loop.call_soon(self._readable)

    def _read_monitor(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connections += 1
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self.connections -= 1
                self._hung_up(self._jobs.pop(event["value"], set()))

    def _hung_up(self, jobs: set[Handle]) -> None:
        """Nobody is there to be told."""
        self._telling = False
        for job in jobs:
            self.clients_gone += 1
            job.cancel()
        self._telling = True

    def _received(self, frames: list[zmq.Frame]) -> None:
        self.requests += 1
        descriptor, *peer = _origin(frames[-1])
        # A REQ socket puts an empty frame before its message, and expects it back.
        first = 2 if len(frames) > 1 and not len(frames[1]) else 1
        envelope = [frame.bytes for frame in frames[:first]]
        request_id = None
        try:
            if len(frames) <= first:
                raise Refusal(Outcome.INVALID, "no header; [header, tensor, …] is expected: see docs/zmq.md")
            header = protocol.unpack(frames[first].buffer)
            request_id = protocol.id_of(header)
            operation = protocol.operation_of(header)
            if operation == "infer":
                tensors = [frame.buffer for frame in frames[first + 1 :]]
                self._infer(header, tensors, self._principal_of(*peer), envelope, request_id, descriptor)
            else:
                self._send([*envelope, *self._asked(operation, request_id)])
        except Refusal as refusal:
            self._send([*envelope, *protocol.refusal_reply(refusal, request_id)])

    def _asked(self, operation: str, request_id: Any) -> Frames:
        backend = self._backend
        if operation == "models":
            return protocol.models_reply(backend.models(), request_id)
        return protocol.ready_reply(backend.live(), backend.ready(), backend.node, backend.version, request_id)

    def _infer(
        self, header: protocol.Header, tensors: list[memoryview], principal: Principal, envelope: list[bytes],
        request_id: Any, descriptor: int,
    ) -> None:  # fmt: skip
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._message_bytes_max:
            text = (
                f"the tensors have {size} bytes; {self._message_bytes_max} are allowed (limits.message): attach a lane"
            )
            raise Refusal(Outcome.FULL, text)
        if not principal.rights.include(Rights.INFER):
            raise Refusal(Outcome.DENIED, f"{principal.name} may not ask for inference")
        request = protocol.request_from(header, tensors, self._clock())
        handle: Handle | None = None

        def encode(answer: Answer) -> Frames:
            return protocol.reply(answer, request_id)

        def done(result: Frames | Refusal) -> None:
            if handle is not None and (jobs := self._jobs.get(descriptor)):
                jobs.discard(handle)
                if not jobs:
                    del self._jobs[descriptor]
            if not self._telling:
                return
            if isinstance(result, Refusal):
                result = protocol.refusal_reply(result, request_id)
            self._send([*envelope, *result])

        started = self._backend.start(request, principal, encode, done)
        if not started.ended:
            handle = started
            self._jobs.setdefault(descriptor, set()).add(handle)

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
        jobs, self._jobs = self._jobs, {}
        for of_one in jobs.values():
            self._hung_up(of_one)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)


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
    one. Publishing never waits.
    """

    def __init__(self, context: zmq.Context[Any], high_water: int) -> None:
        self.socket = context.socket(zmq.XPUB)
        _harden(self.socket, protocol.HEADER_BYTES_MAX)
        self.socket.set(zmq.SNDHWM, high_water)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self.sent = self.dropped = 0
        self._loop.add_reader(self.socket.get(zmq.FD), self._subscriptions)

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
        self._loop.remove_reader(self.socket.get(zmq.FD))
        self.socket.close(0)


def _send(socket: zmq.Socket[Any], frames: Frames) -> None:
    """All frames or none, without waiting; big ones without a copy."""
    *before, last = frames
    for frame in before:
        socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=_small(frame))
    socket.send(last, zmq.NOBLOCK, copy=_small(last))


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
