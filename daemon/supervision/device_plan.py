"""What one device is to serve under one configuration: settings, engines, its loops and those it stands in for. Pure.

Two plans are compared to know whether a change touches an executor; two lane signatures, to know whether a client keeps
its lane. Called by the supervisor at start and for each change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from taktd.daemon.config.configuration import Configuration, Device, Loop, Model
from taktd.daemon.config.durations import format_duration
from taktd.daemon.supervision.fallback import fallback_problems

Inspection = dict[str, Any]


class FallbackRefused(Exception):
    """Fallbacks that can't answer in a loop's stead; the message says which, what was found and allowed."""


@dataclass(frozen=True)
class StandbyLoop:
    """A loop of another device, and the model that runs it here."""

    home: str
    loop: Loop
    model: str


@dataclass(frozen=True)
class DevicePlan:
    """Everything an executor is started for. models: each one whose engine it needs, in configuration order."""

    device: Device
    models: tuple[Model, ...]
    loops: tuple[Loop, ...]
    standby: tuple[StandbyLoop, ...]
    inspections: Mapping[str, Inspection]
    rules: Any  # admission's settings, which decide what `serve` says
    allow_faults: bool = False

    @property
    def name(self) -> str:
        return self.device.name

    def standby_of(self, home: str) -> tuple[StandbyLoop, ...]:
        """The loops of one other device that it stands in for."""
        return tuple(entry for entry in self.standby if entry.home == home)

    @property
    def homes(self) -> tuple[str, ...]:
        """Devices that it stands in for."""
        return tuple(dict.fromkeys(entry.home for entry in self.standby))

    def loops_by_model(self) -> dict[str, list[Loop]]:
        """The loops that each model runs here, those of other devices too."""
        found: dict[str, list[Loop]] = {model.name: [] for model in self.models}
        for model, loop in [(lp.model, lp) for lp in self.loops] + [(one.model, one.loop) for one in self.standby]:
            found[model].append(loop)
        return found

    def serves_like(self, other: DevicePlan) -> bool:
        """Whether an executor of the other plan does all that this one asks for."""
        return self._essence() == other._essence()

    def digest(self) -> str:
        """The same for plans that serve alike, also in another process."""
        return hashlib.sha256(repr(self._essence()).encode()).hexdigest()

    def _essence(self) -> tuple[Any, ...]:
        return (
            self.device, [(_engine(m), self.inspections[m.name]["digest"]) for m in self.models],
            [_served(loop) for loop in self.loops],
            [(entry.home, entry.model, _served(entry.loop)) for entry in self.standby], self.rules,
            self.allow_faults,
            # Another layout of lanes at home is another one here.
            [lane_signature(entry.loop, self.inspections[entry.loop.model]) for entry in self.standby],
        )  # fmt: skip


def _engine(model: Model) -> dict[str, Any]:
    """What an executor knows of a model: the file, not how the configuration came to it."""
    fields: dict[str, Any] = model.model_dump(exclude={"allow", "version"})
    return fields


def _served(loop: Loop) -> dict[str, Any]:
    """What an executor knows of a loop; who may attach it and who stands in for it is not its business."""
    fields: dict[str, Any] = loop.model_dump(exclude={"allow", "fallback", "fallback_uncertified", "probation_ns"})
    return fields | {"stood_in_for": loop.stood_in_for}


class LaneSignature(NamedTuple):
    """All that a loop's lane says about itself: while it stays the same a client keeps its lane."""

    model: str
    period_ns: int
    deadline_ns: int
    jitter_ns: int
    trigger: str
    slots: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def changed(self, after: LaneSignature) -> str:
        """What is different, for the client whose lane ends by it."""
        changes = []
        for key, old, new in zip(self._fields, self, after, strict=True):
            if old != new:
                values = f" from {_told(key, old)} to {_told(key, new)}" if key not in ("inputs", "outputs") else ""
                changes.append(f"its {key.removesuffix('_ns')} changed{values}")
        return ", ".join(changes)


def _told(key: str, value: Any) -> str:
    return format_duration(value) if key.endswith("_ns") else str(value)


def lane_signature(loop: Loop, inspection: Inspection) -> LaneSignature:
    """Of a loop as configured, with the tensors of its model."""
    return LaneSignature(
        loop.model, loop.period_ns, loop.deadline_ns, loop.jitter_ns, loop.trigger, loop.slots,
        *tensor_signature(inspection),
    )  # fmt: skip


def model_signature(model: Model, inspection: Inspection) -> tuple[Any, ...]:
    """The same for a lane of a model."""
    return (model.name, model.slots, inspection["dynamic"], *tensor_signature(inspection))


def tensor_signature(inspection: Inspection) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Names, types and shapes of a model's inputs, and of its outputs."""
    inputs, outputs = (
        tuple((t["name"], t["dtype"], tuple(t["dims"])) for t in inspection[side]) for side in ("inputs", "outputs")
    )
    return inputs, outputs


def plans_of(configuration: Configuration, inspections: Mapping[str, Inspection]) -> dict[str, DevicePlan]:
    """One plan for each device. Raises FallbackRefused."""
    if problems := fallback_problems(configuration, inspections):
        raise FallbackRefused("\n".join(problems))
    return {name: _plan(configuration, inspections, name) for name in configuration.devices}


def _plan(configuration: Configuration, inspections: Mapping[str, Inspection], name: str) -> DevicePlan:
    standby = tuple(StandbyLoop(loop.device, loop, model) for loop, model in configuration.stand_ins_on(name))
    wanted = {model.name for model in configuration.models_on(name)} | {entry.model for entry in standby}
    models = tuple(model for model in configuration.models.values() if model.name in wanted)
    # The loop's own model gives its lane's layout, also where another one stands in.
    known = wanted | {entry.loop.model for entry in standby}
    return DevicePlan(
        configuration.devices[name], models, configuration.loops_on(name), standby,
        {model: inspections[model] for model in known}, configuration.admission,
        configuration.allow_faults,
    )  # fmt: skip
