"""A loop's lane as one who looks on reads it: completions and tensors, from memory that is mapped for reading only.

Held by loop_tap.py, which publishes what it finds, and by the shadow's lane_sampler.py, which runs it again. Nothing
waits for them, and nobody is told that they are there. The client can write all of that memory, so what is found there
is judged here, once: a completion that is none is None, and a slot's tensors are where the layout says. Whether a slot
was used again while it was copied is for the reader to ask, after the copy.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any, Final, NamedTuple

COMPLETION: Final = struct.Struct("<QIHHHHIQQQQII")  # docs/wire.md, as what follows
SUBMITTED: Final = struct.Struct("<Q16xI")  # sequence number, slot
COMPLETION_TAIL: Final = 320  # from cursors_offset
ENTRY_BYTES: Final = 64
AREAS: Final = 2
LATE: Final = 1


class Completion(NamedTuple):
    """What the ring says of one job."""

    sequence: int
    slot: int
    status: int
    flags: int
    path: int
    cause: int
    area: int
    taken_ns: int
    started_ns: int
    ended_ns: int
    deadline_ns: int
    cause_detail: int
    epoch: int


class LaneView:
    """The lane of one loop, until it is closed."""

    def __init__(self, layout: dict[str, Any], memfd: int) -> None:
        """memfd is closed here; the mapping stays."""
        self._layout = layout
        try:
            self._memory = mmap.mmap(memfd, layout["total_size"], mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(memfd)
        self.entries: int = layout["ring_entries"]

    def completed(self) -> int:
        """How many completions were written, by the lane's own word: any number of 64 bits."""
        at = self._layout["cursors_offset"] + COMPLETION_TAIL
        return int.from_bytes(self._memory[at : at + 8], "little")

    def completion(self, number: int) -> Completion | None:
        """The number-th, from 0; None if what stands there is none, or points outside the lane."""
        at = self._layout["completion_ring_offset"] + number % self.entries * ENTRY_BYTES
        found = Completion._make(COMPLETION.unpack_from(self._memory, at))
        if not found.sequence or found.slot >= self._layout["slot_count"] or found.area >= AREAS:
            return None
        return found

    def inputs(self, slot: int) -> list[bytes]:
        """A slot's inputs, copied, in the model's order. slot: of a completion."""
        return self._tensors(slot, [(t["offset"], t["bytes"]) for t in self._layout["inputs"]])

    def outputs(self, slot: int, area: int) -> list[bytes]:
        """The same of its outputs."""
        return self._tensors(slot, [(t["offset"][area], t["bytes"]) for t in self._layout["outputs"]])

    def _tensors(self, slot: int, places: list[tuple[int, int]]) -> list[bytes]:
        start = self._layout["slots_offset"] + slot * self._layout["slot_stride"]
        return [self._memory[start + at : start + at + size] for at, size in places]

    def used_again(self, slot: int, sequence: int) -> bool:
        """Whether a later job was submitted in the same slot."""
        ring = self._layout["submit_ring_offset"]
        for index in range(self.entries):
            later, of_slot = SUBMITTED.unpack_from(self._memory, ring + index * ENTRY_BYTES)
            if later > sequence and of_slot == slot:
                return True
        return False

    def close(self) -> None:
        self._memory.close()
