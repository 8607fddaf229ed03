"""The cost file: what `taktctl costs --json` prints and `--costs FILE` of check and simulate reads.

    {"format": "taktd-costs", "version": 1, "devices": {"cpu0": {"driver": "cpu", "dispatch_ns": 9000,
      "models": {"go1": {"digest": "ab12…", "batches": {"1": {"p50_ns": …, "p99_ns": …, "p999_ns": …, "max_ns": …,
      "runs": …}}}}}}}

driver is the device's, digest the model's content digest: the costs of another engine under the same name are refused,
not used. What runs the engine where the file comes from (processor, runtime's version) can't be compared with a machine
that is not asked. Integers only. A file is judged as a whole before anything of it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from taktd.daemon.certification.costs import LoopCost, Measured, loop_cost, model_costs
from taktd.daemon.config.configuration import Configuration, Loop
from taktd.engines.declared_cost import Cost
from taktd.engines.model_file import content_digest

__all__ = [
    "CostUnknown",
    "CostsRefused",
    "DeviceCosts",
    "cost_document",
    "known_times",
    "loop_costs",
    "queue_costs",
    "read_costs",
]

FORMAT: Final = "taktd-costs"
VERSION: Final = 1
FILE_BYTES_MAX: Final = 16 << 20
TIME_NS_MAX: Final = 1 << 62
TIMES: Final = ("p50_ns", "p99_ns", "p999_ns", "max_ns")  # in the order in which they can only grow


class CostsRefused(ValueError):
    """A cost file that can't be used: where in it, what was found, what is allowed, what to do."""


