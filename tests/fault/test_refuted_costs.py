"""A measured cost that did not hold is not believed again: the next start measures anew, and a taktd that takes
executors over knows that theirs is refuted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.fault.test_supervisor_death import reign  # noqa: F401  the fixture
from tests.running import Running, eventually

YAML = """\
allow_faults: true
devices: {{sim0: {{driver: sim, cost: 300us}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, device: sim0, period: 20ms, on_late: run{more}}}}}
admission: {{on_refusal: uncertified}}
grace: 20s
"""
ANSWER_US = 5e6
REFUTED = "took longer than"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.identity(tmp_path / "id.onnx", (4,))
    return tmp_path


def overrun(running: Running) -> None:
    """Until the loop's cost is refuted."""
    assert running.taktctl("fault", "inject", "sim0", "slow=20x").returncode == 0
    with running.connect() as node, node.attach("walk") as lane:
        for _ in range(30):
            lane.infer(timeout_us=ANSWER_US)
    eventually(lambda: running.loop("walk")["confirmed"] is False, 10, "the cost is refuted")
    assert running.taktctl("fault", "inject", "sim0", "none").returncode == 0


def runs(running: Running) -> list[int]:
    return [cost["max_ns"] for model in running.ask("models")["models"] for cost in model["measured"].values()]


def test_a_cost_that_did_not_hold_is_measured_anew_at_the_next_start_and_says_what_to_do(
    reign: Any, folder: Path  # noqa: F811
) -> None:  # fmt: skip
    running = reign(YAML.format(folder=folder, more=""))
    before = runs(running)
    overrun(running)
    assert "sim0 is not certified any more" in running.log
    assert "to do: nothing if this was a disturbance: the next start measures anew" in running.log
    assert "loops.walk.budget" in running.log
    assert running.stop() == 0
    running.again()
    assert "id was measured anew on sim0, since" in running.log
    assert runs(running) != before
    assert REFUTED not in running.loop("walk")["not_certified"]
    told = running.log.count("was measured anew")
    assert running.stop() == 0
    running.again()
    assert running.log.count("was measured anew") == told, "the new one is believed"


def test_a_budget_that_did_not_hold_says_nothing_against_the_measurement(
    reign: Any, folder: Path  # noqa: F811
) -> None:  # fmt: skip
    running = reign(YAML.format(folder=folder, more=", budget: 1ms"))
    before = runs(running)
    overrun(running)
    assert "to do: raise loops.walk.budget; its jobs took " in running.log
    assert running.stop() == 0
    running.again()
    assert "was measured anew" not in running.log
    assert runs(running) == before


@pytest.mark.parametrize("kept", [True, False])
def test_whoever_takes_executors_over_knows_what_they_were_admitted_with(
    reign: Any, folder: Path, kept: bool  # noqa: F811
) -> None:  # fmt: skip
    """Also where their measurements were refuted, or were removed meanwhile, as the documents allow at any time."""
    running = reign(YAML.format(folder=folder, more=""))
    assert running.stop() == 0
    running.again()  # by the stored measurement
    pid, before = running.executor("sim0")["pid"], runs(running)
    if kept:
        overrun(running)
    else:
        shutil.rmtree(running.state / "measurements")
    running.kill_supervisor()
    running.again()
    assert running.executor("sim0")["pid"] == pid, running.log
    assert runs(running) == before
    if kept:
        assert REFUTED in running.loop("walk")["not_certified"]
        assert not running.loop("walk")["certified"]
