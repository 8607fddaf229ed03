"""Whether it pays to stay awake for a client because it comes back soon after each answer.

A program behind a front door asks again some 0.2 ms after its answer; to fall asleep meanwhile and be woken would add a
fifth to that. It does not pay where the client lives on the executor's own core, as it may on a small machine: an
executor that is awake keeps it from its next question, which then comes soon after the wait. A client that was waited
for so has to come back quickly before it is waited for again: once, then twice, then four times. One that has only
paused has not.

Arithmetic on times that are handed in.
"""

from __future__ import annotations

from typing import Final

__all__ = ["IN_VAIN_MAX", "ClosedLoop"]

IN_VAIN_MAX: Final = 64  # quick returns until the next try, at most
PAUSE: Final = 4  # a return after so many times as long as was waited came after a pause


class ClosedLoop:
    """One client."""

    __slots__ = ("_awaited", "_in_vain", "_quick")

    def __init__(self) -> None:
        self._quick = 0  # quick returns in a row; below 0, after a wait in vain
        self._in_vain = 1  # what the next wait in vain costs
        self._awaited = False

    def pays(self, gap_ns: int, within_ns: int) -> bool:
        """After its next answer. gap_ns: from its last answer to the job that has just run; below 0, it was submitted
        before that answer. within_ns: how long to stay awake."""
        if 0 < gap_ns < within_ns:
            self._quick += 1
            if self._awaited:
                self._in_vain = 1
        elif self._awaited and gap_ns < PAUSE * within_ns:
            self._quick = -self._in_vain
            self._in_vain = min(2 * self._in_vain, IN_VAIN_MAX)
        else:
            self._quick = min(self._quick, 0)
        self._awaited = self._quick > 0
        return self._awaited
