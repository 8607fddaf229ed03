"""The lanes of one device: made here, lent to clients, told to executors, outliving both.

Several executors may know a lane: the one that serves it, a stand-in, one that is about to take over. Each is told
every change, each says when it has followed, and a lane is given to a client only when all of them have. The ledger
knows which memory it speaks of, so an executor that takes over in between starts a lane of other memory anew.

A loop has one lane for as long as its layout stays the same; when its client goes it gets fresh memory, so that nothing
of one client is ever seen by the next. A model's lane lives as long as its client.

State of a lane:   FREE → ATTACHED → CLEARING → FREE            (loop)
                   OPENING → ATTACHED → CLEARING → gone         (model)
                   any → OVER                                   (loop, ended by a change; FREE if that is taken back)
"""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Any, Final, Protocol

from taktd.daemon.config.configuration import Loop, Model
from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import DevicePlan, lane_signature, model_signature
from taktd.daemon.supervision.executor_process import Message
from taktd.daemon.supervision.lane_memory import LaneMemory, loop_memory, model_memory
from taktd.ipc import _core

# Longer than most jobs, shorter than a client's patience: it is told to try again, and does so by itself.
CLEARING_S_MAX: Final = 3.0
OPENING_S_MAX: Final = 10.0
ANSWER_S_MAX: Final = 10.0  # an executor that has not followed by then hangs
MODEL_LANES_KEPT_MAX: Final = 40  # told in one message with the loops; those beyond are told to attach again
LOOP_PLACES: Final = 128  # of the ledger: twice what a device can have, for the time in which two plans exist
MODEL_PLACES_MIN: Final = 256
STATS_BLOCKS: Final = 512  # of loops and models that a device has ever had
JOURNAL_RECORDS: Final = 1 << 16  # 2.6 MB: several seconds of a busy device

_lane_ids = count(1)


def new_token() -> int:
    """A secret of 63 bits, never 0."""
    return secrets.randbits(63) | 1


def lane_ids_after(last: int) -> None:
    """Ids that were given by a supervisor before this one are not given again."""
    global _lane_ids
    _lane_ids = count(max(last + 1, next(_lane_ids)))


def new_journal() -> int:
    """An empty journal of a device's usual size."""
    return _core.create_journal(JOURNAL_RECORDS)


Arrangement = dict[str, "Lane"]
"""The lanes of a plan's loops, by name."""


class NotReady(Exception):
    """The executor can't take the lane now; try again."""


class Taken(Exception):
    """Another client has the loop."""


class Full(Exception):
    """The device has no place for another lane."""


class Follower(Protocol):
    """An executor that knows lanes of this device."""

    home: str  # the device whose executor it is

    @property
    def ready(self) -> bool: ...

    @property
    def plan(self) -> DevicePlan: ...

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None: ...

    def hangs(self, why: str) -> None: ...


class LaneState(Enum):
    FREE = "free"
    OPENING = "opening"
    ATTACHED = "attached"
    CLEARING = "clearing"
    OVER = "over"


@dataclass
class Waiting:
    """Answers that are missing, and who is told when they don't come."""

    answers: int
    timer: asyncio.TimerHandle


@dataclass(eq=False)
class Lane:
    """One place in the ledger: index. id is unique in this daemon's life, and new for each client.

    known: which memory each executor has, or will have when it has answered; waiting: whose answers are missing;
    worn: a client has used this memory, and there was none to take its place.
    """

    index: int
    kind: Kind
    name: str
    model: str
    stats_block: int
    memory: LaneMemory
    signature: tuple[Any, ...]
    renew: Callable[[], LaneMemory] | None = None  # loops only
    state: LaneState = LaneState.FREE
    owner: Any = None  # whoever attached it
    id: int = field(default_factory=lambda: next(_lane_ids))
    token: int = field(default_factory=new_token)  # who knows it may claim the lane from another supervisor
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    known: dict[Follower, LaneMemory] = field(default_factory=dict)
    waiting: dict[Follower, Waiting] = field(default_factory=dict)
    worn: bool = False
    left: set[Follower] = field(default_factory=set)  # who had it when a change ended it


