"""What systemd is told: datagrams to $NOTIFY_SOCKET. Without systemd nothing is sent and nothing is missed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends to the socket that the environment names; never blocks, never fails the daemon."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # "@" marks the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        pid, interval = environment.get("WATCHDOG_PID", ""), environment.get("WATCHDOG_USEC", "")
        meant = self._address and interval.isdigit() and pid in ("", str(os.getpid()))
        #: The watchdog's time-out in ns, 0 where there is none. Feed it in less than half of that.
        self.watchdog_ns = int(interval) * 1000 if meant else 0

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            pass  # a manager that is gone or slow must not stop a daemon that works

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}", f"MAINPID={os.getpid()}")

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def extend(self, seconds: int) -> None:
        """The start, or the end, takes longer: systemd waits for at least so long from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={seconds * 1_000_000}")

    def reloading(self, now_ns: int) -> None:
        """now_ns: CLOCK_MONOTONIC, so that systemd knows which reload this is."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_ns // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def feed_watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