class CostUnknown(ValueError):
    """Loops, by name, for which neither a budget nor a cost file says what a job costs."""

    def __init__(self, what: str, loops: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.loops = loops


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Of one device: its driver ("": not said), cost of a dispatch, per model its digest and times by batch size."""

    driver: str
    dispatch_ns: int
    digests: Mapping[str, str]
    measured: Mapping[str, Measured]


Costs = Mapping[str, DeviceCosts]


def cost_document(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The whole file, from each device's part (costs.as_json)."""
    return {"format": FORMAT, "version": VERSION, "devices": {name: dict(part) for name, part in devices.items()}}


def read_costs(path: Path, configuration: Configuration) -> Costs:
    """Raises CostsRefused; also for another driver, and where a model's file is at hand and its digest is another."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise CostsRefused(f"{path}: can't be read: {(error.strerror or str(error)).lower()}") from None
    if len(data) > FILE_BYTES_MAX:
        raise CostsRefused(f"{path}: is longer than {FILE_BYTES_MAX} bytes: no cost file is")
    try:
        costs = _parse(json.loads(data, parse_float=_no_float, parse_constant=_no_float))
        _compare_drivers(costs, configuration)
        _compare_digests(costs, configuration)
    except CostsRefused as refused:
        raise CostsRefused(f"{path}: {refused}") from None
    except (ValueError, RecursionError) as error:
        raise CostsRefused(f"{path}: is not JSON ({error}): write it with `taktctl costs --json`") from None
    return costs


def _no_float(text: str) -> int:
    raise CostsRefused(f"has the number {text[:40]}; allowed are whole numbers, times in nanoseconds")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CostsRefused(f"{where} is not an object: write the file with `taktctl costs --json`")
    return value


def _whole(value: Any, where: str, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= TIME_NS_MAX:
        raise CostsRefused(f"{where} is {str(value)[:40]!r}; allowed is a whole number from {minimum}")
    return value


def _parse(document: Any) -> Costs:
    top = _object(document, "the file")
    if top.get("format") != FORMAT:
        raise CostsRefused(f"is no cost file (format is {str(top.get('format'))[:40]!r}, not {FORMAT!r})")
    if top.get("version") != VERSION:
        found = str(top.get("version"))[:40]
        raise CostsRefused(f"is a cost file of version {found}; this taktd reads version {VERSION}: write it again")
    result = {}
    for device, part in _object(top.get("devices"), "devices").items():
        where = f"devices.{device}"
        part = _object(part, where)
        digests, measured = {}, {}
        for model, entry in _object(part.get("models"), f"{where}.models").items():
            digests[model], measured[model] = _parse_model(entry, f"{where}.models.{model}")
        driver = part.get("driver", "")
        if not isinstance(driver, str):
            raise CostsRefused(f"{where}.driver is {str(driver)[:40]!r}; allowed is a device's driver, such as 'cpu'")
        dispatch_ns = _whole(part.get("dispatch_ns"), f"{where}.dispatch_ns", 0)
        result[device] = DeviceCosts(driver, dispatch_ns, digests, measured)
    return result


def _parse_model(value: Any, where: str) -> tuple[str, Measured]:
    entry = _object(value, where)
    digest = entry.get("digest")
    if not isinstance(digest, str):
        raise CostsRefused(f"{where}.digest is missing: whose costs these are can't be known")
    batches: dict[str, dict[str, int]] = {}
    for size, times in _object(entry.get("batches"), f"{where}.batches").items():
        if not (size.isascii() and size.isdigit() and size == str(int(size)) and int(size) > 0):
            raise CostsRefused(f"{where}.batches has {size[:40]!r}; allowed are batch sizes from 1")
        at = f"{where}.batches.{size}"
        times = _object(times, at)
        values = {name: _whole(times.get(name), f"{at}.{name}", 1) for name in TIMES}
        values["runs"] = _whole(times.get("runs"), f"{at}.runs", 1)
        for smaller, larger in pairwise(TIMES):
            if values[smaller] > values[larger]:
                found = f"{smaller} is {values[smaller]}, more than {larger}, which is {values[larger]}"
                raise CostsRefused(f"{at}: {found}: measure the model again")
        batches[size] = values
    if "1" not in batches:
        raise CostsRefused(f"{where}.batches has no batch size 1: measure the model again")
    return digest, batches


def _compare_drivers(costs: Costs, configuration: Configuration) -> None:
    """The same model on another kind of device is another engine."""
    for name, part in costs.items():
        device = configuration.devices.get(name)
        if device is not None and part.driver and part.driver != device.driver:
            raise CostsRefused(
                f"devices.{name} has the costs of another engine (driver {part.driver[:40]!r}, the configuration says "
                f"{device.driver!r}): measure this one, `taktctl costs --json` prints it"
            )


def _compare_digests(costs: Costs, configuration: Configuration) -> None:
    """Costs of a model whose file is here must be that file's; a model with data in other files can't be compared."""
    for device, part in costs.items():
        for name, digest in part.digests.items():
            model = configuration.models.get(name)
            if model is None or not digest:
                continue
            path = Path(model.path)
            try:
                if b"location" in path.read_bytes():
                    continue
                found = content_digest(path, [])
            except OSError:
                continue
            if found != digest:
                raise CostsRefused(
                    f"devices.{device}.models.{name} has the costs of another engine (model digest {digest[:12]}…, "
                    f"{path} has {found[:12]}…): measure this one, `taktctl costs --json` prints it"
                )


def known_times(configuration: Configuration, costs: Costs, device: str, model: str) -> tuple[Measured, int] | None:
    """Times of a model on a device, and of a dispatch there: measured, else as a simulated device declares them.

    A declared cost is the whole of it: the dispatch is what a real machine would add.
    """
    part = costs.get(device)
    if part is not None and model in part.measured:
        return part.measured[model], part.dispatch_ns
    if configuration.devices[device].driver != "sim":
        return None
    cost = Cost(configuration.devices[device].cost)
    declared = {"p50_ns": cost.at(500_000), "p99_ns": cost.at(990_000), "p999_ns": cost.at(999_000)}
    return {"1": declared}, 0


def _cost_of(configuration: Configuration, loop: Loop, costs: Costs, margin_ppm: int) -> LoopCost | None:
    if loop.budget_ns is not None:
        return LoopCost(loop.budget_ns, loop.budget_ns)
    times = known_times(configuration, costs, loop.device, loop.model)
    return None if times is None else loop_cost(loop, times[0], margin_ppm, times[1])


def loop_costs(configuration: Configuration, costs: Costs) -> dict[str, LoopCost]:
    """What a job of each loop costs: its budget, else by the cost file, else as a simulated device says.

    Raises CostUnknown with all that lack one.
    """
    margin = configuration.admission.margin_ppm
    found = {loop.name: _cost_of(configuration, loop, costs, margin) for loop in configuration.loops.values()}
    unknown = [name for name, cost in found.items() if cost is None]
    if unknown:
        loops = ", ".join(f"{name} (model {configuration.loops[name].model} on {configuration.loops[name].device})"
                          for name in unknown)  # fmt: skip
        raise CostUnknown(
            f"no cost is known for {loops}: give each a `budget:`, or measured costs with --costs FILE "
            "(`taktctl costs --json` prints them)",
            tuple(unknown),
        )
    return {name: cost for name, cost in found.items() if cost is not None}


def queue_costs(configuration: Configuration, costs: Costs, device: str, model: str) -> tuple[int, ...]:
    """What batches of 1, 2, … best-effort jobs cost; () where no cost is known."""
    part = costs.get(device)
    if part is None or model not in part.measured:
        return ()
    margin = configuration.admission.margin_ppm
    return model_costs(configuration.models[model], part.measured[model], margin, part.dispatch_ns)
