"""The programs of README.md and examples/, as users find them there, with the README's configuration."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import Running, eventually

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "ipc" / "core"
README = (ROOT / "README.md").read_text(encoding="utf-8")

needs_cc = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("make")), reason="needs cc and make")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libtakt")
    target = folder / "libtakt.a"
    subprocess.run(["make", "-s", "-C", CORE, f"BUILD={folder}", target], check=True, timeout=100)
    return target


def compiled(source: Path, library: Path) -> list[str]:
    program = source.with_suffix("")
    strict = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run(["cc", *strict, f"-I{CORE}", "-o", program, source, library, "-pthread"], check=True, timeout=60)
    return ["stdbuf", "-oL", str(program)]


@pytest.fixture
def served(taktd: Callable[..., Running]) -> Running:
    return taktd(block("yaml").replace("daemon/demo", str(ROOT / "daemon" / "demo")))


class Program:
    """A program that prints each action; its output is read as it comes."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.actions = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.actions += re.fullmatch(r"[+-]?\d[\d.e+-]*\n", line) is not None

    def acts(self) -> None:
        """It prints actions from now on."""
        before = self.actions
        eventually(lambda: self.actions > before + 20 or self.process.poll() is not None)
        assert self.process.poll() is None, self.close()

    def close(self) -> str:
        """What it said on standard error."""
        self.process.kill()
        self._reader.join()
        assert self.process.stderr is not None
        said = self.process.stderr.read()
        self.process.wait()
        return said


def replace_executor(running: Running) -> None:
    victim = running.executor()["pid"]
    os.kill(victim, signal.SIGKILL)

    def replaced() -> bool:
        executor = running.executor()
        return bool(executor["ready"]) and executor["pid"] != victim

    eventually(replaced, within_s=30)


def outlives_an_executor_and_tells_of_the_daemon_s_end(running: Running, command: list[str]) -> None:
    program = Program(command, running.environment)
    try:
        program.acts()
        replace_executor(running)
        program.acts()
        assert running.stop() == 0
        assert program.process.wait(20) == 1
    finally:
        told = program.close()
    assert "balance" in told


@needs_cc
def test_the_readme_s_c_program_goes_on_when_an_executor_dies(served: Running, library: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.c").write_text(block("c"), encoding="utf-8")
    outlives_an_executor_and_tells_of_the_daemon_s_end(served, compiled(tmp_path / "loop.c", library))


def test_the_readme_s_python_program_goes_on_when_an_executor_dies(served: Running, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(block("python"), encoding="utf-8")
    outlives_an_executor_and_tells_of_the_daemon_s_end(served, [sys.executable, "-u", str(tmp_path / "loop.py")])


def runs_to_its_end(running: Running, command: list[str]) -> None:
    process = subprocess.Popen(
        [*command, "balance", "8"], env=running.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: running.executor()["lanes"] == 1)
        replace_executor(running)
        printed, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, told
    found = re.search(r"cycles (\d+), missed (\d+), late (\d+), without answer (\d+)", printed)
    assert found is not None, printed
    cycles, _, late, unanswered = map(int, found.groups())
    assert 0 < unanswered < cycles
    assert late < cycles - unanswered, "answered again by the successor"


@pytest.mark.long
@needs_cc
def test_the_c_example_goes_on_when_an_executor_dies(served: Running, library: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "c" / "loop.c", tmp_path / "loop.c")
    runs_to_its_end(served, compiled(tmp_path / "loop.c", library))


@pytest.mark.long
def test_the_python_example_goes_on_when_an_executor_dies(served: Running) -> None:
    runs_to_its_end(served, [sys.executable, str(ROOT / "examples" / "python" / "loop.py")])
