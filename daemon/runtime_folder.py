"""The folders of one running taktd: where its sockets, its lock and its state are.

Runtime folder (sockets, lock; gone after a reboot): $RUNTIME_DIRECTORY (systemd), $TAKTD_RUNTIME_DIR, /run/taktd for
root, $XDG_RUNTIME_DIR/taktd otherwise. State folder (caches, recordings): $STATE_DIRECTORY, $TAKTD_STATE_DIR,
/var/lib/taktd for root, $XDG_STATE_HOME/taktd otherwise. Either is one taktd's alone. Clients look for the socket by
the same names (see `lane_socket_path`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LANES_SOCKET: Final = "lanes.sock"
CONTROL_SOCKET: Final = "control.sock"
EXECUTORS_SOCKET: Final = "executors.sock"
LOCK_FILE: Final = "taktd.lock"
STATE_LOCK_FILE: Final = "state.lock"  # another name: one folder may be both
EXECUTORS_FILE: Final = "executors.json"
OPEN_TO_ALL: Final = 0o111  # umasks at bind; rights are judged by peer
OPEN_TO_US: Final = 0o177
RUNTIME_HINT: Final = "set TAKTD_RUNTIME_DIR to a folder that this user can write, or change the owner of that one"
STATE_HINT: Final = "set TAKTD_STATE_DIR to a folder that this user can write, or change the owner of that one"
SOCKET_PATH_BYTES_MAX: Final = 107  # sun_path with its NUL

Environment = Mapping[str, str]


class FolderRefused(Exception):
    """A folder that can't be used; the message says what to do."""


class AlreadyRunning(Exception):
    """Another taktd has the folder; pid is 0 where it is not known."""

    def __init__(self, folder: Path, pid: int) -> None:
        super().__init__(f"another taktd{f' (pid {pid})' if pid else ''} uses {folder}")
        self.folder, self.pid = folder, pid


def _systemd_folder(environment: Environment, name: str) -> Path | None:
    # systemd joins several folders by colons; ours is the first.
    value = environment.get(name, "").split(":")[0]
    return Path(value) if value else None


def runtime_folder(environment: Environment, uid: int) -> Path:
    """Where this daemon's sockets belong; FolderRefused when nothing says."""
    if folder := _systemd_folder(environment, "RUNTIME_DIRECTORY"):
        return folder
    if value := environment.get("TAKTD_RUNTIME_DIR"):
        return Path(value).absolute()
    if uid == 0:
        return Path("/run/taktd")
    if value := environment.get("XDG_RUNTIME_DIR"):
        return Path(value) / "taktd"
    raise FolderRefused(
        "no folder for the sockets: neither TAKTD_RUNTIME_DIR nor XDG_RUNTIME_DIR is set\n"
        "  to do: export TAKTD_RUNTIME_DIR=/tmp/taktd-$(id -u), in this shell and in those of taktctl and of clients"
    )


def state_folder(environment: Environment, uid: int) -> Path:
    """Where caches and recordings belong."""
    if folder := _systemd_folder(environment, "STATE_DIRECTORY"):
        return folder
    if value := environment.get("TAKTD_STATE_DIR"):
        return Path(value).absolute()
    if uid == 0:
        return Path("/var/lib/taktd")
    home = environment.get("XDG_STATE_HOME")
    return (Path(home) if home else Path(environment.get("HOME", "/nonexistent")) / ".local/state") / "taktd"


def lane_socket_path(environment: Environment) -> Path:
    """The lane socket as every client finds it: $TAKTD_SOCKET, then the runtime folders, in a fixed order."""
    if value := environment.get("TAKTD_SOCKET"):
        return Path(value)
    candidates = []
    if value := environment.get("TAKTD_RUNTIME_DIR"):
        candidates.append(Path(value))
    if value := environment.get("XDG_RUNTIME_DIR"):
        candidates.append(Path(value) / "taktd")
    candidates.append(Path("/run/taktd"))
    found = [folder / LANES_SOCKET for folder in candidates]
    return next((path for path in found if path.exists()), found[0])


def control_socket_path(environment: Environment) -> Path:
    """The control socket beside the lane socket that clients find."""
    return lane_socket_path(environment).with_name(CONTROL_SOCKET)


def make_folder(folder: Path, mode: int, hint: str = RUNTIME_HINT) -> None:
    """Create a folder, or check one that is there: nobody else may put or swap files in it."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FolderRefused(f"{folder} can't be made: {reason}\n  to do: {hint}") from None
    if status.st_uid not in (os.geteuid(), 0):
        raise FolderRefused(f"{folder} belongs to uid {status.st_uid}, not to us ({os.geteuid()})\n  to do: {hint}")
    if status.st_mode & stat.S_IWOTH:
        raise FolderRefused(f"{folder} can be written by everybody (mode {status.st_mode & 0o7777:04o}): chmod o-w it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FolderRefused(f"{folder} can't be written by uid {os.geteuid()}\n  to do: {hint}")
    # mkdir is subject to the umask, and clients of other users must be able to reach the sockets.
    if status.st_uid == os.geteuid() and status.st_mode & 0o777 != mode:
        folder.chmod(mode)


@dataclass
class FolderLock:
    """Held as long as the daemon lives; the kernel gives it back at its death, whatever that was."""

    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


def lock_folder(folder: Path, name: str = LOCK_FILE) -> FolderLock:
    """Take the folder's lock or raise AlreadyRunning."""
    path = folder / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise AlreadyRunning(folder, int(text) if text.isdigit() else 0) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return FolderLock(descriptor)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def listen(path: Path, kind: socket.SocketKind, backlog: int, umask: int = OPEN_TO_ALL) -> socket.socket:
    """Bind and listen at a path in the locked folder; mode 0666 whatever the umask of the process.

    What lies there is left over from a daemon that is gone: only the holder of the lock calls this.
    """
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise FolderRefused(f"{path} is longer than a socket's path may be ({SOCKET_PATH_BYTES_MAX} bytes)")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    door = socket.socket(socket.AF_UNIX, kind)
    try:
        door.setblocking(False)
        with _umask(umask):
            door.bind(os.fspath(path))
        door.listen(backlog)
    except BaseException:
        door.close()
        raise
    return door
