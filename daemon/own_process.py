"""What a process of the daemon sees of itself: its threads, its memory. For executors and the gateway alike."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["resident_bytes", "threads"]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def threads() -> set[int]:
    """Ids of this process's threads."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def resident_bytes() -> int:
    """Of this process; a few microseconds."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(128).split()[1]) * _PAGE_BYTES
