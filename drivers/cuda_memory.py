"""Device memory and pinned memory of a CUDA device: through pycuda where it is installed, else through our C module.

pycuda is part of ``taktd[gpu]``; where it can't be had (it is built from source) the C module does the same with the
same calls. Both work in the device's primary context. Events and streams come from the C module in either case: pycuda
has no stream priorities and can't record its events on a stream that is not its own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from taktd.drivers import _cuda
from taktd.drivers.cuda_fault import HINTS, fault_of
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["CudaMemory", "DirectMemory", "PycudaMemory", "open_memory"]

Freed = Callable[[], None]
T = TypeVar("T")


class CudaMemory(Protocol):
    """Each allocation comes with the function that gives it back. Raises ``DeviceFault``."""

    source: str  # who allocates, with version

    def allocate(self, size: int) -> tuple[int, Freed]: ...

    def allocate_pinned(self, size: int) -> tuple[int, int, Freed]:
        """(address on the host, address on the device, free)."""

    def close(self) -> None: ...


class DirectMemory:
    """By the C module."""

    def __init__(self, source: str = "libcuda") -> None:
        self.source = source

    def allocate(self, size: int) -> tuple[int, Freed]:
        address = _direct(lambda: _cuda.allocate(size))
        return address, lambda: _direct(lambda: _cuda.deallocate(address))

    def allocate_pinned(self, size: int) -> tuple[int, int, Freed]:
        address = _direct(lambda: _cuda.allocate_pinned(size))
        return (
            address,
            _direct(lambda: _cuda.device_address(address)),
            lambda: _direct(lambda: _cuda.deallocate_pinned(address)),
        )

    def close(self) -> None:
        """Nothing was taken."""


def _direct(call: Callable[[], T]) -> T:
    try:
        return call()
    except _cuda.Error as error:
        raise fault_of(error) from error


class PycudaMemory:
    """By pycuda, in the primary context that it retains itself."""

    def __init__(self, pycuda: Any, driver: Any, index: int) -> None:
        self.source = f"pycuda {pycuda.VERSION_TEXT}"
        self._driver = driver
        driver.init()
        self._context = driver.Device(index).retain_primary_context()
        self._context.push()
        # An executor ends with its device open; pycuda aborts a process that ends with a context on its stack.
        atexit.register(self._leave)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._driver.MemoryError as error:
            kind = FaultKind.OUT_OF_MEMORY
            raise DeviceFault(kind, str(error), hint=HINTS[kind], code=2) from error
        except self._driver.Error as error:
            # pycuda tells the class of an error only; a broken context answers its code to any call.
            try:
                _cuda.memory_info()
            except _cuda.Error as precise:
                raise fault_of(precise) from error
            raise DeviceFault(FaultKind.INVALID_USE, str(error), hint="") from error

    def allocate(self, size: int) -> tuple[int, Freed]:
        block = self._ask(lambda: self._driver.mem_alloc(size))
        return int(block), lambda: self._ask(block.free)

    def allocate_pinned(self, size: int) -> tuple[int, int, Freed]:
        known = self._driver.host_alloc_flags
        flags = known.PORTABLE | known.DEVICEMAP
        array = self._ask(lambda: self._driver.pagelocked_empty(size, "uint8", mem_flags=flags))
        block = array.base
        return int(array.ctypes.data), int(block.get_device_pointer()), lambda: self._ask(block.free)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._leave()
        self._context.detach()

    def _leave(self) -> None:
        self._context.pop()


def open_memory(index: int) -> CudaMemory:
    """pycuda's memory on device ``index`` if pycuda can be used, else our own.

    A distribution's pycuda is built for the distribution's numpy, and fails beside another one in ways of its own.
    """
    try:
        import pycuda
        import pycuda.driver
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "pycuda":
            return DirectMemory()
        return DirectMemory(f"libcuda (pycuda can't be used: {type(error).__name__}: {error})")
    return PycudaMemory(pycuda, pycuda.driver, index)
