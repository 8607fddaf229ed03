"""What every driver promises (``taktd.drivers.device``), as checks of a device that is really there.

One list, two callers: the tests run it over every driver, CUDA's on a simulated GPU; `taktctl selftest` runs it on a
real one. A difference between the two is a defect of the simulation.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from taktd.drivers.device import Device
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["CHECKS", "NotConforming"]

SECOND: Final = 1_000_000_000
SIZE: Final = 3 * mmap.PAGESIZE


class NotConforming(Exception):
    """The device does not keep a promise: which, and what was found."""


def _expect(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise NotConforming(f"{what}: found {found!r}")


def _content(address: int, size: int = SIZE) -> bytes:
    return ctypes.string_at(address, size)


def says_which_device_it_is(device: Device) -> None:
    identity = device.identity
    _expect(identity.kind in ("cpu", "cuda", "sim"), "a known kind", identity.kind)
    _expect(bool(identity.name and identity.uuid), "a name and a UUID", identity)
    _expect(0 < device.free_bytes() <= identity.memory_bytes, "free memory within all memory", device.free_bytes())


def memory_is_aligned_and_apart(device: Device) -> None:
    blocks = [device.allocate(SIZE) for _ in range(4)]
    spans = sorted((b.address, b.address + b.size) for b in blocks)
    _expect(all(b.address % 256 == 0 and b.size == SIZE for b in blocks), "256-byte alignment", spans)
    _expect(all(end <= start for (_, end), (start, _) in pairwise(spans)), "blocks that don't overlap", spans)
    for block in blocks:
        block.close()


def closing_twice_is_fine(device: Device) -> None:
    for thing in (device.allocate(16), device.allocate_host(16), device.stream()):
        thing.close()
        thing.close()


def no_memory_of_no_size(device: Device) -> None:
    for size in (0, -1):
        for make in (device.allocate, device.allocate_host):
            fault = _fault_of(lambda make=make, size=size: make(size))  # type: ignore[misc]
            _expect(fault.kind is FaultKind.INVALID_USE and not fault.sticky, "INVALID_USE, not sticky", fault)


def too_much_memory_does_not_stick(device: Device) -> None:
    fault = _fault_of(lambda: device.allocate(1 << 50))
    _expect(fault.kind is FaultKind.OUT_OF_MEMORY and not fault.sticky, "OUT_OF_MEMORY, not sticky", fault)
    _expect(bool(fault.hint), "a hint", fault)
    device.allocate(16).close()


def _fault_of(call: Callable[[], object]) -> DeviceFault:
    try:
        got = call()
    except DeviceFault as fault:
        return fault
    raise NotConforming(f"a DeviceFault: found {got!r}")


def what_goes_there_and_back_is_the_same(device: Device) -> None:
    pattern = bytes(range(256)) * (SIZE // 256)
    there, back = device.allocate_host(SIZE), device.allocate_host(SIZE)
    block, stream = device.allocate(SIZE), device.stream()
    ctypes.memmove(there.host_address, pattern, SIZE)
    stream.copy(block.address, there.host_address, SIZE)
    stream.copy(back.host_address, block.address, SIZE)
    stream.synchronize(SECOND)
    _expect(_content(back.host_address) == pattern, "the same bytes", _content(back.host_address, 16))
    for thing in (there, back, block, stream):
        thing.close()


def a_stream_keeps_its_order(device: Device) -> None:
    block, host, stream = device.allocate(SIZE), device.allocate_host(SIZE), device.stream()
    for value in range(50):
        stream.fill(block.address, value, SIZE)
    stream.fill(block.address + 1, 99, 1)
    stream.copy(host.host_address, block.address, SIZE)
    stream.fill(block.address, 7, SIZE)
    stream.synchronize(SECOND)
    found = _content(host.host_address, 4)
    _expect(found == bytes([49, 99, 49, 49]), "the bytes as they were when they were copied", found)
    for thing in (block, host, stream):
        thing.close()


def memory_of_others_is_reachable_once_registered(device: Device) -> None:
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    block, stream = device.allocate(SIZE), device.stream(urgency=2)
    registered = device.register(address, SIZE)
    _expect(registered.host_address == address, "the same host address", registered.host_address)
    memory[:4] = b"lane"
    stream.copy(block.address, registered.host_address, SIZE)
    stream.fill(block.address + 4, ord("!"), 1)
    stream.copy(registered.host_address, block.address, SIZE)
    stream.synchronize(SECOND)
    _expect(memory[:5] == b"lane!", "what the device wrote", memory[:5])
    for thing in (registered, block, stream):
        thing.close()


def memory_can_be_registered_again(device: Device) -> None:
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for _ in range(3):
        device.register(address, SIZE).close()


def shared_file_memory_can_be_registered(device: Device) -> None:
    """Lanes are memfds that a client has mapped too."""
    descriptor = os.memfd_create("conformance", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, SIZE)
        ours, theirs = mmap.mmap(descriptor, SIZE), mmap.mmap(descriptor, SIZE)
    finally:
        os.close(descriptor)
    registered = device.register(ctypes.addressof(ctypes.c_char.from_buffer(ours)), SIZE)
    stream = device.stream()
    stream.fill(registered.address, 0x5A, SIZE)
    stream.synchronize(SECOND)
    _expect(theirs[:2] == b"ZZ", "what the device wrote, seen by the other mapping", theirs[:2])
    registered.close()
    stream.close()


def the_device_reaches_host_memory_by_its_own_address(device: Device) -> None:
    host, stream = device.allocate_host(SIZE), device.stream()
    stream.fill(host.address, 5, SIZE)
    stream.synchronize(SECOND)
    _expect(_content(host.host_address, 3) == b"\5\5\5", "what the device wrote", _content(host.host_address, 3))
    host.close()
    stream.close()


def any_urgency_is_accepted(device: Device) -> None:
    for urgency in (0, 1, 1000):
        device.stream(urgency).close()


def five_hundred_rounds_leave_nothing(device: Device) -> None:
    before = device.free_bytes()
    for _ in range(500):
        block, stream = device.allocate(64), device.stream()
        stream.fill(block.address, 0, 64)
        stream.synchronize(SECOND)
        block.close()
        stream.close()
    if device.identity.kind == "cuda":  # of a CPU's memory others take and give all the time
        _expect(before - device.free_bytes() < 64 << 20, "as much free memory as before", device.free_bytes() - before)


CHECKS: Final[tuple[Callable[[Device], None], ...]] = (
    says_which_device_it_is,
    memory_is_aligned_and_apart,
    closing_twice_is_fine,
    no_memory_of_no_size,
    too_much_memory_does_not_stick,
    what_goes_there_and_back_is_the_same,
    a_stream_keeps_its_order,
    memory_of_others_is_reachable_once_registered,
    memory_can_be_registered_again,
    shared_file_memory_can_be_registered,
    the_device_reaches_host_memory_by_its_own_address,
    any_urgency_is_accepted,
    five_hundred_rounds_leave_nothing,
)
