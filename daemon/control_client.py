"""Asking a running taktd over control.sock; the other end of control_door.py."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from taktd.daemon.runtime_folder import control_socket_path

ANSWER_S_MAX: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 << 20


class NobodyThere(Exception):
    """No daemon answers; the message names the path."""


class AnswerNo(Exception):
    """The daemon answered no; hint says what to do, kind is for programs (control_door.py)."""

    def __init__(self, what: str, hint: str, kind: str = "") -> None:
        super().__init__(what)
        self.hint, self.kind = hint, kind


def ask(
    op: str, environment: Mapping[str, str] = os.environ, *, answer_s_max: float = ANSWER_S_MAX, **arguments: Any
) -> dict[str, Any]:
    """The answer of one operation, without its "ok". Raises NobodyThere, AnswerNo."""
    path = control_socket_path(environment)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(answer_s_max)
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            line = _line(connection)
    except (OSError, ValueError) as error:
        raise NobodyThere(_explained(path, error, answer_s_max)) from None
    answer: dict[str, Any] = json.loads(line)
    if not answer.pop("ok"):
        refusal = answer["error"]
        raise AnswerNo(refusal["what"], refusal["hint"], refusal["kind"])
    return answer


def _line(connection: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ValueError("the connection ended without an answer")
        data += part
        if len(data) > ANSWER_BYTES_MAX:
            raise ValueError("the answer has no end")
    return bytes(data)


def _explained(path: Path, error: Exception, answer_s_max: float) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no daemon at {path}: the socket does not exist"
    if isinstance(error, ConnectionRefusedError):
        return f"no daemon at {path}: nobody listens there any more"
    if isinstance(error, PermissionError):
        return f"{path} can't be reached: permission denied"
    if isinstance(error, TimeoutError):
        return f"the daemon at {path} did not answer within {answer_s_max:g} s"
    return f"the daemon at {path} did not answer: {getattr(error, 'strerror', None) or error}"
