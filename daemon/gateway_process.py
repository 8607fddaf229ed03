"""The gateway as the supervisor sees it: started, told what to serve, started again when it dies.

The life of an executor (its states and transitions are used here), without what makes an executor precious: nothing of
the schedule is in the gateway, so its death is a line in the log, and its clients connect again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from taktd.daemon.child_process import child_environment, python_command
from taktd.daemon.config import Configuration
from taktd.daemon.executor_link import ExecutorLink, LinkClosed
from taktd.daemon.executor_process import PAUSE_FIRST_NS, PAUSE_NS_MAX, TRANSITIONS, Event, Message, State
from taktd.daemon.logbook import log
from taktd.daemon.peers import rule_of
from taktd.daemon.runtime_folder import LANES_SOCKET
from taktd.daemon.status import daemon_version
from taktd.engines.tensors import DTYPE_BY_NUMBER

if TYPE_CHECKING:
    from taktd.daemon.served_device import ServedDevice
    from taktd.daemon.supervisor import Supervisor

OUTBOX_MESSAGES_MAX: Final = 1024
TRIES_LOGGED_MAX: Final = 5  # of starts in a row that fail; the rest is silence
PLATFORM: Final = "onnxruntime_onnx"  # as Triton calls such models; some clients look at it
LIMITS: Final = (
    "connections", "connections_per_uid", "lanes", "lanes_per_uid", "lane_memory_bytes", "lane_memory_per_uid_bytes",
    "jobs", "jobs_per_uid", "job_memory_bytes", "job_memory_per_uid_bytes", "message_bytes", "gateway_lanes",
)  # fmt: skip


def wanted(configuration: Configuration) -> bool:
    """Whether there is a front door that the gateway has to open."""
    return bool(configuration.grpc) or configuration.zmq.on


class GatewayProcess:
    """The process behind gRPC and ZeroMQ, over all its restarts. Belongs to the event loop's thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.state = State.STOPPED
        self.restarts = 0
        self.tries = 0
        self.error = ""
        self.doors: list[Message] = []
        self.counters: Message = {}
        self.stopped = asyncio.Event()
        self.stopped.set()
        self._failure = ""
        self._told: Message = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._link: ExecutorLink | None = None
        self._outbox: deque[tuple[Message, list[int]]] = deque()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def settled(self) -> bool:
        """Whether the first start has come to an end, good or bad."""
        return self.ready or self.tries > 0 or self.restarts > 0

    def _step(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    # ---- life ----

    def start(self) -> None:
        self._pause = None
        self._failure = ""
        self._told = {}
        self._step(Event.START)
        self.stopped.clear()
        link, theirs = ExecutorLink.pair()
        try:
            self._process = subprocess.Popen(
                [*python_command("taktd.daemon.gateway"), "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), cwd="/",
                # gRPC's threads would otherwise keep an arena each.
                env={**child_environment(os.environ), "MALLOC_ARENA_MAX": "2"}, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            link.close()
            self._ended(f"can't be started: {error.strerror or error}")
            return
        finally:
            theirs.close()
        self._link = link
        self._pidfd = os.pidfd_open(self._process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._exited)
        loop.add_reader(link.fileno(), self._readable)
        for message, descriptors in plan(self._supervisor):
            self._send(message, descriptors)
        self.tell_state()

    def drain(self) -> None:
        """Let it end; `stopped` is set when it is gone."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._step(Event.DRAIN)
        if self.state is State.STOPPED:
            self.stopped.set()
        else:
            self._send({"op": "stop"})

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _exited(self) -> None:
        assert self._process is not None
        self._readable()
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd, self._process = -1, None
        self._close_link()
        self._ended(self._failure or how)

    def _close_link(self) -> None:
        if self._link is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._link.fileno())
        loop.remove_writer(self._link.fileno())
        self._link.close()
        self._link = None
        self._outbox.clear()

    def _ended(self, why: str) -> None:
        was_ready, draining = self.state is State.READY, self.state is State.DRAINING
        self._step(Event.DIED)
        self.doors = []
        self.error = "" if draining else why
        if draining:
            self.stopped.set()
            return
        self.tries = 0 if was_ready else self.tries + 1
        pause_ns = 0 if was_ready else min(PAUSE_FIRST_NS << min(self.tries - 1, 20), PAUSE_NS_MAX)
        if self.tries <= TRIES_LOGGED_MAX:
            log("error", f"gateway {why}", event="gateway-died", restart_in_ms=pause_ns // 1_000_000)
        self._pause = asyncio.get_running_loop().call_later(pause_ns / 1e9, self._again)
        self._supervisor.gateway_changed()

    def _again(self) -> None:
        self.restarts += 1
        self.start()

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
            self._send(told)

    def publish(self, topic: str, event: Message) -> None:
        """An event for events.sock; dropped where the gateway is not there or does not keep up."""
        if self.ready:
            self._send({"op": "event", "topic": topic, "event": event}, may_drop=True)

    def show_lane(self, loop: str, layout: Message, memfd: int) -> None:
        """The lane of a loop whose completions are published."""
        if self.ready:
            self._send({"op": "lane", "loop": loop, "layout": layout}, (memfd,), may_drop=True)

    def _send(self, message: Message, descriptors: tuple[int, ...] = (), may_drop: bool = False) -> None:
        if self._link is None:
            return
        if not self._outbox:
            try:
                self._link.send(message, descriptors)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._link.fileno(), self._writable)
            except LinkClosed:
                return
        if may_drop or len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            return
        # The descriptors are those of statistics pages, which live as long as we do.
        self._outbox.append((message, list(descriptors)))

    def _writable(self) -> None:
        assert self._link is not None
        while self._outbox:
            try:
                self._link.send(*self._outbox[0])
            except BlockingIOError:
                return
            except LinkClosed:
                break
            self._outbox.popleft()
        asyncio.get_running_loop().remove_writer(self._link.fileno())

    def _readable(self) -> None:
        while self._link is not None:
            try:
                received = self._link.receive()
            except LinkClosed:
                self._close_link()
                return
            if received is None:
                return
            message, descriptors = received
            for descriptor in descriptors:
                os.close(descriptor)
            self._take(message)

    def _take(self, message: Message) -> None:
        op = message.get("op")
        if op == "ready":
            self._step(Event.READY)
            self.doors = message["doors"]
            if self.state is State.READY:
                self.tries, self.error = 0, ""
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
    """The messages of a start, with their descriptors."""
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
    return [*told, ({"op": "serve"}, ())]


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
    version = getattr(model, "version", None)
    return {
        "op": "model", "name": name, "version": str(version) if isinstance(version, int) else "1",
        "platform": PLATFORM, **sides, "dynamic": bool(inspection["dynamic"]),
        "max_batch": batching.max_batch if batching else 1,
        "preferred": list(batching.preferred) if batching else [],
        "max_delay_ns": batching.max_delay_ns if batching else 0,
        "block": device.lanes.stats_blocks["model", name], "uids": sorted(rule.uids), "gids": sorted(rule.gids),
    }  # fmt: skip
