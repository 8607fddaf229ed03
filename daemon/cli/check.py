"""`taktctl check` and `taktctl costs`: would this configuration be admitted, and what engines were measured to cost.

check needs no daemon. It reads the files it is given (and the model files they name, to tell whose costs they are),
never stored measurements.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from taktd.daemon.admission import InvalidLoop, Verdict, admit
from taktd.daemon.certification import best_effort_rule
from taktd.daemon.config import Configuration, ConfigurationRefused, load
from taktd.daemon.cost_file import CostsRefused, CostUnknown, loop_costs, read_costs
from taktd.daemon.costs import loads_of
from taktd.daemon.durations import format_duration, format_ppm

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
        configuration = load(file)
        costs = read_costs(costs_path, configuration) if costs_path else {}
        verdicts = judge(configuration, costs, wcrt)
    except ConfigurationRefused as refused:
        _unusable(as_json, str(refused), [error.as_json() for error in refused.errors])
    except (CostsRefused, CostUnknown, InvalidLoop) as error:
        _unusable(as_json, str(error), [{"what": str(error)}])
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


def _unusable(as_json: bool, text: str, errors: list[dict[str, Any]]) -> None:
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
