"""The gateway's ZeroMQ sockets: zmq.sock and events.sock in the runtime folder, TCP with CURVE where configured.

libzmq's bind takes a path away from whoever listens there; so each socket has a lock file beside it, and a path is
replaced only by the lock's holder, after a probe found nobody.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq
from zmq import auth
from zmq.auth.asyncio import AsyncioAuthenticator

from taktd.daemon.front_doors.lane_backend import LaneBackend
from taktd.daemon.logbook import log
from taktd.ipc import _core
from taktd.ipc.inference import Principal, Rights
from taktd.ipc.zmq.server import EventPublisher, RequestServer, bind, uid_of

REQUESTS_SOCKET: Final = "zmq.sock"
EVENTS_SOCKET: Final = "events.sock"
GROUPS_KEPT_S: Final = 60.0  # a user put into a group is let in after so long at the latest
USERS_KEPT_MAX: Final = 1024
WARN_EVERY_S: Final = 60.0
MAX_SOCKETS: Final = 4096

Message = dict[str, Any]

if TYPE_CHECKING:
    from taktd.daemon.config.configuration import Limits


class Peers:
    """Addresses of ZeroMQ peers to principals, with the groups of a user looked up once in a while."""

    def __init__(self, backend: LaneBackend) -> None:
        self._backend = backend
        self._known: dict[int, tuple[float, Principal]] = {}

    def principal(self, address: str, user: str) -> Principal:
        """A unix peer is its uid, a TCP peer its CURVE key; anybody else may do nothing."""
        found = uid_of(address)
        if found is None:
            return Principal(f"key {user[:64]}", Rights.INFER if user else Rights.OBSERVE)
        uid, gid = found
        now = time.monotonic()
        kept = self._known.get(uid)
        if kept is not None and now - kept[0] < GROUPS_KEPT_S:
            return kept[1]
        groups = _groups_of(uid, gid)
        principal = Principal(
            f"uid {uid}", Rights.INFER, lambda model: self._backend.allows(model, uid, groups), uid=uid
        )
        if len(self._known) >= USERS_KEPT_MAX:
            self._known.clear()
        self._known[uid] = (now, principal)
        return principal


def _groups_of(uid: int, gid: int) -> frozenset[int]:
    with suppress(KeyError, OSError):
        return frozenset((gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)))
    return frozenset((gid,))


class ZmqDoors:
    """Everything of ZeroMQ that the configuration asks for."""

    def __init__(
        self, backend: LaneBackend, configured: Message, runtime: Path, limits: Limits,
        refuse_if_taken: Callable[[Path], None],
    ) -> None:  # fmt: skip
        self._backend, self._configured, self._runtime = backend, configured, runtime
        self._limits, self._refuse_if_taken = limits, refuse_if_taken
        self._silent_max = (limits.connections_per_uid, limits.connections)
        self._warned_s = -WARN_EVERY_S
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._peers = Peers(backend)
        self._authenticator: AsyncioAuthenticator | None = None
        self._requests: list[RequestServer] = []
        self._events: list[EventPublisher] = []
        self._locks: list[int] = []
        self._paths: list[tuple[Path, int]] = []

    def open(self) -> list[Message]:
        """What is listened at. Raises OSError, zmq.ZMQError."""
        doors = []
        requests, events = self._router(), self._publisher()
        for name, socket, file in (
            ("zmq", requests.socket, REQUESTS_SOCKET), ("events", events.socket, EVENTS_SOCKET),
        ):  # fmt: skip
            path = self._runtime / file
            self._bind(socket, path)
            doors.append({"name": name, "address": f"ipc://{path}", "path": str(path)})
        if self._configured["curve"]:
            doors += self._open_tcp(self._configured["curve"])
        return doors

    def _router(self) -> RequestServer:
        server = RequestServer(
            self._context, self._backend, self._peers.principal, _core.now, self._limits.message_bytes,
            self._silent_max, self._warn,
        )  # fmt: skip
        self._requests.append(server)
        return server

    def _publisher(self) -> EventPublisher:
        publisher = EventPublisher(
            self._context, self._configured["events_high_water"], self._silent_max, self._warn
        )  # fmt: skip
        self._events.append(publisher)
        return publisher

    def _warn(self, complaint: str) -> None:
        """One of those that come together is enough."""
        if time.monotonic() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = time.monotonic()
            log("warning", f"gateway: ZeroMQ: {complaint}")

    def _bind(self, socket: zmq.Socket[Any], path: Path) -> None:
        lock = os.open(
            path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self._locks.append(lock)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._refuse_if_taken(path)
        bind(socket, str(path))
        self._paths.append((path, path.stat().st_ino))

    def _open_tcp(self, curve: Mapping[str, str]) -> list[Message]:
        """Sockets of their own: CURVE would hold for a unix socket bound to the same one."""
        public, secret = auth.load_certificate(curve["secret_key"])
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=curve["clients"])
        doors = []
        for name, key in (("zmq", "listen"), ("events", "events")):
            address = self._configured[key]
            if not address:
                continue
            socket = (self._router() if key == "listen" else self._publisher()).socket
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret or b"")
            socket.bind(address)
            doors.append({"name": name, "address": socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0"), "path": None})
        return doors

    def publish(self, topic: str, event: Message, tensors: Sequence[bytes]) -> None:
        for publisher in self._events:
            publisher.publish(topic, event, tensors)

    def counters(self) -> Message:
        requests = self._requests
        cut = sum(s.connections_cut for s in requests) + sum(e.connections_cut for e in self._events)
        return {
            "zmq_connections": sum(s.connections for s in requests), "zmq_requests": sum(s.requests for s in requests),
            "zmq_connections_cut": cut,
            "zmq_replies_dropped": sum(s.replies_dropped for s in requests),
            "zmq_clients_gone": sum(s.clients_gone for s in requests),
            "events_sent": sum(e.sent for e in self._events), "events_dropped": sum(e.dropped for e in self._events),
        }  # fmt: skip

    def close(self) -> None:
        for requests in self._requests:
            requests.close()
        for publisher in self._events:
            publisher.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        for path, inode in self._paths:
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()
        for lock in self._locks:
            os.close(lock)
        self._context.destroy(0)
