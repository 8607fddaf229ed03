"""Who gets which lane: names to loops and models, rights, charges; and what clients are told when a lane ends.

Between the lane door (bytes) and the devices (lanes). Implements lane_door.Host.
"""

from __future__ import annotations

import difflib
import errno
import secrets
from typing import TYPE_CHECKING, Any

from taktd.daemon.config.configuration import Allow, Loop
from taktd.daemon.doors.lane_door import Connection, Refused
from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.doors.peers import Peer, Rule, own_uid, rule_of, user_name
from taktd.daemon.handover.inherited_lanes import Unclaimed
from taktd.daemon.limits import Charges, LimitExceeded
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import Inspection
from taktd.daemon.supervision.fallback import local_answer
from taktd.daemon.supervision.lane_memory import model_lane_bytes
from taktd.daemon.supervision.lanes import Full, Lane, LaneState, NotReady, Taken

if TYPE_CHECKING:
    from taktd.daemon.supervision.served_device import ServedDevice
    from taktd.daemon.supervisor import Supervisor

#: enum takt_detach_reason of the core, for people.
DETACH_REASONS = {
    1: "its submit cursor jumped",
    2: "it submitted a slot that the lane does not have",
    3: "it submitted a slot whose job had not ended",
    4: "it submitted a sequence number that was not the next one",
    5: "the daemon ended the lane",
}


