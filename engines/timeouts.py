"""How long a run on a GPU may take before it counts as hung. Callers who know an engine's cost give less."""

from __future__ import annotations

from typing import Final

__all__ = ["RUN_TIMEOUT_NS", "WARM_TIMEOUT_NS"]

RUN_TIMEOUT_NS: Final = 2_000_000_000  # and of what no loop waits for, at least: batches, shapes of their own
WARM_TIMEOUT_NS: Final = 60_000_000_000  # the first runs load code and libraries, and TensorRT-RTX compiles
