"""`taktctl demo` and `taktctl bench` as a person or a script calls them: exit codes, JSON alone on stdout, fields.

No figure is asserted: this machine decides them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.demo import show
from taktd.daemon.foreground import Foreground

TAKTCTL = Path(sys.executable).with_name("taktctl")


def taktctl(
    *words: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TAKTCTL), *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def daemon() -> Iterator[Foreground]:
    core = show.cores()[0]
    text = show.CONFIGURATION.format(executor_core=core, model=json.dumps(str(show.MODEL)), loop="balance")
    with Foreground(text) as running:
        yield running


def bench(daemon: Foreground, *words: str) -> dict[str, Any]:
    done = taktctl("bench", *words, "--seconds", "0.5", "--json", env=dict(daemon.environment))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_demo_swings_up_and_reports_in_json(tmp_path: Path) -> None:
    done = taktctl("demo", "--json", "--seconds", "6", "--plot", str(tmp_path / "demo.png"), cwd=tmp_path)
    found = json.loads(done.stdout)
    for key in ("ticks", "late", "p50_us", "p99_us", "p999_us", "max_us", "direct_p50_us", "fell"):
        assert key in found, f"no {key} in {sorted(found)}"
    assert done.returncode == (1 if found["fell"] else 0), done.stderr
    assert found["ticks"] > 0
    assert found["direct_runs"] > 0
    assert found["different"] == 0
    if found["rt"]["policy"] == "fifo":  # without real-time rights a loaded machine may well let it fall
        assert not found["fell"]


def test_the_demo_writes_lines_and_a_picture_when_there_is_no_terminal(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    done = taktctl("demo", "--seconds", "5", cwd=tmp_path)
    assert "swinging up" in done.stdout
    assert "\x1b" not in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wait", ["spin", "block", "hybrid"])
def test_bench_of_a_paced_loop_has_every_field(daemon: Foreground, wait: str) -> None:
    found = bench(daemon, "--loop", "balance", "--rate", "200", "--wait", wait)
    assert {"jobs", "late", "early", "failed", "rate_hz", "wait", "rt"} <= set(found)
    assert {"policy", "priority", "affinity", "mlocked"} <= set(found["rt"])
    assert found["wait"] == wait
    assert found["failed"] == 0
    assert 0 < found["jobs"] <= 110
    assert "direct" not in found


def test_bench_direct_shares_the_seconds_with_the_lane(daemon: Foreground) -> None:
    found = bench(daemon, "--model", "pendulum", "--direct")
    assert found["jobs"] > 0
    assert found["early"] == 0
    for figures in (found, found["direct"]):
        values = [figures[key] for key in ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")]
        assert values == sorted(values)
        assert all(value > 0 and math.isfinite(value) for value in values)


def test_bench_of_a_loop_in_a_closed_loop_counts_early_jobs(daemon: Foreground) -> None:
    found = bench(daemon, "--loop", "balance", "--closed")
    assert found["early"] > 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--loop", "nowhere"], 2, "nowhere"),
        (["--model", "nowhere"], 2, "nowhere"),
        ([], 2, "--loop"),
        (["--loop", "balance", "--model", "pendulum"], 2, "--model"),
        (["--loop", "balance", "--closed", "--rate", "10"], 2, "--rate"),
    ],
)
def test_bench_refuses_what_it_cannot_use(daemon: Foreground, words: list[str], code: int, says: str) -> None:
    done = taktctl("bench", *words, "--json", env=dict(daemon.environment))
    assert done.returncode == code, done.stderr
    assert "error" in json.loads(done.stdout)
    assert says in done.stderr


def test_bench_without_a_daemon_says_where_it_looked(tmp_path: Path) -> None:
    environment = {**os.environ, "TAKTD_RUNTIME_DIR": str(tmp_path)}
    environment.pop("TAKTD_SOCKET", None)
    done = taktctl("bench", "--model", "pendulum", env=environment)
    assert done.returncode == 3
    assert str(tmp_path) in done.stderr


def test_bench_leaves_a_taken_loop_alone(daemon: Foreground) -> None:
    from taktd.ipc import connect

    with connect(daemon.lanes_socket) as node, node.attach("balance"):
        done = taktctl("bench", "--loop", "balance", env=dict(daemon.environment))
    assert done.returncode == 1
    assert "balance" in done.stderr
