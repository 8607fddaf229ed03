"""Memory does not grow with the number of jobs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests import models
from tests.conftest import Start

YAML = """\
devices:
  cpu0: {{driver: cpu}}
models:
  id: {{path: {folder}/id.onnx}}
loops:
  walk: {{model: id, device: cpu0, period: 1ms, budget: 500us}}
admission: {{on_refusal: uncertified}}
"""
SETTLED_JOBS = 50_000  # pools, caches and the recording's first segments are there
TOLERANCE = 1.02


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_jobs_leave_no_trace_in_memory(tmp_path: Path, taktd: Start) -> None:
    models.identity(tmp_path / "id.onnx", (4,))
    daemon = taktd(YAML.format(folder=tmp_path))
    executor = psutil.Process(daemon.executor()["pid"])
    supervisor = psutil.Process(daemon.process.pid)
    with daemon.connect() as node, node.attach("walk", wait="spin") as lane:
        sizes: list[tuple[int, int]] = []
        for jobs in (SETTLED_JOBS, 1_000_000 - SETTLED_JOBS):
            for _ in range(jobs):
                lane.inputs["x"][0] += 1
                lane.infer()
            sizes.append((executor.memory_info().rss, supervisor.memory_info().rss))
        (executor_before, supervisor_before), (executor_after, supervisor_after) = sizes
    counted = daemon.ask("status")["loops"][0]["jobs"]
    assert counted == 1_000_000
    assert executor_after <= executor_before * TOLERANCE
    assert supervisor_after <= supervisor_before * TOLERANCE
