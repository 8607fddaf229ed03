"""The gateway as the supervisor sees it: started, told what to serve, started again when it dies.

It lives like an executor, without what makes an executor precious: nothing of the schedule is in the gateway, so its
death is a line in the log, and its clients connect again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.doors.peers import rule_of
from taktd.daemon.health.status import daemon_version
from taktd.daemon.logbook import log
from taktd.daemon.models.store import version_of
from taktd.daemon.runtime_folder import LANES_SOCKET
from taktd.daemon.supervision.kept_process import KeptProcess, Message, State
from taktd.engines.tensors import DTYPE_BY_NUMBER

if TYPE_CHECKING:
    from taktd.daemon.supervision.served_device import ServedDevice
    from taktd.daemon.supervisor import Supervisor

DRAIN_S_MAX: Final = 3.0  # of one that is to be started again with other doors
TRIES_LOGGED_MAX: Final = 5  # of starts in a row that fail; the rest is silence
PLATFORM: Final = "onnxruntime_onnx"  # as Triton calls such models; some clients look at it
CONFIGURE: Final = ("configure", "")
LIMITS: Final = (
    "connections", "connections_per_uid", "lanes", "lanes_per_uid", "lane_memory_bytes", "lane_memory_per_uid_bytes",
    "jobs", "jobs_per_uid", "job_memory_bytes", "job_memory_per_uid_bytes", "message_bytes", "gateway_lanes",
)  # fmt: skip


def wanted(configuration: Configuration) -> bool:
    """Whether there is a front door that the gateway has to open."""
    return bool(configuration.grpc) or configuration.zmq.on


class GatewayProcess(KeptProcess):
    """The process behind gRPC and ZeroMQ, over all its restarts."""

    module = "taktd.daemon.gateway"
    farewell: ClassVar[Message] = {"op": "stop"}
    # gRPC's threads would otherwise keep an arena each.
    environment: ClassVar[Mapping[str, str]] = {"MALLOC_ARENA_MAX": "2"}

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__("gateway", {})
        self._supervisor = supervisor
        self.doors: list[Message] = []
        self.counters: Message = {}
        self._told: Message = {}
        self._plan: dict[tuple[str, str], Message] = {}  # what it was told to serve: configure, and each model by name

    @property
    def settled(self) -> bool:
        """Whether the first start has come to an end, good or bad."""
        return self.ready or self.tries > 0 or self.restarts > 0

    def _began(self) -> None:
        self._told, self._plan = {}, {}
        for message, descriptors in plan(self._supervisor):
            self._plan[_key(message)] = message
            self.send(message, descriptors)
        if unloaded := self.counters.get("unloaded"):
            self.send({"op": "unloaded", "names": unloaded})
        self.send({"op": "serve"})
        self.tell_state()

    def follow(self) -> None:
        """The configuration is another one: models are told; for other doors or limits it is started again."""
        if not wanted(self._supervisor.configuration):
            self._end("the configuration has no front doors any more")
        if self._link is None or self.state is State.DRAINING:
            return  # the next start is told all of it
        new = {_key(message): (message, descriptors) for message, descriptors in plan(self._supervisor)}
        if new[CONFIGURE][0] != self._plan[CONFIGURE]:
            self._end("its doors or limits have changed")
            return
        for key in [key for key in self._plan if key not in new]:
            del self._plan[key]
            self.send({"op": "model.gone", "name": key[1]})
        for key, (message, descriptors) in new.items():
            if self._plan.get(key) != message:
                self._plan[key] = message
                self.send(message, descriptors)
        self._told = {}
        self.tell_state()

    def _end(self, why: str) -> None:
        """The supervisor starts it again, if it is wanted."""
        if self.state in (State.STOPPED, State.DRAINING):
            return
        log("notice", f"gateway ends: {why}", event="gateway-ends", pid=self.pid)
        self.drain()
        asyncio.get_running_loop().call_later(DRAIN_S_MAX, self._end_now)

    def _end_now(self) -> None:
        if self.state is State.DRAINING:
            self.kill()

    def _died(self, was_ready: bool, why: str, pause_ns: int | None) -> None:
        self.doors = []
        if pause_ns is None:
            self._supervisor.gateway_changed()
            return
        if self.tries <= TRIES_LOGGED_MAX:
            log("error", f"gateway {why}", event="gateway-died", restart_in_ms=pause_ns // 1_000_000)
        self._supervisor.gateway_changed()

    # ---- messages ----

    def tell_state(self) -> None:
        """Readiness of the whole and of each model, if it has changed."""
        supervisor = self._supervisor
        reasons = {}
        for name, model in supervisor.configuration.models.items():
            device = supervisor.devices.get(model.device or "")
            if device is None or not device.process.ready:
                reasons[name] = f"the executor of {model.device} is not ready"
        told = {"op": "state", "ready": supervisor.ready, "reasons": reasons}
        if told != self._told and self._link is not None:
            self._told = told
            self.send(told)

    def publish(self, topic: str, event: Message) -> None:
        """An event for events.sock; dropped where the gateway is not there or does not keep up."""
        if self.ready:
            self.send({"op": "event", "topic": topic, "event": event}, may_drop=True)

    def show_lane(self, loop: str, layout: Message, memfd: int) -> None:
        """The lane of a loop whose completions are published."""
        if self.ready:
            self.send({"op": "lane", "loop": loop, "layout": layout}, (memfd,), may_drop=True)

    def _take(self, message: Message) -> None:
        op = message.get("op")
        if op == "ready":
            self.doors = message["doors"]
            if self._serves():
                for door in self.doors:
                    log("notice", f"{door['name']} listens at {door['address']}", event="door-open")
                self._supervisor.gateway_changed()
        elif op == "failed":
            self._failure = f"can't serve: {message.get('error')}"
        elif op == "counters":
            self.counters = {key: value for key, value in message.items() if key != "op"}

    # ---- what it says about itself ----

    def as_json(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "pid": self.pid, "ready": self.ready, "state": self.state.value, "restarts": self.restarts,
            "error": self.error, **self.counters,
        }  # fmt: skip


# ---- what a gateway is told ----


def plan(supervisor: Supervisor) -> list[tuple[Message, tuple[int, ...]]]:
    """What it serves: `configure`, and `model` for each one, with their descriptors."""
    configuration = supervisor.configuration
    limits = configuration.limits
    configure: Message = {
        "op": "configure", "node": configuration.node.name, "version": daemon_version(),
        "runtime": str(supervisor.runtime), "lanes": str(supervisor.runtime / LANES_SOCKET),
        "executor_cores": sorted({core for device in configuration.devices.values() for core in device.cores}),
        "limits": {name: getattr(limits, name) for name in LIMITS},
        "grpc": [listener.model_dump() for listener in configuration.grpc], "zmq": configuration.zmq.model_dump(),
    }  # fmt: skip
    told: list[tuple[Message, tuple[int, ...]]] = [(configure, ())]
    for name, model in configuration.models.items():
        device = supervisor.devices.get(model.device or "")
        if device is not None and ("model", name) in device.lanes.stats_blocks:
            told.append((_model_plan(configuration, device, name), (device.lanes.stats_fd,)))
    return told


def _key(message: Message) -> tuple[str, str]:
    return message["op"], message.get("name", "")


def _model_plan(configuration: Configuration, device: ServedDevice, name: str) -> Message:
    model, inspection = configuration.models[name], device.inspections[name]
    batching, rule = model.batching, rule_of(model.allow)
    sides = {
        side: [
            {
                "name": t["name"], "dtype": DTYPE_BY_NUMBER[t["dtype"]].name, "dims": list(t["dims"]),
                "open": [bool(s) for s in t["symbolic"]],
            }
            for t in inspection[side]
        ]
        for side in ("inputs", "outputs")
    }  # fmt: skip
    return {
        "op": "model", "name": name, "version": str(version_of(model) or 1),
        "platform": PLATFORM, **sides, "dynamic": bool(inspection["dynamic"]),
        "max_batch": batching.max_batch if batching else 1,
        "preferred": list(batching.preferred) if batching else [],
        "max_delay_ns": batching.max_delay_ns if batching else 0,
        "block": device.lanes.stats_blocks["model", name], "uids": sorted(rule.uids), "gids": sorted(rule.gids),
    }  # fmt: skip
