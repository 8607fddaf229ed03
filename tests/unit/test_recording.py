"""Recording, its file, and replay, over a scheduler that is driven by chance."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from taktd.daemon.recording import record as rec
from taktd.daemon.recording.record import (
    Recorder,
    RecordingRefused,
    Section,
    read_recording,
    write_recording,
)
from taktd.daemon.recording.recorder_file import JOURNAL_RECORD, DeviceRecorder, collect, segments_of
from taktd.daemon.recording.replay import replay
from taktd.daemon.recording.scheduler_state import StateMalformed, decode_state, encode_state
from taktd.daemon.schedule.job import EXPIRE, START, Queue, Task
from taktd.daemon.scheduler import Scheduler
from tests.recordings import sections_of

MS = 1_000_000


class Journal:
    """Records in a list, as the executor's journal would have them."""

    def __init__(self) -> None:
        self.records: list[rec.Record] = []

    def write(self, kind: int, lane: int, aux: int, a: int, b: int, t_ns: int) -> None:
        assert 0 <= kind < 1 << 16
        assert 0 <= lane < 1 << 16
        assert 0 <= aux < 1 << 32
        assert 0 <= a < 1 << 64
        assert 0 <= b < 1 << 64
        self.records.append((t_ns, kind, lane, aux, a, b))

    def bytes40(self, first: int = 0) -> bytes:
        return b"".join(JOURNAL_RECORD.pack(*r, first + n + 1) for n, r in enumerate(self.records[first:]))


