"""XIDs in the kernel's log, for where NVML tells none. Readable with CAP_SYSLOG, or where kernel.dmesg_restrict is 0.

Called by GpuWatch, in its thread.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

__all__ = ["KernelLog"]

PLACE: Final = Path("/dev/kmsg")
RECORD_BYTES_MAX: Final = 8192  # more than the kernel's longest record
RECORDS_MAX: Final = 1000  # of one look
_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


class KernelLog:
    """What is written from now on. ``problem``: why it can't be read, empty where it can."""

    def __init__(self, place: Path = PLACE) -> None:
        self.problem = ""
        self._descriptor = -1
        self._rest = b""
        try:
            self._descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"{place}: {error.strerror}"

    def xids(self) -> list[tuple[str, int]]:
        """(PCI address without function, XID) of each line since the last look. Does not wait."""
        found: list[tuple[str, int]] = []
        for _ in range(RECORDS_MAX if self._descriptor >= 0 else 0):
            try:
                record = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BrokenPipeError:
                continue  # overwritten before it was read
            except OSError:
                break  # nothing more
            if not record:
                break
            *lines, self._rest = (self._rest + record).split(b"\n")
            matches = (_XID.search(line.decode(errors="replace")) for line in lines)
            found += [(match[1].lower(), int(match[2])) for match in matches if match]
        return found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
