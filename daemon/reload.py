"""What changed between two configurations, and whether it can be taken over while executors serve.

Today only what the supervisor alone decides can change at once: rights, limits, the size of recordings. Everything else
needs other executors. A reload is taken over whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from taktd.daemon.config import Configuration


def differences(old: Configuration, new: Configuration) -> list[tuple[str, ...]]:
    """Paths of the settings that differ, e.g. ("loops", "walk", "period")."""
    return list(_differences(old, new, ()))


def _differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(old, BaseModel) and type(old) is type(new):
        for name, field in type(old).model_fields.items():
            yield from _differences(getattr(old, name), getattr(new, name), (*path, field.alias or name))
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if key in old and key in new:
                yield from _differences(old[key], new[key], (*path, key))
            else:
                yield (*path, key)
        if list(old) != list(new) and set(old) == set(new):
            yield (*path, "order")  # loops tie by their order in the configuration
    elif old != new:
        yield path


def applicable(path: tuple[str, ...]) -> bool:
    """Whether this setting can change while executors serve."""
    if path[0] in ("limits", "recording"):
        return True
    return path[0] in ("loops", "models") and len(path) > 2 and path[2] == "allow"
