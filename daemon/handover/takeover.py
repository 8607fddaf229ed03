"""A supervisor that goes on where a dead one stopped: with its configuration, its executors and its clients' lanes.

The second half of what adoption.py begins. Executors that were made for the same plan are taken over as they are; the
others are fenced, and started anew on the same ledgers. What the configuration file says by now is taken over after
that, as any other reload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.config.durations import format_duration
from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.handover import predecessor
from taktd.daemon.handover.adoption import Heir, fence, gather
from taktd.daemon.handover.inherited_lanes import abandoned, inherit, source_of, unclaimed
from taktd.daemon.handover.predecessor import Predecessor
from taktd.daemon.logbook import log
from taktd.daemon.runtime_folder import EXECUTORS_SOCKET, FolderRefused
from taktd.daemon.supervision.device_plan import DevicePlan, Inspection
from taktd.daemon.supervision.lanes import DeviceLanes, Lane
from taktd.daemon.supervision.member import Member, member_ids_after
from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervision.executor_process import Message
    from taktd.daemon.supervisor import Supervisor

GATHER_S_MAX: Final = 3.0  # executors dial five times a second, between two jobs
# A client claims its lane after a job: it has the grace for that, but never less than this, nor than so many periods.
CLAIM_NS_MIN: Final = 5_000_000_000
CLAIM_PERIODS: Final = 10


class Takeover:
    """heirs: executors that came in time, until they are adopted."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._before: Predecessor | None = None
        self.heirs: list[Heir] = []
        self._wanted: Configuration | None = None  # what the file says, if another one was inherited
        self.went_on = False  # executors of a supervisor before this one serve
        self._went_on_ns = 0
        self.unclaimed = 0  # lanes that were ended because their client did not come

    async def begin(self) -> dict[str, Inspection] | None:
        """The inspections to go on with, None where nobody left anything."""
        supervisor = self._supervisor
        self._before = before = predecessor.read(supervisor.runtime)
        if before is None or not before.alive:
            return None
        if before.configuration is None:  # they would serve on beside ours until their grace is over
            fence(before.alive)
            return None
        log("notice", f"taktd (pid {before.pid}) is gone: {len(before.alive)} executors are expected")
        supervisor.notifier.status("waiting for the executors of the taktd before")
        try:
            self.heirs = await gather(supervisor.runtime, before.alive, GATHER_S_MAX)
        except (OSError, FolderRefused) as error:
            log("warning", f"executors of the taktd before can't be heard: {error}")
        if not self.heirs:
            fence(before.alive)
            return None
        self.went_on, self._went_on_ns = True, _core.now()
        if supervisor.refused:
            log(
                "error", f"{supervisor.file} is refused, and loops are served by the configuration before: they go on. "
                "Repair the file and run taktctl reload: a taktd that finds no executors ends by the refusal",
                event="refused",
            )  # fmt: skip
        if before.configuration != supervisor.configuration:
            self._wanted = supervisor.configuration
        supervisor.inherit(before.configuration, before.epoch, before.last_epoch)
        member_ids_after(max(one.member for one in before.alive))
        return before.inspections

    def lanes_of(self, name: str, plan: DevicePlan) -> DeviceLanes | None:
        """A device's lanes as they were, None where nobody brought them."""
        source = source_of(name, self.heirs)
        if source is None:
            return None
        configuration = self._supervisor.configuration
        return inherit(name, plan, source, self.heirs, configuration.limits.lanes, self._supervisor.lane_ended)

    def adopt(self) -> list[Member]:
        """Takes over who fits, ends the others. Returns the members that have to be started."""
        supervisor = self._supervisor
        missing: list[Member] = []
        adopted: list[Heir] = []
        for name, device in supervisor.devices.items():
            digest = device.member.plan.digest()
            fitting = [h for h in self.heirs if h.device == name and h.head["digest"] == digest]
            fitting.sort(key=lambda heir: name not in heir.owned)
            if fitting:
                supervisor.devices.adopt(device.member, fitting[0])
                adopted.append(fitting[0])
            else:
                missing.append(device.member)
        if self._before is not None and self.heirs:
            taken = {heir.expected for heir in adopted}
            fence(one for one in self._before.alive if one not in taken)
            log("notice", f"{len(adopted)} executors were taken over, {len(missing)} are started")
        for heir in self.heirs:
            heir.close(link=heir not in adopted)
        for device in supervisor.devices.values():
            for lane in list(device.lanes.lanes.values()):
                if lane.worn:
                    device.lanes.refresh(lane)
        self.heirs = []
        return missing

    def look(self) -> None:
        """Frees lanes whose clients went while there was no supervisor, or go without having claimed them."""
        for device in self._supervisor.devices.values():
            for lane in abandoned(device.lanes):
                log("info", f"the client of {lane.name} is gone; its lane is freed", lane=lane.id)
                device.lanes.clear(lane)
            for lane in unclaimed(device.lanes) if self.went_on else ():
                self._end_unclaimed(device.lanes, lane)

    def _end_unclaimed(self, lanes: DeviceLanes, lane: Lane) -> None:
        """A client that lives, or somebody who has its descriptors, holds a lane that nobody asks for."""
        configuration = self._supervisor.configuration
        loop = configuration.loops.get(lane.name) if lane.kind is Kind.LOOP else None
        limit_ns = max(configuration.grace_ns, CLAIM_NS_MIN, CLAIM_PERIODS * loop.period_ns if loop else 0)
        if _core.now() - self._went_on_ns < limit_ns:
            return
        self.unclaimed += 1
        log(
            "warning", f"lane of {lane.name} ended: taktd was started again, and its client has not claimed it for "
            f"{format_duration(limit_ns)}; attach anew", event="lane-unclaimed", lane=lane.id,
            loop=(loop.name,) if loop else (),
        )  # fmt: skip
        lanes.clear(lane)

    def settled(self) -> None:
        """Everything is served: from now on by what the configuration file says, and by this version of taktd."""
        if self._wanted is not None or any(device.member.outdated for device in self._supervisor.devices.values()):
            self._wanted = None
            self._supervisor.reload_soon()

    # ---- for the one after us ----

    def house(self) -> Message:
        """What executors are told for the time after our death."""
        supervisor = self._supervisor
        return {
            "executors_socket": str(supervisor.runtime / EXECUTORS_SOCKET),
            "grace_ns": supervisor.configuration.grace_ns,
        }

    def write_down(self) -> None:
        """Who serves now, and by which configuration."""
        supervisor = self._supervisor
        inspections = {n: i for device in supervisor.devices.values() for n, i in device.inspections.items()}
        serving = [(m.home, m.process.pid, m.id) for m in supervisor.devices.members if m.process.pid]
        epochs = supervisor.epoch, supervisor.last_epoch
        predecessor.write_down(supervisor.runtime, serving, epochs, supervisor.configuration, inspections)

    async def hand_over(self) -> None:
        """In place of an end: the next taktd finds everything as after our death, and nothing recorded is lost."""
        supervisor = self._supervisor
        supervisor.stopping = True
        log("notice", "another taktd takes over: executors serve on and wait for it", event="stopping")
        self.write_down()
        if supervisor.recorder is not None:
            supervisor.recorder.drain()
            supervisor.recorder.close()
        supervisor.notifier.close()

    def forget(self) -> None:
        """At the end: nobody is left."""
        predecessor.forget(self._supervisor.runtime)
