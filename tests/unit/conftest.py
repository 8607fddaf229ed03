"""The simulated GPU and the stand-in for TensorRT, for the unit tests of what uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from taktd.drivers.cuda import CudaDevice
from taktd.engines.tensorrt_library import Library, find_library
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated
from tests.fakes.tensorrt import stand_in


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in.install(monkeypatch)
    return find_library()


@pytest.fixture
def device(fake_cuda: Simulated) -> Iterator[CudaDevice]:
    opened = CudaDevice(0)
    yield opened
    fake_cuda.heal()
    opened.close()


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that we start find the simulated GPU."""
    (tmp_path / "fake").mkdir()
    for name, value in simulated.environment(tmp_path / "fake").items():
        monkeypatch.setenv(name, value)
    return tmp_path
