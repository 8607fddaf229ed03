"""`taktctl record`, `replay`, `why`, `trace`: what the schedulers saw and decided, and what became of each job.

Where no FILE is given, the running taktd's flight recorder is asked: `record` gives its segments' names, then each
of them.
"""

from __future__ import annotations

import base64
import difflib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click

from taktd.daemon.cli.endings import NO, NOTHING_THERE, UNUSABLE, die
from taktd.daemon.config.durations import NS_PER_MS, NS_PER_S, format_duration, parse_duration
from taktd.daemon.control_client import AnswerNo, NobodyThere, ask
from taktd.daemon.recording.record import FILE_BYTES_MAX, Recording, RecordingRefused, read_recording, write_recording
from taktd.daemon.recording.replay import Difference
from taktd.daemon.recording.replay import replay as replay_recording
from taktd.daemon.recording.scheduler_state import StateMalformed
from taktd.daemon.recording.story import Incident, Outcome, find_incident, last_jobs, tell
from taktd.daemon.schedule.cause import NAMES

__all__ = ["record", "replay", "trace", "why"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
NAME_COLUMNS: Final = 16  # of 80: the rest of a longer name is left out
file_path = click.Path(path_type=Path)
T = TypeVar("T")


def _read(path: Path, as_json: bool) -> Recording:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        die(f"{path} can't be read: {(error.strerror or str(error)).lower()}", code=UNUSABLE, as_json=as_json)
    if len(data) > FILE_BYTES_MAX:
        die(f"{path} is longer than {FILE_BYTES_MAX} bytes: no recording is", code=UNUSABLE, as_json=as_json)
    try:
        return read_recording(data)
    except RecordingRefused as refused:
        die(f"{path} {refused}", code=UNUSABLE, as_json=as_json)


def _fetch(as_json: bool, instead: str = "") -> Recording:
    """The running taktd's last minutes. instead: how the command is given a recording, for a message."""
    recording: Recording = []
    try:
        for name in ask("record")["segments"]:
            try:
                data = base64.b64decode(ask("record", segment=name)["data"])
            except AnswerNo:
                continue  # the oldest may be gone by now
            recording += read_recording(data, growing=True)
    except NobodyThere as error:
        hint = f"is taktd running? start it, or set TAKTD_RUNTIME_DIR to the folder it uses{instead}"
        die(str(error), hint, code=NOTHING_THERE, as_json=as_json)
    except AnswerNo as error:
        die(str(error), error.hint, code=NO, as_json=as_json)
    except RecordingRefused as refused:
        die(f"the running taktd's recording {refused}", code=NO, as_json=as_json)
    return recording


def _understood(call: Callable[[], T], as_json: bool) -> T:
    """The call's result; a recording whose events can't have happened is unusable input."""
    try:
        return call()
    except StateMalformed as error:
        die(f"the recording can't be replayed: {error}", code=UNUSABLE, as_json=as_json)


def _cant_write(path: Path, error: Exception, as_json: bool) -> NoReturn:
    die(f"{path} can't be written: {getattr(error, 'strerror', None) or error}", code=UNUSABLE, as_json=as_json)


@click.command(name="record")
@click.option("-o", "--output", type=file_path, required=True, metavar="FILE", help="Where to write the recording.")
@json_option
def record(output: Path, as_json: bool) -> None:
    """Save what the flight recorder has: the last minutes of every device's events and decisions.

    Exit code 0: written; 2: FILE can't be written; 3: no taktd.
    """
    recording = _fetch(as_json)
    try:
        with output.open("wb") as file:
            count = write_recording(file, recording)
    except OSError as error:
        _cant_write(output, error, as_json)
    devices = sorted({section.device for section in recording})
    if as_json:
        print(json.dumps({"file": str(output), "records": count, "devices": devices}))
    else:
        print(f"{output}: {count} records of {', '.join(devices) or 'no device'}")


@click.command(name="replay")
@click.argument("file", type=file_path)
@json_option
def replay(file: Path, as_json: bool) -> None:
    """Run the recorded events through the scheduler again and compare every decision.

    Exit code 0: identical; 1: not, the first difference is shown; 2: no usable recording.
    """
    recording = _read(file, as_json)
    done = _understood(lambda: replay_recording(recording), as_json)
    if as_json:
        print(json.dumps({
            "identical": done.difference is None, "records": done.records, "decisions": done.decisions,
            "difference": None if done.difference is None else _difference_json(done.difference),
        }))  # fmt: skip
    elif done.difference is None:
        print(f"identical: {done.decisions} decisions from {done.records} records")
    else:
        print(done.difference.text())
    raise SystemExit(0 if done.difference is None else 1)


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {field: getattr(difference, field) for field in difference.__slots__}


@click.command(name="why")
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--last-miss", is_flag=True, help="The last missed deadline, whichever job it was.")
@click.option("--file", "file", type=file_path, help="A recording, instead of the running taktd.")
@json_option
def why(job: str | None, last_miss: bool, file: Path | None, as_json: bool) -> None:
    """Say why a job missed its deadline. JOB is NAME:SEQUENCE, a loop's (or model's) name and the job's number.

    Numbers begin again whenever a client attaches: of several jobs with one number the latest is meant.

    Exit code 0: told; 2: unusable input; 3: no taktd, or the recording has no such job (or no miss).
    """
    if bool(job) is last_miss:
        die("name either a job or --last-miss", "`taktctl why --last-miss`, `taktctl why go1_walk:1234`", code=UNUSABLE,
            as_json=as_json)  # fmt: skip
    name, _, number = (job or "").rpartition(":")
    if job and not (name and number.isascii() and number.isdigit()):
        die(f"{job!r} is no job", "write NAME:SEQUENCE, such as go1_walk:1234", code=UNUSABLE, as_json=as_json)
    recording = _read(file, as_json) if file else _fetch(as_json, "; a saved recording: --file FILE")
    sequence = int(number) if job else None
    incident = _understood(lambda: find_incident(recording, name or None, sequence), as_json)
    if incident is None:
        if not job:
            hint = "it keeps the last minutes only"
            die("the recording has no missed deadline", hint, code=NOTHING_THERE, as_json=as_json)
        jobs = _understood(lambda: last_jobs(recording), as_json)
        die(f"the recording has no job {job}", _nearest(name, jobs), code=NOTHING_THERE, as_json=as_json)
    when = _when(incident, live=file is None)
    if as_json:
        print(json.dumps({"text": tell(incident), "when": when, "job": _outcome_json(incident.job),
                          "namesakes": incident.namesakes,
                          "before": [_outcome_json(o) for o in incident.before],
                          "after": [_outcome_json(o) for o in incident.after]}))  # fmt: skip
    else:
        _show(incident, when)


def _nearest(name: str, jobs: dict[str, int]) -> str:
    """What the person may have meant. jobs: the last number of each name."""
    if name in jobs:
        return f"it keeps the last minutes only; the last job of {name} in it is {name}:{jobs[name]}"
    if not jobs:
        return "it keeps the last minutes only, and nothing ran"
    close = difflib.get_close_matches(name, jobs, n=1)
    if close:
        return f"did you mean {close[0]}? Its last job in it is {close[0]}:{jobs[close[0]]}"
    return f"it has jobs of {', '.join(sorted(jobs)[:20])}"


def _when(incident: Incident, *, live: bool) -> str:
    """Which job was meant, by its time: of day where the daemon runs on this machine now, else from the end."""
    job = incident.job
    if live:
        ago_ns = time.monotonic_ns() - job.release_ns
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - ago_ns / NS_PER_S))
        said = f"{job.title} was released at {clock}, {ago_ns / NS_PER_S:.1f} s ago."
    else:
        before_ns = max(0, incident.end_ns - job.release_ns)
        said = f"{job.title} was released {before_ns / NS_PER_S:.3f} s before the recording's end."
    if incident.namesakes:
        times = "once" if incident.namesakes == 1 else f"{incident.namesakes} times"
        said += f" Its number was used {times} before, by clients that attached earlier: this is the latest."
    return said


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {field: getattr(outcome, field) for field in outcome.__slots__} | {"cause": NAMES[outcome.cause]}


