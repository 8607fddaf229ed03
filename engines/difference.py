"""How far apart two results of one model are, by type and tolerance: for verification and for versions side by side.

An element passes if |found − expected| ≤ atol + rtol · |expected|. NaN matches NaN, an infinity the same infinity, and
neither matches a number however wide the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from taktd.engines.tensors import DType

__all__ = ["TOLERANCES", "Difference", "Rules", "difference"]

# dtype → (rtol, atol): sums in another order, and for the narrow types a rounding per layer. Others: bit for bit.
TOLERANCES: Final[dict[str, tuple[float, float]]] = {
    "FP64": (1e-7, 1e-9),
    "COMPLEX128": (1e-7, 1e-9),
    "FP32": (1e-3, 1e-5),
    "COMPLEX64": (1e-3, 1e-5),
    "FP16": (2e-2, 2e-3),
    "BF16": (5e-2, 1e-2),
}

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Rules:
    """How to compare. ``samples``: an .npz file; None: random inputs. Tolerances None: by type."""

    samples: str | None = None
    rtol: float | None = None
    atol: float | None = None

    def tolerance(self, dtype: DType) -> tuple[float, float]:
        rtol, atol = TOLERANCES.get(dtype.name, (0.0, 0.0))
        return (rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one output of one run. beyond: elements outside the tolerance; absolute: the largest |found − expected|, an
    infinity where NaN or an infinity met something else; relative: the largest |found − expected| / |expected| of
    those that are numbers; not_finite: elements where something that is no number met something else.

    at, found, expected, by: of the element that is furthest beyond; None of an empty tensor.
    """

    beyond: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    not_finite: int = 0
    at: tuple[int, ...] | None = None
    found: Any = None
    expected: Any = None
    by: float = 0.0


def difference(dtype: DType, found: Values, expected: Values, rules: Rules) -> Difference:
    """Of two arrays of a tensor's values, raw where numpy lacks the type."""
    ours, theirs = _numbers(found, dtype), _numbers(expected, dtype)
    if ours.size == 0:
        return Difference()
    rtol, atol = rules.tolerance(dtype)
    exact = ours.dtype.kind not in "fc"
    if exact and rtol == 0 and atol == 0:
        apart = excess = (ours != theirs).astype(np.float64)
    else:
        if exact:
            ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.where(same, 0.0, np.abs(ours - theirs))
            excess = apart - np.where(same, 0.0, atol + rtol * np.abs(theirs))
        # NaN on one side only, or an infinity against a number: as far off as can be.
        apart = np.where(np.isnan(apart), np.inf, apart)
        excess = np.where(np.isnan(excess), np.inf, excess)
    at = np.unravel_index(int(np.argmax(excess)), excess.shape)
    size = np.abs(theirs)
    comparable = np.isfinite(apart) & (size > 0) & np.isfinite(size)
    relative = apart[comparable] / size[comparable]
    return Difference(
        int(np.count_nonzero(excess > 0)), float(apart.max()), float(relative.max()) if relative.size else 0.0,
        int(np.count_nonzero(np.isinf(apart))), tuple(int(i) for i in at), ours[at], theirs[at],
        float(apart[at]),
    )  # fmt: skip


def _numbers(values: Values, dtype: DType) -> Values:
    """As numbers that can be subtracted without wrapping; types that can't be compared by tolerance as integers."""
    if dtype.name == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name.startswith("COMPLEX"):
        return values.astype(np.complex128)
    if dtype.name in TOLERANCES:
        return values.astype(np.float64)
    return values
