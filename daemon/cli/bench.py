"""`taktctl bench`: round trips through a lane, as a client of this priority on this core sees them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from taktd.daemon.cli.endings import NO, NOTHING_THERE, UNUSABLE, die

if TYPE_CHECKING:
    from taktd.daemon.benchmark import Outcome
    from taktd.daemon.direct import Direct
    from taktd.ipc import Lane

__all__ = ["bench"]

ATTACH_TIMEOUT_US = 5_000_000


@click.command(name="bench")
@click.option("--loop", metavar="NAME", help="Take this loop's place: nobody else may have it attached.")
@click.option("--model", metavar="NAME", help="Ask this model without a reservation.")
@click.option("--rate", metavar="HZ", type=click.FloatRange(0.1, 100_000), help="Pace. Default: the loop's own.")
@click.option("--closed", is_flag=True, help="Ask again as soon as the answer is there. The default for a model.")
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=5.0, show_default=True)
@click.option("--wait", type=click.Choice(["spin", "block", "hybrid"]), default="hybrid", show_default=True)
@click.option("--core", type=click.IntRange(0), help="Pin this client to a core that the executor does not use.")
@click.option("--priority", type=click.IntRange(1, 99), help="SCHED_FIFO; at most 70, executors have 80.")
@click.option("--direct", "with_direct", is_flag=True, help="Also call ONNX Runtime in this process, by turns.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
def bench(
    loop: str | None,
    model: str | None,
    rate: float | None,
    closed: bool,
    seconds: float,
    wait: str,
    core: int | None,
    priority: int | None,
    with_direct: bool,
    as_json: bool,
) -> None:
    """Measure a running taktd: latency percentiles from observation to action, late and failed jobs.

    Inputs are random numbers: don't bench a loop whose actions drive a machine. A job that expired counts as late.
    Exit code 0: measured; 1: the loop is taken, or not allowed; 2: no such loop or model, bad options; 3: no taktd.
    """
    if (loop is None) == (model is None):
        die("bench needs one thing to ask", "give either --loop NAME or --model NAME", code=UNUSABLE, as_json=as_json)
    if closed and rate is not None:
        die("--rate paces the jobs, --closed does not", "give one of them", code=UNUSABLE, as_json=as_json)
    from taktd.daemon import benchmark
    from taktd.ipc import TaktError, connect

    name = loop or model or ""
    try:
        with connect() as node:
            direct = None
            with node.attach(name, kind="loop" if loop else "model", wait=wait, timeout_us=ATTACH_TIMEOUT_US) as lane:
                period_ns = 0 if closed else lane.period_ns if rate is None else round(1e9 / rate)
                if with_direct:
                    direct = _open_direct(lane, as_json)
                for sentence in benchmark.take_core_and_priority(core, priority):
                    print(f"taktctl bench: refused: {sentence}", file=sys.stderr)
                with _progress(name, seconds, quiet=as_json) as progress, benchmark.without_gc():
                    outcome = benchmark.bench_lane(lane, benchmark.Load(seconds, period_ns), direct, progress)
    except TaktError as error:
        die(str(error), code=_exit_code(error), as_json=as_json)
    found = outcome.as_json()
    direct_found = found.pop("direct", None)
    found |= {"wait": wait, "rt": benchmark.read_rights()}
    if direct_found is not None:
        found["direct"] = direct_found
    if as_json:
        print(json.dumps(found))
    else:
        _show(name, found, outcome)


def _exit_code(error: Exception) -> int:
    from taktd.ipc import NotConnected, NotFound

    return NOTHING_THERE if isinstance(error, NotConnected) else UNUSABLE if isinstance(error, NotFound) else NO


def _open_direct(lane: Lane, as_json: bool) -> Direct:
    """The same file as the executor's, with the lane's shapes."""
    from taktd.daemon.control_client import AnswerNo, NobodyThere, ask
    from taktd.daemon.direct import open_direct
    from taktd.engines.errors import ModelRefused

    try:
        path = next((item["path"] for item in ask("models")["models"] if item["name"] == lane.model), None)
    except (AnswerNo, NobodyThere) as error:
        die(f"--direct needs to know the model's file: {error}", as_json=as_json)
    if path is None:
        die(f"--direct needs the file of model {lane.model!r}, which this taktd does not tell", as_json=as_json)
    shapes = {name: dims for name, (_, dims) in {**lane.input_specs, **lane.output_specs}.items()}
    try:
        return open_direct(str(path), shapes)
    except (ModelRefused, ValueError, OSError) as error:
        die(f"--direct can't load {path} in this process: {error}", as_json=as_json)


@contextmanager
def _progress(name: str, seconds: float, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal (stderr), nothing elsewhere; drawn between blocks only."""
    if quiet or not sys.stderr.isatty():
        yield lambda share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task(f"{name}, {seconds:g} s", total=1.0)
        yield lambda share: bar.update(task, completed=share, refresh=True)


def _show(name: str, found: dict[str, Any], outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("p50", "p90", "p99", "p99.9", "max"):
        table.add_column(f"{heading} µs", justify="right")
    rows = {f"{name}, {found['wait']}": found, "ONNX Runtime direct": found.get("direct")}
    for label, figures in rows.items():
        if figures is not None:
            values = (figures[key] for key in ("p50_us", "p90_us", "p99_us", "p999_us", "max_us"))
            table.add_row(label, *("-" if value is None else f"{value:g}" for value in values))
    console = Console(highlight=False)
    console.print(table)
    rights = found["rt"]
    console.print(
        f"{found['jobs']} jobs at {found['rate_hz']:g} Hz: {found['late']} late, {found['early']} early,"
        f" {found['failed']} failed, {outcome.missed} beats skipped. This client: {rights['policy']}"
        f" {rights['priority']}, cores {rights['affinity']}"
    )
