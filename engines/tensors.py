"""Tensor types and shapes as engines see them.

ONNX numbers the element types (``TensorProto.DataType``); the KServe protocol names them. Both are fixed by their
specifications, so this table is the only place below ``engines`` where they are written down. Strings are not in it:
a model with string tensors is refused when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DTYPES", "DTYPE_BY_NUMBER", "DType", "TensorSpec", "size_bytes"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. ``bits`` is the size of one element; sub-byte types are packed, low nibble first."""

    name: str
    number: int
    bits: int
    numpy: str  # the numpy dtype of the same width; a plain unsigned type where numpy has none of its own


DTYPES: Final[tuple[DType, ...]] = (
    DType("FP32", 1, 32, "float32"),
    DType("UINT8", 2, 8, "uint8"),
    DType("INT8", 3, 8, "int8"),
    DType("UINT16", 4, 16, "uint16"),
    DType("INT16", 5, 16, "int16"),
    DType("INT32", 6, 32, "int32"),
    DType("INT64", 7, 64, "int64"),
    DType("BOOL", 9, 8, "bool"),
    DType("FP16", 10, 16, "float16"),
    DType("FP64", 11, 64, "float64"),
    DType("UINT32", 12, 32, "uint32"),
    DType("UINT64", 13, 64, "uint64"),
    DType("COMPLEX64", 14, 64, "complex64"),
    DType("COMPLEX128", 15, 128, "complex128"),
    DType("BF16", 16, 16, "uint16"),
    DType("FP8E4M3FN", 17, 8, "uint8"),
    DType("FP8E4M3FNUZ", 18, 8, "uint8"),
    DType("FP8E5M2", 19, 8, "uint8"),
    DType("FP8E5M2FNUZ", 20, 8, "uint8"),
    DType("UINT4", 21, 4, "uint8"),
    DType("INT4", 22, 4, "uint8"),
)
DTYPE_BY_NUMBER: Final[dict[int, DType]] = {d.number: d for d in DTYPES}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    ``dims`` are the declared (maximum) dimensions; ``symbolic[i]`` says that the model itself leaves dimension *i*
    open.
    ``bindable``: an engine may work on memory that somebody else can write (see ``taktd.engines.bindable``).
    """

    name: str
    dtype: DType
    dims: tuple[int, ...]
    symbolic: tuple[bool, ...]
    bindable: bool

    @property
    def bytes(self) -> int:
        return size_bytes(self.dtype, self.dims)


def size_bytes(dtype: DType, dims: tuple[int, ...]) -> int:
    """Bytes of a dense tensor; a scalar (``dims == ()``) has one element."""
    elements = 1
    for dim in dims:
        elements *= dim
    return (elements * dtype.bits + 7) // 8
