"""Counts of durations with seven significant bits: bounded memory however long a simulation runs. Integers only."""

from __future__ import annotations

SIGNIFICANT_BITS = 7
"""A bucket is at most 1/64 wide, relative to its lower end."""


class Histogram:
    """count, largest and percentiles of what was added, in the unit in which it was added; negative counts as 0."""

    __slots__ = ("_buckets", "count", "largest")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}  # lower end -> count
        self.count = 0
        self.largest = 0

    def add(self, value: int) -> None:
        if value < 0:
            value = 0
        shift = value.bit_length() - SIGNIFICANT_BITS
        lower = value >> shift << shift if shift > 0 else value
        self._buckets[lower] = self._buckets.get(lower, 0) + 1
        self.count += 1
        if value > self.largest:
            self.largest = value

    def percentile(self, ppm: int) -> int:
        """The upper end of the bucket that holds this rank, at most the largest value; 0 when empty."""
        rank = -(-self.count * ppm // 1_000_000)
        seen = 0
        for lower in sorted(self._buckets):
            seen += self._buckets[lower]
            if seen >= rank:
                shift = lower.bit_length() - SIGNIFICANT_BITS
                return min(self.largest, lower + (1 << shift) - 1 if shift > 0 else lower)
        return 0
