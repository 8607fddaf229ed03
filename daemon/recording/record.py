"""What the scheduler saw and decided, as records of 32 bytes; and the file that holds them.

A record is {u64 t_ns, u16 kind, u16 lane, u32 aux, u64 a, u64 b}, little endian. `Recorder` is what the executor
calls; it does nothing but map each event to one write into the journal. recorder_file.py drains the journal into
files, replay.py runs them. docs/scheduling.md describes the kinds.

The file: {char magic[8], u32 version, u32 crc of the 12 bytes before} and then blocks {u32 kind, u32 bytes, u32 crc,
u32 0} + payload: STATE begins a device's part (JSON: device, and the scheduler's state), RECORDS follow, GAP says
how many were lost, END (u64 number of records) closes the file. A file without END is truncated and refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final
from zlib import crc32

from taktd.daemon.recording.scheduler_state import encode_plan, encode_state
from taktd.daemon.schedule.job import Action, Expire, Job, Queue, Start, Task
from taktd.daemon.scheduler import Scheduler

__all__ = [
    "RECORD", "Recorder", "Recording", "RecordingRefused", "Section", "read_recording", "write_recording",
]  # fmt: skip

RECORD: Final = struct.Struct("<QHHIQQ")
MAGIC: Final = b"TAKTREC\n"
VERSION: Final = 1
HEADER: Final = struct.Struct("<8sI")
BLOCK: Final = struct.Struct("<IIII")
STATE, RECORDS, GAP, END = 1, 2, 3, 4
BLOCK_BYTES_MAX: Final = 64 << 20
FILE_BYTES_MAX: Final = 1 << 30

# Events.
SUBMIT: Final = 1  # lane, aux slot, a sequence, b release_ns
DEADLINE: Final = 2  # a own deadline of the SUBMIT that follows
CANCEL: Final = 3  # lane, a sequence, aux 1: it was queued
ELSEWHERE: Final = 4  # the watch answered it as expired; as CANCEL
FINISH: Final = 5  # a switched_out_ns
RESET: Final = 6  # lane, aux 1: a client is attached
REMOVE: Final = 7  # lane
ADD: Final = 8  # lane; its definition is the TEXT before
HANDOVER: Final = 9  # a handover_ns
WATCH: Final = 10  # the executor asked for the next certain expiry
TEXT: Final = 11  # aux bytes (≤ 16) of text in a and b
FULL_STATE: Final = 12  # the TEXT before is a scheduler's state: a new section begins with what follows
# Decisions; aux bit 31: the executor was yielding.
STARTED: Final = 16  # lane, aux number of jobs, a sequence, b deadline_ns, of the first
MEMBER: Final = 17  # lane, a sequence, b deadline_ns, of a further job of the batch
EXPIRED: Final = 18  # lane, aux status | cause << 8 | detail << 16, a sequence, b deadline_ns
WAITING: Final = 19  # a until_ns, b spin_from_ns

YIELDING: Final = 1 << 31
DETAIL_MASK: Final = 0x7FFF
DECISIONS: Final = (STARTED, EXPIRED, WAITING)

Write = Callable[[int, int, int, int, int, int], Any]
Record = tuple[int, int, int, int, int, int]  # t_ns, kind, lane, aux, a, b


class Recorder:
    """Called by the executor beside each call of its scheduler, with the same arguments.

    write(kind, lane, aux, a, b, t_ns) is the journal's. One record per event and per decision; two for a submission
    with a deadline of its own. state() comes first, and again when the supervisor says that records were lost.
    """

    __slots__ = ("write",)

    def __init__(self, write: Write) -> None:
        self.write = write

    def submit(self, lane: int, sequence: int, slot: int, release_ns: int, deadline_ns: int, now_ns: int) -> None:
        if deadline_ns:
            self.write(DEADLINE, lane, 0, deadline_ns, 0, now_ns)
        self.write(SUBMIT, lane, slot, sequence, release_ns, now_ns)

    def decided(self, action: Action, now_ns: int, yielding: bool = False) -> None:
        """After each decide(). A caller that has told the actions apart already calls one of the three below."""
        if isinstance(action, Start):
            self.started(action.jobs, now_ns, yielding)
        elif isinstance(action, Expire):
            self.expired(action, now_ns, yielding)
        else:
            self.waiting(action.until_ns, action.spin_from_ns, now_ns, yielding)

    def started(self, jobs: tuple[Job, ...], now_ns: int, yielding: bool = False) -> None:
        job = jobs[0]
        aux = len(jobs)
        self.write(STARTED, job.lane, aux | YIELDING if yielding else aux, job.sequence, job.deadline_ns, now_ns)
        if aux > 1:
            for job in jobs[1:]:
                self.write(MEMBER, job.lane, 0, job.sequence, job.deadline_ns, now_ns)

    def expired(self, action: Expire, now_ns: int, yielding: bool = False) -> None:
        job = action.job
        assert job is not None
        aux = action.status | action.cause << 8 | (action.detail & DETAIL_MASK) << 16
        self.write(EXPIRED, job.lane, aux | YIELDING if yielding else aux, job.sequence, job.deadline_ns, now_ns)

    def waiting(self, until_ns: int, spin_from_ns: int, now_ns: int, yielding: bool = False) -> None:
        self.write(WAITING, 0, YIELDING if yielding else 0, until_ns, spin_from_ns, now_ns)

    def finish(self, now_ns: int, switched_out_ns: int = 0) -> None:
        self.write(FINISH, 0, 0, switched_out_ns, 0, now_ns)

    def cancel(self, lane: int, sequence: int, queued: bool, now_ns: int) -> None:
        self.write(CANCEL, lane, int(queued), sequence, 0, now_ns)

    def expired_elsewhere(self, lane: int, sequence: int, queued: bool, now_ns: int) -> None:
        self.write(ELSEWHERE, lane, int(queued), sequence, 0, now_ns)

    def watch(self, now_ns: int) -> None:
        """Beside next_certain_expiry() and expiries(), which sort the newest job in."""
        self.write(WATCH, 0, 0, 0, 0, now_ns)

    def reset(self, lane: int, now_ns: int, attached: bool = True) -> None:
        self.write(RESET, lane, int(attached), 0, 0, now_ns)

    def remove(self, lane: int, now_ns: int) -> None:
        self.write(REMOVE, lane, 0, 0, 0, now_ns)

    def add(self, lane: int, plan: Task | Queue, now_ns: int) -> None:
        """Beside add_loop and add_queue."""
        self._text(encode_plan(plan), now_ns)
        self.write(ADD, lane, 0, 0, 0, now_ns)

    def handover(self, handover_ns: int, now_ns: int) -> None:
        self.write(HANDOVER, 0, 0, handover_ns, 0, now_ns)

    def state(self, scheduler: Scheduler, now_ns: int) -> None:
        """Everything that is needed to replay what follows. Not for the real-time path: about 1 ms for 64 loops."""
        self._text(encode_state(scheduler), now_ns)
        self.write(FULL_STATE, 0, 0, 0, 0, now_ns)

    def _text(self, text: str, now_ns: int) -> None:
        data = text.encode()
        for at in range(0, len(data), 16):
            piece = data[at : at + 16]
            a, b = struct.unpack("<QQ", piece.ljust(16, b"\0"))
            self.write(TEXT, 0, len(piece), a, b, now_ns)


def text_of(aux: int, a: int, b: int) -> bytes:
    """The piece that one TEXT record carries."""
    return struct.pack("<QQ", a, b)[:aux]


def decision_records(action: Action, now_ns: int, yielding: bool) -> list[Record]:
    """The records that a decision makes."""
    made: list[Record] = []

    def write(kind: int, lane: int, aux: int, a: int, b: int, t_ns: int) -> None:
        made.append((t_ns, kind, lane, aux, a, b))

    Recorder(write).decided(action, now_ns, yielding)
    return made


# ---- the file ----


class RecordingRefused(ValueError):
    """A file that is no usable recording: what is wrong, at which byte, what to do."""


@dataclass(slots=True)
class Section:
    """One device's part: the scheduler's state before the first record, then the records (32 bytes each)."""

    device: str
    state: str
    records: bytearray = field(default_factory=bytearray)
    lost: int = 0  # records lost before this part began

    def __iter__(self) -> Iterator[Record]:
        return RECORD.iter_unpack(self.records)

    def __len__(self) -> int:
        return len(self.records) // RECORD.size


Recording = list[Section]


def file_header() -> bytes:
    head = HEADER.pack(MAGIC, VERSION)
    return head + struct.pack("<I", crc32(head))


def block(kind: int, payload: bytes | bytearray) -> bytes:
    return BLOCK.pack(kind, len(payload), crc32(payload), 0) + payload


def state_block(section: Section) -> bytes:
    return block(STATE, json.dumps({"device": section.device, "state": section.state, "lost": section.lost}).encode())


def write_recording(stream: BinaryIO, recording: Iterable[Section]) -> int:
    """Writes a whole file; returns its number of records."""
    stream.write(file_header())
    count = 0
    for section in recording:
        stream.write(state_block(section))
        stream.write(block(RECORDS, section.records))
        count += len(section)
    stream.write(block(END, struct.pack("<Q", count)))
    return count


def read_recording(data: bytes, *, growing: bool = False) -> Recording:
    """All devices' parts. growing: a file that is still written, whose end may be missing.

    Raises RecordingRefused for a file of another kind or version, a truncated or an altered one.
    """
    head = HEADER.size + 4
    if len(data) < head or data[:8] != MAGIC:
        raise RecordingRefused("is no recording: it does not begin as one; `taktctl record -o FILE` makes one")
    version = HEADER.unpack_from(data)[1]
    if version != VERSION:
        raise RecordingRefused(
            f"is a recording of version {version}; this taktd reads version {VERSION}: "
            "replay it with the taktd that made it"
        )
    if struct.unpack_from("<I", data, HEADER.size)[0] != crc32(data[: HEADER.size]):
        raise RecordingRefused("has a damaged header (checksum): make a new recording")
    recording: Recording = []
    at = head
    while at < len(data):
        kind, payload, after = _block_at(data, at, growing)
        if kind == 0:
            return recording
        if kind == END:
            count = sum(len(section) for section in recording)
            if after != len(data) or len(payload) != 8 or struct.unpack("<Q", payload)[0] != count:
                raise RecordingRefused(f"does not end as it says (byte {at}: {count} records): make a new recording")
            return recording
        _take_block(recording, kind, payload, at)
        at = after
    if growing:
        return recording
    raise RecordingRefused(f"is truncated: it ends at byte {at} without its end mark; copy it again")


def _block_at(data: bytes, at: int, growing: bool) -> tuple[int, bytes, int]:
    """kind, payload, where it ends; kind 0 for an incomplete last block of a growing file."""
    if len(data) - at >= BLOCK.size:
        kind, size, checksum, zero = BLOCK.unpack_from(data, at)
        after = at + BLOCK.size + size
        if size > BLOCK_BYTES_MAX or zero or not STATE <= kind <= END:
            raise RecordingRefused(f"is damaged at byte {at} (no such block): make a new recording")
        if after <= len(data):
            payload = data[at + BLOCK.size : after]
            if crc32(payload) != checksum:
                raise RecordingRefused(f"is damaged in the block at byte {at} (checksum): make a new recording")
            return kind, payload, after
    if growing:
        return 0, b"", at
    raise RecordingRefused(f"is truncated: the block at byte {at} is incomplete; copy it again")


def _take_block(recording: Recording, kind: int, payload: bytes, at: int) -> None:
    if kind == STATE:
        try:
            head = json.loads(payload)
            recording.append(Section(str(head["device"]), str(head["state"]), lost=int(head["lost"])))
        except (ValueError, KeyError, TypeError) as error:
            raise RecordingRefused(f"has a malformed state at byte {at} ({error}): make a new recording") from error
    elif not recording or (kind == RECORDS and len(payload) % RECORD.size):
        raise RecordingRefused(f"has records without a state, or parts of one, at byte {at}: make a new recording")
    elif kind == RECORDS:
        recording[-1].records += payload
