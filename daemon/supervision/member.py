"""One executor of a device: the process, the plan it serves, what it measured, what admission decided for it.

Implements what executor_process.Watcher and lanes.Follower ask for. A device has one of them; while a change is made it
has two, and the other device's one that stands in for it follows its lanes too. Started again it is told what it was
told before, without a new measurement and without a new verdict: nothing about its schedule has changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from taktd.daemon.certification.certification import Judgement
from taktd.daemon.certification.measurements import MeasurementStore, identity, pause_between_ns
from taktd.daemon.execution.link import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX
from taktd.daemon.handover.adoption import Heir
from taktd.daemon.handover.inherited_lanes import know
from taktd.daemon.handover.software import software
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import DevicePlan
from taktd.daemon.supervision.engine_plan import driver_plan, engine_rules
from taktd.daemon.supervision.executor_process import ExecutorProcess, Message
from taktd.daemon.supervision.lanes import Arrangement, DeviceLanes

PRIMARY: Final = "primary"
MEASURED_WITH_RIGHTS: Final = "fifo"
BROKEN: Final = "device-broken"
PROVING_RUNS: Final = 20  # of each engine, before a primary that died may have its loops back
BESIDE_PRIORITY: Final = 1  # while it prepares beside one that serves: in that one's slack

Measured = dict[str, dict[str, dict[str, int]]]  # model → batch size → times

_ids = count(1)


def member_ids_after(last: int) -> None:
    """Ids of a supervisor before this one are not given again: ledgers know executors by them."""
    global _ids
    _ids = count(max(last + 1, next(_ids)))


class TooMuch(Exception):
    """More loops and tensors on one device than an executor can be told in one message."""


@dataclass
class Schedule:
    """What admission decided: the `serve` message, who was left out and why, what is claimed.

    standby_reason: by loop, why its stand-in here can't promise the deadline; loops that it can are not in it.
    """

    serve: Message
    shed: Mapping[str, str] = field(default_factory=dict)
    certified: bool = False
    reason: str = ""  # why not certified
    verdict: Mapping[str, Any] = field(default_factory=dict)
    standby_reason: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, judged: Judgement) -> Schedule:
        return cls(judged.serve, judged.shed, judged.certified, judged.reason, judged.verdict, judged.standby_reason)


class Home(Protocol):
    """The devices as a member needs them; the supervisor's."""

    def lanes_of(self, device: str) -> DeviceLanes: ...

    def beside(self, member: Member) -> bool:
        """Whether somebody serves on the cores that it would load on."""

    def alone(self, member: Member) -> bool:
        """Whether no executor serves loops on its device now, so that engines may be built there."""

    def member_begins(self, member: Member) -> Message:
        """It is being started: what it is told of the house it belongs to, for a time without a supervisor."""

    def member_loaded(self, member: Member) -> None: ...

    def member_ready(self, member: Member) -> None: ...

    def member_died(self, member: Member, was_ready: bool) -> None: ...

    def member_said(self, member: Member, message: Message) -> None: ...

    def member_works(self, member: Member) -> None:
        """What it does before it serves has come further."""


