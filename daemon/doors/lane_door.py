"""lanes.sock: where clients connect, say who they are, and get descriptors. Their hang-up here is their death.

Nothing a client does or leaves undone can hold up the daemon: sockets never block, a client that does not read is
disconnected, requests of one client are served one at a time. Rights are judged by the kernel's word on the peer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from taktd.daemon.doors import lane_protocol as protocol
from taktd.daemon.doors.acceptor import Acceptor
from taktd.daemon.doors.lane_protocol import Kind, Malformed, Request, Type
from taktd.daemon.doors.peers import Peer, peer_of
from taktd.daemon.limits import Charges, LimitExceeded
from taktd.daemon.logbook import log
from taktd.daemon.supervision.lanes import Lane

MESSAGES_PER_TURN: Final = 16
REQUESTS_WAITING_MAX: Final = 16
HELLO_S_MAX: Final = 10.0
FAREWELL_S_MAX: Final = 0.2
FAREWELLS_MAX: Final = 32


class Refused(Exception):
    """An answer of no: a positive errno and a sentence for a person."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Host(Protocol):
    """What the door needs from the supervisor."""

    @property
    def charges(self) -> Charges: ...

    def node_name(self) -> str: ...

    def listing(self, kind: Kind) -> list[dict[str, Any]]: ...

    async def attach(self, connection: Connection, kind: Kind, name: str) -> Lane:
        """The lane, attached for this connection; raises Refused."""

    def claim(self, connection: Connection, lane_id: int, token: int) -> Lane:
        """The lane of a client that was here before the supervisor; raises Refused."""

    def local_answer(self, lane: Lane) -> bytes:
        """What its client answers itself once the deadline has passed; nothing for most."""

    def detach(self, lane: Lane) -> None: ...


