"""An echo daemon in a process of its own, as the tests of the Python client start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DAEMON = Path(__file__).resolve().parent / "echo_daemon.py"


def start_daemon(path: str, *options: str) -> subprocess.Popen[bytes]:
    """Returns when it listens at `path`."""
    daemon = subprocess.Popen(
        [sys.executable, str(DAEMON), "--socket", path, "--until-eof", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert daemon.stdout
    assert daemon.stdout.readline() == b"ready\n"
    return daemon


def end_daemon(daemon: subprocess.Popen[bytes]) -> None:
    assert daemon.stdin
    assert daemon.stdout
    daemon.stdin.close()
    daemon.stdout.close()
    daemon.wait(10)
