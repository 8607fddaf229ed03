"""ONNX Runtime called directly, in the caller's process: what a lane is measured against.

The same session options and the same kind of binding as the executor's, on memory of its own. Used by `taktctl bench
--direct`, the demo, the benchmarks and the tests; the executor does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from taktd.engines.onnx_session import open_session
from taktd.engines.tensors import DTYPES, DType

__all__ = ["Direct", "fill_with_noise", "open_direct"]

_ONNX_RUNTIME_NAMES: Final = {"float": "FP32", "double": "FP64", "float16": "FP16", "bfloat16": "BF16"}
_BY_NAME: Final = {dtype.name: dtype for dtype in DTYPES}


class Direct:
    """One model, bound once. Write `inputs[name]`, call `run()`, read `outputs[name]`."""

    def __init__(
        self, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]], execute: Callable[[], None]
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.run = execute


def open_direct(path: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Direct:
    """Load a model and bind it. `shapes` (inputs and outputs by name) replaces what the model leaves open.

    Raises `ModelRefused` if ONNX Runtime can't load it, `ValueError` if a shape is neither declared nor given.
    """
    session = open_session(path)
    binding = session.io_binding()
    given = shapes or {}
    inputs = {}
    for node in session.get_inputs():
        dtype, inputs[node.name] = _memory(node, given)
        array = inputs[node.name]
        binding.bind_input(node.name, "cpu", 0, dtype.number, given.get(node.name, node.shape), array.ctypes.data)
    outputs = {}
    for node in session.get_outputs():
        dtype, outputs[node.name] = _memory(node, given)
        array = outputs[node.name]
        binding.bind_output(node.name, "cpu", 0, dtype.number, given.get(node.name, node.shape), array.ctypes.data)
    execute, bound = session._sess.run_with_iobinding, binding._iobinding

    def run() -> None:
        execute(bound, None)

    return Direct(inputs, outputs, run)


def _memory(node: Any, given: Mapping[str, tuple[int, ...]]) -> tuple[DType, NDArray[Any]]:
    plain = node.type.removeprefix("tensor(").removesuffix(")")
    dtype = _BY_NAME[_ONNX_RUNTIME_NAMES.get(plain, plain.upper())]
    shape = given.get(node.name, tuple(node.shape))
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(f"tensor {node.name!r} has the open shape {list(shape)}: give its size in `shapes`")
    if dtype.bits < 8:
        shape = (-(-int(np.prod(shape)) * dtype.bits // 8),)
    return dtype, np.zeros(shape, dtype.numpy)


def fill_with_noise(array: NDArray[Any], rng: np.random.Generator) -> None:
    """Floats become normal noise; integers become zero, since they are often indices."""
    if np.issubdtype(array.dtype, np.floating):
        array[...] = rng.normal(size=array.shape)
    else:
        array[...] = 0
