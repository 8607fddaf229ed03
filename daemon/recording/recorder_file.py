"""The flight recorder's files: what the journals give, bounded, the last minutes kept.

The supervisor drains each executor's journal (`journal_read`) into `DeviceRecorder.take`. A file per segment; the
oldest goes first. A segment must begin with a known state of the scheduler, and only the executor has it, so the
recorder runs the same scheduler along (replay.py) and writes its state where a segment begins. That it decides the
same is checked on the way: a difference is kept in `difference`. Where records were lost, nothing is known until the
executor has said its state again: `needs_state` asks for it.

What it is not: real-time. It runs in the supervisor, at some 10 µs a job.
"""

from __future__ import annotations

import base64
import contextlib
import os
import struct
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

from taktd.daemon.recording import record as rec
from taktd.daemon.recording.record import RECORD, Recording, Section, read_recording, write_recording
from taktd.daemon.recording.replay import Difference, Replayer
from taktd.daemon.recording.scheduler_state import StateMalformed, encode_state

__all__ = ["JOURNAL_RECORD", "DeviceRecorder", "answer_record", "collect", "segments_of"]

JOURNAL_RECORD: Final = struct.Struct("<QHHIQQQ")  # as RECORD, then the record's number
SUFFIX: Final = ".taktrec"
SEGMENTS: Final = 8  # of a device's space: so much of the past goes at once
SEGMENT_BYTES_MIN: Final = 64 << 10
SEGMENT_BYTES_MAX: Final = 8 << 20  # what one answer over control.sock carries
STATE_TEXT_BYTES_MAX: Final = 8 << 20


class DeviceRecorder:
    """Of one device. size_max bounds its files (one segment may go beyond it) and may be changed; folder must exist."""

    def __init__(self, folder: Path, device: str, size_max: int) -> None:
        self.folder, self.device = folder, device
        self.size_max = size_max
        self.lost = 0  # records, ever
        self.difference: Difference | None = None
        self.trouble = ""  # why nothing is written at the moment
        self._segments = segments_of(folder, device)
        self._number = 1 + max((_number(path) for path in self._segments), default=0)
        self._bytes = sum(_size(path) for path in self._segments)
        self._stream: BinaryIO | None = None
        self._segment_bytes = 0
        self._replayer: Replayer | None = None
        self._text = bytearray()
        self._lost_before = 0

    @property
    def _segment_max(self) -> int:
        return min(max(self.size_max // SEGMENTS, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)

    @property
    def needs_state(self) -> bool:
        """Whether the executor should say its state (Recorder.state); until then records are not kept."""
        return self._replayer is None

    def take(self, data: bytes, lost: int = 0) -> None:
        """What journal_read gave: whole 40-byte records, and how many were lost before them."""
        if lost:
            self.lost += lost
            self._lost_before += lost
            self._stop()
        batch = bytearray()
        for t_ns, kind, lane, aux, a, b, _ in JOURNAL_RECORD.iter_unpack(data):
            if kind == rec.TEXT:
                self._text += rec.text_of(aux, a, b)
                if len(self._text) > STATE_TEXT_BYTES_MAX:
                    self._text.clear()
            elif kind == rec.FULL_STATE:
                self._write(batch)
                batch.clear()
                self._begin_with(self._text.decode(errors="replace"))
                self._text.clear()
                continue
            else:
                self._text.clear()
            if self._replayer is None:
                continue
            batch += RECORD.pack(t_ns, kind, lane, aux, a, b)
            self._follow((t_ns, kind, lane, aux, a, b))
            if self._replayer is None:
                self._write(batch)
                batch.clear()
            elif self._segment_bytes + len(batch) > self._segment_max and self._replayer.settled:
                self._write(batch)
                batch.clear()
                self._begin(Section(self.device, encode_state(self._replayer.scheduler)))
        self._write(batch)

    def _follow(self, record: rec.Record) -> None:
        assert self._replayer is not None
        try:
            difference = self._replayer.feed(record)
        except StateMalformed as error:
            difference = Difference(self.device, self._replayer.index, record[0], "an event", str(error))
        if difference is not None:
            # What was recorded stays as it is: `taktctl replay` shows the same difference. The state is unknown now.
            self.difference = self.difference or difference
            self._replayer = None

    def _begin_with(self, state: str) -> None:
        section = Section(self.device, state, lost=self._lost_before)
        self._lost_before = 0
        try:
            self._replayer = Replayer.of(section)
        except StateMalformed as error:
            self.trouble = str(error)
            self._stop()
            return
        self._begin(section)

    def _begin(self, section: Section) -> None:
        self._close()
        path = self.folder / f"{self.device}-{self._number:08d}{SUFFIX}"
        self._number += 1
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._failed(error)
            return
        self._stream = open(descriptor, "wb", buffering=0)  # noqa: SIM115 (kept until the segment is full)
        self._segments.append(path)
        self._segment_bytes = 0
        self.trouble = ""
        self._append(rec.file_header() + rec.state_block(section))
        self._forget()

    def _write(self, batch: bytearray) -> None:
        if batch and self._stream is not None:
            self._append(rec.block(rec.RECORDS, batch))

    def _append(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            written = self._stream.write(data)
        except OSError as error:
            self._failed(error)
            return
        self._segment_bytes += written
        self._bytes += written
        if written != len(data):
            self._failed(OSError("the disk took only a part of a block"))

    def _forget(self) -> None:
        while self._bytes > self.size_max and len(self._segments) > 1:
            path = self._segments.pop(0)
            self._bytes -= _size(path)
            with contextlib.suppress(OSError):
                path.unlink()

    def _failed(self, error: OSError) -> None:
        """Recording is never worth a running loop: it stops, says why, and begins anew with the next state."""
        self.trouble = f"the recording of {self.device} can't be written to {self.folder}: {error.strerror or error}"
        self._stop()

    def _stop(self) -> None:
        self._replayer = None
        self._text.clear()
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        self._close()


def segments_of(folder: Path, device: str) -> list[Path]:
    """A device's segments, the oldest first; none in a folder that can't be read."""
    try:
        names = [name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    except OSError:
        return []
    ours = [folder / name for name in names if name[: -len(SUFFIX) - 9] == device]
    return sorted((path for path in ours if _number(path) > 0), key=_number)


def _number(path: Path) -> int:
    digits = path.name[: -len(SUFFIX)][-8:]
    return int(digits) if digits.isdigit() else 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def answer_record(folder: Path, devices: list[str], request: dict[str, Any]) -> dict[str, Any]:
    """What control.sock answers to `record`: {} → segment names, {"segment": name} → its bytes in base64.

    One segment an answer, so that a line stays bounded. KeyError for a segment that is gone or was never there.
    """
    names = [path.name for device in devices for path in segments_of(folder, device)]
    if "segment" not in request:
        return {"segments": names}
    name = request["segment"]
    if name not in names:
        raise KeyError(name)
    try:
        return {"data": base64.b64encode((folder / name).read_bytes()).decode()}
    except OSError:
        raise KeyError(name) from None


def collect(folder: Path, devices: list[str]) -> bytes:
    """One recording of what is there now, as a whole file."""
    recording: Recording = []
    for device in devices:
        for path in segments_of(folder, device):
            try:
                recording += read_recording(path.read_bytes(), growing=True)
            except (OSError, rec.RecordingRefused):
                continue  # gone meanwhile, or broken off when the machine went down: the others are whole
    stream = BytesIO()
    write_recording(stream, recording)
    return stream.getvalue()
