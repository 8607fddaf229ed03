"""A model's next version beside the one that loops use, on copies of the same inputs: started, followed, ended.

`taktctl model activate NAME N --shadow`. The version runs in a process of its own (runner.py) that reads the lanes'
memory; no executor knows of it. There is one shadow at a time. What it has shown stays to be looked at after its end,
until the next one begins or taktd ends.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

from taktd.daemon.certification.costs import engine_cost_ns
from taktd.daemon.config.configuration import Loop, Model
from taktd.daemon.doors.control_door import ControlError, Operation
from taktd.daemon.logbook import log
from taktd.daemon.models.commands import inspected_version, kept_model, version_number
from taktd.daemon.models.store import version_of
from taktd.daemon.shadow.shadow_process import ShadowProcess
from taktd.daemon.supervision.engine_plan import engine_rules
from taktd.daemon.supervision.served_device import STAND_IN, ServedDevice
from taktd.daemon.supervision.tensor_difference import as_a_change, tensor_difference
from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervision.kept_process import Message
    from taktd.daemon.supervision.lane_memory import LaneMemory
    from taktd.daemon.supervisor import Supervisor

LOOK_S: Final = 0.2  # how often lanes that changed hands are shown to it
LOAD_S_MAX: Final = 500.0  # less than taktctl waits
END_S_MAX: Final = 2.0
STOPPED: Final = "stopped"


class Shadow:
    """The one there is, or the last one there was."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._process: ShadowProcess | None = None
        self._news = asyncio.Event()
        self._name = self._device = ""
        self._version = self._against = 0
        self._path = ""  # of the version that is served
        self._loops: list[str] = []
        self._shown: dict[str, LaneMemory] = {}
        self._since_ns = 0
        self._ended = ""  # why
        self._seen: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def asking(self) -> dict[str, Operation]:
        return {"model.shadow": self._show}

    @property
    def changing(self) -> dict[str, Operation]:
        return {"model.shadow.start": self._start, "model.shadow.stop": self._stop}

    @property
    def process(self) -> ShadowProcess | None:
        """While there is one."""
        return self._process

    @property
    def _running(self) -> bool:
        return self._process is not None and self._process.pid is not None

    # ---- what is asked ----

    async def _show(self, request: Message) -> Message:
        """{"name"}"""
        name = str(request.get("name"))[:64]
        if (told := self.of(name)) is None:
            raise ControlError(
                f"model {name} has no shadow, and had none", f"start one: taktctl model activate {name} N --shadow"
            )
        return {"name": name, "shadow": told}

    async def _start(self, request: Message) -> Message:
        """{"name", "version"}: returns when it compares."""
        model, loops, device = self._wanted(request.get("name"))
        number = version_number(request.get("version"))
        if number == version_of(model):
            raise ControlError(
                f"model {model.name}: version {number} is what the loops use", "give another version to compare with it"
            )
        if self._running:
            raise ControlError(
                f"version {self._version} of {self._name} runs as a shadow already, one at a time is allowed",
                f"end it first: taktctl model shadow {self._name} --stop",
            )
        await self._begin(model, number, loops, device)
        process = self._process
        assert process is not None
        await self._until(lambda: process.ready or process.pid is None, LOAD_S_MAX)
        if not process.ready:
            await self.end("did not load in time")
            why = process.failure or self._ended
            raise ControlError(f"{model.name}: version {number} can't run as a shadow: {why}",
                               "what is served is served as before")  # fmt: skip
        self.look()
        for note in process.notes:
            log("warning", f"shadow: {note}", model=model.name)
        text = f"{model.name}: version {number} runs beside version {self._against} on copies of the jobs of "
        text += f"{', '.join(self._loops)}; it answers nobody"
        log("notice", text, event="shadow-began", model=model.name, pid=process.pid)
        hint = (
            f"what it shows: taktctl model shadow {model.name}; serve it: taktctl model activate {model.name} {number}"
        )
        return {"name": model.name, "version": number, "message": f"{text}\n{hint}"}

    async def _stop(self, request: Message) -> Message:
        """{"name"}"""
        name = str(request.get("name"))[:64]
        if not self._running or name != self._name:
            raise ControlError(f"no shadow of model {name} is running", "taktctl model list shows what there is")
        await self.end(STOPPED)
        told = self.of(name)
        assert told is not None
        text = f"{name}: the shadow of version {self._version} is stopped; {told['samples']} jobs compared, "
        return {"name": name, "message": text + f"{told['differing']} of them different", "shadow": told}

    # ---- beginning ----

    def _wanted(self, name: object) -> tuple[Model, list[Loop], ServedDevice]:
        """The model, its loops on the device of the first of them, and that device. Raises ControlError."""
        configuration = self._supervisor.configuration
        model = kept_model(configuration, name)
        loops = [loop for loop in configuration.loops.values() if loop.model == model.name]
        if not loops:
            raise ControlError(
                f"no loop uses model {model.name}: a shadow runs on copies of what loops do",
                f"activate the version without --shadow: taktctl model activate {model.name} N",
            )
        device = self._supervisor.devices[loops[0].device]
        if why := self._gpu_is_needed(device):
            raise ControlError(
                f"model {model.name}: {why}", "activate it without --shadow: it is verified, and watched"
            )
        return model, [loop for loop in loops if loop.device == device.name], device

    def _gpu_is_needed(self, device: ServedDevice) -> str:
        """Two kernels that share a GPU have no worst case: "" while its loops are served elsewhere, or it is none."""
        if device.member.plan.device.gpu is None or device.role == STAND_IN:
            return ""
        return f"its loops are served by {device.name}, and beside them nothing else may run on a GPU"

    async def _begin(self, model: Model, number: int, loops: list[Loop], device: ServedDevice) -> None:
        """Starts the process. Raises ControlError."""
        supervisor = self._supervisor
        new, inspection = await inspected_version(supervisor, model, number)
        if different := tensor_difference(device.inspections[model.name], inspection, as_a_change):
            raise ControlError(
                f"model {model.name}: version {number} has other tensors than the version that is served: {different}",
                "it can't run on copies of the same inputs; see docs/models.md on changing tensors",
            )
        if self._running:
            raise ControlError("another shadow has been started meanwhile", "taktctl model list shows it")
        taken = {core for one in supervisor.configuration.devices.values() for core in one.cores}
        present = os.sched_getaffinity(0)
        configure: Message = {
            "op": "configure", "cores": sorted(present - taken or present),
            # A fault that a test injects is for the loops.
            "driver": {**device.member.driver_plan, "faults": None},
            "model": {"name": model.name, "path": new.path, "inspection": inspection, **engine_rules(new)},
        }  # fmt: skip
        self._name, self._version, self._against = model.name, number, version_of(model) or 0
        self._path, self._device, self._loops = model.path, device.name, [loop.name for loop in loops]
        self._shown, self._seen, self._ended, self._since_ns = {}, {}, "", _core.now()
        self._process = ShadowProcess(model.name, configure, self._changed)
        self._process.start()

    # ---- while it runs ----

    def _changed(self) -> None:
        process = self._process
        if process is None:
            return
        self._seen = process.seen
        if process.pid is None and not self._ended:
            self._ended = process.why_ended or STOPPED
            log("warning", f"the shadow of {self._name}, version {self._version}, {self._ended}",
                event="shadow-ended", model=self._name)  # fmt: skip
        self._news.set()

    def look(self) -> None:
        """Shows it lanes that changed hands, and ends it where there is nothing to compare with any more."""
        process, supervisor = self._process, self._supervisor
        if process is None or process.pid is None or self._ended:
            return
        if supervisor.reloader.doing and not self._on_a_gpu:
            self._hide()  # whoever answers meanwhile may be on probation; and the change may be refused, or taken back
            return
        if why := self._pointless():
            task = asyncio.get_running_loop().create_task(self.end(why))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        lanes = supervisor.devices[self._device].lanes
        for name in self._loops if process.ready else ():
            memory = lanes.loops[name].memory if lanes.attached(name) else None
            if memory is self._shown.get(name):
                continue
            if memory is None:
                del self._shown[name]
                process.send({"op": "lane.gone", "loop": name})
            else:
                self._shown[name] = memory
                process.send({"op": "lane", "loop": name, "layout": memory.layout}, (memory.memfd,))

    def _hide(self) -> None:
        """No lane is shown to it any more; look() shows them again."""
        assert self._process is not None
        for name in self._shown:
            self._process.send({"op": "lane.gone", "loop": name})
        self._shown = {}

    @property
    def _on_a_gpu(self) -> bool:
        device = self._supervisor.devices.get(self._device)
        return device is not None and device.member.plan.device.gpu is not None

    async def step_aside(self, model: str, version: int) -> None:
        """Before a change of its model, which may be refused. On a GPU it ends: another engine has to be loaded and
        measured there. Elsewhere it rests until the change is made or is not."""
        if self._on_a_gpu:
            await self.end(f"version {version} is activated", of=model)

    def _pointless(self) -> str:
        """Why it can't go on, "" while it can."""
        configuration = self._supervisor.configuration
        model = configuration.models.get(self._name)
        if model is None or self._device not in self._supervisor.devices:
            return "the configuration does not have it any more"
        if model.path != self._path:
            return "another version is served now"
        loops = self._supervisor.devices[self._device].lanes.loops
        wanted = {name for name, loop in configuration.loops.items() if loop.model == self._name}
        if any(name not in loops or name not in wanted for name in self._loops):
            return "its loops are others by the configuration"
        return self._gpu_is_needed(self._supervisor.devices[self._device])

    # ---- the end ----

    async def end(self, why: str, of: str | None = None) -> None:
        """It is gone when this returns. of: only if it is a shadow of this model."""
        process = self._process
        if process is None or (of is not None and of != self._name):
            return
        if process.pid is not None and not self._ended:
            self._ended = why
            log("notice", f"the shadow of {self._name}, version {self._version}, ends: {why}",
                event="shadow-ended", model=self._name)  # fmt: skip
            process.drain()
        if not await self._until(lambda: process.pid is None, END_S_MAX):
            process.kill()
            await self._until(lambda: process.pid is None, END_S_MAX)
        self._shown = {}

    async def _until(self, condition: Any, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not condition() and (left := end - loop.time()) > 0:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                break
        return bool(condition())

    # ---- what is told ----

    def as_json(self) -> dict[str, Any] | None:
        """For `status`: the one that runs, or ran last."""
        told = self.of(self._name)
        return told and {"model": self._name, **told}

    def of(self, name: str) -> dict[str, Any] | None:
        """What the shadow of a model has shown, None where there was none."""
        if not self._name or name != self._name or self._process is None:
            return None
        process = self._process
        state = "ended" if process.pid is None else "comparing" if process.ready else "loading"
        times = self._seen.get("times") or {}
        return {
            "version": self._version, "against": self._against, "state": state, "why_ended": self._ended,
            "pid": process.pid, "device": self._device, "loops": self._loops, "since_ns": self._since_ns,
            "verified": process.verified, "samples": 0, "differing": 0, "failed": 0, "failure": "", "torn": 0,
            "outputs": {}, **self._seen, "times": times, **self._costs(times),
        }  # fmt: skip

    def _costs(self, times: Message) -> dict[str, int | None]:
        """C by what was measured of both, as admission reckons. The shadow's is of a process that stands aside."""
        device = self._supervisor.devices.get(self._device)
        if device is None:
            return {"would_be_cost_ns": None, "served_cost_ns": None}
        margin_ppm = self._supervisor.configuration.admission.margin_ppm
        dispatch_ns, served = device.dispatch_ns, device.measured.get(self._name, {}).get("1")
        return {
            "would_be_cost_ns": engine_cost_ns(times, margin_ppm, dispatch_ns) if times.get("p999_ns") else None,
            "served_cost_ns": engine_cost_ns(served, margin_ppm, dispatch_ns) if served else None,
        }  # fmt: skip
