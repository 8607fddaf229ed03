"""What every step of the packages' tests needs: the machine, a loop on it, checks that are counted and printed."""

from __future__ import annotations

import json
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import Machine, wait_until

CONFIG = "/etc/taktd/taktd.yaml"
LOOPS = "/etc/taktd/conf.d/10-balance.yaml"
DROP_INS = "/etc/systemd/system/taktd.service.d"
MODEL = "/usr/share/taktd/models/pendulum.onnx"
LOOP_FILE = f"""\
models:
  pendulum: {{path: {MODEL}}}
loops:
  balance: {{model: pendulum, device: cpu0, period: 1ms}}
"""
EDITED = "# edited by the owner\ndevices:\n  cpu0: {driver: cpu, cores: [1], priority: 80}\n"
# Goals on an idle machine; what was measured is printed. A busy one must get there too, so checks allow more.
READY_S_GOAL = 3.0
READY_S_MAX = 30.0
GAP_MS_MAX = 30_000
HANG_GAP_MS_MAX = 1_000  # while executors serve on; the client waits for its own turn, too
WATCHDOG_S = 10  # WatchdogSec= of the unit
SERVING_S_MAX = 60
EXPOSURE_MAX = 2.0
INSTALLED_KIB_MAX = 200_000_000 >> 10
PACKAGE_BYTES_MAX = 60_000_000


class Checks:
    """How the steps ended, and what all of them need. One step is a method; its docstring is its heading."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.box, self.folder = machine, folder
        self.passed = self.failed = self.missed = 0
        self.before: set[str] = set()
        self.newer: Path | None = None

    def check(self, sentence: str, holds: bool, found: object = "") -> None:
        """Count and print one check; found is shown where it does not hold."""
        self.passed, self.failed = self.passed + holds, self.failed + (not holds)
        print(f"  {'ok' if holds else 'FAIL'}  {sentence}" + ("" if holds else f"\n        found: {found}"), flush=True)

    def note(self, sentence: str) -> None:
        print(f"        {sentence}", flush=True)

    def goal(self, sentence: str, seconds: float, most: float) -> None:
        """A time that an idle machine keeps: printed, counted where missed, and no failure: this one may be busy."""
        missed = seconds > most
        self.missed += missed
        self.note(f"{sentence}: {seconds:.2f} s (goal {most:g} s{', MISSED' if missed else ''})")

    def step(self, action: Callable[[], None]) -> None:
        print(f"{self.box.suite}: {(action.__doc__ or action.__name__).splitlines()[0]}", flush=True)
        try:
            action()
        except Exception:
            traceback.print_exc()
            self.check(f"{action.__name__} came to its end", False, "see above")

    def package(self, name: str) -> Path:
        return next(self.folder.glob(f"{name}_*.deb"))

    def apt(self, *words: str) -> subprocess.CompletedProcess[str]:
        keep = ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        return self.box.run("apt-get", "-qq", "-y", "--no-install-recommends", *keep, *words)

    def client(self, seconds: float, user: str = "pilot") -> dict[str, Any]:
        return self.box.asks("python3", "/srv/client.py", "balance", str(seconds), user=user)

    def serving(self) -> bool:
        return self.box.active and bool(self.box.asks("taktctl", "status", "--json").get("ready"))

    def until(self, holds: Callable[[], bool]) -> bool:
        return wait_until(holds, SERVING_S_MAX)

    def loop_client(self) -> subprocess.Popen[str]:
        """A client at 1 kHz that was answered for two seconds and goes on until it is told to end."""
        client = self.box.start("python3", "/srv/client.py", "balance", "300", user="pilot")
        time.sleep(2)
        return client

    def answered_again(self, client: subprocess.Popen[str], *, all_the_time: bool = False) -> dict[str, Any]:
        """Check that a client from before something happened is answered afterwards, and end it. all_the_time: that it
        noticed nothing: one lane, no job without an answer. What it saw."""
        time.sleep(2)  # it re-attaches within 0.5 s of the daemon's being there, and must then be answered for a while
        self.box.run("pkill", "-TERM", "-f", "/srv/client.py")
        found = json.loads(client.communicate(timeout=60)[0] or "{}")
        good = found.get("ok", 0) > 1000 and found.get("last_second", 0) > 100 and found.get("gap_ms", 1e9) < GAP_MS_MAX
        self.check("its client is answered again", good, found)
        if all_the_time:
            kept = found.get("attached") == 1 and set(found.get("statuses", {"?": 1})) <= {"ok", "expired"}
            self.check("and noticed nothing: one lane, each job has its answer", kept, found)
        self.note(f"longest gap for the client: {found.get('gap_ms')} ms, attached {found.get('attached')} times")
        self.note(f"statuses: {found.get('statuses')} {found.get('error', '')}".rstrip())
        return found

    def gateways(self) -> set[str]:
        lines = [line for line in self.box.daemon_processes() if "taktd.daemon.gateway" in line]
        return {line.split()[0] for line in lines}

    def restart(self) -> bool:
        self.box.systemctl("reset-failed")
        return self.box.systemctl("restart", "taktd.service") and self.until(self.serving)
