"""A recording as Chrome trace JSON, which Perfetto and chrome://tracing show: one process per device, one track per
lane.

Bars are runs; instants are releases, and misses of jobs that never ran. Written as a stream: a recording may be
long. Times are microseconds since the first job of the recording, as the format wants them; nothing is computed from
them.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

from taktd.daemon.recording.record import Recording
from taktd.daemon.recording.story import RAN, Outcome, collect_outcomes
from taktd.daemon.schedule.cause import NAMES

__all__ = ["write_trace"]


class _Writer:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.count = 0
        self.origin_ns: int | None = None
        self.devices: dict[str, int] = {}
        self.tracks: set[tuple[str, int, str]] = set()

    def event(self, event: dict[str, Any]) -> None:
        self.stream.write((",\n" if self.count else "") + json.dumps(event))
        self.count += 1

    def us(self, t_ns: int) -> float:
        assert self.origin_ns is not None
        return (t_ns - self.origin_ns) / 1000

    def take(self, job: Outcome) -> None:
        if self.origin_ns is None:
            self.origin_ns = job.release_ns
        pid = self._track(job)
        common: dict[str, Any] = {"pid": pid, "tid": job.lane}
        about = {
            "sequence": job.sequence, "queued_us": self._span(job.release_ns, job.started_ns),
            "deadline_us": self.us(job.deadline_ns) if job.deadline_ns else None, "cost_us": job.cost_ns / 1000,
            "early": job.early, "late": job.late, "overrun": job.overrun, "cause": NAMES[job.cause], "batch": job.batch,
        }  # fmt: skip
        self.event({**common, "name": "release", "ph": "i", "s": "t", "ts": self.us(job.release_ns)})
        if job.kind == RAN:
            name = f"{job.title}{' LATE' if job.late else ''}"
            color = {"cname": "terrible"} if job.late else {} if job.loop else {"cname": "grey"}
            start = {"ts": self.us(job.started_ns), "dur": self._span(job.started_ns, job.ended_ns)}
            self.event({**common, **start, **color, "name": name, "ph": "X", "args": about})
        else:
            name = f"{job.title} {job.kind}"
            self.event({**common, "name": name, "ph": "i", "s": "t", "ts": self.us(job.ended_ns), "args": about})

    def _span(self, start_ns: int, end_ns: int) -> float | None:
        return (end_ns - start_ns) / 1000 if start_ns and end_ns else None

    def _track(self, job: Outcome) -> int:
        pid = self.devices.get(job.device)
        if pid is None:
            pid = self.devices[job.device] = len(self.devices) + 1
            self.event({"pid": pid, "name": "process_name", "ph": "M", "args": {"name": job.device}})
        key = (job.device, job.lane, job.name)
        if key not in self.tracks:
            self.tracks.add(key)
            name = job.name if job.loop else f"{job.name} (best effort)"
            self.event({"pid": pid, "tid": job.lane, "name": "thread_name", "ph": "M", "args": {"name": name}})
        return pid


def write_trace(recording: Recording, stream: TextIO) -> int:
    """Writes the whole JSON; returns the number of events. Raises StateMalformed."""
    writer = _Writer(stream)
    stream.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
    collect_outcomes(recording, writer.take)
    stream.write("\n]}\n")
    return writer.count
