"""Completions of loops with `publish: true`, outputs included, read beside the loop from its lane's memory.

The gateway maps the lane read-only and looks at the completion ring about once a period. Nothing waits for it, nobody
is told that it is there; an answer whose slot may have been used again while it was copied is left out, and counted.
What the client could have written is judged by lane_view.py, and only published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from taktd.daemon.health.lane_view import LATE, LaneView
from taktd.ipc import _core

LOOK_S_MIN: Final = 0.001
LOOK_S_MAX: Final = 0.05
_DTYPES: Final = {number: name for name, number in _core.DTYPES.items()}
_STATUSES: Final = {number: name for name, number in _core.STATUSES.items()}
_PATHS: Final = {number: name for name, number in _core.PATHS.items()}
_CAUSES: Final = {number: name for name, number in _core.CAUSES.items()}

Event = dict[str, Any]
Publish = Callable[[str, Event, list[bytes]], None]


class LoopTap:
    """One loop's lane, until it is replaced by another."""

    def __init__(self, loop: str, layout: dict[str, Any], memfd: int, publish: Publish) -> None:
        """memfd is closed here."""
        self.loop, self._publish = loop, publish
        self._lane = LaneView(layout, memfd)
        self._next = self._lane.completed()  # what has gone by is not news
        self._outputs = [
            {"name": t["name"], "datatype": _DTYPES[t["dtype"]], "shape": list(t["dims"])} for t in layout["outputs"]
        ]
        self.left_out = 0
        self._pause_s = min(LOOK_S_MAX, max(LOOK_S_MIN, layout["period_ns"] / 1e9))
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._look)
        tail = self._lane.completed()
        if not self._next <= tail <= self._next + self._lane.entries:
            self.left_out += max(0, tail - self._next) if tail - self._next < 1 << 32 else 0
            self._next = tail
            return
        while self._next < tail:
            self._take(self._next)
            self._next += 1

    def _take(self, number: int) -> None:
        job = self._lane.completion(number)
        if job is None:
            return
        event: Event = {
            "loop": self.loop, "sequence": job.sequence, "status": _STATUSES.get(job.status, "invalid"),
            "late": bool(job.flags & LATE), "path": _PATHS.get(job.path, ""), "cause": _CAUSES.get(job.cause, ""),
            "started_ns": job.started_ns, "ended_ns": job.ended_ns, "t_ns": job.ended_ns, "outputs": [],
        }  # fmt: skip
        tensors: list[bytes] = []
        if event["status"] == "ok":
            event["outputs"] = list(self._outputs)
            tensors = self._lane.outputs(job.slot, job.area)
            if self._lane.used_again(job.slot, job.sequence):
                self.left_out += 1
                return
        self._publish(f"completion.{self.loop}", event, tensors)

    def close(self) -> None:
        self._timer.cancel()
        self._lane.close()
