"""Ready means the same wherever it is asked: every loop that was admitted is answered, by its stand-in if need be."""

from __future__ import annotations

import http.client
import re
from pathlib import Path

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
  walk: {{model: id, device: sim0, period: 20ms, budget: 3ms, fallback: [cpu0]}}
  {more}
admission: {{on_refusal: uncertified}}
http: {{listen: "127.0.0.1:0"}}
"""
REACH = "reach: {model: id, device: sim0, period: 20ms, budget: 3ms}"


def asked(running: Running) -> tuple[int, str, float, bool]:
    """What /health/ready says, with which words; the metric; what `status --json` says."""
    address = next(door["address"] for door in running.ask("status")["doors"] if door["name"] == "http")
    answers = []
    for path in ("/health/ready", "/metrics"):
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", path)
        response = connection.getresponse()
        answers.append((response.status, response.read().decode()))
        connection.close()
    metric = re.search(r"^taktd_ready (\S+)$", answers[1][1], re.MULTILINE)
    assert metric is not None
    return *answers[0], float(metric[1]), running.ask("status")["ready"]


def lose_the_primary(running: Running) -> None:
    """Its engine is bad from now on: its executor ends, and none that is started proves itself."""
    with Walking(running) as walking:
        eventually(lambda: service(running) == ("sim0", "primary"), 10)
        assert running.taktctl("fault", "inject", "sim0", "nan", "--runs", "0").returncode == 0
        eventually(lambda: walking.journal["ok", "stand-in"] > 0, 20, "the stand-in answers")
    eventually(lambda: running.executor("sim0")["restarts"] > 0, 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.identity(tmp_path / "id.onnx", (4,))
    return tmp_path


def test_a_loop_that_nobody_answers_is_not_ready_though_another_loop_of_its_device_has_a_stand_in(
    taktd: Start, folder: Path
) -> None:
    running = taktd(YAML.format(folder=folder, more=REACH))
    assert asked(running)[0] == 200
    assert running.taktctl("status").returncode == 0
    lose_the_primary(running)
    code, said, metric, ready = asked(running)
    assert (code, metric, ready) == (503, 0, False)
    assert "not ready: sim0: loop reach is answered by nobody" in said
    assert "walk" not in said
    shown = running.taktctl("status")
    assert shown.returncode == 1
    assert "loop reach is answered by nobody" in shown.stdout
    assert service(running) == ("cpu0", "stand-in")
    assert running.taktctl("fault", "inject", "sim0", "none").returncode == 0
    eventually(lambda: asked(running)[0] == 200, 60, "the primary is back")
    assert asked(running)[2:] == (1, True)
    eventually(lambda: running.taktctl("status").returncode == 0, 30)


@pytest.mark.long
def test_where_stand_ins_answer_every_loop_it_is_ready_but_status_tells_that_an_executor_does_not_serve(
    taktd: Start, folder: Path
) -> None:
    running = taktd(YAML.format(folder=folder, more=""))
    lose_the_primary(running)
    code, said, metric, ready = asked(running)
    assert (code, metric, ready) == (200, 1, True)
    assert "sim0 by its stand-in cpu0" in said
    shown = running.taktctl("status")
    assert shown.returncode == 1
    assert "not served: executor sim0: " in shown.stdout
