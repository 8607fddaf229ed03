"""The lanes of one device: made here, lent to clients, handed to executors, outliving both.

A loop has one lane for as long as the device exists; when its client goes, the executor swaps in a fresh memfd between
two jobs, so that nothing of one client is ever seen by the next. A model's lane lives as long as its client. The memory
of a gone client is released when the executor says that it no longer writes there, or is itself proven dead.

State of a lane:   FREE → ATTACHED → CLEARING → FREE            (loop)
                   OPENING → ATTACHED → CLEARING → gone         (model)
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Final

from taktd.daemon.config import Configuration, Device, Loop, Model
from taktd.daemon.executor_process import ExecutorProcess, Message
from taktd.daemon.lane_protocol import Kind
from taktd.daemon.logbook import log
from taktd.engines.tensors import DTYPE_BY_NUMBER, size_bytes
from taktd.ipc import _core

# Longer than most jobs, shorter than a client's patience: it is told to try again, and does so by itself.
CLEARING_S_MAX: Final = 3.0
OPENING_S_MAX: Final = 10.0
MODEL_LANES_KEPT_MAX: Final = 56  # over a restart; with 64 loops 243 descriptors, of 253 that one message can carry
PAGE_BYTES: Final = 4096
LANE_OVERHEAD_BYTES: Final = 16 * PAGE_BYTES  # header, tensor table, cursors, rings: at most
JOURNAL_RECORDS: Final = 1 << 16  # 2.6 MB: several seconds of a busy device

_lane_ids = count(1)

Inspection = dict[str, Any]


class NotReady(Exception):
    """The executor can't take the lane now; try again."""


class Taken(Exception):
    """Another client has the loop."""


class Full(Exception):
    """The device has no place for another lane."""


class LaneState(Enum):
    FREE = "free"
    OPENING = "opening"
    ATTACHED = "attached"
    CLEARING = "clearing"


@dataclass
class LaneMemory:
    """One memfd and its wake-up socket: the daemon's end, and the client's end until it is handed out."""

    layout: dict[str, Any]
    memfd: int
    wake: int
    client_wake: int

    @property
    def total_size(self) -> int:
        return int(self.layout["total_size"])

    def close_client_end(self) -> None:
        """After it was sent: the client's death must be a hang-up on the daemon's end."""
        if self.client_wake >= 0:
            os.close(self.client_wake)
            self.client_wake = -1

    def close(self) -> None:
        self.close_client_end()
        os.close(self.memfd)
        os.close(self.wake)


@dataclass(eq=False)
class Lane:
    """One place in an executor. index is its number there and in the ledger; id is unique in this daemon's life."""

    index: int
    kind: Kind
    name: str
    model: str
    stats_block: int
    memory: LaneMemory
    state: LaneState = LaneState.FREE
    owner: Any = None  # whoever attached it
    replacement: LaneMemory | None = None
    id: int = field(default_factory=lambda: next(_lane_ids))
    settled: asyncio.Event = field(default_factory=asyncio.Event)


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


def _with_wake(created: Any) -> LaneMemory:
    layout = dict(created)
    memfd = layout.pop("fd")
    try:
        wake, client_wake = _core.wake_pair()
    except OSError:
        os.close(memfd)
        raise
    return LaneMemory(layout, memfd, wake, client_wake)


