"""Durations, sizes and shares: exact both ways, refused where they are not."""

from __future__ import annotations

from decimal import Decimal

import pytest

from taktd.daemon.config import durations as d


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("250us", 250_000), ("250µs", 250_000), ("250μs", 250_000), ("20ms", 20_000_000), ("1.5s", 1_500_000_000),
        ("0ms", 0), ("1ns", 1), ("0.001us", 1), ("2min", 120 * 10**9), ("1h", 3600 * 10**9), (" 5 ms ", 5_000_000),
        ("0.1ms", 100_000), ("333.333333ms", 333_333_333),
    ],
)  # fmt: skip
def test_a_duration_is_exact_nanoseconds(text: str, ns: int) -> None:
    assert d.parse_duration(text) == ns


@pytest.mark.parametrize(
    "text",
    ["", "20", "ms", "20 m", "-1ms", "1e3ms", "nan", "inf", "0x10ms", "1.ms", ".5s", "1,5s", "20msx", "٢ms", "9" * 41],
)
def test_what_is_no_duration_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="duration with its unit"):
        d.parse_duration(text)


def test_a_fraction_of_a_nanosecond_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of nanoseconds"):
        d.parse_duration("0.0001us")


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"), (250, "250ns"), (250_000, "250us"), (20_000_000, "20ms"), (1_500_000_000, "1.5s"),
        (1_000_001, "1000.001us"), (1_234_567, "1234.567us"), (-5_000_000, "-5ms"), (61_000_000_000, "61s"),
    ],
)  # fmt: skip
def test_format_is_the_shortest_exact_text(ns: int, text: str) -> None:
    assert d.format_duration(ns) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0s"),
        (999, "999ns"),
        (10_999_999, "11ms"),
        (1_234_567, "1.235ms"),
        (4_000_001, "4ms"),
        (-9_999_996, "-10ms"),
    ],
)
def test_a_table_has_four_digits(ns: int, text: str) -> None:
    assert d.format_rounded(ns) == text


@pytest.mark.parametrize("ns", [1, 999, 1000, 1001, 123_456_789, 10**9, 10**9 + 1, 86_400 * 10**9])
def test_what_is_formatted_parses_back(ns: int) -> None:
    assert d.parse_duration(d.format_duration(ns)) == ns


@pytest.mark.parametrize(("text", "size"), [("64MiB", 64 << 20), ("1kB", 1000), ("0.5GiB", 1 << 29), ("7B", 7)])
def test_a_size_is_exact_bytes(text: str, size: int) -> None:
    assert d.parse_size(text) == size


@pytest.mark.parametrize("size", [1, 1024, 64 << 20, 5 << 30, (1 << 20) + 1])
def test_sizes_parse_back(size: int) -> None:
    assert d.parse_size(d.format_size(size)) == size


@pytest.mark.parametrize(("value", "ppm"), [(Decimal("0.1"), 100_000), (Decimal("1.3"), 1_300_000), (1, 1_000_000)])
def test_a_share_is_exact_parts_per_million(value: Decimal | int, ppm: int) -> None:
    assert d.parse_ppm(value) == ppm
    assert d.parse_ppm(Decimal(d.format_ppm(ppm))) == ppm


def test_a_share_finer_than_a_millionth_is_refused() -> None:
    with pytest.raises(ValueError, match="six decimal places"):
        d.parse_ppm(Decimal("0.1234567"))
