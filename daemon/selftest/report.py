"""What a self-test found: steps in order, each passed, failed or skipped, with its figures and its words."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["FAILED", "PASSED", "SKIPPED", "Report", "Step", "quantiles_us"]

PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"


@dataclass(slots=True)
class Step:
    name: str
    outcome: str = PASSED
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        self.outcome, self.text = FAILED, text

    def skip(self, text: str) -> None:
        self.outcome, self.text = SKIPPED, text


@dataclass(slots=True)
class Report:
    device: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """No step failed. A skipped one says why; it is no failure of this machine."""
        return all(step.outcome != FAILED for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "simulated": bool(self.device.get("simulated")),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": {
                "system": platform.platform(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "architecture": platform.machine(),
            },
            "device": self.device,
            "steps": [{"name": s.name, "outcome": s.outcome, "text": s.text, "figures": s.figures} for s in self.steps],
        }


def quantiles_us(times_ns: list[int]) -> dict[str, float]:
    """p50 … max of at least one time, in µs."""
    ordered = sorted(times_ns)
    last = len(ordered) - 1
    shares = (("p50_us", 500_000), ("p99_us", 990_000), ("p999_us", 999_000), ("max_us", 1_000_000))
    found = {name: ordered[min(last, len(ordered) * ppm // 1_000_000)] / 1000 for name, ppm in shares}
    return {**found, "runs": len(ordered)}
