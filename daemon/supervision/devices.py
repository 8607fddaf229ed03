"""All devices and their executors: who serves which device, who may next, and how one takes over from another.

An executor is a *member* of each ledger that it can serve: its own device's, and those that it stands in for. Death is
noticed and answered by the members' own threads (ipc/core/succession.c) without us; here it is only decided who is next
in line, and a change that we want is asked for. The supervisor is on no path that a loop's answer depends on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.handover.adoption import Heir
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import DevicePlan
from taktd.daemon.supervision.executor_process import Message
from taktd.daemon.supervision.lanes import Arrangement, DeviceLanes, Lane
from taktd.daemon.supervision.member import Member
from taktd.daemon.supervision.served_device import PRIMARY, ServedDevice
from taktd.ipc import _core

TAKE_S_MAX: Final = 5.0  # from the request to release a ledger until the other one has it
SYNC_S_MAX: Final = 15.0
START_PATIENCE_NS: Final = 10_000_000_000  # a stand-in begins before the primary only if that one takes longer
# A primary that keeps dying gets its loops back later each time, but never much later.
DEATHS_SPAN_NS: Final = 60_000_000_000
RETURN_PAUSE_FIRST_NS: Final = 1_000_000_000
RETURN_PAUSE_NS_MAX: Final = 4_000_000_000


class Observer(Protocol):
    """Who is told; the supervisor."""

    def member_begins(self, member: Member) -> Message: ...

    def member_loaded(self, member: Member) -> None: ...

    def devices_changed(self) -> None: ...

    def lane_ended(self, lane: Lane, reason: int, text: str) -> None: ...


class Ending(Protocol):
    """A process that can be told to end."""

    stopped: asyncio.Event

    def drain(self) -> None: ...

    def kill(self) -> None: ...


class PassOverFailed(Exception):
    """The executor that should take over did not; who serves now is as it was, or its stand-in."""


def return_pause_ns(deaths_ns: Iterable[int], now_ns: int) -> int:
    """How long a primary that is ready again waits for its loops: not at all after one death in a minute."""
    recent = sum(1 for t in deaths_ns if now_ns - t < DEATHS_SPAN_NS)
    return 0 if recent < 2 else min(RETURN_PAUSE_FIRST_NS << min(recent - 2, 20), RETURN_PAUSE_NS_MAX)


class Devices(Mapping[str, ServedDevice]):
    """The devices of the running configuration by name; implements member.Home."""

    def __init__(self, state: Path, observer: Observer) -> None:
        self._state, self._observer = state, observer
        self._devices: dict[str, ServedDevice] = {}
        self._coming: dict[str, ServedDevice] = {}  # added by a change that is still being made
        self.members: set[Member] = set()  # all executors there are, those of a change too
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.switches: Counter[tuple[str, str]] = Counter()  # (loop, cause) → times it passed to another executor
        self._began_ns = _core.now()
        self.changing = False  # a change decides who serves what
        self._dying: set[Member] = set()  # succeeded for it, but not proven dead yet

    def __getitem__(self, name: str) -> ServedDevice:
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __len__(self) -> int:
        return len(self._devices)

    # ---- devices and members ----

    def add(self, name: str, configuration: Configuration, lanes: DeviceLanes | None = None) -> ServedDevice:
        """A device that is not there yet, or whose lanes are; install() makes it one of the running configuration."""
        lanes = lanes or DeviceLanes(name, configuration.limits.lanes, self._observer.lane_ended)
        self._coming[name] = ServedDevice(lanes)
        return self._coming[name]

    def install(self, names: Iterable[str]) -> list[ServedDevice]:
        """Exactly these, in this order; returns those that are no more."""
        known = self._devices | self._coming
        names = list(names)
        gone = [device for name, device in self._devices.items() if name not in names]
        self._devices = {name: known[name] for name in names}
        self._coming = {}
        return gone

    def restore(self, devices: Iterable[ServedDevice]) -> None:
        """Takes install() back."""
        wanted = list(devices)
        for device in self._devices.values():
            if device not in wanted:
                self._coming[device.name] = device
        self._devices = {device.name: device for device in wanted}

    def forget_coming(self) -> None:
        """After the executors of a change that was refused have ended."""
        for device in self._coming.values():
            device.close()
        self._coming = {}

    def find(self, name: str) -> ServedDevice:
        """Also one that a change is about to add."""
        return self._devices.get(name) or self._coming[name]

    def make(self, plan: DevicePlan, arrangements: Mapping[str, Arrangement], epoch: int) -> Member:
        """An executor for a plan; not started."""
        member = Member(plan, arrangements, epoch, self._state, self)
        self.members.add(member)
        return member

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether it came true in time; looked at whenever a member says something or dies."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not condition():
            left = end - loop.time()
            if left <= 0:
                return False
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                return condition()
        return True

    def poke(self) -> None:
        """Something has changed."""
        self._news.set()

    # ---- member.Home ----

    def lanes_of(self, device: str) -> DeviceLanes:
        return self.find(device).lanes

    def beside(self, member: Member) -> bool:
        cores = set(member.plan.device.cores)
        serving = {device.serving for device in (*self._devices.values(), *self._coming.values()) if device.serving}
        others = [set(m.plan.device.cores) for m in serving if m is not member]
        return any(not cores or not theirs or cores & theirs for theirs in others) and self._relieved(member)

    def _relieved(self, member: Member) -> bool:
        """Whether nobody waits for this one: its device is served, or has no loops."""
        device = self.find(member.home)
        return device.serving is not None or not member.plan.loops

    def alone(self, member: Member) -> bool:
        serving = self.find(member.home).serving
        return serving is None or serving.home != member.home

    def member_works(self, member: Member) -> None:
        self.find(member.home).progress = member.progress
        self._observer.devices_changed()

    def member_begins(self, member: Member) -> Message:
        return self._observer.member_begins(member)

    def member_loaded(self, member: Member) -> None:
        self.poke()
        self._observer.member_loaded(member)

    def member_ready(self, member: Member) -> None:
        member.ready_ns = _core.now()
        process = member.process
        log("notice", f"{member} is ready", device=member.home, pid=process.pid, restarts=process.restarts)
        for name in member.devices:
            device = self.find(name)
            device.lanes.joined(member)
            self._tell_owner(device, member)
            self.choose(device)
        self.poke()
        self._observer.devices_changed()

    def member_died(self, member: Member, was_ready: bool) -> None:
        now_ns = _core.now()
        if was_ready:
            member.deaths_ns = [t for t in member.deaths_ns if now_ns - t < DEATHS_SPAN_NS] + [now_ns]
        if not member.process.restarting:
            self.members.discard(member)
        self._dying.discard(member)
        if member.progress:
            self.find(member.home).progress = ""
        for name in member.devices:
            device = self.find(name)
            device.lanes.left(member)
            if device.serving is member:
                device.lost_executor(now_ns)
            elif was_ready and name != member.home and member.process.restarting:
                loops = tuple(entry.loop.name for entry in member.plan.standby_of(name))
                text = f"{', '.join(loops)}: the stand-in on {member.home} is gone, not certified until it is back"
                log("warning", text, event="stand-in-lost", device=name, stand_in=member.home, loop=loops)
            self.choose(device)
        self.poke()
        self._observer.devices_changed()

    def member_said(self, member: Member, message: Message) -> None:
        device = self.find(message.get("device", member.home))
        if message["op"] == "took":
            self._took(device, member, message)
        elif message["op"] == "released":
            if device.serving is member:
                device.lost_executor(_core.now())
                self.choose(device)
        elif message["op"] in ("lane.done", "lane.ended"):
            device.lanes.received(member, message)
            self.choose(device)
        self.poke()

    # ---- who serves ----

    def _took(self, device: ServedDevice, member: Member, message: Message) -> None:
        how, reason = message["how"], ""
        before = device.serving
        if not device.switches:
            cause = "start"
            reason = device.process.error if member.home != device.name else ""
        elif how == "clean":
            cause = device.switching or "died"  # without a word, and without the lock in its hand
        else:
            cause = str(how)
            if before is not None:
                self._dying.add(before)
                before.process.hear()
                if before.broken:  # it gave up by the loop's rule, or its device is lost
                    cause, reason = "failed", before.broken
        device.took(member, cause, _core.now(), reason)
        if cause != "start":
            self.switches.update((loop, cause) for loop in device.served_loops())
        text = f"{device.name} is served by {member} ({device.role}): {cause}" + (f", {reason}" if reason else "")
        loud = device.role != PRIMARY or cause in ("died", "hung", "failed", "return")
        log(
            "warning" if loud else "notice", text, event="handover", device=device.name,
            loop=tuple(device.served_loops()), served_by=member.home, role=device.role, cause=cause,
            pid=member.process.pid, before=before.process.pid if before else None,
            resumed=message.get("resumed", 0), lost=message.get("lost", 0),
            heard_us=message.get("heard_us"), took_us=message.get("took_us"),
        )  # fmt: skip
        for follower in self.members:
            if device.name in follower.devices and follower.ready:
                self._tell_owner(device, follower)
        self.choose(device)
        self._observer.devices_changed()

    def _tell_owner(self, device: ServedDevice, member: Member) -> None:
        serving = device.serving
        if serving is not None and serving is not member and serving.process.pidfd >= 0:
            member.owner_is(device.name, serving.id, serving.process.pidfd)

    def line(self, device: ServedDevice) -> list[Member]:
        """Who may serve a device, the best first: its own executor, the one before it, its stand-ins in order."""
        own = [m for m in (device._member, device.outgoing) if m is not None]
        order: dict[str, None] = {}
        for loop in device.member.plan.loops if own else ():
            for fallback in loop.fallback:
                if fallback.kind == "device":
                    order.setdefault(fallback.device)
        stand_ins = [self._devices[name].member for name in order if name in self._devices]
        return own + [m for m in stand_ins if device.name in m.devices]

    def choose(self, device: ServedDevice) -> None:
        """Say in the ledger who is next if the one that serves can't any more; give the loops back when it is time."""
        if device.switching or device.lanes.closed or device._member is None:
            return
        able = [m for m in self.line(device) if m is not device.serving and self._can_take(device, m)]
        if not device.switches and able and able[0] is not device.member and self._patient(device):
            able = []
        if self._writer(device) is not None:
            able = []
        if able:
            _core.succession_set(device.lanes.ledger_fd, able[0].id)
        elif device.serving is not None:
            _core.succession_set(device.lanes.ledger_fd, 0)
        home = device.member
        if device.serving is not None and device.serving is not home and home in able and not self.changing:
            self._give_back(device, home)

    def _writer(self, device: ServedDevice) -> Member | None:
        """Who has died on a GPU and is not gone: until then the card may write where it answered.

        Whoever took over answers in the other output area. A third one would answer in that one again.
        """
        return next((m for m in self._dying if m.plan.device.gpu and device.name in m.devices), None)

    def _can_take(self, device: ServedDevice, member: Member) -> bool:
        return member not in self._dying and device.lanes.synced(member)

    def _patient(self, device: ServedDevice) -> bool:
        left_ns = self._began_ns + START_PATIENCE_NS - _core.now()
        if device.process.tries or device.member.progress or left_ns <= 0:
            return False
        asyncio.get_running_loop().call_later(left_ns / 1e9, self.choose, device)
        return True

    def _give_back(self, device: ServedDevice, home: Member) -> None:
        now_ns = _core.now()
        wait_ns = home.ready_ns + return_pause_ns(home.deaths_ns, now_ns) - now_ns
        if wait_ns > 0:
            asyncio.get_running_loop().call_later(wait_ns / 1e9, self.choose, device)
            return
        task = asyncio.get_running_loop().create_task(self._hand_back(device, home))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_back(self, device: ServedDevice, home: Member) -> None:
        if device.switching or self.changing:
            return
        try:
            await self.pass_over(device, home, "hand-back")
        except PassOverFailed as failed:
            log("error", f"{device.name} stays with its stand-in: {failed}", device=device.name)

    async def pass_over(self, device: ServedDevice, to: Member, cause: str) -> None:
        """Let another member serve from the next job boundary on. Raises PassOverFailed."""
        device.switching = cause
        try:
            if not await self.until(lambda: device.lanes.synced(to) or not to.ready, SYNC_S_MAX) or not to.ready:
                raise PassOverFailed(f"{to} {to.process.error or 'does not follow'}")
            if not await self.until(lambda: self._writer(device) is None, SYNC_S_MAX):
                raise PassOverFailed(f"{self._writer(device)} is dead and not gone: its GPU may write over answers")
            _core.succession_set(device.lanes.ledger_fd, to.id)
            before = device.serving
            if before is not None and before is not to:
                before.send({"op": "release", "device": device.name})
            if not await self.until(lambda: device.serving is to or not to.ready, TAKE_S_MAX) and before is not None:
                before.hangs(f"has not released {device.name} for {TAKE_S_MAX:.0f} s")
                await self.until(lambda: device.serving is to or not to.ready, TAKE_S_MAX)
            if device.serving is not to:
                raise PassOverFailed(f"{to} {to.process.error or 'did not take over'}")
        finally:
            device.switching = ""
            self.choose(device)

    # ---- what can be said of all ----

    def confirm_costs(self) -> None:
        """Whether loops cost what they were admitted for, of each that is not settled yet."""
        for device in self._devices.values():
            device.confirm_costs()

    def stand_in_reason(self, loop_name: str, device: ServedDevice) -> str:
        """Why the loop's stand-in can't be relied on, "" where it can or none is wanted."""
        loop = next(loop for loop in device.member.plan.loops if loop.name == loop_name)
        for fallback in loop.fallback:
            if fallback.kind != "device":
                continue
            stand_in = self._devices.get(fallback.device)
            member = stand_in.member if stand_in is not None else None
            if member is None or not device.lanes.synced(member):
                return f"its stand-in on {fallback.device} is not ready"
            schedule = member.schedule
            if schedule is None:
                return f"its stand-in on {fallback.device} is not admitted yet"
            if reason := schedule.standby_reason.get(loop_name) or schedule.reason:
                return f"its stand-in on {fallback.device}: {reason}"
        return ""

    def stood_in_for(self, device: ServedDevice) -> bool:
        """Whether each of its loops has a stand-in that serves, or may still come up."""
        loops = device.member.plan.loops
        line = [
            m for m in self.line(device) if m.home != device.name and (m.process.loaded_message or not m.process.tries)
        ]
        homes = {member.home for member in line}
        return bool(loops) and all(any(one.device in homes for one in loop.fallback) for loop in loops)

    def can_be_served(self, device: ServedDevice, tries_max: int) -> bool:
        """Somebody serves it, or there is hope that somebody will."""
        if device.serving is not None:
            return True
        return any(m.process.ready or m.process.tries < tries_max for m in self.line(device))

    def adopt(self, member: Member, heir: Heir) -> None:
        """An executor of a supervisor before this one: it serves the ledgers that it has."""
        for name in heir.owned:
            self.find(name).took(member, "adopted", _core.now())
        member.adopt(heir)
        for name in heir.owned:
            log(
                "notice", f"{name} is served by {member}, which was taken over", event="handover", device=name,
                loop=tuple(self.find(name).served_loops()), served_by=member.home, cause="adopted",
                pid=member.process.pid,
            )  # fmt: skip
            self.choose(self.find(name))

    async def stop(self, others: Iterable[Ending], drain_s: float, kill_s: float) -> None:
        """Everybody, others too, finishes what is pending and exits; who takes too long is ended."""
        self.changing = True
        processes: list[Ending] = [*(member.process for member in self.members), *others]
        for process in processes:
            process.drain()
        waits = [asyncio.create_task(process.stopped.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=drain_s)
            if late:
                for process in processes:
                    process.kill()
                await asyncio.wait(late, timeout=kill_s)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.forget_coming()
        for device in self._devices.values():
            device.close()
