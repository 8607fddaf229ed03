"""The configuration: each setting declared once, as a field with its description.

From the declarations below come the parser, the check, `taktd --settings` and the manual page. Everything is typed and
frozen; times are int nanoseconds, sizes int bytes, shares and factors int ppm. A file is judged as a whole: all errors
are collected, and each names file, line, key, what was found, what is allowed and what to do.

Who calls it: the supervisor (start, SIGHUP) and `taktctl check`, `simulate`. It opens the configuration's files and
nothing else: whether a model file exists or a core is there is for those who use them.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from taktd.daemon.config import messages as config_messages
from taktd.daemon.config.durations import DURATION_FORM, format_duration
from taktd.daemon.config.engines import Cost, NonFinite, SimulatedOutputs, Verify, Version, default_outputs
from taktd.daemon.config.fallbacks import Fallbacks, Switch, fallback_errors
from taktd.daemon.config.front_doors import Grpc, Http, HttpSetting, ZeroMq, ZeroMqSetting, default_grpc
from taktd.daemon.config.gpu import FORM as GPU_FORM
from taktd.daemon.config.gpu import GpuSetting, gpu_errors
from taktd.daemon.config.messages import Setting, nearest, translated
from taktd.daemon.config.values import (
    NAME,
    NAME_BYTES_MAX,
    Duration,
    DurationOrZero,
    Margin,
    Name,
    Names,
    Own,
    Period,
    Problem,
    Section,
    Share,
    Size,
    distinct,
    refuse,
    refuse_all,
)
from taktd.daemon.config.yamltree import ConfigError, Tree, read_tree, shown

__all__ = [
    "Admission", "Allow", "Batching", "BestEffort", "ConfigError", "Configuration", "ConfigurationRefused", "Device",
    "Limits", "Loop", "Model", "Node", "Recording", "Setting", "load", "settings",
]  # fmt: skip

DEVICES_MAX: Final = 32
MODELS_MAX: Final = 256
LOOPS_MAX: Final = 256
LOOPS_PER_DEVICE_MAX: Final = 64  # what one executor is told in one message, with two descriptors each
SHOWN_NAMES_MAX: Final = 8
MERGE_DEPTH: Final = 2  # sections unite over files, and so do their names; a loop is described in one place
CONF_D: Final = "conf.d"


class ConfigurationRefused(Exception):
    """A configuration can't be used; errors has every reason, in the order of the files."""

    def __init__(self, errors: Iterable[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip("-.")[:NAME_BYTES_MAX] or "node"


# ---- sections ----


class Node(Section):
    """This machine."""

    name: Name = Field(
        default_factory=lambda: _host_name(),
        description="How this machine is called in messages, metrics and replies. Default: the host name.",
    )


class Allow(Section):
    """Who may attach. Root and the daemon's own user always may."""

    users: Names = Field(default=(), description="Names (or numbers in quotes) of users.")
    groups: Names = Field(default=(), description="Names of groups; one that does not exist admits nobody.")


def _default_allow() -> Allow:
    return Allow(groups=("taktd",))


class BestEffort(Section):
    """What may run without a reservation: `auto`, `off`, or the two bounds."""

    mode: Literal["auto", "off", "limits"] = Field(default="limits", alias="\0mode")
    max_dispatch_ns: Duration = Field(
        default=0, alias="max_dispatch",
        description="Longest dispatch without a known gap; it blocks loops for as long.",
    )  # fmt: skip
    share_ppm: Share = Field(
        default=100_000, alias="share", description="Share of the device that admission keeps free for best effort."
    )

    @model_validator(mode="after")
    def _complete(self) -> BestEffort:
        if self.mode == "limits" and self.max_dispatch_ns == 0:
            raise refuse("is missing", DURATION_FORM, "or write `best_effort: off`", key="max_dispatch")
        return self


def _best_effort(value: Any) -> Any:
    if value is False or value == "off":
        return {"\0mode": "off", "share": 0}
    if value == "auto":
        return {"\0mode": "auto"}
    if isinstance(value, (dict, BestEffort)):
        return value
    raise refuse("is not understood", "auto, off, or {max_dispatch: 2ms, share: 0.1}")


class Device(Section):
    """One device, served by one executor."""

    name: Own
    driver: Literal["cpu", "cuda", "sim"] = Field(
        description="What the device is: `cpu`, `cuda` for an NVIDIA GPU, or `sim` for a simulated one."
    )
    gpu: GpuSetting = Field(
        default=None, description="With driver: cuda, which GPU and how engines are built for it; or just its UUID."
    )
    cores: Annotated[tuple[Annotated[int, Field(ge=0, le=4095)], ...], AfterValidator(distinct)] = Field(
        default=(), description="Processor cores the executor is pinned to. Default: not pinned."
    )
    priority: Annotated[int, Field(ge=1, le=98)] = Field(
        default=80, description="SCHED_FIFO priority of the executor; clients stay below it (at most 70)."
    )
    spin_ns: DurationOrZero = Field(
        default=200_000, alias="spin",
        description="How long the executor spins before an expected job and after a reply to a client that spins; with"
        " cores of its own, up to twice as long for one that comes back that soon.",
    )  # fmt: skip
    best_effort: Annotated[BestEffort, BeforeValidator(_best_effort)] = Field(
        default_factory=lambda: BestEffort.model_validate({"\0mode": "auto"}),
        description="What may run without a reservation: auto (at most 10 ms and a share of 0.1), off, or bounds.",
    )
    cost: Cost = Field(
        default=((1_000_000, 1_000_000),),
        description="With driver: sim, what a run takes: 2ms, {least: 1ms, most: 2ms}, or percentiles"
        " {p50: 1ms, p99: 2ms, max: 3ms}. Default: 1ms.",
    )
    outputs: SimulatedOutputs = Field(
        default_factory=default_outputs,
        description="With driver: sim, what a run answers: identity, onnx (really run on the CPU), or a constant."
        " Default: identity.",
    )
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        default=1, description="With driver: sim, where the draws of cost begin."
    )

    @model_validator(mode="after")
    def _of_its_driver(self) -> Device:
        problems = [
            Problem(key, "has no meaning here", "", "only with driver: sim", "add `driver: sim` or remove it")
            for key in ("cost", "outputs", "seed")
            if key in self.model_fields_set and self.driver != "sim"
        ]
        if self.gpu is not None and self.driver != "cuda":
            problems.append(Problem("gpu", "has no meaning here", "", "only with driver: cuda", "remove it"))
        if self.gpu is None and self.driver == "cuda":
            problems.append(Problem("gpu", "is missing", "", GPU_FORM, "`nvidia-smi -L` lists the UUIDs"))
        if problems:
            raise refuse_all(problems)
        return self


class Batching(Section):
    """How best-effort jobs of one model are put together. Loops are never batched."""

    max_batch: Annotated[int, Field(ge=1, le=4096)] = Field(description="Largest batch.")
    preferred: Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(distinct)] = Field(
        default=(), description="Batch sizes that are worth waiting for."
    )
    max_delay_ns: DurationOrZero = Field(
        default=0, alias="max_delay", description="How long the first job of a batch may wait for others."
    )

    @model_validator(mode="after")
    def _fits(self) -> Batching:
        if any(size > self.max_batch for size in self.preferred):
            found, allowed = shown(max(self.preferred)), f"at most max_batch ({self.max_batch})"
            raise refuse("has a size above max_batch", allowed, key="preferred", found=found)
        return self


