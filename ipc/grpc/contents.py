"""Typed `contents` of an input to the raw bytes that lanes hold: only exact conversions, everything else is refused."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from taktd.ipc.grpc import inference_pb2 as pb
from taktd.ipc.inference import Outcome, Refusal

#: KServe datatype → (list of InferTensorContents, numpy type of the elements)
_FIELDS: Final[dict[str, tuple[str, Any]]] = {
    "BOOL": ("bool_contents", np.bool_),
    "INT8": ("int_contents", np.int8),
    "INT16": ("int_contents", np.int16),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT8": ("uint_contents", np.uint8),
    "UINT16": ("uint_contents", np.uint16),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}


def raw_from_contents(tensor: pb.ModelInferRequest.InferInputTensor) -> bytes:
    """The tensor's bytes; b"" where it has no contents. Raises Refusal."""
    if not tensor.HasField("contents"):
        return b""
    name = tensor.name[:96]
    field, dtype = _FIELDS.get(tensor.datatype, ("", None))
    filled = [descriptor.name for descriptor, _ in tensor.contents.ListFields()]
    if dtype is None:
        text = f'input "{name}": {tensor.datatype[:32] or "a datatype"} has no typed contents; use raw_input_contents'
        raise Refusal(Outcome.INVALID, text)
    if any(other != field for other in filled):
        text = f'input "{name}": found {", ".join(filled)}; {tensor.datatype} goes into {field}'
        raise Refusal(Outcome.INVALID, text)
    values = getattr(tensor.contents, field)
    if field not in ("int_contents", "uint_contents"):
        return np.array(values, dtype).tobytes()
    wide = np.array(values, np.int64)
    bounds = np.iinfo(dtype)
    if wide.size and (wide.min() < bounds.min or wide.max() > bounds.max):
        text = f'input "{name}": found values from {wide.min()} to {wide.max()}; {tensor.datatype} holds {bounds.min} '
        raise Refusal(Outcome.INVALID, f"{text}to {bounds.max}")
    return wide.astype(dtype).tobytes()
