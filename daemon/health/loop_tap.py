"""Completions of loops with `publish: true`, outputs included, read beside the loop from its lane's memory.

The gateway maps the lane read-only and looks at the completion ring about once a period. Nothing waits for it, nobody
is told that it is there; an answer whose slot may have been used again while it was copied is left out, and counted.
The client can write all of that memory, so a number from it is only used after a check, and only to publish.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any, Final

from taktd.ipc import _core
from taktd.ipc.inference import DTYPE_BITS, size_bytes

LOOK_S_MIN: Final = 0.001
LOOK_S_MAX: Final = 0.05
COMPLETION: Final = struct.Struct("<QIHHHHIQQQQII")
SUBMIT_TAIL, COMPLETION_TAIL = 0, 320  # from cursors_offset, docs/wire.md
ENTRY_BYTES: Final = 64
LATE, SHAPES = 1, 16
_DTYPES: Final = {number: name for name, number in _core.DTYPES.items()}
_STATUSES: Final = {number: name for name, number in _core.STATUSES.items()}
_PATHS: Final = {number: name for name, number in _core.PATHS.items()}
_CAUSES: Final = {number: name for name, number in _core.CAUSES.items()}

Event = dict[str, Any]
Publish = Callable[[str, Event, list[bytes]], None]


class LoopTap:
    """One loop's lane, until it is replaced by another."""

    def __init__(self, loop: str, layout: dict[str, Any], memfd: int, publish: Publish) -> None:
        """memfd is closed here; the mapping stays."""
        self.loop, self._layout, self._publish = loop, layout, publish
        self._memory = mmap.mmap(memfd, layout["total_size"], mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(memfd)
        self._next = self._word(COMPLETION_TAIL)  # what has gone by is not news
        self._outputs = [
            (
                {"name": t["name"], "datatype": _DTYPES[t["dtype"]], "shape": list(t["dims"])}, t["offset"],
                size_bytes(DTYPE_BITS[_DTYPES[t["dtype"]]], t["dims"]),
            )
            for t in layout["outputs"]
        ]  # fmt: skip
        self.left_out = 0
        self._pause_s = min(LOOK_S_MAX, max(LOOK_S_MIN, layout["period_ns"] / 1e9))
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _word(self, offset: int) -> int:
        at = self._layout["cursors_offset"] + offset
        return int.from_bytes(self._memory[at : at + 8], "little")

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)
        entries = self._layout["ring_entries"]
        tail = self._word(COMPLETION_TAIL)
        if not self._next <= tail <= self._next + entries:
            self.left_out += max(0, tail - self._next) if tail - self._next < 1 << 32 else 0
            self._next = tail
            return
        while self._next < tail:
            self._take(self._next % entries)
            self._next += 1

    def _take(self, index: int) -> None:
        at = self._layout["completion_ring_offset"] + index * ENTRY_BYTES
        sequence, slot, status, flags, path, cause, area, _, started, ended, *_ = COMPLETION.unpack_from(
            self._memory, at
        )
        if not sequence or slot >= self._layout["slot_count"] or area > 1:
            return
        event: Event = {
            "loop": self.loop, "sequence": sequence, "status": _STATUSES.get(status, "invalid"),
            "late": bool(flags & LATE), "path": _PATHS.get(path, ""), "cause": _CAUSES.get(cause, ""),
            "started_ns": started, "ended_ns": ended, "t_ns": ended, "outputs": [],
        }  # fmt: skip
        tensors: list[bytes] = []
        if event["status"] == "ok":
            start = self._layout["slots_offset"] + slot * self._layout["slot_stride"]
            event["outputs"] = [about for about, _, _ in self._outputs]
            tensors = [self._memory[start + at[area] : start + at[area] + size] for _, at, size in self._outputs]
            if self._used_again(slot, sequence):
                self.left_out += 1
                return
        self._publish(f"completion.{self.loop}", event, tensors)

    def _used_again(self, slot: int, sequence: int) -> bool:
        """Whether a later job was submitted in the same slot."""
        ring = self._layout["submit_ring_offset"]
        for index in range(self._layout["ring_entries"]):
            later, of_slot = struct.unpack_from("<Q16xI", self._memory, ring + index * ENTRY_BYTES)
            if later > sequence and of_slot == slot:
                return True
        return False

    def close(self) -> None:
        self._timer.cancel()
        self._memory.close()
