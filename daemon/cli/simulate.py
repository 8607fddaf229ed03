"""`taktctl simulate`: a configuration under virtual time, by the scheduler that the executors run. Needs no daemon."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from taktd.daemon.admission import InvalidLoop
from taktd.daemon.certification.cost_file import CostsRefused, CostUnknown, read_costs
from taktd.daemon.cli.endings import UNUSABLE, die
from taktd.daemon.config.configuration import ConfigurationRefused, load
from taktd.daemon.schedule.job import EXPIRED, OK, Job
from taktd.daemon.simulation.simulation import rehearse
from taktd.daemon.simulation.workload import workloads

if TYPE_CHECKING:
    from taktd.daemon.recording.story import Outcome

__all__ = ["simulate"]

PICTURED_JOBS: Final = 400  # of each device: more can't be told apart
PICTURED_AFTER_MISS: Final = 100
NS_PER_S: Final = 1_000_000_000


@click.command(name="simulate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True, max=10**6), default=60.0, show_default=True,
              help="Virtual time.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same result.")
@click.option("--costs", "costs_path", type=click.Path(path_type=Path), help="Measured costs, to draw times from.")
@click.option("--best-effort", "best_effort_hz", type=click.IntRange(min=0), default=0, metavar="HZ",
              help="Best-effort jobs per second beside the loops.")  # fmt: skip
@click.option("--worst", is_flag=True, help="Every job takes what admission reckons with, though costs are measured.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="A picture of what ran when.")
def simulate(
    file: Path, seconds: float, seed: int, costs_path: Path | None, best_effort_hz: int, worst: bool, as_json: bool,
    plot_path: Path | None,
) -> None:  # fmt: skip
    """Run a configuration's loops in virtual time and say what they met and missed.

    Each loop is released at its period, up to its jitter later, one release in a hundred later still; a loop without
    measured costs takes its budget each time. Exit code 0 also when deadlines were missed: the result says it.
    """
    began = time.monotonic()
    try:
        configuration = load(file)
        costs = read_costs(costs_path, configuration) if costs_path else {}
        loads = workloads(configuration, costs, best_effort_hz, worst)
    except (ConfigurationRefused, CostsRefused, CostUnknown, InvalidLoop) as error:
        die(str(error), code=UNUSABLE, as_json=as_json)
    span_ns = round(seconds * 1_000_000) * 1_000
    devices: dict[str, dict[str, Any]] = {}
    pictured: list[Outcome] = []
    for index, (device, workload) in enumerate(loads.items()):
        picture = _Picture(device, [task.name for task in workload.tasks] + [queue.name for queue in workload.queues])
        devices[device] = rehearse(workload, max(1, span_ns), seed + index, picture.add if plot_path else None)
        pictured += picture.outcomes
    result = {
        "seconds": span_ns // NS_PER_S if span_ns % NS_PER_S == 0 else seconds,
        "seed": seed,
        "misses": sum(device["misses"] for device in devices.values()),
        "devices": devices,
        "wall_s": round(time.monotonic() - began, 3),
    }
    if plot_path is not None:
        _plot(pictured, plot_path, as_json)
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)


class _Picture:
    """The jobs to draw: the last ones, or those around the first miss."""

    def __init__(self, device: str, names: list[str]) -> None:
        self.device, self.names = device, names
        self.outcomes: deque[Outcome] = deque(maxlen=PICTURED_JOBS)
        self.left = -1  # jobs still to be taken after a miss; -1: none missed yet

    def add(self, job: Job, status: int) -> None:
        from taktd.daemon.recording.story import ANSWERED, EXPIRED_UNRUN, LEFT, RAN, Outcome

        if self.left == 0:
            return
        unrun = EXPIRED_UNRUN if status == EXPIRED else ANSWERED if status == OK else LEFT
        outcome = Outcome(
            self.device, self.names[job.lane], job.lane, job.sequence, bool(job.source.is_loop),
            RAN if job.ended_ns else unrun, job.release_ns, job.arrival_ns, job.deadline_ns, job.started_ns,
            job.ended_ns or job.latest_start_ns, job.cost_ns, job.early, job.late, job.overrun, job.cause,
            job.cause_detail, 1,
        )  # fmt: skip
        self.outcomes.append(outcome)
        if self.left > 0:
            self.left -= 1
        elif outcome.missed and outcome.loop:
            self.left = PICTURED_AFTER_MISS


def _plot(outcomes: list[Outcome], path: Path, as_json: bool) -> None:
    from taktd.daemon.recording.plots import save_gantt

    try:
        save_gantt(outcomes, path, "simulated")
    except ImportError:
        die("no picture: matplotlib is not installed", "pip install 'taktd[plot]'", code=UNUSABLE, as_json=as_json)
    except (OSError, ValueError) as error:
        die(f"{path}: can't be written: {error}", code=UNUSABLE, as_json=as_json)


def _show(result: dict[str, Any]) -> None:
    console = Console()
    for name, device in result["devices"].items():
        console.print(
            f"{name}: {result['seconds']} s simulated, {device['jobs']} jobs, {device['misses']} misses, "
            f"utilisation {_percent(device['utilization_ppm'])}", highlight=False,
        )  # fmt: skip
        table = Table(caption="times in µs, counted from the nominal arrival")
        for column in ("", "jobs", "misses", "early", "p50", "p99", "p99.9", "max", "deadline", "used"):
            table.add_column(column, justify="right" if column else "left")
        for row in (*device["loops"], *device["best_effort"]):
            times = [row["response_ns"][key] for key in ("p50", "p99", "p999", "max")] + [row["deadline_ns"]]
            table.add_row(
                row["name"], *(str(row[key]) for key in ("jobs", "misses", "early")),
                *(str(ns // 1_000) if ns else "" for ns in times), _percent(row["utilization_ppm"]),
            )  # fmt: skip
        console.print(table)
    console.print(f"{result['wall_s']} s of work.", highlight=False)


def _percent(ppm: int) -> str:
    return f"{ppm // 10_000}.{ppm // 1_000 % 10} %"
