"""`taktctl model add|list|activate|shadow|rollback|remove`: versions of the models that the running taktd serves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from taktd.daemon.cli.endings import NO, NOTHING_THERE, die
from taktd.daemon.cli.report import PIPE_COLUMNS
from taktd.daemon.control_client import AnswerNo, NobodyThere, ask

__all__ = ["model"]

CHANGE_S_MAX = 600.0  # a new engine is loaded, verified, measured and on probation meanwhile

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
name_argument = click.argument("name")
version_argument = click.argument("version", type=click.IntRange(min=1))


def _ask(op: str, as_json: bool, **arguments: Any) -> dict[str, Any]:
    try:
        return ask(op, answer_s_max=CHANGE_S_MAX, **arguments)
    except NobodyThere as error:
        hint = "is taktd running? start it, or set TAKTD_RUNTIME_DIR to the folder it uses"
        die(str(error), hint, code=NOTHING_THERE, as_json=as_json)
    except AnswerNo as error:
        die(str(error), error.hint, code=NO, as_json=as_json)


def _change(op: str, as_json: bool, **arguments: Any) -> None:
    answer = _ask(op, as_json, **arguments)
    print(json.dumps(answer) if as_json else answer["message"])


@click.group(name="model", no_args_is_help=True)
def model() -> None:
    """Versions of models: import, list, serve another one, go back.

    For models that the configuration keeps as versions (`path: FOLDER, version: latest`).

    Exit code 0: done; 1: refused, what was served is served; 2: unusable input; 3: no taktd.
    """


@model.command(name="add")
@name_argument
@click.argument("file", type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path))
@json_option
def add(name: str, file: Path, as_json: bool) -> None:
    """Import FILE (and its external data) as a new version of NAME. What is served does not change."""
    _change("model.add", as_json, name=name, file=str(file))


@model.command(name="list")
@click.argument("name", required=False)
@json_option
def list_(name: str | None, as_json: bool) -> None:
    """Versions of NAME, or of every model: which is active, which is served."""
    answer = _ask("model.list", as_json, **({"name": name} if name else {}))
    if as_json:
        print(json.dumps(answer))
    else:
        _show(answer["models"])


@model.command(name="activate")
@name_argument
@version_argument
@click.option("--shadow", is_flag=True, help="Run it on copies of the loops' jobs, compare, and use none of it.")
@json_option
def activate(name: str, version: int, shadow: bool, as_json: bool) -> None:
    """Serve VERSION of NAME from now on, also after a restart.

    With --shadow it runs beside the version that loops use, on copies of the same inputs, until it is ended by
    `taktctl model shadow NAME --stop` or activated; what that shows: `taktctl model shadow NAME`.
    """
    _change("model.shadow.start" if shadow else "model.activate", as_json, name=name, version=version)


@model.command(name="shadow")
@name_argument
@click.option("--stop", is_flag=True, help="End it.")
@json_option
def shadow(name: str, stop: bool, as_json: bool) -> None:
    """What the version that runs beside NAME's shows, or showed: jobs compared, differences, times."""
    if stop:
        _change("model.shadow.stop", as_json, name=name)
        return
    answer = _ask("model.shadow", as_json, name=name)
    if as_json:
        print(json.dumps(answer))
    else:
        _show_shadow(name, answer["shadow"])


@model.command(name="rollback")
@name_argument
@json_option
def rollback(name: str, as_json: bool) -> None:
    """Serve the version of NAME that was active before."""
    _change("model.rollback", as_json, name=name)


@model.command(name="remove")
@name_argument
@version_argument
@json_option
def remove(name: str, version: int, as_json: bool) -> None:
    """Delete VERSION of NAME, unless it is active or served. Its number is not used again."""
    _change("model.remove", as_json, name=name, version=version)


def shadow_told(shadow: dict[str, Any] | None, version: int) -> str:
    """In a few words, "" for a version that has not run beside another."""
    if shadow is None or shadow["version"] != version:
        return ""
    state = "ran as shadow" if shadow["state"] == "ended" else "shadow"
    return f"{state}: {shadow['samples']} jobs compared, {shadow['differing'] + shadow['failed']} different"


def _console() -> Any:
    from rich.console import Console

    # Into a pipe or a file nothing is cut to the width of a screen.
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _show_shadow(name: str, shadow: dict[str, Any]) -> None:
    from rich.table import Table

    end = f" ({shadow['why_ended']})" if shadow["state"] == "ended" else ""
    print(f"{name}: version {shadow['version']} beside version {shadow['against']} on {shadow['device']}, "
          f"jobs of {', '.join(shadow['loops'])}: {shadow['state']}{end}")  # fmt: skip
    print(f"{shadow['samples']} jobs compared, {shadow['differing']} different, {shadow['failed']} failed, "
          f"{shadow['torn']} left out (they changed while they were copied)")  # fmt: skip
    if shadow["failure"]:
        print(f"last failure: {shadow['failure']}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("output", "different", "max abs", "max rel", "NaN or infinity", "allowed", "worst"):
        table.add_column(column)
    for output, found in shadow["outputs"].items():
        worst = found["worst"]
        where = f"[{', '.join(map(str, worst['at']))}] of job {worst['sequence']}" if worst else ""
        table.add_row(
            output, str(found["differing"]), f"{found['max_abs']:.3g}", f"{found['max_rel']:.3g}",
            str(found["not_finite"]), f"{found['atol']:g} + {found['rtol']:g} x |served|",
            f"{where}: {_number(worst['found'])}, served {_number(worst['expected'])}" if worst else "",
        )  # fmt: skip
    if shadow["outputs"]:
        _console().print(table)
    times = shadow["times"]
    if times.get("p50_ns"):
        p50, p99, most = (f"{times[key] / 1000:.1f} µs" for key in ("p50_ns", "p99_ns", "max_ns"))
        costs = [shadow["would_be_cost_ns"], shadow["served_cost_ns"]]
        would_be, served = (f"{cost / 1000:.1f} µs" if cost else "-" for cost in costs)
        print(f"{times['runs']} runs, {times['disturbed']} of them disturbed: p50 {p50}, p99 {p99}, max {most}")
        print(f"C would be {would_be} (served: {served}), as measured beside the loops at the lowest priority")


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show(models: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "version", "", "size", "from", "sha256"):
        table.add_column(column, justify="right" if column in ("version", "size") else "left")
    for entry in models:
        if not entry["versions"]:
            table.add_row(entry["name"], "-", "served", "", entry["path"], "")
        for version in entry["versions"]:
            marks = [word for word, given in (
                ("active", version["active"]), ("served", version["version"] == entry["serving"]),
                (version["problem"], version["problem"]), (shadow_told(entry["shadow"], version["version"]), True),
            ) if given and word]  # fmt: skip
            table.add_row(entry["name"], str(version["version"]), ", ".join(marks), str(version["bytes"]),
                          version["source"], version["sha256"][:12])  # fmt: skip
    _console().print(table)
