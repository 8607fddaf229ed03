"""A configuration that is refused is told in the log, once for each attempt, whoever asked for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from taktd.daemon.control_client import AnswerNo
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

YAML = """\
devices: {{cpu0: {{driver: cpu}}}}
models: {{id: {{path: {folder}/id.onnx}}}}
loops: {{walk: {{model: id, device: cpu0, period: 20ms, budget: 5ms}}}}
admission: {{on_refusal: refuse}}
"""
MISSPELT = ("budget:", "budgget:", "budgget")
TOO_MUCH = ("budget: 5ms", "budget: 19999us, deadline: 10ms", "")
LESS_THAN_IT_TAKES = ("budget: 5ms", "budget: 1ns", "loops.walk.budget")


def told(running: Running) -> list[str]:
    return [line for line in running.log.splitlines() if "is refused, the running one stays: " in line]


@pytest.mark.parametrize("by", ["taktctl reload", "SIGHUP"])
def test_each_refused_reload_is_one_error_with_its_reason_and_the_epoch_that_goes_on(
    taktd: Start, tmp_path: Path, by: str
) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    good = YAML.format(folder=tmp_path) + "grpc: off\nzmq: off\n"
    running = taktd(good)
    for number, (old, new, reason) in enumerate((MISSPELT, TOO_MUCH, LESS_THAN_IT_TAKES), 1):
        running.file.write_text(good.replace(old, new))
        if by == "SIGHUP":
            running.process.send_signal(signal.SIGHUP)
            eventually(lambda n=number: len(told(running)) >= n, 30, "the refusal is told")
        else:
            with pytest.raises(AnswerNo):
                running.ask("reload")
        lines = told(running)
        assert len(lines) == number, running.log
        assert "error: the configuration is refused" in lines[-1]
        assert reason in lines[-1]
        assert "epoch=1" in lines[-1]
        assert ("attempt=" in lines[-1]) == (number > 1), "who can't be read gets no number"
        assert running.ask("status")["epoch"] == 1
    running.file.write_text(good.replace("budget: 5ms", "budget: 6ms"))
    assert running.ask("reload")["epoch"] == 4, "numbers are not given again"
    assert running.ask("status")["epoch"] == 4
    assert len(told(running)) == 3
