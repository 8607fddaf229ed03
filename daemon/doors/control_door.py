"""control.sock: one JSON object a line, asked by `taktctl`, answered by the supervisor.

Request {"op": …, …}; answer {"ok": true, …} or {"ok": false, "error": {"what", "hint", "kind"}}. what and hint are for
people; kind is for programs: "unknown" where what was named is not there, "pinned" where the configuration says
otherwise, "" for every other no. Everybody may ask; changing something is for root, the daemon's own user and members
of group taktd-admin.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Allow
from taktd.daemon.doors.acceptor import Acceptor
from taktd.daemon.doors.peers import Peer, peer_of, rule_of
from taktd.daemon.logbook import log

LINE_BYTES_MAX: Final = 1 << 20
CONNECTIONS_MAX: Final = 64
IDLE_S_MAX: Final = 60.0
ADMINS: Final = "taktd-admin"  # absent where the package is not installed: then it admits nobody

Answer = dict[str, Any]
Operation = Callable[[dict[str, Any]], Awaitable[Answer]]


class ControlError(Exception):
    """An answer of no, with what to do, and its kind."""

    def __init__(self, what: str, hint: str = "", kind: str = "") -> None:
        super().__init__(what)
        self.hint, self.kind = hint, kind

    def as_answer(self) -> Answer:
        return {"ok": False, "error": {"what": str(self), "hint": self.hint, "kind": self.kind}}


def _turn_away(sock: socket.socket, text: str) -> None:
    sock.close()  # taktctl says that nobody answered; there is no descriptor to say more with


class ControlDoor:
    """Serves operations: `asking` for everybody, `changing` for the owner and root."""

    def __init__(
        self, path: Path, asking: Mapping[str, Operation], changing: Mapping[str, Operation],
        inherited: socket.socket | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._asking, self._changing = asking, changing
        self._changers = rule_of(Allow(groups=(ADMINS,)))
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(path, socket.SOCK_STREAM, self._accepted, _turn_away, inherited)

    @property
    def serving(self) -> bool:
        return self._acceptor.serving

    def _accepted(self, sock: socket.socket) -> None:
        if len(self._tasks) >= CONNECTIONS_MAX:
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._converse(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, sock: socket.socket) -> None:
        try:
            peer = peer_of(sock)
            reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_BYTES_MAX)
        except OSError:
            sock.close()
            return
        try:
            while line := await asyncio.wait_for(reader.readline(), IDLE_S_MAX):
                answer = await self._answer(peer, line)
                writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
                await asyncio.wait_for(writer.drain(), IDLE_S_MAX)
        except (OSError, asyncio.TimeoutError, ValueError):
            pass  # gone, idle, or a line without an end
        finally:
            writer.close()

    async def _answer(self, peer: Peer, line: bytes) -> Answer:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("op"), str):
                raise ControlError("not a request", 'send one JSON object a line: {"op": "status"}')
            return {"ok": True, **await self._operation(peer, request["op"])(request)}
        except ControlError as error:
            return error.as_answer()
        except (ValueError, RecursionError):
            return ControlError("not JSON", "send one JSON object a line").as_answer()
        except OSError as error:  # of the operation: nothing is read or written to the peer here
            what = f"{request['op'][:40]} failed: {(error.strerror or str(error)).lower()}"
            if error.filename:
                what += f" ({error.filename})"
            log("error", what, event="operation-failed")
            return ControlError(what, "is that disk full, or broken? the log of taktd has the same line").as_answer()

    def _operation(self, peer: Peer, name: str) -> Operation:
        if name in self._asking:
            return self._asking[name]
        if name not in self._changing:
            known = ", ".join([*self._asking, *self._changing])
            raise ControlError(f"unknown operation {name[:40]!r}", f"known are {known}")
        if not self._changers.admits(peer, os.geteuid()):
            raise ControlError(f"{name} is not allowed for uid {peer.uid}", f"run it as root or join group {ADMINS}")
        return self._changing[name]

    async def close(self) -> None:
        """Stop listening and end the conversations."""
        self._acceptor.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