class DeviceLanes:
    """The lanes of one device and their way through its executor."""

    def __init__(
        self, device: Device, configuration: Configuration, inspections: dict[str, Inspection], epoch: int,
        ended: Callable[[Lane, int], None],
    ) -> None:  # fmt: skip
        """ended(lane, reason): the executor has thrown its client out."""
        self.device, self.inspections, self.epoch = device, inspections, epoch
        self.loop_settings = {loop.name: loop for loop in configuration.loops_on(device.name)}
        self.model_settings = {model.name: model for model in configuration.models_on(device.name)}
        self.executor: ExecutorProcess | None = None
        self._ended = ended
        self._was_ready = False
        self.lane_count = len(self.loop_settings) + configuration.limits.lanes
        self.stats_blocks = {("loop", name): block for block, name in enumerate(self.loop_settings)}
        for name in self.model_settings:
            self.stats_blocks["model", name] = len(self.stats_blocks)
        self.ledger_fd = _core.create_ledger(self.lane_count)
        # A device that nothing uses yet has no block; the page has at least one.
        self.stats_fd = _core.create_stats(max(1, len(self.stats_blocks)))
        self.journal_fd = _core.create_journal(JOURNAL_RECORDS)
        self.loops: dict[str, Lane] = {}
        self.lanes: dict[int, Lane] = {}
        for index, loop in enumerate(self.loop_settings.values()):
            lane = Lane(
                index, Kind.LOOP, loop.name, loop.model, self.stats_blocks["loop", loop.name], self._fresh(loop)
            )
            self.loops[loop.name] = self.lanes[index] = lane
        self._free = list(range(len(self.loops), self.lane_count))

    def _fresh(self, loop: Loop) -> LaneMemory:
        return loop_memory(loop, self.inspections[loop.model], self.epoch)

    @property
    def _ready(self) -> bool:
        return self.executor is not None and self.executor.ready

    def _send(self, message: Message, memory: LaneMemory | None = None) -> None:
        assert self.executor is not None
        self.executor.send(message, (memory.memfd, memory.wake) if memory is not None else ())

    # ---- what an executor is told ----

    def loop_plan(self) -> tuple[list[Message], list[int], bool]:
        """Entries for `configure`, their descriptors, and whether the ledger has something to recover."""
        entries, descriptors = [], [self.ledger_fd, self.stats_fd, self.journal_fd]
        for name, lane in self.loops.items():
            loop = self.loop_settings[name]
            entries.append({
                "name": name, "model": loop.model, "period_ns": loop.period_ns, "deadline_ns": loop.deadline_ns,
                "jitter_ns": loop.jitter_ns, "criticality": loop.criticality, "on_late": loop.on_late,
                "budget_ns": loop.budget_ns, "mk": list(loop.mk) if loop.mk else None, "trigger": loop.trigger,
                "phase_ns": loop.phase_ns, "max_age_ns": loop.max_age_ns, "on_stale": loop.on_stale,
                "lane": lane.index, "stats": lane.stats_block, "layout": lane.memory.layout,
                "attached": lane.state is LaneState.ATTACHED,
            })  # fmt: skip
            descriptors += [lane.memory.memfd, lane.memory.wake]
        return entries, descriptors, self._was_ready

    def model_plan(self, room_bytes: int) -> tuple[list[Message], list[int]]:
        """The lanes of models whose clients are still there, for the `configure` of a successor.

        A client whose lane does not fit into that one message is told to attach again.
        """
        entries: list[Message] = []
        descriptors: list[int] = []
        for lane in [lane for lane in self.lanes.values() if lane.kind is Kind.MODEL]:
            entry = {"lane": lane.index, "model": lane.model, "stats": lane.stats_block, "layout": lane.memory.layout}
            room_bytes -= len(json.dumps(entry)) + 1
            if room_bytes < 0 or len(entries) >= MODEL_LANES_KEPT_MAX:
                if lane.state is LaneState.ATTACHED:
                    self._ended(lane, 0)
                self._drop(lane)
                continue
            entries.append(entry)
            descriptors += [lane.memory.memfd, lane.memory.wake]
        return entries, descriptors

    def model_blocks(self) -> dict[str, int]:
        """Statistics blocks of best effort by model."""
        return {name: self.stats_blocks["model", name] for name in self.model_settings}

    # ---- the executor's life ----

    def executor_ready(self) -> None:
        """It serves the lanes of its plan: what changed since the plan was made is told now."""
        self._was_ready = True
        for lane in list(self.lanes.values()):
            if lane.state is LaneState.CLEARING and lane.kind is Kind.LOOP:
                self._swap(lane)
            elif lane.state is LaneState.CLEARING:
                self._send({"op": "lane.remove", "lane": lane.index})

    def executor_died(self) -> None:
        """It is proven dead: memory it was still asked to give back, or to take, is free."""
        for lane in list(self.lanes.values()):
            if lane.kind is Kind.MODEL and lane.state in (LaneState.OPENING, LaneState.CLEARING):
                self._drop(lane)

    def received(self, message: Message) -> None:
        """`lane.done` and `lane.ended` of the executor."""
        lane = self.lanes.get(message["lane"])
        if lane is None:
            return  # answered twice across a restart
        if message["op"] == "lane.done":
            self._done(lane, message["of"])
        elif lane.state is LaneState.ATTACHED:
            self._ended(lane, message["reason"])
            self.clear(lane)

    def _done(self, lane: Lane, what: str) -> None:
        if lane.state is LaneState.OPENING and what == "add":
            lane.state = LaneState.ATTACHED
            lane.settled.set()
        elif lane.state is LaneState.CLEARING and what == "remove":
            self._drop(lane)
        elif lane.state is LaneState.CLEARING and what == "swap" and lane.replacement is not None:
            lane.memory.close()
            lane.memory, lane.replacement = lane.replacement, None
            lane.state = LaneState.FREE
            lane.settled.set()

    def _drop(self, lane: Lane) -> None:
        lane.memory.close()
        del self.lanes[lane.index]
        heapq.heappush(self._free, lane.index)
        lane.settled.set()

    # ---- attach and detach ----

    async def attach_loop(self, name: str, owner: Any) -> Lane:
        """The loop's lane, cleared of its last client. Raises Taken, NotReady."""
        lane = self.loops[name]
        if not self._was_ready:
            raise NotReady(f"the executor of {self.device.name} is not ready yet")
        if lane.state is LaneState.CLEARING:
            if lane.replacement is None and self._ready:
                self._swap(lane)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lane.settled.wait(), CLEARING_S_MAX)
            if lane.state is LaneState.CLEARING:
                raise NotReady(f"the last client's lane of {name} is still being cleared")
        if lane.state is not LaneState.FREE:
            raise Taken(name)
        lane.state, lane.owner = LaneState.ATTACHED, owner
        lane.id = next(_lane_ids)
        lane.settled.clear()
        if self._ready:
            self._send({"op": "lane.attached", "lane": lane.index})
        return lane

    async def attach_model(self, name: str, owner: Any) -> Lane:
        """A lane of its own for a best-effort client. Raises NotReady, Full."""
        if not self._ready:
            raise NotReady(f"the executor of {self.device.name} is not ready")
        if not self._free:
            raise Full(f"all {self.lane_count} lanes of {self.device.name} are in use")
        model = self.model_settings[name]
        memory = model_memory(model, self.inspections[name], self.epoch)
        index = heapq.heappop(self._free)
        lane = Lane(index, Kind.MODEL, name, name, self.stats_blocks["model", name], memory)
        lane.state, lane.owner = LaneState.OPENING, owner
        self.lanes[index] = lane
        message = {"op": "lane.add", "lane": index, "kind": "model", "model": name, "stats": lane.stats_block}
        self._send({**message, "layout": memory.layout}, memory)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lane.settled.wait(), OPENING_S_MAX)
        if lane.state is not LaneState.ATTACHED:
            if self.lanes.get(index) is lane:
                self.clear(lane)
            raise NotReady(f"the executor of {self.device.name} did not take the lane")
        return lane

    def model_lane_bytes(self, name: str) -> int:
        """What one lane of the model takes, to the page; for charging it before it is made."""
        inspection, slots = self.inspections[name], self.model_settings[name].slots
        tensors = sum(_bytes(t) for t in inspection["inputs"]) + 2 * sum(_bytes(t) for t in inspection["outputs"])
        return slots * (tensors + PAGE_BYTES) + LANE_OVERHEAD_BYTES

    def clear(self, lane: Lane) -> None:
        """The client is gone, or goes: its jobs end, its memory is released as soon as nothing writes there."""
        if lane.state not in (LaneState.ATTACHED, LaneState.OPENING):
            return
        lane.state, lane.owner = LaneState.CLEARING, None
        lane.settled.clear()
        if lane.kind is Kind.LOOP:
            if self._ready:
                self._swap(lane)
        elif self._ready:
            self._send({"op": "lane.remove", "lane": lane.index})
        elif self.executor is None or self.executor.pid is None:
            self._drop(lane)
        # Else it starts, with this lane in its plan: it is asked to remove it once it serves.

    def _swap(self, lane: Lane) -> None:
        """Offer fresh memory. The old one stays ours until the executor has confirmed: if it dies in between, its
        successor starts from the old one and is asked again."""
        if lane.replacement is None:
            try:
                lane.replacement = self._fresh(self.loop_settings[lane.name])
            except OSError as error:
                # Nothing is lost: the next client that asks for the loop, or a restart, tries again.
                log("error", f"no memory for a fresh lane of {lane.name}: {error.strerror}", loop=lane.name)
                return
        message = {"op": "lane.swap", "lane": lane.index, "layout": lane.replacement.layout}
        self._send(message, lane.replacement)

    def attached(self, name: str) -> bool:
        """Whether a client has the loop."""
        return self.loops[name].state is LaneState.ATTACHED

    def close(self) -> None:
        """After the executor has ended."""
        for lane in self.lanes.values():
            lane.memory.close()
            if lane.replacement is not None:
                lane.replacement.close()
        self.lanes.clear()
        for descriptor in (self.ledger_fd, self.stats_fd, self.journal_fd):
            os.close(descriptor)
