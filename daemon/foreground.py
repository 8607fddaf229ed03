"""A taktd of one's own for as long as a `with` block lasts: the demo, the benchmarks and tests start it so.

Its configuration, sockets and state lie in a temporary folder; nothing of an installed taktd is touched.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import psutil

from taktd.ipc import NotConnected, connect

__all__ = ["Foreground", "StartFailed", "end_with_parent"]

PR_SET_PDEATHSIG: Final = 1

STOP_S: Final = 6.0
"""SIGTERM drains within 5 s; then it is killed."""


FOREIGN_VARIABLES: Final = frozenset(
    {"TAKTD_SOCKET", "NOTIFY_SOCKET", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "LISTEN_FDS", "WATCHDOG_USEC"}
)
"""They would tie this taktd to an installed one, or to the service that starts it."""


def end_with_parent() -> None:
    """For `Popen(preexec_fn=…)`: the child gets SIGTERM when this process ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class StartFailed(Exception):
    """taktd ended, or did not answer in time; carries what it said."""


class Foreground:
    """Starts `taktd --config` on the given YAML text; `environment` is what clients need to find it.

    `ready_s` is the time from start until a client could connect and every loop could be attached.
    """

    def __init__(self, configuration: str, *, timeout_s: float = 30.0, log: Path | None = None) -> None:
        self._configuration = configuration
        self._timeout_s = timeout_s
        self._log_path = log
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.runtime_folder = Path()
        self.environment: Mapping[str, str] = {}
        self.ready_s = 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def executor_pids(self) -> list[int]:
        """Processes of this taktd that are executors."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [c.pid for c in children if any("taktd.daemon.executor" in word for word in c.cmdline())]

    @property
    def lanes_socket(self) -> str:
        return str(self.runtime_folder / "lanes.sock")

    def __enter__(self) -> Foreground:
        self._folder = tempfile.TemporaryDirectory(prefix="taktd-")
        folder = Path(self._folder.name)
        self.runtime_folder = folder / "run"
        (folder / "taktd.yaml").write_text(self._configuration, encoding="utf-8")
        ours = {
            "TAKTD_RUNTIME_DIR": str(self.runtime_folder),
            "TAKTD_STATE_DIR": str(folder / "state"),
            "ORT_DISABLE_TELEMETRY": "1",
        }
        self.environment = {k: v for k, v in os.environ.items() if k not in FOREIGN_VARIABLES} | ours
        self._log_path = self._log_path or folder / "log"
        begun = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "taktd.daemon", "--config", str(folder / "taktd.yaml")],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )
        try:
            self._await_ready(begun + self._timeout_s)
        except BaseException:
            self._stop()
            raise
        self.ready_s = time.monotonic() - begun
        return self

    def _await_ready(self, until: float) -> None:
        """Connecting waits for the socket, attaching for the executors; a daemon that died is noticed between tries."""
        assert self._process is not None
        while True:
            try:
                with connect(self.lanes_socket, timeout_us=500_000) as node:
                    for loop in node.loops():
                        node.attach(loop["name"], timeout_us=round(self._timeout_s * 1e6)).close()
                return
            except NotConnected as error:
                if self._process.poll() is not None:
                    raise StartFailed(f"taktd ended with exit code {self._process.returncode}:\n{self.log}") from error
                if time.monotonic() > until:
                    raise StartFailed(f"taktd did not answer within {self._timeout_s:g} s:\n{self.log}") from error

    @property
    def log(self) -> str:
        """The last lines that taktd wrote."""
        assert self._log_path is not None
        return "\n".join(self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])

    def _stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
