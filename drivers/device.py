"""What every device can do, whatever its driver: memory, copies in order, memory of others made reachable.

Addresses are plain integers. ``close`` gives a thing back; closing twice is fine. All calls raise ``DeviceFault``.
tests/conformance/test_drivers.py holds each driver to this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Block", "Device", "HostBlock", "Identity", "Stream"]


@dataclass(frozen=True, slots=True)
class Identity:
    """Which device this is. ``uuid`` survives a reboot, an index need not."""

    kind: str  # "cpu", "cuda", "sim"
    name: str
    uuid: str
    runtime: str  # what drives it, with version
    memory_bytes: int
    shares_memory: bool  # the device works on host memory in place: nothing need be copied


class Block(Protocol):
    """Memory of the device. ``address`` is the device's: only on a device that shares memory may the host use it."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    def close(self) -> None: ...


class HostBlock(Block, Protocol):
    """Host memory that the device reaches: ``host_address`` for us, ``address`` for the device."""

    @property
    def host_address(self) -> int: ...


class Stream(Protocol):
    """Work in order. Nothing is promised to have happened before ``synchronize`` returns."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Between any two of: block, host block, registered memory, in either direction."""

    def fill(self, target: int, value: int, size: int) -> None:
        """``size`` bytes at the device's address ``target`` become ``value``."""

    def synchronize(self, timeout_ns: int) -> None:
        """Returns when all is done; ``DeviceFault`` of kind LAUNCH_TIMEOUT after ``timeout_ns``."""

    def close(self) -> None: ...


class Device(Protocol):
    @property
    def identity(self) -> Identity: ...

    def allocate(self, size: int) -> Block:
        """``size`` ≥ 1 bytes of the device's memory, 256-byte aligned, contents undefined."""

    def allocate_host(self, size: int) -> HostBlock:
        """``size`` ≥ 1 bytes of host memory, page-aligned, that is copied without a detour."""

    def register(self, address: int, size: int) -> HostBlock:
        """Makes memory of others (a lane's slots) reachable. It must stay mapped until the block is closed."""

    def stream(self, urgency: int = 0) -> Stream:
        """``urgency``: 0 ordinary, higher runs first, as far as the device tells them apart."""

    def free_bytes(self) -> int: ...

    def close(self) -> None:
        """Gives the device back. Everything made on it must be closed before."""
