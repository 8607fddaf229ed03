"""Declarations about engines: what a simulated one does, how one is verified, which version of a model it runs.

Used by configuration.py, which says where in a file they stand.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from taktd.daemon.config.durations import DURATION_FORM, parse_duration, parse_ppm
from taktd.daemon.config.values import DURATION_NS_MAX, Section, refuse

VERSION_MAX: Final = 999_999_999
COST_NS_MAX: Final = 60 * 1_000_000_000
COST_POINTS_MAX: Final = 32
PPM: Final = 1_000_000
COST_FORM: Final = "2ms, {least: 1ms, most: 2ms}, or {p50: 1ms, p99: 2ms, max: 3ms}"

_PERCENTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,4})?)")


# YAML takes a power of ten for text unless it has a point and a sign: 1.0e-4. Here nothing else can be meant by it.
_POWER_OF_TEN = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")


def number(value: Any) -> Any:
    """A finite number of a tensor or a tolerance: never of a deadline, so it may be binary floating point."""
    if isinstance(value, str) and _POWER_OF_TEN.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not math.isfinite(value):
        raise refuse("is not a number", "a finite number such as 0.001")
    return float(value)


def _tolerance(value: Any) -> Any:
    result = number(value)
    if result < 0:
        raise refuse("is negative", "0 or more")
    return result


Number = Annotated[float, BeforeValidator(number)]
Tolerance = Annotated[float, BeforeValidator(_tolerance)]


class Verify(Section):
    """How an engine is compared with ONNX Runtime before it serves."""

    samples: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="An .npz file with an array [n, ...] for each input, and where there are golden results for outputs"
        " too; relative to the file that says so. Default: random inputs.",
    )
    rtol: Tolerance | None = Field(default=None, description="Relative tolerance. Default: by the output's type.")
    atol: Tolerance | None = Field(default=None, description="Absolute tolerance. Default: by the output's type.")


NonFinite = Literal["forbid", "flag", "allow"]


def _version(value: Any) -> Any:
    if value is None or value == "latest":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= VERSION_MAX:
        raise refuse("is no version", f"latest, or a number from 1 to {VERSION_MAX}")
    return value


Version = Annotated[int | Literal["latest"] | None, BeforeValidator(_version)]


# ---- driver: sim ----

CostPoints = tuple[tuple[int, int], ...]  # (share of runs in ppm, ns), both rising


def _time(value: Any, key: str = "") -> int:
    if not isinstance(value, str):
        raise refuse("is not a duration", DURATION_FORM, key=key)
    try:
        ns = parse_duration(value)
    except ValueError as error:
        raise refuse("is not a duration", str(error), key=key) from None
    if ns > min(COST_NS_MAX, DURATION_NS_MAX):
        raise refuse("is too large", "at most 60s", key=key)
    return ns


def _points(value: dict[Any, Any]) -> CostPoints:
    if set(value) == {"least", "most"}:
        return ((0, _time(value["least"], "least")), (PPM, _time(value["most"], "most")))
    if "max" not in value or len(value) > COST_POINTS_MAX:
        raise refuse("does not say the longest time", COST_FORM)
    points = []
    for key, time in value.items():
        match = _PERCENTILE.fullmatch(key) if isinstance(key, str) else None
        if key != "max" and match is None:
            raise refuse("is no percentile", "p0 to p99.9999, or max", key=str(key))
        share = PPM if match is None else parse_ppm(Decimal(match[1])) // 100
        points.append((share, _time(time, str(key))))
    return tuple(sorted(points))


def _cost(value: Any) -> Any:
    if isinstance(value, tuple):  # read already
        return value
    if isinstance(value, str):
        return ((PPM, _time(value)),)
    if not isinstance(value, dict):
        raise refuse("is not understood", COST_FORM)
    points = _points(value)
    for (low, low_ns), (high, high_ns) in pairwise(points):
        if low == high or low_ns > high_ns:
            raise refuse("falls where it should rise", "a longer time for a larger share of runs")
    return points


Cost = Annotated[CostPoints, BeforeValidator(_cost)]


class Outputs(Section):
    """What a simulated engine answers: `identity`, `onnx`, or a constant."""

    kind: Literal["identity", "constant", "onnx"] = Field(default="constant", alias="\0kind")
    constant: Number = Field(default=0.0, description="The value of every element of every output.")


def _outputs(value: Any) -> Any:
    if value in ("identity", "onnx", "constant"):
        return {"\0kind": value}
    if isinstance(value, (dict, Outputs)):
        return value
    raise refuse("is not understood", "identity, onnx, constant, or {constant: 0.5}")


SimulatedOutputs = Annotated[Outputs, BeforeValidator(_outputs)]


def default_outputs() -> Outputs:
    return Outputs.model_validate({"\0kind": "identity"})
