"""One device as the supervisor sees it: its executor's process, its lanes, what its engines cost, what was admitted.

Implements what executor_process.Watcher asks for. An executor that starts again is told what its predecessor was told,
without a new measurement and without a new verdict: nothing about the schedule has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from taktd.daemon import statistics
from taktd.daemon.config import Configuration
from taktd.daemon.confirmation import confirm
from taktd.daemon.doctor.preconditions import Lost
from taktd.daemon.engine_plan import driver_plan, engine_rules
from taktd.daemon.executor_link import MESSAGE_BYTES_MAX
from taktd.daemon.executor_process import ExecutorProcess, Message
from taktd.daemon.lanes import DeviceLanes, Inspection, Lane
from taktd.daemon.logbook import log
from taktd.daemon.measurements import MeasurementStore, identity

ROLE: Final = "primary"
MEASURED_WITH_RIGHTS: Final = "fifo"

Measured = dict[str, dict[str, dict[str, int]]]  # model → batch size → times


class Observer(Protocol):
    """Who is told about a device; the supervisor."""

    def device_loaded(self, device: ServedDevice) -> None: ...

    def device_changed(self, device: ServedDevice) -> None: ...


class TooMuch(Exception):
    """More loops and tensors on one device than an executor can be told in one message."""


@dataclass
class Schedule:
    """What admission decided for this device: the `serve` message, who was left out and why, what is claimed."""

    serve: Message
    shed: Mapping[str, str] = field(default_factory=dict)
    certified: bool = False
    reason: str = ""  # why not certified
    verdict: Mapping[str, Any] = field(default_factory=dict)


class ServedDevice:
    """Executor, lanes and costs of one device, from start to stop."""

    def __init__(
        self, name: str, configuration: Configuration, inspections: dict[str, Inspection], epoch: int,
        state_folder: Path, observer: Observer, ended: Callable[[Lane, int], None],
    ) -> None:  # fmt: skip
        self.name = name
        self.device = configuration.devices[name]
        self.epoch = epoch
        self.inspections = inspections
        self.models = configuration.models_on(name)
        self.loops = configuration.loops_on(name)
        self.observer = observer
        self.schedule: Schedule | None = None
        self._lost: tuple[Lost, ...] = ()
        self.confirmed: dict[str, str] = {}  # loop → "" when its C held in the first seconds, else why not
        self.revocations = 0
        self.rights: dict[str, Any] = {}
        self.dispatch_ns = 0
        self.rss_bytes = 0
        self.measured: Measured = {}
        self.measured_real_time = True
        self._driver_plan = driver_plan(self.device, state_folder, allow_faults=configuration.allow_faults)
        self._store = MeasurementStore(state_folder / "measurements")
        self._identities = {m.name: identity(self.device, m, inspections[m.name]) for m in self.models}
        self._recall()
        self.lanes = DeviceLanes(self.device, configuration, inspections, epoch, ended)
        self.process = ExecutorProcess(name, self)
        self.lanes.executor = self.process

    def _recall(self) -> None:
        for model in self.models:
            stored = self._store.read(self._identities[model.name])
            if stored is not None:
                self.measured[model.name] = stored["costs"]
                self.dispatch_ns = max(self.dispatch_ns, stored["dispatch_ns"])
                self.measured_real_time &= bool(stored["real_time"])

    # ---- Watcher ----

    def plan(self, executor: ExecutorProcess) -> tuple[Message, list[int]]:
        """The `configure` message. Raises TooMuch when the configuration alone does not fit."""
        entries, descriptors, recover = self.lanes.loop_plan()
        message: Message = {
            "op": "configure", "device": self.name, "driver": self._driver_plan,
            "cores": list(self.device.cores), "priority": self.device.priority, "epoch": self.epoch,
            "spin_ns": self.device.spin_ns, "role": ROLE, "area": 0, "recover": recover,
            "models": [self._model_plan(model.name) for model in self.models], "loops": entries, "model_lanes": [],
            "dispatch_ns": self.dispatch_ns, "max_lanes": self.lanes.lane_count,
            "stats_models": self.lanes.model_blocks(),
        }  # fmt: skip
        room = MESSAGE_BYTES_MAX - len(json.dumps(message))
        if room < 0:
            raise TooMuch(
                f"device {self.name} has more loops and tensors than an executor can be told: "
                f"{MESSAGE_BYTES_MAX - room} bytes of description found, {MESSAGE_BYTES_MAX} allowed; "
                "move loops to another device"
            )
        message["model_lanes"], more = self.lanes.model_plan(room)
        return message, descriptors + more

    def _model_plan(self, name: str) -> dict[str, Any]:
        model = next(m for m in self.models if m.name == name)
        batching = model.batching
        entry: dict[str, Any] = {
            "name": name, "path": model.path, "inspection": self.inspections[name],
            "max_batch": batching.max_batch if batching else 1,
            "preferred": list(batching.preferred) if batching else [],
            "max_delay_ns": batching.max_delay_ns if batching else 0, **engine_rules(model),
        }  # fmt: skip
        if name in self.measured:
            entry["measured"] = self.measured[name]
        return entry

    def loaded(self, executor: ExecutorProcess, message: Message) -> None:
        self.rights = message["rights"]
        self.rss_bytes = message.get("rss_bytes", 0)
        self.dispatch_ns = message.get("dispatch_ns") or self.dispatch_ns
        real_time = self.rights.get("policy") == MEASURED_WITH_RIGHTS
        for name, costs in message["measured"].items():
            self.measured[name] = costs
            self.measured_real_time &= real_time
            if not self._store.write(self._identities[name], costs, self.dispatch_ns, real_time):
                log("warning", f"measurements of {name} can't be kept: the next start measures again", model=name)
        for note in (*self.rights.get("notes", ()), *message.get("notes", ())):
            log("warning", f"executor {self.name}: {note}", device=self.name)
        if self.schedule is None:
            self.observer.device_loaded(self)
        else:
            self.process.send(self.schedule.serve)

    def serve(self, schedule: Schedule) -> None:
        """Admission has decided: the executor may serve."""
        self.schedule = schedule
        self.process.send(schedule.serve)

    def became_ready(self, executor: ExecutorProcess) -> None:
        self.lanes.executor_ready()
        log("notice", f"executor {self.name} serves", device=self.name, pid=executor.pid, restarts=executor.restarts)
        self.observer.device_changed(self)

    def died(self, executor: ExecutorProcess, was_ready: bool) -> None:
        self.lanes.executor_died()
        self.observer.device_changed(self)

    def received(self, executor: ExecutorProcess, message: Message) -> None:
        if message["op"] == "log":
            fields = {str(key): value for key, value in message.get("fields", {}).items()}
            log(message["level"], message["text"], device=self.name, **fields)
        else:
            self.lanes.received(message)

    # ---- what it says about itself ----

    def served_loops(self) -> list[str]:
        """Names of the loops that are not shed."""
        shed = self.schedule.shed if self.schedule else {}
        return [loop.name for loop in self.loops if loop.name not in shed]

    @property
    def certified(self) -> bool:
        """Admitted on measurements that hold for the machine as it is now."""
        return (
            self.schedule is not None
            and self.schedule.certified
            and not self._lost
            and not any(self.confirmed.values())
        )

    def confirm_costs(self) -> None:
        """Compares what loops were admitted for with their first jobs; each is settled once."""
        if self.schedule is None:
            return
        for name, task in self.schedule.serve["tasks"].items():
            if name in self.confirmed:
                continue
            counters = statistics.read(self.lanes.stats_fd, self.lanes.stats_blocks["loop", name])
            said = confirm(name, task["cost_ns"], counters["run"]["count"], counters["overrun"])
            if said is None:
                continue
            self.revocations += bool(said) and self.certified
            self.confirmed[name] = said
            if said:
                log("warning", f"the cost of loop {name} does not hold: {said}", device=self.name, loop=name)
                self.observer.device_changed(self)

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What the measurements rested on and is no longer so; set by the supervisor, who watches the machine."""
        return self._lost

    @lost.setter
    def lost(self, lost: tuple[Lost, ...]) -> None:
        self.revocations += self.certified and bool(lost)
        self._lost = lost

    def _reason(self) -> str:
        if self.schedule is None:
            return "not admitted yet"
        refuted = [said for said in self.confirmed.values() if said]
        return self.schedule.reason or "; ".join([*(str(loss) for loss in self._lost), *refuted])

    def as_json(self) -> dict[str, Any]:
        """One entry of `status`."""
        process = self.process
        return {
            "device": self.name, "role": ROLE, "pid": process.pid, "ready": process.ready,
            "restarts": process.restarts, "state": process.state.value, "error": process.error,
            "rights": self.rights if process.pid else {}, "rss_bytes": self.rss_bytes if process.pid else 0,
            "certified": self.certified and process.ready, "not_certified": self._reason(),
            "revocations": self.revocations,
        }  # fmt: skip

    def close(self) -> None:
        self.lanes.close()
