"""`taktctl doctor`: what keeps this machine from being deterministic, and the command that mends it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from taktd.daemon.doctor import wakeup
from taktd.daemon.doctor.examination import Examination, examine
from taktd.daemon.doctor.finding import AS_ROOT, LEVELS, Finding, Subject
from taktd.daemon.doctor.gpu import GpuReadings, find_nvml, read_gpus
from taktd.daemon.doctor.tree import Tree, format_cores, parse_cores

DEFAULT_CONFIGURATION: Final = "/etc/taktd/taktd.yaml"
ANSWER_S_MAX: Final = 3.0
_STYLE: Final = {"ok": "green", "warning": "yellow", "fail": "bold red", "unknown": "cyan"}


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@click.option("--sysroot", type=click.Path(path_type=Path), default=Path("/"), help="Examine a recorded tree instead.")
@click.option(
    "--config", type=click.Path(path_type=Path), help=f"Default: the running taktd's, else {DEFAULT_CONFIGURATION}."
)
@click.option("--cores", metavar="LIST", help='Cores of the executors, as "2-3,6", instead of the configuration\'s.')
@click.option(
    "--seconds", type=click.FloatRange(0, wakeup.SECONDS_MAX), default=5.0, show_default=True,
    help="How long to measure wake-ups on the first of these cores; 0: not at all.",
)  # fmt: skip
def doctor(as_json: bool, sysroot: Path, config: Path | None, cores: str | None, seconds: float) -> None:
    """Say what keeps this machine from being deterministic, why it matters and what mends it.

    Changes nothing. Exit code 0: nothing failed (warnings and unknowns may be left); 1: something failed; 2: unusable
    input. Below --sysroot only files are read: nothing is measured, and no GPU is asked.
    """
    if not sysroot.is_dir():
        print(f"taktctl: --sysroot {sysroot} is not a folder: name the root of a recorded tree", file=sys.stderr)
        raise SystemExit(2)
    tree = Tree(sysroot)
    status = _ask_daemon() if tree.is_live else None
    subject, problem = _subject(tree, config, status)
    if cores is not None:
        if not parse_cores(cores):
            print(f"taktctl: --cores {cores!r} is not a list of cores: write it like 2-3,6", file=sys.stderr)
            raise SystemExit(2)
        subject = replace(subject, cores=parse_cores(cores), source="--cores")
    examination = examine(tree, subject, _readings(tree))
    findings = list(examination.findings)
    if problem is not None:
        findings.insert(0, problem)
    if tree.is_live and seconds > 0:
        findings.append(_measured(tree, subject, seconds, quiet=as_json or not sys.stderr.isatty()))
    examination = Examination(subject, tuple(findings))
    if as_json:
        print(json.dumps(examination.as_json()))
    else:
        _show(examination)
    raise SystemExit(0 if examination.fit else 1)


def _ask_daemon() -> dict[str, Any] | None:
    """The running taktd's status; None where nobody answers."""
    from taktd.daemon.control_client import AnswerNo, NobodyThere, ask

    try:
        return ask("status", answer_s_max=ANSWER_S_MAX)
    except (NobodyThere, AnswerNo):
        return None


def _subject(tree: Tree, path: Path | None, status: dict[str, Any] | None) -> tuple[Subject, Finding | None]:
    """What the configuration asks for; with a finding where it can't be used (absent by default is no problem)."""
    from taktd.daemon.config.configuration import ConfigurationRefused, load

    processes, cores = None, frozenset[int]()
    file = path if path is not None else tree.locate(DEFAULT_CONFIGURATION)
    if status is not None:
        theirs = Path(status["configuration"])
        if path is None:
            file = theirs
        if file is not None and file.resolve() == theirs.resolve():
            processes, cores = _processes_and_cores(status)
    if file is None or (path is None and not file.exists()):
        return Subject(cores=cores, processes=processes), None
    try:
        configuration = load(file)
    except ConfigurationRefused as refused:
        first = str(refused.errors[0]) if refused.errors else str(refused)
        why = "the daemon will not start with it" + (", and the doctor doesn't know which cores matter" * (not cores))
        problem = Finding("configuration", "fail", first, why, f"taktctl check {file}")
        return Subject(cores=cores, processes=processes), problem
    devices = configuration.devices.values()
    return (
        Subject(
            cores=frozenset(core for device in devices for core in device.cores),
            priority=max(device.priority for device in devices),
            gpu=any(device.driver not in ("cpu", "sim") for device in devices),
            source=str(file),
            processes=processes,
        ),
        None,
    )


def _processes_and_cores(status: dict[str, Any]) -> tuple[frozenset[int], frozenset[int]]:
    """Pids of the daemon and its executors, and the cores that these have, as long as they were given some."""
    executors = status["executors"]
    pids = {status["pid"], *(executor[key] for executor in executors for key in ("pid", "serving_pid"))}
    cores = {core for executor in executors for core in executor["rights"].get("affinity", ())}
    return frozenset(pid for pid in pids if pid), frozenset(cores)


def _readings(tree: Tree) -> GpuReadings | None:
    if not tree.is_live:
        return None
    nvml = find_nvml()
    return None if nvml is None else read_gpus(nvml)


def _measured(tree: Tree, subject: Subject, seconds: float, *, quiet: bool) -> Finding:
    online = parse_cores(tree.text("/sys/devices/system/cpu/online"))
    usable = (subject.cores & online) or online
    core = min(usable) if subject.cores else max(usable, default=0)
    try:
        if quiet:
            return wakeup.judge(wakeup.measure_apart(core, subject.priority, seconds))
        from rich.console import Console

        with Console(stderr=True).status(f"measuring wake-ups on core {core} for {seconds:g} s"):
            return wakeup.judge(wakeup.measure_apart(core, subject.priority, seconds))
    except (OSError, RuntimeError) as error:
        why = "the measurement runs as a process of its own"
        return Finding("wake-up", "unknown", f"could not measure: {error}", why, AS_ROOT)


def _show(examination: Examination) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    cores = format_cores(examination.subject.cores) or "not named"
    console.print(f"[bold]executor cores: {cores}[/bold]   {escape(examination.subject.source)}")
    for finding in examination.findings:
        style = _STYLE[finding.level]
        console.print(f"[{style}]{finding.level:<8}[/{style}] [bold]{finding.check}[/bold]  {escape(finding.evidence)}")
        if finding.level != "ok":
            if finding.why:
                console.print(f"         why:  {escape(finding.why)}")
            if finding.mend:
                console.print(f"         mend: {escape(finding.mend)}")
    counts = ", ".join(f"{examination.count(level)} {level}" for level in LEVELS)
    console.print(f"\n{counts}. " + ("Nothing failed." if examination.fit else "[bold]Mend what failed first.[/bold]"))
