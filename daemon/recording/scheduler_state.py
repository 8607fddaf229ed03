"""A scheduler's whole state as JSON and back, so that a recording can begin in the middle of a run.

The state is a graph of a closed set of classes; each object, list and mapping gets a number, and whatever refers to it
says that number: so what was one object is one object again. Called by record.py and recorder_file.py, never on the
real-time path. What it is not: a general serialiser. A class or field it does not know is refused.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Final

from taktd.daemon.schedule.accounts import Accounts
from taktd.daemon.schedule.arrivals import Arrivals
from taktd.daemon.schedule.best_effort import BestEffort, BestEffortLane
from taktd.daemon.schedule.expiry import Expiries
from taktd.daemon.schedule.job import Expire, Job, Queue, Start, Task, Wait
from taktd.daemon.schedule.loop import Loop
from taktd.daemon.scheduler import Scheduler

__all__ = ["StateMalformed", "decode_plan", "decode_state", "encode_plan", "encode_state"]

CLASSES: Final[dict[str, type]] = {
    kind.__name__: kind
    for kind in (
        Scheduler, Accounts, Arrivals, BestEffort, BestEffortLane, Expiries, Expire, Job, Loop, Queue, Start, Task,
        Wait,
    )
}  # fmt: skip
OBJECTS_MAX: Final = 1_000_000


class StateMalformed(ValueError):
    """A state that no scheduler of this version has."""


def encode_state(scheduler: Scheduler) -> str:
    """JSON text; decode_state makes an equal scheduler of it."""
    known: dict[int, int] = {}
    found: list[Any] = []  # also keeps what is made here alive, so that no two things have one id

    def reference(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, tuple):
            return {"t": [reference(item) for item in value]}
        number = known.get(id(value))
        if number is None:
            number = known[id(value)] = len(found)
            found.append(value)
        return {"@": number}

    reference(scheduler)
    table: list[Any] = []
    for value in found:  # grows while it is walked
        if value is scheduler.alarms:
            table.append(["l", []])  # the executor empties it when it likes; nothing is decided by it
        elif isinstance(value, list):
            table.append(["l", [reference(item) for item in value]])
        elif isinstance(value, deque):
            table.append(["d", value.maxlen, [reference(item) for item in value]])
        elif isinstance(value, dict):
            table.append(["m", [[reference(key), reference(item)] for key, item in value.items()]])
        else:
            table.append(_encode_object(value, reference))
    return json.dumps(table, separators=(",", ":"))


def _encode_object(value: Any, reference: Any) -> list[Any]:
    name = type(value).__name__
    if CLASSES.get(name) is not type(value):
        raise TypeError(f"a scheduler's state has a {name}, which scheduler_state.CLASSES does not list")
    return [name, {field: reference(getattr(value, field)) for field in _fields(type(value))}]


def _fields(kind: type) -> tuple[str, ...]:
    slots: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]
    return slots


def decode_state(text: str) -> Scheduler:
    """Raises StateMalformed."""
    try:
        return _decode(json.loads(text))
    except StateMalformed:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise StateMalformed(f"the scheduler's state is malformed ({type(error).__name__}: {error})") from error


def _decode(table: list[Any]) -> Scheduler:
    if not isinstance(table, list) or not 1 <= len(table) <= OBJECTS_MAX:
        raise StateMalformed("the scheduler's state is no list of objects")
    made: list[Any] = [_empty(entry) for entry in table]

    def value(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        return tuple(value(part) for part in item["t"]) if "t" in item else made[item["@"]]

    for target, entry in zip(made, table, strict=True):
        if isinstance(target, (list, deque)):
            target.extend(value(item) for item in entry[-1])
        elif isinstance(target, dict):
            target.update((value(key), value(item)) for key, item in entry[1])
        else:
            fields = entry[1]
            if set(fields) != set(_fields(type(target))):
                raise StateMalformed(f"{entry[0]} has other fields than this version's")
            for field, item in fields.items():
                object.__setattr__(target, field, value(item))
    root = made[0]
    if not isinstance(root, Scheduler):
        raise StateMalformed("the scheduler's state does not begin with a scheduler")
    return root


def _empty(entry: list[Any]) -> Any:
    kind = entry[0]
    if kind == "l":
        return []
    if kind == "d":
        return deque(maxlen=entry[1])
    if kind == "m":
        return {}
    if kind not in CLASSES:
        raise StateMalformed(f"{kind!r} is nothing a scheduler's state can have")
    return object.__new__(CLASSES[kind])


def encode_plan(plan: Task | Queue) -> str:
    """JSON text of one loop's or model's definition."""
    values = [getattr(plan, field) for field in _fields(type(plan))]
    return json.dumps([type(plan).__name__, values], separators=(",", ":"))


def decode_plan(text: str) -> Task | Queue:
    """Raises StateMalformed."""
    try:
        name, values = json.loads(text)
        kind = {"Task": Task, "Queue": Queue}[name]
        named: dict[str, Any] = {
            field: tuple(item) if isinstance(item, list) else item
            for field, item in zip(_fields(kind), values, strict=True)
        }
        plan: Task | Queue = kind(**named)
        return plan
    except (ValueError, KeyError, TypeError) as error:
        raise StateMalformed(f"the definition of a lane is malformed ({error})") from error
