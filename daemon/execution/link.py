"""The socket between the supervisor and one executor: JSON messages with descriptors, one datagram each.

Both ends are ours and of one version (an executor is started by its supervisor or adopted after a check), so a message
that does not parse is a defect and raises; it is never answered.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["MESSAGE_BYTES_MAX", "ExecutorLink", "LinkClosed"]

MESSAGE_BYTES_MAX: Final = 128 << 10  # a plan of 64 loops with their layouts is some 60 KiB
DESCRIPTORS_MAX: Final = 250  # SCM_MAX_FD of the kernel is 253

Message = dict[str, Any]


class LinkClosed(Exception):
    """The other process is gone."""


class ExecutorLink:
    """One end. ``send`` and ``receive`` never block: SOCK_SEQPACKET with MSG_DONTWAIT."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES_MAX)

    @staticmethod
    def pair() -> tuple[ExecutorLink, socket.socket]:
        """The supervisor's end, and the socket that the executor inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_BYTES_MAX)
        return ExecutorLink(ours), theirs

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Descriptors are duplicated into the message: the caller keeps its own. Raises ``LinkClosed``."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MESSAGE_BYTES_MAX or len(descriptors) > DESCRIPTORS_MAX:
            raise ValueError(
                f"message {message.get('op')!r}: {len(data)} bytes and {len(descriptors)} descriptors; "
                f"allowed {MESSAGE_BYTES_MAX} and {DESCRIPTORS_MAX}"
            )
        try:
            socket.send_fds(self.socket, [data], list(descriptors))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise LinkClosed from error

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors (the caller's to close), ``None`` if there is none. Raises
        ``LinkClosed``."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self.socket, MESSAGE_BYTES_MAX + 1, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise LinkClosed from error
        if not data:
            raise LinkClosed
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError(f"message of more than {MESSAGE_BYTES_MAX} bytes or {DESCRIPTORS_MAX} descriptors")
        message: Message = json.loads(data)
        return message, descriptors

    def close(self) -> None:
        self.socket.close()
