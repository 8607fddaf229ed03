"""A warning that may come true many times a second: told at once, then seldom, with how often it came. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["PAUSE_FIRST_NS", "PAUSE_NS_MAX", "Repetition"]

PAUSE_FIRST_NS: Final = 10_000_000_000
PAUSE_NS_MAX: Final = 3_600_000_000_000


class Repetition:
    """Of one warning. The pause after which it may be told again doubles each time, up to an hour."""

    __slots__ = ("_count", "_due_ns", "_pause_ns")

    def __init__(self) -> None:
        self._count = 0
        self._due_ns = 0
        self._pause_ns = PAUSE_FIRST_NS

    def came(self, now_ns: int) -> int:
        """It came true once more: how often it did since it was told last, where it is to be told now, else 0."""
        self._count += 1
        if now_ns < self._due_ns:
            return 0
        told, self._count = self._count, 0
        self._due_ns = now_ns + self._pause_ns
        self._pause_ns = min(2 * self._pause_ns, PAUSE_NS_MAX)
        return told
