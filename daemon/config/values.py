"""Kinds of values in a configuration: from what YAML gives to exact integers and names, or a refusal.

Used as annotations by the declarations in configuration.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from taktd.daemon.config.durations import (
    DURATION_FORM,
    SIZE_FORM,
    format_duration,
    parse_duration,
    parse_ppm,
    parse_size,
)

NAME_BYTES_MAX: Final = 63  # a lane's header has room for 64 with the NUL
DURATION_NS_MAX: Final = 24 * 3600 * 1_000_000_000
PERIOD_NS_MIN: Final = 20_000  # below it there is no time for anything but the hand-over itself
# Carries the key of `loops: {walk: …}` into the loop. A file can't write it: keys with control characters are refused.
NAME: Final = "\0name"

_NAME_FORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NAME_ALLOWED: Final = f"letters, digits, '_', '-', '.', at most {NAME_BYTES_MAX}, not beginning with '-' or '.'"

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One thing wrong; key names a key (or the way to one) below the place that is judged, "" the place itself."""

    key: str | int | tuple[str | int, ...]
    what: str
    found: str = ""
    allowed: str = ""
    hint: str = ""


def refuse(
    what: str, allowed: str = "", hint: str = "", key: str | int | tuple[str | int, ...] = "", found: str = ""
) -> PydanticCustomError:
    """A refusal by one of our own rules."""
    return refuse_all([Problem(key, what, found, allowed, hint)])


def refuse_all(problems: list[Problem]) -> PydanticCustomError:
    """Several at once."""
    return PydanticCustomError("rule", "{what}", {"problems": problems, "what": problems[0].what})


def _quantity(parse: Callable[[str], int], form: str, what: str) -> Callable[[Any], int]:
    def judge(value: Any) -> int:
        if not isinstance(value, str):
            hint = "write the unit behind the number" if isinstance(value, (int, Decimal)) else ""
            raise refuse(f"is not {what}", form, hint)
        if value.strip().startswith("-"):
            raise refuse("is negative", form)
        try:
            return parse(value)
        except ValueError as error:
            raise refuse(f"is not {what}", str(error)) from None

    return judge


def _at_least(minimum: int, allowed: str) -> Callable[[int], int]:
    def judge(value: int) -> int:
        if value < minimum:
            raise refuse("is too small", allowed)
        return value

    return judge


def _at_most(maximum: int, text: str) -> Callable[[int], int]:
    def judge(value: int) -> int:
        if value > maximum:
            raise refuse("is too large", f"at most {text}")
        return value

    return judge


def _ppm(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
        raise refuse("is not a number", "a decimal number such as 0.1 or 1.3")
    try:
        return parse_ppm(value)
    except ValueError as error:
        raise refuse("is not exact", str(error)) from None


def _name(value: str) -> str:
    if len(value) > NAME_BYTES_MAX or not _NAME_FORM.fullmatch(value):
        raise refuse("is not a usable name", _NAME_ALLOWED)
    return value


def distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    if len(set(values)) != len(values):
        raise refuse("has an entry twice", "each entry once")
    return values


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Duration = Annotated[
    int,
    BeforeValidator(_quantity(parse_duration, DURATION_FORM, "a duration")),
    AfterValidator(_at_most(DURATION_NS_MAX, "24h")),
]
Duration = Annotated[_Duration, AfterValidator(_at_least(1, "more than zero"))]
DurationOrZero = _Duration
Period = Annotated[_Duration, AfterValidator(_at_least(PERIOD_NS_MIN, f"{format_duration(PERIOD_NS_MIN)} or more"))]
Size = Annotated[
    int, BeforeValidator(_quantity(parse_size, SIZE_FORM, "a size")), AfterValidator(_at_least(1, "1B or more"))
]
Share = Annotated[
    int, BeforeValidator(_ppm), AfterValidator(_at_least(0, "0.0 or more")), AfterValidator(_at_most(10**6, "1.0"))
]
Margin = Annotated[
    int, BeforeValidator(_ppm), AfterValidator(_at_least(10**6, "1.0 or more")), AfterValidator(_at_most(10**8, "100"))
]
Name = Annotated[str, AfterValidator(_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many), AfterValidator(distinct)]
Own = Annotated[Name, Field(alias=NAME, default="")]


class Section(BaseModel):
    # strict: "7" is no 7 and 1 is no true; a configuration says what it means.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)
