"""Nothing stops the loop: stand-in, hand-back, changes by handover, and their return, on a real daemon.

Each client keeps a journal of its own. At the end the daemon's counters must say the same: every submission answered
exactly once, by whom, and how.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from taktd.daemon.control_client import AnswerNo
from taktd.ipc import Detached, TaktError
from tests import models
from tests.conftest import Start
from tests.running import Running, eventually

YAML = """\
devices:
  cpu0: {{driver: cpu}}
  cpu1: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
  policy: {{path: {folder}/one.onnx}}
loops:
  walk: {{model: policy, device: cpu0, period: 10ms, budget: 2ms, fallback: [cpu1, hold], probation: {probation}}}
  other: {{model: id, device: cpu1, period: 20ms, budget: 2ms, probation: {probation}}}
admission: {{on_refusal: uncertified}}
grpc: off
zmq: off
"""
ANSWER_US = 30_000_000
BACK_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.identity(tmp_path / "id.onnx", (4,))
    for number, name in enumerate(("one", "two"), 1):
        models.mlp(tmp_path / f"{name}.onnx", (8, 16, 4), seed=number)
    models.mlp(tmp_path / "wide.onnx", (8, 16, 5))
    return tmp_path


def yaml(folder: Path, probation: str = "0s") -> str:
    return YAML.format(folder=folder, probation=probation)


class Walking(threading.Thread):
    """A client that submits `every_s` after each answer and never attaches again.

    journal counts (status, path) of each completion: what the client library would answer itself is not wanted here.
    """

    def __init__(self, running: Running, name: str = "walk", every_s: float = 0.002) -> None:
        super().__init__()
        self.running, self.loop, self.every_s = running, name, every_s
        self.journal: Counter[tuple[str, str]] = Counter()
        self.sequences: list[int] = []
        self.error: TaktError | None = None
        self._over = threading.Event()
        self._begun = threading.Event()

    def run(self) -> None:
        with self.running.connect() as node:
            try:
                with node.attach(self.loop, timeout_us=ANSWER_US) as lane:
                    tensor = next(iter(lane.inputs))
                    while not self._over.is_set():
                        lane.inputs[tensor][:] = 1
                        reply = lane.wait(lane.submit(), timeout_us=ANSWER_US)
                        self.sequences.append(reply.sequence)
                        self.journal[reply.status, reply.path] += 1
                        self._begun.set()
                        time.sleep(self.every_s)
            except TaktError as error:
                self.error = error
                self._begun.set()

    def __enter__(self) -> Walking:
        self.start()
        assert self._begun.wait(20)
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.join(ANSWER_US / 1e6)
        assert not self.is_alive()

    def paths(self) -> Counter[str]:
        return Counter({path: n for path in {p for _, p in self.journal} for n in [self._of(path)]})

    def _of(self, path: str) -> int:
        return sum(n for (_, p), n in self.journal.items() if p == path)

    def reconcile(self) -> None:
        """The client's journal is the daemon's: nothing lost, nothing double."""
        assert self.error is None, self.error
        assert self.sequences == list(range(1, len(self.sequences) + 1))
        counted = self.running.loop(self.loop)["statistics"]
        assert counted["submitted"] == len(self.sequences)
        for status in ("ok", "expired", "failed", "lost", "cancelled", "refused", "invalid"):
            assert counted[status] == sum(n for (s, _), n in self.journal.items() if s == status), status


def service(running: Running, name: str = "walk") -> tuple[str | None, str | None]:
    told = running.loop(name)
    return told["served_by"], told["role"]


def kill(running: Running, device: str) -> None:
    os.kill(running.executor(device)["pid"], signal.SIGKILL)


def home_again(running: Running, walking: Walking, path: str = "primary") -> None:
    eventually(lambda: service(running) == ("cpu0", "primary"), BACK_S, "the primary has its loop again")
    before = walking.journal["ok", path]
    eventually(lambda: walking.journal["ok", path] > before + 3, 10, f"answers by {path}")


# ---- stand-in ----


def test_the_stand_in_goes_on_when_the_primary_is_killed_and_gives_back(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    first, last = running.loop("walk")["fallback"]
    assert (first, last) == ({"kind": "device", "device": "cpu1", "model": "policy"}, {"kind": "hold"})
    with Walking(running) as walking:
        for round_ in range(1, 4):
            home_again(running, walking)
            before = walking.journal["ok", "stand-in"]
            kill(running, "cpu0")
            eventually(lambda b=before: walking.journal["ok", "stand-in"] > b, 5, "the stand-in answers")
            told = running.loop("walk")
            if told["role"] == "stand-in":
                assert told["why"] == "died"
                assert not told["certified"]
            assert told["switches"]["died"] == round_
        home_again(running, walking)
    walking.reconcile()
    told = running.loop("walk")
    assert told["switches"] == {"start": 1, "died": 3, "hand-back": 3}, running.log
    bad = len(walking.sequences) - sum(n for (status, _), n in walking.journal.items() if status == "ok")
    assert bad <= 3 + len(walking.sequences) // 20, walking.journal
    switched = "is served by executor cpu1 (stand-in): died"
    (line, *_) = [line for line in running.log.splitlines() if switched in line]
    assert " loop=walk " in line


def test_a_stand_in_that_is_killed_comes_back_and_is_missed_meanwhile(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    with Walking(running) as walking:
        pid = running.executor("cpu1")["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "stand-in on cpu1 is gone" in running.log, 5)
        assert "stand-in on cpu1" in running.loop("walk")["not_certified"]
        assert not running.ask("status")["certified"]
        eventually(lambda: "stand-in" not in running.loop("walk")["not_certified"], BACK_S, "the stand-in is back")
        assert service(running) == ("cpu0", "primary")
        assert set(walking.paths()) <= {"primary", ""}
        kill(running, "cpu0")
        eventually(lambda: walking.journal["ok", "stand-in"] > 0, 5, "it stands in again")
        home_again(running, walking)
    walking.reconcile()


def test_a_client_that_comes_while_the_stand_in_serves_is_served(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    kill(running, "cpu0")
    with Walking(running) as walking:
        home_again(running, walking)
    walking.reconcile()
    with Walking(running) as walking:
        home_again(running, walking)
    assert walking.error is None


# ---- handover ----


def swap(running: Running, text: str) -> str:
    running.file.write_text(text)
    return str(running.ask("reload")["message"])


def test_hot_swaps_under_load_lose_nothing_and_leave_nothing(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    old, new = yaml(folder), yaml(folder).replace("one.onnx", "two.onnx")
    swap(running, new)
    with Walking(running) as walking:
        descriptors, children = running.descriptors(), len(psutil.Process(running.process.pid).children())
        for number in range(20):
            swap(running, old if number % 2 == 0 else new)
        home_again(running, walking)
        running.remember_family()
        assert len(psutil.Process(running.process.pid).children()) == children
        assert running.descriptors() == descriptors
    told = running.loop("walk")
    assert told["switches"] == {"start": 1, "handover": 21}
    assert told["statistics"]["misses"].get("handover", 0) == 0
    walking.reconcile()
    assert walking.paths()["stand-in"] == 0


def test_the_new_model_answers_after_a_swap(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    with running.connect() as node, node.attach("walk") as lane:
        answers = []
        for text in (yaml(folder), yaml(folder).replace("one.onnx", "two.onnx"), yaml(folder)):
            swap(running, text)
            lane.inputs["obs"][:] = 1
            assert lane.infer(timeout_us=ANSWER_US).status == "ok"
            answers.append(lane.outputs["actions"].copy())
    np.testing.assert_array_equal(answers[0], answers[2])
    assert not np.allclose(answers[0], answers[1])


def test_a_new_model_that_can_not_be_served_is_refused_and_the_old_one_goes_on(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    (folder / "broken.onnx").write_bytes((folder / "two.onnx").read_bytes()[:200])
    with Walking(running) as walking:
        family = {p.pid for p in psutil.Process(running.process.pid).children()}
        with pytest.raises(AnswerNo, match=r"policy.*broken\.onnx"):
            swap(running, yaml(folder).replace("one.onnx", "broken.onnx"))
        with pytest.raises(AnswerNo, match="nowhere"):
            swap(running, yaml(folder).replace("fallback: [cpu1, hold]", "fallback: [nowhere]"))
        home_again(running, walking)
        assert {p.pid for p in psutil.Process(running.process.pid).children()} == family
    walking.reconcile()
    assert running.ask("status")["epoch"] == 1
    assert running.loop("walk")["switches"] == {"start": 1}


def test_what_is_not_admissible_is_refused_with_the_analysis(taktd: Start, folder: Path) -> None:
    text = yaml(folder).replace("on_refusal: uncertified", "on_refusal: refuse")
    running = taktd(text)
    with pytest.raises(AnswerNo, match=r"can't stand in for loop walk.*"):
        swap(running, text.replace("period: 20ms, budget: 2ms", "period: 20ms, budget: 19ms"))
    accepted = text.replace("period: 20ms, budget: 2ms", "period: 20ms, budget: 19ms")
    accepted = accepted.replace("fallback: [cpu1, hold]", "fallback: [cpu1, hold], fallback_uncertified: true")
    swap(running, accepted)
    told = running.loop("walk")
    assert not told["certified"]
    assert "cpu1" in told["not_certified"]
    with Walking(running) as walking:
        kill(running, "cpu0")
        eventually(lambda: walking.journal["ok", "stand-in"] > 0, 5, "the uncertified stand-in answers")
    walking.reconcile()


Check = Callable[[Running, Walking], None]


@pytest.mark.parametrize(
    ("old", "new", "path", "value", "ended"),
    [
        ("budget: 2ms, fallback", "budget: 3ms, fallback", "cost_ns", 3_000_000, ""),
        ("budget: 2ms, fallback", "budget: 2ms, on_late: run, fallback", "on_late", "run", ""),
        ("[cpu1, hold]", "[cpu1]", "fallback", [{"kind": "device", "device": "cpu1", "model": "policy"}], ""),
        (
            "period: 10ms",
            "period: 8ms",
            "period_ns",
            8_000_000,
            "its period changed from 10ms to 8ms, its deadline changed from 10ms to 8ms",
        ),
        ("one.onnx", "wide.onnx", "model", "policy", "its outputs changed"),
        ("model: policy, device: cpu0", "model: policy, device: cpu1", "device", "cpu1", "its device changed to cpu1"),
    ],
)
def test_a_reload_keeps_clients_whose_lane_stays_the_same_and_tells_the_others_and_who_reloads_why(
    taktd: Start, folder: Path, old: str, new: str, path: str, value: Any, ended: str
) -> None:
    running = taktd(yaml(folder))
    text = yaml(folder).replace(old, new)
    if value == "cpu1":
        text = text.replace("fallback: [cpu1, hold]", "fallback: [cpu0, hold]")
    with Walking(running) as walking:
        told = swap(running, text)
        assert running.loop("walk")[path] == value
        if ended:
            eventually(lambda: walking.error is not None, 5, "the client is told that its lane is over")
            assert f"{ended} in the configuration; attach again" in str(walking.error)
            assert f"(uid {os.getuid()}, pid {os.getpid()}) has to attach again: {ended}" in told, told
        else:
            home_again(running, walking)
            assert "attach again" not in told
    if not ended:
        walking.reconcile()
    assert running.ask("status")["epoch"] == 2
    with Walking(running) as again:
        eventually(lambda: again.journal["ok", "primary"] > 5, 10)
    assert again.error is None


def test_a_lane_that_comes_back_after_a_reload_is_paced_by_the_new_period(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    with running.connect() as node, node.attach("walk", reattach=True) as lane:
        ticks = lane.ticks()
        next(ticks)
        assert lane.infer().ok
        swap(running, yaml(folder).replace("period: 10ms", "period: 13ms"))

        def back() -> bool:
            with suppress(Detached):  # the end is told, and each time that there is no other lane yet
                return len(lane.inputs) > 0
            return False

        eventually(back, 10, "the lane comes back")
        first, second = next(ticks), next(ticks)
        assert second.release_ns - first.release_ns == 13_000_000 * (1 + second.missed)
        assert lane.infer().ok


def test_loops_models_and_devices_come_and_go(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder))
    more = (
        yaml(folder)
        .replace("models:\n", "  cpu2: {driver: cpu}\nmodels:\n")
        .replace(
            "admission:", "  third: {model: id, device: cpu2, period: 50ms, budget: 2ms, probation: 0s}\nadmission:"
        )
    )
    with Walking(running) as walking:
        first = running.executor("cpu0")["pid"]
        swap(running, more)
        assert running.executor("cpu0")["pid"] == first, "what a change does not touch is not replaced"
        with Walking(running, "third") as third:
            eventually(lambda: third.journal["ok", "primary"] > 5, 10)
            swap(running, yaml(folder))
            eventually(lambda: third.error is not None, 10, "its client is told")
        assert {e["device"] for e in running.ask("status")["executors"]} == {"cpu0", "cpu1"}
        home_again(running, walking)
    walking.reconcile()


# ---- probation ----

SIMULATED = """\
devices:
  sim0: {{driver: sim, cost: {cost}}}
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
loops:
  walk: {{model: id, device: sim0, period: 20ms, budget: 10ms, probation: 5s}}
