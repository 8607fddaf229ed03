"""The real pycuda on the simulated driver, beside our C module: `make test-gpu-fakes`; skipped without pycuda."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from taktd.drivers import _cuda
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.fault import DeviceFault, FaultKind
from tests.fakes.cuda import simulated
from tests.fakes.cuda.simulated import Simulated

SECOND = 1_000_000_000


@pytest.fixture
def driver(fake_cuda: Simulated) -> object:
    pytest.importorskip("pycuda", reason="pycuda is not in this environment: make test-gpu-fakes")
    import pycuda.driver

    return pycuda.driver


@pytest.fixture
def device(driver: object, fake_cuda: Simulated) -> Iterator[CudaDevice]:
    opened = CudaDevice(0)
    yield opened
    fake_cuda.heal()
    opened.close()


def test_where_pycuda_is_there_it_allocates(device: CudaDevice) -> None:
    assert "pycuda 2026" in device.identity.runtime


def test_both_work_in_one_primary_context(driver: object, device: CudaDevice) -> None:
    before = _cuda.current()
    block = device.allocate(64)
    assert _cuda.current() == before == device.context
    stream = device.stream()
    stream.fill(block.address, 5, 64)
    stream.synchronize(SECOND)
    found = np.zeros(64, np.uint8)
    driver.memcpy_dtoh(found, block.address)  # type: ignore[attr-defined]
    assert (found == 5).all()
    block.close()
    stream.close()


def test_its_errors_are_our_faults(device: CudaDevice, fake_cuda: Simulated) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.allocate(1 << 50)
    assert (caught.value.kind, caught.value.sticky) == (FaultKind.OUT_OF_MEMORY, False)
    stream, block = device.stream(), device.allocate(64)
    fake_cuda.inject("execute", simulated.ECC, times=1)
    stream.fill(block.address, 0, 64)
    with pytest.raises(DeviceFault):
        stream.synchronize(SECOND)
    with pytest.raises(DeviceFault) as caught:
        device.allocate(64)
    assert (caught.value.kind, caught.value.sticky) == (FaultKind.ECC, True)


def test_its_pinned_memory_is_pinned(device: CudaDevice, fake_cuda: Simulated) -> None:
    host = device.allocate_host(4096)
    assert fake_cuda.live()["pinned"] == 1
    assert host.host_address != host.address
    host.close()
    assert fake_cuda.live()["pinned"] == 0


def test_nothing_is_left_when_the_device_is_closed(driver: object, fake_cuda: Simulated) -> None:
    leaked = fake_cuda.leaked()
    for _ in range(20):
        opened = CudaDevice(0)
        opened.allocate(64).close()
        opened.allocate_host(64).close()
        opened.close()
    assert not any(fake_cuda.live().values())
    assert fake_cuda.leaked() == leaked


def test_a_process_that_ends_with_its_device_open_ends_in_order(driver: object, tmp_path: Path) -> None:
    """As an executor does. pycuda by itself aborts it."""
    code = "from taktd.drivers.cuda import CudaDevice; device = CudaDevice(0); block = device.allocate(64)"
    environment = os.environ | simulated.environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
