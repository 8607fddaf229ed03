"""A primary that can't load when taktd starts: its loops are with their stand-in until it can, and taktd says so."""

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
devices:
  sim0: {{driver: sim, cost: 200us, seed: 3, outputs: onnx}}
  cpu0: {{driver: cpu}}
models:
  large: {{path: {folder}/large.onnx, verify: {{samples: {folder}/golden.npz}}}}
  small: {{path: {folder}/small.onnx{small}}}
loops:
  walk: {{model: large, device: sim0, period: 20ms, budget: 5ms, on_late: run, fallback: [{fallback}]}}
admission: {{on_refusal: uncertified}}
grpc: off
zmq: off
"""
STAND_IN = "{device: cpu0, model: small}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The engine of `large` does not compute what its golden samples say: no executor of sim0 may serve with it."""
    for name in ("large", "small"):
        models.identity(tmp_path / f"{name}.onnx", (4,))
    golden(tmp_path, 2)
    return tmp_path


def golden(folder: Path, y: float) -> None:
    np.savez(folder / "new.npz", x=np.ones((1, 4), np.float32), y=np.full((1, 4), y, np.float32))
    (folder / "new.npz").rename(folder / "golden.npz")


def yaml(folder: Path, fallback: str = STAND_IN, small: str = "") -> str:
    return YAML.format(folder=folder, fallback=fallback, small=small)


def test_the_stand_in_serves_and_the_primary_is_tried_until_it_can(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    assert service(running) == ("cpu0", "stand-in")
    told, status = running.loop("walk"), running.ask("status")
    assert status["ready"]
    assert not status["certified"]
    assert not told["certified"]
    assert "does not compute what the model says" in told["reason"]
    assert "sim0 by its stand-in cpu0" in running.log
    with Walking(running) as walking:
        assert set(walking.paths()) == {"stand-in"}
        tries = running.executor("sim0")["restarts"]
        eventually(lambda: running.executor("sim0")["restarts"] > tries + 1, 30, "it is tried again")
        before = walking.journal["ok", "stand-in"]
        eventually(lambda: walking.journal["ok", "stand-in"] > before + 3, 10, "the stand-in goes on")
        golden(folder, 1)
        eventually(lambda: service(running) == ("sim0", "primary"), 60, "the primary has its loop")
        eventually(lambda: walking.journal["ok", "primary"] > 3, 10)
    walking.reconcile()
    assert running.loop("walk")["switches"] == {"start": 1, "hand-back": 1}


@pytest.mark.parametrize(
    ("fallback", "small", "ended_by"),
    [
        ("hold", "", r"executor sim0 can't serve: .*does not compute what the model says"),
        # Executors load side by side. The primary's failure never ends the start while the stand-in may still come up;
        # the stand-in's does, whether the primary has failed by then or has not: it alone is always in the log.
        (STAND_IN, ", non_finite: {z: forbid}", r"executor cpu0 can't serve: model 'small' has no output 'z'"),
    ],
)
def test_where_nobody_could_serve_its_loops_the_start_is_refused(
    taktd: Start, folder: Path, fallback: str, small: str, ended_by: str
) -> None:
    running: Running = taktd(yaml(folder, fallback, small), wait=False)
    assert running.process.wait(60) == 78
    assert re.search(ended_by, running.log), running.log
    assert "ready:" not in running.log
