"""Quantities with units: durations, sizes and shares, between text and exact integers.

Durations are int nanoseconds, sizes int bytes, shares and factors int parts per million (ppm). Nothing here passes
through binary floating point: "0.1ms" is 100 000 ns and 0.1 is 100 000 ppm, exactly or not at all.
Called by the configuration, the command line and everything that prints a duration.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
PPM: Final = 1_000_000

# Longest text that is looked at: a duration has few digits, and a refusal quotes it.
TEXT_CHARACTERS_MAX: Final = 40

DURATION_UNITS: Final = {
    "ns": 1,
    "us": NS_PER_US,
    "\u00b5s": NS_PER_US,  # micro sign, what keyboards give
    "\u03bcs": NS_PER_US,  # Greek mu, what some editors make of it
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
}
SIZE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "MB": 10**6, "GB": 10**9}

_QUANTITY = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z\u00b5\u03bc]+)")
DURATION_FORM: Final = 'a duration with its unit, such as "250us", "20ms", "1.5s" (ns, us, ms, s, min, h)'
SIZE_FORM: Final = 'a size with its unit, such as "512KiB", "64MiB", "1GiB"'


def _parse(text: str, units: dict[str, int], form: str, unit_name: str) -> int:
    match = _QUANTITY.fullmatch(text.strip()) if len(text) <= TEXT_CHARACTERS_MAX else None
    if match is None or match[3] not in units:
        raise ValueError(form)
    whole, fraction, unit = match[1], match[2] or "", units[match[3]]
    # Scaled by a power of ten so that only integers are divided: a remainder is a fraction nobody can keep.
    scaled, scale = int(whole + fraction) * unit, 10 ** len(fraction)
    if scaled % scale:
        raise ValueError(f"a whole number of {unit_name}")
    result: int = scaled // scale
    return result


def parse_duration(text: str) -> int:
    """Nanoseconds of "250us", "20ms", "1.5s"; ValueError says what is allowed."""
    return _parse(text, DURATION_UNITS, DURATION_FORM, "nanoseconds")


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "512KiB"; ValueError says what is allowed."""
    return _parse(text, SIZE_UNITS, SIZE_FORM, "bytes")


def parse_ppm(value: int | Decimal) -> int:
    """Parts per million of an exact decimal: Decimal("0.1") is 100 000; ValueError beyond six decimal places."""
    scaled = Decimal(value) * PPM
    if scaled != scaled.to_integral_value():
        raise ValueError("a number with at most six decimal places")
    return int(scaled)


def format_duration(duration_ns: int) -> str:
    """The shortest exact text: 20_000_000 is "20ms", 1_500_000_000 is "1.5s", 250 is "250ns"."""
    if duration_ns == 0:
        return "0s"
    sign, rest = ("-", -duration_ns) if duration_ns < 0 else ("", duration_ns)
    for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        # A unit fits when what it leaves can be said in at most three decimal places.
        if rest >= size and rest % (size // 1000) == 0:
            whole, part = divmod(rest, size)
            decimals = f".{part * 1000 // size:03d}".rstrip("0").rstrip(".")
            return f"{sign}{whole}{decimals}{unit}"
    return f"{sign}{rest}ns"


def format_rounded(duration_ns: int) -> str:
    """Four significant digits, for tables: 10_999_999 is "11ms"."""
    unit = 10 ** max(len(str(abs(duration_ns))) - 4, 0)
    return format_duration((duration_ns + unit // 2) // unit * unit)


def format_size(size_bytes: int) -> str:
    """The largest binary unit that says it exactly: 67_108_864 is "64MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % SIZE_UNITS[unit] == 0:
            return f"{size_bytes // SIZE_UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def format_ppm(ppm: int) -> str:
    """The shortest exact decimal: 1_300_000 is "1.3"."""
    sign, rest = ("-", -ppm) if ppm < 0 else ("", ppm)
    whole, part = divmod(rest, PPM)
    return sign + f"{whole}.{part:06d}".rstrip("0").rstrip(".")
