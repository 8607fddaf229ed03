"""What happens, for whoever subscribes to events.sock: misses with their cause, switches, epochs, executors.

Seen by looking at the statistics pages and the supervisor's own state a few times a second, so that nobody on the
real-time path has anything to say; each event carries how many of its kind came since the last look. The gateway sends
them. docs/zmq.md lists the topics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervisor import Supervisor

LOOK_S: Final = 0.2


class EventFeed:
    """Differences since the last look, as events."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._counted: dict[tuple[str, str, str], int] = {}
        self._shown: dict[str, Any] = {}
        self._states: dict[str, Any] = {}

    def look(self) -> None:
        """Publish what is new."""
        s = self._supervisor
        self._state("epoch", {"epoch": s.epoch})
        self._state("ready", {"ready": s.ready, "certified": s.certified})
        for name, device in s.devices.items():
            process = device.process
            self._state(f"executor.{name}", {"ready": process.ready, "restarts": process.restarts})
        for name, loop in s.configuration.loops.items():
            served = s.devices.get(loop.device)
            if served is not None:
                raw = _core.stats_read(served.lanes.stats_fd, served.lanes.stats_blocks["loop", name])
                for cause, count in raw["misses"].items():
                    self._count("miss", name, cause, count)
        self._show_lanes()
        for (name, cause), count in s.devices.switches.items():
            self._count("switch", name, cause, count)

    def _show_lanes(self) -> None:
        """The gateway reads completions from the lane's memory; a fresh client has fresh memory."""
        s = self._supervisor
        if s.gateway is None or not s.gateway.ready:
            self._shown.clear()
            return
        for name, loop in s.configuration.loops.items():
            device = s.devices.get(loop.device)
            if not loop.publish or device is None or not device.lanes.attached(name):
                continue
            memory = device.lanes.loops[name].memory
            if self._shown.get(name) is not memory:
                self._shown[name] = memory
                s.gateway.show_lane(name, memory.layout, memory.memfd)

    def _state(self, topic: str, state: dict[str, Any]) -> None:
        if self._states.get(topic) != state:
            self._states[topic] = state
            self._publish(topic, state)

    def _count(self, what: str, loop: str, cause: str, count: int) -> None:
        key = (what, loop, cause)
        new = count - self._counted.get(key, 0)
        if new > 0:
            self._publish(f"{what}.{loop}", {"loop": loop, "cause": cause, "count": new, "total": count})
        self._counted[key] = count

    def _publish(self, topic: str, event: dict[str, Any]) -> None:
        gateway = self._supervisor.gateway
        if gateway is not None:
            gateway.publish(topic, {"node": self._supervisor.configuration.node.name, "t_ns": _core.now(), **event})
