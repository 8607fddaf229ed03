"""FAULTS 13: whatever a client does with its wake-up descriptor, nobody loses a wake-up and nobody pays much."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests import models
from tests.conftest import Start
from tests.fakes.raw_connection import RawConnection
from tests.fakes.raw_lane import CLIENT_WAITING
from tests.running import Running, eventually

YAML = """\
devices:
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
loops:
  walk: {{model: id, period: 5ms, budget: 500us}}
  abused: {{model: id, period: 5ms, budget: 500us}}
admission: {{on_refusal: uncertified}}
"""


@pytest.fixture
def running(taktd: Start, tmp_path: Path) -> Running:
    models.identity(tmp_path / "id.onnx", (4,))
    return taktd(YAML.format(folder=tmp_path))


@contextmanager
def another_loop(running: Running) -> Iterator[list[str]]:
    """A client that goes to sleep for each answer: a lost wake-up shows as `pending`."""
    statuses: list[str] = []
    stop = threading.Event()

    def work() -> None:
        with running.connect() as node, node.attach("walk", wait="block") as lane:
            while not stop.is_set():
                statuses.append(lane.infer(timeout_us=5_000_000).status)
                stop.wait(0.003)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield statuses
    finally:
        stop.set()
        thread.join(20)
    assert len(statuses) > 10
    assert set(statuses) <= {"ok", "expired"}, set(statuses)


def test_a_client_that_never_rings_is_served_late_at_worst(running: Running) -> None:
    raw = RawConnection(running.lanes_socket)
    lane = raw.attached("abused")
    with another_loop(running) as statuses:
        time.sleep(0.3)
        lane.submit()
        # Nobody told the executor. It finds the entry when it looks, and looks because others wake it.
        count = len(statuses)
        eventually(lambda: len(statuses) > count + 20)
        lane.ring()
        eventually(lambda: bool(lane.completions()))
    lane.close()
    raw.close()


def test_a_flood_of_doorbells_costs_little(running: Running) -> None:
    raw = RawConnection(running.lanes_socket)
    lane = raw.attached("abused")
    executor = psutil.Process(running.executor()["pid"])
    stop = threading.Event()
    rung = 0

    def flood() -> None:
        nonlocal rung
        while not stop.is_set():
            with suppress(BlockingIOError):
                for _ in range(1000):
                    lane.ring()
                    rung += 1

    with another_loop(running):
        thread = threading.Thread(target=flood)
        thread.start()
        time.sleep(0.5)
        before, begun = executor.cpu_times(), time.monotonic()
        time.sleep(1.5)
        after, ended = executor.cpu_times(), time.monotonic()
        stop.set()
        thread.join()
    used = (after.user + after.system - before.user - before.system) / (ended - begun)
    assert rung > 0
    assert used < 0.5, f"{used:.0%} of a core for {rung} doorbells"
    # Its real jobs are served all the same.
    lane.submit()
    lane.ring_if_asked()
    eventually(lambda: bool(lane.completions()))
    lane.close()
    raw.close()


def test_flags_changed_and_buffers_filled_block_nobody(running: Running) -> None:
    """The daemon's end must not block however the client's end is set: sockets, and MSG_DONTWAIT on both sides."""
    raw = RawConnection(running.lanes_socket)
    lane = raw.attached("abused")
    flags = fcntl.fcntl(lane.wake.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(lane.wake.fileno(), fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    lane.wake.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    lane.u32(CLIENT_WAITING, 2)  # wants a byte for each completion, and never reads one
    with another_loop(running):
        for number in range(2000):
            lane.submit()
            lane.ring_if_asked()
            eventually(lambda: bool(lane.completions()), what=f"job {number}")
    lane.close()
    raw.close()


def test_a_loop_at_ten_times_its_rate_harms_only_itself(running: Running) -> None:
    stop = threading.Event()
    early: list[bool] = []

    def rush() -> None:
        with running.connect() as node, node.attach("abused", wait="block") as lane:
            while not stop.is_set():
                early.append(lane.infer(timeout_us=5_000_000).early)
                stop.wait(0.0005)

    thread = threading.Thread(target=rush)
    with another_loop(running):
        thread.start()
        time.sleep(1.5)
        stop.set()
        thread.join()
    assert any(early)
    counters = running.loop("walk")["statistics"]
    assert counters["early"] <= counters["submitted"]
    assert running.loop("abused")["statistics"]["early"] == sum(early)
