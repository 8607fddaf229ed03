"""A connection to lanes.sock that knows only docs/wire.md, to be well-behaved or not.

Offsets and numbers are written down a second time on purpose.
"""

from __future__ import annotations

import os
import socket
import struct

from tests.fakes.raw_lane import RawLane

HEADER = struct.Struct("<IHHIi")
MAGIC = int.from_bytes(b"TKT1", "little")
HELLO, WELCOME, ATTACH, ATTACHED, DETACH, DETACHED, LIST, LISTING, ERROR, LANE_ENDED = range(1, 11)


class RawConnection:
    """Each method sends at once; `receive` waits up to timeout_s."""

    def __init__(self, path: str, timeout_s: float = 10.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(timeout_s)
        self.socket.connect(path)
        self.number = 0

    def send(self, kind: int, body: bytes = b"") -> int:
        self.number += 1
        self.socket.send(HEADER.pack(MAGIC, kind, 0, self.number, 0) + body)
        return self.number

    def receive(self) -> tuple[int, int, bytes, list[int]]:
        """type, code, body, descriptors; type 0 when the daemon hung up."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, 8192, 8)
        if not data:
            return 0, 0, b"", []
        magic, kind, reserved, _, code = HEADER.unpack_from(data)
        assert (magic, reserved) == (MAGIC, 0)
        return kind, code, data[HEADER.size :], descriptors

    def hello(self, low: int = 1, high: int = 1, name: bytes = b"raw") -> int:
        return self.send(HELLO, struct.pack("<II64s", low, high, name))

    def attach(self, name: str, kind: int = 0) -> int:
        return self.send(ATTACH, struct.pack("<II64s", kind, 0, name.encode()))

    def attached(self, name: str) -> RawLane:
        """HELLO, ATTACH, and the lane."""
        self.hello()
        assert self.receive()[0] == WELCOME
        self.attach(name)
        kind, code, body, descriptors = self.receive()
        assert kind == ATTACHED, (code, body)
        memfd, wake = descriptors
        lane = RawLane(memfd, socket.socket(fileno=wake))
        os.close(memfd)
        return lane

    def close(self) -> None:
        self.socket.close()
