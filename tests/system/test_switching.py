"""FAULTS 18 and 19 on a simulated device: what a loop with a stand-in and one without are told when its engine is bad.

The client's journal must be what the daemon counted, and each switch must say its reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.conftest import Start
from tests.running import Running, eventually
from tests.system.test_handover import Walking, service

YAML = """\
allow_faults: true
devices:
  sim0: {{driver: sim, cost: 500us}}
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx, non_finite: {{y: forbid}}}}
loops:
  walk: {{model: id, device: sim0, period: 20ms, budget: 3ms, {more}}}
admission: {{on_refusal: uncertified}}
"""
ANSWER_US = 30_000_000


@pytest.fixture
def start(taktd: Start, tmp_path: Path) -> Start:
    models.identity(tmp_path / "id.onnx", (4,))
    return lambda more: taktd(YAML.format(folder=tmp_path, more=more))


def inject(running: Running, kind: str, *runs: str) -> None:
    done = running.taktctl("fault", "inject", "sim0", kind, *runs, "--json")
    assert done.returncode == 0, done.stderr


def switched(running: Running) -> bool:
    return bool(running.executor("sim0")["switches"].get("failed"))


@pytest.mark.parametrize(
    ("kind", "runs", "says"),
    [
        ("error", ["--runs", "3"], "3 runs in a row failed"),
        ("oom", ["--runs", "3"], "3 runs in a row failed"),
        ("nan", ["--runs", "0"], "3 runs in a row failed.*NaN.*input of our own"),
        ("slow=12x", [], "8 of the last 10 jobs ran beyond their cost.*input of our own"),
        ("lost", [], "lost"),
    ],
)
def test_a_bad_engine_is_switched_away_from_by_the_declared_rule(
    start: Start, kind: str, runs: list[str], says: str
) -> None:
    running = start("on_late: run, fallback: [cpu0]")
    with Walking(running) as walking:
        eventually(lambda: service(running) == ("sim0", "primary"), 10)
        inject(running, kind, *runs)
        eventually(lambda: walking.journal["ok", "stand-in"] > 3, 20, "the stand-in answers")
        eventually(lambda: switched(running), 5)
        if kind in ("nan", "slow=12x"):  # it lasts: a primary that does not prove itself stays away
            assert service(running) == ("cpu0", "stand-in")
            eventually(lambda: running.executor("sim0")["restarts"] > 0, 10)
            assert running.executor("sim0")["reason"]
            inject(running, "none")
        eventually(lambda: service(running) == ("sim0", "primary"), 60, "it is well again")
        before = walking.journal["ok", "primary"]
        eventually(lambda: walking.journal["ok", "primary"] > before + 3, 10)
    walking.reconcile()
    assert re.search(says, running.log), running.log
    failed = walking.journal["failed", "primary"]
    # The job at which the rule came true is done again by the stand-in.
    assert failed <= {"error": 2, "oom": 2, "lost": 0}.get(kind, 10)


def test_a_hang_ends_in_the_stand_ins_answer(start: Start) -> None:
    running = start("fallback: [cpu0]")
    with Walking(running) as walking:
        eventually(lambda: service(running) == ("sim0", "primary"), 10)
        inject(running, "hang")
        eventually(lambda: walking.journal["ok", "stand-in"] > 3, 20, "the stand-in answers")
    walking.reconcile()
    assert running.executor("sim0")["switches"].get("hung") == 1


def test_without_a_stand_in_failures_are_answered_as_such(start: Start) -> None:
    running = start("on_late: run")
    pid = running.executor("sim0")["pid"]
    with Walking(running) as walking:
        for kind in ("error", "oom", "nan"):
            before = walking.journal["failed", "primary"]
            inject(running, kind, "--runs", "8")
            eventually(lambda b=before: walking.journal["failed", "primary"] == b + 8, 10, kind)
        before = walking.journal["ok", "primary"]
        eventually(lambda: walking.journal["ok", "primary"] > before + 3, 10)
    walking.reconcile()
    assert running.executor("sim0")["pid"] == pid


def test_a_client_that_sends_nan_moves_nobodys_loop(start: Start) -> None:
    running = start("fallback: [cpu0]")
    with running.connect() as node, node.attach("walk") as lane:
        for _ in range(10):
            lane.inputs["x"][:] = np.nan
            reply = lane.infer(timeout_us=ANSWER_US)
            assert (reply.status, reply.path) == ("failed", "primary")
        eventually(lambda: "well on an input of our own" in running.log, 10)
    assert running.executor("sim0")["switches"] == {"start": 1}
