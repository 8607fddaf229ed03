"""A warning that repeats is told at once, then seldom, and none of its times is forgotten."""

from __future__ import annotations

import itertools

from taktd.daemon.execution.repetition import PAUSE_FIRST_NS, PAUSE_NS_MAX, Repetition

HOUR_NS = 3_600_000_000_000


def test_it_is_told_at_once_then_after_pauses_that_double_with_all_the_times_between() -> None:
    warning, step_ns = Repetition(), 100_000_000
    told = [(t, n) for t in range(0, HOUR_NS, step_ns) if (n := warning.came(t))]
    assert told[0] == (0, 1)
    assert [t // PAUSE_FIRST_NS for t, _ in told] == [0, 1, 3, 7, 15, 31, 63, 127, 255]
    assert [n for _, n in told[1:]] == [(b - a) // step_ns for (a, _), (b, _) in itertools.pairwise(told)]


def test_it_is_never_silent_for_more_than_the_longest_pause() -> None:
    warning, step_ns = Repetition(), 60_000_000_000
    times = [t for t in range(0, 20 * HOUR_NS, step_ns) if warning.came(t)]
    assert max(b - a for a, b in itertools.pairwise(times)) <= PAUSE_NS_MAX + step_ns
    assert len(times) < 35
