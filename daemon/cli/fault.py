"""`taktctl fault inject|list`: make a simulated device fail, where the configuration says `allow_faults: true`."""

from __future__ import annotations

import json
from typing import Any

import click

from taktd.daemon.cli.endings import NO, NOTHING_THERE, UNUSABLE, die
from taktd.daemon.control_client import AnswerNo, NobodyThere, ask
from taktd.daemon.doors.control_door import ControlError
from taktd.daemon.supervision.fault_commands import FORMS, parse_fault

__all__ = ["fault", "said"]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")


def _ask(op: str, as_json: bool, **arguments: Any) -> dict[str, Any]:
    try:
        return ask(op, **arguments)
    except NobodyThere as error:
        hint = "is taktd running? start it, or set TAKTD_RUNTIME_DIR to the folder it uses"
        die(str(error), hint, code=NOTHING_THERE, as_json=as_json)
    except AnswerNo as error:
        die(str(error), error.hint, code=NO, as_json=as_json)


def said(fault: dict[str, Any]) -> str:
    kind = f"slow={fault['factor']}x" if fault["kind"] == "slow" else fault["kind"]
    if fault["kind"] == "none":
        return f"{fault['device']}: no fault"
    many = "until cleared" if fault["runs"] == 0 else "one run" if fault["runs"] == 1 else f"{fault['runs']} runs"
    return f"{fault['device']}: {kind}, {many}"


@click.group(name="fault", no_args_is_help=True)
def fault() -> None:
    """Faults on simulated devices (`driver: sim`), as a GPU would show them.

    Exit code 0: done; 1: refused; 2: unusable input; 3: no taktd.
    """


@fault.command(name="inject")
@click.argument("device")
@click.argument("kind")
@click.option("--runs", type=click.IntRange(0, 65535), help="How many runs it hits, 0: until cleared. Default: 1.")
@json_option
def inject(device: str, kind: str, runs: int | None, as_json: bool) -> None:
    """From its next run on, let DEVICE fail by KIND: lost, oom, slow=10x, nan, hang, error; none ends it.

    `slow` lasts until cleared, the others hit one run; after `lost` only another process can use the device.
    """
    try:
        parse_fault(kind, runs)
    except ControlError as error:
        die(str(error), error.hint or FORMS, code=UNUSABLE, as_json=as_json)
    arguments: dict[str, Any] = {"device": device, "kind": kind} | ({} if runs is None else {"runs": runs})
    answer = _ask("fault.inject", as_json, **arguments)
    print(json.dumps(answer) if as_json else said(answer))


@fault.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """What was injected last on each simulated device."""
    answer = _ask("fault.list", as_json)
    if as_json:
        print(json.dumps(answer))
    else:
        for one in answer["faults"]:
            print(said(one))
