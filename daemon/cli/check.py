"""`taktctl check` and `taktctl costs`: would this configuration be admitted, and what engines were measured to cost.

check needs no daemon. It reads the files it is given (and the model files they name, to tell whose costs they are and
whether a fallback fits), never stored measurements. Of a model file that is not there it warns.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from taktd.daemon.admission import InvalidLoop, Verdict
from taktd.daemon.certification.cost_file import CostsRefused, CostUnknown, read_costs
from taktd.daemon.certification.costs import BudgetTooSmall
from taktd.daemon.certification.foresight import Foresight, StandbyUnknown, foresee
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, Loop, load_with_places
from taktd.daemon.config.durations import format_ppm, format_rounded
from taktd.daemon.config.yamltree import ConfigError, Tree
from taktd.daemon.models.inspection import Inspector, ModelRefused
from taktd.daemon.models.store import StoreError, resolved
from taktd.daemon.supervision.fallback import fallback_problems

__all__ = ["check"]


@click.command(name="check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--costs", "costs_path", type=click.Path(path_type=Path), help="Measured costs, where no budget is.")
@click.option("--wcrt", is_flag=True, help="Exact worst-case response times, too; may take long for many loops.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
def check(file: Path, costs_path: Path | None, wcrt: bool, as_json: bool) -> None:
    """Judge a configuration: is it valid, and would every loop always meet its deadline, from its stand-ins too?

    Exit code 0: admitted; 1: refused, with what would fit; 2: unusable input, such as a loop whose cost nobody knows.

    The JSON object always has valid, admitted (null where nobody can say), devices and errors.
    """
    try:
        configuration, places = load_with_places(file)
        costs = read_costs(costs_path, configuration) if costs_path else {}
        if problems := _misfits(configuration):
            _unusable(as_json, "\n".join(problems), [{"what": problem} for problem in problems])
        seen = foresee(configuration, costs, wcrt=wcrt)
    except ConfigurationRefused as refused:
        _unusable(as_json, str(refused), [error.as_json() for error in refused.errors])
    except CostUnknown as unknown:
        _valid_but_unknown(as_json, file, [_cost_missing(configuration, places, name) for name in unknown.loops])
    except StandbyUnknown as unknown:
        _valid_but_unknown(as_json, file, [_standby_missing(configuration, places, *one) for one in unknown.stand_ins])
    except BudgetTooSmall as refused:
        _no(as_json, str(refused))
    except (CostsRefused, InvalidLoop) as error:
        _unusable(as_json, str(error), [{"what": str(error)}])
    for missing in _missing_files(configuration, places):
        print(f"taktctl check: warning: {missing}", file=sys.stderr)
    _warn_of_cores(configuration, places)
    admitted = all(device.admitted for device in seen.values())
    if as_json:
        devices = {name: device.as_json() for name, device in seen.items()}
        _answer(valid=True, admitted=admitted, devices=devices, errors=[])
    else:
        _show(seen, configuration)
    raise SystemExit(0 if admitted else 1)


def _misfits(configuration: Configuration) -> list[str]:
    """What only the models tell: a file that is none, a constant or a stand-in that doesn't fit the loop's tensors.

    Loops whose models are not all at hand are left out: of those files there is a warning.
    """
    judged: dict[str, Loop] = {}
    needed = {name for name in configuration.models if _at_hand(configuration, name)}
    for loop in configuration.loops.values():
        models = {loop.model, *(one.model for one in loop.fallback if one.kind == "device" and one.model)}
        if models <= needed:
            judged[loop.name] = loop
    part = configuration.model_copy(
        update={"loops": judged, "models": {name: configuration.models[name] for name in sorted(needed)}}
    )
    try:
        part = resolved(part)
        with tempfile.TemporaryDirectory(prefix="taktctl-check-") as folder:  # nothing is remembered
            return fallback_problems(part, asyncio.run(_inspect(part, Path(folder))))
    except StoreError as refused:
        return [f"{refused}\n  to do: {refused.hint}" if refused.hint else str(refused)]
    except ModelRefused as refused:
        return [str(refused)]


def _at_hand(configuration: Configuration, name: str) -> bool:
    model = configuration.models[name]
    path = Path(model.path)
    return path.is_dir() if model.version is not None else path.is_file()


async def _inspect(configuration: Configuration, folder: Path) -> dict[str, Any]:
    return {name: await Inspector(folder).inspect(model) for name, model in configuration.models.items()}


def _missing_files(configuration: Configuration, places: Tree) -> Iterator[ConfigError]:
    """Models whose file is not there: a warning, since a plan may be judged before its models exist, and elsewhere than
    where it runs. Versions are folders, and judged when one is activated."""
    for name, model in configuration.models.items():
        path, key = Path(model.path), ("models", name, "path")
        if model.version is not None and path.is_file():
            hint = "remove `version`, or name the folder that holds the versions"
            yield places.error(key, "is a file", found=model.path, allowed="a folder, with `version`", hint=hint)
        elif model.version is not None and not path.is_dir():
            yield places.error(key, "is not a folder that is there", found=model.path, hint="a version needs one")
        elif model.version is None and path.is_dir():
            hint = "name the file in it, or write `version: latest` beside the path"
            yield places.error(key, "is a folder", found=model.path, allowed="an ONNX file", hint=hint)
        elif model.version is None and not path.exists():
            hint = f"put the model there, or correct the path: it is relative to the folder of {places.mark(key)[0]}"
            yield places.error(key, "does not exist", found=model.path, allowed="an ONNX file", hint=hint)


def _cost_missing(configuration: Configuration, places: Tree, name: str) -> ConfigError:
    loop = configuration.loops[name]
    file, line = places.mark(("loops", name))
    return ConfigError(
        file, line, f"loops.{name}.budget", f"no cost is known for {name} (model {loop.model} on {loop.device})",
        allowed="what a job of it may take, such as `budget: 2ms`",
        hint="write that; or start taktd with this file (it measures), `taktctl costs --json > costs.json`, and "
        "check again with --costs costs.json",
    )  # fmt: skip


def _standby_missing(configuration: Configuration, places: Tree, name: str, model: str, device: str) -> ConfigError:
    entries = configuration.loops[name].fallback
    place = next(at for at, one in enumerate(entries) if one.kind == "device" and one.device == device)
    file, line = places.mark(("loops", name))
    return ConfigError(
        file, line, f"loops.{name}.fallback[{place}]", f"no cost is known for the stand-in (model {model} on {device})",
        allowed="a device on which the model was measured; a budget holds for the loop's own device",
        hint="start taktd with this file (it measures), `taktctl costs --json > costs.json`, and check again with "
        "--costs costs.json; or accept it as it is with fallback_uncertified: true",
    )  # fmt: skip


def _valid_but_unknown(as_json: bool, file: Path, errors: list[ConfigError]) -> NoReturn:
    if as_json:
        _answer(valid=True, admitted=None, devices={}, errors=[error.as_json() for error in errors])
    print(f"taktctl check: {file} is valid, but nobody can say yet whether its loops meet their deadlines:",
          *errors, sep="\n", file=sys.stderr)  # fmt: skip
    raise SystemExit(2)


def _warn_of_cores(configuration: Configuration, places: Tree) -> None:
    there = os.sysconf("SC_NPROCESSORS_CONF")
    for name, device in configuration.devices.items():
        if absent := [core for core in device.cores if core >= there]:
            what = f"names cores that this machine does not have: {', '.join(map(str, absent))}"
            hint = "if it is meant for this machine: there taktd runs the device and does not certify it"
            allowed = f"0 to {there - 1}"
            warning = places.error(("devices", name, "cores"), what, allowed=allowed, hint=hint)
            print(f"taktctl check: warning: {warning}", file=sys.stderr)


def _answer(*, valid: bool, admitted: bool | None, devices: dict[str, Any], errors: list[dict[str, Any]]) -> None:
    """The one JSON object, of one shape whatever the answer is."""
    print(json.dumps({"valid": valid, "admitted": admitted, "devices": devices, "errors": errors}))


def _unusable(as_json: bool, text: str, errors: list[dict[str, Any]]) -> NoReturn:
    if as_json:
        _answer(valid=False, admitted=None, devices={}, errors=errors)
    print(f"taktctl check: {text}", file=sys.stderr)
    raise SystemExit(2)


def _no(as_json: bool, text: str) -> NoReturn:
    if as_json:
        _answer(valid=True, admitted=False, devices={}, errors=[{"what": text}])
    print(f"taktctl check: {text}", file=sys.stderr)
    raise SystemExit(1)


def _show(seen: dict[str, Foresight], configuration: Configuration) -> None:
    console = Console()
    for name, device in seen.items():
        verdict = device.verdict
        word = "[green]admitted[/]" if device.admitted else "[bold red]refused[/]"
        best_effort = (
            f"best effort up to {format_rounded(verdict.max_dispatch_ns)} a dispatch, "
            f"share {format_ppm(verdict.share_ppm)}"
        )
        used = format_ppm(verdict.utilization_ppm)
        console.print(f"{name}: {word}, utilisation {used}, {best_effort}", highlight=False)
        if verdict.loops:
            console.print(_table(verdict, set(device.stand_ins)))
        if verdict.admitted and verdict.max_dispatch_ns and configuration.devices[name].best_effort.mode == "auto":
            text = "margins are beside best effort: by `best_effort: auto` it takes the longest dispatch that fits"
            console.print(text, highlight=False)
        for loop, why in device.stand_ins.items():
            if why and configuration.loops[loop].fallback_uncertified:
                text = f"loop {loop}: its stand-in on {name} would not be certified: {why}"
                console.print(text, markup=False, highlight=False)
        for text in device.refused:
            console.print(text, markup=False, highlight=False)
        if verdict.refusal is not None:
            console.print(verdict.refusal.text(), markup=False, highlight=False)


def _table(verdict: Verdict, stand_ins: set[str]) -> Table:
    table = Table()
    asked = any(loop.wcrt_ns is not None for loop in verdict.loops)
    for column in ("loop", "period", "deadline", "jitter", "cost", *(["worst response"] if asked else []), "margin"):
        table.add_column(column, justify="left" if column == "loop" else "right", no_wrap=column == "loop")
    for loop in verdict.loops:
        responses = [loop.wcrt_ns] if asked else []
        times = (loop.period_ns, loop.deadline_ns, loop.jitter_ns, loop.cost_ns, *responses, loop.margin_ns)
        name = f"{loop.name} (stand-in)" if loop.name in stand_ins else loop.name
        table.add_row(name, *("" if ns is None else format_rounded(ns) for ns in times))
    return table