class Model(Section):
    """One ONNX file. A client that attaches it by name, and not a loop, gets best effort."""

    name: Own
    path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(
        description="The ONNX file, or with `version` a folder of versions; relative to the file that says so."
    )
    version: Version = Field(
        default=None,
        description="With a folder: `latest` (the one activated last, else the highest) or a number."
        " Default: path is a file.",
    )
    shapes: dict[str, tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...]] = Field(
        default_factory=dict, description="Per input: its (largest) shape, where the file leaves dimensions open."
    )
    device: Name | None = Field(
        default=None,
        description="Where best effort runs. Default: the device of its first loop, else the first device.",
    )
    batching: Batching | None = Field(default=None, description="Batching of best-effort jobs. Default: none.")
    verify: Verify = Field(
        default_factory=Verify, description="Comparison with ONNX Runtime on the CPU before an engine serves."
    )
    non_finite: dict[str, NonFinite] = Field(
        default_factory=dict,
        description="Per output, NaN and infinity: forbid (the job fails), flag (counted), allow. Default: allow.",
    )
    slots: Annotated[int, Field(ge=3, le=64)] = Field(default=4, description="Jobs a client can have in flight.")
    allow: Allow = Field(default_factory=_default_allow, description="Who may attach. Default: group taktd.")


class Loop(Section):
    """A control loop: a reserved place in the schedule of a device."""

    name: Own
    model: Name = Field(description="The model it runs.")
    device: Name = Field(default="", description="The device it runs on. Default: the only one there is.")
    period_ns: Period = Field(alias="period", description="Minimum time between two jobs.")
    deadline_ns: Duration = Field(
        default=0, alias="deadline",
        description="Answer due this long after the nominal arrival. Default: the period.",
    )  # fmt: skip
    jitter_ns: DurationOrZero = Field(
        default=0, alias="jitter", description="How much later than its nominal arrival a job may be submitted."
    )
    budget_ns: Duration | None = Field(
        default=None,
        alias="budget",
        description="Execution time that admission reckons with. Default: measured × margin.",
    )
    criticality: Literal["hard", "firm", "soft"] = Field(
        default="firm", description="Who yields first when not everything fits: soft, then firm, then hard."
    )
    on_late: Literal["skip", "run"] = Field(
        default="skip", description="A job that can't make its deadline: not started, or run and marked late."
    )
    mk: Annotated[tuple[int, ...], Field(min_length=2, max_length=2)] | None = Field(
        default=None, description="[m, k]: at least m of any k consecutive jobs are in time; an alarm when not."
    )
    trigger: Literal["client", "clock"] = Field(
        default="client", description="Who says when: the client's submission, or the daemon's clock."
    )
    phase_ns: DurationOrZero = Field(
        default=0, alias="phase", description="With trigger: clock, start of the job within each period."
    )
    max_age_ns: DurationOrZero = Field(
        default=0, alias="max_age",
        description="With trigger: clock, age beyond which an input is stale. Default: two periods.",
    )  # fmt: skip
    on_stale: Literal["skip", "hold", "run"] = Field(
        default="skip", description="With trigger: clock and a stale input: no job, the last answer again, or run."
    )
    fallback: Fallbacks = Field(
        default=(),
        description="Who answers when the device does not, in order: devices, last hold or {constant: {output: [..]}}.",
    )
    switch: Switch = Field(default_factory=Switch, description="When a primary that lives is switched away from.")
    fallback_uncertified: bool = Field(
        default=False, description="Accept a fallback that is not admissible; the loop is then not certified."
    )
    probation_ns: DurationOrZero = Field(
        default=3_000_000_000, alias="probation",
        description="How long a new engine is watched for misses and failures before the old one is let go.",
    )  # fmt: skip
    slots: Annotated[int, Field(ge=3, le=64)] = Field(default=4, description="Jobs a client can have in flight.")
    publish: bool = Field(default=False, description="Send each completion, outputs included, to events.sock.")
    allow: Allow = Field(default_factory=_default_allow, description="Who may attach. Default: group taktd.")

    @property
    def stood_in_for(self) -> bool:
        """Whether another device's executor may answer for it."""
        return any(one.kind == "device" for one in self.fallback)

    @model_validator(mode="after")
    def _relations(self) -> Loop:
        problems = list(_loop_problems(self))
        if problems:
            raise refuse_all(problems)
        return self


