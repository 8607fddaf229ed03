"""An echo daemon in a process of its own, as the tests of the Python client start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def echo(folder: Path) -> Iterator[str]:
    """A daemon at a socket in the folder, whose path this is; it must end in order."""
    path = f"{folder}/lanes.sock"
    daemon = start_daemon(path)
    yield path
    end_daemon(daemon)
    assert daemon.returncode == 0
