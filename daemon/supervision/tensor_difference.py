"""Whether two models have the same tensors, by name, type and shape, in their order; and what is told where not. Pure.

Asked of two versions of one model before one follows the other (handover/tensor_change.py) or runs beside it
(shadow/commands.py), and of a stand-in's model (fallback.py), which says it in words of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Inspection", "Tensor", "Words", "as_a_change", "tensor_difference"]

Inspection = Mapping[str, Any]
Tensor = tuple[str, str]  # name, type and shape
Words = Callable[[str, Sequence[Tensor], Sequence[Tensor]], str]
"""Given "inputs" or "outputs", what one model has and what the other has, which differ: what is first found to."""


def tensor_difference(old: Inspection, new: Inspection, words: Words) -> str:
    """What is first found to differ, in these words; "" if nothing is."""
    for side in ("inputs", "outputs"):
        before, after = ([(t["name"], f"{t['dtype_name']}{list(t['dims'])}") for t in i[side]] for i in (old, new))
        if before != after:
            return words(side, before, after)
    return ""


def as_a_change(side: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> str:
    """Of a version that is to follow another one."""
    what, had, has = side[:-1], dict(before), dict(after)
    for name, told in before:
        if name not in has:
            return f"{what} {name}, {told}, would not be there any more"
        if has[name] != told:
            return f"{what} {name} is {told}, and would be {has[name]}"
    for name, told in after:
        if name not in had:
            return f"{what} {name}, {told}, would be new"
    return f"{side} would come in another order: {', '.join(has)}"