def _show(incident: Incident, when: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    job = incident.job
    console = Console(highlight=False)
    console.print(tell(incident), markup=False)
    console.print(when, markup=False)
    title = f"{job.device}, ms from its nominal arrival"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=NAME_COLUMNS)
    for column in ("job", "released", "started", "ended", "deadline"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for other in (*incident.before, job, *incident.after):

        def since(t_ns: int) -> str:
            return f"{(t_ns - job.arrival_ns) / NS_PER_MS:.3f}" if t_ns else "-"

        notes = [word for word, given in (
            ("best effort", not other.loop), ("early", other.early), ("overrun", other.overrun), ("late", other.late),
            (other.kind, other.kind != "ran"), (f"batch of {other.batch}", other.batch > 1),
        ) if given]  # fmt: skip
        times = (since(other.release_ns), since(other.started_ns), since(other.ended_ns), since(other.deadline_ns))
        style = "bold red" if other is job and job.missed else "bold" if other is job else ""
        table.add_row(escape(other.name), str(other.sequence), *times, ", ".join(notes), style=style)
    console.print(table)


def _span(value: str) -> int:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command(name="trace")
@click.argument("file", type=file_path, required=False)
@click.option("-o", "--output", type=file_path, metavar="TRACE.json", help="Chrome trace JSON, for ui.perfetto.dev.")
@click.option("--plot", type=file_path, metavar="OUT.png", help="A Gantt chart of each device.")
@click.option("--last", default="200ms", show_default=True, help="How much of the end the chart shows.")
@json_option
def trace(file: Path | None, output: Path | None, plot: Path | None, last: str, as_json: bool) -> None:
    """A recording (of the running taktd, where no FILE is given) as a timeline, a picture, or both.

    Exit code 0: written; 2: unusable input or output; 3: no taktd.
    """
    if output is None and plot is None:
        die("nothing to write", "give -o TRACE.json, --plot OUT.png, or both", code=UNUSABLE, as_json=as_json)
    span_ns = _span(last)
    recording = _read(file, as_json) if file else _fetch(as_json, "; a saved recording: taktctl trace FILE")
    answer: dict[str, Any] = {}
    if output is not None:
        events = _understood(lambda: _write_trace(recording, output, as_json), as_json)
        answer |= {"trace": str(output), "events": events}
    if plot is not None:
        jobs = _understood(lambda: _plot(recording, plot, span_ns, as_json), as_json)
        answer |= {"plot": str(plot), "jobs": jobs}
    if as_json:
        print(json.dumps(answer))
    else:
        print(", ".join(f"{key}: {value}" for key, value in answer.items()))


def _write_trace(recording: Recording, path: Path, as_json: bool) -> int:
    from taktd.daemon.recording.timeline import write_trace

    try:
        with path.open("w", encoding="utf-8") as stream:
            return write_trace(recording, stream)
    except OSError as error:
        _cant_write(path, error, as_json)


def _plot(recording: Recording, path: Path, span_ns: int, as_json: bool) -> int:
    from taktd.daemon.recording.plots import last_outcomes, save_gantt

    outcomes = last_outcomes(recording, span_ns)
    try:
        save_gantt(outcomes, path, f"the last {format_duration(span_ns)}")
    except ImportError:
        die("no picture: matplotlib is not installed", "pip install 'taktd[plot]'", code=UNUSABLE, as_json=as_json)
    except (OSError, ValueError) as error:
        _cant_write(path, error, as_json)
    return len(outcomes)
