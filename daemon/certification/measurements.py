"""Measured execution times, kept under the identity of the engine they belong to, so that a second start is quick.

The identity covers the model's content, the runtime, the processor, the cores it was measured on and their clocks. One
small JSON file each in the state folder, written whole or not at all; what does not match is measured again, never
trusted.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Device, Model
from taktd.daemon.doctor.preconditions import ground
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.durable_file import SealBroken, read_sealed, write_sealed
from taktd.daemon.logbook import log
from taktd.engines.measure import PAUSE_NS_MAX

FORMAT: Final = 3  # 2: measured with a witness, hardly any run was left in

Costs = dict[str, dict[str, int]]  # batch size → p50_ns, p99_ns, …


def processor() -> str:
    """What kind of processor this machine has, as far as Linux says."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "Hardware"):
                    return value.strip()
    except OSError:
        pass
    return platform.machine()


def pause_between_ns(periods_ns: Iterable[int]) -> int:
    """How far apart the runs are that a measurement has to stand for, from the periods of the loops that use the
    engine: the shortest, up to where longer ones change nothing; 0 for best effort alone."""
    return min((min(period_ns, PAUSE_NS_MAX) for period_ns in periods_ns), default=0)


def identity(device: Device, model: Model, inspection: dict[str, Any], pause_ns: int) -> str:
    """The engine's identity, as far as its timing depends on it."""
    about = {
        "pause_ns": pause_ns,
        "format": FORMAT, "digest": inspection["digest"], "runtime": inspection["runtime"], "driver": device.driver,
        "cores": list(device.cores), "priority": device.priority, "processor": processor(),
        "kernel": platform.release(), "shapes": [t["dims"] for t in inspection["inputs"]],
        "max_batch": model.batching.max_batch if model.batching else 1,
        "ground": ground(Tree(), frozenset(device.cores)),
        # A simulated engine costs what is declared; a look at the outputs costs a microsecond.
        "simulated": [device.cost, device.outputs.kind, device.seed] if device.driver == "sim" else None,
        "gpu": device.gpu.model_dump(mode="json") | {"plan": _plan_of(device, model)} if device.gpu else None,
        "non_finite": dict(sorted(model.non_finite.items())),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _plan_of(device: Device, model: Model) -> str:
    """The digest of the plan that the configuration gives for the model, "" where there is none."""
    path = device.gpu.plans.get(model.name) if device.gpu else None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""  # who loads it says what is wrong


class MeasurementStore:
    """Reads and writes the files; a store that can't be written costs time at the next start and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> dict[str, Any] | None:
        """What write() was given, by its arguments' names, or None; what is not believed is announced.

        refuted: why the costs do not hold, "" where nothing is known against them.
        """
        try:
            body: dict[str, Any] | None = read_sealed(self._folder / f"{key}.json", key)
        except SealBroken as broken:
            log("warning", f"stored measurements are not used, they are made again: {broken}", event="cache-rejected")
            return None
        return body

    def refute(self, key: str, why: str) -> None:
        """Jobs have shown that the costs do not hold: the next start measures anew, and can say why."""
        if (body := self.read(key)) is not None:
            self.write(key, body["costs"], body["dispatch_ns"], body["real_time"], why)

    def write(self, key: str, costs: Costs, dispatch_ns: int, real_time: bool, refuted: str = "") -> bool:
        """Whether it was written."""
        body = {"costs": costs, "dispatch_ns": dispatch_ns, "real_time": real_time, "refuted": refuted}
        try:
            self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            write_sealed(self._folder / f"{key}.json", key, body)
        except OSError:
            return False
        return True
