"""kill -9 of the supervisor: loops go on, the next one takes the executors over, and nobody is left behind.

Instants are drawn from a seed that a failing test shows: TAKTD_SEED=… runs it again.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from taktd.daemon.control_client import AnswerNo, NobodyThere
from taktd.daemon.durable_file import read_sealed, write_sealed
from taktd.daemon.handover.predecessor import KEY
from taktd.daemon.runtime_folder import EXECUTORS_FILE, LANES_SOCKET
from taktd.daemon.supervisor import EXIT_HANDED_OVER
from taktd.ipc import Detached, TaktError
from tests import models
from tests.chance import seed
from tests.running import STOP_S, Running, eventually

YAML = """\
devices:
  cpu0: {{driver: cpu}}
  cpu1: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
  policy: {{path: {folder}/one.onnx}}
loops:
  walk: {{model: policy, device: cpu0, period: 10ms, budget: 2ms, probation: 0s{fallback}}}
  other: {{model: id, device: cpu1, period: 20ms, budget: 2ms, probation: 0s}}
admission: {{on_refusal: uncertified}}
grace: {grace}
"""
ANSWER_US = 30_000_000
KILL_EVERY_S = 0.3
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.identity(tmp_path / "id.onnx", (4,))
    for number, name in enumerate(("one", "two"), 1):
        models.mlp(tmp_path / f"{name}.onnx", (8, 16, 4), seed=number)
    return tmp_path


def yaml(folder: Path, grace: str = "30s", fallback: str = "") -> str:
    return YAML.format(folder=folder, grace=grace, fallback=fallback)


class Reign(Running):
    """A daemon whose supervisor is killed and started again; executors of all of them must be gone at the end."""

    def remember_family(self) -> None:
        super().remember_family()
        for executor in self.ask("status")["executors"] if self.process.poll() is None else ():
            if executor["pid"]:
                self._family[executor["pid"]] = psutil.Process(executor["pid"])

    def executors(self) -> dict[str, int]:
        return {e["device"]: e["pid"] for e in self.ask("status")["executors"]}

    def kill_supervisor(self) -> None:
        self.remember_family()
        self.process.kill()
        self.process.wait()

    def hand_over(self) -> int:
        """As an upgrade of the package asks for it; the exit code."""
        self.remember_family()
        self.process.send_signal(signal.SIGUSR2)
        return self.process.wait(STOP_S)

    def again(self) -> Reign:
        self.start()
        self.await_ready()
        return self

    def left(self) -> list[psutil.Process]:
        return [p for p in self._family.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def reign(tmp_path: Path) -> Iterator[Any]:
    started: list[Reign] = []

    def start(text: str) -> Reign:
        folder = tmp_path / "taktd"
        folder.mkdir()
        started.append(Reign(folder, text))
        started[-1].start()
        started[-1].await_ready()
        return started[-1]

    yield start
    for one in started:
        one.close()


class Client(threading.Thread):
    """Submits every 2 ms on one lane that it attaches once, or, with reattach, has again after its end."""

    def __init__(self, running: Running, name: str = "walk", reattach: bool = False) -> None:
        super().__init__()
        self.running, self.loop, self.reattach = running, name, reattach
        self.detached = 0
        self.journal: Counter[tuple[str, str]] = Counter()
        self.sequences: list[int] = []
        self.error: TaktError | None = None
        self._over, self._begun = threading.Event(), threading.Event()

    def run(self) -> None:
        try:
            with (
                self.running.connect() as node,
                node.attach(self.loop, timeout_us=ANSWER_US, reattach=self.reattach) as lane,
            ):
                tensor = next(iter(lane.inputs))
                while not self._over.is_set():
                    try:
                        lane.inputs[tensor][:] = 1
                        reply = lane.infer(timeout_us=ANSWER_US)
                    except Detached:
                        if not self.reattach:
                            raise
                        self.detached += 1
                        time.sleep(0.01)
                        continue
                    self.sequences.append(reply.sequence)
                    self.journal[reply.status, reply.path] += 1
                    self._begun.set()
                    time.sleep(0.002)
                # Looked at while the lane is still its own.
                self.counted = self.running.loop(self.loop)
        except TaktError as error:
            self.error = error
            self._begun.set()

    def __enter__(self) -> Client:
        self.start()
        assert self._begun.wait(20)
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self.join(ANSWER_US / 1e6)
        assert not self.is_alive()

    def goes_on(self, answers: int = 5, path: str | None = None) -> None:
        def count() -> int:
            return sum(n for (_, p), n in self.journal.items() if path in (None, p))

        before = count()
        eventually(lambda: count() >= before + answers or self.error is not None, 10, f"answers by {path or 'anybody'}")
        assert self.error is None, self.error

    def reconcile(self) -> None:
        assert self.error is None, self.error
        assert self.sequences == list(range(1, len(self.sequences) + 1))
        counted = self.counted["statistics"]
        assert counted["submitted"] == len(self.sequences)
        for status in ("ok", "expired", "failed", "lost", "cancelled", "refused", "invalid"):
            assert counted[status] == sum(n for (s, _), n in self.journal.items() if s == status), status


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_executors_are_taken_over_and_no_answer_is_missing(reign: Any, folder: Path, kills: int) -> None:
    chance = random.Random(seed())
    running = reign(yaml(folder))
    executors = running.executors()
    with Client(running) as client:
        for _ in range(kills):
            client.goes_on()
            time.sleep(chance.uniform(0, KILL_EVERY_S))
            running.kill_supervisor()
            client.goes_on()
            running.again()
            assert running.executors() == executors, running.log
            assert running.loop("walk")["lane"] == "attached"
        client.goes_on()
        eventually(lambda: (running.loop("walk")["client"] or {}).get("pid") == os.getpid(), 10, "its lane is claimed")
    client.reconcile()
    assert running.loop("walk")["switches"] == {"adopted": 1}
    with Client(running, "other") as other:
        other.goes_on()
    other.reconcile()
    with running.connect() as node:
        eventually(lambda: running.loop("walk")["lane"] == "free", 10, "the lane is free again")
        with node.attach("walk") as lane, node.attach("id") as model:
            for one in (lane, model):
                assert one.infer(timeout_us=ANSWER_US).ok
    assert running.stop() == 0
    assert not list(running.runtime.glob("executors*"))


def test_a_fault_that_was_injected_before_is_shown_and_can_be_ended_by_the_next(reign: Any, folder: Path) -> None:
    text = yaml(folder).replace("cpu0: {driver: cpu}", "cpu0: {driver: sim, cost: 1ms}") + "allow_faults: true\n"
    running = reign(text.replace("budget: 2ms, probation: 0s}", "budget: 9ms, on_late: run, switch: {failures: 0}}", 1))
    executors = running.executors()
    with Client(running) as client:
        client.goes_on()
        assert running.taktctl("fault", "inject", "cpu0", "error", "--runs", "0").returncode == 0
        eventually(lambda: client.journal["failed", "primary"] > 3, 10, "the fault is there")
        running.kill_supervisor()
        running.again()
        assert running.executors() == executors
        lasting = {"device": "cpu0", "kind": "error", "factor": 1, "runs": 0}
        assert running.ask("status")["faults"] == [lasting]
        assert running.ask("fault.list")["faults"] == [lasting]
        assert "injected on cpu0: error, until cleared" in running.taktctl("status").stdout
        assert running.taktctl("fault", "inject", "cpu0", "none").returncode == 0
        well = client.journal["ok", "primary"]
        eventually(lambda: client.journal["ok", "primary"] > well + 3, 10, "it is over")
        assert running.ask("status")["faults"] == []
        assert running.taktctl("fault", "inject", "cpu0", "slow=2x").returncode == 0
    assert client.error is None, client.error
    assert running.stop() == 0
    running.again()
    assert running.ask("status")["faults"] == [], "a start with executors of its own begins without"


def test_who_has_no_successor_ends_after_the_grace_and_tells_its_clients(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder, grace="1s"))
    with Client(running) as client:
        client.goes_on()
        running.kill_supervisor()
        client.goes_on()
        eventually(lambda: not running.left(), 10, "nobody is left")
        eventually(lambda: client.error is not None, 5, "the client is told")
    assert isinstance(client.error, Detached), client.error
    assert [status for status, _ in client.journal] == ["ok"], client.journal
    running.again()
    with Client(running) as client:
        client.goes_on()
    client.reconcile()


def test_a_service_that_is_stopped_while_nobody_supervises_it_leaves_nobody(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    running.kill_supervisor()
    assert running.left()
    (running.runtime / LANES_SOCKET).unlink()  # as systemd does when the socket unit stops
    eventually(lambda: not running.left(), 10, "long before the grace of 30 s is over")
    running.again()


def test_a_client_that_wants_its_lane_back_has_it_again_after_all_executors_were_gone(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder, grace="0s"))
    with Client(running, reattach=True) as client:
        running.kill_supervisor()
        eventually(lambda: client.detached > 2, 10, "the lane ends")
        running.again()
        client.goes_on()
    assert client.error is None, client.error
    assert client.counted["client"]["pid"] == os.getpid()


def test_infer_alone_has_its_lane_again_and_keeps_it(reign: Any, folder: Path) -> None:
    """The next taktd gives the same numbers to lanes as the one before: what ended must not be given back by them."""
    running = reign(yaml(folder, grace="0s"))
    with running.connect() as node, node.attach("other", timeout_us=ANSWER_US, reattach=True) as lane:
        lane.inputs["x"][:] = 3
        for _ in range(3):
            assert lane.infer(timeout_us=ANSWER_US).ok
            lane.inputs["x"][:] = 3
            running.kill_supervisor()
            eventually(lambda: not running.left(), 10, "all executors are gone")
            running.again()
            deadline = time.monotonic() + 20
            answered = False
            while not answered and time.monotonic() < deadline:
                with suppress(Detached):
                    answered = lane.infer(timeout_us=ANSWER_US).ok
            assert answered
            assert lane.outputs["y"].tolist() == [3] * 4
            for _ in range(5):
                assert lane.infer(timeout_us=ANSWER_US).ok, "it is there to stay"
    assert running.stop() == 0


def test_another_configuration_is_taken_over_by_handover_after_the_adoption(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    executors = running.executors()
    with Client(running) as client:
        client.goes_on()
        running.kill_supervisor()
        running.file.write_text(running.file.read_text().replace("one.onnx", "two.onnx"))
        running.again()
        eventually(lambda: running.ask("status")["epoch"] == 2, 30, "the file is taken over")
        eventually(lambda: running.loop("walk")["switches"] == {"adopted": 1, "handover": 1}, 10)
        client.goes_on()
        eventually(lambda: running.executors()["cpu1"] == executors["cpu1"], 5, "what is the same stays")
        assert running.executors()["cpu0"] != executors["cpu0"]
        client.goes_on()
    client.reconcile()
    assert running.stop() == 0


def test_a_supervisor_that_makes_room_leaves_everything_to_the_next_of_its_version(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    executors = running.executors()
    with Client(running) as client:
        client.goes_on()
        assert running.hand_over() == EXIT_HANDED_OVER
        client.goes_on()
        running.again()
        client.goes_on()
    client.reconcile()
    assert running.executors() == executors
    assert running.loop("walk")["switches"] == {"adopted": 1}
    assert running.ask("status")["epoch"] == 1
    assert running.stop() == 0


def test_an_upgrade_hands_the_loops_over_to_executors_of_the_new_version(
    reign: Any, folder: Path, tmp_path: Path
) -> None:
    running = reign(yaml(folder))
    executors = running.executors()
    with Client(running) as client:
        client.goes_on()
        assert running.hand_over() == EXIT_HANDED_OVER
        running.environment["PYTHONPATH"] = str(another_version(tmp_path / "newer"))
        client.goes_on()
        running.again()
        both = {"adopted": 1, "handover": 1}
        eventually(lambda: running.loop("walk")["switches"] == both, 60, "the new version serves")
        client.goes_on()
    client.reconcile()
    assert set(running.executors().values()).isdisjoint(executors.values())
    assert running.stop() == 0


def another_version(folder: Path) -> Path:
    """A copy of taktd in which one file is newer; the folder to find it in."""
    for name in ("daemon", "engines", "drivers", "ipc"):
        source = ROOT / name
        shutil.copytree(source, folder / "taktd" / name, ignore=shutil.ignore_patterns("__pycache__", "build", "tests"))
    os.utime(folder / "taktd" / "daemon" / "executor.py", (1, 1))
    return folder


def test_executors_of_a_version_that_is_not_understood_are_ended_at_once(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    running.kill_supervisor()
    left = running.left()
    file = running.runtime / EXECUTORS_FILE
    body = read_sealed(file, KEY)
    body["configuration"]["future"] = 1
    write_sealed(file, KEY, body)
    running.again()
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert "is not understood: Configuration is not what it was" in running.log
    with Client(running) as client:
        client.goes_on()
    client.reconcile()


BROKEN = ("loops: [", "loops: {walk: {model: nobody}}", "devices: {cpu0: {driver: cpu}}\nmodels: {}\nloops: {x: 1}\n")


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_file_does_not_end_loops_that_are_served(reign: Any, folder: Path, broken: str) -> None:
    running = reign(yaml(folder))
    executors, good = running.executors(), running.file.read_text()
    with Client(running) as client:
        client.goes_on()
        running.kill_supervisor()
        running.file.write_text(broken)
        running.again()
        assert running.executors() == executors, running.log
        assert "they go on. Repair the file" in running.log
        status = running.ask("status")
        assert "taktd.yaml" in status["refused"]
        assert any("taktd.yaml is refused" in text for text in running.notifications)
        assert "is not what runs: it is refused" in running.taktctl("status").stdout
        with pytest.raises(AnswerNo):
            running.ask("reload")
        assert running.ask("status")["refused"]
        client.goes_on()
        running.file.write_text(good)
        assert running.ask("reload")["message"] == "reload: nothing has changed"
        assert running.ask("status")["refused"] == ""
        client.goes_on()
    client.reconcile()
    assert running.executors() == executors
    assert running.stop() == 0


def test_a_file_that_can_be_read_and_not_be_served_does_not_end_loops_either(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    executors, good = running.executors(), running.file.read_text()
    with Client(running) as client:
        client.goes_on()
        running.kill_supervisor()
        running.file.write_text(good.replace("one.onnx", "nobody.onnx"))
        running.again()
        eventually(lambda: "nobody.onnx" in running.ask("status")["refused"], 30, "the file is refused")
        client.goes_on()
        assert running.executors() == executors
        running.kill_supervisor()
        client.goes_on()
        running.again()
        client.goes_on()
    client.reconcile()
    assert running.executors() == executors


def test_a_broken_file_ends_a_start_where_nobody_serves(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder, grace="0s"))
    running.kill_supervisor()
    eventually(lambda: not running.left(), 10, "nobody is left")
    running.file.write_text(BROKEN[1])
    running.start()
    assert running.process.wait(30) == 78
    assert "the configuration is refused" in running.log
    running.kill()


def test_executors_that_can_t_be_taken_over_are_ended_and_the_refusal_counts(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    executors = running.executors()
    running.kill_supervisor()
    for pid in executors.values():
        os.kill(pid, signal.SIGSTOP)
    running.file.write_text(BROKEN[1])
    running.start()
    assert running.process.wait(30) == 78
    assert "no executor of the taktd before can be taken over" in running.log
    eventually(lambda: not running.left(), 10, "nobody is left")
    running.kill()


def test_a_broken_file_beside_a_taktd_that_lives_is_refused_as_ever(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    (folder / "broken.yaml").write_text(BROKEN[1])
    second = subprocess.run(
        [sys.executable, "-m", "taktd.daemon", "--config", str(folder / "broken.yaml")],
        env=running.environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode == 78
    assert "the configuration is refused" in second.stderr
    with Client(running) as client:
        client.goes_on()
    client.reconcile()


def test_a_lane_that_nobody_claims_ends_and_is_counted(reign: Any, folder: Path) -> None:
    """Its client lives, but never uses it: like one that hangs, or a process that was left its descriptors."""
    running = reign(yaml(folder, grace="12s"))
    with running.connect() as node, node.attach("walk") as lane, node.attach("id") as model:
        for one in (lane, model):
            assert one.infer(timeout_us=ANSWER_US).ok
        running.kill_supervisor()
        running.again()
        with Client(running, "other") as client:
            client.goes_on()
            assert running.loop("walk")["lane"] == "attached"
            eventually(lambda: running.ask("status")["lanes_unclaimed"] == 2, 30, "both lanes have ended")
            assert running.loop("walk")["lane"] in ("clearing", "free")
            client.goes_on()
        client.reconcile()
        assert "has not claimed it for 12s" in running.log
        for one in (lane, model):
            with pytest.raises(Detached):
                one.infer(timeout_us=ANSWER_US)
        with Client(running) as again:
            again.goes_on()
        assert again.error is None
    assert running.stop() == 0


def test_a_stand_in_is_taken_over_too_and_stands_in_meanwhile(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder, fallback=", fallback: [cpu1]"))
    with Client(running) as client:
        eventually(lambda: "stand-in" not in running.loop("walk")["not_certified"], 30, "the stand-in is ready")
        before = running.executors()
        running.kill_supervisor()
        client.goes_on()
        os.kill(before["cpu0"], signal.SIGKILL)
        client.goes_on(path="stand-in")
        running.again()
        assert running.executors()["cpu1"] == before["cpu1"]
        client.goes_on(20, path="primary")
        assert running.executors()["cpu0"] != before["cpu0"]
        kept = running.executors()
        running.kill_supervisor()
        client.goes_on()
        running.again()
        assert running.executors() == kept
        os.kill(kept["cpu0"], signal.SIGKILL)
        client.goes_on(path="stand-in")
        client.goes_on(20, path="primary")
    client.reconcile()
    assert running.stop() == 0


def test_a_client_that_is_killed_meanwhile_loses_its_lane_to_the_next(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    program = (
        "import sys, taktd.ipc as t\n"
        f"n = t.connect({running.lanes_socket!r}); l = n.attach('walk'); m = n.attach('id')\n"
        "l.infer(); m.infer(); print('here', flush=True)\n"
        "while True: l.infer()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "here\n"
        running.kill_supervisor()
        client.kill()
    running.again()
    eventually(lambda: running.loop("walk")["lane"] == "free", 10, "the lane is free")
    with Client(running) as other:
        other.goes_on()
    assert other.error is None


@pytest.mark.parametrize("shared", ["TAKTD_RUNTIME_DIR", "TAKTD_STATE_DIR"])
def test_a_second_daemon_refuses_a_folder_that_the_first_one_lives_in(
    reign: Any, folder: Path, tmp_path: Path, shared: str
) -> None:
    running = reign(yaml(folder))
    executors = running.executors()
    elsewhere = {name: str(tmp_path / "second" / name) for name in ("TAKTD_RUNTIME_DIR", "TAKTD_STATE_DIR")}
    second = subprocess.run(
        [sys.executable, "-m", "taktd.daemon", "--config", str(running.file)],
        env=running.environment | elsewhere | {shared: running.environment[shared]},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"another taktd (pid {running.process.pid}) uses {running.environment[shared]}" in second.stderr
    assert f"a folder of its own in {shared}" in second.stderr
    assert running.executors() == executors


def test_an_executor_that_does_not_answer_is_ended_and_replaced(reign: Any, folder: Path) -> None:
    running = reign(yaml(folder))
    before = running.executors()
    running.kill_supervisor()
    os.kill(before["cpu1"], signal.SIGSTOP)
    running.again()
    assert running.executors()["cpu0"] == before["cpu0"]
    assert running.executors()["cpu1"] != before["cpu1"]
    with Client(running, "other") as client:
        client.goes_on()
    client.reconcile()


@pytest.mark.slow
def test_a_supervisor_that_dies_in_the_middle_of_a_change_leaves_one_of_the_two(reign: Any, folder: Path) -> None:
    chance = random.Random(seed())
    running = reign(yaml(folder).replace("probation: 0s", "probation: 2s", 1))

    def reload() -> None:
        with suppress(AnswerNo, NobodyThere):
            running.ask("reload")

    with Client(running) as client:
        for number in range(4):
            old, new = ("one.onnx", "two.onnx") if number % 2 == 0 else ("two.onnx", "one.onnx")
            running.file.write_text(running.file.read_text().replace(old, new))
            asking = threading.Thread(target=reload)
            asking.start()
            time.sleep(chance.uniform(0, 3))
            running.kill_supervisor()
            asking.join()
            client.goes_on()
            running.again()
            client.goes_on()
    client.reconcile()
    assert running.stop() == 0
