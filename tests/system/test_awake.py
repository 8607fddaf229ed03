"""The executor stays awake for whoever comes back as fast as he can, and sleeps for all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from taktd.ipc import Lane
from tests import models
from tests.running import Running

SPIN_US = 200
BLOCK = 8  # jobs
WITHIN_S = 60.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs a core for the executor and one for its client")
    models.identity(tmp_path / "small.onnx", (4,))
    devices = f"devices: {{cpu0: {{driver: cpu, cores: [{cores[-1]}], spin: {SPIN_US}us}}}}\n"
    daemon = Running(tmp_path, f"{devices}models: {{small: {{path: {tmp_path}/small.onnx}}}}\n")
    try:
        yield daemon.start().await_ready()
    finally:
        daemon.close()


def test_the_executor_is_awake_for_a_client_that_comes_back_within_twice_the_spin_time(running: Running) -> None:
    executor = psutil.Process(running.executor()["pid"])
    with running.connect() as node, node.attach("small", wait="block") as lane:
        until = time.monotonic() + WITHIN_S
        while True:  # until the machine lets the client come back in time for a whole block
            time.sleep(0.01)  # a pause; what comes a little too late would be held against the client
            before = asleep(executor)
            longest_us = ask(lane, BLOCK, pause_us=1.2 * SPIN_US)
            if longest_us < 1.8 * SPIN_US and asleep(executor) - before <= 3:
                break
            assert time.monotonic() < until, f"longest pause {longest_us} µs, slept {asleep(executor) - before} times"
        before = asleep(executor)
        ask(lane, BLOCK, pause_us=10 * SPIN_US)
        assert asleep(executor) - before >= BLOCK - 2


def ask(lane: Lane, jobs: int, pause_us: float) -> float:
    """The longest time from an answer's end to the next submission, µs. It is waited for awake, to be exact, and at
    real-time priority where that is allowed."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        return _ask(lane, jobs, pause_us)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _ask(lane: Lane, jobs: int, pause_us: float) -> float:
    longest_us = 0.0
    ended_ns = 0
    for _ in range(jobs):
        reply = lane.infer()
        if ended_ns:
            longest_us = max(longest_us, (reply.submitted_ns - ended_ns) / 1e3)
        ended_ns = reply.ended_ns
        while time.monotonic_ns() - ended_ns < pause_us * 1e3:
            pass
    return longest_us


def asleep(executor: psutil.Process) -> int:
    """How often its main thread has fallen asleep."""
    return int(executor.num_ctx_switches().voluntary)
