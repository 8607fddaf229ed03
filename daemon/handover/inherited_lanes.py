"""The lanes of a device as a dead supervisor left them: from what its executors brought to DeviceLanes.

A lane whose client may still be there goes on; its client claims it by id and token, or is gone when the wake-up socket
hangs up. A loop's lane without a client gets fresh memory: the client's end of its socket died with the supervisor.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable

from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.handover.adoption import Heir, Ledger
from taktd.daemon.supervision.device_plan import DevicePlan, lane_signature, model_signature
from taktd.daemon.supervision.lane_memory import LaneMemory
from taktd.daemon.supervision.lanes import (
    LOOP_PLACES,
    DeviceLanes,
    Follower,
    Lane,
    LaneState,
    lane_ids_after,
    new_journal,
)

_ELSEWHERE = LaneMemory({}, -1, -1, -1)  # what an executor has mapped that missed the last change


class Unclaimed:
    """The owner of a lane whose client has not come to this supervisor yet."""

    def __str__(self) -> str:
        return "a client that was here before taktd was started again"


def source_of(device: str, heirs: Iterable[Heir]) -> Heir | None:
    """Whose word on a device's lanes counts: of who serves it, else of its own executor."""
    having = [heir for heir in heirs if device in heir.ledgers]
    having.sort(key=lambda heir: (device not in heir.owned, heir.device != device))
    return having[0] if having else None


def inherit(
    device: str, plan: DevicePlan, source: Heir, heirs: Iterable[Heir], lanes_max: int,
    ended: Callable[[Lane, int, str], None],
) -> DeviceLanes:  # fmt: skip
    """Takes the files and lanes out of what the source brought."""
    ledger = source.ledgers[device]
    own = next((heir for heir in heirs if heir.device == device), None)
    files = ledger.ledger_fd, ledger.stats_fd, new_journal() if own is None else own.ledgers[device].journal_fd
    ledger.ledger_fd = ledger.stats_fd = -1
    if own is not None:
        own.ledgers[device].journal_fd = -1
    places = own.head["max_lanes"] - LOOP_PLACES if own is not None else lanes_max
    lanes = DeviceLanes(device, places, ended, files)
    blocks = own.head["blocks"] if own is not None else _blocks(ledger)
    lanes.stats_blocks = {(kind, name): number for kind, name, number in blocks}
    lanes.served_once = True
    taken, ledger.lanes = ledger.lanes, []
    if own is not None and own is not source:  # lanes of models are known to the device's own executor only
        theirs = own.ledgers[device].lanes
        taken += [(entry, memory) for entry, memory in theirs if "name" not in entry]
        own.ledgers[device].lanes = [(entry, memory) for entry, memory in theirs if "name" in entry]
    for entry, memory in taken:
        lane = _lane(lanes, plan, entry, memory)
        if lane is None:
            memory.close()
        else:
            lanes.inherit(lane)
    lane_ids_after(max((lane.id for lane in lanes.lanes.values()), default=0))
    return lanes


def _blocks(ledger: Ledger) -> list[tuple[str, str, int]]:
    return [
        ("loop" if "name" in entry else "model", str(entry.get("name", entry["model"])), int(entry["stats"]))
        for entry, _ in ledger.lanes
    ]


def _lane(lanes: DeviceLanes, plan: DevicePlan, entry: dict[str, object], memory: LaneMemory) -> Lane | None:
    """None for what the plan does not have: a change had not ended it everywhere yet."""
    index, block = int(str(entry["lane"])), int(str(entry["stats"]))
    owner = entry.get("owner")
    if "name" in entry:
        loop = next((one for one in plan.loops if one.name == entry["name"]), None)
        if loop is None:
            return None
        signature = lane_signature(loop, plan.inspections[loop.model])
        renew = lanes.renewer(loop, plan)
        lane = Lane(index, Kind.LOOP, loop.name, loop.model, block, memory, signature, renew)
    else:
        model = next((one for one in plan.models if one.name == entry["model"]), None)
        if model is None or not isinstance(owner, dict):
            return None
        tensors = model_signature(model, plan.inspections[model.name])
        lane = Lane(index, Kind.MODEL, model.name, model.name, block, memory, tensors)
    if isinstance(owner, dict) and entry.get("attached"):
        lane.id, lane.token = owner["id"], owner["token"]
        lane.state, lane.owner = LaneState.ATTACHED, Unclaimed()
    else:
        lane.state, lane.worn = LaneState.CLEARING, True
    return lane


def know(lanes: DeviceLanes, follower: Follower, heir: Heir) -> None:
    """Which memory of which lane an adopted executor has: what it missed it is told once it has joined."""
    for lane in lanes.lanes.values():
        inode = heir.inodes.get((lanes.name, lane.index))
        if inode is not None:
            lane.known[follower] = lane.memory if inode == os.fstat(lane.memory.memfd).st_ino else _ELSEWHERE


def unclaimed(lanes: DeviceLanes) -> list[Lane]:
    """Lanes whose client has not come to this supervisor yet."""
    return [lane for lane in lanes.lanes.values() if isinstance(lane.owner, Unclaimed)]


def abandoned(lanes: DeviceLanes) -> list[Lane]:
    """Unclaimed lanes whose client is gone: nobody has the other end of the wake-up socket any more."""
    poll = select.poll()
    waiting = {lane.memory.wake: lane for lane in unclaimed(lanes)}
    for descriptor in waiting:
        poll.register(descriptor, 0)  # hang-ups are always told; doorbells are the executor's
    return [waiting[descriptor] for descriptor, events in (poll.poll(0) if waiting else ())
            if events & (select.POLLHUP | select.POLLERR)]  # fmt: skip
