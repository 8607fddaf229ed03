"""FAULTS 1, 2, 3: clients that are killed or stopped at any moment harm nobody but themselves."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from taktd.ipc import Busy, TaktError
from tests import models
from tests.chance import seed
from tests.conftest import Start
from tests.running import Running, eventually

KILLS = 100
YAML = """\
devices:
  cpu0: {{driver: cpu}}
  cpu1: {{driver: cpu}}  # where no loop's period is too short for a job of the slow model
models:
  id: {{path: {folder}/id.onnx}}
  slow: {{path: {folder}/slow.onnx, device: cpu1}}
loops:
  walk: {{model: id, device: cpu0, period: 2ms, budget: 500us}}
  witness: {{model: id, device: cpu0, period: 5ms, budget: 500us}}
admission: {{on_refusal: uncertified}}
"""


@pytest.fixture
def running(taktd: Start, tmp_path: Path) -> Running:
    models.identity(tmp_path / "id.onnx", (4,))
    models.slow(tmp_path / "slow.onnx", size=384, layers=16)
    return taktd(YAML.format(folder=tmp_path))


def forked(action: Callable[[Callable[[str], None]], None]) -> tuple[int, Any]:
    """Run action(say) in a child; its pid and a stream of what it says."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            action(lambda text: os.write(write, text.encode() + b"\n") and None)
        finally:
            os._exit(0)
    os.close(write)
    return child, os.fdopen(read)


@contextmanager
def witness(running: Running) -> Iterator[list[str]]:
    """Another client's loop all the while; afterwards each of its answers was right."""
    statuses: list[str] = []
    stop = threading.Event()

    def work() -> None:
        with running.connect() as node, node.attach("witness") as lane:
            value = 0
            while not stop.is_set():
                value += 1
                lane.inputs["x"][:] = value
                reply = lane.infer(timeout_us=10_000_000)
                statuses.append(reply.status)
                if reply.ok and lane.outputs["y"][0] != value:
                    statuses.append(f"{lane.outputs['y'][0]} instead of {value}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert statuses.count("ok") > 0
    # On a busy machine a job may expire; it never gets lost, fails or answers wrongly.
    assert set(statuses) <= {"ok", "expired"}, set(statuses)


def settled(statistics: dict[str, Any]) -> bool:
    """Every submitted job has ended in exactly one way."""
    ends = ("ok", "expired", "refused", "invalid", "failed", "lost", "cancelled", "detached", "orphaned")
    return bool(statistics["submitted"] == sum(statistics[end] for end in ends))


def model_statistics(running: Running, name: str) -> dict[str, Any]:
    found = next(m for m in running.ask("models")["models"] if m["name"] == name)["statistics"]
    assert isinstance(found, dict)
    return found


def test_a_client_killed_at_any_moment_frees_its_loop_once(running: Running) -> None:
    chance = random.Random(seed())
    executor = running.executor()["pid"]
    before = running.descriptors()

    def client(say: Callable[[str], None]) -> None:
        lane = running.connect().attach("walk", wait=chance.choice(["block", "spin", "hybrid"]))
        say("attached")
        while True:
            lane.inputs["x"][:] = 1
            lane.infer()

    with witness(running):
        for number in range(KILLS):
            child, said = forked(client)
            if number % 4:
                assert said.readline() == "attached\n"
            time.sleep(chance.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said.close()
            if number % 10 == 9:
                with running.connect() as node, node.attach("walk") as lane:
                    lane.inputs["x"][:] = number
                    reply = lane.infer(timeout_us=10_000_000)
                    assert reply.status in ("ok", "expired"), f"kill {number}"
                    assert not reply.ok or lane.outputs["y"][0] == number
    eventually(lambda: settled(running.loop("walk")["statistics"]), what="accounts balance")
    assert settled(running.loop("witness")["statistics"])
    eventually(lambda: running.descriptors() == before, what="descriptors are back where they were")
    assert running.executor()["pid"] == executor


def lane_mappings(pid: int) -> int:
    return sum("memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def test_memory_is_released_only_after_the_executor_has_written(running: Running) -> None:
    executor = running.executor("cpu1")["pid"]
    before = lane_mappings(executor)
    chance = random.Random(seed())

    def client(say: Callable[[str], None]) -> None:
        lane = running.connect().attach("slow")
        for _ in range(3):
            lane.submit()
        say("submitted")
        signal.pause()

    with witness(running):
        for _ in range(10):
            child, said = forked(client)
            assert said.readline() == "submitted\n"
            time.sleep(chance.uniform(0, 0.01))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            said.close()
            eventually(lambda: lane_mappings(executor) == before, 20, "the lane is unmapped")
            assert settled(model_statistics(running, "slow")), "unmapped while a job was still running"
    assert running.executor("cpu1")["pid"] == executor


def test_a_stopped_client_holds_up_nobody_and_works_when_it_goes_on(running: Running) -> None:
    def client(say: Callable[[str], None]) -> None:
        lane = running.connect().attach("walk")
        sequences = []
        try:
            while True:
                lane.inputs["x"][:] = 3
                sequences.append(lane.submit())
        except Busy:
            say("full")
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            statuses = [lane.wait(sequence, timeout_us=10_000_000).status for sequence in sequences]
            lane.inputs["x"][:] = 4
            reply = lane.infer(timeout_us=10_000_000)
            say(json.dumps([*statuses, reply.status, float(lane.outputs["y"][0])]))
        except TaktError as error:
            say(json.dumps([type(error).__name__]))

    child, said = forked(client)
    assert said.readline() == "full\n"
    with witness(running) as statuses:
        time.sleep(2)  # the time it is stopped is the test
        assert running.ask("status")["ready"]
        assert len(statuses) > 10
        os.kill(child, signal.SIGCONT)
        answer = json.loads(said.readline())
    os.waitpid(child, 0)
    said.close()
    *waited, last, value = answer
    assert set(waited) <= {"ok", "expired"}
    assert last == "ok"
    assert value == 4
    eventually(lambda: settled(running.loop("walk")["statistics"]))
