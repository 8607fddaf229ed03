"""Small ONNX models that tests make for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

FP32, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING

Dims = Sequence[int | str | None]


def value(name: str, dtype: int, dims: Dims) -> Any:
    return helper.make_tensor_value_info(name, dtype, list(dims))


def save(
    path: Path,
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: dict[str, Any] | None = None,
) -> Path:
    """An ONNX file at ``path`` made of nodes, typed values and constant arrays."""
    initializers = [onnx.numpy_helper.from_array(np.asarray(w), name) for name, w in (weights or {}).items()]
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def identity(path: Path, dims: Dims = (1,), dtype: int = FP32) -> Path:
    """``y = x``."""
    return save(
        path, [helper.make_node("Identity", ["x"], ["y"])], [value("x", dtype, dims)], [value("y", dtype, dims)]
    )


def mlp(path: Path, sizes: Sequence[int] = (48, 512, 256, 128, 12), batch: int | str = 1, seed: int = 1) -> Path:
    """A policy of the usual kind: ``obs`` → dense layers with tanh → ``actions``."""
    random = np.random.default_rng(seed)
    nodes, weights = [], {}
    previous = "obs"
    for layer, (rows, columns) in enumerate(pairwise(sizes)):
        weights[f"w{layer}"] = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        weights[f"b{layer}"] = np.zeros(columns, np.float32)
        last = layer == len(sizes) - 2
        nodes.append(helper.make_node("Gemm", [previous, f"w{layer}", f"b{layer}"], [f"h{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"h{layer}"], ["actions" if last else f"a{layer}"]))
        previous = f"a{layer}"
    return save(
        path, nodes, [value("obs", FP32, (batch, sizes[0]))], [value("actions", FP32, (batch, sizes[-1]))], weights
    )


def gather(path: Path, rows: int = 1000) -> Path:
    """Looks up ``x`` (INT64 indices) in a table: an operand that must not change under ONNX Runtime."""
    table = np.arange(rows, dtype=np.float32)
    node = helper.make_node("Gather", ["table", "x"], ["y"])
    return save(path, [node], [value("x", INT64, (64,))], [value("y", FP32, (64,))], {"table": table})


def topk(path: Path, size: int = 4096, k: int = 64) -> Path:
    """The largest ``k`` of ``x``: values and indices."""
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"])
    return save(
        path, [node], [value("x", FP32, (size,))], [value("values", FP32, (k,)), value("indices", INT64, (k,))],
        {"k": np.array([k], np.int64)},
    )  # fmt: skip


def slow(path: Path, size: int = 512, layers: int = 8) -> Path:
    """Matrix products that take milliseconds: for overload and deadlines."""
    random = np.random.default_rng(2)
    weights = {"w": (random.standard_normal((size, size)) / np.sqrt(size)).astype(np.float32)}
    names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in pairwise(names)]
    return save(path, nodes, [value("x", FP32, (size, size))], [value("y", FP32, (size, size))], weights)
