"""Which memory of others is registered with a CUDA device, by page: each page once, for as long as anybody needs it.

CUDA refuses to register a page twice, and a slot's tensors are bound several times (per area, per batch).
"""

from __future__ import annotations

import mmap
from typing import Final

from taktd.drivers.cuda import CudaDevice, CudaHostBlock
from taktd.drivers.fault import FaultKind

__all__ = ["NOT_REGISTERED", "RegisteredRange", "RegisteredRanges"]

PAGE: Final = mmap.PAGESIZE
NOT_REGISTERED: Final = (FaultKind.NOT_SUPPORTED, FaultKind.INVALID_USE, FaultKind.DEVICE_BUSY)
"""What memory that a driver will not register comes back as, in whichever words. A lane's is shared, and sealed."""


class RegisteredRange:
    """A whole number of pages, shared by ``users``."""

    def __init__(self, block: CudaHostBlock, start: int, end: int) -> None:
        self.block = block
        self.start = start
        self.end = end
        self.users = 0

    def device_address(self, address: int) -> int:
        return self.block.address + address - self.block.host_address


class RegisteredRanges:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._ranges: list[RegisteredRange] = []

    def hold(self, address: int, size: int) -> RegisteredRange:
        """The registered range around ``size`` ≥ 1 bytes at ``address``; registers its pages if nobody has.

        Pages that are registered in part (a range that reaches into a new one) are a defect of the caller: lanes
        begin each tensor on a page. Raises ``DeviceFault``.
        """
        for known in self._ranges:
            if known.start <= address and address + size <= known.end:
                known.users += 1
                return known
        start = address - address % PAGE
        end = -(-(address + size) // PAGE) * PAGE
        made = RegisteredRange(self._device.register(start, end - start), start, end)
        made.users = 1
        self._ranges.append(made)
        return made

    def adopt(self, block: CudaHostBlock) -> RegisteredRange:
        """Pinned memory of our own as such a range; the last ``release`` frees it."""
        made = RegisteredRange(block, block.host_address, block.host_address + block.size)
        made.users = 1
        self._ranges.append(made)
        return made

    def release(self, held: RegisteredRange) -> None:
        held.users -= 1
        if held.users == 0:
            self._ranges.remove(held)
            held.block.close()
