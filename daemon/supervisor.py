"""The process that systemd starts: configuration, folders, doors, executors, admission, readiness, the end.

One thread, one event loop. It makes lanes and hands them out; it is on no real-time path, and while it is busy or dead
no loop notices. What it can't do it says, with what to do, and exits: 78 where the configuration is refused.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from taktd.daemon import runtime_folder
from taktd.daemon.certification.certification import Evidence, Judgement, NotAdmitted, judge
from taktd.daemon.config.configuration import Configuration, Model
from taktd.daemon.doctor.gpu import GpuReader
from taktd.daemon.doctor.preconditions import Lost
from taktd.daemon.doctor.watch import MachineWatch
from taktd.daemon.doors.activation import inherited_sockets
from taktd.daemon.doors.control_door import ControlDoor, ControlError, Operation
from taktd.daemon.doors.front_desk import FrontDesk
from taktd.daemon.doors.http_door import HttpDoor
from taktd.daemon.doors.lane_door import LaneDoor
from taktd.daemon.doors.outer_doors import OuterDoors
from taktd.daemon.doors.peers import own_uid
from taktd.daemon.execution.duty import real_time_share_ppm
from taktd.daemon.handover.change import Judge
from taktd.daemon.handover.reload import Reloader
from taktd.daemon.handover.start_configuration import begin_with
from taktd.daemon.handover.takeover import Takeover
from taktd.daemon.handover.tensor_change import refuse_other_tensors
from taktd.daemon.health.status import StatusBook, status_line
from taktd.daemon.limits import Charges
from taktd.daemon.logbook import log
from taktd.daemon.models.commands import ModelCommands
from taktd.daemon.models.inspection import Inspector, ModelRefused
from taktd.daemon.notify import Notifier
from taktd.daemon.shadow.commands import LOOK_S as SHADOW_LOOK_S
from taktd.daemon.shadow.commands import Shadow
from taktd.daemon.supervision import idle_latency
from taktd.daemon.supervision.device_plan import FallbackRefused, Inspection, plans_of
from taktd.daemon.supervision.devices import Devices
from taktd.daemon.supervision.fault_commands import FaultCommands, forget_faults
from taktd.daemon.supervision.first_judgement import FirstJudgement
from taktd.daemon.supervision.flight_recorder import DRAIN_S, FlightRecorder
from taktd.daemon.supervision.gateway_process import GatewayProcess
from taktd.daemon.supervision.gpu_watch import GpuWatch
from taktd.daemon.supervision.kept_process import Message, State
from taktd.daemon.supervision.lanes import Lane
from taktd.daemon.supervision.member import Member, TooMuch

EXIT_CONFIGURATION: Final = 78  # EX_CONFIG; systemd does not restart on it
EXIT_FAILED: Final = 1
EXIT_HANDED_OVER: Final = 75  # EX_TEMPFAIL; systemd starts the next one, and leaves executors to it
DRAIN_S_MAX: Final = 3.0  # with what follows, SIGTERM ends in less than 5 s
KILL_S_MAX: Final = 1.0
INSPECTIONS_AT_ONCE: Final = 2
# Starts of an executor that may fail before the daemon gives up; once it has been ready, it never does.
FIRST_TRIES_MAX: Final = 3
HOPELESS_TRIES: Final = 5  # in a row, of an executor that has served before: the watchdog is starved
WATCHDOG_PARTS: Final = 3
PATIENCE_ASKED_S: Final = 5.0  # while a start takes long, systemd is asked this often …
PATIENCE_S: Final = 30  # … to wait for so long from then on
LEFT_LANES_S: Final = 0.2  # how often lanes of clients that went while nobody held their connection are freed
CONFIRM_S: Final = 1.0  # how often the first jobs of loops are compared with what they were admitted for


class StartRefused(Exception):
    """The daemon can't start; code is its exit code."""

    def __init__(self, text: str, code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.code = code


class Supervisor:
    """One run of taktd, from a configuration to the exit code."""

    def __init__(
        self, file: Path, configuration: Configuration, environment: MutableMapping[str, str], refused: str = ""
    ) -> None:
        """refused: what is wrong with the file, where the configuration is not from it (start_configuration.py)."""
        self.file = file
        self.configuration, self.refused = configuration, refused
        self.epoch = self.last_epoch = 1
        self.runtime = runtime_folder.runtime_folder(environment, own_uid())
        self.state = runtime_folder.state_folder(environment, own_uid())
        self.notifier = Notifier(environment)
        self.inherited = inherited_sockets(environment)
        self._idle_latency = idle_latency.hold(environment)  # open as long as we live
        self.charges = Charges(configuration.limits)
        self.devices = Devices(self.state, self)
        self.reloader = Reloader(self)
        self.takeover = Takeover(self)
        self.shadow = Shadow(self)
        self.faults = FaultCommands(self.state, lambda: self.configuration)
        self.recorder: FlightRecorder | None = None
        self.lane_door: LaneDoor | None = None
        self.control_door: ControlDoor | None = None
        self.http_door: HttpDoor | None = None
        self.gateway: GatewayProcess | None = None
        self.outer = OuterDoors(self)
        self.outer.make_gateway()
        self.desk = FrontDesk(self)
        self.book = StatusBook(self)
        self.watch = MachineWatch({}, self._ground_moved, opened=self._opened_gpus, read_gpus=GpuReader())
        self._follow_machine()
        self.announced = False  # READY=1 was sent
        self.stopping = False
        self._failure: asyncio.Future[None] | None = None  # set to an exception when the start can't succeed
        self._stop = asyncio.Event()
        self._handing_over = False  # the stop is to make room for another taktd
        self._changed = asyncio.Event()
        self._first = FirstJudgement(self)
        self._gpu_watch = GpuWatch(self.devices)

    # ---- start to end ----

    async def run(self) -> int:
        """Serve until told to stop, or to make room for another taktd; the exit code."""
        locks = self._prepare()
        self._failure = asyncio.get_running_loop().create_future()
        self._listen_to_signals()
        work = asyncio.create_task(self._serve())
        stop = asyncio.create_task(self._stop.wait())
        watches = [asyncio.create_task(self.watch.run()), asyncio.create_task(self._gpu_watch.run())]
        try:
            ends: list[asyncio.Future[Any]] = [work, stop, *watches, self._failure]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for ended in ends:
                if ended.done() and not ended.cancelled() and (error := ended.exception()):
                    raise error
            return EXIT_HANDED_OVER if self._handing_over else 0
        except (ModelRefused, NotAdmitted, TooMuch, FallbackRefused) as refused:
            raise StartRefused(str(refused), EXIT_CONFIGURATION) from None
        finally:
            for task in (work, stop, *watches):
                task.cancel()
            await asyncio.gather(work, stop, *watches, return_exceptions=True)
            await (self.takeover.hand_over() if self._handing_over else self._end())
            for lock in locks:
                lock.close()

    def _prepare(self) -> list[runtime_folder.FolderLock]:
        """Folders and their locks. Raises StartRefused."""
        try:
            runtime_folder.make_folder(self.runtime, 0o755)
            locks = [runtime_folder.lock_folder(self.runtime)]
        except runtime_folder.FolderRefused as refused:
            raise StartRefused(str(refused)) from None
        except runtime_folder.AlreadyRunning as running:
            hint = "stop it first, or give this one a folder of its own in TAKTD_RUNTIME_DIR"
            raise StartRefused(f"{running}\n  to do: {hint}") from None
        except OSError as error:
            raise StartRefused(f"{self.runtime} can't be locked: {error.strerror}") from None
        try:
            runtime_folder.make_folder(self.state, 0o750, runtime_folder.STATE_HINT)
            locks.append(runtime_folder.lock_folder(self.state, runtime_folder.STATE_LOCK_FILE))
        except (runtime_folder.FolderRefused, OSError) as refused:
            log("warning", f"nothing is remembered over a restart: {refused}")
        except runtime_folder.AlreadyRunning as running:
            hint = "stop it first, or give this one a folder of its own in TAKTD_STATE_DIR, too"
            raise StartRefused(f"{running} for what it remembers\n  to do: {hint}") from None
        # Each lane costs two descriptors; executors inherit the limit.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return locks

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGUSR2, self._make_room)
        self._reloads: set[asyncio.Task[Any]] = set()
        loop.add_signal_handler(signal.SIGHUP, self.reload_soon)

    def _make_room(self) -> None:
        self._handing_over |= not self._stop.is_set()
        self._stop.set()

    def reload_soon(self) -> None:
        """Take over what the configuration file says."""
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(self.reloader.hang_up())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _serve(self) -> None:
        """The whole of a run: start everything, then keep telling how it goes. Ends by cancellation."""
        self.every(PATIENCE_ASKED_S, self._ask_for_patience)
        inspections = await self.takeover.begin()
        if inspections is None:
            forget_faults(self.state)  # executors that are taken over have them mapped, and act by them
            if self.refused:
                raise StartRefused("no executor of the taktd before can be taken over", EXIT_CONFIGURATION)
            self.notifier.status("inspecting models")
            inspections = await self.inspect(self.configuration)
        plans = plans_of(self.configuration, inspections)
        there = {name: self.takeover.lanes_of(name, plan) for name, plan in plans.items()}
        coming = {name: self.devices.add(name, self.configuration, there[name]) for name in plans}
        arrangements = {name: device.lanes.arrange(plans[name]) for name, device in coming.items()}
        self.devices.install(plans)
        for name, device in coming.items():
            device.lanes.install(arrangements[name])
            followed = {at: arrangements[at] for at in (name, *plans[name].homes)}
            device.member = self.devices.make(plans[name], followed, self.epoch)
        size_max = self.configuration.recording.size_bytes
        self.recorder = FlightRecorder(self.state / "recordings", self.devices, size_max)
        self._open_doors()
        await self.outer.open_http()
        self.every(DRAIN_S, self.recorder.drain)
        self.outer.feed()
        self.every(CONFIRM_S, self.devices.confirm_costs)
        if self.notifier.watchdog_ns:
            self.every(self.notifier.watchdog_ns / 1e9 / WATCHDOG_PARTS, self._feed_watchdog)
        for member in self.takeover.adopt():
            member.process.start()
        self.every(LEFT_LANES_S, self.takeover.look)
        self.every(SHADOW_LOOK_S, self.shadow.look)
        self.notifier.status("loading engines")
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._tell()

    async def inspect(self, configuration: Configuration) -> dict[str, Inspection]:
        """Every model's inspection by name. Raises ModelRefused."""
        inspector = Inspector(self.state / "inspections")
        gate = asyncio.Semaphore(INSPECTIONS_AT_ONCE)

        async def one(name: str) -> Inspection:
            async with gate:
                return await inspector.inspect(configuration.models[name])

        found = await asyncio.gather(*(one(name) for name in configuration.models))
        return dict(zip(configuration.models, found, strict=True))

    def _open_doors(self) -> None:
        asking: dict[str, Operation] = {
            "status": self.book.status, "models": self.book.models, "loops": self.book.loops,
            "costs": self.book.costs, "record": self._record_asked,
        }  # fmt: skip
        changing: dict[str, Operation] = {"reload": self._reload_asked}
        for commands in (ModelCommands(self, self.shadow.of), self.shadow, self.faults):
            asking |= commands.asking
            changing |= commands.changing
        lanes, control = runtime_folder.LANES_SOCKET, runtime_folder.CONTROL_SOCKET
        try:
            self.lane_door = LaneDoor(self.runtime / lanes, self.desk, self.inherited.get(socket.SOCK_SEQPACKET))
            self.control_door = ControlDoor(
                self.runtime / control, asking, changing, self.inherited.get(socket.SOCK_STREAM)
            )
        except (OSError, runtime_folder.FolderRefused) as error:
            raise StartRefused(f"the sockets in {self.runtime} can't be opened: {error}") from None

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        """Again and again, from now until the end."""

        def again() -> None:
            if not self.stopping:
                action()
                asyncio.get_running_loop().call_later(seconds, again)

        again()

    # ---- what the devices say ----

    def member_begins(self, member: Member) -> Message:
        # After this turn of the event loop, when all that is being started or changed now has its place.
        asyncio.get_running_loop().call_soon(self._write_down)
        return self.takeover.house()

    def _write_down(self) -> None:
        if not self.stopping:
            self.takeover.write_down()

    def member_loaded(self, member: Member) -> None:
        """It waits for admission."""
        self.judge_first()

    def judge_first(self) -> None:
        """Admit whoever has loaded and has not been judged, if it is time."""
        try:
            self._first.look()
        except NotAdmitted as refusal:
            self._fail(refusal)

    def judge_for(self, configuration: Configuration) -> Judge:
        """Admission of a configuration by what executors have measured."""

        def judge_members(members: Mapping[str, Member]) -> dict[str, Judgement]:
            evidence = {
                name: Evidence(m.measured, m.dispatch_ns, m.rights, m.measured_real_time)
                for name, m in members.items()
                if m.schedule is not None or m.process.loaded_message  # else it is judged when it is there
            }
            return judge(configuration, evidence, real_time_share_ppm())

        return judge_members

    def _ground_moved(self, device: str, lost: tuple[Lost, ...]) -> None:
        """What the measurements rested on has changed, or is back."""
        if device not in self.devices:
            return  # gone by a change
        self.devices[device].lost = lost
        for loss in lost:
            log(
                "warning", f"measurements on {device} don't hold: {loss}", event="precondition-lost", device=device,
                cause=loss.name, epoch=self.epoch,
            )  # fmt: skip
        if not lost:
            log("notice", f"measurements on {device} hold again", event="precondition-holds", device=device)
        self._changed.set()

    def _follow_machine(self) -> None:
        devices = self.configuration.devices.values()
        self.watch.follow({device.name: frozenset(device.cores) for device in devices})

    def _opened_gpus(self) -> dict[str, str]:
        return {name: device.member.gpu["uuid"] for name, device in self.devices.items() if device.member.gpu}

    def devices_changed(self) -> None:
        """An executor became ready, died, or serves something else."""
        fresh = not self.announced and not self.takeover.went_on  # else a failing start ends what others serve
        for device in self.devices.values() if fresh else ():
            process = device.process
            # A device that can't be used now is waited for: a GPU's nodes may appear long after a boot. So is one whose
            # loops have a stand-in: they are served, uncertified, and the executor is tried again and again.
            waited_for = process.awaits_device or self.devices.stood_in_for(device)
            if process.restarting and process.tries and not waited_for:  # not while it tries once more
                if process.failure:
                    self._fail(StartRefused(f"executor {device.name} {process.failure}", EXIT_CONFIGURATION))
                elif process.tries >= FIRST_TRIES_MAX:
                    self._fail(StartRefused(f"executor {device.name} does not start: it {process.error}"))
        self.judge_first()
        self._changed.set()

    def lane_ended(self, lane: Lane, reason: int, text: str) -> None:
        self.desk.lane_ended(lane, reason, text)

    def _fail(self, error: Exception) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(error)

    @property
    def ready(self) -> bool:
        """Programs can attach, and every loop that was admitted is answered by an executor, be it its stand-in."""
        doors = self.lane_door is not None and self.control_door is not None
        return doors and bool(self.devices) and not any(device.unanswered() for device in self.devices.values())

    @property
    def certified(self) -> bool:
        """Ready, and every device's promise is proven under the rights it has now."""
        return self.ready and all(
            device.certified and not any(self.devices.stand_in_reason(loop, device) for loop in device.served_loops())
            for device in self.devices.values()
        )

    def gateway_changed(self) -> None:
        """It listens, or has died."""
        self._changed.set()

    def _tell(self) -> None:
        text = status_line(self)
        if self.gateway is not None:
            if self.ready and self.gateway.state is State.STOPPED and self.outer.gateway_wanted:
                self.gateway.start()  # only now: it must not disturb the measuring
            self.gateway.tell_state()
        # Loops don't wait for a front door that can't be opened.
        doors_settled = self.gateway is None or self.gateway.settled or not self.outer.gateway_wanted
        if self.ready and doors_settled and not self.announced:
            self.announced = True
            log("notice", f"ready: {text}", event="ready", node=self.configuration.node.name, epoch=self.epoch)
            self.notifier.ready(text)
            self._write_down()
            self.takeover.settled()
        else:
            self.notifier.status(text)

    def _ask_for_patience(self) -> None:
        """Models are inspected, or an engine is built or a GPU awaited: systemd must not start us again for it."""
        waits = not self.devices or any(one.progress or one.process.tries for one in self.devices.values())
        if waits and not self.announced:
            self.notifier.extend(PATIENCE_S)

    def _feed_watchdog(self) -> None:
        """Not while nobody can be made to serve a loop: then systemd shall start us again."""
        if all(self.devices.can_be_served(device, HOPELESS_TRIES) for device in self.devices.values()):
            self.notifier.feed_watchdog()

    # ---- another configuration ----

    async def _reload_asked(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"message": await self.reloader.reload(), "epoch": self.epoch}

    def next_epoch(self) -> int:
        """A number that no configuration has had."""
        self.last_epoch += 1
        return self.last_epoch

    def inherit(self, configuration: Configuration, epoch: int, last_epoch: int) -> None:
        """Go on with what a supervisor before this one had."""
        self.last_epoch = last_epoch
        self.apply(configuration, epoch)

    def apply(self, configuration: Configuration, epoch: int) -> None:
        """What is the supervisor's alone: from now on these limits, rights and names hold."""
        self.configuration, self.epoch = configuration, epoch
        self.charges.limits = configuration.limits
        if self.recorder is not None:
            self.recorder.resize(configuration.recording.size_bytes)
        self.desk.rules_changed()
        self._follow_machine()
        self.watch.certify()
        self.outer.follow()
        self._changed.set()
        if self.announced:
            self._write_down()

    async def _record_asked(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.recorder is not None
        try:
            return self.recorder.answer(request)
        except KeyError as error:
            raise ControlError(f"there is no segment {error}", "ask for the list again: the oldest go first") from None

    async def inspect_model(self, model: Model) -> Inspection:
        """Raises ModelRefused."""
        return await Inspector(self.state / "inspections").inspect(model)

    async def change_model(self, name: str, version: int) -> str:
        """Serve another version of a model. Raises ControlError; then nothing has changed."""
        await refuse_other_tensors(self, name, version)
        await self.shadow.step_aside(name, version)
        done = await self.reloader.change_model(name, version)
        await self.shadow.end(f"version {version} is activated", of=name)
        return done

    # ---- the end ----

    async def _end(self) -> None:
        """Nobody is left behind: executors drain, and are killed when they take too long."""
        self.stopping = True
        self.notifier.stopping("stopping")
        log("notice", "stopping: what runs is finished first", event="stopping")
        if self.lane_door is not None:
            self.lane_door.stop_listening()
        others = [process for process in (self.gateway, self.shadow.process) if process is not None]
        await self.devices.stop(others, DRAIN_S_MAX, KILL_S_MAX)
        if self.lane_door is not None:
            await self.lane_door.close("taktd stops")
        if self.control_door is not None:
            await self.control_door.close()
        if self.http_door is not None:
            await self.http_door.close()
        if self.recorder is not None:
            self.recorder.close()
        self.devices.close()
        self.takeover.forget()
        held = {kind: self.charges.held(kind) for kind in ("connections", "lanes", "lane_memory")}
        if any(held.values()):
            log("error", f"still charged at the end, a defect of taktd: {held}")
        log("notice", "stopped", event="stopped")
        self.notifier.close()


def main(file: Path) -> int:
    """Load, run, explain; the exit code."""
    beginning = begin_with(file, os.environ)
    if beginning.refused:
        log("error", beginning.refused, event="refused")
    if beginning.configuration is None:
        return EXIT_CONFIGURATION
    try:
        return asyncio.run(_run(file, beginning.configuration, beginning.refused))
    except StartRefused as refused:
        log("error", str(refused), event="refused")
        return EXIT_CONFIGURATION if beginning.refused else refused.code


async def _run(file: Path, configuration: Configuration, refused: str) -> int:
    try:
        supervisor = Supervisor(file, configuration, os.environ, refused)
    except runtime_folder.FolderRefused as error:
        raise StartRefused(str(error)) from None
    return await supervisor.run()
