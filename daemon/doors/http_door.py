"""/metrics and /health/* over HTTP, on loopback or a unix socket; off unless configured. Part of the supervisor.

Answers GET and HEAD, one request a connection. Slow or silent clients are hung up on, and there are never more than a
few of them: who scrapes is a collector every few seconds, and a load balancer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from taktd.daemon.logbook import log
from taktd.daemon.runtime_folder import FolderRefused, listen

REQUEST_BYTES_MAX: Final = 8 << 10
REQUEST_S_MAX: Final = 5.0
CONNECTIONS_MAX: Final = 16
RETRY_S: Final = 1.0
UNIX: Final = "unix:"

#: path → () → (status code, content type, body)
Page = tuple[int, str, bytes]
Pages = Mapping[str, Callable[[], Page]]

_REASONS: Final = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable",
}  # fmt: skip
_TEXT: Final = "text/plain; charset=utf-8"


def state_page(holds: bool, text: str) -> Page:
    """200 where it holds, 503 where it doesn't."""
    return 200 if holds else 503, _TEXT, f"{text}\n".encode()


class HttpDoor:
    """One listener."""

    def __init__(self, address: str, pages: Pages) -> None:
        self.address, self._pages = address, pages
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._connections = 0
        self._trying: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def begin(self) -> None:
        """Listen now, or as soon as it can be: loops don't wait for a port that somebody else has."""
        if problem := await self._tried():
            hint = "it is tried again until it works; free it, or choose another `http: listen:`"
            log("error", f"HTTP can't listen at {self.address}: {problem}\n  to do: {hint}")
            self._trying = asyncio.create_task(self._try_again())

    async def _tried(self) -> str:
        try:
            await self.open()
        except (OSError, FolderRefused) as error:
            return str(error)
        return ""

    async def _try_again(self) -> None:
        while await self._tried():
            await asyncio.sleep(RETRY_S)
        log("notice", f"HTTP listens at {self.address}")

    async def open(self) -> None:
        """Listen. Raises OSError, FolderRefused."""
        if self.address.startswith(UNIX):
            self._path = Path(self.address[len(UNIX) :])
            self._refuse_if_taken(self._path)
            door = listen(self._path, socket.SOCK_STREAM, CONNECTIONS_MAX)
            self._server = await asyncio.start_unix_server(self._converse, sock=door, limit=REQUEST_BYTES_MAX)
        else:
            host, _, port = self.address.rpartition(":")
            host = host.strip("[]")
            self._server = await asyncio.start_server(self._converse, host, int(port), limit=REQUEST_BYTES_MAX)
            self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    @staticmethod
    def _refuse_if_taken(path: Path) -> None:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe,
            suppress(FileNotFoundError, ConnectionRefusedError),
        ):
            probe.connect(str(path))
            raise OSError(98, "somebody listens there already", str(path))

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= CONNECTIONS_MAX:
            writer.close()
            return
        self._connections += 1
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), REQUEST_S_MAX)
            writer.write(self._answer(request))
            await asyncio.wait_for(writer.drain(), REQUEST_S_MAX)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # gone, too slow, or no HTTP
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, request: bytes) -> bytes:
        parts = request.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _response(400, _TEXT, b"not an HTTP/1.1 request\n")
        method, path = parts[0], parts[1].split(b"?")[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"GET and HEAD alone\n", "Allow: GET, HEAD\r\n")
        make = self._pages.get(path)
        page = make() if make else (404, _TEXT, f"there are {', '.join(self._pages)}\n".encode())
        answer = _response(*page)
        return answer if method == b"GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def as_json(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "name": "http", "address": self.address, "path": str(self._path) if self._path else None,
            "serving": self.serving,
        }  # fmt: skip

    async def close(self) -> None:
        if self._trying is not None:
            self._trying.cancel()
        if self._server is None:
            return
        self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _response(code: int, content_type: str, body: bytes, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\nX-Content-Type-Options: nosniff\r\n{more}\r\n"
    )
    return head.encode() + body
