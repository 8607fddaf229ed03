"""Whether a loop's fallback can answer in its stead: what only the models themselves tell.

A stand-in runs on the lane of the loop, so its model must have the loop's tensors, by name, type and shape, in their
order; a constant must name outputs and fit them. Called by the supervisor once models are inspected, at start and
before a change.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from taktd.daemon.config.configuration import Configuration, Loop
from taktd.daemon.supervision.tensor_difference import Inspection, Tensor, tensor_difference
from taktd.engines.tensors import DTYPE_BY_NUMBER, DType
from taktd.ipc import _core

__all__ = ["constant_problem", "fallback_problems", "local_answer"]

LOCAL_ANSWER: Final = struct.Struct("<II")  # takt_local_answer: path; takt_constant: bytes
NO_CONSTANTS: Final = ("FP8E4M3FN", "FP8E4M3FNUZ", "FP8E5M2", "FP8E5M2FNUZ", "UINT4", "INT4")


def fallback_problems(configuration: Configuration, inspections: Mapping[str, Inspection]) -> list[str]:
    """One sentence for each fallback that can't work, with key, what was found and what is allowed."""
    return list(_problems(configuration, inspections))


def _problems(configuration: Configuration, inspections: Mapping[str, Inspection]) -> Iterator[str]:
    for loop in configuration.loops.values():
        own = inspections[loop.model]
        for place, one in enumerate(loop.fallback):
            key = f"loops.{loop.name}.fallback[{place}]"
            if one.kind == "device" and one.model and one.model != loop.model:
                difference = tensor_difference(own, inspections[one.model], _needed)
                if difference:
                    yield f"{key}: model {one.model} can't stand in for {loop.model}: {difference}"
            elif one.kind == "constant":
                problem = constant_problem(one.constant, own)
                if problem:
                    yield f"{key}.constant{problem}"


def _needed(side: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    if len(ours) != len(theirs):
        return f"it has {len(theirs)} {side}, {len(ours)} are needed"
    needed, found = next((mine, its) for mine, its in zip(ours, theirs, strict=True) if mine != its)
    return f"found {side[:-1]} {' '.join(found)}, needed {' '.join(needed)}"


def _shape(values: Any) -> tuple[int, ...] | None:
    """Of nested tuples; None if they are ragged."""
    if not isinstance(values, tuple):
        return ()
    shapes = {_shape(value) for value in values}
    if len(shapes) > 1 or None in shapes:
        return None
    inner = next(iter(shapes), ())
    return None if inner is None else (len(values), *inner)


def _numbers(values: Any) -> Iterator[float]:
    if isinstance(values, tuple):
        for value in values:
            yield from _numbers(value)
    else:
        yield values


def constant_problem(constant: Mapping[str, Any], inspection: Inspection) -> str:
    """What is wrong with a constant answer for this model, beginning with the key's rest; "" if nothing is.

    Every output has a value: one number for all its elements, or a list of its shape (dimensions of 1 may be left out).
    """
    outputs = {t["name"]: t for t in inspection["outputs"]}
    for name in constant:
        if name not in outputs:
            return f".{name}: no output is called that; allowed: {', '.join(outputs)}"
    for name, tensor in outputs.items():
        if name not in constant:
            return f".{name}: is missing; every output needs a value"
        shape, wanted = _shape(constant[name]), tuple(tensor["dims"])
        if shape is None or (shape != () and _squeezed(shape) != _squeezed(wanted)):
            found = "a ragged list" if shape is None else f"shape {list(shape)}"
            return f".{name}: {found} does not fit; allowed: one number, or shape {list(wanted)}"
        if DTYPE_BY_NUMBER[tensor["dtype"]].name in NO_CONSTANTS:
            return f".{name}: an output of {DTYPE_BY_NUMBER[tensor['dtype']].name} can't be a constant; allowed: hold"
        problem = _range_problem(constant[name], DTYPE_BY_NUMBER[tensor["dtype"]].name)
        if problem:
            return f".{name}: {problem}"
    return ""


def local_answer(loop: Loop, inspection: Inspection) -> bytes:
    """hold or constant as it travels behind ATTACHED (docs/wire.md), b"" where the loop's fallback has neither.

    A clocked loop's client submits nothing that could be late; it has on_stale: hold.
    """
    last = loop.fallback[-1] if loop.fallback and loop.trigger == "client" else None
    if last is None or last.kind == "device":
        return b""
    if last.kind == "hold":
        return LOCAL_ANSWER.pack(_core.PATHS["hold"], 0)
    parts = [LOCAL_ANSWER.pack(_core.PATHS["constant"], 0)]
    for tensor in inspection["outputs"]:
        values = _packed(last.constant[tensor["name"]], DTYPE_BY_NUMBER[tensor["dtype"]])
        parts += [LOCAL_ANSWER.pack(len(values), 0), values.ljust(-(-len(values) // 8) * 8, b"\0")]
    return b"".join(parts)


def _packed(values: Any, dtype: DType) -> bytes:
    if dtype.name == "BF16":  # the upper half of an FP32, rounded to even
        bits = np.asarray(values, np.float32).view(np.uint32)
        return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())
    return np.asarray(values).astype(dtype.numpy).tobytes()


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in shape if dim != 1)


def _range_problem(values: Any, dtype: str) -> str:
    """A number that the type can't hold: beyond its range, where a float would become infinite, or not whole."""
    if dtype in _FLOATS:
        largest, infinite = _FLOATS[dtype]
        for value in _numbers(values):
            if not abs(value) < infinite:
                return f"found {value:g}; allowed in {dtype}: numbers from {-largest:.6g} to {largest:.6g}"
        return ""
    bounds = _INTEGERS.get(dtype)
    if bounds is None:
        return ""
    low, high = bounds
    for value in _numbers(values):
        if value != math.floor(value) or not low <= value <= high:
            return f"found {value:g}; allowed in {dtype}: whole numbers from {low} to {high}"
    return ""


_FP32: Final = (float.fromhex("0x1.fffffep127"), float.fromhex("0x1.ffffffp127"))
_FP64: Final = (sys.float_info.max, math.inf)
# Type → its largest value, and the one from which a number would be rounded to infinity. BF16 is rounded twice.
_FLOATS: Final = {
    "FP16": (65504.0, 65520.0), "BF16": (float.fromhex("0x1.fep127"), float.fromhex("0x1.fefffep127")),
    "FP32": _FP32, "FP64": _FP64, "COMPLEX64": _FP32, "COMPLEX128": _FP64,
}  # fmt: skip

_INTEGERS = {
    "BOOL": (0, 1),
    **{f"UINT{bits}": (0, 2**bits - 1) for bits in (4, 8, 16, 32, 64)},
    **{f"INT{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (4, 8, 16, 32, 64)},
}