def _loop_problems(loop: Loop) -> Iterable[Problem]:
    period = format_duration(loop.period_ns)
    deadline_ns = loop.deadline_ns or loop.period_ns
    if deadline_ns > loop.period_ns:
        hint = "a job must be answered before the next one arrives: shorten the deadline or lengthen the period"
        yield Problem("deadline", "is longer than the period", format_duration(deadline_ns), f"at most {period}", hint)
    if loop.jitter_ns >= deadline_ns:
        allowed = f"less than the deadline ({format_duration(deadline_ns)})"
        yield Problem("jitter", "leaves no time to run", format_duration(loop.jitter_ns), allowed)
    if loop.mk is not None and not 1 <= loop.mk[0] <= loop.mk[1] <= 1000:
        found = f"[{loop.mk[0]}, {loop.mk[1]}]"
        yield Problem("mk", "is no promise", found, "[m, k] with 1 ≤ m ≤ k ≤ 1000")
    if loop.phase_ns >= loop.period_ns:
        yield Problem("phase", "is not within a period", format_duration(loop.phase_ns), f"less than {period}")
    if loop.fallback_uncertified and not any(f.kind == "device" for f in loop.fallback):
        hint = "add `fallback` or remove it"
        yield Problem("fallback_uncertified", "has no meaning here", "", "only with a fallback to a device", hint)
    if loop.trigger == "client":
        for key, field in (("phase", "phase_ns"), ("max_age", "max_age_ns"), ("on_stale", "on_stale")):
            if field in loop.model_fields_set:
                yield Problem(
                    key, "has no meaning here", "", "only with trigger: clock", "add `trigger: clock` or remove it"
                )


