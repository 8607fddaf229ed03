"""A lane client that knows nothing but docs/wire.md: mmap, struct and a socket. It can also break every rule.

Offsets here are written down a second time on purpose: they are the check of the C layout.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from taktd.ipc import _core

HEADER = struct.Struct("<8sIIQIIIIIIQQQQQQQQQQIIII112x")
HEADER_NAMES = (
    "magic version header_size total_size slot_count ring_entries tensor_count input_count kind area_count "
    "tensor_table_offset cursors_offset submit_ring_offset completion_ring_offset slots_offset slot_stride "
    "period_ns deadline_ns jitter_ns epoch trigger shapes_offset_in_slot name_offset model_name_offset"
).split()
TENSOR = struct.Struct("<96sII8qQQQ")
SUBMISSION = struct.Struct("<QQQII32s")
COMPLETION = struct.Struct("<QIHHHHIQQQQII")
COMPLETION_NAMES = (
    "sequence slot status flags path cause area taken_ns started_ns ended_ns deadline_ns cause_detail epoch"
).split()
SHAPE = struct.Struct("<II8q")

SUBMIT_TAIL, COMPLETION_HEAD, CLIENT_WAITING = 0, 64, 128
SUBMIT_HEAD, COMPLETION_TAIL, DAEMON_SLEEPING, LANE_STATE, DETACH_REASON = 256, 320, 384, 388, 392

FP32, INT64 = 1, 7
LOOP, MODEL = 1, 2
OK, EXPIRED, REFUSED, INVALID, FAILED, LOST, CANCELLED, DETACHED = range(8)


class RawLane:
    """The client's end of one lane."""

    def __init__(self, memfd: int, wake: socket.socket) -> None:
        self.map = mmap.mmap(memfd, os.fstat(memfd).st_size)
        self.header: dict[str, Any] = dict(zip(HEADER_NAMES, HEADER.unpack_from(self.map, 0), strict=True))
        self.wake = wake
        self.words = memoryview(self.map).cast("Q")
        self.halves = memoryview(self.map).cast("I")
        self.tail = 0
        self.head = 0
        self.sequence = 0

    def close(self) -> None:
        self.words.release()
        self.halves.release()
        self.map.close()
        self.wake.close()

    def u64(self, cursor: int, value: int | None = None) -> int:
        at = (self.header["cursors_offset"] + cursor) // 8
        if value is not None:
            self.words[at] = value
        return self.words[at]

    def u32(self, cursor: int, value: int | None = None) -> int:
        at = (self.header["cursors_offset"] + cursor) // 4
        if value is not None:
            self.halves[at] = value
        return self.halves[at]

    def put(self, sequence: int, slot: int, deadline_ns: int = 0, submitted_ns: int = 0, flags: int = 0,
            rest: bytes = b"") -> None:  # fmt: skip
        """Write one entry at the tail, whatever it says, and publish it."""
        at = self.header["submit_ring_offset"] + self.tail % self.header["ring_entries"] * 64
        SUBMISSION.pack_into(self.map, at, sequence, deadline_ns, submitted_ns, slot, flags, rest)
        self.tail += 1
        self.u64(SUBMIT_TAIL, self.tail)

    def submit(self, slot: int | None = None, deadline_ns: int = 0, submitted_ns: int = 0, flags: int = 0) -> int:
        """A well-formed submission with the next sequence number."""
        self.sequence += 1
        slot = (self.sequence - 1) % self.header["slot_count"] if slot is None else slot
        self.put(self.sequence, slot, deadline_ns, submitted_ns, flags)
        return self.sequence

    def ring(self) -> None:
        self.wake.send(b"!", socket.MSG_DONTWAIT)

    def ring_if_asked(self) -> None:
        """A lane that had no entries for a while is not scanned: its client must ring. A full buffer is fine."""
        if self.u32(DAEMON_SLEEPING):
            with contextlib.suppress(BlockingIOError):
                self.ring()

    def completions(self) -> list[dict[str, int]]:
        """Everything published and not yet collected."""
        found = []
        while self.head < self.u64(COMPLETION_TAIL):
            at = self.header["completion_ring_offset"] + self.head % self.header["ring_entries"] * 64
            found.append(dict(zip(COMPLETION_NAMES, COMPLETION.unpack_from(self.map, at), strict=True)))
            self.head += 1
        self.u64(COMPLETION_HEAD, self.head)
        return found

    def set_shapes(self, slot: int, shapes: list[tuple[int, ...]]) -> None:
        base = self.slot_offset(slot) + self.header["shapes_offset_in_slot"]
        for i, dims in enumerate(shapes):
            padded = tuple(dims)[:8] + (0,) * (8 - len(dims))
            SHAPE.pack_into(self.map, base + 72 * i, len(dims), 0, *padded)

    def shape(self, slot: int, tensor: int) -> tuple[int, ...]:
        base = self.slot_offset(slot) + self.header["shapes_offset_in_slot"]
        rank, _, *dims = SHAPE.unpack_from(self.map, base + 72 * tensor)
        return tuple(dims[:rank])

    def slot_offset(self, slot: int) -> int:
        return int(self.header["slots_offset"] + slot * self.header["slot_stride"])


