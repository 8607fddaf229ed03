"""What every driver promises (taktd.drivers.conformance), over all of them: CPU, simulated, CUDA on the simulated GPU.

`taktctl selftest` runs the same checks on a real GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from taktd.drivers.conformance import CHECKS, NotConforming
from taktd.drivers.cpu import CpuDevice, CpuStream
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_memory import DirectMemory
from taktd.drivers.device import Device
from taktd.drivers.sim import SimDevice

KINDS = ["cpu", "sim", "cuda", *(["cuda-pycuda"] if importlib.util.find_spec("pycuda") else [])]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param in ("cpu", "sim"):
        yield CpuDevice() if request.param == "cpu" else SimDevice()
        return
    simulated = request.getfixturevalue("fake_cuda")
    opened = CudaDevice(0, **({} if request.param == "cuda-pycuda" else {"memory": lambda _: DirectMemory()}))
    yield opened
    opened.close()
    assert not any(simulated.live().values()), f"not given back: {simulated.live()}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_device(device: Device, check: Callable[[Device], None]) -> None:
    check(device)


def test_a_device_that_does_not_keep_its_promises_is_found_out() -> None:
    """The canary: a stream that loses every copy."""

    class Forgetful(CpuDevice):
        def stream(self, urgency: int = 0) -> CpuStream:
            stream = CpuStream()
            stream.copy = lambda *_: None  # type: ignore[method-assign]
            return stream

    broken = []
    for check in CHECKS:
        try:
            check(Forgetful())
        except NotConforming:
            broken.append(check.__name__)
    assert "what_goes_there_and_back_is_the_same" in broken
    assert "says_which_device_it_is" not in broken


def test_the_list_of_checks_is_complete() -> None:
    from taktd.drivers import conformance

    public = {
        name
        for name, value in vars(conformance).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == conformance.__name__
    }
    assert public - {"NotConforming"} == {check.__name__ for check in CHECKS}
