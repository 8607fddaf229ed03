"""Connections that have asked for nothing yet: how many of them one user may have. Part of the gateway.

Who asks for inference is charged, and beyond the limit refused in words (server.py). A client that connects and says
nothing can't be told anything; libzmq keeps its descriptor and its buffers. So such connections are counted as they are
accepted, by the peer's uid (by its address where it comes over TCP), and one too many is hung up on.

libzmq owns the descriptors and tells of them on a monitor socket, later: by then one may be closed, and its number used
again. So what is looked at is a duplicate, which stays what it is, and it is judged by what it is: a connection of this
listener, of that user.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Final

UCRED: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


class SilentConnections:
    """Of one listener, by descriptor, from being accepted until they ask or end."""

    def __init__(self, per_peer_max: int, in_all_max: int, listens_at: Callable[[], str]) -> None:
        """listens_at: where the listener is bound, as libzmq says it."""
        self._per_peer_max, self._in_all_max, self._listens_at = per_peer_max, in_all_max, listens_at
        self._peers: dict[int, str] = {}
        self._held: Counter[str] = Counter()
        self.cut = 0

    def __len__(self) -> int:
        return len(self._peers)

    def held(self, peer: str) -> int:
        """How many one peer has: "uid 1000", or an address."""
        return self._held[peer]

    def accepted(self, descriptor: int) -> str:
        """One more; a sentence where it was one too many and has been hung up on, else ""."""
        self.gone(descriptor)
        try:
            with _duplicate(descriptor) as connection:
                if not came_in_at(connection, self._listens_at()):
                    return ""
                peer = peer_of(connection)
                if self._held[peer] < self._per_peer_max and len(self._peers) < self._in_all_max:
                    self._peers[descriptor] = peer
                    self._held[peer] += 1
                    return ""
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return ""  # it has gone by itself
        self.cut += 1
        return (
            f"{peer} is hung up on: it has {self._held[peer]} connections that have asked for nothing, "
            f"{self._per_peer_max} are allowed (limits.connections_per_uid); all have {len(self._peers)}, "
            f"{self._in_all_max} are allowed (limits.connections)"
        )

    def gone(self, descriptor: int) -> None:
        """It asked for inference, and is charged from now on; or it has ended."""
        peer = self._peers.pop(descriptor, None)
        if peer is not None:
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]


def _duplicate(descriptor: int) -> socket.socket:
    """Raises OSError: it is no socket, or closed."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def came_in_at(connection: socket.socket, address: str) -> bool:
    """Whether a listener bound at ipc://PATH or tcp://HOST:PORT has accepted it."""
    name = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        return address == f"ipc://{os.fsdecode(name)}"
    return isinstance(name, tuple) and address.startswith("tcp://") and address.endswith(f":{name[1]}")


def peer_of(connection: socket.socket) -> str:
    """Who is at the other end, as far as the kernel knows."""
    if connection.family == socket.AF_UNIX:
        _, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
        return f"uid {uid}"
    return str(connection.getpeername()[0])
