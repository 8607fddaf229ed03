"""What taktd says about itself: the answers to `taktctl status`, `loops`, `models`, `costs`, and a line for systemd."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from taktd.daemon.certification import costs
from taktd.daemon.certification.cost_file import cost_document
from taktd.daemon.doors.front_desk import fallbacks_told
from taktd.daemon.doors.lane_door import Connection
from taktd.daemon.health import statistics
from taktd.daemon.models.store import version_of
from taktd.daemon.supervision.kept_process import State
from taktd.daemon.supervision.lanes import LaneState
from taktd.daemon.supervision.served_device import STAND_IN

if TYPE_CHECKING:
    from taktd.daemon.supervision.served_device import ServedDevice
    from taktd.daemon.supervisor import Supervisor


def daemon_version() -> str:
    """Of the installed package; "unknown" in a bare source tree."""
    try:
        return version("taktd")
    except PackageNotFoundError:
        return "unknown"


def status_line(supervisor: Supervisor) -> str:
    """One line for systemd and the log."""
    devices = supervisor.devices.values()
    if missing := [text for d in devices if (text := d.unanswered())]:
        return f"not ready: {'; '.join(missing)}"
    up = [d for d in devices if d.serving]
    loops = _counted(sum(len(d.served_loops()) for d in up), "loop")
    served_by = [(d, d.serving.home) for d in up if d.serving and d.role == STAND_IN]
    stand_ins = [f"{d.name} by its stand-in {home} ({d.doing})" for d, home in served_by]
    told = f", {', '.join(stand_ins)}" if stand_ins else ""
    refused = f", by the configuration before: {supervisor.file} is refused" if supervisor.refused else ""
    certified = "certified" if supervisor.certified else "not certified"
    return f"{loops} on {_counted(len(up), 'device')}, {certified}{told}{refused}"


def _not_serving(supervisor: Supervisor, doors: list[dict[str, Any]]) -> list[str]:
    """What does not serve though it should: loops that nobody answers, executors (also where a stand-in answers all of
    their loops), doors. `taktctl status` exits 0 only where there is none."""
    missing = []
    for device in supervisor.devices.values():
        unanswered = device.unanswered()
        if unanswered or not device.process.ready:
            missing.append(unanswered or f"executor {device.name}: {device.doing}")
    missing += [f"door {door['name']}" for door in doors if not door["serving"]]
    return missing or ([] if supervisor.ready else ["devices: models are being inspected"])


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _verification(name: str, samples: str | None, device: ServedDevice) -> dict[str, Any]:
    """What its engine was compared with before it served; not_verified: why it was not."""
    loaded = device.process.loaded_message
    found = loaded.get("verified", {}).get(name)
    if found is not None:
        return {"verified": {**found, "file": samples if found["source"] == "golden" else None}, "not_verified": ""}
    if not loaded:
        return {"verified": None, "not_verified": "its executor has not loaded it"}
    if device.member.plan.device.driver == "sim":
        return {"verified": None, "not_verified": "a simulated device's outputs are its own"}
    return {"verified": None, "not_verified": "ONNX Runtime fails on random inputs: give samples (verify.samples)"}


class StatusBook:
    """Answers from what the supervisor knows and the statistics pages say; asks no executor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def status(self, request: dict[str, Any]) -> dict[str, Any]:
        s = self._supervisor
        doors = [
            {"name": name, "path": str(door.path) if door else None, "serving": bool(door and door.serving)}
            for name, door in (("lanes", s.lane_door), ("control", s.control_door))
        ]
        doors += self._gateway_doors()
        if s.http_door is not None:
            doors.append(s.http_door.as_json())
        return {
            "ready": s.ready, "not_serving": _not_serving(s, doors), "live": True, "certified": s.certified,
            "epoch": s.epoch, "node": s.configuration.node.name,
            "pid": os.getpid(), "version": daemon_version(), "stopping": s.stopping,
            "configuration": str(s.file), "refused": s.refused, "state_folder": str(s.state),
            "executors": [device.as_json() for device in s.devices.values()],
            "doors": doors,
            "loops": [self._loop_line(name) for name in s.configuration.loops],
            "gateway": s.gateway.as_json() if s.gateway else None,
            "faults": s.faults.lasting(), "shadow": s.shadow.as_json(), "lanes_unclaimed": s.takeover.unclaimed,
            "clients": len(s.lane_door.connections) if s.lane_door else 0,
        }  # fmt: skip

    def _gateway_doors(self) -> list[dict[str, Any]]:
        """What the gateway listens at; while it doesn't, one entry that says so."""
        gateway = self._supervisor.gateway
        if gateway is None or not self._supervisor.outer.gateway_wanted:
            return []
        if not gateway.ready:
            why = gateway.error or ("it waits for the executors" if gateway.state is State.STOPPED else "it starts")
            return [{"name": "gateway", "path": None, "serving": False, "error": why}]
        return [{**door, "serving": True} for door in gateway.doors]

    def _loop_line(self, name: str) -> dict[str, Any]:
        full = self._loop(name)
        counters = full.pop("statistics", None) or {}
        kept = (
            "name", "model", "device", "attached", "served", "not_served", "client", "served_by", "role", "since_ns",
            "why", "reason", "switches", "certified", "not_certified",
        )  # fmt: skip
        line = {key: full[key] for key in kept}
        line["jobs"] = counters.get("submitted", 0)
        for key in ("late", "expired", "failed", "lost"):
            line[key] = counters.get(key, 0)
        return line

    def _loop(self, name: str) -> dict[str, Any]:
        s = self._supervisor
        loop = s.configuration.loops[name]
        device = s.devices.get(loop.device)
        result: dict[str, Any] = {
            "name": name, "model": loop.model, "device": loop.device, "period_ns": loop.period_ns,
            "deadline_ns": loop.deadline_ns, "jitter_ns": loop.jitter_ns, "criticality": loop.criticality,
            "on_late": loop.on_late, "trigger": loop.trigger, "attached": False, "lane": None, "client": None,
            "served": False, "served_by": None, "role": None, "since_ns": 0, "why": "", "reason": "", "switches": {},
            "certified": False, "not_certified": "not served yet", "fallback": fallbacks_told(loop),
            "not_served": None, "cost_ns": None, "margin_ns": None, "confirmed": None,
            "statistics": None,
        }  # fmt: skip
        if device is None:
            return result
        lane = device.lanes.loops.get(name)
        if lane is None:
            return result  # a change is being made
        result["attached"] = lane.state is LaneState.ATTACHED
        result["lane"] = lane.state.value
        if isinstance(lane.owner, Connection) and lane.state is LaneState.ATTACHED:
            result["client"] = {"name": lane.owner.client, "uid": lane.owner.peer.uid, "pid": lane.owner.peer.pid}
        result["statistics"] = statistics.read(device.lanes.stats_fd, lane.stats_block)
        schedule = device.schedule
        result |= self._service(name, device)
        if schedule is not None:
            result["not_served"] = schedule.shed.get(name)
            result["served"] = result["served_by"] is not None
            task = schedule.serve["tasks"].get(name)
            result["cost_ns"] = task["cost_ns"] if task else None
            verdicts = {v["name"]: v for v in schedule.verdict.get("loops", ())}
            result["margin_ns"] = verdicts.get(name, {}).get("margin_ns")
            said = device.confirmed.get(name)
            result["confirmed"] = None if said is None else not said
        return result

    def _service(self, name: str, device: ServedDevice) -> dict[str, Any]:
        """Who serves a loop, since when and why, and whether its deadlines are promised."""
        serving, schedule = device.served_by(name), device.schedule
        by = serving.home if serving is not None else None
        missing = "nobody serves it" if by is None else ""
        reason = missing or device.not_certified() or self._supervisor.devices.stand_in_reason(name, device)
        return {
            "served_by": by, "role": device.role if by is not None else None, "since_ns": device.since_ns,
            "why": device.why, "reason": device.reason, "switches": dict(device.switches), "not_certified": reason,
            "certified": not reason and schedule is not None and device.certified,
        }  # fmt: skip

    async def loops(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"loops": [self._loop(name) for name in self._supervisor.configuration.loops]}

    async def models(self, request: dict[str, Any]) -> dict[str, Any]:
        s = self._supervisor
        result = []
        for name, model in s.configuration.models.items():
            device = s.devices.get(model.device or "")
            entry: dict[str, Any] = {
                "name": name, "path": model.path, "device": model.device, "version": version_of(model),
            }  # fmt: skip
            if device is not None and name in device.inspections:
                inspection = device.inspections[name]
                entry |= {
                    "digest": inspection["digest"], "runtime": inspection["runtime"],
                    **_verification(name, model.verify.samples, device),
                    "inputs": inspection["inputs"], "outputs": inspection["outputs"],
                    "measured": device.measured.get(name, {}), "dispatch_ns": device.dispatch_ns,
                    "no_gap": device.schedule.verdict.get("no_gap", {}).get(name) if device.schedule else None,
                    "lanes": sum(1 for lane in device.lanes.lanes.values() if lane.name == name and lane.owner),
                    "statistics": statistics.read(device.lanes.stats_fd, device.lanes.stats_block("model", name)),
                }  # fmt: skip
            result.append(entry)
        return {"models": result}

    async def costs(self, request: dict[str, Any]) -> dict[str, Any]:
        s = self._supervisor
        devices = {}
        for name, device in s.devices.items():
            digests = {model: found["digest"] for model, found in device.inspections.items()}
            devices[name] = costs.as_json(
                s.configuration.devices[name].driver, device.measured, digests, device.dispatch_ns
            )
        return cost_document(devices)
