"""`taktctl top`: devices, loops with a sparkline of their latency, misses and causes, clients; live in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from taktd.daemon.cli.endings import NOTHING_THERE, die
from taktd.daemon.control_client import AnswerNo, NobodyThere, ask

if TYPE_CHECKING:
    from rich.console import RenderableType

SPARK: Final = " ▁▂▃▄▅▆▇█"
HISTORY: Final = 32
INTERVAL_S_MIN: Final = 0.1


def sparkline(values: list[float]) -> str:
    """One block a value, the largest being full; a space where there was nothing."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(SPARK[0 if v <= 0 else max(1, round(v / top * (len(SPARK) - 1)))] for v in values)


class History:
    """What changed between two looks: jobs a second, the mean latency of the new jobs."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int, float]] = {}
        self.latencies: dict[str, deque[float]] = {}
        self.rates: dict[str, float] = {}

    def take(self, name: str, statistics: dict[str, Any], now_s: float) -> None:
        total = statistics["total"]
        jobs, sum_us = total["count"], total["sum_us"]
        then_s, old_jobs, old_sum_us = self._last.get(name, (now_s, jobs, sum_us))
        new = jobs - old_jobs
        self._last[name] = (now_s, jobs, sum_us)
        self.rates[name] = new / (now_s - then_s) if now_s > then_s else 0.0
        self.latencies.setdefault(name, deque(maxlen=HISTORY)).append((sum_us - old_sum_us) / new if new > 0 else 0.0)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        left = column in ("loop", "model", "device", "executor", "client", "latency", "misses", "state")
        table.add_column(column, justify="left" if left else "right")
    return table


def picture(status: dict[str, Any], loops: dict[str, Any], models: dict[str, Any], history: History) -> RenderableType:
    """One screen."""
    from rich.console import Group
    from rich.markup import escape

    ready = "[green]ready[/]" if status["ready"] else "[bold red]not ready[/]"
    promise = "[green]certified[/]" if status["certified"] else "[yellow]not certified[/]"
    head = f"{escape(status['node'])}: {ready}, {promise}, epoch {status['epoch']}, {status['clients']} clients"
    executors = _table("executor", "state", "pid", "restarts", "MiB")
    for executor in status["executors"]:
        color = "green" if executor["ready"] else "bold red"
        executors.add_row(
            escape(executor["device"]), f"[{color}]{executor['state']}[/]", str(executor["pid"] or "-"),
            str(executor["restarts"]), f"{executor['rss_bytes'] / 2**20:.0f}",
        )  # fmt: skip
    if gateway := status.get("gateway"):
        color = "green" if gateway["ready"] else "bold red"
        executors.add_row(
            "gateway", f"[{color}]{gateway['state']}[/]", str(gateway["pid"] or "-"), str(gateway["restarts"]),
            f"{gateway.get('rss_bytes', 0) / 2**20:.0f}",
        )  # fmt: skip
    return Group(head, "", executors, "", _loops(loops, history), "", _models(models, history))


def _loops(loops: dict[str, Any], history: History) -> Any:
    from rich.markup import escape

    table = _table("loop", "device", "client", "jobs/s", "p50 µs", "p99 µs", "latency", "late", "expired", "misses")
    for loop in loops["loops"]:
        name, counters, client = loop["name"], loop["statistics"], loop["client"]
        if counters is None:
            table.add_row(escape(name), escape(loop["device"]), "-", *[""] * 7)
            continue
        causes = ", ".join(f"{cause} {n}" for cause, n in counters["misses"].items() if n)
        table.add_row(
            escape(name), escape(loop["device"]), escape(f"{client['name']} ({client['pid']})") if client else "-",
            f"{history.rates.get(name, 0.0):.0f}", f"{counters['total']['p50_us']:.0f}",
            f"{counters['total']['p99_us']:.0f}", f"[cyan]{sparkline(list(history.latencies.get(name, ())))}[/]",
            str(counters["late"]), str(counters["expired"]), f"[red]{escape(causes)}[/]" if causes else "",
        )  # fmt: skip
    return table


def _models(models: dict[str, Any], history: History) -> Any:
    from rich.markup import escape

    table = _table("model", "device", "lanes", "jobs/s", "p50 µs", "p99 µs", "latency")
    for model in models["models"]:
        counters = model.get("statistics")
        if counters:
            key = _model_key(model)
            table.add_row(
                escape(model["name"]), escape(model["device"] or "-"), str(model["lanes"]),
                f"{history.rates.get(key, 0.0):.0f}", f"{counters['total']['p50_us']:.0f}",
                f"{counters['total']['p99_us']:.0f}",
                f"[cyan]{sparkline(list(history.latencies.get(key, ())))}[/]",
            )  # fmt: skip
    return table


Look = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # status, loops, models


def look(history: History) -> Look:
    """What the daemon says now. Raises NobodyThere, AnswerNo."""
    status, loops, models = ask("status"), ask("loops"), ask("models")
    now_s = time.monotonic()
    for loop in loops["loops"]:
        if loop["statistics"] is not None:
            history.take(loop["name"], loop["statistics"], now_s)
    for model in models["models"]:
        if model.get("statistics"):
            history.take(_model_key(model), model["statistics"], now_s)
    return status, loops, models


def _model_key(model: dict[str, Any]) -> str:
    return f"model {model['name']}"


def snapshot(looked: Look, history: History) -> dict[str, Any]:
    """The screen as a program reads it; rates and mean latencies are since the look before."""
    status, loops, models = looked

    def lately(key: str) -> dict[str, float]:
        latencies = history.latencies.get(key)
        return {"jobs_per_s": history.rates.get(key, 0.0), "latency_us": latencies[-1] if latencies else 0.0}

    return {
        **{key: status[key] for key in ("node", "ready", "certified", "epoch", "clients", "executors")},
        "gateway": status.get("gateway"),
        "loops": [{**loop, **lately(loop["name"])} for loop in loops["loops"]],
        "models": [{**model, **lately(_model_key(model))} for model in models["models"]],
    }


def frames(history: History) -> Iterator[RenderableType]:
    """A screen for each look. Raises NobodyThere, AnswerNo."""
    while True:
        yield picture(*look(history), history)


@click.command()
@click.option("--interval", type=float, default=1.0, show_default=True, help="Seconds between two looks.")
@click.option("--count", type=int, default=0, help="Stop after so many looks. Default: at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one look as JSON, with the rates over one interval.")
def top(interval: float, count: int, as_json: bool) -> None:
    """Live view: devices, loops with a sparkline of their latency, misses and causes, clients.

    The executors are not asked: what they write anyway is read. Exit code 3: no taktd.
    """
    interval_s = max(INTERVAL_S_MIN, interval)
    try:
        if as_json:
            history = History()
            look(history)
            time.sleep(interval_s)
            click.echo(json.dumps(snapshot(look(history), history)))
        else:
            _show(interval_s, count)
    except NobodyThere as error:
        die(
            str(error), "is taktd running? start it, or set TAKTD_RUNTIME_DIR to the folder it uses", code=NOTHING_THERE
        )
    except AnswerNo as error:
        die(str(error), error.hint, code=NOTHING_THERE)
    except KeyboardInterrupt:
        pass


def _show(interval_s: float, count: int) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    with Live(console=console, auto_refresh=False, screen=sys.stdout.isatty()) as live:
        for number, frame in enumerate(frames(History()), 1):
            live.update(frame, refresh=True)
            if number == count:
                return
            time.sleep(interval_s)
