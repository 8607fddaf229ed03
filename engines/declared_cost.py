"""Execution times that somebody declares instead of measuring. Pure integers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

__all__ = ["PPM", "Cost"]

PPM: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Cost:
    """Execution times as points ``(share of runs in ppm, ns)`` of their distribution, both rising; linear between."""

    points: tuple[tuple[int, int], ...]

    @classmethod
    def fixed(cls, ns: int) -> Cost:
        return cls(((PPM, ns),))

    @classmethod
    def uniform(cls, least_ns: int, most_ns: int) -> Cost:
        return cls(((0, least_ns), (PPM, most_ns)))

    def at(self, share_ppm: int) -> int:
        """The time that ``share_ppm`` of all runs do not exceed, in ns; below the first point that point's."""
        shares = [share for share, _ in self.points]
        above = bisect_left(shares, share_ppm)
        if above == 0:
            return self.points[0][1]
        if above == len(shares):
            return self.points[-1][1]
        (low, low_ns), (high, high_ns) = self.points[above - 1 : above + 1]
        return low_ns + (high_ns - low_ns) * (share_ppm - low) // (high - low)
