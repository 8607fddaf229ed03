"""TensorRT's element types by our names."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["dtype_name"]

_NAMES: Final = {
    "FLOAT": "FP32", "HALF": "FP16", "BF16": "BF16", "INT8": "INT8", "UINT8": "UINT8", "INT32": "INT32",
    "INT64": "INT64", "BOOL": "BOOL", "FP8": "FP8E4M3FN", "INT4": "INT4",
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """Our name for a ``tensorrt.DataType``; TensorRT's own where lanes have no such type."""
    return _NAMES.get(dtype.name, str(dtype.name))
