"""Who serves in this runtime folder, written down for the case that this supervisor dies: a small file beside the lock.

It names the executors (process ids with their start times, so that a number that was given to somebody else since is
never taken for one of ours), the configuration and the models' signatures they were started for. A supervisor that
ends in order takes the file away with its last executor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.config.keeping import NotKept, keep, restore
from taktd.daemon.durable_file import SealBroken, read_sealed, write_sealed
from taktd.daemon.logbook import log
from taktd.daemon.runtime_folder import EXECUTORS_FILE, EXECUTORS_SOCKET
from taktd.daemon.supervision.device_plan import Inspection

KEY: Final = "taktd executors 1"
START_TIME_FIELD: Final = 19  # of /proc/PID/stat behind the command's name


@dataclass(frozen=True)
class Expected:
    """One executor of the predecessor. pidfd: verified to be that process; the caller's to close."""

    device: str
    pid: int
    member: int
    pidfd: int

    def kill(self) -> None:
        """SIGKILL; safe, since a pidfd never means another process."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


@dataclass(frozen=True)
class Predecessor:
    """What a supervisor left that is gone. alive: of its executors, those that still run. configuration: None where
    it was another version's, which this one doesn't understand."""

    pid: int
    epoch: int
    last_epoch: int
    configuration: Configuration | None
    inspections: dict[str, Inspection]
    alive: tuple[Expected, ...]


def start_time(pid: int) -> int:
    """When a process began, in ticks since boot; 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[START_TIME_FIELD])


def write_down(
    folder: Path, executors: Iterable[tuple[str, int, int]], epochs: tuple[int, int], configuration: Configuration,
    inspections: Mapping[str, Inspection],
) -> None:  # fmt: skip
    """executors: (device, pid, member). Without the file a crash costs a restart of the executors: said, not fatal."""
    body = {
        "pid": os.getpid(), "epoch": epochs[0], "last_epoch": epochs[1],
        "executors": [
            {"device": device, "pid": pid, "member": member, "start": start_time(pid)}
            for device, pid, member in executors
        ],
        "inspections": dict(inspections),
    }  # fmt: skip
    try:
        write_sealed(folder / EXECUTORS_FILE, KEY, body | {"configuration": keep(configuration)}, outlast_power=False)
    except (OSError, NotKept) as error:
        log("warning", f"executors could not be taken over after a crash of taktd: {error}")


def forget(folder: Path) -> None:
    """Nobody is left, nor the private socket of a supervisor that was killed while it took executors over."""
    (folder / EXECUTORS_FILE).unlink(missing_ok=True)
    (folder / EXECUTORS_SOCKET).unlink(missing_ok=True)


def read(folder: Path) -> Predecessor | None:
    """What the last supervisor left behind, None where that is nothing. Only the holder of the folder's lock asks."""
    try:
        body = read_sealed(folder / EXECUTORS_FILE, KEY)
        if body is None:
            return None
        alive = tuple(found for entry in body["executors"] if (found := _find(entry)) is not None)
        configuration = _understood(body["configuration"])
        return Predecessor(body["pid"], body["epoch"], body["last_epoch"], configuration, body["inspections"], alive)
    except (SealBroken, KeyError, TypeError, AttributeError) as error:
        log("warning", f"executors of a taktd before this one can't be taken over: {error}")
        return None


def _understood(kept: Any) -> Configuration | None:
    try:
        return restore(kept)
    except (NotKept, KeyError, TypeError, AttributeError) as error:
        log("warning", f"the configuration of the taktd before this one is not understood: {error}")
        return None


def _find(entry: Mapping[str, Any]) -> Expected | None:
    pid, start = entry["pid"], entry["start"]
    if not pid or not start:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if start_time(pid) != start:  # asked after the descriptor was opened: what it refers to can't change any more
        os.close(pidfd)
        return None
    return Expected(entry["device"], pid, entry["member"], pidfd)
