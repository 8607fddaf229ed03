"""A model's next version on copies of what a loop does: real daemons, real processes, a client that must not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest

from tests import models
from tests.conftest import Start
from tests.running import Running, eventually
from tests.system.test_handover import Walking

YAML = """\
devices:
  cpu0: {{driver: cpu}}
  cpu1: {{driver: cpu}}
models:
  policy: {{path: {folder}/store/policy, version: latest, non_finite: {{actions: forbid}}}}
  spare: {{path: {folder}/store/spare, version: latest}}
  plain: {{path: {folder}/plain.onnx}}
loops:
  walk: {{model: policy, device: cpu0, period: 10ms, budget: 4ms, on_late: run, probation: 0s}}
  other: {{model: plain, device: cpu1, period: 20ms, budget: 4ms}}
admission: {{on_refusal: uncertified}}
grace: 0s
grpc: off
zmq: off
"""
SIZES = (8, 16, 4)


@pytest.fixture
def running(taktd: Start, tmp_path: Path) -> Running:
    """Version 1 is served; 2 is the same network in other bytes, 3 has other weights, 4 other tensors."""
    store = tmp_path / "store"
    for name in ("policy", "spare"):
        models.mlp(store / name / "1" / "model.onnx", SIZES)
    models.mlp(tmp_path / "plain.onnx", SIZES)
    running = taktd(YAML.format(folder=tmp_path))
    same = models.mlp(tmp_path / "same.onnx", SIZES)
    described = onnx.load(str(same))
    described.doc_string = "the same network"
    onnx.save(described, str(same))
    other = models.mlp(tmp_path / "other.onnx", SIZES, seed=7)
    wide = models.mlp(tmp_path / "wide.onnx", (8, 16, 5))
    for number, file in ((2, same), (3, other), (4, wide)):
        done = running.taktctl("model", "add", "policy", str(file))
        assert f"version {number}" in done.stdout, done
    return running


def shadow(running: Running, *arguments: str) -> dict[str, Any]:
    told = running.taktctl_json("model", "shadow", "policy", *arguments)["shadow"]
    assert isinstance(told, dict)
    return told


def begin(running: Running, version: int) -> int:
    """The shadow's process id, proven to be there and gone at the end of the test."""
    done = running.taktctl("model", "activate", "policy", str(version), "--shadow")
    assert done.returncode == 0, done.stderr
    assert f"version {version} runs beside version 1" in done.stdout
    running.remember_family()
    pid = shadow(running)["pid"]
    assert psutil.pid_exists(pid)
    return int(pid)


def compared(running: Running, jobs: int = 20) -> dict[str, Any]:
    eventually(lambda: shadow(running)["samples"] >= jobs, 60, f"{jobs} jobs are compared")
    return shadow(running)


def gone(running: Running, walking: Walking) -> None:
    """Nothing of it is left, and the loop has not noticed."""
    told = running.loop("walk")
    assert told["switches"] == {"start": 1}
    assert told["statistics"]["misses"].get("handover", 0) == 0
    before = walking.journal["ok", "primary"]
    eventually(lambda: walking.journal["ok", "primary"] > before + 3, 10)


def test_the_same_network_shows_no_difference_and_leaves_nothing_when_it_is_stopped(running: Running) -> None:
    descriptors = running.descriptors()
    with Walking(running) as walking:
        pid = begin(running, 2)
        told = compared(running)
        assert (told["differing"], told["failed"], told["state"]) == (0, 0, "comparing")
        assert (told["version"], told["against"], told["loops"], told["device"]) == (2, 1, ["walk"], "cpu0")
        assert told["outputs"]["actions"]["max_abs"] <= 1e-5
        assert told["verified"]["samples"] > 0
        times = told["times"]
        assert 0 < times["p50_ns"] <= times["p99_ns"] <= times["p999_ns"] <= times["max_ns"]
        assert told["would_be_cost_ns"] > times["p999_ns"]
        status = running.taktctl_json("status")
        assert status["shadow"]["model"] == "policy"
        assert status["shadow"]["samples"] >= 20
        assert "policy: version 2 runs as shadow of version 1: " in running.taktctl("status").stdout
        done = running.taktctl("model", "shadow", "policy", "--stop")
        assert "is stopped" in done.stdout, done
        assert not psutil.pid_exists(pid)
        ended = shadow(running)
        assert (ended["state"], ended["why_ended"], ended["pid"]) == ("ended", "stopped", None)
        assert ended["samples"] >= told["samples"]
        gone(running, walking)
    walking.reconcile()
    eventually(lambda: running.descriptors() == descriptors, 10, "no descriptor is left")