@dataclass
class Daemon:
    """Ledger, statistics, journal and one Server over them; `die` drops the Server without any good-bye."""

    lanes: int = 8
    ledger: int = -1
    stats: int = -1
    journal: int = -1
    control_fd: int = -1
    server: _core.Server = field(init=False)
    layouts: dict[int, _core.LaneLayout] = field(default_factory=dict)
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    clients: list[RawLane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = _core.create_ledger(self.lanes)
        self.stats = _core.create_stats(self.lanes)
        self.journal = _core.create_journal(256)
        self.server = _core.Server(self.ledger, self.stats, self.journal, self.control_fd)

    def add(self, lane: int = 0, kind: int = LOOP, *, slots: int = 4, dynamic: bool = False,
            period_ns: int = 1_000_000, deadline_ns: int = 1_000_000, trigger: int = 0) -> RawLane:  # fmt: skip
        """A lane with inputs obs FP32[3,8], index INT64[2] and output action FP32[5]; returns its client's end."""
        layout = _core.create_lane(
            "walk", "go1", kind, [("obs", FP32, (3, 8)), ("index", INT64, (2,))], [("action", FP32, (5,))],
            slot_count=slots, dynamic=dynamic, period_ns=period_ns if kind == LOOP else 0,
            deadline_ns=deadline_ns if kind == LOOP else 0, jitter_ns=7, epoch=3, trigger=trigger,
        )  # fmt: skip
        ours, theirs = _core.wake_pair()
        self.layouts[lane] = layout
        self.ends[lane] = (layout["fd"], ours)
        self.serve(lane, recover=False)
        client = RawLane(layout["fd"], socket.socket(fileno=theirs))
        self.clients.append(client)
        return client

    def serve(self, lane: int, *, recover: bool, area: int = 0) -> int:
        memfd, wake = (os.dup(fd) for fd in self.ends[lane])
        return self.server.add(lane, memfd, wake, self.layouts[lane], lane, area=area, recover=recover)

    def die(self) -> None:
        del self.server

    def succeed(self, area: int = 1) -> None:
        """A successor takes over every lane from the ledger."""
        self.server = _core.Server(self.ledger, self.stats, self.journal, self.control_fd)
        for lane in self.layouts:
            self.serve(lane, recover=True, area=area)

    def count(self, lane: int = 0) -> _core.Statistics:
        return _core.stats_read(self.stats, lane)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for ends in self.ends.values():
            for fd in ends:
                os.close(fd)
        for fd in (self.ledger, self.stats, self.journal):
            os.close(fd)
