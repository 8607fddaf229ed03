"""The demo from start to end: a taktd of its own, the control program as its client, a display, a verdict.

Called by `taktctl demo`. The control loop runs in another process (`control`); this one only starts, draws and sums up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from taktd.daemon.benchmark import read_rights
from taktd.daemon.demo import drawing
from taktd.daemon.foreground import Foreground, end_with_parent

LOOP: Final = "balance"
MODEL: Final = Path(__file__).resolve().with_name("pendulum.onnx")
PUSH_N: Final = 3.5
PUSH_S: Final = 0.1
CLIENT_PRIORITY: Final = 70
"""The executor has 80."""

CONFIGURATION: Final = """\
# The demo's configuration: one network, one loop at 1 kHz.
node: {{name: demo}}
devices:
  cpu0: {{driver: cpu, cores: [{executor_core}], priority: 80}}
models:
  pendulum: {{path: {model}}}
loops:
  {loop}: {{model: pendulum, device: cpu0, period: 1ms, deadline: 1ms, jitter: 200us, criticality: hard}}
"""


def cores() -> tuple[int, int | None]:
    """A core for the executor and, where there are two, one for the control program."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[-1], usable[-2] if len(usable) > 1 else None


def run_demo(seconds: float, console: Console, *, quiet: bool) -> dict[str, Any]:
    """Run it and return the control program's last message, with `ready_s` and the executor's rights in its result.

    `quiet` shows nothing. Raises `StartFailed` if taktd does not start, `RuntimeError` if the control program fails.
    """
    executor_core, client_core = cores()
    pushes = [(round(seconds * share, 3), sign * PUSH_N) for share, sign in ((0.45, 1), (0.72, -1))]
    plan = {
        "seconds": seconds,
        "pushes": pushes if seconds >= 10 else [],
        "push_s": PUSH_S,
        "loop": LOOP,
        "model_path": str(MODEL),
        "core": client_core,
        "priority": CLIENT_PRIORITY,
    }
    configuration = CONFIGURATION.format(executor_core=executor_core, model=json.dumps(str(MODEL)), loop=LOOP)
    with Foreground(configuration) as daemon:
        with control_program(plan, daemon) as process:
            end = _follow(process, seconds, console, quiet)
        if end is None:
            said = daemon.log or "nothing"
            raise RuntimeError(f"the control program ended with exit code {process.returncode}; taktd said:\n{said}")
        end["result"]["ready_s"] = round(daemon.ready_s, 2)
        end["result"]["executor_rt"] = next((read_rights(pid) for pid in daemon.executor_pids()), None)
    return end


@contextmanager
def control_program(plan: dict[str, Any], daemon: Foreground) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "taktd.daemon.demo.control", json.dumps(plan)]
    process = subprocess.Popen(
        command,
        env=dict(daemon.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _follow(process: subprocess.Popen[str], seconds: float, console: Console, quiet: bool) -> dict[str, Any] | None:
    """Read the control program's messages until its last one, showing them on the way."""
    assert process.stdout is not None
    messages = (json.loads(line) for line in process.stdout)
    if quiet or not console.is_terminal:
        return _print_lines(messages, console, quiet)
    braille = "utf" in (console.encoding or "").lower()
    latencies: list[float] = []
    end = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for message in messages:
            if message["kind"] == "end":
                end = message
                break
            latencies.append(message["max_us"] or 0.0)
            live.update(picture_of(message, latencies, seconds, braille), refresh=True)
    return end


def _print_lines(messages: Iterator[dict[str, Any]], console: Console, quiet: bool) -> dict[str, Any] | None:
    """For a pipe or a file: one line per second."""
    second = -1
    for message in messages:
        if message["kind"] == "end":
            return message
        if not quiet and int(message["time_s"]) != second:
            second = int(message["time_s"])
            console.print(
                f"{second:3d} s  {message['phase']:<12}  angle {_degrees(message):+7.1f}°"
                f"  cart {message['position_m']:+5.2f} m  p50 {_us(message['p50_us'])}  late {message['late']}",
                highlight=False,
            )
    return None


def picture_of(frame: dict[str, Any], latencies: list[float], seconds: float, braille: bool) -> RenderableType:
    """One frame of the live display."""
    colour = {"balanced": "green", "pushed": "bold yellow", "recovering": "yellow"}.get(frame["phase"], "cyan")
    machine = Text(drawing.draw(frame, braille), style=colour, no_wrap=True)
    state = Text.assemble(
        (f"{frame['phase']:<12}", colour),
        f" angle {_degrees(frame):+7.1f}°   cart {frame['position_m']:+5.2f} m   force {frame['force_n']:+6.1f} N",
    )
    late_style = "red" if frame["late"] else "green"
    timing = Text.assemble(
        f"tick {frame['ticks']:>6}   late ",
        (f"{frame['late']}", late_style),
        f"   observation to action: p50 {_us(frame['p50_us'])}, max {_us(frame['max_us'])}",
    )
    bars = Text(drawing.sparkline(latencies, drawing.COLUMNS) if braille else "", style="dim")
    title = f"taktd demo   {frame['time_s']:4.1f} of {seconds:g} s"
    return Panel(Group(machine, state, timing, bars), title=title, width=drawing.COLUMNS + 4)


def summary(result: dict[str, Any]) -> RenderableType:
    """The table at the end."""
    table = Table(title="1 kHz control loop through taktd", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("")
    for column in ("p50", "p99", "p99.9", "max"):
        table.add_column(f"{column} µs", justify="right")
    names = ("p50_us", "p99_us", "p999_us", "max_us")
    table.add_row("through the lane (observation to action)", *(_plain(result[name]) for name in names))
    table.add_row("ONNX Runtime called directly, interleaved", *(_plain(result["direct_" + name]) for name in names))
    lines = [
        f"{result['ticks']} ticks, {result['late']} late, {result['missed']} skipped by this machine;"
        f" {result['direct_runs']} actions compared with direct ones, {result['different']} differ",
        f"executor: {_rights(result['executor_rt'])}; control program: {_rights(result['rt'])}",
    ]
    if result["rt"]["policy"] != "fifo":
        lines.append("Without real-time rights other programs can delay a tick. As root, or installed, taktd has them.")
    verdict = (
        Text("The pendulum fell.", style="bold red")
        if result["fell"]
        else Text(f"Upright after {result['stood_at_s']:.1f} s, and it stayed so.", style="bold green")
    )
    return Group(table, Text("\n".join(lines)), verdict)


def _rights(rights: dict[str, Any] | None) -> str:
    if rights is None:
        return "unknown"
    where = f"core {','.join(map(str, rights['affinity']))}"
    what = f"SCHED_FIFO {rights['priority']}" if rights["policy"] == "fifo" else "no real-time rights"
    return f"{what}, {where}"


def _degrees(frame: dict[str, Any]) -> float:
    return float(frame["lean_rad"]) * 57.29577951308232


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} µs"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