class Member:
    """An executor over all its restarts, for one plan. arrangements: the lanes of each device whose ledger it knows."""

    def __init__(self, plan: DevicePlan, arrangements: Mapping[str, Arrangement], epoch: int, state: Path, home: Home):
        self.plan, self.arrangements, self.epoch, self._home = plan, arrangements, epoch, home
        self.home = plan.name
        self.id = 0  # of the process that runs now: each start has its own
        self.schedule: Schedule | None = None
        self._served: Message = {}  # by what an adopted executor serves
        self.outdated = False  # its process runs another taktd than this one: it was there before an upgrade
        self.rights: dict[str, Any] = {}
        self.dispatch_ns = 0
        self.rss_bytes = 0
        self.measured: Measured = {}
        self.measured_real_time = True
        self.refuted: dict[str, str] = {}  # model → why what was stored of it, and not measured since, does not hold
        self.deaths_ns: list[int] = []  # since it was ready for the first time
        self.ready_ns = 0
        self.gpu: dict[str, Any] | None = None  # which card its process has opened, where it is one
        self.progress = ""  # what it does before it serves, where that takes long
        self.broken = ""  # why the process that runs now, or ran last, ends itself
        self._store = MeasurementStore(state / "measurements")
        self.driver_plan = driver_plan(plan, state)
        self._identities = {
            m.name: identity(plan.device, m, plan.inspections[m.name], self._pause_ns(m.name)) for m in plan.models
        }
        self._recall()
        self.process = ExecutorProcess(plan.name, self)

    def __str__(self) -> str:
        return f"executor {self.home}"

    def _recall(self) -> None:
        for model in self.plan.models:
            stored = self._store.read(self._identities[model.name])
            if stored is not None:
                self.measured[model.name] = stored["costs"]
                if why := stored.get("refuted", ""):
                    self.refuted[model.name] = why
                    continue
                self.dispatch_ns = max(self.dispatch_ns, stored["dispatch_ns"])
                self.measured_real_time &= bool(stored["real_time"])

    def refute(self, model: str, why: str) -> None:
        """Loops have shown that the model costs more than was measured. This process goes on by its schedule, and so
        does one that is started in its place; whoever is made for another plan, or at the next start, measures anew."""
        self._store.refute(self._identities[model], why)

    @property
    def ready(self) -> bool:
        return self.process.ready

    def answers(self, loop: str) -> bool:
        """Whether it has been told to serve the loop, at home or as a stand-in."""
        told = self.schedule.serve if self.schedule is not None else self._served
        return loop in told.get("tasks", ())

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices whose ledger it can serve: its own, then those it stands in for."""
        return (self.home, *self.plan.homes)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        self.process.send(message, descriptors)

    def adopt(self, heir: Heir) -> None:
        """An executor of a supervisor before this one, made for the same plan: it serves as it did."""
        self.id, self._served = heir.head["member"], heir.serve
        self.outdated = heir.head.get("software") != software()
        for device in self.devices:
            know(self._home.lanes_of(device), self, heir)
        expected = heir.expected
        self.process.adopt(expected.pid, expected.pidfd, heir.link, heir.loaded)

    def fence(self, why: str) -> None:
        """Its device can't be trusted any more: whoever is next in line takes over, and is told why."""
        self.broken = why
        self.process.kill()

    def hangs(self, why: str) -> None:
        """It is ended; what comes then is what comes after any death."""
        log("error", f"{self} {why}; it is ended", device=self.home, pid=self.process.pid)
        self.process.kill()

    # ---- what it is told at each start ----

    def configure(self, executor: ExecutorProcess) -> tuple[Message, list[int]]:
        """The `configure` message. Raises TooMuch when the configuration alone does not fit."""
        self.id = next(_ids)
        self.outdated = False
        self.broken = self.progress = ""
        self.gpu = None
        plan, own = self.plan, self._home.lanes_of(self.home)
        loops = {loop.name: (loop, loop.model) for loop in plan.loops}
        entries, more = own.loop_entries(self.arrangements[self.home], loops, self)
        standby, standby_descriptors = self._standby()
        for model in plan.models:
            own.stats_block("model", model.name)  # its block is among those that an executor hands to an heir of ours
        message: Message = {
            "op": "configure", "device": self.home, "member": self.id, "driver": self.driver_plan,
            "cores": list(plan.device.cores), "priority": plan.device.priority, "epoch": self.epoch,
            "prepare": self._prepare(), "alone": self._home.alone(self), "prove": PROVING_RUNS if self.deaths_ns else 0,
            "spin_ns": plan.device.spin_ns,
            "models": [self._model_plan(model.name) for model in plan.models],
            "loops": entries, "model_lanes": [], "standby": standby, "dispatch_ns": self.dispatch_ns,
            "max_lanes": own.lane_count,
            "digest": plan.digest(), "software": software(),
            "blocks": [[*key, block] for key, block in own.stats_blocks.items()],
            **self._home.member_begins(self),
        }  # fmt: skip
        descriptors = [own.ledger_fd, own.stats_fd, own.journal_fd, *more]
        room = MESSAGE_BYTES_MAX - len(json.dumps(message))
        places = DESCRIPTORS_MAX - len(descriptors) - len(standby_descriptors)
        if room < 0 or places < 0:
            raise TooMuch(
                f"device {self.home} has more loops and tensors than an executor can be told: "
                f"{MESSAGE_BYTES_MAX - room} bytes of description and {DESCRIPTORS_MAX - places} descriptors found, "
                f"{MESSAGE_BYTES_MAX} and {DESCRIPTORS_MAX} allowed; move loops to another device"
            )
        message["model_lanes"], lanes = own.model_entries(self, room, places // 2)
        return message, descriptors + lanes + standby_descriptors

    def _standby(self) -> tuple[list[Message], list[int]]:
        sections: list[Message] = []
        descriptors: list[int] = []
        for device in self.plan.homes:
            lanes = self._home.lanes_of(device)
            loops = {entry.loop.name: (entry.loop, entry.model) for entry in self.plan.standby_of(device)}
            entries, more = lanes.loop_entries(self.arrangements[device], loops, self)
            sections.append({"device": device, "loops": entries})
            descriptors += [lanes.ledger_fd, lanes.stats_fd, *more]
        return sections, descriptors

    def _prepare(self) -> dict[str, Any] | None:
        """Other cores than those that serve, if there are any; else these, in the slack of whoever serves there."""
        if not self._home.beside(self):
            return None
        cores = set(self.plan.device.cores)
        elsewhere = os.sched_getaffinity(0) - cores
        return {"cores": sorted(elsewhere or cores) if cores else [], "priority": BESIDE_PRIORITY}

    def _pause_ns(self, model: str) -> int:
        """Between the jobs of the loops that use it here, at home or as stand-in."""
        return pause_between_ns(loop.period_ns for loop in self.plan.loops_by_model()[model])

    def _model_plan(self, name: str) -> dict[str, Any]:
        model = next(m for m in self.plan.models if m.name == name)
        batching = model.batching
        entry: dict[str, Any] = {
            "name": name, "path": model.path, "inspection": self.plan.inspections[name],
            "max_batch": batching.max_batch if batching else 1,
            "preferred": list(batching.preferred) if batching else [],
            "max_delay_ns": batching.max_delay_ns if batching else 0, "pause_ns": self._pause_ns(name),
            **engine_rules(model),
        }  # fmt: skip
        if name in self.measured and name not in self.refuted:
            entry["measured"] = self.measured[name]
        return entry

    # ---- Watcher ----

    def loaded(self, executor: ExecutorProcess, message: Message) -> None:
        self.rights, self.gpu = message["rights"], message.get("gpu")
        self.rss_bytes = message.get("rss_bytes", 0)
        self.dispatch_ns = message.get("dispatch_ns") or self.dispatch_ns
        real_time = self.rights.get("policy") == MEASURED_WITH_RIGHTS
        for name, costs in message["measured"].items():
            if costs == self.measured.get(name):
                continue  # what it was told: of an executor that was taken over
            if why := self.refuted.pop(name, ""):
                log("notice", f"{name} was measured anew on {self.home}, since {why}", device=self.home, model=name)
            self.measured[name] = costs
            self.measured_real_time &= real_time
            if not self._store.write(self._identities[name], costs, self.dispatch_ns, real_time):
                log("warning", f"measurements of {name} can't be kept: the next start measures again", model=name)
        for note in (*self.rights.get("notes", ()), *message.get("notes", ())):
            log("warning", f"{self}: {note}", device=self.home)
        if self.schedule is None:
            self._home.member_loaded(self)
        else:
            self.send(self.schedule.serve)

    def serve(self, schedule: Schedule) -> None:
        """Admission has decided: it may get ready. One that serves already goes on by what it was told before."""
        if self._served:
            schedule, self._served = replace(schedule, serve=self._served), {}
        else:
            self.send(schedule.serve)
        self.schedule = schedule

    def became_ready(self, executor: ExecutorProcess) -> None:
        self._home.member_ready(self)

    def died(self, executor: ExecutorProcess, was_ready: bool) -> None:
        self._home.member_died(self, was_ready)

    def received(self, executor: ExecutorProcess, message: Message) -> None:
        if message["op"] == "log":
            if message.get("message_id") == BROKEN:
                self.broken = message["text"]
            fields = {str(key): value for key, value in message.get("fields", {}).items()}
            log(message["level"], message["text"], device=self.home, **fields)
        elif message["op"] == "progress":
            self.progress = message["text"]
            self._home.member_works(self)
        elif message["op"] == "gpu":
            self.gpu = message["gpu"]
            self._home.member_works(self)
        elif message["op"] == "rights":
            self.rights = message["rights"]
        else:
            self._home.member_said(self, message)

    def owner_is(self, device: str, member: int, pidfd: int) -> None:
        """Who serves a ledger that it knows: whom to fence when that one hangs."""
        self.send({"op": "owner", "device": device, "member": member}, (pidfd,))

    def relabel(self, epoch: int) -> None:
        """A change that does not touch it: its answers say the new epoch."""
        self.epoch = epoch
        if self.process.loaded_message.get("relabels"):
            self.send({"op": "epoch", "epoch": epoch})

    def tell_hang_after(self) -> None:
        """How long those that it stands in for may be silent, where a change does not touch it but that."""
        if self.ready and self.schedule is not None and "hang_after_ns" in self.schedule.serve:
            self.send({"op": "hang_after", "hang_after_ns": self.schedule.serve["hang_after_ns"]})

    def as_json(self) -> dict[str, Any]:
        """Its part of an entry of `status`."""
        process = self.process
        return {
            "pid": process.pid, "restarts": process.restarts, "state": process.state.value, "error": process.error,
            "gpu": self.gpu,
            "rights": self.rights if process.pid else {}, "rss_bytes": self.rss_bytes if process.pid else 0,
        }  # fmt: skip
