"""Executors of a supervisor that died present themselves to this one, lanes in hand (see grace.py).

`gather` waits for them, a bounded time, at start. What they brought is judged by nobody else but its kernel-given
process id: only processes that the predecessor wrote down are listened to.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from taktd.daemon.execution.grace import PROTOCOL
from taktd.daemon.execution.link import ExecutorLink, LinkClosed
from taktd.daemon.handover.predecessor import Expected
from taktd.daemon.logbook import log
from taktd.daemon.runtime_folder import EXECUTORS_SOCKET, OPEN_TO_US, listen
from taktd.daemon.supervision.lane_memory import LaneMemory

BACKLOG: Final = 64
UCRED: Final = struct.Struct("iII")
FENCED_S_MAX: Final = 5.0  # until the memory of a killed executor is torn down

Message = dict[str, Any]


@dataclass
class Ledger:
    """One device's ledger as an executor brought it: files, and lanes with what was said about them."""

    ledger_fd: int
    stats_fd: int
    journal_fd: int = -1  # only the device's own executor has it
    lanes: list[tuple[Message, LaneMemory]] = field(default_factory=list)

    def close(self) -> None:
        """Whoever takes descriptors over sets them to -1, or takes the lanes out."""
        for descriptor in (self.ledger_fd, self.stats_fd, self.journal_fd):
            if descriptor >= 0:
                os.close(descriptor)
        for _, memory in self.lanes:
            memory.close()


@dataclass(eq=False)
class Heir:
    """An executor that has presented itself whole. ledgers: by device, its own first."""

    expected: Expected
    link: ExecutorLink
    head: Message = field(default_factory=dict)
    loaded: Message = field(default_factory=dict)
    serve: Message = field(default_factory=dict)
    owned: list[str] = field(default_factory=list)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    inodes: dict[tuple[str, int], int] = field(default_factory=dict)  # of each lane's memory: which one it has

    @property
    def device(self) -> str:
        return self.expected.device

    def take(self, message: Message, descriptors: list[int]) -> bool:
        """One message; True when that was the last one. Raises KeyError, ValueError for what is not understood."""
        op = message["op"]
        if op == "present":
            devices = [message["device"], *message["homes"]]
            if message["protocol"] != PROTOCOL or message["device"] != self.device:
                raise ValueError(f"speaks protocol {message['protocol']}, for {message['device']}")
            files = iter(descriptors)
            self.head = message
            for device in devices:
                self.ledgers[device] = Ledger(next(files), next(files))
                if device == self.device:
                    self.ledgers[device].journal_fd = next(files)
        elif op == "present.lanes":
            given = iter(descriptors)
            memories = [LaneMemory(entry["layout"], next(given), next(given), -1) for entry in message["lanes"]]
            self.ledgers[message["device"]].lanes += zip(message["lanes"], memories, strict=True)
            for entry, memory in zip(message["lanes"], memories, strict=True):
                self.inodes[message["device"], entry["lane"]] = os.fstat(memory.memfd).st_ino
        elif op == "present.loaded":
            self.loaded = message["loaded"]
        elif op == "present.serve":
            self.serve = message["serve"]
        elif op == "present.end":
            self.owned = message["owned"]
            return True
        else:
            raise ValueError(f"message {op!r}")
        return False

    def close(self, link: bool = True) -> None:
        """What nobody took over; the link too, unless somebody did."""
        for ledger in self.ledgers.values():
            ledger.close()
        self.ledgers = {}
        if link:
            self.link.close()


class Reception:
    """The private socket while it is open."""

    def __init__(self, folder: Path, expected: Iterable[Expected]) -> None:
        self._awaited = {one.pid: one for one in expected}
        self.heirs: list[Heir] = []
        self._coming: set[Heir] = set()
        self._done = asyncio.Event()
        self._path = folder / EXECUTORS_SOCKET
        self._socket = listen(self._path, socket.SOCK_SEQPACKET, BACKLOG, OPEN_TO_US)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._accept)
        for one in self._awaited.values():
            loop.add_reader(one.pidfd, self._died, one)

    def _accept(self) -> None:
        with suppress(OSError):
            sock, _ = self._socket.accept()
            pid, uid, _ = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
            if uid not in (0, os.geteuid()) or pid not in self._awaited:
                sock.close()
                return
            heir = Heir(self._awaited[pid], ExecutorLink(sock))
            self._coming.add(heir)
            asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, heir)

    def _readable(self, heir: Heir) -> None:
        try:
            while (received := heir.link.receive()) is not None:
                if heir.take(*received):
                    self._coming.discard(heir)
                    asyncio.get_running_loop().remove_reader(heir.link.fileno())
                    self.heirs.append(heir)
                    self._settle(heir.expected)
                    return
        except LinkClosed:
            self._refuse(heir)
        except (KeyError, ValueError, TypeError, StopIteration) as error:
            log("warning", f"executor {heir.device} (pid {heir.expected.pid}) is not understood: {error}")
            self._refuse(heir)

    def _refuse(self, heir: Heir) -> None:
        self._coming.discard(heir)
        asyncio.get_running_loop().remove_reader(heir.link.fileno())
        heir.close()

    def _died(self, one: Expected) -> None:
        self._settle(one)

    def _settle(self, one: Expected) -> None:
        asyncio.get_running_loop().remove_reader(one.pidfd)
        self._awaited.pop(one.pid, None)
        if not self._awaited:
            self._done.set()

    async def wait(self, seconds: float) -> None:
        """Until each has come or died, or time is up."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._done.wait(), seconds)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        for one in self._awaited.values():
            loop.remove_reader(one.pidfd)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        for heir in list(self._coming):
            self._refuse(heir)


async def gather(folder: Path, expected: tuple[Expected, ...], seconds: float) -> list[Heir]:
    """The executors that came in time, whole."""
    reception = Reception(folder, expected)
    try:
        await reception.wait(seconds)
    finally:
        reception.close()
    return reception.heirs


def fence(expected: Iterable[Expected]) -> None:
    """Ends executors that can't be taken over, and waits until nothing of them writes any more."""
    ended = list(expected)
    for one in ended:
        log("warning", f"executor {one.device} of the taktd before (pid {one.pid}) is ended", pid=one.pid)
        one.kill()
    poll = select.poll()
    for one in ended:
        poll.register(one.pidfd, select.POLLIN)
    left = {one.pidfd for one in ended}
    while left and (fired := poll.poll(FENCED_S_MAX * 1000)):
        for descriptor, _ in fired:
            poll.unregister(descriptor)
            left.discard(descriptor)
    for one in ended:
        os.close(one.pidfd)
