"""Listening sockets that systemd opened before we started (sd_listen_fds(3)), told apart by their type."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from typing import Final

FIRST_DESCRIPTOR: Final = 3


def inherited_sockets(environment: MutableMapping[str, str]) -> dict[socket.SocketKind, socket.socket]:
    """Unix sockets by kind; the variables are removed, so that no child takes them for its own."""
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    found: dict[socket.SocketKind, socket.socket] = {}
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
        kind = socket.SocketKind(sock.type)
        if sock.family == socket.AF_UNIX and kind not in found:
            found[kind] = sock
        else:
            sock.close()  # not ours: an address we never asked for
    return found
