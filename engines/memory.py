"""Host memory as numpy arrays: of others by address, and private."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from taktd.engines.tensors import DType, size_bytes

__all__ = ["Bytes", "bytes_at", "private_bytes", "values_at"]

Bytes = npt.NDArray[np.uint8]


def bytes_at(address: int, size: int) -> Bytes:
    """The ``size`` bytes at ``address``, not owned: the caller keeps the memory mapped."""
    if size == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def values_at(address: int, dtype: DType, dims: tuple[int, ...]) -> npt.NDArray[Any]:
    """The tensor at ``address``, not owned; packed sub-byte types as a flat array of bytes."""
    raw = bytes_at(address, size_bytes(dtype, dims))
    return raw if dtype.bits < 8 else raw.view(dtype.numpy).reshape(dims)


def private_bytes(size: int) -> Bytes:
    """``size`` bytes of our own, 64-byte aligned and touched."""
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]
