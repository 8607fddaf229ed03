"""The configuration's declarations, read back: into messages for people, and into the list of settings.

Turns pydantic's errors into ConfigError with file, line, key, found, allowed and hint. Called by configuration.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from taktd.daemon.config.durations import DURATION_FORM, format_duration, format_ppm, format_size
from taktd.daemon.config.values import NAME, Section
from taktd.daemon.config.yamltree import ConfigError, KeyPath, Tree, dotted, shown


def translated(tree: Tree, error: ValidationError, root: type[Section]) -> list[ConfigError]:
    result = []
    for item in error.errors(include_url=False):
        path: KeyPath = tuple(step for step in item["loc"] if step not in (NAME, "[key]"))
        if item["type"] == "rule":
            for problem in item.get("ctx", {}).get("problems", ()):
                below = problem.key if isinstance(problem.key, tuple) else (problem.key,)
                place = path if problem.key == "" else (*path, *below)
                found = problem.found or (shown(item["input"]) if problem.key == "" else "")
                result.append(tree.error(place, problem.what, found=found, allowed=problem.allowed, hint=problem.hint))
        else:
            result.append(_builtin_error(tree, path, dict(item), root))
    return sorted(result, key=lambda e: (e.file, e.line))


_BOUNDS: Final = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
_KINDS: Final = {
    "string_type": "text", "int_type": "a whole number", "tuple_type": "a list in brackets", "dict_type": "a mapping",
    "model_type": "a mapping", "bool_type": "true or false",
}  # fmt: skip


def _builtin_error(tree: Tree, path: KeyPath, item: dict[str, Any], root: type[Section]) -> ConfigError:
    kind, context, found = item["type"], item.get("ctx", {}), shown(item["input"])
    if kind == "extra_forbidden":
        known = _known_keys(root, path[:-1])
        hint = nearest(str(path[-1]), known) or "remove it"
        return tree.error(path, "is not a known key", found=shown(str(path[-1])), allowed=", ".join(known), hint=hint)
    if kind == "missing":
        return tree.error(path, "is missing", allowed=_form(root, path), hint=_description(root, path))
    if kind in _KINDS:
        hint = "put it in quotes" if kind == "string_type" and item["input"] is not None else ""
        return tree.error(path, f"is not {_KINDS[kind]}", found=found, allowed=_KINDS[kind], hint=hint)
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        hint = nearest(str(item["input"]), allowed.split(", "))
        return tree.error(path, "is not one of the choices", found=found, allowed=allowed, hint=hint)
    if kind in ("too_short", "too_long"):
        bound = "at least" if kind == "too_short" else "at most"
        count = context.get("min_length", context.get("max_length"))
        return tree.error(path, "has the wrong number of entries", found=found, allowed=f"{bound} {count}")
    bounds = [
        f"{sign} {context[name]}"
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if name in context
    ]
    return tree.error(path, "is not allowed", found=found, allowed=bounds[0] if bounds else item["msg"])


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class Setting:
    """One key for a person: dotted path with NAME for free names, kind of value, default, description."""

    key: str
    default: str
    description: str


def _model_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for part in getattr(annotation, "__args__", ()):
        found = _model_in(part)
        if found is not None:
            return found
    return None


def _section_at(root: type[Section], path: KeyPath) -> type[Section] | None:
    section: type[Section] | None = root
    for step in path:
        if section is None or isinstance(step, int):
            return None
        field = next((f for name, f in section.model_fields.items() if (f.alias or name) == step), None)
        if field is not None:
            section = _model_in(field.annotation)
        elif section is root:
            return None
    return section


def _known_keys(root: type[Section], path: KeyPath) -> list[str]:
    section = _section_at(root, path)
    names = [field.alias or name for name, field in section.model_fields.items()] if section else []
    return [name for name in names if not name.startswith("\0")]


def _field(root: type[Section], path: KeyPath) -> tuple[str, FieldInfo] | None:
    section = _section_at(root, path[:-1])
    fields = section.model_fields.items() if section else ()
    return next(((name, field) for name, field in fields if (field.alias or name) == path[-1]), None)


def _description(root: type[Section], path: KeyPath) -> str:
    field = _field(root, path)
    return f"set it: {field[1].description}" if field and field[1].description else ""


def _form(root: type[Section], path: KeyPath) -> str:
    """What a missing value looks like."""
    found = _field(root, path)
    if found is None:
        return ""
    name, field = found
    if get_origin(field.annotation) is Literal:
        return ", ".join(get_args(field.annotation))
    if name.endswith("_ns"):
        return DURATION_FORM
    kinds = {"model": "the name of a model", "device": "the name of a device", "path": "the path of a file or folder"}
    return kinds.get(name, "a mapping" if get_origin(field.annotation) is dict else "")


def _default_shown(name: str, field: FieldInfo) -> str:
    """The default as a person would write it; "" where the description says it or there is none."""
    value = field.default
    if field.is_required():
        return "required"
    if value is None or field.default_factory is not None or "Default:" in (field.description or ""):
        return ""
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    for suffix, text in (("_ns", format_duration), ("_ppm", format_ppm), ("_bytes", format_size)):
        if name.endswith(suffix):
            return text(value)
    return str(value)


def settings(section: type[Section], path: KeyPath = ()) -> list[Setting]:
    """Every setting in order, from the declarations above."""
    result = []
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key.startswith("\0"):
            continue
        inner = _model_in(field.annotation)
        free = getattr(field.annotation, "__origin__", None) is dict
        here = (*path, key, "NAME") if free else (*path, key)
        default = "" if inner else _default_shown(name, field)
        result.append(Setting(dotted(here), default, field.description or ""))
        if inner is not None:
            result += settings(inner, here)
    return result
