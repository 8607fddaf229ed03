"""`taktctl check` and `taktctl costs`: would this configuration be admitted, and what engines were measured to cost.

check needs no daemon. It reads the files it is given (and the model files they name, to tell whose costs they are),
never stored measurements. A model file that is not there is refused: taktd would not start with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

from taktd.daemon.admission import InvalidLoop, Verdict, admit
from taktd.daemon.certification.certification import best_effort_rule
from taktd.daemon.certification.cost_file import CostsRefused, CostUnknown, loop_costs, read_costs
from taktd.daemon.certification.costs import loads_of
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load_with_places
from taktd.daemon.config.durations import format_duration, format_ppm
from taktd.daemon.config.yamltree import ConfigError, Tree

__all__ = ["check"]


@click.command(name="check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--costs", "costs_path", type=click.Path(path_type=Path), help="Measured costs, where no budget is.")
@click.option("--wcrt", is_flag=True, help="Exact worst-case response times, too; may take long for many loops.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
def check(file: Path, costs_path: Path | None, wcrt: bool, as_json: bool) -> None:
    """Judge a configuration: is it valid, and would every loop always meet its deadline?

    Exit code 0: admitted; 1: refused, with what would fit; 2: unusable input, such as a loop whose cost nobody knows.
    """
    try:
        configuration, places = load_with_places(file)
        costs = read_costs(costs_path, configuration) if costs_path else {}
        verdicts = judge(configuration, costs, wcrt)
    except ConfigurationRefused as refused:
        _unusable(as_json, str(refused), [error.as_json() for error in refused.errors])
    except CostUnknown as unknown:
        _valid_but_unknown(as_json, file, [_cost_missing(configuration, places, name) for name in unknown.loops])
    except (CostsRefused, InvalidLoop) as error:
        _unusable(as_json, str(error), [{"what": str(error)}])
    for missing in _missing_files(configuration, places):
        print(f"taktctl check: warning: {missing}", file=sys.stderr)
    _warn_of_cores(configuration, places)
    admitted = all(verdict.admitted for verdict in verdicts.values())
    if as_json:
        devices = {name: verdict.as_json() for name, verdict in verdicts.items()}
        print(json.dumps({"admitted": admitted, "devices": devices}))
    else:
        _show(verdicts)
    raise SystemExit(0 if admitted else 1)


def judge(configuration: Configuration, costs: Any, wcrt: bool) -> dict[str, Verdict]:
    """Each device's verdict. Raises CostUnknown."""
    known = loop_costs(configuration, costs)
    return {
        name: admit(
            loads_of(configuration, name, known), best_effort_rule(device.best_effort),
            wcrt=wcrt, scale=len(configuration.devices),
        )
        for name, device in configuration.devices.items()
    }  # fmt: skip


def _missing_files(configuration: Configuration, places: Tree) -> Iterator[ConfigError]:
    """Models whose file is not there: a warning, since a plan may be judged before its models exist, and elsewhere than
    where it runs. Versions are folders, and judged when one is activated."""
    for name, model in configuration.models.items():
        path, key = Path(model.path), ("models", name, "path")
        if model.version is not None and not path.is_dir():
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


def _valid_but_unknown(as_json: bool, file: Path, errors: list[ConfigError]) -> NoReturn:
    if as_json:
        print(json.dumps({"valid": True, "errors": [error.as_json() for error in errors]}))
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


def _unusable(as_json: bool, text: str, errors: list[dict[str, Any]]) -> NoReturn:
    if as_json:
        print(json.dumps({"errors": errors}))
    print(f"taktctl check: {text}", file=sys.stderr)
    raise SystemExit(2)


def _show(verdicts: dict[str, Verdict]) -> None:
    console = Console()
    for name, verdict in verdicts.items():
        word = "[green]admitted[/]" if verdict.admitted else "[bold red]refused[/]"
        best_effort = (
            f"best effort up to {format_duration(verdict.max_dispatch_ns)} a dispatch, "
            f"share {format_ppm(verdict.share_ppm)}"
        )
        used = format_ppm(verdict.utilization_ppm)
        console.print(f"{name}: {word}, utilisation {used}, {best_effort}", highlight=False)
        if verdict.loops:
            console.print(_table(verdict))
        if verdict.refusal is not None:
            console.print(verdict.refusal.text(), markup=False, highlight=False)


def _table(verdict: Verdict) -> Table:
    table = Table()
    for column in ("loop", "period", "deadline", "jitter", "cost", "worst response", "margin"):
        table.add_column(column, justify="left" if column == "loop" else "right")
    for loop in verdict.loops:
        times = (loop.period_ns, loop.deadline_ns, loop.jitter_ns, loop.cost_ns, loop.wcrt_ns, loop.margin_ns)
        table.add_row(loop.name, *("" if ns is None else format_duration(ns) for ns in times))
    return table