def test_other_weights_are_counted_and_told_and_never_answered_with(running: Running) -> None:
    with Walking(running) as walking:
        begin(running, 3)
        told = compared(running)
        assert told["differing"] == told["samples"]
        found = told["outputs"]["actions"]
        assert found["differing"] == told["samples"]
        assert found["max_abs"] > 0.01
        assert found["max_rel"] > 0.01
        assert found["not_finite"] == 0
        worst = found["worst"]
        assert abs(worst["found"] - worst["expected"]) == pytest.approx(found["max_abs"], rel=0.5)
        text = running.taktctl("model", "shadow", "policy").stdout
        assert "actions" in text
        assert "beside version 1" in text
        assert "shadow: " in running.taktctl("model", "list", "policy").stdout
        # What it showed decides: it is activated as it would be without a shadow, and the shadow ends with that.
        done = running.taktctl("model", "activate", "policy", "3")
        assert done.returncode == 0, done.stderr
        assert shadow(running)["why_ended"] == "version 3 is activated"
        assert running.loop("walk")["switches"] == {"start": 1, "handover": 1}
    walking.reconcile()


def test_a_shadow_that_is_killed_is_told_of_and_its_result_kept(running: Running) -> None:
    with Walking(running) as walking:
        pid = begin(running, 2)
        compared(running)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: shadow(running)["state"] == "ended", 10)
        ended = shadow(running)
        assert ended["why_ended"] == "was killed by SIGKILL"
        assert ended["samples"] >= 20
        assert "the shadow of policy, version 2, was killed by SIGKILL" in running.log
        gone(running, walking)
        begin(running, 3)
        assert compared(running)["version"] == 3
    walking.reconcile()
    assert running.stop() == 0