class Admission(Section):
    """What happens when not everything can be promised."""

    on_refusal: Literal["refuse", "shed", "uncertified"] | None = Field(
        default=None,
        description="Not everything fits: refuse to start, start without the least critical loops, or run uncertified. "
        "Default: refuse with real-time rights, uncertified without.",
    )
    margin_ppm: Margin = Field(default=1_300_000, alias="margin", description="Factor on measured execution times.")


class Limits(Section):
    """What clients may take. Each is charged to a uid and given back."""

    connections: Annotated[int, Field(ge=1, le=100_000)] = Field(default=512, description="Connections in all.")
    connections_per_uid: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Connections of one uid."
    )
    lanes: Annotated[int, Field(ge=1, le=2048)] = Field(default=256, description="Attached lanes in all.")
    lanes_per_uid: Annotated[int, Field(ge=1, le=2048)] = Field(default=64, description="Attached lanes of one uid.")
    lane_memory_bytes: Size = Field(
        alias="lane_memory", default=1 << 30, description="Memory of all lanes of models together."
    )
    lane_memory_per_uid_bytes: Size = Field(
        alias="lane_memory_per_uid", default=512 << 20, description="Memory of one uid's lanes of models."
    )
    jobs: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=1024, description="Requests in the gateway, waiting or running, in all."
    )
    jobs_per_uid: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=256, description="Requests of one uid, gRPC listener or certificate."
    )
    job_memory_bytes: Size = Field(
        alias="job_memory", default=512 << 20, description="Tensors of all requests in the gateway together."
    )
    job_memory_per_uid_bytes: Size = Field(
        alias="job_memory_per_uid", default=256 << 20, description="Tensors of one uid's, listener's or certificate's."
    )
    message_bytes: Size = Field(alias="message", default=64 << 20, description="One request, over gRPC or ZeroMQ.")
    gateway_lanes: Annotated[int, Field(ge=1, le=256)] = Field(
        default=8, description="Lanes of one model that the gateway holds for its clients."
    )


