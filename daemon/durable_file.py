"""Files that are there whole or not at all, whenever the process or the machine stops.

Written beside their place, made durable, then renamed over it, and the folder made durable too. What is kept for later
(a cache, a state) is *sealed*: its checksum is inside, and it is believed only if that, its format and its owner agree.

Everything here is system calls from ``os``, one by one, so that a test can let each of them fail in turn.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

__all__ = ["SEALED_BYTES_MAX", "SealBroken", "read_sealed", "sync_folder", "write_durable", "write_sealed"]

SEALED_BYTES_MAX: Final = 16 << 20
WRITE_BYTES: Final = 1 << 20


class SealBroken(Exception):
    """A sealed file that must not be believed, and why."""


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:WRITE_BYTES]) :]


def sync_folder(folder: Path) -> None:
    """Makes names in the folder durable. Raises ``OSError``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, data: bytes, mode: int = 0o640, *, outlast_power: bool = True) -> None:
    """Puts ``data`` at ``path``. Raises ``OSError``; then the old content is there, or the new where only the last
    step, making the folder durable, failed. outlast_power: False where a reboot makes it worthless anyway."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            write_all(descriptor, data)
            if outlast_power:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # the next writer of the same process takes its place
        raise
    if outlast_power:
        sync_folder(path.parent)


def _checksum(key: str, body: Any) -> str:
    return hashlib.sha256(json.dumps([key, body], sort_keys=True).encode()).hexdigest()


def write_sealed(path: Path, key: str, body: Any, *, outlast_power: bool = True) -> None:
    """JSON under a key that says what it is and of what. Raises ``OSError``."""
    sealed = json.dumps({"key": key, "sha256": _checksum(key, body), "body": body})
    write_durable(path, sealed.encode() + b"\n", outlast_power=outlast_power)


def read_sealed(path: Path, key: str) -> Any:
    """The body; ``None`` if there is no file. Raises ``SealBroken`` with the reason if it must not be believed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise SealBroken(f"{path} is a link") from None
        raise SealBroken(f"{path} can't be read: {(error.strerror or str(error)).lower()}") from None
    if problem := _foreign(os.fstat(descriptor)):
        os.close(descriptor)
        raise SealBroken(f"{path} {problem}")
    with os.fdopen(descriptor, "rb") as file:  # of a folder it would be an OSError
        try:
            stored = json.loads(file.read(SEALED_BYTES_MAX + 1))
            matches = stored["sha256"] == _checksum(stored["key"], stored["body"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise SealBroken(f"{path} is damaged: cut off, or no JSON of ours") from None
    if not matches:
        raise SealBroken(f"{path} is damaged: its content does not match its checksum")
    if stored["key"] != key:
        raise SealBroken(f"{path} belongs to something else: found {stored['key']!r}, expected {key!r}")
    return stored["body"]


def _foreign(status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to uid {status.st_uid}: allowed are root and {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return f"can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o})"
    return ""
