"""A job that a loop has just had done, read beside it from the lane's memory: inputs, and what was answered.

Nothing waits for it, and nobody is told that it is there. A sample may be torn: the client writes its next job's
inputs, or the executor its outputs, while they are copied. It counts only if, after the copy, no later job has been
completed, none has been submitted in the same slot, and a second look at the inputs finds what the first one found:
until a later reply is handed out, a client of our library does not have the slot again. What the client could have
written is judged by lane_view.py, and only compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from taktd.daemon.health.lane_view import LATE, LaneView
from taktd.ipc import _core

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
        """memfd is closed here."""
        self._lane = LaneView(layout, memfd)
        self._tail = self._lane.completed()  # what has gone by is not sampled
        self.torn = 0

    def sample(self) -> Sampled | None:
        """The newest job, if it was done well and in time; None if there is no new one, or it changed meanwhile."""
        lane = self._lane
        tail = lane.completed()
        if tail == self._tail or not tail:
            return None
        self._tail = tail
        job = lane.completion(tail - 1)
        # Of a job that is late the client may have given up the slot.
        if job is None or job.status != OK or job.flags & LATE:
            return None
        inputs, outputs = lane.inputs(job.slot), lane.outputs(job.slot, job.area)
        again = lane.used_again(job.slot, job.sequence) or lane.inputs(job.slot) != inputs
        if again or lane.completed() != tail or lane.completion(tail - 1) != job:
            self.torn += 1
            return None
        return Sampled(job.sequence, inputs, outputs)

    def close(self) -> None:
        self._lane.close()
