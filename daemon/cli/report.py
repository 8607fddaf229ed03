"""`taktctl status`, `loops`, `models`, `costs`, `reload`: what the running taktd says."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from taktd.daemon.cli.endings import FINE, NO, NOTHING_THERE, die
from taktd.daemon.cli.fault import said
from taktd.daemon.config.durations import format_duration
from taktd.daemon.control_client import AnswerNo, NobodyThere, ask

PIPE_COLUMNS: Final = 200

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")


def _ask(op: str, as_json: bool) -> dict[str, Any]:
    try:
        return ask(op)
    except NobodyThere as error:
        hint = "is taktd running? start it, or set TAKTD_RUNTIME_DIR to the folder it uses"
        die(str(error), hint, code=NOTHING_THERE, as_json=as_json)
    except AnswerNo as error:
        die(str(error), error.hint, code=NO, as_json=as_json)


def _end(answer: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None], code: int = FINE) -> NoReturn:
    if as_json:
        print(json.dumps(answer))
    else:
        show(answer)
    raise SystemExit(code)


@click.command()
@json_option
def status(as_json: bool) -> None:
    """Whether every executor and front door serves, and every loop is answered.

    Exit code 0: all of them; 1: some don't (the answer is printed all the same, and says which); 3: no taktd.
    """
    answer = _ask("status", as_json)
    _end(answer, as_json, _show_status, NO if answer["not_serving"] else FINE)


@click.command()
@json_option
def loops(as_json: bool) -> None:
    """Loops with their contracts, clients, counters and latencies."""
    _end(_ask("loops", as_json), as_json, _show_loops)


@click.command()
@json_option
def models(as_json: bool) -> None:
    """Models with their tensors and measured execution times."""
    _end(_ask("models", as_json), as_json, _show_models)


@click.command()
@json_option
def costs(as_json: bool) -> None:
    """What each engine was measured to cost on this machine: save it with --json for check and simulate."""
    _end(_ask("costs", as_json), as_json, _show_costs)


@click.command()
@json_option
def reload(as_json: bool) -> None:
    """Read the configuration again and take over what changed, all of it or nothing.

    Exit code 0: done; 1: refused, the running configuration stays; 3: no taktd.
    """
    _end(_ask("reload", as_json), as_json, lambda answer: print(answer["message"]))


# ---- tables for people ----


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column in (
            "pid",
            "restarts",
            "jobs",
            "late",
            "expired",
            "failed",
            "lost",
            "p50",
            "p99",
            "max",
            "runs",
        )
        table.add_column(column, justify="right" if numeric else "left")
    return table


def _print(*things: Any) -> None:
    from rich.console import Console

    # Into a pipe or a file nothing is cut to the width of a screen.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    for thing in things:
        console.print(thing)


def _yes(value: bool) -> str:
    return "[green]yes[/]" if value else "[bold red]no[/]"


def _show_status(answer: dict[str, Any]) -> None:
    from rich.markup import escape

    state = "[green]ready[/]" if answer["ready"] else "[bold red]not ready[/]"
    promise = "certified" if answer["certified"] else "not certified"
    head = f"{escape(answer['node'])}: {state}, {promise}, epoch {answer['epoch']}, taktd {answer['version']}"
    if answer["not_serving"]:
        head += f"\n[bold red]not served[/]: {escape('; '.join(answer['not_serving']))}"
    executors = _table("executor", "role", "pid", "ready", "restarts", "rights", "note")
    for executor in answer["executors"]:
        rights = executor["rights"]
        text = f"{rights.get('policy', '')} {rights.get('priority') or ''}".strip()
        note = executor["error"] or executor["not_certified"]
        executors.add_row(
            escape(executor["device"]), executor["role"], str(executor["pid"] or "-"), _yes(executor["ready"]),
            str(executor["restarts"]), text, escape(note),
        )  # fmt: skip
    loops = _table("loop", "model", "device", "served", "client", "jobs", "late", "expired", "failed", "lost")
    for loop in answer["loops"]:
        client = loop["client"]
        loops.add_row(
            escape(loop["name"]), escape(loop["model"]), escape(loop["device"]), _yes(loop["served"]),
            escape(f"{client['name']} ({client['pid']})") if client else "-",
            *(str(loop[key]) for key in ("jobs", "late", "expired", "failed", "lost")),
        )  # fmt: skip
    closed = [
        f"[bold red]{d['name']} does not serve[/] ({escape(d['path'] or d.get('error') or 'not open yet')})"
        for d in answer["doors"]
        if not d["serving"]
    ]
    refused = answer["refused"]
    if refused:
        head += f"\n[bold red]{escape(answer['configuration'])} is not what runs: it is refused[/]\n{escape(refused)}"
    closed += [f"[yellow]injected on {escape(said(one))}[/] (taktctl fault inject {one['device']} none ends it)"
               for one in answer["faults"]]  # fmt: skip
    beside = ["", escape(shadow_line(answer["shadow"]))] if answer["shadow"] else []
    told = ["", loops, "", _service(answer["loops"])] if answer["loops"] else []
    _print(head, "", executors, *told, *closed, *beside)


def _service(loops: list[dict[str, Any]]) -> Any:
    """A table: who serves each loop, since when and why, and how often it changed hands."""
    from rich.markup import escape

    table = _table("loop", "served by", "role", "since", "why", "switches")
    now_ns = time.monotonic_ns()
    for loop in loops:
        why = ": ".join(text for text in (loop["why"], loop["reason"]) if text)
        switches = ", ".join(f"{cause} {times}" for cause, times in loop["switches"].items())
        by = escape(loop["served_by"]) if loop["served_by"] else "[bold red]nobody[/]"
        role = loop["role"] or "-"
        table.add_row(
            escape(loop["name"]), by, f"[yellow]{role}[/]" if role == "stand-in" else role,
            age(now_ns - loop["since_ns"]) if loop["since_ns"] else "-", escape(why) or "-", switches or "-",
        )  # fmt: skip
    return table


def age(ns: int) -> str:
    """How long something has lasted, in the two largest units: 3d 4h, 5m 12s, 7s."""
    seconds = max(0, ns) // 1_000_000_000
    units = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
    at = next((place for place, (size, _) in enumerate(units) if seconds >= size), len(units) - 1)
    parts = [f"{seconds // units[at][0]}{units[at][1]}"]
    if at + 1 < len(units):
        parts.append(f"{seconds % units[at][0] // units[at + 1][0]}{units[at + 1][1]}")
    return " ".join(parts)


def shadow_line(shadow: dict[str, Any]) -> str:
    """What a version that runs, or ran, beside another one has shown, in a line."""
    verb = "ran" if shadow["state"] == "ended" else "runs"
    why = f" ({shadow['why_ended']})" if shadow["state"] == "ended" else ""
    return (
        f"{shadow['model']}: version {shadow['version']} {verb} as shadow of version {shadow['against']}{why}: "
        f"{shadow['samples']} jobs compared, {shadow['differing'] + shadow['failed']} different"
    )


def _microseconds(value: float) -> str:
    return f"{value:.0f} µs" if value >= 100 else f"{value:.1f} µs"


def _show_loops(answer: dict[str, Any]) -> None:
    from rich.markup import escape

    table = _table("loop", "device", "period", "deadline", "cost", "client", "jobs", "late", "expired", "p50", "p99")
    for loop in answer["loops"]:
        counters = loop["statistics"] or {}
        total = counters.get("total", {"p50_us": 0.0, "p99_us": 0.0})
        client = loop["client"]
        table.add_row(
            escape(loop["name"]), escape(loop["device"]), format_duration(loop["period_ns"]),
            format_duration(loop["deadline_ns"]),
            "-" if loop["cost_ns"] is None else _microseconds(loop["cost_ns"] / 1000),
            escape(f"{client['name']} ({client['pid']})") if client else "-",
            *(str(counters.get(key, 0)) for key in ("submitted", "late", "expired")),
            *(_microseconds(total[key]) if total["p99_us"] else "-" for key in ("p50_us", "p99_us")),
        )  # fmt: skip
    shed = [f"{escape(p['name'])} is not served: {escape(p['not_served'])}" for p in answer["loops"] if p["not_served"]]
    _print(table, *(["", _service(answer["loops"])] if answer["loops"] else []), *shed)


def _tensors(tensors: list[dict[str, Any]]) -> str:
    return ", ".join(f"{t['name']} {t['dtype_name']}{t['dims']}" for t in tensors)


def _show_models(answer: dict[str, Any]) -> None:
    from rich.markup import escape

    table = _table(
        "model", "version", "sha256", "verified", "device", "inputs", "outputs", "batch", "p50", "p99", "max", "runs"
    )
    for model in answer["models"]:
        signature = [escape(_tensors(model.get(side, []))) for side in ("inputs", "outputs")]
        head = [
            escape(model["name"]), str(model["version"] or "-"), model.get("digest", "")[:12] or "-",
            escape(_verified(model)), escape(model["device"] or "-"), *signature,
        ]  # fmt: skip
        for size, cost in (model.get("measured") or {"-": None}).items():
            numbers = [_microseconds(cost[key] / 1000) for key in ("p50_ns", "p99_ns", "max_ns")] if cost else ["-"] * 3
            table.add_row(*head, size, *numbers, str(cost["runs"]) if cost else "-")
            head = [""] * len(head)
    notes = [f"{escape(m['name'])} is not verified: {escape(m['not_verified'])}" for m in answer["models"]
             if m.get("not_verified")]  # fmt: skip
    _print(table, *notes)


def _verified(model: dict[str, Any]) -> str:
    """Against what, in a word or two."""
    found = model.get("verified")
    if found is None:
        return "no"
    what = f"{Path(found['file']).name}, " if found["file"] else "random, "
    return f"{what}{found['samples']} samples"


def _show_costs(answer: dict[str, Any]) -> None:
    from rich.markup import escape

    table = _table("device", "model", "batch", "p50", "p99", "p99.9", "max", "runs")
    for name, device in answer["devices"].items():
        for model, engine in device["models"].items():
            for size, cost in engine["batches"].items():
                times = (_microseconds(cost[key] / 1000) for key in ("p50_ns", "p99_ns", "p999_ns", "max_ns"))
                table.add_row(escape(name), escape(model), size, *times, str(cost["runs"]))
    _print(table)
