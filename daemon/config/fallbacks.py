"""The declaration of a loop's fallback: who answers when its device does not, in order.

Used by configuration.py. What can be judged from the files alone is judged here; whether a stand-in's model has the
loop's tensors is known after inspection (supervision/fallback.py), whether it fits on its device after measuring
(admission).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from taktd.daemon.config.engines import number
from taktd.daemon.config.messages import nearest
from taktd.daemon.config.values import Name, Section, refuse
from taktd.daemon.config.yamltree import ConfigError, KeyPath, Tree, shown

__all__ = ["FALLBACKS_MAX", "Fallback", "Fallbacks", "Switch", "fallback_errors"]

FALLBACKS_MAX: Final = 4
CONSTANT_ELEMENTS_MAX: Final = 512  # they travel in the answer to the attach: 8 KiB
FORM: Final = "a device, {device: cpu1, model: small}, or as the last one hold or {constant: {output: [..]}}"

Values = float | tuple[Any, ...]


def _values(value: Any, room: list[int], key: KeyPath) -> Values:
    """key: the way to the value from the constant, for the message."""
    if isinstance(value, (tuple, list)):
        return tuple(_values(item, room, (*key, place)) for place, item in enumerate(value))
    room[0] -= 1
    if room[0] < 0:
        raise refuse("has too many numbers", f"at most {CONSTANT_ELEMENTS_MAX}")
    try:
        result: float = number(value)
    except PydanticCustomError:
        raise refuse("is not a number", "a finite number such as 0.001", key=key, found=shown(value)) from None
    return result


def _constant(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise refuse("is not understood", "a number or list for each output: {constant: {actions: [0, 0]}}")
    room = [CONSTANT_ELEMENTS_MAX]
    return {name: _values(item, room, (name,)) for name, item in value.items()}


class Fallback(Section):
    """One of those who answer in a device's stead."""

    kind: Literal["device", "hold", "constant"] = Field(default="device", alias="\0kind")
    device: Name = Field(default="", description="The device whose executor stands in.")
    model: Name = Field(default="", description="The model it runs, of the same tensors. Default: the loop's own.")
    constant: Annotated[dict[str, Any], BeforeValidator(_constant)] = Field(
        default_factory=dict, description="Per output its values, or one number for all of them."
    )


SWITCH_JOBS_MAX: Final = 1000


def _of_last(values: tuple[int, ...]) -> tuple[int, ...]:
    m, k = values
    if not 0 <= m <= k <= SWITCH_JOBS_MAX:
        raise refuse("is no rule", f"[m, k] with 0 ≤ m ≤ k ≤ {SWITCH_JOBS_MAX}; [0, 0]: never", found=f"[{m}, {k}]")
    return values


class Switch(Section):
    """When a primary that lives is so bad that the loop's stand-in takes over."""

    failures: Annotated[int, Field(ge=0, le=SWITCH_JOBS_MAX)] = Field(
        default=3, description="So many runs in a row that fail, or whose output is not finite where the model forbids "
        "it; 0: never.",
    )  # fmt: skip
    overruns: Annotated[tuple[int, ...], Field(min_length=2, max_length=2), AfterValidator(_of_last)] = Field(
        default=(8, 10), description="[m, k]: m of the last k jobs ran beyond their cost; [0, 0]: never."
    )


def _fallback(value: Any) -> Any:
    if isinstance(value, Fallback):
        return value
    if value == "hold":
        return {"\0kind": "hold"}
    if isinstance(value, str):
        return {"\0kind": "device", "device": value}
    if isinstance(value, dict):
        if "constant" in value:
            if len(value) > 1:
                raise refuse("is both a constant and something else", FORM)
            return {"\0kind": "constant", **value}
        if "device" in value:
            return {"\0kind": "device", **value}
    raise refuse("is not understood", FORM)


def _order(values: tuple[Fallback, ...]) -> tuple[Fallback, ...]:
    if len(values) > FALLBACKS_MAX:
        raise refuse("has too many entries", f"at most {FALLBACKS_MAX}", found=str(len(values)))
    for place, one in enumerate(values[:-1]):
        if one.kind != "device":
            raise refuse("is not the last one", "nothing behind hold or constant: they always answer", key=place,
                         found=one.kind)  # fmt: skip
    return values


def _listed(value: Any) -> Any:
    items = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(_fallback(item) for item in items)


Fallbacks = Annotated[tuple[Fallback, ...], BeforeValidator(_listed), AfterValidator(_order)]


def _named(item: Any) -> tuple[str, str]:
    """Device and model that an entry names, "" where none."""
    if isinstance(item, str):
        return ("" if item == "hold" else item), ""
    if isinstance(item, dict):
        found = [item.get(key) for key in ("device", "model")]
        device, model = (name if isinstance(name, str) else "" for name in found)
        return device, model
    return "", ""


def fallback_errors(tree: Tree, devices: list[str], models: list[str], loops: dict[str, Any]) -> Iterable[ConfigError]:
    """Fallbacks that name what is not there, the loop's own device, or a device twice; judged on the tree."""
    for name, loop in loops.items():
        entries = loop.get("fallback") if isinstance(loop, dict) else None
        entries = entries if isinstance(entries, (tuple, list)) else (entries,)
        own = loop.get("device", devices[0] if len(devices) == 1 else None) if isinstance(loop, dict) else None
        seen: set[str] = set()
        for place, item in enumerate(entries):
            device, model = _named(item)
            at = ("loops", name, "fallback", place)
            if device and device not in devices:
                allowed = ", ".join([*devices[:8], "hold"])
                yield tree.error(at, "names a device that does not exist", found=shown(device), allowed=allowed,
                                 hint=nearest(device, devices))  # fmt: skip
            elif device and device == own:
                yield tree.error(at, "is the loop's own device", found=shown(device), allowed="another device")
            elif device in seen:
                yield tree.error(at, "names a device twice", found=shown(device), allowed="each device once")
            if model and model not in models:
                allowed = ", ".join(models[:8])
                yield tree.error(at, "names a model that does not exist", found=shown(model), allowed=allowed,
                                 hint=nearest(model, models))  # fmt: skip
            seen.add(device)
            seen.discard("")
