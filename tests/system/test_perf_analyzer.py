"""Triton's own load generator against taktd's gRPC: perf_analyzer, as it comes from PyPI.

`make test-perf-analyzer` fetches it into build/perf-analyzer. Its binary needs glibc 2.38; on an older system it is run
by the loader of a newer one's root folder: $TAKTD_NEWER_ROOT, or Debian 13 as `make deb-test` keeps it. Else skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models
from tests.running import Running, serving

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = shutil.which("perf_analyzer")
BINARY = Path(INSTALLED) if INSTALLED else ROOT / "build/perf-analyzer/perf_analyzer/bin/perf_analyzer"
NEWER_ROOT = Path(
    os.environ.get("TAKTD_NEWER_ROOT") or Path(os.environ.get("TAKTD_BOX_CACHE", "/var/cache/taktd-box")) / "trixie"
)
AT_A_TIME = 8
# Three windows, whatever they say. (Counting requests instead, it waits for ever now and then, all answers being in.)
WINDOWS = ["--measurement-interval", "300", "--max-trials", "3", "--stability-percentage", "999"]
YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models:
  policy: {{path: {folder}/mlp.onnx}}
  rows: {{path: {folder}/rows.onnx, shapes: {{obs: [8, 48]}}}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
"""


def command() -> tuple[list[str], str]:
    """How it is started here; else no words, and why not."""
    if not BINARY.is_file():
        return [], f"{BINARY} is not there: make test-perf-analyzer fetches it"
    loader = [f"{NEWER_ROOT}/lib64/ld-linux-x86-64.so.2", "--library-path", f"{NEWER_ROOT}/usr/lib/x86_64-linux-gnu"]
    said = ""
    for words in ([str(BINARY)], [*loader, str(BINARY)]):
        try:
            tried = subprocess.run([*words, "--version"], capture_output=True, text=True, timeout=30)
        except OSError as error:
            said += f"{words[0]}: {error.strerror}. "
            continue
        if tried.returncode == 0:
            return words, ""
        said += f"{words[0]}: {tried.stderr.strip().splitlines()[-1] if tried.stderr.strip() else tried.returncode}. "
    return [], f"perf_analyzer can't run here: {said[:400]}"


COMMAND, WHY_NOT = command()
pytestmark = pytest.mark.skipif(not COMMAND, reason=WHY_NOT)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("perf")
    models.mlp(folder / "mlp.onnx")
    models.mlp(folder / "rows.onnx", batch="n", seed=2)
    with serving(folder, YAML.format(folder=folder)) as running:
        yield running


def analyzed(served: Running, *options: str) -> subprocess.CompletedProcess[str]:
    words = [*COMMAND, "-i", "grpc", "-u", f"unix:{served.runtime}/grpc.sock", *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def number(name: str, text: str) -> int:
    found = re.search(rf"^\s*{name}: (\d+)", text, re.MULTILINE)
    assert found, (name, text)
    return int(found[1])


@pytest.mark.parametrize(
    "options",
    [
        ["-m", "policy"],
        ["-m", "policy", "--async", "--concurrency-range", str(AT_A_TIME)],
        ["-m", "policy", "--async", "--streaming", "--concurrency-range", "4"],
        ["-m", "rows", "--shape", "obs:5,48"],
    ],
    ids=["one at a time", "eight at a time", "stream", "open dimension"],
)
def test_it_measures_and_its_view_of_the_server_is_filled(served: Running, options: list[str]) -> None:
    done = analyzed(served, *options, *WINDOWS)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "failed" not in (done.stdout + done.stderr).lower()
    asked = number("Request count", done.stdout)
    assert asked > 0
    # Its three looks at the server are not at the very instants at which its own windows begin and end.
    answered = number("Successful request count", done.stdout)
    assert abs(answered - asked) <= 3 * AT_A_TIME + asked // 10
    assert number("Execution count", done.stdout) == number("Inference count", done.stdout) == answered
    on_the_device = re.search(r"compute infer (\d+) usec", done.stdout)
    assert on_the_device, done.stdout
    assert int(on_the_device[1]) > 0


def test_where_it_asks_for_shared_memory_it_is_told_of_lanes(served: Running) -> None:
    done = analyzed(served, "-m", "policy", "--shared-memory", "system", *WINDOWS)
    assert done.returncode != 0
    assert "lane" in done.stdout + done.stderr