class Recording(Section):
    """The flight recorder: every scheduling event and decision, for replay and for questions afterwards."""

    size_bytes: Size = Field(
        alias="size", default=64 << 20, description="Disk space in the state folder; the oldest minutes go first."
    )


def _named(maximum: int, what: str) -> Callable[[Any], Any]:
    """Put each key of a section into its value, so that a thing knows its own name."""

    def judge(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > maximum:
            raise refuse(f"has too many {what}", f"at most {maximum}", found=str(len(value)))
        return {name: {NAME: name, **item} if isinstance(item, dict) else item for name, item in value.items()}

    return judge


class Configuration(Section):
    """A whole configuration; devices, models and loops are in the order of the files."""

    node: Node = Field(default_factory=Node, description="This machine.")
    devices: Annotated[dict[str, Device], BeforeValidator(_named(DEVICES_MAX, "devices")), Field(min_length=1)] = Field(
        description="Devices by name."
    )
    models: Annotated[dict[str, Model], BeforeValidator(_named(MODELS_MAX, "models"))] = Field(
        default_factory=dict, description="Models by name."
    )
    loops: Annotated[dict[str, Loop], BeforeValidator(_named(LOOPS_MAX, "loops"))] = Field(
        default_factory=dict, description="Loops by name."
    )
    admission: Admission = Field(default_factory=Admission, description="What happens when not everything fits.")
    limits: Limits = Field(default_factory=Limits, description="What clients may take.")
    recording: Recording = Field(default_factory=Recording, description="The flight recorder.")
    grpc: Grpc = Field(
        default_factory=default_grpc, description="Where gRPC listens: off, one listener, or a list of them."
    )
    zmq: ZeroMqSetting = Field(default_factory=ZeroMq, description="Requests and events over ZeroMQ, or off.")
    http: HttpSetting = Field(default_factory=Http, description="/metrics and /health, or off.")
    grace_ns: DurationOrZero = Field(
        default=30_000_000_000, alias="grace",
        description="How long executors serve on alone when taktd has died, for the next one to take them over.",
    )  # fmt: skip
    allow_faults: bool = Field(
        default=False, description="Whether `taktctl fault inject` may make simulated devices fail."
    )

    def loops_on(self, device: str) -> tuple[Loop, ...]:
        """The device's loops in configuration order."""
        return tuple(loop for loop in self.loops.values() if loop.device == device)

    def stand_ins_on(self, device: str) -> tuple[tuple[Loop, str], ...]:
        """Loops of other devices that this one stands in for, each with the model it then runs."""
        return tuple(
            (loop, one.model or loop.model)
            for loop in self.loops.values()
            for one in loop.fallback
            if one.kind == "device" and one.device == device
        )

    def models_on(self, device: str) -> tuple[Model, ...]:
        """Models whose engine the device needs: for one of its loops, or for best effort."""
        wanted = {loop.model for loop in self.loops_on(device)}
        return tuple(m for m in self.models.values() if m.name in wanted or m.device == device)


# ---- from files to a Configuration ----


def load(path: str | Path) -> Configuration:
    """Read and judge FILE and the conf.d folder beside it. Raises ConfigurationRefused with every error found."""
    return load_with_places(path)[0]


def load_with_places(path: str | Path) -> tuple[Configuration, Tree]:
    """As load, with the file and line of every key."""
    file = Path(path)
    tree, errors = read_tree(file)
    for extra in _extra_files(file):
        other, more = read_tree(extra, may_be_empty=True)
        errors += more
        errors += tree.merge(other, MERGE_DEPTH)
    if errors and not tree.root:
        raise ConfigurationRefused(errors)
    # A value that could not be read is one error already, not a second one as a wrong value.
    spoiled = {error.key for error in errors}
    errors += [e for e in _reference_errors(tree) if e.key not in spoiled]
    try:
        configuration = Configuration.model_validate(tree.root)
    except ValidationError as error:
        errors += [e for e in translated(tree, error, Configuration) if e.key not in spoiled]
        raise ConfigurationRefused(errors) from None
    if errors:
        raise ConfigurationRefused(errors)
    return _completed(configuration, tree), tree


def _extra_files(file: Path) -> list[Path]:
    folder = file.parent / CONF_D
    try:
        return sorted(p for p in folder.iterdir() if p.suffix == ".yaml" and not p.name.startswith("."))
    except OSError:
        return []


_REFERENCES: Final = (("loops", "model", "models"), ("loops", "device", "devices"), ("models", "device", "devices"))


def _reference_errors(tree: Tree) -> Iterable[ConfigError]:
    """Loops and models that name a device or model which is not there; judged on the tree, so that all are found."""
    sections = {
        name: value if isinstance(value := tree.root.get(name), dict) else {} for name in ("devices", "models", "loops")
    }
    for section, key, target in (
        ("loops", "model", "models"),
        ("loops", "device", "devices"),
        ("models", "device", "devices"),
    ):
        for name, item in sections[section].items():
            found = item.get(key) if isinstance(item, dict) else None
            if isinstance(found, str) and found not in sections[target]:
                known = list(sections[target])
                yield tree.error(
                    (section, name, key),
                    f"names a {key} that does not exist",
                    found=shown(found),
                    allowed=", ".join(known[:SHOWN_NAMES_MAX]) if known else f"declare it under {target} first",
                    hint=nearest(found, known),
                )
    yield from _crowded(tree, sections["loops"], list(sections["devices"]))
    yield from gpu_errors(tree, sections["devices"], sections["models"])
    yield from fallback_errors(tree, list(sections["devices"]), list(sections["models"]), sections["loops"])
    if len(sections["devices"]) > 1:
        for name, item in sections["loops"].items():
            if isinstance(item, dict) and "device" not in item:
                allowed = ", ".join(list(sections["devices"])[:SHOWN_NAMES_MAX])
                yield tree.error(("loops", name, "device"), "is missing", allowed=allowed)


def _crowded(tree: Tree, loops: dict[str, Any], devices: list[str]) -> Iterable[ConfigError]:
    for device in devices:
        there = [
            name for name, item in loops.items() if isinstance(item, dict) and item.get("device", device) == device
        ]
        if len(there) > LOOPS_PER_DEVICE_MAX:
            allowed = f"at most {LOOPS_PER_DEVICE_MAX} on one device"
            found = f"{len(there)} on {device}"
            yield tree.error(
                ("loops", there[LOOPS_PER_DEVICE_MAX]), "is one loop too many", found=found, allowed=allowed
            )


def _completed(configuration: Configuration, tree: Tree) -> Configuration:
    """Fill in defaults that depend on other values, and make model paths absolute."""
    first = next(iter(configuration.devices))
    loops = {}
    for name, loop in configuration.loops.items():
        update: dict[str, Any] = {"device": loop.device or first, "deadline_ns": loop.deadline_ns or loop.period_ns}
        if loop.trigger == "clock" and "max_age_ns" not in loop.model_fields_set:
            update["max_age_ns"] = 2 * loop.period_ns
        loops[name] = loop.model_copy(update=update)
    models = {}
    for name, model in configuration.models.items():
        home = next((loop.device for loop in loops.values() if loop.model == name), first)
        folder = Path(tree.mark(("models", name, "path"))[0]).absolute().parent
        update = {"device": model.device or home, "path": str(folder / model.path)}
        if model.verify.samples is not None:
            said_in = Path(tree.mark(("models", name, "verify", "samples"))[0]).absolute().parent
            update["verify"] = model.verify.model_copy(update={"samples": str(said_in / model.verify.samples)})
        models[name] = model.model_copy(update=update)
    return configuration.model_copy(update={"loops": loops, "models": models})


def settings() -> list[Setting]:
    """Every setting in order, from the declarations above."""
    return config_messages.settings(Configuration)
