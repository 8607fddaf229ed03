"""A taktd for one test: started in folders of its own, ready by systemd's datagram, and proven gone at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from taktd.daemon.control_client import ask
from taktd.ipc import Node, connect

READY_S = 60.0
STOP_S = 5.0
FOREIGN = {"TAKTD_SOCKET", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID"}


def eventually(condition: Callable[[], bool], within_s: float = 10.0, what: str = "") -> None:
    """For what another process does and nobody announces; fails the test when it does not come."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"not within {within_s} s: {what or condition}"
        time.sleep(0.01)


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except FileNotFoundError:
        return ".taktrec"  # closed meanwhile


class Running:
    """One daemon. `notifications` collects what systemd would have been told."""

    def __init__(self, folder: Path, yaml: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.file = folder / "taktd.yaml"
        # Front doors cost a process with gRPC in it; a test that wants them says so.
        yaml += "".join(f"{door}: off\n" for door in ("grpc", "zmq") if f"{door}:" not in yaml)
        self.file.write_text(yaml, encoding="utf-8")
        self.runtime, self.state, self.log_file = folder / "run", folder / "state", folder / "log"
        self.notifications: list[str] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        self.environment = kept | {
            "TAKTD_RUNTIME_DIR": str(self.runtime), "TAKTD_STATE_DIR": str(self.state),
            "NOTIFY_SOCKET": str(folder / "notify"), **(environment or {}),
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._family: dict[int, psutil.Process] = {}

    # ---- life ----

    def start(self, wrapper: list[str] | None = None) -> Running:
        """Start without waiting; wrapper is a command that runs it, such as setpriv. What one before it had said last,
        and nobody has read, is not taken for this one's word."""
        self._notify.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                self.notifications.append(self._notify.recv(4096).decode())
        command = [*(wrapper or []), sys.executable, "-m", "taktd.daemon", "--config", str(self.file)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def await_ready(self) -> Running:
        """Until READY=1 came, or fail with the log when the daemon ended first."""
        self.await_notification("READY=1", READY_S)
        self.remember_family()
        return self

    def await_notification(self, wanted: str, within_s: float) -> str:
        until = time.monotonic() + within_s
        while True:
            assert self.process.poll() is None, f"taktd ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < until, f"no {wanted} within {within_s} s:\n{self.log}"
            self._notify.settimeout(0.2)
            try:
                text = self._notify.recv(4096).decode()
            except TimeoutError:
                continue
            self.notifications.append(text)
            if wanted in text.split("\n"):
                return text

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def family(self) -> list[psutil.Process]:
        """All processes of it that there ever were, as far as somebody remembered them."""
        return list(self._family.values())

    def remember_family(self) -> None:
        """Children there are now: they must be gone at the end."""
        root = psutil.Process(self.process.pid)
        self._family.update({p.pid: p for p in [root, *root.children(recursive=True)]})

    def stop(self) -> int:
        """SIGTERM; the exit code. Fails if it takes longer than promised, or if anybody or anything is left behind."""
        begun = time.monotonic()
        if self.process.poll() is None:
            self.remember_family()
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"taktd still ran {STOP_S} s after SIGTERM:\n{self.log}") from None
        assert time.monotonic() - begun <= STOP_S
        left = [p for p in self._family.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"left behind: {left}"
        assert not list(self.runtime.glob("*.sock"))
        assert "defect" not in self.log, self.log
        self._process = None
        return code

    def kill(self) -> None:
        """For a test that has failed already."""
        if self._process is not None and self._process.poll() is None:
            self.remember_family()
            self._process.kill()
            self._process.wait()
        for process in self._family.values():
            if process.is_running():
                process.kill()
        self._process = None

    def close(self) -> None:
        try:
            if self._process is not None:
                self.stop()
        finally:
            self.kill()
            self._notify.close()

    # ---- asking ----

    @property
    def lanes_socket(self) -> str:
        return str(self.runtime / "lanes.sock")

    def connect(self) -> Node:
        return connect(self.lanes_socket)

    def ask(self, op: str) -> dict[str, Any]:
        return ask(op, {"TAKTD_RUNTIME_DIR": str(self.runtime)})

    def executor(self, device: str = "cpu0") -> dict[str, Any]:
        found = next(e for e in self.ask("status")["executors"] if e["device"] == device)
        assert isinstance(found, dict)
        return found

    def loop(self, name: str) -> dict[str, Any]:
        found = next(entry for entry in self.ask("loops")["loops"] if entry["name"] == name)
        assert isinstance(found, dict)
        return found

    def taktctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "taktd.daemon.cli", *arguments],
            env=self.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def taktctl_json(self, *arguments: str) -> Any:
        return json.loads(self.taktctl(*arguments, "--json").stdout)

    def descriptors(self) -> int:
        """Of the supervisor, once no lane is between two clients any more.

        Not those of questions like ours, whose ends it may not have noticed yet, and of recordings, which begin with
        the first record. Who hung up before a question is asked is known to be gone when it is answered.
        """
        eventually(lambda: not any(e["lanes_clearing"] for e in self.ask("status")["executors"]))
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        passing = {f"socket:[{line[6]}]" for line in sockets if line[-1] == str(self.runtime / "control.sock")}
        links = [_link(entry) for entry in Path(f"/proc/{self.process.pid}/fd").iterdir()]
        return sum(link not in passing and not link.endswith(".taktrec") for link in links)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@contextmanager
def serving(folder: Path, yaml: str) -> Iterator[Running]:
    """A daemon that is ready; it must end in order afterwards."""
    running = Running(folder, yaml)
    try:
        running.start().await_ready()
        yield running
        assert running.stop() == 0
    finally:
        running.close()
