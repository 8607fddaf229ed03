"""`fault.inject` and `fault.list` of control.sock: faults on simulated devices, where the configuration allows them.

A fault is written into a file of the device, which its executor has mapped (taktd.drivers.sim): the supervisor sends
nothing, and whoever has inherited a running executor can inject as well, and end what was injected before. Faults are
forgotten when the daemon starts with executors of its own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.doors.control_door import ControlError, Operation
from taktd.daemon.logbook import log
from taktd.drivers.sim import RUNS_MAX, SLOWNESS_MAX, UNTIL_CLEARED, FaultFile, SimFault, SimFaultKind

__all__ = ["FORMS", "FaultCommands", "fault_file", "forget_faults", "parse_fault"]

KINDS: Final[dict[str, SimFaultKind]] = {
    "lost": SimFaultKind.LOST,
    "oom": SimFaultKind.OUT_OF_MEMORY,
    "nan": SimFaultKind.NAN,
    "hang": SimFaultKind.HANG,
    "error": SimFaultKind.ERROR,
    "none": SimFaultKind.NONE,
}
FORMS: Final = "lost, oom, slow=10x, nan, hang, error, or none to end what was injected"
_NAMES: Final = {**{kind: name for name, kind in KINDS.items()}, SimFaultKind.SLOW: "slow"}
_SLOW = re.compile(r"slow=([0-9]{1,5})x")


def _folder(state_folder: Path) -> Path:
    return state_folder / "faults"


def fault_file(state_folder: Path, device: str) -> Path:
    """The device's file, there and without a fault if it was not there. Raises ``OSError``."""
    folder = _folder(state_folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / device
    if not path.exists():
        FaultFile(path, write=True).close()
    return path


def forget_faults(state_folder: Path) -> None:
    """At a start without executors to take over, before any is started: a fault does not outlive who injected it."""
    shutil.rmtree(_folder(state_folder), ignore_errors=True)


def parse_fault(text: object, runs: object = None) -> SimFault:
    """Of ``slow=10x`` and the like. ``runs``: how many it hits; None: one, of slow all. Raises ControlError."""
    match = _SLOW.fullmatch(text) if isinstance(text, str) else None
    kind = SimFaultKind.SLOW if match else KINDS.get(text) if isinstance(text, str) else None
    factor = int(match[1]) if match else 1
    if kind is None or not 1 <= factor <= SLOWNESS_MAX:
        raise ControlError(f"{str(text)[:40]!r} is no fault", f"known are {FORMS} (slow up to {SLOWNESS_MAX}x)")
    if runs is None:
        runs = UNTIL_CLEARED if kind in (SimFaultKind.SLOW, SimFaultKind.NONE) else 1
    if isinstance(runs, bool) or not isinstance(runs, int) or not 0 <= runs <= RUNS_MAX:
        raise ControlError(f"{str(runs)[:40]} is no number of runs", f"0 (until cleared) to {RUNS_MAX}")
    return SimFault(kind, factor, runs)


class FaultCommands:
    """``configuration``: the one that applies now."""

    def __init__(self, state_folder: Path, configuration: Callable[[], Configuration]) -> None:
        self._state_folder = state_folder
        self._configuration = configuration

    @property
    def asking(self) -> dict[str, Operation]:
        return {"fault.list": self.list}

    @property
    def changing(self) -> dict[str, Operation]:
        return {"fault.inject": self.inject}

    def _file(self, device: object) -> Path:
        configuration = self._configuration()
        simulated = [name for name, d in configuration.devices.items() if d.driver == "sim"]
        if not configuration.allow_faults:
            raise ControlError("faults are not allowed here", "write `allow_faults: true` into the configuration")
        found = configuration.devices.get(device) if isinstance(device, str) else None
        known = f"simulated are {', '.join(simulated)}" if simulated else "no device is simulated (driver: sim)"
        if found is None:
            raise ControlError(f"there is no device {str(device)[:64]!r}", known)
        if found.driver != "sim":
            raise ControlError(f"{found.name} is a real device (driver: {found.driver}): no faults are injected", known)
        try:
            return fault_file(self._state_folder, found.name)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ControlError(f"the fault can't be written: {reason}", "make the state folder writable") from None

    async def inject(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"device", "kind", "runs"?}"""
        fault = parse_fault(request.get("kind"), request.get("runs"))
        path = self._file(request.get("device"))
        file = FaultFile(path, write=True)
        file.inject(fault)
        file.close()
        log("warning", f"fault injected on {path.name}: {request['kind']}", event="fault-injected", device=path.name)
        return {"device": path.name, **_as_json(fault)}

    def lasting(self) -> Sequence[dict[str, Any]]:
        """Faults that last until somebody ends them: for `status`. Makes no file; one that can't be read has none."""
        result = []
        for name, device in self._configuration().devices.items():
            if device.driver != "sim" or not self._configuration().allow_faults:
                continue
            try:
                file = FaultFile(_folder(self._state_folder) / name)
                fault = file.read()
                file.close()
            except (OSError, ValueError):
                continue
            if fault.runs == UNTIL_CLEARED and fault.kind is not SimFaultKind.NONE:
                result.append({"device": name, **_as_json(fault)})
        return result

    async def list(self, request: dict[str, Any]) -> dict[str, Any]:
        """What was injected last on each simulated device."""
        result = []
        for name, device in self._configuration().devices.items():
            if device.driver == "sim" and self._configuration().allow_faults:
                file = FaultFile(self._file(name))
                result.append({"device": name, **_as_json(file.read())})
                file.close()
        return {"faults": result}


def _as_json(fault: SimFault) -> dict[str, Any]:
    return {"kind": _NAMES[fault.kind], "factor": fault.factor, "runs": fault.runs}
