"""When a loop's engine is so bad that another device's executor should answer instead. Pure.

A failure that the device is to blame for counts as it is. One that the job's input may be to blame for (a bad index,
NaN in, NaN out) or a run that took too long is only a suspicion: a client must not be able to move the loops of others
by what it sends. The executor then tries the engine on an input of its own, between two jobs, and goes by that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from taktd.engines.errors import FailureKind

__all__ = ["Suspicion", "SwitchRule", "switch_rule"]

#: No input brings these about.
OF_DEVICE: Final = frozenset(FailureKind) - {FailureKind.ERROR, FailureKind.NOT_FINITE}


@dataclass(frozen=True, slots=True)
class Suspicion:
    """reason: for people. certain: the device is to blame, there is nothing to be tried first."""

    reason: str
    certain: bool


class SwitchRule:
    """Of one loop: ``failures`` runs in a row that failed, or ``m`` of the last ``k`` jobs that ran beyond their cost.

    0 switches a half off. Jobs are told apart by their sequence numbers, and good ones need not be told.
    """

    __slots__ = ("_failed", "_k", "_limit", "_overran", "_row")

    def __init__(self, failures: int, m: int, k: int) -> None:
        self._limit, self._k = failures, k
        self._row = 0
        self._failed = 0  # the last one
        self._overran: deque[int] | None = deque(maxlen=m) if m else None

    def failed(self, sequence: int, last_ok: int, kind: FailureKind) -> Suspicion | None:
        """A run failed; ``last_ok`` is the last one that did not."""
        self._row = self._row + 1 if last_ok < self._failed else 1
        self._failed = sequence
        # Again after as many more: what was not confirmed, or could not be followed, is not asked at each job.
        if not self._limit or self._row % self._limit:
            return None
        return Suspicion(f"{self._row} runs in a row failed", kind in OF_DEVICE)

    def overran(self, sequence: int) -> Suspicion | None:
        """A run took longer than its cost."""
        times = self._overran
        if times is None:
            return None
        times.append(sequence)
        if len(times) < (times.maxlen or 0) or sequence - times[0] >= self._k:
            return None
        reason = f"{len(times)} of the last {self._k} jobs ran beyond their cost"
        times.clear()
        return Suspicion(reason, False)


def switch_rule(told: dict[str, Any] | None) -> SwitchRule | None:
    """From a loop's entry in the supervisor's messages; None: nobody stands in for it."""
    if told is None:
        return None
    m, k = told["overruns"]
    return SwitchRule(told["failures"], m, k)
