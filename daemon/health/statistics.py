"""Counters and latencies of loops and models, read from the executors' statistics pages; no executor is asked."""

from __future__ import annotations

from typing import Any, Final

from taktd.ipc import _core
from taktd.ipc.stats import percentile

QUANTILES: Final = (("p50_us", 0.5), ("p90_us", 0.9), ("p99_us", 0.99), ("p999_us", 0.999))
COUNTERS: Final = (
    "submitted", "ok", "expired", "refused", "invalid", "failed", "lost", "cancelled", "detached", "late", "early",
    "overrun", "orphaned",
)  # fmt: skip


def read(stats_fd: int, block: int) -> dict[str, Any]:
    """One block for people and programs: counters, misses by cause, latencies in µs."""
    raw: dict[str, Any] = dict(_core.stats_read(stats_fd, block))
    result: dict[str, Any] = {name: raw.get(name, 0) for name in COUNTERS}
    result["misses"] = raw["misses"]
    for name in ("queue", "run", "total"):
        hist = raw[f"{name}_us"]
        result[name] = {label: percentile(hist, q) / 1000 for label, q in QUANTILES}
        result[name] |= {"count": hist["count"], "sum_us": hist["sum_ns"] / 1000}
    return result
