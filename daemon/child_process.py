"""How taktd starts Python processes of its own: the same interpreter, a known environment, a pidfd to watch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# One job at a time on one core: a thread pool would only steal it. Telemetry must be off before the import.
_SET = {
    "ORT_DISABLE_TELEMETRY": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
# The service manager's business is with the supervisor alone.
_REMOVED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def python_command(module: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-m", module]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child, which runs in "/": -m puts the working folder first on the module path."""
    child = {name: value for name, value in environment.items() if name not in _REMOVED}
    child.update(_SET)
    if path := child.get("PYTHONPATH"):
        child["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in path.split(os.pathsep) if p)
    return child
