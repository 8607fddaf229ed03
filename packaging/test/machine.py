"""A throwaway Debian machine with systemd, and what the tests ask of it. Wraps the `box` script beside it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
UNIT = "taktd.service"


class Machine:
    """One box, up between __enter__ and __exit__."""

    def __init__(self, name: str, suite: str) -> None:
        self.name, self.suite = name, suite
        self.state = ""
        self.root = Path()

    def __enter__(self) -> Machine:
        self._box("down")
        self.state = self._box("up", self.suite).stdout.strip()
        self.root = Path(self._box("root").stdout.strip())
        return self

    def __exit__(self, *_: object) -> None:
        self._box("down")

    def _box(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HERE / "box", command, self.name, *arguments], stdout=subprocess.PIPE, text=True, check=True
        )

    # ---- commands ----

    def run(self, *command: str, user: str = "root", seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; never raises for its exit code."""
        return subprocess.run(
            self._command(command, user), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )

    def _command(self, command: tuple[str, ...], user: str) -> list[str]:
        how = ["run", self.name] if user == "root" else ["as", self.name, user]
        return [str(HERE / "box"), *how, *command]

    def start(self, *command: str, user: str = "root") -> subprocess.Popen[str]:
        """Start a command and let it run."""
        return subprocess.Popen(
            self._command(command, user), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def says(self, *command: str, user: str = "root") -> str:
        """A command's standard output, "" where it fails."""
        done = self.run(*command, user=user)
        return done.stdout.strip() if done.returncode == 0 else ""

    def asks(self, *command: str, user: str = "root") -> dict[str, Any]:
        """A command's output as JSON, whatever its exit code; {} where there is none."""
        done = self.run(*command, user=user)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def write(self, path: str, text: str) -> None:
        self.run("mkdir", "-p", str(Path(path).parent))
        (self.root / path.lstrip("/")).write_text(text)

    def read(self, path: str) -> str:
        try:
            return (self.root / path.lstrip("/")).read_text()
        except OSError:
            return ""

    def copy(self, file: Path, path: str) -> None:
        self._box("copy", str(file), path)

    # ---- the service ----

    def show(self, name: str) -> str:
        """A property of the unit, fresh from systemd."""
        return self.says("systemctl", "show", "-P", name, UNIT)

    @property
    def active(self) -> bool:
        return self.show("ActiveState") == "active"

    def systemctl(self, *words: str) -> bool:
        return self.run("systemctl", *words).returncode == 0

    def supervisor(self) -> int:
        return int(self.show("MainPID") or 0)

    def executors(self) -> list[int]:
        """Executor processes that taktctl names, each of them alive."""
        found = self.asks("taktctl", "status", "--json").get("executors", [])
        return [executor["pid"] for executor in found if executor.get("pid") and executor.get("ready")]

    def daemon_processes(self) -> list[str]:
        """Whatever runs as the daemon's user."""
        return self.says("ps", "-u", "taktd", "-o", "pid=,args=").splitlines()

    def journal(self, *options: str) -> str:
        return self.says("journalctl", "--no-pager", "-u", UNIT, *options)

    def failed_units(self) -> str:
        return self.says("systemctl", "--failed", "--no-legend", "--plain")

    def ready_after_s(self) -> float:
        """From the start of the service's process to READY=1, as systemd saw it last."""
        begun, ready = self.show("ExecMainStartTimestampMonotonic"), self.show("ActiveEnterTimestampMonotonic")
        return (int(ready or 0) - int(begun or 0)) / 1e6

    def files(self) -> set[str]:
        """Every path that a package could leave behind."""
        pruned = [
            "/proc",
            "/sys",
            "/run",
            "/dev",
            "/tmp",
            "/var/log",
            "/var/cache",
            "/var/lib/apt",
            "/var/lib/dpkg",
            "/srv",
        ]
        tests = " -o ".join(f"-path {path}" for path in pruned)
        return set(self.says("sh", "-c", f"find / -xdev \\( {tests} \\) -prune -o -print").splitlines())


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    """Ask ten times a second until it holds; False when the time is over."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