class FrontDesk:
    """Answers the door's questions from the supervisor's state."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._rules: dict[tuple[str, str], Rule] = {}
        self._memory: dict[Lane, tuple[int, int]] = {}  # charged lane memory: uid, bytes
        self.rules_changed()

    @property
    def charges(self) -> Charges:
        return self._supervisor.charges

    def node_name(self) -> str:
        return self._supervisor.configuration.node.name

    def rules_changed(self) -> None:
        """Look up the names of all `allow:` again."""
        configuration = self._supervisor.configuration
        settings: list[tuple[str, str, Allow]] = [("loop", n, loop.allow) for n, loop in configuration.loops.items()]
        settings += [("model", n, model.allow) for n, model in configuration.models.items()]
        self._rules = {(kind, name): rule_of(allow) for kind, name, allow in settings}
        for kind, name, _ in settings:
            # The default names a group that need not exist; only what somebody wrote is worth a warning.
            unknown = self._rules[kind, name].unknown
            if unknown and "allow" in getattr(configuration, f"{kind}s")[name].model_fields_set:
                log("warning", f"{kind}s.{name}.allow: nobody here is {', '.join(unknown)}")

    # ---- attach and detach ----

    async def attach(self, connection: Connection, kind: Kind, name: str) -> Lane:
        """Raises lane_door.Refused with errno and a sentence."""
        configuration = self._supervisor.configuration
        if kind is not Kind.MODEL and name in configuration.loops:
            device = self._device(configuration.loops[name].device, name)
            self._check_rights(connection.peer, "loop", name)
            return await self._attach_loop(device, connection, name)
        if kind is not Kind.LOOP and name in configuration.models:
            device = self._device(configuration.models[name].device or "", name)
            self._check_rights(connection.peer, "model", name)
            return await self._attach_model(device, connection, name)
        raise self._unknown(kind, name)

    def _device(self, name: str, what: str) -> ServedDevice:
        device = self._supervisor.devices.get(name)
        if device is None or self._supervisor.stopping:
            raise Refused(errno.EAGAIN, f"{what}: taktd is {'stopping' if self._supervisor.stopping else 'starting'}")
        return device

    def _unknown(self, kind: Kind, name: str) -> Refused:
        configuration = self._supervisor.configuration
        loops = [] if kind is Kind.MODEL else list(configuration.loops)
        models = [] if kind is Kind.LOOP else list(configuration.models)
        known = [*loops, *models]
        close = difflib.get_close_matches(name, known, n=1)
        what = {Kind.ANY: "loop or model", Kind.LOOP: "loop", Kind.MODEL: "model"}[kind]
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known[:20]) or 'none'}"
        return Refused(errno.ENOENT, f"no {what} is called {name!r}: {hint}")

    def _check_rights(self, peer: Peer, kind: str, name: str) -> None:
        if self._rules[kind, name].admits(peer, own_uid()):
            return
        user = user_name(peer.uid)
        log("warning", f"{kind} {name} refused to {user}", uid=peer.uid, pid=peer.pid)
        raise Refused(
            errno.EACCES,
            f"user {user} (uid {peer.uid}) may not attach {kind} {name}: allowed are root, the daemon's user, and "
            f"those under {kind}s.{name}.allow in the configuration; add the user there, or to group taktd",
        )

    async def _attach_loop(self, device: ServedDevice, connection: Connection, name: str) -> Lane:
        if name not in device.lanes.loops:
            raise Refused(errno.EAGAIN, f"loop {name}: the configuration is being changed; try again")
        if device.schedule is not None and name in device.schedule.shed:
            raise Refused(errno.ENOSPC, f"loop {name} was not admitted: {device.schedule.shed[name]}")
        if isinstance(device.lanes.loops[name].owner, Unclaimed):
            self._supervisor.takeover.look()  # it may have gone just now, to come back as this one
        try:
            return await device.lanes.attach_loop(name, connection)
        except Taken:
            owner = device.lanes.loops[name].owner
            text = f"loop {name} is taken by {owner or 'another client'}: one client at a time, stop that one first"
            raise Refused(errno.EBUSY, text) from None
        except NotReady as error:
            raise Refused(errno.EAGAIN, f"loop {name}: {error}; try again") from None

    async def _attach_model(self, device: ServedDevice, connection: Connection, name: str) -> Lane:
        uid = connection.peer.uid
        if name not in device.inspections:
            raise Refused(errno.EAGAIN, f"model {name}: the configuration is being changed; try again")
        if device.schedule is not None and name in (no_gap := device.schedule.verdict.get("no_gap", {})):
            raise Refused(errno.ENOSPC, no_gap[name])
        model = self._supervisor.configuration.models[name]
        size = model_lane_bytes(model, device.inspections[name])
        try:
            self.charges.charge("lane_memory", uid, size)
        except LimitExceeded as exceeded:
            raise Refused(errno.ENOSPC, str(exceeded)) from None
        try:
            lane = await device.lanes.attach_model(model, connection)
        except BaseException as error:
            self.charges.release("lane_memory", uid, size)
            if isinstance(error, NotReady):
                raise Refused(errno.EAGAIN, f"model {name}: {error}; try again") from None
            if isinstance(error, Full):
                raise Refused(errno.ENOSPC, f"model {name}: {error}; try again later") from None
            if isinstance(error, OSError):
                raise Refused(errno.ENOSPC, f"model {name}: no lane could be made: {error.strerror}") from None
            raise
        self._memory[lane] = (uid, size)
        return lane

    def claim(self, connection: Connection, lane_id: int, token: int) -> Lane:
        """A lane that its client had before this supervisor. Raises lane_door.Refused."""
        for device in self._supervisor.devices.values():
            for lane in device.lanes.lanes.values():
                known = lane.id == lane_id and isinstance(lane.owner, Unclaimed)
                if known and secrets.compare_digest(str(lane.token), str(token)):
                    lane.owner = connection
                    if lane.kind is Kind.MODEL:
                        held = connection.peer.uid, lane.memory.total_size
                        self.charges.charge("lane_memory", *held, within_limits=False)
                        self._memory[lane] = held
                    return lane
        raise Refused(errno.ENOENT, f"lane {lane_id} is not to be claimed: it has ended, or its client has it")

    def _uncharge(self, lane: Lane) -> None:
        if charged := self._memory.pop(lane, None):
            self.charges.release("lane_memory", *charged)

    def detach(self, lane: Lane) -> None:
        """The client gave the lane back or is gone."""
        self._uncharge(lane)
        device = self._device_of(lane)
        if device is not None:
            device.lanes.clear(lane)

    def _device_of(self, lane: Lane) -> ServedDevice | None:
        return next((d for d in self._supervisor.devices.values() if d.lanes.lanes.get(lane.index) is lane), None)

    def lane_ended(self, lane: Lane, reason: int, text: str) -> None:
        """The executor has thrown the client out (reason), or a change has ended the lane (text)."""
        connection = lane.owner
        why = text or DETACH_REASONS.get(reason, "its executor was replaced")
        self._uncharge(lane)
        log("warning", f"lane of {lane.name} ended: {why}", lane=lane.id, client=connection)
        if isinstance(connection, Connection):
            connection.lane_ended(lane, why)

    def local_answer(self, lane: Lane) -> bytes:
        loop = self._supervisor.configuration.loops.get(lane.name) if lane.kind is Kind.LOOP else None
        if loop is None:
            return b""
        return local_answer(loop, self._supervisor.devices[loop.device].inspections[loop.model])

    # ---- listing ----

    def listing(self, kind: Kind) -> list[dict[str, Any]]:
        """What node.loops() and node.models() show."""
        devices = self._supervisor.devices
        configuration = self._supervisor.configuration
        if kind is Kind.LOOP:
            return [
                {
                    "name": name, "model": loop.model, "device": loop.device, "period_ns": loop.period_ns,
                    "deadline_ns": loop.deadline_ns, "jitter_ns": loop.jitter_ns, "criticality": loop.criticality,
                    "trigger": loop.trigger, "fallback": fallbacks_told(loop),
                    "attached": devices[loop.device].lanes.loops[name].state is LaneState.ATTACHED,
                    **_signature(devices[loop.device].inspections[loop.model]),
                }
                for name, loop in configuration.loops.items()
                if loop.device in devices and name in devices[loop.device].lanes.loops
            ]  # fmt: skip
        return [
            {"name": name, "device": model.device, **_signature(devices[model.device].inspections[name])}
            for name, model in configuration.models.items()
            if model.device is not None and model.device in devices and name in devices[model.device].inspections
        ]


def fallbacks_told(loop: Loop) -> list[dict[str, Any]]:
    """Who answers when the device does not, in order. hold and constant are the client library's to give."""
    told = []
    for one in loop.fallback:
        entry: dict[str, Any] = {"kind": one.kind}
        if one.kind == "device":
            entry |= {"device": one.device, "model": one.model or loop.model}
        elif one.kind == "constant":
            entry["constant"] = one.constant
        told.append(entry)
    return told


def _signature(inspection: Inspection) -> dict[str, Any]:
    return {
        side: [{"name": t["name"], "dtype": t["dtype_name"], "shape": t["dims"]} for t in inspection[side]]
        for side in ("inputs", "outputs")
    }
