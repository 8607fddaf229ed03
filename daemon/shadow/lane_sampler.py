"""A job that a loop has just had done, read beside it from the lane's memory: inputs, and what was answered.

Nothing waits for it, and nobody is told that it is there. A sample may be torn: the client writes its next job's
inputs, or the executor its outputs, while they are copied. It counts only if, after the copy, no later job has been
completed, none has been submitted in the same slot, and a second look at the inputs finds what the first one found:
until a later reply is handed out, a client of our library does not have the slot again. The client can write all of
that memory, so a number from it is used only after a check, and only to compare.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

from taktd.daemon.health.loop_tap import COMPLETION, COMPLETION_TAIL, ENTRY_BYTES, LATE
from taktd.ipc import _core

SUBMITTED: Final = struct.Struct("<Q16xI")  # sequence number, slot
OK: Final = _core.STATUSES["ok"]

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One job: its tensors' bytes in the model's order."""

    sequence: int
    inputs: list[bytes]
    outputs: list[bytes]


class LaneSampler:
    """One loop's lane, until its client goes."""

    def __init__(self, layout: Message, memfd: int) -> None:
        """memfd is closed here; the mapping stays."""
        self._layout = layout
        try:
            self._memory = mmap.mmap(memfd, layout["total_size"], mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(memfd)
        self._tail = self._completed()  # what has gone by is not sampled
        self.torn = 0

    def _completed(self) -> int:
        at = self._layout["cursors_offset"] + COMPLETION_TAIL
        return int.from_bytes(self._memory[at : at + 8], "little")

    def sample(self) -> Sampled | None:
        """The newest job, if it was done well and in time; None if there is no new one, or it changed meanwhile."""
        tail = self._completed()
        if tail == self._tail or not tail:
            return None
        self._tail = tail
        entry = self._entry(tail)
        sequence, slot, status, flags, _, _, area, *_ = entry
        # Of a job that is late the client may have given up the slot.
        if status != OK or flags & LATE or not sequence or slot >= self._layout["slot_count"] or area > 1:
            return None
        inputs = self._inputs(slot)
        outputs = self._tensors(slot, [(t["offset"][area], t["bytes"]) for t in self._layout["outputs"]])
        if self._used_again(slot, sequence) or self._inputs(slot) != inputs or self._completed() != tail:
            self.torn += 1
            return None
        if self._entry(tail) != entry:
            self.torn += 1
            return None
        return Sampled(sequence, inputs, outputs)

    def _entry(self, tail: int) -> tuple[int, ...]:
        at = (tail - 1) % self._layout["ring_entries"] * ENTRY_BYTES
        return COMPLETION.unpack_from(self._memory, self._layout["completion_ring_offset"] + at)

    def _inputs(self, slot: int) -> list[bytes]:
        return self._tensors(slot, [(t["offset"], t["bytes"]) for t in self._layout["inputs"]])

    def _tensors(self, slot: int, places: list[tuple[int, int]]) -> list[bytes]:
        start = self._layout["slots_offset"] + slot * self._layout["slot_stride"]
        return [self._memory[start + at : start + at + size] for at, size in places]

    def _used_again(self, slot: int, sequence: int) -> bool:
        """Whether a later job was submitted in the same slot."""
        ring = self._layout["submit_ring_offset"]
        for index in range(self._layout["ring_entries"]):
            later, of_slot = SUBMITTED.unpack_from(self._memory, ring + index * ENTRY_BYTES)
            if later > sequence and of_slot == slot:
                return True
        return False

    def close(self) -> None:
        self._memory.close()
