"""What `taktctl status` and `loops` show people: who serves each loop, since when and why."""

from __future__ import annotations

import time
from typing import Any

import pytest
from click.testing import CliRunner

from taktd.daemon.cli import report

S = 1_000_000_000


def loop(**more: Any) -> dict[str, Any]:
    return {
        "name": "walk", "model": "go1", "device": "gpu0", "served": True, "client": None, "jobs": 7, "late": 0,
        "expired": 0, "failed": 0, "lost": 0, "served_by": "gpu0", "role": "primary", "why": "start", "reason": "",
        "since_ns": time.monotonic_ns() - 75 * S, "switches": {"start": 1}, "period_ns": S, "deadline_ns": S,
        "cost_ns": None, "statistics": None, "not_served": None,
    } | more  # fmt: skip


def shown(monkeypatch: pytest.MonkeyPatch, command: str, *loops: dict[str, Any]) -> str:
    answer = {
        "node": "n", "ready": True, "certified": True, "epoch": 1, "version": "1", "executors": [], "doors": [],
        "refused": "", "not_serving": [], "shadow": None, "faults": [], "loops": list(loops),
    }  # fmt: skip
    monkeypatch.setattr(report, "ask", lambda op: answer)
    ended = CliRunner().invoke(getattr(report, command))
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.mark.parametrize("command", ["status", "loops"])
def test_a_loop_that_its_stand_in_serves_says_so_with_cause_and_time(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    given = loop(
        served_by="cpu1", role="stand-in", why="failed", reason="3 runs in a row failed", since_ns=time.monotonic_ns()
        - 3_725 * S, switches={"start": 1, "failed": 2},
    )  # fmt: skip
    text = shown(monkeypatch, command, loop(name="arm"), given)
    lines = {line.split()[0]: line for line in text.rpartition("served by")[2].splitlines()[1:] if line}
    assert [part.strip() for part in lines["walk"].split("  ") if part.strip()] == [
        "walk", "cpu1", "stand-in", "1h 2m", "failed: 3 runs in a row failed", "start 1, failed 2",
    ]  # fmt: skip
    assert lines["arm"].split() == ["arm", "gpu0", "primary", "1m", "15s", "start", "start", "1"]


@pytest.mark.parametrize("command", ["status", "loops"])
def test_a_loop_that_nobody_serves_says_so(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    given = loop(served=False, served_by=None, role=None, since_ns=0, why="", switches={})
    assert "nobody" in shown(monkeypatch, command, given)


@pytest.mark.parametrize(
    ("ns", "said"),
    [(-1, "0s"), (S - 1, "0s"), (59 * S, "59s"), (60 * S, "1m 0s"), (3_600 * S, "1h 0m"), (90_000 * S, "1d 1h")],
)
def test_ages_have_their_two_largest_units(ns: int, said: str) -> None:
    assert report.age(ns) == said
