"""Memory of one lane as the supervisor makes it: a sealed memfd and its wake-up socket, for a loop or for a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from taktd.daemon.config.configuration import Loop, Model
from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.supervision.device_plan import Inspection
from taktd.engines.tensors import DTYPE_BY_NUMBER, size_bytes
from taktd.ipc import _core

PAGE_BYTES: Final = 4096
LANE_OVERHEAD_BYTES: Final = 16 * PAGE_BYTES  # header, tensor table, cursors, rings: at most


@dataclass(eq=False)
class LaneMemory:
    """One memfd and its wake-up socket: the daemon's end, and the client's end until it is handed out."""

    layout: dict[str, Any]
    memfd: int
    wake: int
    client_wake: int

    @property
    def total_size(self) -> int:
        return int(self.layout["total_size"])

    @property
    def descriptors(self) -> tuple[int, int]:
        """What an executor gets."""
        return self.memfd, self.wake

    def close_client_end(self) -> None:
        """After it was sent: the client's death must be a hang-up on the daemon's end."""
        if self.client_wake >= 0:
            os.close(self.client_wake)
            self.client_wake = -1

    def close(self) -> None:
        self.close_client_end()
        os.close(self.memfd)
        os.close(self.wake)


def _tensors(tensors: list[dict[str, Any]]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(t["name"], t["dtype"], tuple(t["dims"])) for t in tensors]


def _bytes(tensor: dict[str, Any]) -> int:
    """A tensor's place in a slot: whole pages."""
    size = size_bytes(DTYPE_BY_NUMBER[tensor["dtype"]], tuple(tensor["dims"]))
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def loop_memory(loop: Loop, inspection: Inspection, epoch: int) -> LaneMemory:
    """Fresh memory for a loop: fixed shapes."""
    layout = _core.create_lane(
        loop.name, loop.model, int(Kind.LOOP), _tensors(inspection["inputs"]), _tensors(inspection["outputs"]),
        slot_count=loop.slots, dynamic=False, period_ns=loop.period_ns, deadline_ns=loop.deadline_ns,
        jitter_ns=loop.jitter_ns, epoch=epoch, trigger=1 if loop.trigger == "clock" else 0,
    )  # fmt: skip
    return _with_wake(layout)


def model_memory(model: Model, inspection: Inspection, epoch: int) -> LaneMemory:
    """Fresh memory for a best-effort client of a model; its jobs may carry shapes where the model leaves them open."""
    layout = _core.create_lane(
        model.name, model.name, int(Kind.MODEL), _tensors(inspection["inputs"]), _tensors(inspection["outputs"]),
        slot_count=model.slots, dynamic=bool(inspection["dynamic"]), epoch=epoch,
    )  # fmt: skip
    return _with_wake(layout)


def model_lane_bytes(model: Model, inspection: Inspection) -> int:
    """What one lane of the model takes, to the page; for charging it before it is made."""
    tensors = sum(_bytes(t) for t in inspection["inputs"]) + 2 * sum(_bytes(t) for t in inspection["outputs"])
    return model.slots * (tensors + PAGE_BYTES) + LANE_OVERHEAD_BYTES


def _with_wake(created: Any) -> LaneMemory:
    layout = dict(created)
    memfd = layout.pop("fd")
    try:
        wake, client_wake = _core.wake_pair()
    except OSError:
        os.close(memfd)
        raise
    return LaneMemory(layout, memfd, wake, client_wake)
