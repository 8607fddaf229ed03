"""Reading the latency histograms of the daemon's statistics pages. Pure functions; no clock, no I/O.

A histogram is the dict that `_core.stats_read` returns: `count`, `sum_ns`, and `buckets`, a list of
`(upper_ns, count)` with the empty ones left out, in rising order.
"""

from __future__ import annotations

from typing import TypedDict


class Histogram(TypedDict):
    """Counts of durations; each bucket holds those up to and including `upper_ns`."""

    count: int
    sum_ns: int
    buckets: list[tuple[int, int]]


def percentile(hist: Histogram, q: float) -> int:
    """The upper bound in ns of the bucket that holds quantile `q` (0 < q ≤ 1); 0 for an empty histogram.

    Nearest-rank definition: the smallest bound that at least ``ceil(q·n)`` of the n values don't exceed.
    """
    if not 0.0 < q <= 1.0:
        raise ValueError(f"quantile {q!r}: must be above 0 and at most 1 (0.99 for p99)")
    buckets = hist["buckets"]
    total = sum(count for _, count in buckets)
    # Ranks are integers: parts per million, so that 0.99 of 100 is rank 99, not 100 by a rounding error.
    rank = -(-total * round(q * 1_000_000) // 1_000_000)
    seen = 0
    for upper_ns, count in buckets:
        seen += count
        if seen >= rank:
            return upper_ns
    return 0


def mean_ns(hist: Histogram) -> int:
    """Arithmetic mean in ns, rounded down; 0 for an empty histogram."""
    return hist["sum_ns"] // hist["count"] if hist["count"] else 0


def merge(first: Histogram, second: Histogram) -> Histogram:
    """The histogram of both sets of values."""
    counts: dict[int, int] = {}
    for upper_ns, count in (*first["buckets"], *second["buckets"]):
        counts[upper_ns] = counts.get(upper_ns, 0) + count
    return {
        "count": first["count"] + second["count"],
        "sum_ns": first["sum_ns"] + second["sum_ns"],
        "buckets": sorted(counts.items()),
    }