admission: {{on_refusal: uncertified}}
grpc: off
zmq: off
"""


def test_a_change_that_does_worse_is_taken_back(taktd: Start, folder: Path) -> None:
    good, bad = (SIMULATED.format(folder=folder, cost=cost) for cost in ("1ms", "9ms"))
    bad = bad.replace("period: 20ms, budget: 10ms", "period: 20ms, deadline: 20ms, budget: 10ms, on_late: run")
    bad = bad.replace("cost: 9ms", "cost: {p50: 9ms, p99: 60ms, max: 60ms}").replace("p50: 9ms", "p50: 50ms")
    bad = bad.replace("budget: 10ms, ", "")
    running = taktd(good)
    with Walking(running) as walking:
        with pytest.raises(AnswerNo, match=r"taken back.*misses"):
            swap(running, bad)
        eventually(lambda: service(running) == ("sim0", "primary"), 10)
        told = running.loop("walk")
        assert told["switches"] == {"start": 1, "handover": 1, "return": 1}
        assert running.ask("status")["epoch"] == 1
        before = walking.journal["ok", "primary"]
        eventually(lambda: walking.journal["ok", "primary"] > before + 5, 10)
    walking.reconcile()


def test_one_change_at_a_time(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder, "2s"))
    said: list[str] = []
    text = yaml(folder, "2s").replace("one.onnx", "two.onnx")
    first = threading.Thread(target=lambda: said.append(swap(running, text)))
    first.start()
    eventually(lambda: "executors of" in running.log, 10)
    with pytest.raises(AnswerNo, match="another change is being made"):
        running.ask("reload")
    first.join(60)
    assert "models.policy.path" in said[0]


def test_the_new_executor_dies_on_probation(taktd: Start, folder: Path) -> None:
    running = taktd(yaml(folder, "20s"))
    with Walking(running) as walking:
        refused: list[str] = []

        def change() -> None:
            try:
                swap(running, yaml(folder, "20s").replace("one.onnx", "two.onnx"))
            except AnswerNo as error:
                refused.append(str(error))

        thread = threading.Thread(target=change)
        thread.start()
        eventually(lambda: running.loop("walk")["switches"].get("handover") == 1, BACK_S)
        eventually(lambda: running.ask("status")["epoch"] == 2, 10)
        kill(running, "cpu0")
        thread.join(BACK_S)
        assert "taken back" in refused[0]
        home_again(running, walking)
    walking.reconcile()
    assert running.ask("status")["epoch"] == 1
