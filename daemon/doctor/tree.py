"""A machine's files below a system root: "/" for this machine, any folder for a recorded one.

Every path is resolved inside the root, symbolic links too, so that a recorded tree never answers with this machine's
files. Only reads. Called by the checks; knows nothing of what a file means.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FILE_BYTES_MAX: Final = 4 << 20
READ_BYTES: Final = 64 << 10
LINKS_MAX: Final = 40  # as the kernel's ELOOP


class Unreadable(Exception):
    """The file is there but this user may not read it: the check's answer is unknown, not no."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


@dataclass(frozen=True, slots=True)
class Process:
    """One entry of /proc. command is argv; scheduling and limits are None where they can't be read."""

    pid: int
    command: tuple[str, ...]
    core_last: int
    policy: int  # 0 other, 1 fifo, 2 round robin, 6 deadline
    priority: int  # real-time priority, 0 without


class Tree:
    """Read access below root. Missing files read as None or empty; a forbidden one raises Unreadable."""

    def __init__(self, root: Path | str = "/") -> None:
        self.root = Path(root).resolve()

    @property
    def is_live(self) -> bool:
        """True for the machine this runs on, where more can be asked than files."""
        return self.root == Path("/")

    def locate(self, path: str) -> Path | None:
        """Resolve path (absolute, as on the machine) to where it lies; None where it leads nowhere."""
        if self.is_live:
            return Path(path)
        pending = [part for part in reversed(path.split("/")) if part]
        place = self.root
        links = 0
        while pending:
            part = pending.pop()
            if part == "..":
                place = self.root if place == self.root else place.parent
                continue
            candidate = place / part
            if candidate.is_symlink():
                links += 1
                if links > LINKS_MAX:
                    return None
                target = os.readlink(candidate)
                if target.startswith("/"):
                    place = self.root
                pending.extend(piece for piece in reversed(target.split("/")) if piece and piece != ".")
                continue
            place = candidate
        return place

    def status(self, path: str) -> os.stat_result | None:
        """stat(2) of path, following links within the root; None if it isn't there."""
        place = self.locate(path)
        if place is None:
            return None
        try:
            return os.stat(place)
        except PermissionError as error:
            raise Unreadable(path, error.strerror or "permission denied") from None
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return self.status(path) is not None

    def text(self, path: str) -> str | None:
        """A file's text, stripped of white space at its ends; None if it isn't there or isn't a plain file."""
        place = self.locate(path)
        if place is None:
            return None
        try:
            if not stat.S_ISREG(os.stat(place).st_mode):
                return None
            with open(place, "rb", buffering=0) as file:
                # In pieces: /proc/sys answers ENOMEM to a read of megabytes.
                content = b""
                while len(content) < FILE_BYTES_MAX and (piece := file.read(READ_BYTES)):
                    content += piece
            return content.decode("utf-8", "replace").strip("\0 \n\t")
        except PermissionError as error:
            raise Unreadable(path, error.strerror or "permission denied") from None
        except OSError:
            return None  # gone meanwhile, or a sysfs file that has no value on this machine (EIO, ENODATA)

    def number(self, path: str) -> int | None:
        """A file's decimal integer, None where there is none."""
        text = self.text(path)
        return int(text) if text is not None and re.fullmatch(r"-?\d{1,19}", text) else None

    def names(self, path: str) -> tuple[str, ...]:
        """Names in a folder, sorted; numbers by value. Empty if there is no such folder."""
        place = self.locate(path)
        if place is None:
            return ()
        try:
            found = os.listdir(place)
        except PermissionError as error:
            raise Unreadable(path, error.strerror or "permission denied") from None
        except OSError:
            return ()
        return tuple(sorted(found, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]))

    def link(self, path: str) -> str | None:
        """Where the symbolic link at path points, as written; None if it isn't a link or may not be read."""
        place = self.locate(os.path.dirname(path))
        if place is None:
            return None
        try:
            return os.readlink(place / os.path.basename(path))
        except OSError:
            return None

    def processes(self) -> Iterator[Process]:
        """All processes that can be seen, kernel threads (empty command) included."""
        for name in self.names("/proc"):
            if not name.isdigit():
                continue
            line = self.text(f"/proc/{name}/stat")
            if line is None or ")" not in line:
                continue
            fields = line.rpartition(")")[2].split()
            if len(fields) < 39:
                continue
            command = tuple((self.text(f"/proc/{name}/cmdline") or "").split("\0"))
            # Fields 39, 40 and 41 of proc(5), counted behind the name, which is field 2.
            yield Process(
                pid=int(name),
                command=() if command == ("",) else command,
                core_last=int(fields[36]),
                priority=int(fields[37]),
                policy=int(fields[38]),
            )


def parse_cores(text: str | None) -> frozenset[int]:
    """The kernel's core list ("0-3,8,10-11"; "" or "(null)" for none) as a set."""
    cores: set[int] = set()
    for part in (text or "").split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?(?::\d+/\d+)?\s*", part)
        if match:
            first = int(match[1])
            cores.update(range(first, int(match[2] or first) + 1))
    return frozenset(cores)


def format_cores(cores: frozenset[int] | set[int] | tuple[int, ...]) -> str:
    """A set of cores as people and the kernel write it: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
