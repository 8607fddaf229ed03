"""Accepting on a unix socket without ever falling over: not for want of descriptors, not for clients that vanish."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from taktd.daemon.logbook import log
from taktd.daemon.runtime_folder import listen

BACKLOG: Final = 1024
ACCEPTS_PER_TURN: Final = 64
PAUSE_S: Final = 0.25


class Acceptor:
    """Hands each new connection on. One descriptor is kept in reserve, to say no with when there are none left."""

    def __init__(
        self, path: Path, kind: socket.SocketKind, accepted: Callable[[socket.socket], None],
        turned_away: Callable[[socket.socket, str], None], inherited: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """inherited: a listening socket from the service manager, whose path is not ours to remove."""
        self._accepted, self._turned_away = accepted, turned_away
        self._path = path
        self._ours = inherited is None
        self._socket: socket.socket | None = inherited or listen(path, kind, BACKLOG)
        self._socket.setblocking(False)
        self._inode = path.stat().st_ino
        self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._pause: asyncio.TimerHandle | None = None
        self._complained = False
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    @property
    def serving(self) -> bool:
        """Whether clients that look for the path still find us there."""
        try:
            return self._socket is not None and self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def _readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._socket is None:
                return
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._no_descriptors(error)
                    return
                continue  # the client gave up between connect and accept
            self._complained = False
            sock.setblocking(False)
            self._accepted(sock)

    def _no_descriptors(self, error: OSError) -> None:
        if not self._complained:
            log(
                "warning", f"{self._path.name}: {error.strerror}; clients are refused until there are descriptors again"
            )
            self._complained = True
        assert self._socket is not None
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        try:
            sock, _ = self._socket.accept()
            sock.setblocking(False)
            self._turned_away(sock, f"the daemon has no descriptors left ({error.strerror}): close some connections")
        except OSError:
            pass
        # Without a pause this would spin for as long as clients knock.
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._pause = loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._reserve < 0:
            try:
                self._reserve = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                pass  # the next one that is turned away makes room
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._readable)

    def close(self) -> None:
        """Stop listening and take the path away."""
        if self._socket is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        if self._ours and self.serving:
            self._path.unlink(missing_ok=True)
        self._socket.close()
        self._socket = None
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
