"""`taktctl selftest`: a GPU and taktd's use of it, tried and measured on this machine. Needs no daemon."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click

_STYLE: Final = {"passed": "green", "failed": "bold red", "skipped": "cyan"}
NOTHING: Final = 3


@click.command(name="selftest")
@click.option("--device", "selector", default="0", show_default=True, help="UUID, PCI address, index, or gpuN.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
@click.option(
    "--runs", type=click.IntRange(10, 10_000_000), default=100_000, show_default=True, help="Of the jitter step."
)
def selftest(selector: str, as_json: bool, runs: int) -> None:
    """Try a GPU: driver, engines against the CPU, launch overhead, copies, jitter, a broken context.

    Takes a minute or two and uses the GPU all the time: not beside admitted loops. Exit code 0: nothing failed; 1:
    something did; 3: there is no CUDA device here. The report is made to be sent.
    """
    from taktd.drivers.cuda_probe import probe
    from taktd.drivers.cuda_selection import select
    from taktd.drivers.fault import DeviceFault, FaultKind

    try:
        wanted = selector.removeprefix("gpu") if selector[3:].isdigit() else selector
        info = select(probe(wanted), wanted)  # others, where loops may be served, are left alone
    except DeviceFault as fault:
        none = fault.kind in (FaultKind.DRIVER_MISSING, FaultKind.NO_DEVICE)
        _nothing(f"skipped: no CUDA device ({fault})" if none else f"failed: {fault}", as_json, skipped=none)
        raise SystemExit(NOTHING if none else 1) from fault
    if info.fault:
        _nothing(f"failed: {info.name} does not work: {info.fault}", as_json, skipped=False)
        raise SystemExit(1)
    from taktd.daemon.selftest.examination import examine

    quiet = as_json or not sys.stderr.isatty()
    report = examine(info, runs=runs, say=lambda text: None if quiet else print(f"… {text}", file=sys.stderr))
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _show(report.as_json())
    raise SystemExit(0 if report.passed else 1)


def _nothing(text: str, as_json: bool, *, skipped: bool) -> None:
    print(json.dumps({"passed": False, "skipped": skipped, "text": text, "steps": []}) if as_json else text)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    device, machine = found["device"], found["machine"]
    if found["simulated"]:
        console.print("[bold yellow]A simulated driver: no figure here is a GPU's.[/]")
    console.print(f"[bold]{device['name']}[/]  {device['uuid']}  PCI {device['pci']}  {device['runtime']}")
    console.print(f"{machine['system']}, Python {machine['python']}, taktd {found['taktd']}, {found['date']}")
    console.print(f"scheduling {machine['scheduling']}; the card: {_spelled(found['card']['after'])}\n")
    for step in found["steps"]:
        style = _STYLE[step["outcome"]]
        console.print(f"[{style}]{step['outcome']:8}[/] {step['name']}" + (f": {step['text']}" if step["text"] else ""))
        for name, value in step["figures"].items():
            console.print(f"           {name}: {_spelled(value)}")


def _spelled(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_spelled(inner)}" for name, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
