"""Drains the executors' journals into recordings on disk, a few times a second, for `record`, `replay` and `why`.

Runs in the supervisor's event loop; what a journal overwrote before it was read is counted and told, never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from taktd.daemon.logbook import log
from taktd.daemon.recording.recorder_file import DeviceRecorder, answer_record
from taktd.daemon.runtime_folder import STATE_HINT
from taktd.daemon.supervision.served_device import ServedDevice
from taktd.ipc import _core

DRAIN_S: Final = 0.1
READS_AT_ONCE: Final = 16  # of up to 4096 records each: one device's backlog must not hold up the event loop


class FlightRecorder:
    """Recordings of all devices, bounded by `size_max` bytes together. The folder may be unusable: then it says so."""

    def __init__(self, folder: Path, devices: Mapping[str, ServedDevice], size_max: int) -> None:
        self.folder, self._devices = folder, devices
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            log("warning", f"nothing is recorded, {folder} can't be made: {reason}\n  to do: {STATE_HINT}")
        self._size_max = size_max
        self._recorders: dict[str, DeviceRecorder] = {}
        self._cursors: dict[str, tuple[int, int]] = {}  # of which journal, and how far it is read
        self._asked: dict[str, int | None] = {}  # pid of the executor that was asked for its state
        self._told: dict[str, str] = {}

    def resize(self, size_max: int) -> None:
        """From the next segment on."""
        self._size_max = size_max

    def _recorder(self, name: str) -> DeviceRecorder:
        """Devices come and go with configurations; what a gone one left is kept until others need the space."""
        if name not in self._recorders:
            self._recorders[name] = DeviceRecorder(self.folder, name, 0)
        self._recorders[name].size_max = self._size_max // len(self._recorders)
        return self._recorders[name]

    def drain(self) -> None:
        """Take over what is there."""
        for name, device in self._devices.items():
            recorder = self._recorder(name)
            journal = device.lanes.journal_fd
            if self._cursors.get(name, (journal, 0))[0] != journal:
                del self._cursors[name]
            cursor = self._cursors.get(name, (journal, 0))[1]
            for _ in range(READS_AT_ONCE):
                data, cursor, lost = _core.journal_read(journal, cursor)
                self._cursors[name] = journal, cursor
                if not data and not lost:
                    break
                recorder.take(data, lost)
            self._ask_for_state(name, device, recorder)
            self._tell(name, recorder)

    def _ask_for_state(self, name: str, device: ServedDevice, recorder: DeviceRecorder) -> None:
        """Once per gap: what follows can't be replayed until the executor has said where it stands."""
        if not recorder.needs_state:
            self._asked.pop(name, None)
        elif (
            (executor := device.recording_process) is not None
            and executor.ready
            and executor.loaded_message.get("records")
            and self._asked.get(name) != executor.pid
        ):
            self._asked[name] = executor.pid
            executor.send({"op": "record.state"})

    def _tell(self, name: str, recorder: DeviceRecorder) -> None:
        trouble = recorder.trouble
        if recorder.difference is not None:
            trouble = f"the recording of {name} does not replay, a defect of taktd: {recorder.difference}"
        if trouble and trouble != self._told.get(name):
            log("warning", trouble, device=name)
        self._told[name] = trouble

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What control.sock answers to `record`. KeyError for a segment that is not there."""
        self.drain()
        return answer_record(self.folder, list(self._devices), request)

    def close(self) -> None:
        self.drain()
        for recorder in self._recorders.values():
            recorder.close()