class Connection:
    """One client. Everything it holds is given back by `close`, once, whatever ended it."""

    def __init__(self, door: LaneDoor, sock: socket.socket, peer: Peer) -> None:
        self.door, self.socket, self.peer = door, sock, peer
        self.client = ""  # how it calls itself
        self.lanes: dict[int, Lane] = {}
        self.closed = False
        self._greeted = False
        self._requests: deque[Request] = deque()
        self.task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        loop.add_reader(sock.fileno(), self._readable)
        self._patience = loop.call_later(HELLO_S_MAX, self._silent)

    def __str__(self) -> str:
        return f"{self.client or 'client'} ({self.peer})"

    def _silent(self) -> None:
        if not self._greeted:
            self.close("said nothing")

    # ---- receiving ----

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if self.closed:
                return
            try:
                data, _, flags, _ = self.socket.recvmsg(protocol.MESSAGE_BYTES_MAX, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(f"hung up: {error.strerror}")
                return
            if not data:
                self.close("hung up")
                return
            self._received(data, bool(flags & socket.MSG_TRUNC))

    def _received(self, data: bytes, truncated: bool) -> None:
        try:
            if truncated:
                raise Malformed(f"a message longer than {protocol.MESSAGE_BYTES_MAX} bytes")
            request = protocol.unpack(data)
            if len(self._requests) >= REQUESTS_WAITING_MAX:
                raise Malformed(f"more than {REQUESTS_WAITING_MAX} requests without waiting for an answer")
            if (request.type is Type.HELLO) == self._greeted:
                raise Malformed("HELLO comes first, and once")
        except Malformed as malformed:
            self.send(protocol.error(0, errno.EPROTO, f"not understood: {malformed}"))
            self.close(f"sent {malformed}")
            return
        if request.type is Type.HELLO:
            self._hello(request)
            return
        self._requests.append(request)
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._serve())

    def _hello(self, request: Request) -> None:
        low, high, client = request.fields
        self.client = "".join(c if c.isprintable() else "?" for c in client)
        if not low <= protocol.WIRE_VERSION <= high:
            text = (
                f"client speaks wire versions {low} to {high}, this daemon {protocol.WIRE_VERSION}: "
                f"update {'the client (libtakt)' if high < protocol.WIRE_VERSION else 'taktd'}"
            )
            self.send(protocol.error(request.request_id, errno.EPROTO, text))
            self.close("speaks another version")
            return
        self._greeted = True
        self._patience.cancel()
        self.send(protocol.welcome(request.request_id, os.getpid(), self.door.host.node_name()))

    # ---- serving, one request after the other ----

    async def _serve(self) -> None:
        try:
            while self._requests and not self.closed:
                request = self._requests.popleft()
                try:
                    await self._answer(request)
                except Refused as refused:
                    self.send(protocol.error(request.request_id, refused.code, str(refused)))
        finally:
            self.task = None

    async def _answer(self, request: Request) -> None:
        if request.type is Type.ATTACH:
            await self._attach(request)
        elif request.type is Type.DETACH:
            lane = self.lanes.get(request.fields[0])
            if lane is None:
                raise Refused(errno.ENOENT, f"lane {request.fields[0]} is not attached here: attach it first")
            self.release(lane)
            self.send(protocol.detached(request.request_id))
        elif request.type is Type.CLAIM:
            self._claim(request)
        else:
            kind, offset = request.fields
            if kind not in (Kind.LOOP, Kind.MODEL):
                raise Refused(errno.EINVAL, f"list kind {kind} does not exist: 1 is loops, 2 is models")
            objects = self.door.host.listing(Kind(kind))
            self.send(protocol.listing(request.request_id, objects, min(offset, len(objects))))

    def _claim(self, request: Request) -> None:
        lane_id, token = request.fields
        lane = self.lanes.get(lane_id) or self.door.host.claim(self, lane_id, token)
        if lane.id not in self.lanes:
            self.door.host.charges.charge("lanes", self.peer.uid, within_limits=False)
            self.lanes[lane.id] = lane
            log("info", f"{lane.name} claimed by {self}", lane=lane.id, kind=lane.kind.name.lower())
        self.send(protocol.claimed(request.request_id, lane.id))

    async def _attach(self, request: Request) -> None:
        kind, wait_mode, name = request.fields
        if kind not in tuple(Kind) or wait_mode > 2:
            text = f"attach kind {kind}, wait mode {wait_mode}: kinds are 0 to 2, wait modes 0 to 2"
            raise Refused(errno.EINVAL, text)
        host, charges, uid = self.door.host, self.door.host.charges, self.peer.uid
        try:
            charges.charge("lanes", uid)
        except LimitExceeded as exceeded:
            raise Refused(errno.ENOSPC, str(exceeded)) from None
        try:
            lane = await host.attach(self, Kind(kind), name)
        except BaseException:
            charges.release("lanes", uid)
            raise
        # Booked before anything can fail, so that close() gives it back.
        self.lanes[lane.id] = lane
        if self.closed:
            self.release(lane)
            return
        memory = lane.memory
        local = host.local_answer(lane)
        answer = protocol.attached(request.request_id, lane.id, memory.total_size, lane.token, local)
        self.send(answer, (memory.memfd, memory.client_wake))
        memory.close_client_end()
        log("info", f"{name} attached by {self}", lane=lane.id, kind=lane.kind.name.lower())

    # ---- sending ----

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send now or close: a client whose buffer is full does not read its answers."""
        if self.closed:
            return
        try:
            socket.send_fds(self.socket, [data], list(descriptors), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError as error:
            self.close(f"can't be answered: {error.strerror}")

    # ---- the end ----

    def lane_ended(self, lane: Lane, text: str) -> None:
        """Tell the client that its lane is over, and forget it. Clearing the lane is the caller's."""
        self._forget(lane)
        self.send(protocol.lane_ended(lane.id, text))

    def _forget(self, lane: Lane) -> None:
        if self.lanes.pop(lane.id, None) is not None:
            self.door.host.charges.release("lanes", self.peer.uid)

    def release(self, lane: Lane) -> None:
        """Give a lane back."""
        self._forget(lane)
        self.door.host.detach(lane)

    def close(self, why: str) -> None:
        """Give back everything. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._patience.cancel()
        self._requests.clear()
        asyncio.get_running_loop().remove_reader(self.socket.fileno())
        self.socket.close()
        if self.lanes:
            names = ", ".join(lane.name for lane in self.lanes.values())
            log("info", f"{self} {why}; its lanes are freed: {names}")
        for lane in list(self.lanes.values()):
            self.release(lane)
        self.door.gone(self)


class LaneDoor:
    """The listening socket and its connections."""

    def __init__(self, path: Path, host: Host, inherited: socket.socket | None = None) -> None:
        self.path, self.host = path, host
        self.connections: set[Connection] = set()
        self._farewells: set[_Farewell] = set()
        self._acceptor = Acceptor(path, socket.SOCK_SEQPACKET, self._accepted, self._turned_away, inherited)

    @property
    def serving(self) -> bool:
        return self._acceptor.serving

    def _turned_away(self, sock: socket.socket, text: str) -> None:
        if len(self._farewells) >= FAREWELLS_MAX:
            sock.close()
            return
        self._farewells.add(_Farewell(sock, text, self._farewells.discard))

    def _accepted(self, sock: socket.socket) -> None:
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()  # gone already
            return
        try:
            self.host.charges.charge("connections", peer.uid)
        except LimitExceeded as exceeded:
            self._turned_away(sock, str(exceeded))
            return
        self.connections.add(Connection(self, sock, peer))

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.host.charges.release("connections", connection.peer.uid)

    def stop_listening(self) -> None:
        """No new clients; those there stay."""
        self._acceptor.close()

    async def close(self, why: str) -> None:
        """Tell every client that its lanes are over, and end all connections with everything they hold."""
        self._acceptor.close()
        for farewell in list(self._farewells):
            farewell.end()
        tasks = [connection.task for connection in self.connections if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self.connections):
            for lane in list(connection.lanes.values()):
                connection.send(protocol.lane_ended(lane.id, why))
            connection.close(why)


class _Farewell:
    """Somebody who is not let in, and is told why as the answer to what he says first.

    A socket closed with his greeting unread would give him a reset instead of the reason.
    """

    def __init__(self, sock: socket.socket, text: str, gone: Callable[[_Farewell], None]) -> None:
        self._socket, self._text, self._gone = sock, text, gone
        loop = asyncio.get_running_loop()
        loop.add_reader(sock.fileno(), self.end)
        self._patience = loop.call_later(FAREWELL_S_MAX, self.end)

    def end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._patience.cancel()
        request_id = 0
        try:
            request_id = protocol.unpack(self._socket.recv(protocol.MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)).request_id
        except (OSError, Malformed):
            pass
        try:
            answer = protocol.error(request_id, errno.EMFILE, self._text)
            self._socket.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass
        self._socket.close()
        self._gone(self)
