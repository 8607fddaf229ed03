"""Which tensors of a model an engine may keep in memory that a client can write while the engine runs.

A lane's slot stays mapped by the client during a run. ONNX Runtime checks indices and sizes once and uses them later,
so an operand that changes under it can make it read or write outside its buffers (seen with Gather and TopK: SIGSEGV).
A tensor is therefore bound in place only if everything that touches it treats it as plain numbers: the value may come
out wrong, and nothing else can happen. The rule is applied to the *optimised* graph, since the optimiser removes Casts
and fuses operators.

* An input is bindable if each consumer is on ``READS_PLAIN_NUMBERS`` at that operand. Operators that only rename memory
  (``RENAMES``: their output may be the very same buffer) are looked through.
* An output is bindable if its producer is on the list too (TopK, for one, sorts *in* its output) and if whatever else
in
  the graph consumes it obeys the rule for inputs.

Everything else is copied to or from private memory. An operator joins the list together with a test that
rewrites its operand during the run (``tests/fault/test_rewritten_operands.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = ["READS_PLAIN_NUMBERS", "RENAMES", "bindable_inputs", "bindable_outputs"]

_ANY: Final = range(1 << 16)
_FIRST: Final = range(1)

# (domain, operator) → operand positions that are read as plain numbers, once, with sizes known from the graph.
READS_PLAIN_NUMBERS: Final[dict[tuple[str, str], range]] = {
    **{
        ("", op): _ANY
        for op in (
            *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Sin", "Cos"),
            *("Floor", "Ceil", "Round", "Sign", "Min", "Max", "Sum", "Mean", "MatMul", "Gemm", "Conv"),
            *("Relu", "LeakyRelu", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "Tanh", "Gelu"),
            *("Softplus", "Softsign", "HardSwish", "Mish", "Concat", "Transpose", "Where"),
            *("And", "Or", "Not", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"),
        )
    },
    # Their further operands are sizes, scales or bounds: those must not come from a client.
    **{("", op): _FIRST for op in ("Split", "Slice", "Clip", "QuantizeLinear", "DequantizeLinear", "PRelu")},
    ("com.microsoft", "FusedGemm"): _ANY,
    ("com.microsoft", "FusedMatMul"): _ANY,
    ("com.microsoft", "FusedConv"): _ANY,
    ("com.microsoft", "QuickGelu"): _ANY,
    ("com.microsoft", "Gelu"): _ANY,
    ("com.microsoft", "BiasGelu"): _ANY,
    ("com.microsoft", "FastGelu"): _ANY,
    ("com.microsoft.nchwc", "ReorderInput"): _ANY,
    ("com.microsoft.nchwc", "ReorderOutput"): _ANY,
    ("com.microsoft.nchwc", "Conv"): _ANY,
}

# Output may alias operand 0: who reads the output reads the client's memory.
RENAMES: Final = frozenset({("", op) for op in ("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout")})


def _domain(node: Any) -> str:
    return "" if node.domain in ("", "ai.onnx") else str(node.domain)


def _subgraph_names(node: Any) -> Iterable[str]:
    """Every name that subgraphs of ``node`` (If, Loop, Scan) read, their own ones included: a superset is safe."""
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            for inner in graph.node:
                yield from inner.input
                yield from _subgraph_names(inner)
            yield from (output.name for output in graph.output)


def _casts_to_another_type(node: Any, types: dict[str, int]) -> bool:
    to = next((int(a.i) for a in node.attribute if a.name == "to"), 0)
    return types.get(node.input[0], to) != to


def _reads_plainly(graph: Any, name: str, types: dict[str, int], *, depth: int = 0) -> bool:
    if depth > 16:  # a chain of renames that long is no real model
        return False
    for node in graph.node:
        if name in _subgraph_names(node):
            return False
        key = (_domain(node), node.op_type)
        for position, operand in enumerate(node.input):
            if operand != name:
                continue
            if key in RENAMES and position == 0:
                if not _reads_plainly(graph, node.output[0], types, depth=depth + 1):
                    return False
            elif key == ("", "Cast"):
                if not _casts_to_another_type(node, types):
                    return False
            elif position not in READS_PLAIN_NUMBERS.get(key, range(0)):
                return False
    return True


def _types(graph: Any) -> dict[str, int]:
    known = {v.name: int(v.type.tensor_type.elem_type) for v in (*graph.input, *graph.output, *graph.value_info)}
    known.update((i.name, int(i.data_type)) for i in graph.initializer)
    return known


def bindable_inputs(graph: Any) -> dict[str, bool]:
    """``{input name: may be bound in place}`` for an optimised ``onnx.GraphProto``."""
    types = _types(graph)
    return {i.name: _reads_plainly(graph, i.name, types) for i in graph.input}


def bindable_outputs(graph: Any) -> dict[str, bool]:
    """``{output name: may be written in place}`` for an optimised ``onnx.GraphProto``."""
    types = _types(graph)
    producer = {name: node for node in graph.node for name in node.output}

    def safe(name: str) -> bool:
        node = producer.get(name)
        if node is None:  # an initializer or an input handed through: ONNX Runtime copies it
            return True
        key = (_domain(node), node.op_type)
        plain = key in READS_PLAIN_NUMBERS or key in RENAMES or key == ("", "Cast")
        return plain and _reads_plainly(graph, name, types)

    return {o.name: safe(o.name) for o in graph.output}
