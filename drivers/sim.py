"""A simulated device: takes the time it is told to take, and fails when it is told to.

Its memory is the host's. What it runs is the caller's business (``taktd.engines.simulated``); here a run is a span of
time, with the faults that were injected meanwhile. Tests use it where they mean "GPU", and so does whoever plans a cell
before the GPU is there.

Faults arrive through one 8-byte word in a mapped file: written whole by whoever injects, read at each run. There is
no message on the way, so a fault hits the next run however busy the process is. The word carries a serial number: a
process that starts later takes a fault as past, unless it was injected until cleared.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from taktd.drivers.cpu import CpuBlock, CpuDevice, CpuRegistration, CpuStream
from taktd.drivers.device import Identity
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["RUNS_MAX", "SLOWNESS_MAX", "UNTIL_CLEARED", "FaultFile", "SimDevice", "SimFault", "SimFaultKind"]

FILE_BYTES: Final = mmap.PAGESIZE
UNTIL_CLEARED: Final = 0
RUNS_MAX: Final = (1 << 16) - 1
SLOWNESS_MAX: Final = (1 << 16) - 1
SPIN_NS: Final = 80_000  # a sleep ends some 20 us late, seldom more than this
SERIAL_BITS: Final = 24


class SimFaultKind(Enum):
    """What can be injected. The values are in the word; 0 is no fault."""

    NONE = 0
    LOST = 1  # sticky: this process can't use the device any more
    OUT_OF_MEMORY = 2
    SLOW = 3  # a run takes `factor` times as long
    NAN = 4  # a run's floating-point results are NaN
    HANG = 5  # a run does not return
    ERROR = 6


@dataclass(frozen=True, slots=True)
class SimFault:
    """``runs``: how many runs it hits, UNTIL_CLEARED for all. ``factor``: of SLOW."""

    kind: SimFaultKind
    factor: int = 1
    runs: int = 1


def _packed(fault: SimFault, serial: int) -> int:
    if not (1 <= fault.factor <= SLOWNESS_MAX and 0 <= fault.runs <= RUNS_MAX):
        raise ValueError(f"{fault}: factor 1 to {SLOWNESS_MAX}, runs 0 to {RUNS_MAX}")
    return serial << 40 | fault.kind.value << 32 | fault.factor << 16 | fault.runs


def _unpacked(word: int) -> SimFault:
    return SimFault(SimFaultKind(word >> 32 & 0xFF), word >> 16 & 0xFFFF, word & 0xFFFF)


class FaultFile:
    """The word, by its file. One process writes; any number read. Raises ``OSError``."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if write:
                os.ftruncate(descriptor, FILE_BYTES)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
            self._map = mmap.mmap(descriptor, FILE_BYTES, mmap.MAP_SHARED, protection)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("Q")

    @property
    def word(self) -> int:
        """Changes with each injection; one aligned load."""
        return self._words[0]

    def read(self) -> SimFault:
        return _unpacked(self.word)

    def inject(self, fault: SimFault) -> None:
        """Takes the place of what was injected before."""
        serial = (self.word >> 40) + 1 & (1 << SERIAL_BITS) - 1
        self._words[0] = _packed(fault, serial)

    def clear(self) -> None:
        self.inject(SimFault(SimFaultKind.NONE))

    def close(self) -> None:
        self._words.release()
        self._map.close()


def _hang() -> None:
    while True:
        time.sleep(3600)  # the GIL is free meanwhile; only a signal that kills ends it


class SimDevice:
    """The device in one process. ``faults``: the file they arrive by, None where none may be injected."""

    def __init__(
        self, faults: Path | None = None, *,
        clock: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep,
        hang: Callable[[], None] = _hang,
    ) -> None:  # fmt: skip
        """Raises ``DeviceFault`` where a fault that lasts until cleared keeps the device from being opened."""
        self._host = CpuDevice()
        host = self._host.identity
        self.identity = Identity("sim", "simulated", f"SIM-{host.uuid}", "simulated", host.memory_bytes, True)
        self._clock, self._sleep, self._hang = clock, sleep, hang
        self._faults = FaultFile(faults) if faults is not None else None
        self._seen = self._faults.word if self._faults else 0
        self._fault = SimFault(SimFaultKind.NONE)
        self._left = 0
        self._lost = False
        if self._faults and (found := self._faults.read()).runs == UNTIL_CLEARED:
            self._fault = found
        if self._fault.kind is SimFaultKind.LOST:
            raise _lost()

    def run(self, cost_ns: int, work: Callable[[], object], *, rehearsal: bool = False) -> bool:
        """Does ``work`` and returns ``cost_ns`` after it began, or later if the work takes longer.

        ``rehearsal``: a run for nobody (warming, measuring); a fault that hits a number of runs waits for a real one.
        True: the results are to be NaN. Raises ``DeviceFault`` (OUT_OF_MEMORY, DEVICE_LOST, LAUNCH_FAILED).
        """
        started_ns = self._clock()
        kind, factor = self._next_fault(rehearsal)
        if kind is SimFaultKind.NONE:
            work()
        elif kind is SimFaultKind.HANG:
            self._hang()
        elif kind is SimFaultKind.LOST:
            raise _lost()
        elif kind is SimFaultKind.OUT_OF_MEMORY:
            raise DeviceFault(FaultKind.OUT_OF_MEMORY, "simulated: out of memory", hint="")
        elif kind is SimFaultKind.ERROR:
            raise DeviceFault(FaultKind.LAUNCH_FAILED, "simulated: the run failed", hint="")
        else:
            work()
        if kind is SimFaultKind.SLOW:
            cost_ns = max(cost_ns, self._clock() - started_ns) * factor
        self._wait(started_ns + cost_ns)
        return kind is SimFaultKind.NAN

    def _next_fault(self, rehearsal: bool) -> tuple[SimFaultKind, int]:
        if self._faults is not None and (word := self._faults.word) != self._seen:
            self._seen = word
            self._fault = _unpacked(word)
            self._left = self._fault.runs
        fault = self._fault
        if self._lost:
            return SimFaultKind.LOST, 1
        if fault.kind is SimFaultKind.NONE:
            return fault.kind, 1
        if fault.runs != UNTIL_CLEARED:
            if rehearsal:
                return SimFaultKind.NONE, 1
            self._left -= 1
            if self._left == 0:
                self._fault = SimFault(SimFaultKind.NONE)
        self._lost = fault.kind is SimFaultKind.LOST
        return fault.kind, fault.factor

    def _wait(self, until_ns: int) -> None:
        left_ns = until_ns - self._clock()
        if left_ns > SPIN_NS:
            self._sleep((left_ns - SPIN_NS) / 1e9)
        while self._clock() < until_ns:
            pass

    # ---- memory: the host's ----

    def allocate(self, size: int) -> CpuBlock:
        return self._host.allocate(size)

    def allocate_host(self, size: int) -> CpuBlock:
        return self._host.allocate_host(size)

    def register(self, address: int, size: int) -> CpuRegistration:
        return self._host.register(address, size)

    def stream(self, urgency: int = 0) -> CpuStream:
        return self._host.stream(urgency)

    def free_bytes(self) -> int:
        return self._host.free_bytes()

    def close(self) -> None:
        if self._faults is not None:
            self._faults.close()
            self._faults = None


def _lost() -> DeviceFault:
    return DeviceFault(FaultKind.DEVICE_LOST, "simulated: the device is lost", hint="", sticky=True)
