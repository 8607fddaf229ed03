"""A stand-in for nvidia-ml-py's module (pynvml): the calls the doctor makes, over GPUs that a test describes.

Held to the real module's names: test_doctor.py compares them where nvidia-ml-py is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

NVML_CLOCK_SM = 1
NOT_SUPPORTED = 3
GPU_IS_LOST = 15


class NVMLError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


@dataclass
class FakeGpu:
    """One GPU; a field that is None is not supported by it."""

    name: str = "NVIDIA RTX 4000 SFF Ada"
    persistence: int | None = 1
    clock_mhz: int | None = 1560
    clock_max_mhz: int | None = 3105
    throttle_reasons: int | None = 1
    power_state: int | None = 0
    processes: list[int] = field(default_factory=list)
    compute_mode: int | None = 0
    uuid: str = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00"
    bus: str = "00000000:01:00.0"


class FakeNvml:
    """Use in place of the module. init_error: what nvmlInit raises. init_count: how often NVML was opened."""

    NVML_CLOCK_SM = NVML_CLOCK_SM
    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, driver: str = "580.95.05", init_error: NVMLError | None = None) -> None:
        self.gpus = gpus
        self.driver = driver
        self.init_error = init_error
        self.init_count = 0
        self.open_count = 0
        self.failing: NVMLError | None = None  # what each question raises
        self.lost: set[int] = set()  # cards that are counted, and answer no more

    def nvmlInit(self) -> None:
        self.init_count += 1
        if self.init_error is not None:
            raise self.init_error
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        if self.failing is not None:
            raise self.failing
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index in self.lost:
            raise NVMLError(GPU_IS_LOST, "GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in gpu.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return []

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, domain: int) -> int:
        assert domain == NVML_CLOCK_SM
        return _told(gpu.clock_mhz)

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, domain: int) -> int:
        assert domain == NVML_CLOCK_SM
        return _told(gpu.clock_max_mhz)

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId=gpu.bus.encode())

    nvmlDeviceGetUUID: Callable[[FakeNvml, FakeGpu], str] = lambda self, gpu: gpu.uuid
    nvmlDeviceGetName: Callable[[FakeNvml, FakeGpu], str] = lambda self, gpu: gpu.name
    nvmlDeviceGetPersistenceMode: Callable[[FakeNvml, FakeGpu], int] = lambda self, gpu: _told(gpu.persistence)
    nvmlDeviceGetPerformanceState: Callable[[FakeNvml, FakeGpu], int] = lambda self, gpu: _told(gpu.power_state)
    nvmlDeviceGetComputeMode: Callable[[FakeNvml, FakeGpu], int] = lambda self, gpu: _told(gpu.compute_mode)
    nvmlDeviceGetCurrentClocksThrottleReasons: Callable[[FakeNvml, FakeGpu], int] = lambda self, gpu: _told(
        gpu.throttle_reasons
    )


def _told(value: int | None) -> int:
    if value is None:
        raise NVMLError(NOT_SUPPORTED, "Not Supported")
    return value
