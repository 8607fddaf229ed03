"""The lanes that one executor serves, and the slow work on them between jobs.

A lane is bound slot by slot, since binding costs up to a millisecond and happens between the jobs of other loops:
adding,
swapping and removing lanes are *chores*, cut into steps that the executor takes in gaps. Nothing here decides when a
job
runs.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from taktd.daemon.executor_link import ExecutorLink
from taktd.daemon.executor_setup import Prepared
from taktd.daemon.plan import queue_of, task_of
from taktd.daemon.record import Recorder
from taktd.daemon.scheduler import Scheduler
from taktd.engines.engine import BatchRun, BoundRun, Tensor, WarmEngine
from taktd.engines.errors import EngineFailure
from taktd.ipc import _core

__all__ = ["LaneTable", "ServedLane"]

LOST: Final = 5
NO_CAUSE: Final = 0
FAILURES_TOLD: Final = 5  # failures of one lane that are reported with their text; the counters tell the rest

Chore = Iterator[None]
"""Work outside the schedule, in steps of well under a millisecond each."""


class ServedLane:
    """One lane in this executor. ``runs[slot]`` is the bound run of a slot at its declared shapes.

    ``shaped`` holds the slots whose job carries shapes of its own.
    """

    __slots__ = (
        "_rehearsal", "area", "cost_ns", "ended_ns", "engine", "failures", "input_dims", "lane", "last_slot", "name",
        "output_bytes", "output_dims", "runs", "server", "shaped",
    )  # fmt: skip

    def __init__(
        self, server: _core.Server, lane: int, name: str, layout: dict[str, Any], engine: WarmEngine, area: int
    ) -> None:
        self.server = server
        self.lane = lane
        self.name = name
        self.engine = engine
        self.area = area
        self.input_dims: list[tuple[int, ...]] = [tuple(t["dims"]) for t in layout["inputs"]]
        self.output_dims: list[tuple[int, ...]] = [tuple(t["dims"]) for t in layout["outputs"]]
        self.runs: list[BoundRun] = []
        self.shaped: set[int] = set()
        self.failures = 0
        self.cost_ns = 0  # what a run is reckoned with; set when the lane is scheduled
        self.ended_ns = 0  # when its last run ended
        self._rehearsal = engine.batch(1)
        self.output_bytes: list[int] = [t["bytes"] for t in layout["outputs"]]
        self.last_slot = -1  # whose outputs are the lane's last answer; -1: there is none yet

    def inputs_of(self, slot: int) -> list[int]:
        """Addresses of the input tensors of ``slot``."""
        return [self.server.slot_address(self.lane, slot, index, 0) for index in range(len(self.input_dims))]

    def outputs_of(self, slot: int) -> list[int]:
        """Addresses of the output tensors of ``slot``, in the output area that this executor owns."""
        first = len(self.input_dims)
        count = len(self.output_dims)
        return [self.server.slot_address(self.lane, slot, first + index, self.area) for index in range(count)]

    def warm(self) -> None:
        """A run on memory of its own, just before a job is expected: code and weights are back in the caches."""
        with suppress(EngineFailure):
            self._rehearsal.run_bound()

    def hold(self, slot: int) -> bool:
        """Copies the last answer into the outputs of ``slot``; False if there is none.

        It lies in a slot that is the client's again: whoever changed it there gets the change back.
        """
        if self.last_slot < 0:
            return False
        for to, source, size in zip(
            self.outputs_of(slot), self.outputs_of(self.last_slot), self.output_bytes, strict=True
        ):
            ctypes.memmove(to, source, size)
        self.last_slot = slot
        return True

    def bind(self, slot: int) -> BoundRun:
        return self.engine.bind(
            [Tensor(a, d) for a, d in zip(self.inputs_of(slot), self.input_dims, strict=True)],
            [Tensor(a, d) for a, d in zip(self.outputs_of(slot), self.output_dims, strict=True)],
        )

    def run_shaped(self, slot: int) -> None:
        """One run at the shapes that the client wrote into the slot; writes the actual output shapes back."""
        shapes = self.server.shapes(self.lane, slot)
        actual = self.engine.run_shaped(
            [Tensor(a, d) for a, d in zip(self.inputs_of(slot), shapes[: len(self.input_dims)], strict=True)],
            [Tensor(a, d) for a, d in zip(self.outputs_of(slot), self.output_dims, strict=True)],
        )
        self.server.set_output_shapes(self.lane, slot, actual)


class LaneTable:
    """``lanes[index]`` for every lane that is ready to run jobs; chores bring lanes in and out."""

    def __init__(
        self,
        server: _core.Server,
        link: ExecutorLink,
        plan: dict[str, Any],
        descriptors: list[int],
        prepared: Prepared,
    ) -> None:
        """Maps and binds every lane of the plan: attaching is cheap afterwards, and nothing is bound late."""
        self.lanes: dict[int, ServedLane] = {}
        self.chores: deque[Chore] = deque()
        self.told: list[dict[str, Any]] = []  # log messages for the supervisor
        self._server = server
        self._scheduler = Scheduler()  # until schedule() brings the real one: nothing is scheduled before
        self._recorder = Recorder(server.record)
        self._costs: dict[str, Any] = {}
        self._link = link
        self._engines = prepared.engines
        self._plan = plan
        self._loops: dict[int, dict[str, Any]] = {loop["lane"]: loop for loop in plan["loops"]}
        self._models: dict[str, dict[str, Any]] = {model["name"]: model for model in plan["models"]}
        self._batches: dict[tuple[str, int], BatchRun] = {}
        for model in plan["models"]:
            for size in range(2, model.get("max_batch", 1) + 1):
                self._batches[model["name"], size] = self._engines[model["name"]].batch(size)
        recover: bool = plan["recover"]
        # Lanes of models are in a plan only when their clients were there before this executor.
        lanes = [*plan["loops"], *plan.get("model_lanes", ())]
        for entry, memfd, wake_fd in zip(lanes, descriptors[::2], descriptors[1::2], strict=True):
            for _ in self._bring_in(entry, memfd, wake_fd, recover=recover):
                pass

    def schedule(self, scheduler: Scheduler, recorder: Recorder, costs: dict[str, Any]) -> None:
        """From now on lanes are scheduled, at the costs they were admitted for; loops without a cost were shed."""
        self._scheduler = scheduler
        self._recorder = recorder
        self._costs = costs
        for lane in self.lanes:
            self._enlist(lane)

    # ---- messages ----

    def handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """``lane.add``, ``lane.swap``, ``lane.remove``, ``lane.attached``."""
        lane = message["lane"]
        match message["op"]:
            case "lane.add":
                self.chores.append(self._added(message, descriptors))
            case "lane.swap":
                self.chores.append(self._swapped(message, descriptors))
            case "lane.remove":
                self.chores.append(self._removed(lane))
            case "lane.attached":
                now_ns = _core.now()
                self._scheduler.reset(lane, now_ns)
                self._recorder.reset(lane, now_ns)
            case other:
                raise ValueError(f"unknown message {other!r} from the supervisor")

    def _added(self, message: dict[str, Any], descriptors: list[int]) -> Chore:
        yield from self._bring_in(message, *descriptors, recover=False)
        self._enlist(message["lane"])
        self._done(message["lane"], "add", 0)

    def _swapped(self, message: dict[str, Any], descriptors: list[int]) -> Chore:
        """A loop's client is gone: its lane ends, a fresh one takes its place."""
        lane = message["lane"]
        dropped = self._take_out(lane)
        loop = self._loops[lane] = self._loops[lane] | {"layout": message["layout"]}
        yield from self._bring_in(loop, *descriptors, recover=False)
        self._enlist(lane)
        self._done(lane, "swap", dropped)

    def _removed(self, lane: int) -> Chore:
        self._done(lane, "remove", self._take_out(lane))
        yield

    def _done(self, lane: int, op: str, dropped: int) -> None:
        self._link.send({"op": "lane.done", "lane": lane, "of": op, "dropped": dropped})

    # ---- in and out ----

    def _bring_in(self, entry: dict[str, Any], memfd: int, wake_fd: int, *, recover: bool) -> Chore:
        index = entry["lane"]
        area = self._plan["area"]
        self._server.add(index, memfd, wake_fd, entry["layout"], entry["stats"], area=area, recover=recover)
        name = entry.get("name", entry["model"])
        lane = ServedLane(self._server, index, name, entry["layout"], self._engines[entry["model"]], area)
        for slot in range(entry["layout"]["slot_count"]):
            lane.runs.append(lane.bind(slot))
            yield
        if recover:
            self._finish_predecessors_jobs(index)
        self.lanes[index] = lane

    def _enlist(self, lane: int) -> None:
        """Makes the lane known to the scheduler."""
        loop = self._loops.get(lane)
        if loop is None:
            model = self.lanes[lane].engine.spec.model
            order = list(self._models).index(model)
            queue = queue_of(self._models[model], order, self._costs["queues"][model])
            self._scheduler.add_queue(lane, queue)
            self._recorder.add(lane, queue, _core.now())
        elif loop["name"] in self._costs["tasks"]:
            order = list(self._loops).index(lane)
            task = task_of(loop, order, self._costs["tasks"][loop["name"]])
            self.lanes[lane].cost_ns = task.cost_ns
            if task.on_late_run:
                self._server.runs_late(lane)
            self._scheduler.add_loop(lane, task)
            self._recorder.add(lane, task, _core.now())

    def _finish_predecessors_jobs(self, lane: int) -> None:
        """What the dead executor had taken can't be trusted to be unstarted or whole: it is answered ``lost``."""
        now_ns = _core.now()
        for _, slot, deadline_ns, _ in self._server.unfinished(lane):
            self._server.complete(lane, slot, LOST, 0, 0, NO_CAUSE, 0, now_ns, deadline_ns)

    def _take_out(self, lane: int) -> int:
        """The client is gone: queued jobs never reach the device. Returns how many jobs were dropped."""
        if self.lanes.pop(lane, None) is None:
            return 0
        self._scheduler.remove(lane)
        self._recorder.remove(lane, _core.now())
        return self._server.remove(lane, None)

    def ended(self, lane: int, reason: int, now_ns: int) -> None:
        """The core has ended a lane whose client broke the protocol; the supervisor closes the connection."""
        if lane in self.lanes:
            self._scheduler.reset(lane, now_ns, attached=False)
            self._recorder.reset(lane, now_ns, attached=False)
        self._link.send({"op": "lane.ended", "lane": lane, "reason": reason})

    # ---- while serving ----

    def batch(self, model: str, size: int) -> BatchRun:
        return self._batches[model, size]

    def failed(self, lane: ServedLane, failure: EngineFailure) -> None:
        """Counts a failure and reports the first few in words."""
        lane.failures += 1
        if lane.failures <= FAILURES_TOLD:
            self.told.append(_log("error", "engine-failed", lane, str(failure)[:1000]))

    def alarm(self, lane: ServedLane, kept: int, at_ns: int) -> None:
        """A loop's (m, k) promise was just broken."""
        loop = self._loops[lane.lane]
        m, k = loop["mk"]
        text = f"loop {lane.name}: {kept} of the last {k} jobs in time, promised {m}; at {at_ns} ns"
        self.told.append(_log("warning", "promise-broken", lane, text))


def _log(level: str, message_id: str, lane: ServedLane, text: str) -> dict[str, Any]:
    return {"op": "log", "level": level, "message_id": message_id, "text": text, "fields": {"loop": lane.name}}
