"""What running a version beside the one that is served has shown so far: differences per output, and times.

Pure; called by the shadow process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from taktd.engines.difference import Difference, Rules, difference
from taktd.engines.measure import Measurement
from taktd.engines.tensors import TensorSpec

TIMES_KEPT_MAX: Final = 5000  # p99.9 of that many rests on five of them
FAILURE_CHARACTERS_MAX: Final = 200

Values = npt.NDArray[Any]


class Comparison:
    """Of all samples since the start."""

    def __init__(self, outputs: Sequence[TensorSpec], rules: Rules) -> None:
        self._outputs, self._rules = outputs, rules
        self.samples = self.differing = self.failed = 0
        self.failure = ""  # of the last run that failed
        self._by_output = {t.name: _Output() for t in outputs}
        self._times: deque[int] = deque(maxlen=TIMES_KEPT_MAX)
        self._runs = self._disturbed = 0

    def ran(self, duration_ns: int, undisturbed: bool) -> None:
        """A run took so long; one that was switched out says nothing about the engine."""
        self._runs += 1
        if undisturbed:
            self._times.append(duration_ns)
        else:
            self._disturbed += 1

    def failing(self, why: str) -> None:
        """A run failed where the version that is served did not."""
        self.samples += 1
        self.failed += 1
        self.failure = why[:FAILURE_CHARACTERS_MAX]

    def compare(self, sequence: int, found: Sequence[Values], expected: Sequence[Values]) -> None:
        """One job's outputs, and what its client was given."""
        self.samples += 1
        apart = [
            self._by_output[t.name].add(sequence, difference(t.dtype, ours, theirs, self._rules))
            for t, ours, theirs in zip(self._outputs, found, expected, strict=True)
        ]
        self.differing += any(apart)

    def as_json(self) -> dict[str, Any]:
        """Counts and sizes as `taktctl model list --json` shows them; a number that is none is left out as None."""
        outputs = {}
        for tensor in self._outputs:
            rtol, atol = self._rules.tolerance(tensor.dtype)
            outputs[tensor.name] = {**self._by_output[tensor.name].as_json(), "rtol": rtol, "atol": atol}
        return {
            "samples": self.samples, "differing": self.differing, "failed": self.failed, "failure": self.failure,
            "outputs": outputs, "times": self._times_json(),
        }  # fmt: skip

    def _times_json(self) -> dict[str, int]:
        """0 ns while there are none; runs: all, the disturbed ones too."""
        cost = Measurement(tuple(sorted(self._times)) or (0,), self._disturbed).as_json()
        return {
            "runs": self._runs, "disturbed": cost["switched_out"], "p50_ns": cost["p50_ns"], "p99_ns": cost["p99_ns"],
            "p999_ns": cost["p999_ns"], "max_ns": cost["max_ns"],
        }  # fmt: skip


class _Output:
    def __init__(self) -> None:
        self.differing = self.elements = self.not_finite = 0
        self.absolute = self.relative = 0.0
        self.worst: dict[str, Any] | None = None
        self._worst_by = 0.0

    def add(self, sequence: int, apart: Difference) -> bool:
        """Whether anything in it is beyond the tolerance."""
        self.differing += apart.beyond > 0
        self.elements += apart.beyond
        self.not_finite += apart.not_finite
        if math.isfinite(apart.absolute):
            self.absolute = max(self.absolute, apart.absolute)
        self.relative = max(self.relative, apart.relative)
        if apart.beyond and apart.at is not None and apart.by > self._worst_by:
            self._worst_by = apart.by
            self.worst = {
                "sequence": sequence, "at": list(apart.at), "found": _told(apart.found),
                "expected": _told(apart.expected),
            }  # fmt: skip
        return apart.beyond > 0

    def as_json(self) -> dict[str, Any]:
        return {
            "differing": self.differing, "elements": self.elements, "not_finite": self.not_finite,
            "max_abs": self.absolute, "max_rel": self.relative, "worst": self.worst,
        }  # fmt: skip


def _told(value: Any) -> float | str:
    """A number, or the word for what JSON has no number for."""
    if np.iscomplexobj(value):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else str(number)