def test_it_follows_the_loop_from_one_client_to_the_next(running: Running) -> None:
    begin(running, 2)
    for jobs in (10, 20):
        with Walking(running) as walking:
            compared(running, jobs)
        assert walking.error is None
        eventually(lambda: running.loop("walk")["lane"] == "free", 10)
    assert shadow(running)["differing"] == 0


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["activate", "policy", "9", "--shadow"], "there is no version 9", "there are"),
        (["activate", "policy", "1", "--shadow"], "version 1 is what the loops use", "another version"),
        (["activate", "policy", "4", "--shadow"], "output actions is FP32[1, 4], and would be FP32[1, 5]", "tensors"),
        (["activate", "nobody", "1", "--shadow"], "there is no model 'nobody'", "there are"),
        (["activate", "plain", "1", "--shadow"], "has no versions", "version: latest"),
        (["activate", "spare", "1", "--shadow"], "no loop uses model spare", "without --shadow"),
        (["shadow", "policy"], "has no shadow", "--shadow"),
        (["shadow", "policy", "--stop"], "no shadow of model policy is running", "taktctl model list"),
    ],
)  # fmt: skip
def test_what_can_t_be_run_beside_is_refused(one: Running, arguments: list[str], what: str, hint: str) -> None:
    done = one.taktctl("model", *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert what in done.stderr
    assert hint in done.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("one")
    for name in ("policy", "spare"):
        models.mlp(folder / "store" / name / "1/model.onnx", SIZES)
    models.mlp(folder / "store/policy/4/model.onnx", (8, 16, 5))
    models.mlp(folder / "plain.onnx", SIZES)
    running = Running(folder, YAML.format(folder=folder).replace("latest", "1", 1))
    running.start().await_ready()
    yield running
    running.close()


def add_broken(running: Running, folder: Path) -> None:
    """Version 5: it answers NaN."""
    broken = models.mlp(folder / "broken.onnx", SIZES, seed=9)
    changed = onnx.load(str(broken))
    biases = changed.graph.initializer[-1]
    biases.CopyFrom(onnx.numpy_helper.from_array(np.full(SIZES[-1], np.nan, np.float32), biases.name))
    onnx.save(changed, str(broken))
    assert "version 5" in running.taktctl("model", "add", "policy", str(broken)).stdout


def test_a_version_that_verification_refuses_does_not_begin(running: Running, tmp_path: Path) -> None:
    add_broken(running, tmp_path)
    done = running.taktctl("model", "activate", "policy", "5", "--shadow")
    assert (done.returncode, done.stdout) == (1, "")
    assert "version 5 can't run as a shadow" in done.stderr
    assert "NaN or infinity in output 'actions'" in done.stderr
    assert shadow(running)["state"] == "ended"
    begin(running, 2)


def test_it_outlives_a_change_that_is_refused(running: Running, tmp_path: Path) -> None:
    add_broken(running, tmp_path)
    with Walking(running) as walking:
        pid = begin(running, 2)
        compared(running)
        done = running.taktctl("model", "activate", "policy", "5")
        assert done.returncode == 1
        assert "NaN or infinity" in done.stderr
        before = shadow(running)
        assert (before["state"], before["pid"]) == ("comparing", pid)
        told = compared(running, before["samples"] + 20)
        assert (told["differing"], told["failed"]) == (0, 0)
        gone(running, walking)
    walking.reconcile()


def test_it_outlives_a_change_that_is_taken_back_and_compares_nothing_meanwhile(running: Running) -> None:
    running.file.write_text(running.file.read_text().replace("probation: 0s", "probation: 60s"))
    running.ask("reload")
    with Walking(running) as walking:
        pid = begin(running, 2)
        compared(running)
        activating = subprocess.Popen(
            [sys.executable, "-m", "taktd.daemon.cli", "model", "activate", "policy", "3"],
            env=running.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        served = walking.journal["ok", "primary"]
        eventually(lambda: running.loop("walk")["switches"].get("handover") == 1, 60)
        eventually(lambda: walking.journal["ok", "primary"] > served + 100, 30)
        running.remember_family()
        os.kill(running.executor("cpu0")["pid"], signal.SIGKILL)
        _, refused = activating.communicate(timeout=60)
        assert activating.returncode == 1
        assert "taken back" in refused
        back = shadow(running)
        assert (back["state"], back["pid"]) == ("comparing", pid)
        told = compared(running, back["samples"] + 20)
        assert told["differing"] == 0, "version 3 would have differed in each job"
    walking.reconcile()


def test_a_shadow_ends_when_a_reload_takes_its_loop_away(running: Running) -> None:
    pid = begin(running, 2)
    running.file.write_text(running.file.read_text().replace("walk: {model: policy", "walk: {model: plain"))
    running.ask("reload")
    eventually(lambda: not psutil.pid_exists(pid), 10, "it ends")
    assert shadow(running)["why_ended"] in (
        "another version is served now",
        "its loops are others by the configuration",
    )


def test_there_is_one_at_a_time(running: Running) -> None:
    begin(running, 2)
    done = running.taktctl("model", "activate", "policy", "3", "--shadow")
    assert done.returncode == 1
    assert "one at a time" in done.stderr
    assert "--stop" in done.stderr


def test_a_supervisor_that_dies_takes_its_shadow_with_it(running: Running) -> None:
    pid = begin(running, 2)
    running.process.kill()
    running.process.wait()
    eventually(lambda: not psutil.pid_exists(pid), 10, "the shadow ends with the supervisor")
    eventually(lambda: not any(p.is_running() for p in running.family), 10, "executors end after their grace")
    running.kill()
