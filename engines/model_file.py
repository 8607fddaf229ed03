"""Reading an ONNX file that nobody vouches for, before ONNX Runtime sees it.

Runs only in the inspection process (``taktd.engines.inspect``), which may die of what it reads.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

from taktd.engines.errors import ModelRefused

__all__ = ["MODEL_BYTES_MAX", "content_digest", "load_checked"]

MODEL_BYTES_MAX: Final = 2 << 30  # protobuf's own limit for one message
_DIM_MAX: Final = (1 << 31) - 1


def _tensors(graph: Any) -> list[Any]:
    found = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                found.append(attribute.t)
            found.extend(attribute.tensors)
            for inner in [attribute.g, *attribute.graphs]:
                found.extend(_tensors(inner))
    return found


def _external_files(model: Any, folder: Path) -> list[Path]:
    """The files that hold tensors outside the .onnx file; each must lie, really, inside the model's folder."""
    root = folder.resolve()
    files: set[Path] = set()
    for tensor in _tensors(model.graph):
        if tensor.data_location != 1:  # TensorProto.EXTERNAL
            continue
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        path = folder / location
        inside = location and not Path(location).is_absolute() and path.resolve().is_relative_to(root)
        if not inside:
            raise ModelRefused(
                f"tensor {tensor.name!r} of the model lies in another file",
                found=repr(location),
                allowed=f"a relative path that stays inside {root}",
                hint="Save the model with its data beside it (onnx.save_model(..., save_as_external_data=True)).",
            )
        if not path.is_file():
            raise ModelRefused(
                f"the file with tensor {tensor.name!r} is missing",
                found=f"no file {path}",
                allowed="all external data beside the model",
                hint="Copy the data file along with the .onnx file.",
            )
        files.add(path)
    return sorted(files)


def load_checked(path: Path) -> tuple[Any, list[Path]]:
    """The parsed ``onnx.ModelProto`` without external data, and the files that hold that data.

    Raises ``ModelRefused`` for a file that is missing, no ONNX model, absurd in its dimensions, or refers to files
    outside its folder.
    """
    import onnx
    from google.protobuf.message import DecodeError

    if not path.is_file():
        raise ModelRefused(
            "the model file is missing",
            found=f"no file {path}",
            allowed="a readable .onnx file",
            hint="Paths in a configuration are relative to the configuration file.",
        )
    size = path.stat().st_size
    if size > MODEL_BYTES_MAX:
        raise ModelRefused(
            "the model file is too large",
            found=f"{size} bytes",
            allowed=f"at most {MODEL_BYTES_MAX} bytes in one file",
            hint="Save weights as external data.",
        )
    try:
        model = onnx.load_model_from_string(path.read_bytes())
    except DecodeError as error:
        raise ModelRefused(
            f"{path} is no ONNX model",
            found=f"{size} bytes that don't parse ({error})",
            allowed="an ONNX protobuf file, complete",
            hint="Was the file cut off while it was copied? Is it a Git LFS pointer?",
        ) from error
    if not model.graph.node:
        raise ModelRefused(
            f"{path} holds no graph",
            found="a model without nodes",
            allowed="an ONNX model with at least one node",
            hint="Export the model again.",
        )
    for value in (*model.graph.input, *model.graph.output):
        _check_value(value)
    return model, _external_files(model, path.parent)


def _check_value(value: Any) -> None:
    if not value.type.HasField("tensor_type"):
        raise ModelRefused(
            f"{value.name!r} of the model is no tensor",
            found=str(value.type.WhichOneof("value")),
            allowed="dense tensors",
            hint="Export the model with plain tensors as inputs and outputs.",
        )
    for dim in value.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and not 0 <= dim.dim_value <= _DIM_MAX:
            raise ModelRefused(
                f"{value.name!r} of the model has a dimension that no machine can hold",
                found=str(dim.dim_value),
                allowed=f"0 to {_DIM_MAX}",
                hint="Export the model again with real shapes.",
            )


def content_digest(path: Path, external: list[Path]) -> str:
    """SHA-256 over the model file and its external data, in the order of their names."""
    digest = hashlib.sha256()
    for part in [path, *external]:
        digest.update(f"{part.name}\0{part.stat().st_size}\0".encode())
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
