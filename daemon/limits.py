"""What clients hold: connections, lanes, memory, jobs. Charged to whoever asks, given back, zero at the end.

One book for each process that clients speak to (supervisor, gateway); no I/O. Charged is a uid, or where there is none
the name of a gRPC listener or certificate. A charge either fits under both the uid's limit and the total, or raises and
changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from taktd.daemon.config.configuration import Limits

Kind = Literal["connections", "lanes", "lane_memory", "jobs", "job_memory"]
KINDS: Final[tuple[Kind, ...]] = ("connections", "lanes", "lane_memory", "jobs", "job_memory")
Who = int | str


class LimitExceeded(Exception):
    """A charge that does not fit; the message names what, how much, the limit and its setting."""


class Charges:
    """Counts by kind and by whom."""

    def __init__(self, limits: Limits) -> None:
        self._held: dict[Kind, dict[Who, int]] = {kind: {} for kind in KINDS}
        self._totals: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.limits = limits

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        """New limits hold for new charges; what is held stays held."""
        self._limits = limits
        self._bounds: dict[Kind, tuple[int, int]] = {
            "connections": (limits.connections_per_uid, limits.connections),
            "lanes": (limits.lanes_per_uid, limits.lanes),
            "lane_memory": (limits.lane_memory_per_uid_bytes, limits.lane_memory_bytes),
            "jobs": (limits.jobs_per_uid, limits.jobs),
            "job_memory": (limits.job_memory_per_uid_bytes, limits.job_memory_bytes),
        }

    def charge(self, kind: Kind, who: Who, amount: int = 1, *, within_limits: bool = True) -> None:
        """Book `amount` (entries, or bytes), or raise LimitExceeded. Not within limits: what is held already."""
        per_uid, in_all = self._bounds[kind]
        total, held = self._totals[kind], self._held[kind].get(who, 0)
        if within_limits and held + amount > per_uid:
            whose = f"uid {who}" if isinstance(who, int) else who
            raise _exceeded(kind, whose, held, amount, per_uid, f"limits.{kind}_per_uid")
        if within_limits and total + amount > in_all:
            raise _exceeded(kind, "all clients", total, amount, in_all, f"limits.{kind}")
        self._held[kind][who] = held + amount
        self._totals[kind] = total + amount

    def release(self, kind: Kind, who: Who, amount: int = 1) -> None:
        """Give back what was charged."""
        held = self._held[kind].get(who, 0)
        if held < amount:
            raise AssertionError(f"{amount} {kind} given back for {who}, {held} were held")
        self._totals[kind] -= amount
        if held > amount:
            self._held[kind][who] = held - amount
        else:
            self._held[kind].pop(who, None)

    def held(self, kind: Kind, who: Who | None = None) -> int:
        """What one holds, or all together."""
        return self._totals[kind] if who is None else self._held[kind].get(who, 0)


_MEMORY: Final = ("lane_memory", "job_memory")
_TO_DO: Final = {
    "lane_memory": "detach some lanes",
    "jobs": "wait for some answers",
    "job_memory": "wait for some answers, or attach a lane (shared memory)",
}


def _exceeded(kind: Kind, whose: str, held: int, amount: int, bound: int, key: str) -> LimitExceeded:
    much, unit = ("much", " bytes") if kind in _MEMORY else ("many", "")
    return LimitExceeded(
        f"too {much} {kind.replace('_', ' ')} for {whose}: {held}{unit} held, {amount} more wanted, {bound} allowed; "
        f"{_TO_DO.get(kind, 'give some back')}, or raise {key} in the configuration"
    )
