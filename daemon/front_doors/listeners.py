"""The gateway's listeners, as the configuration has them: opened with the right owner and mode, counted, closed."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import zmq

from taktd.daemon.front_doors.lane_backend import LaneBackend
from taktd.daemon.front_doors.zmq_sockets import ZmqDoors
from taktd.ipc import _core
from taktd.ipc.grpc.server import Bounds, GrpcServer, ListenFailed
from taktd.ipc.inference import Principal, Rights

GRACE_S: Final = 0.5
GRPC_SOCKET: Final = "grpc.sock"
UNIX: Final = "unix:"
GROUP: Final = "taktd"  # where nobody has the group, the daemon's own user remains

if TYPE_CHECKING:
    from taktd.daemon.config.configuration import Limits

Message = dict[str, Any]


class DoorRefused(Exception):
    """A listener that can't be opened; the message names it and says what to do."""


class Doors:
    """All listeners of one gateway."""

    def __init__(self, backend: LaneBackend, configured: Message, limits: Limits) -> None:
        self._backend, self._configured, self._limits = backend, configured, limits
        self._zmq: ZmqDoors | None = None
        self._grpc: list[GrpcServer] = []
        self._paths: list[tuple[Path, int]] = []  # sockets of ours and their inodes

    async def open(self) -> list[Message]:
        """Listen everywhere; what is listened at. Raises DoorRefused."""
        doors = [await self._open_grpc(listener) for listener in self._configured["grpc"]]
        if self._configured["zmq"]["on"]:
            doors += self._open_zmq()
        return doors

    def _open_zmq(self) -> list[Message]:
        runtime = Path(self._configured["runtime"])
        self._zmq = ZmqDoors(self._backend, self._configured["zmq"], runtime, self._limits, refuse_if_taken)
        try:
            return self._zmq.open()
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise DoorRefused(f"ZeroMQ can't listen: {error}; choose another address, or `zmq: off`") from None

    # ---- gRPC ----

    async def _open_grpc(self, listener: Message) -> Message:
        address = listener["listen"]
        path: Path | None = None
        if address.startswith(UNIX):
            path = Path(address[len(UNIX) :] or Path(self._configured["runtime"]) / GRPC_SOCKET)
            refuse_if_taken(path)
            address = f"{UNIX}{path}"
        principal = Principal(f"grpc {address}", Rights(listener["rights"]))
        limits = self._limits
        bounds = Bounds(limits.jobs, limits.connections, limits.message_bytes)
        tls = listener["tls"]
        server = GrpcServer(self._backend, principal, bounds, _core.now, by_certificate=tls is not None)
        try:
            port = await server.start(address, _credentials(tls) if tls else None)
        except (ListenFailed, OSError) as error:
            raise DoorRefused(f"{error}; choose another `grpc: listen:`, or free this one") from None
        self._grpc.append(server)
        if path is not None:
            self._paths.append((path, path.stat().st_ino))
            _hand_over(path, listener)
        elif address.endswith(":0"):
            address = f"{address[:-1]}{port}"
        return {"name": "grpc", "address": address, "path": str(path) if path else None, "rights": listener["rights"]}

    # ---- the rest ----

    def publish(self, topic: str, event: Message, tensors: Sequence[bytes] = ()) -> None:
        """An event for whoever subscribes."""
        if self._zmq is not None:
            self._zmq.publish(topic, event, tensors)

    def counters(self) -> Message:
        return self._zmq.counters() if self._zmq is not None else {}

    async def close(self) -> None:
        if self._zmq is not None:
            self._zmq.close()
        for server in self._grpc:
            await server.stop(GRACE_S)
        for path, inode in self._paths:
            with suppress(OSError):
                if path.stat().st_ino == inode:
                    path.unlink()


def refuse_if_taken(path: Path) -> None:
    """gRPC and ZeroMQ take over a path that somebody listens at; only a dead one may be replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError as error:
            raise DoorRefused(f"{path} can't be used: {error.strerror or error}") from None
    raise DoorRefused(f"somebody listens at {path} already: stop that program, or choose another path")


def _hand_over(path: Path, listener: Message) -> None:
    """Owner, group and mode: who may come in. The socket was bound with mode 0600."""
    uid = gid = -1
    try:
        if listener["owner"] is not None:
            uid = pwd.getpwnam(listener["owner"]).pw_uid
        if listener["group"] is not None:
            gid = grp.getgrnam(listener["group"]).gr_gid
    except KeyError as error:
        raise DoorRefused(f"grpc: nobody here is called {error.args[0]}") from None
    if listener["group"] is None:
        with suppress(KeyError, OSError):
            os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)
    try:
        os.chown(path, uid, gid)
        path.chmod(int(listener["mode"], 8))
    except OSError as error:
        raise DoorRefused(f"{path} can't be given to its owner: {error.strerror}") from None


def _credentials(tls: Message) -> grpc.ServerCredentials:
    """Mutual TLS: a client without a certificate of ours is not let in."""
    try:
        key, certificate, clients = (Path(tls[name]).read_bytes() for name in ("key", "certificate", "clients"))
    except OSError as error:
        raise DoorRefused(f"grpc: tls: {error.filename} can't be read: {error.strerror}") from None
    return grpc.ssl_server_credentials([(key, certificate)], clients, require_client_auth=True)
