"""Fixtures that several folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.cuda.simulated import Simulated
from tests.running import Running

# How long an example takes says something about the machine, never about the code under test.
settings.register_profile("taktd", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("taktd")

# Before anything imports ONNX Runtime, here as in the daemon.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

Start = Callable[..., Running]

# Whole daemons, killed, flooded and swapped, minutes of it: `make test-long`. `make test` has the rest.
LONG_FOLDER = "fault"
LONG_MODULES = {
    "test_doors_alike.py", "test_failover.py", "test_front_door_faults.py", "test_gateway_changes.py", "test_gpu.py",
    "test_gpu_faults.py", "test_grpc.py", "test_handover.py", "test_late_primary.py", "test_listeners.py",
    "test_local_answer.py", "test_metrics.py", "test_models_and_faults.py", "test_perf_analyzer.py",
    "test_repository.py", "test_shadow.py", "test_switching.py", "test_tcp_doors.py", "test_zmq.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes minutes, by where it is."""
    for item in items:
        if item.path.parent.name == LONG_FOLDER or item.path.name in LONG_MODULES:
            item.add_marker("long")


@pytest.fixture
def taktd(tmp_path: Path) -> Iterator[Start]:
    """taktd(yaml): a daemon that is ready. At the end each is stopped by SIGTERM and nobody may be left."""
    started: list[Running] = []

    def start(
        yaml: str, *, name: str = "taktd", wait: bool = True, environment: dict[str, str] | None = None
    ) -> Running:
        folder = tmp_path / name
        folder.mkdir()
        running = Running(folder, yaml, environment)
        started.append(running)
        running.start()
        return running.await_ready() if wait else running

    yield start
    for running in reversed(started):
        running.close()


@pytest.fixture
def fake_cuda() -> Iterator[Simulated]:
    """The simulated CUDA driver as this process's libcuda.so.1, healthy and with its defaults before and after."""
    simulated = Simulated()
    simulated.reset()
    yield simulated
    simulated.heal()
    simulated.reset()