class Drive:
    """A device under random load: loops (one clock-driven), two best-effort lanes that come and go, cancellations."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.journal = Journal()
        self.recorder = Recorder(self.journal.write)
        self.scheduler = Scheduler(2 * MS, 100_000)
        self.now = 5 * MS
        self.sequence = [0] * 6
        self.queued: list[tuple[int, int]] = []
        self.ending = 0
        for lane, (period, cost) in enumerate([(4 * MS, 500_000), (10 * MS, 2 * MS), (20 * MS, MS)]):
            task = Task(f"loop{lane}", period, period - lane * MS, lane * 100_000, cost, order=lane, m=2, k=4,
                        clock=lane == 2, max_age_ns=30 * MS)  # fmt: skip
            self.scheduler.add_loop(lane, task)
        self.scheduler.add_queue(4, Queue("policy", (400_000, 600_000, 800_000), (2,), MS))
        self.recorder.state(self.scheduler, self.now)
        self.known = [0, 1, 2, 4]

    def step(self) -> None:
        draw = self.draw
        self.now += draw.randint(1, 900_000)
        if self.ending and self.now >= self.ending:
            self.now = self.ending
            switched_out = draw.choice((0, 0, 1000))
            self.scheduler.finish(self.now, switched_out)
            self.recorder.finish(self.now, switched_out)
            self.ending = 0
        elif draw.random() < 0.7:
            self._submit(draw.choice(self.known))
        elif draw.random() < 0.3 and self.queued:
            lane, sequence = draw.choice(self.queued)
            if lane in self.known:
                self._take(lane, sequence)
        elif draw.random() < 0.05:
            self._rare()
        yielding = draw.random() < 0.05
        while True:
            action = self.scheduler.decide(self.now, yielding)
            self.recorder.decided(action, self.now, yielding)
            if action.kind == START:
                jobs = action.jobs
                self.ending = self.now + draw.randint(jobs[0].cost_ns // 2, jobs[0].cost_ns + 20_000)
            elif action.kind != EXPIRE:
                return

    def _submit(self, lane: int) -> None:
        self.sequence[lane] += 1
        release = self.now - self.draw.choice((0, 1000))
        deadline = self.draw.choice((0, 0, self.now + self.draw.randint(1, 9 * MS)))
        self.scheduler.submit(lane, self.sequence[lane], self.sequence[lane] % 4, release, deadline, self.now)
        self.recorder.submit(lane, self.sequence[lane], self.sequence[lane] % 4, release, deadline, self.now)
        self.queued = [*self.queued[-20:], (lane, self.sequence[lane])]

    def _take(self, lane: int, sequence: int) -> None:
        if self.draw.random() < 0.5:
            job = self.scheduler.cancel(lane, sequence, self.now)
            self.recorder.cancel(lane, sequence, job is not None, self.now)
        else:
            self.scheduler.next_certain_expiry()
            self.recorder.watch(self.now)
            job = self.scheduler.expired_elsewhere(lane, sequence, self.now)
            self.recorder.expired_elsewhere(lane, sequence, job is not None, self.now)

    def _rare(self) -> None:
        if 5 in self.known:
            self.known.remove(5)
            self.scheduler.remove(5)
            self.recorder.remove(5, self.now)
        else:
            plan = Queue("other", (300_000,))
            self.scheduler.add_queue(5, plan)
            self.recorder.add(5, plan, self.now)
            self.known.append(5)
        self.scheduler.reset(0, self.now)
        self.recorder.reset(0, self.now)
        self.scheduler.handover_ns = self.now
        self.recorder.handover(self.now, self.now)


def driven(steps: int, seed: int = 1) -> Drive:
    drive = Drive(seed)
    for _ in range(steps):
        drive.step()
    return drive


def as_file(recording: list[Section]) -> bytes:
    stream = BytesIO()
    write_recording(stream, recording)
    return stream.getvalue()


@pytest.fixture(scope="module")
def recording() -> list[Section]:
    return sections_of("cpu0", driven(6_000).journal.records)


def test_replay_decides_the_same(recording: list[Section]) -> None:
    done = replay(recording)
    assert done.difference is None
    assert done.decisions > 6_000


def test_replay_decides_the_same_in_another_process(recording: list[Section], tmp_path: Path) -> None:
    file = tmp_path / "run.taktrec"
    file.write_bytes(as_file(recording))
    code = (
        "import sys; from taktd.daemon.recording.record import read_recording;"
        "from taktd.daemon.recording.replay import replay;"
        "d = replay(read_recording(open(sys.argv[1], 'rb').read())); print(d.decisions, d.difference)"
    )
    out = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(replay(recording).decisions), "None"]


def test_replay_names_the_first_difference(recording: list[Section]) -> None:
    # The canary: a replay that compares nothing would pass every other test here.
    section = recording[0]
    records = list(section)
    index = next(n for n, r in enumerate(records) if n > 500 and r[1] == rec.STARTED)
    t_ns, kind, lane, aux, a, b = records[index]
    altered = bytearray(section.records)
    rec.RECORD.pack_into(altered, index * rec.RECORD.size, t_ns, kind, lane, aux, a + 1, b)
    difference = replay([Section("cpu0", section.state, altered)]).difference
    assert difference is not None
    assert difference.index == index
    assert f"job {a + 1}" in difference.text()
    assert f"job {a}" in difference.replayed


def test_a_missing_event_is_a_difference(recording: list[Section]) -> None:
    section = recording[0]
    at = next(n for n, r in enumerate(section) if n > 300 and r[1] == rec.SUBMIT) * rec.RECORD.size
    shorter = section.records[:at] + section.records[at + rec.RECORD.size :]
    # A job that was never submitted can't start: another decision, or waiting instead.
    assert replay([Section("cpu0", section.state, shorter)]).difference is not None


def test_a_file_gives_back_what_was_written(recording: list[Section]) -> None:
    read = read_recording(as_file([*recording, Section("gpu0", recording[0].state)]))
    assert [(s.device, s.state, bytes(s.records)) for s in read[:-1]] == [
        (s.device, s.state, bytes(s.records)) for s in recording
    ]
    assert read[-1].device == "gpu0"


def test_a_truncated_file_is_refused_at_every_length(recording: list[Section]) -> None:
    small = as_file([Section("cpu0", recording[0].state, recording[0].records[:320])])
    for length in [*range(40), *range(40, len(small), 97), len(small) - 1]:
        with pytest.raises(RecordingRefused, match=r"truncated|no recording"):
            read_recording(small[:length])
    assert len(read_recording(small)) == 1


def test_an_altered_byte_is_refused(recording: list[Section]) -> None:
    small = as_file([Section("cpu0", recording[0].state, recording[0].records[:320])])
    for at in range(0, len(small), 61):
        altered = bytearray(small)
        altered[at] ^= 0x40
        with pytest.raises(RecordingRefused):
            read_recording(bytes(altered))


def test_another_version_is_refused_and_named(recording: list[Section]) -> None:
    data = bytearray(as_file(recording))
    struct.pack_into("<I", data, 8, 7)
    with pytest.raises(RecordingRefused, match="version 7"):
        read_recording(bytes(data))


def test_a_state_survives_text_at_any_time() -> None:
    drive = Drive(3)
    for _ in range(120):
        drive.step()
        text = encode_state(drive.scheduler)
        assert encode_state(decode_state(text)) == text


@pytest.mark.parametrize("text", ["", "[]", "7", '[["os", {}]]', '[["Task", {}]]', '[["l", []]]', '[["m", [[[], 1]]]]'])
def test_a_malformed_state_is_refused(text: str) -> None:
    with pytest.raises(StateMalformed):
        decode_state(text)


def test_files_stay_bounded_and_each_start_replays(tmp_path: Path) -> None:
    drive = driven(20_000)
    data = drive.journal.bytes40()
    size = 8 * (64 << 10)
    recorder = DeviceRecorder(tmp_path, "cpu0", size)
    for at in range(0, len(data), 40 * 1000):
        recorder.take(data[at : at + 40 * 1000])
    recorder.close()
    assert recorder.difference is None
    assert recorder.trouble == ""
    files = segments_of(tmp_path, "cpu0")
    assert len(files) > 4
    assert not (tmp_path / "cpu0-00000001.taktrec").exists()
    assert sum(path.stat().st_size for path in files) <= size + size // 4
    kept = read_recording(collect(tmp_path, ["cpu0"]))
    assert replay(kept).difference is None
    assert list(kept[-1])[-1] == drive.journal.records[-1]


def test_after_a_loss_recording_goes_on_from_the_next_state(tmp_path: Path) -> None:
    drive = driven(200)
    recorder = DeviceRecorder(tmp_path, "cpu0", 1 << 20)
    assert recorder.needs_state
    recorder.take(drive.journal.bytes40())
    assert not recorder.needs_state
    for _ in range(100):
        drive.step()
    seen = len(drive.journal.records)
    recorder.take(b"", lost=50)
    assert recorder.needs_state
    drive.recorder.state(drive.scheduler, drive.now)
    for _ in range(200):
        drive.step()
    recorder.take(drive.journal.bytes40(seen))
    recorder.close()
    assert not recorder.needs_state
    kept = read_recording(collect(tmp_path, ["cpu0"]))
    assert [section.lost for section in kept] == [0, 50]
    assert replay(kept).difference is None


def test_a_disk_that_refuses_stops_recording_and_says_so(tmp_path: Path) -> None:
    drive = driven(50)
    recorder = DeviceRecorder(tmp_path / "missing", "cpu0", 1 << 20)
    recorder.take(drive.journal.bytes40())
    assert "can't be written" in recorder.trouble
    assert recorder.needs_state


def test_a_recorder_of_another_run_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = DeviceRecorder(tmp_path, "cpu0", 1 << 20)
        recorder.take(driven(50).journal.bytes40())
        recorder.close()
    (tmp_path / "cpu0-00000001.taktrec").write_bytes(b"broken off")
    assert len(read_recording(collect(tmp_path, ["cpu0"]))) == 1


def test_a_folder_that_can_t_be_used_costs_the_recording_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")  # root may read any folder; nobody can read this one
    recorder = DeviceRecorder(folder, "c0", 1 << 20)
    drive = Drive(7)
    recorder.take(drive.journal.bytes40())
    assert "can't be written" in recorder.trouble
    assert recorder.needs_state
    assert segments_of(folder, "c0") == []
    recorder.close()
