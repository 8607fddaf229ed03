"""From one configuration to another while loops are served: the one way for reloads, model versions and rollbacks.

For each device that the change touches a second executor is started, loads, warms and measures beside the one that
serves. Admission judges all devices with what they measured. Then the ledgers pass over, device by device, between two
jobs. What was before stays there, asleep, for a probation; misses or failures that begin then, or the new one's death,
give the loops back to it. A change is made whole or not at all, and one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from taktd.daemon.certification.certification import Judgement
from taktd.daemon.config.configuration import Configuration
from taktd.daemon.doors.lane_protocol import Kind
from taktd.daemon.handover.gpu_room import NoRoom, make_room
from taktd.daemon.handover.probation import Probation
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import DevicePlan, LaneSignature
from taktd.daemon.supervision.devices import Devices, PassOverFailed
from taktd.daemon.supervision.gpu_twins import twins
from taktd.daemon.supervision.lanes import Arrangement, Full, Lane, LaneState
from taktd.daemon.supervision.member import Member, Schedule, TooMuch
from taktd.daemon.supervision.served_device import ServedDevice

LOAD_S_MAX: Final = 600.0  # a large engine is built, verified and measured meanwhile; the old one serves
READY_S_MAX: Final = 60.0
END_S_MAX: Final = 5.0
DRAIN_S_MAX: Final = 3.0
PROBATION_STEP_S: Final = 0.05

Judge = Callable[[Mapping[str, Member]], dict[str, Judgement]]
"""One judgement per device of the new configuration, from the executors that it would have. Raises NotAdmitted."""


class ChangeRefused(Exception):
    """The change was not made, or was taken back; everything is as it was before. Says why."""


@dataclass
class Part:
    """One touched device: what it was, and what it shall be. old is None for a device that is new."""

    device: ServedDevice
    new: Member
    arrangement: Arrangement
    old: Member | None
    before: Arrangement
    passed: bool = False


def touched(devices: Devices, plans: Mapping[str, DevicePlan]) -> list[str]:
    """Devices that need another executor for these plans."""
    return [name for name, plan in plans.items() if name not in devices or _replaced(devices[name].member, plan)]


def _replaced(member: Member, plan: DevicePlan) -> bool:
    return member.outdated or not member.plan.serves_like(plan)


class Change:
    """One change, made step by step: prepare, judge, pass over; then settle or take back."""

    def __init__(
        self, devices: Devices, configuration: Configuration, plans: Mapping[str, DevicePlan], epoch: int, judge: Judge
    ) -> None:
        self.devices, self.configuration, self.plans, self.epoch, self._judge = (
            devices, configuration, plans, epoch, judge,
        )  # fmt: skip
        self.parts: list[Part] = []
        self.removed: list[ServedDevice] = []
        self.ended: list[str] = []  # of clients that lost their lane by it, for people
        self._before = list(devices.values())
        self._epochs = {member: member.epoch for member in devices.members}
        self._schedules: dict[Member, Schedule | None] = {}

    # ---- beside the running ones ----

    async def prepare(self) -> None:
        """Executors for what is touched, ready to take over. Raises ChangeRefused, NotAdmitted; then nobody is left."""
        try:
            await self._begin()
            await self._all_of("load", self._load_s_max(), lambda m: bool(m.process.loaded_message))
            self._serve()
            await self._all_of("get ready", READY_S_MAX, lambda m: m.ready)
        except BaseException:
            await self._end([part.new for part in self.parts])
            for part in self.parts:
                part.device.lanes.discard(part.arrangement)
                self.devices.members.discard(part.new)  # it may never have been started
            self._reschedule()
            self.devices.forget_coming()
            self._go_on()
            raise

    def _load_s_max(self) -> float:
        """Every model of a GPU may have to be built."""
        plans = [part.new.plan for part in self.parts]
        builds_ns = [len(plan.models) * plan.device.gpu.build_limit_ns for plan in plans if plan.device.gpu]
        return LOAD_S_MAX + max(builds_ns, default=0) / 1e9

    def _go_on(self) -> None:
        """The change is over: loops go back to whom they belong to."""
        self.devices.changing = False
        for device in self.devices.values():
            self.devices.choose(device)

    async def _begin(self) -> None:
        arrangements: dict[str, Arrangement] = {name: device.lanes.loops for name, device in self.devices.items()}
        names = touched(self.devices, self.plans)
        gpus = {name: plan.device.gpu.device for name, plan in self.plans.items() if plan.device.gpu is not None}
        if same := twins([one.member for name, one in self.devices.items() if name in self.plans], gpus):
            raise ChangeRefused(same)
        try:
            for name in names:
                device = self.devices.find(name) if name in self.devices else self.devices.add(name, self.configuration)
                arrangements[name] = device.lanes.arrange(self.plans[name])
            for name in names:
                device, plan = self.devices.find(name), self.plans[name]
                wanted = {at: arrangements[at] for at in (name, *plan.homes)}
                new = self.devices.make(plan, wanted, self.epoch)
                new.process.keep = False
                old = device.member if name in self.devices else None
                self.parts.append(Part(device, new, arrangements[name], old, device.lanes.loops))
            await make_room(self.devices, names)
            for part in self.parts:
                part.new.process.start()
        except (Full, TooMuch, OSError, NoRoom) as error:
            raise ChangeRefused(str(error)) from None

    async def _all_of(self, what: str, seconds: float, done: Callable[[Member], bool]) -> None:
        news = [part.new for part in self.parts]

        def settled() -> bool:
            return all(map(done, news)) or any(not m.process.pid for m in news)

        in_time = await self.devices.until(settled, seconds)
        for member in news:
            if not member.process.pid:
                raise ChangeRefused(f"the new {member} {member.process.failure or member.process.error}")
        if not in_time:
            late = ", ".join(str(m) for m in news if not done(m))
            raise ChangeRefused(f"the new {late} did not {what} within {seconds:.0f} s")

    def _serve(self) -> None:
        new = {part.device.name: part.new for part in self.parts}
        members = {name: new.get(name) or self.devices[name].member for name in self.plans}
        for name, judged in self._judge(members).items():
            schedule = Schedule.of(judged)
            for warning in judged.warnings:
                log("warning", warning, device=name)
            if name in new:
                new[name].serve(schedule)
            else:
                self._schedules[members[name]] = members[name].schedule
                members[name].schedule = schedule

    def _reschedule(self) -> None:
        for member, schedule in self._schedules.items():
            member.schedule = schedule
            member.tell_hang_after()

    # ---- over, and back ----

    async def pass_over(self) -> None:
        """The new ones serve. Raises ChangeRefused after everything that had passed over has been taken back."""
        self.devices.changing = True
        try:
            for part in self.parts:
                await self._end_lanes(part.device, part.before, part.arrangement, part.new)
                part.passed = True
                await self.devices.pass_over(part.device, part.new, "handover")
            self.removed = self.devices.install(self.plans)
            for part in self.parts:
                part.device.member, part.device.outgoing = part.new, part.old
                part.device.lanes.install(part.arrangement)
                if part.old is not None:
                    part.old.process.keep = False
            for device in self.removed:
                await self._end_lanes(device, device.lanes.loops, {}, None)
        except PassOverFailed as failed:
            await self.take_back(f"{failed}")
        for device in self.devices.values():
            device.lanes.epoch = self.epoch
            device.member.relabel(self.epoch)
            self.devices.choose(device)
        for member in self._schedules:
            member.tell_hang_after()

    async def _end_lanes(
        self, device: ServedDevice, before: Arrangement, after: Arrangement, to: Member | None
    ) -> None:
        """Lanes that the next plan does not have: their clients are told, and attach anew what there is then."""
        lanes = device.lanes
        ending = [lane for name, lane in before.items() if after.get(name) is not lane]
        models = [lane for lane in lanes.lanes.values() if lane.kind is Kind.MODEL]
        ending += [lane for lane in models if to is None or not lanes.shall_have(to, lane)]
        for lane in ending:
            why = _why_ended(lane, after, self.configuration)
            if lane.kind is Kind.LOOP and lane.state is LaneState.ATTACHED:
                self.ended.append(f"lane of {lane.name} ended, {lane.owner} has to attach again: {why}")
            lanes.end(lane, why)
        await self.devices.until(lambda: not any(lane.waiting for lane in ending), END_S_MAX)

    async def take_back(self, why: str) -> None:
        """Everything as before. Always raises ChangeRefused."""
        self.devices.restore(self._before)
        for part in self.parts:
            device, old = part.device, part.old
            if old is None:
                continue
            device.member, device.outgoing = old, None
            device.lanes.install(part.before)
            old.process.keep = True
            if part.passed:
                device.lanes.revive(part.before)
                await self._end_lanes(device, part.arrangement, part.before, old)
                await self._give_back(device, old)
        for device in self.removed:
            device.lanes.revive(device.lanes.loops)
        for member, epoch in self._epochs.items():
            if member in self.devices.members:
                member.relabel(epoch)
        for device in self._before:
            device.lanes.epoch = device.member.epoch
        self._reschedule()
        await self._end([part.new for part in self.parts])
        for part in self.parts:
            part.device.lanes.discard(part.arrangement)
        self.devices.forget_coming()
        self._go_on()
        raise ChangeRefused(why)

    async def _give_back(self, device: ServedDevice, old: Member) -> None:
        if old.process.pid is None and not old.process.restarting:
            old.process.start()  # it died while it slept: its successor must come up first
        if device.serving is old:
            return
        try:
            await self.devices.pass_over(device, old, "return")
        except PassOverFailed as failed:
            log("error", f"{device.name} could not be given back: {failed}", device=device.name)

    async def probation(self) -> None:
        """Watches what the new ones do for as long as their loops say. Raises ChangeRefused when it was taken back."""
        loops = [loop for part in self.parts for loop in part.new.plan.loops]
        seconds = max((loop.probation_ns for loop in loops), default=0) / 1e9
        watches = [Probation(part.device) for part in self.parts]
        end = asyncio.get_running_loop().time() + seconds
        while (left := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left, PROBATION_STEP_S))
            for part, watch in zip(self.parts, watches, strict=True):
                if part.old is None or not part.old.ready:
                    continue  # nobody to go back to
                if not part.new.ready:
                    await self.take_back(f"the new {part.new} {part.new.process.error}")
                if found := watch.trouble(part.device.serving is part.new):
                    await self.take_back(f"in the first seconds on {part.device.name}: {found}")

    async def settle(self) -> None:
        """It stays. The old executors finish and go, and all their memory with them."""
        olds = [part.old for part in self.parts if part.old is not None] + [device.member for device in self.removed]
        for part in self.parts:
            part.device.outgoing = None
            part.new.process.keep = True
            if not part.new.process.pid:
                part.new.process.start()
        for device in self.removed:
            device.member.process.keep = False
        self._go_on()
        await self._end(olds)
        for part in self.parts:
            part.device.lanes.discard(part.before)
        for device in self.removed:
            device.close()

    async def _end(self, members: list[Member]) -> None:
        """They finish and exit; whoever takes too long is ended."""
        live = [member for member in members if member.process.pid is not None or member.process.restarting]
        for member in live:
            member.process.drain()
        if not await self.devices.until(lambda: all(m.process.stopped.is_set() for m in live), DRAIN_S_MAX):
            for member in live:
                member.process.kill()
            await self.devices.until(lambda: all(m.process.stopped.is_set() for m in live), DRAIN_S_MAX)


def _why_ended(lane: Lane, after: Arrangement, configuration: Configuration) -> str:
    if lane.kind is Kind.MODEL:
        if lane.name in configuration.models:
            return "its tensors, slots or device changed in the configuration"
        return "the model is not in the configuration any more"
    now = after[lane.name].signature if lane.name in after else None
    if isinstance(lane.signature, LaneSignature) and isinstance(now, LaneSignature):
        return f"{lane.signature.changed(now)} in the configuration"
    if lane.name in configuration.loops:
        return f"its device changed to {configuration.loops[lane.name].device} in the configuration"
    return "the loop is not in the configuration any more"
