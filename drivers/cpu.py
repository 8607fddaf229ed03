"""The CPU as a device: memory is memory, a stream has done its work when the call returns."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

from taktd.drivers.device import Identity
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["CpuDevice"]


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def _model_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


class CpuBlock:
    """Anonymous pages."""

    def __init__(self, size: int) -> None:
        try:
            self._memory: mmap.mmap | None = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            hint = "Use smaller shapes or fewer models."
            raise DeviceFault(FaultKind.OUT_OF_MEMORY, f"can't map {size} bytes: {error}", hint=hint) from error
        self.size = size
        self.address = self.host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        self._memory = None


class CpuRegistration:
    def __init__(self, address: int, size: int) -> None:
        self.address = self.host_address = address
        self.size = size

    def close(self) -> None:
        """Nothing was taken."""


class CpuStream:
    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def fill(self, target: int, value: int, size: int) -> None:
        ctypes.memset(target, value, size)

    def synchronize(self, timeout_ns: int) -> None:
        """All is done already."""

    def close(self) -> None:
        """Nothing was taken."""


class CpuDevice:
    def __init__(self) -> None:
        machine = Path("/etc/machine-id")
        uuid = machine.read_text().strip() if machine.is_file() else os.uname().nodename
        self.identity = Identity("cpu", _model_name(), f"CPU-{uuid}", "none", _meminfo_bytes("MemTotal"), True)

    def allocate(self, size: int) -> CpuBlock:
        return CpuBlock(_checked(size))

    def allocate_host(self, size: int) -> CpuBlock:
        return CpuBlock(_checked(size))

    def register(self, address: int, size: int) -> CpuRegistration:
        return CpuRegistration(address, _checked(size))

    def stream(self, urgency: int = 0) -> CpuStream:
        return CpuStream()

    def free_bytes(self) -> int:
        return _meminfo_bytes("MemAvailable")

    def close(self) -> None:
        """Nothing was taken."""


def _checked(size: int) -> int:
    if size < 1:
        raise DeviceFault(FaultKind.INVALID_USE, f"{size} bytes asked for: allowed 1 or more", hint="")
    return size