def ownership(lane: Lane) -> Message | None:
    """What executors keep of a lane's client, for a supervisor after this one. None while there is none."""
    return {"id": lane.id, "token": lane.token} if lane.owner is not None else None


class DeviceLanes:
    """The lanes of one device, its ledger, statistics and journal."""

    def __init__(
        self, name: str, lanes_max: int, ended: Callable[[Lane, int, str], None],
        files: tuple[int, int, int] | None = None,
    ) -> None:  # fmt: skip
        """ended(lane, reason, text): the client's lane is over, by the executor's verdict (reason) or ours (text).

        files: ledger, statistics and journal of a supervisor before this one (see inherited_lanes.py).
        """
        self.name, self.epoch = name, 1
        self._ended = ended
        self.followers: list[Follower] = []
        self.serving: Follower | None = None  # who owns the ledger
        self.served_once = False
        places = max(lanes_max, MODEL_PLACES_MIN)
        self.lane_count = LOOP_PLACES + places
        self.stats_blocks: dict[tuple[str, str], int] = {}
        self.ledger_fd, self.stats_fd, self.journal_fd = files or (
            _core.create_ledger(self.lane_count), _core.create_stats(STATS_BLOCKS), new_journal(),
        )  # fmt: skip
        self.loops: Arrangement = {}
        self.lanes: dict[int, Lane] = {}
        self._free = {Kind.LOOP: list(range(LOOP_PLACES)), Kind.MODEL: list(range(LOOP_PLACES, self.lane_count))}
        self.closed = False

    def stats_block(self, kind: str, name: str) -> int:
        """Counters of a loop or model: the same ones for as long as taktd runs. Raises Full."""
        if (kind, name) not in self.stats_blocks:
            if len(self.stats_blocks) >= STATS_BLOCKS:
                raise Full(f"{self.name} has had {STATS_BLOCKS} loops and models; restart taktd for more")
            self.stats_blocks[kind, name] = len(self.stats_blocks)
        return self.stats_blocks[kind, name]

    # ---- plans ----

    def arrange(self, plan: DevicePlan) -> Arrangement:
        """Lanes for a plan's loops: those there are where the layout is the same, else new ones.

        Raises Full, OSError.
        """
        arrangement: Arrangement = {}
        try:
            for loop in plan.loops:
                signature = lane_signature(loop, plan.inspections[loop.model])
                lane = self.loops.get(loop.name)
                if lane is None or lane.signature != signature:
                    lane = self._new_loop_lane(loop, plan, signature)
                arrangement[loop.name] = lane
        except (Full, OSError):
            self.discard(arrangement)
            raise
        return arrangement

    def _new_loop_lane(self, loop: Loop, plan: DevicePlan, signature: tuple[Any, ...]) -> Lane:
        if not self._free[Kind.LOOP]:
            raise Full(f"{self.name} has no place for another loop's lane")
        renew = self.renewer(loop, plan)
        block, memory = self.stats_block("loop", loop.name), renew()
        index = heapq.heappop(self._free[Kind.LOOP])
        lane = Lane(index, Kind.LOOP, loop.name, loop.model, block, memory, signature, renew)
        self.lanes[index] = lane
        return lane

    def renewer(self, loop: Loop, plan: DevicePlan) -> Callable[[], LaneMemory]:
        """Makes fresh memory for a loop's lane."""
        return lambda: loop_memory(loop, plan.inspections[loop.model], self.epoch)

    def inherit(self, lane: Lane) -> None:
        """A lane that a supervisor before this one made, at its place in the ledger."""
        self.lanes[lane.index] = lane
        self._free[lane.kind].remove(lane.index)
        heapq.heapify(self._free[lane.kind])
        if lane.kind is Kind.LOOP:
            self.loops[lane.name] = lane

    def install(self, arrangement: Arrangement) -> Arrangement:
        """From now on clients get these lanes; returns those of before."""
        before, self.loops = self.loops, arrangement
        return before

    def discard(self, arrangement: Arrangement) -> None:
        """Forget the lanes of a plan that is not used any more, but for those still in use."""
        for lane in arrangement.values():
            if self.loops.get(lane.name) is not lane and lane.index in self.lanes:
                self._drop(lane)

    def loop_entries(
        self, arrangement: Arrangement, loops: Mapping[str, tuple[Loop, str]], follower: Follower
    ) -> tuple[list[Message], list[int]]:
        """Entries for `configure` of loops with the model that each runs there, and their descriptors."""
        entries: list[Message] = []
        descriptors: list[int] = []
        for name, (loop, model) in loops.items():
            lane = arrangement[name]
            entries.append({
                "name": name, "model": model, "period_ns": loop.period_ns, "deadline_ns": loop.deadline_ns,
                "jitter_ns": loop.jitter_ns, "criticality": loop.criticality, "on_late": loop.on_late,
                "budget_ns": loop.budget_ns, "mk": list(loop.mk) if loop.mk else None, "trigger": loop.trigger,
                "phase_ns": loop.phase_ns, "max_age_ns": loop.max_age_ns, "on_stale": loop.on_stale,
                "switch": loop.switch.model_dump() if loop.stood_in_for else None,
                "lane": lane.index, "stats": lane.stats_block, "layout": lane.memory.layout,
                "attached": lane.state is LaneState.ATTACHED, "owner": ownership(lane),
            })  # fmt: skip
            lane.known[follower] = lane.memory
            descriptors += lane.memory.descriptors
        return entries, descriptors

    def model_entries(self, follower: Follower, room_bytes: int, keep_max: int) -> tuple[list[Message], list[int]]:
        """The lanes of models whose clients are there, for the `configure` of an executor that shall have them too.

        A client whose lane does not fit into that one message is told to attach again, once nobody else serves it.
        """
        entries: list[Message] = []
        descriptors: list[int] = []
        for lane in [lane for lane in self.lanes.values() if lane.kind is Kind.MODEL]:
            if not self.shall_have(follower, lane) or lane.state is LaneState.CLEARING:
                continue
            entry = {
                "lane": lane.index, "model": lane.model, "stats": lane.stats_block, "layout": lane.memory.layout,
                "attached": True, "owner": ownership(lane),
            }  # fmt: skip
            room_bytes -= len(json.dumps(entry)) + 1
            if room_bytes < 0 or len(entries) >= min(keep_max, MODEL_LANES_KEPT_MAX):
                continue  # it is told after the start, like a lane that came meanwhile
            entries.append(entry)
            lane.known[follower] = lane.memory
            descriptors += lane.memory.descriptors
        return entries, descriptors

    def shall_have(self, follower: Follower, lane: Lane) -> bool:
        """Lanes of models are for the device's own executors, if their plan has the model with these tensors."""
        plan = follower.plan
        model = next((m for m in plan.models if m.name == lane.model), None)
        if follower.home != self.name or model is None:
            return False
        return model_signature(model, plan.inspections[model.name]) == lane.signature

    # ---- executors come and go ----

    def joined(self, follower: Follower) -> None:
        """It is ready: what changed since its plan was made is told now."""
        self.followers.append(follower)
        for lane in list(self.lanes.values()):
            if lane.kind is Kind.MODEL:
                self._catch_up(follower, lane)
            elif follower in lane.known and lane.known[follower] is not lane.memory:
                self._tell(lane, follower, "lane.swap", lane.memory)

    def _catch_up(self, follower: Follower, lane: Lane) -> None:
        if follower in lane.known and lane.state is LaneState.CLEARING:
            self._tell(lane, follower, "lane.remove")
        elif follower not in lane.known and lane.state is not LaneState.CLEARING and self.shall_have(follower, lane):
            self._add(lane, follower)

    def left(self, follower: Follower) -> None:
        """It is proven dead: nothing it was asked for comes, nothing of it writes any more."""
        if follower in self.followers:
            self.followers.remove(follower)
        if self.serving is follower:
            self.serving = None
        for lane in list(self.lanes.values()):
            lane.known.pop(follower, None)
            lane.left.discard(follower)
            if waiting := lane.waiting.pop(follower, None):
                waiting.timer.cancel()
            self._settle(lane)

    @property
    def clearing(self) -> int:
        """Lanes that are between two clients, or that an executor has not answered for."""
        return sum(lane.state is LaneState.CLEARING or bool(lane.waiting) for lane in self.lanes.values())

    def synced(self, follower: Follower) -> bool:
        """Ready, and it has followed every change: it can take over."""
        return follower in self.followers and not any(follower in lane.waiting for lane in self.lanes.values())

    def _tell(self, lane: Lane, follower: Follower, op: str, memory: LaneMemory | None = None, **more: Any) -> None:
        message: Message = {"op": op, "device": self.name, "lane": lane.index, **more}
        if memory is not None:
            message["layout"] = memory.layout
            lane.known[follower] = memory
        missing = 1
        if waiting := lane.waiting.pop(follower, None):
            waiting.timer.cancel()
            missing += waiting.answers
        why = f"has not answered {op} for lane {lane.index} of {self.name} for {ANSWER_S_MAX:.0f} s"
        timer = asyncio.get_running_loop().call_later(ANSWER_S_MAX, follower.hangs, why)
        lane.waiting[follower] = Waiting(missing, timer)
        follower.send(message, memory.descriptors if memory is not None else ())

    def _add(self, lane: Lane, follower: Follower) -> None:
        more = {"kind": "model", "model": lane.model, "stats": lane.stats_block, "owner": ownership(lane)}
        self._tell(lane, follower, "lane.add", lane.memory, **more)

    # ---- what executors say ----

    def received(self, follower: Follower, message: Message) -> None:
        """`lane.done` and `lane.ended`."""
        lane = self.lanes.get(message["lane"])
        if lane is None:
            return  # answered twice across a restart
        if message["op"] == "lane.done":
            waiting = lane.waiting.get(follower)
            if waiting is not None:
                waiting.answers -= 1
                if waiting.answers == 0:
                    waiting.timer.cancel()
                    del lane.waiting[follower]
            if message["of"] == "remove":
                lane.known.pop(follower, None)
            self._settle(lane)
        elif lane.state is LaneState.ATTACHED:
            self._ended(lane, message["reason"], "")
            self.clear(lane)

    def _settle(self, lane: Lane) -> None:
        """Everybody who must follow has: the lane's state moves on."""
        if lane.waiting:
            return
        if lane.state is LaneState.OPENING and lane.known:
            lane.state = LaneState.ATTACHED
        elif lane.state is LaneState.CLEARING and lane.kind is Kind.LOOP:
            lane.state = LaneState.CLEARING if lane.worn else LaneState.FREE
        elif lane.state is LaneState.CLEARING and not lane.known:
            self._drop(lane)
        lane.settled.set()

    def _drop(self, lane: Lane) -> None:
        for waiting in lane.waiting.values():
            waiting.timer.cancel()
        lane.memory.close()
        del self.lanes[lane.index]
        heapq.heappush(self._free[lane.kind], lane.index)
        lane.settled.set()

    # ---- attach and detach ----

    async def attach_loop(self, name: str, owner: Any) -> Lane:
        """The loop's lane, cleared of its last client. Raises Taken, NotReady."""
        if not self.served_once:
            raise NotReady(f"the executor of {self.name} is not ready yet")
        lane = self.loops[name]
        if lane.state is LaneState.CLEARING:
            if lane.worn:
                self.refresh(lane)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lane.settled.wait(), CLEARING_S_MAX)
        if lane is not self.loops.get(name) or lane.state in (LaneState.CLEARING, LaneState.OVER):
            raise NotReady(f"the last client's lane of {name} is still being cleared")
        if lane.state is not LaneState.FREE:
            raise Taken(name)
        lane.state, lane.owner = LaneState.ATTACHED, owner
        lane.id, lane.token = next(_lane_ids), new_token()
        for follower in self.followers:
            if follower in lane.known:
                told = {"op": "lane.attached", "device": self.name, "lane": lane.index, "owner": ownership(lane)}
                follower.send(told)
        return lane

    async def attach_model(self, model: Model, owner: Any) -> Lane:
        """A lane of its own for a best-effort client. Raises NotReady, Full."""
        serving = self.serving
        if serving is None or serving.home != self.name or not serving.ready:
            raise NotReady(f"the executor of {self.name} is not ready")
        if not self._free[Kind.MODEL]:
            raise Full(f"all {self.lane_count - LOOP_PLACES} lanes of {self.name} are in use")
        inspection = serving.plan.inspections[model.name]
        block, memory = self.stats_block("model", model.name), model_memory(model, inspection, self.epoch)
        index = heapq.heappop(self._free[Kind.MODEL])
        lane = Lane(index, Kind.MODEL, model.name, model.name, block, memory, model_signature(model, inspection))
        lane.state, lane.owner = LaneState.OPENING, owner
        self.lanes[index] = lane
        for follower in [f for f in self.followers if self.shall_have(f, lane)]:
            self._add(lane, follower)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lane.settled.wait(), OPENING_S_MAX)
        if lane.state is not LaneState.ATTACHED:
            if self.lanes.get(index) is lane:
                self.clear(lane)
            raise NotReady(f"the executor of {self.name} did not take the lane")
        return lane

    def clear(self, lane: Lane) -> None:
        """The client is gone, or goes: its jobs end, its memory is released as soon as nothing writes there."""
        if lane.state not in (LaneState.ATTACHED, LaneState.OPENING):
            return
        lane.state, lane.owner = LaneState.CLEARING, None
        lane.settled.clear()
        if lane.kind is Kind.LOOP:
            self.refresh(lane)
        else:
            for follower in [f for f in self.followers if f in lane.known]:
                self._tell(lane, follower, "lane.remove")
            # Whoever starts with this lane in its plan is asked to remove it once it serves.
        self._settle(lane)

    def refresh(self, lane: Lane) -> None:
        """Fresh memory for a loop. What executors have mapped stays there until each has followed."""
        assert lane.renew is not None
        try:
            fresh = lane.renew()
        except OSError as error:
            # Nothing is lost: the next client that asks for the loop tries again.
            log("error", f"no memory for a fresh lane of {lane.name}: {error.strerror}", loop=lane.name)
            lane.worn = True
            return
        lane.worn = False
        lane.memory.close()
        lane.memory = fresh
        for follower in [f for f in self.followers if f in lane.known]:
            self._tell(lane, follower, "lane.swap", fresh)

    def attached(self, name: str) -> bool:
        """Whether a client has the loop."""
        return name in self.loops and self.loops[name].state is LaneState.ATTACHED

    # ---- lanes that a change ends ----

    def end(self, lane: Lane, text: str) -> None:
        """The next plan has no such lane: its client is told why. `gone` comes true when nobody has it any more."""
        if lane.state is LaneState.ATTACHED or lane.kind is Kind.MODEL:
            self._ended(lane, 0, text)
        lane.state, lane.owner = (LaneState.OVER if lane.kind is Kind.LOOP else LaneState.CLEARING), None
        lane.settled.clear()
        for follower in [f for f in self.followers if f in lane.known]:
            lane.left.add(follower)
            if follower is self.serving:
                self._tell(lane, follower, "lane.remove", status=_core.STATUSES["detached"])
            else:
                self._tell(lane, follower, "lane.remove")
        self._settle(lane)

    def revive(self, arrangement: Arrangement) -> None:
        """A change is taken back: the loops' lanes that it ended are there again, with fresh memory."""
        for lane in arrangement.values():
            if lane.state is LaneState.OVER and lane.renew is not None:
                fresh = lane.renew()
                lane.memory.close()
                lane.memory, lane.state = fresh, LaneState.CLEARING
                lane.settled.clear()
                for follower in [f for f in self.followers if f in lane.left]:
                    self._tell(lane, follower, "lane.swap", fresh)
                lane.left.clear()
                self._settle(lane)

    def close(self) -> None:
        """After all executors have ended."""
        self.closed = True
        for lane in list(self.lanes.values()):
            self._drop(lane)
        for descriptor in (self.ledger_fd, self.stats_fd, self.journal_fd):
            os.close(descriptor)
