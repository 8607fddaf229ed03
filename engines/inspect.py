"""``python -m taktd.engines.inspect MODEL.onnx [--shapes JSON]``: what a model is, found out in a process that may die.

Prints one JSON object: the model's content digest, its tensors with their declared (maximum) dimensions and whether
each may
be bound in place, and whether its shapes can vary. Exit 0; or ``{"error": {what, found, allowed, hint}}`` and exit 1.

The supervisor calls it before any executor sees the file: whatever a hostile or broken model does to a parser happens
here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from taktd.engines.bindable import bindable_inputs, bindable_outputs
from taktd.engines.errors import ModelRefused
from taktd.engines.model_file import content_digest, load_checked
from taktd.engines.onnx_session import RUNTIME_VERSION, open_session
from taktd.engines.tensors import DTYPE_BY_NUMBER, DTYPES, DType, TensorSpec, size_bytes

__all__ = ["TENSOR_BYTES_MAX", "Inspection", "TensorJson", "inspect_model", "specs_from_json"]

TENSOR_BYTES_MAX = 1 << 30  # one tensor of one job; a lane holds several slots of it
TENSORS_MAX = 64  # inputs and outputs of one model together
NAME_BYTES_MAX = 95  # a lane's tensor table has 96 bytes for a name
RANK_MAX = 8

Shapes = dict[str, list[int]]


class TensorJson(TypedDict):
    name: str
    dtype: int  # ONNX TensorProto.DataType
    dtype_name: str
    dims: list[int]  # maximum
    symbolic: list[bool]
    bindable: bool


class Inspection(TypedDict):
    digest: str
    runtime: str
    opset: int
    inputs: list[TensorJson]
    outputs: list[TensorJson]
    dynamic: bool  # some dimension is left open by the model
    batch: bool  # the first dimension of every tensor is open: jobs can be batched
    external: list[str]  # files that hold tensors, relative to the model's folder
    data_dependent: bool  # an output's shape depends on values: no loop can have a fixed shape for it


def specs_from_json(tensors: list[TensorJson]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(t["name"], DTYPE_BY_NUMBER[t["dtype"]], tuple(t["dims"]), tuple(t["symbolic"]), t["bindable"])
        for t in tensors
    )


def _dtype(value: Any) -> DType:
    number = int(value.type.tensor_type.elem_type)
    dtype = DTYPE_BY_NUMBER.get(number)
    if dtype is None:
        import onnx

        kind = onnx.TensorProto.DataType.Name(number) if number in onnx.TensorProto.DataType.values() else str(number)
        raise ModelRefused(
            f"tensor {value.name!r} has an element type that lanes don't carry",
            found=kind,
            allowed=", ".join(d.name for d in DTYPES),
            hint="Move string handling and the like out of the model, into the client.",
        )
    return dtype


def _declared_dims(value: Any, shapes: Shapes, *, is_input: bool) -> tuple[list[int | None], list[bool]]:
    """Maximum dimensions by the model and the configuration, ``None`` where neither says, and which the model leaves
    open."""
    name = value.name
    dims = list(value.type.tensor_type.shape.dim)
    symbolic = [not d.HasField("dim_value") for d in dims]
    if name in shapes:
        wanted = shapes[name]
        fits = len(wanted) == len(dims) and all(
            w == d.dim_value or s for w, d, s in zip(wanted, dims, symbolic, strict=True)
        )
        if not fits:
            model_shape = ", ".join("?" if s else str(d.dim_value) for d, s in zip(dims, symbolic, strict=True))
            raise ModelRefused(
                f"the configured shape of {name!r} does not fit the model",
                found=str(wanted),
                allowed=f"[{model_shape}] (? = any size)",
                hint=f"Correct models.<name>.shapes.{name}.",
            )
        return list(wanted), symbolic
    found: list[int | None] = [None if s else int(d.dim_value) for d, s in zip(dims, symbolic, strict=True)]
    if is_input and found and found[0] is None:
        found[0] = 1  # an open first dimension is a batch, and a job is one of it unless the configuration says more
    return found, symbolic


def _input_dims(value: Any, shapes: Shapes) -> tuple[list[int], list[bool]]:
    dims, symbolic = _declared_dims(value, shapes, is_input=True)
    if any(d is None for d in dims):
        raise ModelRefused(
            f"input {value.name!r} has open dimensions",
            found="[" + ", ".join("?" if d is None else str(d) for d in dims) + "]",
            allowed="a maximum for each dimension",
            hint=f"Declare it: models.<name>.shapes: {{{value.name}: [..]}}.",
        )
    return [d for d in dims if d is not None], symbolic


def _check_limits(name: str, dtype: DType, dims: list[int]) -> None:
    problem = None
    if len(name.encode()) > NAME_BYTES_MAX or not name:
        problem = ("a name of that length", f"{len(name.encode())} bytes", f"1 to {NAME_BYTES_MAX} bytes")
    elif len(dims) > RANK_MAX:
        problem = ("too many dimensions", str(len(dims)), f"at most {RANK_MAX}")
    elif size_bytes(dtype, tuple(dims)) > TENSOR_BYTES_MAX:
        problem = ("too many bytes", str(size_bytes(dtype, tuple(dims))), f"at most {TENSOR_BYTES_MAX}")
    if problem:
        raise ModelRefused(
            f"tensor {name[:100]!r} does not fit into a lane: {problem[0]}",
            found=problem[1],
            allowed=problem[2],
            hint="Export the model with smaller tensors or shorter names.",
        )


def _session_that_writes(path: Path, optimized: Path) -> Any:
    """A session that has written its optimised graph. Raises ModelRefused, also where there is no room for that."""
    try:
        return open_session(str(path), optimized_path=str(optimized))
    except ModelRefused:
        open_session(str(path))  # raises where it is the model's fault
    free_bytes = shutil.disk_usage(optimized.parent).free
    raise ModelRefused(
        "the model can't be inspected: ONNX Runtime can't write its optimised graph",
        found=f"{free_bytes} bytes free in {tempfile.gettempdir()}",
        allowed=f"room for a file as large as the model, {path.stat().st_size} bytes",
        hint="Make room there, raise the limit on file sizes, or name another folder in TMPDIR.",
    )


def _observed_output_dims(session: Any, inputs: list[TensorJson]) -> tuple[list[list[int]], bool]:
    """Output shapes at the maximum input shapes, and whether they differ between two inputs of equal shape."""
    observed: list[list[list[int]]] = []
    for fill in (0, 1):
        feed = {t["name"]: np.full(t["dims"], fill, DTYPE_BY_NUMBER[t["dtype"]].numpy) for t in inputs}
        try:
            observed.append([list(o.shape) for o in session.run(None, feed)])
        except Exception as error:
            raise ModelRefused(
                "the model does not run at its largest shapes",
                found=str(error).strip(),
                allowed="a model that runs at " + ", ".join(f"{t['name']} {t['dims']}" for t in inputs),
                hint="Correct models.<name>.shapes.",
            ) from error
    return observed[0], observed[0] != observed[1]


def inspect_model(path: Path, shapes: Shapes) -> Inspection:
    """Everything the daemon has to know about the model at ``path``. Raises ``ModelRefused``."""
    import onnx

    model, external = load_checked(path)
    initializers = {i.name for i in model.graph.initializer}
    graph_inputs = [v for v in model.graph.input if v.name not in initializers]
    known = {v.name for v in (*graph_inputs, *model.graph.output)}
    for name in shapes:
        if name not in known:
            raise ModelRefused(
                "a shape is configured for a tensor that the model does not have",
                found=repr(name),
                allowed=", ".join(sorted(known)),
                hint="Correct models.<name>.shapes.",
            )
    if len(known) > TENSORS_MAX or not model.graph.output:
        raise ModelRefused(
            "the model has too many or no inputs and outputs",
            found=f"{len(graph_inputs)} inputs, {len(model.graph.output)} outputs",
            allowed=f"at least one output and at most {TENSORS_MAX} together",
            hint="Export the model again.",
        )
    with tempfile.TemporaryDirectory(prefix="taktd-inspect-") as scratch:
        optimized = Path(scratch) / "optimized.onnx"
        session = _session_that_writes(path, optimized)
        graph = onnx.load(str(optimized), load_external_data=False).graph
    in_place = bindable_inputs(graph) | bindable_outputs(graph)

    def tensor(value: Any, dims: list[int], symbolic: list[bool]) -> TensorJson:
        dtype = _dtype(value)
        _check_limits(value.name, dtype, dims)
        return {
            "name": value.name,
            "dtype": dtype.number,
            "dtype_name": dtype.name,
            "dims": dims,
            "symbolic": symbolic,
            "bindable": in_place.get(value.name, False),
        }

    inputs = [tensor(v, *_input_dims(v, shapes)) for v in graph_inputs]
    declared = [_declared_dims(v, shapes, is_input=False) for v in model.graph.output]
    for value in model.graph.output:
        _dtype(value)
    data_dependent = False
    if any(any(symbolic) for _, symbolic in declared):
        observed, data_dependent = _observed_output_dims(session, inputs)
        undeclared = [
            v.name for v, (dims, _) in zip(model.graph.output, declared, strict=True) if None in dims and data_dependent
        ]
        if undeclared:
            raise ModelRefused(
                f"the shape of output {undeclared[0]!r} depends on the values of the input",
                found="different shapes for equal input shapes",
                allowed="a declared maximum",
                hint=f"Declare it: models.<name>.shapes: {{{undeclared[0]}: [..]}}.",
            )
        declared = [
            ([o if d is None else d for o, d in zip(seen, dims, strict=True)], symbolic)
            for seen, (dims, symbolic) in zip(observed, declared, strict=True)
        ]
    outputs = [
        tensor(v, [d for d in dims if d is not None], symbolic)
        for v, (dims, symbolic) in zip(model.graph.output, declared, strict=True)
    ]
    tensors = [*inputs, *outputs]
    return {
        "digest": content_digest(path, external),
        "runtime": f"onnxruntime {RUNTIME_VERSION}",
        "external": [str(file.relative_to(path.parent)) for file in external],
        "opset": max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0),
        "inputs": inputs,
        "outputs": outputs,
        "dynamic": any(any(t["symbolic"]) for t in tensors),
        "batch": bool(inputs) and all(t["symbolic"][:1] == [True] and t["dims"][0] == 1 for t in tensors),
        "data_dependent": data_dependent,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m taktd.engines.inspect", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--shapes", type=json.loads, default={}, help="maximum shapes, e.g. '{\"obs\": [8, 48]}'")
    arguments = parser.parse_args()
    try:
        print(json.dumps(inspect_model(arguments.model, arguments.shapes)))
    except ModelRefused as refused:
        print(json.dumps({"error": refused.refusal}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
