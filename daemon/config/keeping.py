"""A configuration as JSON and back, exactly: for a supervisor that goes on where a dead one stopped.

Not the language of configuration files (that has units, defaults and a judge): every field as it is, by class. Only
sections of ours are made from it.
"""

from __future__ import annotations

from typing import Any, Final

from taktd.daemon.config.configuration import Configuration
from taktd.daemon.config.values import Section

__all__ = ["NotKept", "keep", "restore"]

CLASS: Final = "\0class"
TUPLE: Final = "\0tuple"
WRITTEN: Final = "\0written"  # fields that somebody wrote, as opposed to defaults


class NotKept(Exception):
    """Something that can't be kept, or was not written by this version."""


def keep(value: Any) -> Any:
    """As JSON types. Raises NotKept."""
    if isinstance(value, Section):
        fields = {name: keep(getattr(value, name)) for name in type(value).model_fields}
        return {CLASS: type(value).__name__, WRITTEN: sorted(value.model_fields_set)} | fields
    if isinstance(value, tuple):
        return {TUPLE: [keep(one) for one in value]}
    if isinstance(value, list):
        return [keep(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: keep(one) for key, one in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotKept(f"a {type(value).__name__} can't be kept")


def restore(kept: Any) -> Configuration:
    """What was kept. Raises NotKept."""
    classes = {section.__name__: section for section in _sections(Section)}
    found = _restored(kept, classes)
    if not isinstance(found, Configuration):
        raise NotKept("no configuration")
    return found


def _sections(base: type[Section]) -> list[type[Section]]:
    return [base, *(section for child in base.__subclasses__() for section in _sections(child))]


def _restored(kept: Any, classes: dict[str, type[Section]]) -> Any:
    if isinstance(kept, list):
        return [_restored(one, classes) for one in kept]
    if not isinstance(kept, dict):
        return kept
    if TUPLE in kept:
        return tuple(_restored(one, classes) for one in kept[TUPLE])
    fields = {key: _restored(one, classes) for key, one in kept.items() if key not in (CLASS, WRITTEN)}
    if CLASS not in kept:
        return fields
    section = classes.get(kept[CLASS])
    if section is None or set(fields) != set(section.model_fields):
        raise NotKept(f"{kept[CLASS]} is not what it was")
    return section.model_construct(_fields_set=set(kept[WRITTEN]), **fields)
