"""What every driver promises (taktd.drivers.device), over all of them: CPU, simulated, CUDA.

CUDA is the simulated driver unless ``TAKTD_REAL_GPU`` is set; `taktctl selftest` runs this same file on a real GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from itertools import pairwise

import pytest

from taktd.drivers.cpu import CpuDevice
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_memory import DirectMemory
from taktd.drivers.device import Device
from taktd.drivers.fault import DeviceFault, FaultKind
from taktd.drivers.sim import SimDevice

SECOND = 1_000_000_000
SIZE = 3 * 4096
REAL_GPU = os.environ.get("TAKTD_REAL_GPU")


def _has_pycuda() -> bool:
    try:
        import pycuda  # noqa: F401
    except ImportError:
        return False
    return True


KINDS = ["cpu", "sim", "cuda", *(["cuda-pycuda"] if _has_pycuda() else [])]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cpu":
        yield CpuDevice()
        return
    if request.param == "sim":
        yield SimDevice()
        return
    if REAL_GPU is None:
        simulated = request.getfixturevalue("fake_cuda")
    memory = {} if request.param == "cuda-pycuda" else {"memory": lambda _: DirectMemory()}
    opened = CudaDevice(int(REAL_GPU or 0), **memory)
    yield opened
    opened.close()
    if REAL_GPU is None:
        assert not any(simulated.live().values()), f"not given back: {simulated.live()}"


def content(address: int, size: int = SIZE) -> bytes:
    return ctypes.string_at(address, size)


def test_a_device_says_which_it_is(device: Device) -> None:
    identity = device.identity
    assert identity.kind in ("cpu", "cuda", "sim")
    assert identity.name
    assert identity.uuid
    assert identity.memory_bytes > 0
    assert 0 < device.free_bytes() <= identity.memory_bytes


def test_memory_is_aligned_and_apart(device: Device) -> None:
    blocks = [device.allocate(SIZE) for _ in range(4)]
    spans = sorted((b.address, b.address + b.size) for b in blocks)
    assert all(b.address % 256 == 0 and b.size == SIZE for b in blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for block in blocks:
        block.close()


def test_closing_twice_is_fine(device: Device) -> None:
    for thing in (device.allocate(16), device.allocate_host(16), device.stream()):
        thing.close()
        thing.close()


@pytest.mark.parametrize("size", [0, -1])
def test_no_memory_of_no_size(device: Device, size: int) -> None:
    for make in (device.allocate, device.allocate_host):
        with pytest.raises(DeviceFault) as caught:
            make(size)
        assert caught.value.kind is FaultKind.INVALID_USE
        assert not caught.value.sticky


def test_too_much_memory_is_a_fault_that_does_not_stick(device: Device) -> None:
    with pytest.raises(DeviceFault) as caught:
        device.allocate(1 << 50)
    assert caught.value.kind is FaultKind.OUT_OF_MEMORY
    assert not caught.value.sticky
    assert caught.value.hint
    device.allocate(16).close()


def test_what_is_copied_there_and_back_is_the_same(device: Device) -> None:
    pattern = bytes(range(256)) * (SIZE // 256)
    there, back, block, stream = (
        device.allocate_host(SIZE),
        device.allocate_host(SIZE),
        device.allocate(SIZE),
        device.stream(),
    )
    ctypes.memmove(there.host_address, pattern, SIZE)
    stream.copy(block.address, there.host_address, SIZE)
    stream.copy(back.host_address, block.address, SIZE)
    stream.synchronize(SECOND)
    assert content(back.host_address) == pattern
    for thing in (there, back, block, stream):
        thing.close()


def test_a_stream_keeps_its_order(device: Device) -> None:
    block, host, stream = device.allocate(SIZE), device.allocate_host(SIZE), device.stream()
    for value in range(50):
        stream.fill(block.address, value, SIZE)
    stream.fill(block.address + 1, 99, 1)
    stream.copy(host.host_address, block.address, SIZE)
    stream.fill(block.address, 7, SIZE)
    stream.synchronize(SECOND)
    assert content(host.host_address, 4) == bytes([49, 99, 49, 49])
    for thing in (block, host, stream):
        thing.close()


def test_memory_of_others_is_reachable_once_registered(device: Device) -> None:
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    block, stream = device.allocate(SIZE), device.stream(urgency=2)
    registered = device.register(address, SIZE)
    assert registered.host_address == address
    memory[:4] = b"lane"
    stream.copy(block.address, registered.host_address, SIZE)
    stream.fill(block.address + 4, ord("!"), 1)
    stream.copy(registered.host_address, block.address, SIZE)
    stream.synchronize(SECOND)
    assert memory[:5] == b"lane!"
    for thing in (registered, block, stream):
        thing.close()


def test_memory_can_be_registered_again_after_it_was_given_back(device: Device) -> None:
    memory = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for _ in range(3):
        device.register(address, SIZE).close()


def test_the_device_address_of_host_memory_reaches_it(device: Device) -> None:
    host, stream = device.allocate_host(SIZE), device.stream()
    stream.fill(host.address, 5, SIZE)
    stream.synchronize(SECOND)
    assert content(host.host_address, 3) == b"\5\5\5"
    host.close()
    stream.close()


def test_urgency_beyond_what_the_device_knows_is_the_most_it_knows(device: Device) -> None:
    for urgency in (0, 1, 1000):
        device.stream(urgency).close()


def test_five_hundred_rounds_leave_nothing(device: Device) -> None:
    for _ in range(500):
        block, stream = device.allocate(64), device.stream()
        stream.fill(block.address, 0, 64)
        stream.synchronize(SECOND)
        block.close()
        stream.close()
