"""What clients hold: connections, lanes, memory. Charged to a uid, given back, zero at the end.

One book for the whole daemon; no I/O. A charge either fits under both the uid's limit and the total, or raises and
changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from taktd.daemon.config import Limits

Kind = Literal["connections", "lanes", "lane_memory"]
KINDS: Final[tuple[Kind, ...]] = ("connections", "lanes", "lane_memory")


class LimitExceeded(Exception):
    """A charge that does not fit; the message names what, how much, the limit and its setting."""


class Charges:
    """Counts by kind and uid."""

    def __init__(self, limits: Limits) -> None:
        self._held: dict[Kind, Counter[int]] = {kind: Counter() for kind in KINDS}
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
        }

    def charge(self, kind: Kind, uid: int, amount: int = 1) -> None:
        """Book `amount` (entries, or bytes) on uid, or raise LimitExceeded."""
        held = self._held[kind]
        per_uid, in_all = self._bounds[kind]
        for bound, now, whose, key in (
            (per_uid, held[uid], f"uid {uid}", f"limits.{kind}_per_uid"),
            (in_all, held.total(), "all clients", f"limits.{kind}"),
        ):
            if now + amount > bound:
                noun = kind.replace("_", " ")
                unit = " bytes" if kind == "lane_memory" else ""
                raise LimitExceeded(
                    f"too many {noun} for {whose}: {now}{unit} held, {amount} more wanted, {bound} allowed; "
                    f"give some back, or raise {key} in the configuration"
                    if unit == ""
                    else f"too much {noun} for {whose}: {now} bytes held, {amount} more wanted, {bound} allowed; "
                    f"detach some lanes, or raise {key} in the configuration"
                )
        held[uid] += amount

    def release(self, kind: Kind, uid: int, amount: int = 1) -> None:
        """Give back what was charged."""
        held = self._held[kind]
        if held[uid] < amount:
            raise AssertionError(f"{amount} {kind} given back for uid {uid}, {held[uid]} were held")
        held[uid] -= amount
        if not held[uid]:
            del held[uid]

    def held(self, kind: Kind, uid: int | None = None) -> int:
        """What a uid holds, or all together."""
        return self._held[kind].total() if uid is None else self._held[kind][uid]
