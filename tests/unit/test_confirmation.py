"""C is confirmed, or refuted, by a loop's first jobs; and where the watch runs."""

from __future__ import annotations

import pytest

from taktd.daemon.certification.confirmation import OVERRUNS_MIN, RUNS, confirm
from taktd.daemon.execution.watch_thread import watch_cores


@pytest.mark.parametrize(
    ("runs", "overruns", "settled"),
    [
        (0, 0, None),
        (RUNS - 1, 0, None),
        (RUNS, 0, True),
        (RUNS, OVERRUNS_MIN, True),  # 1 % is what is still allowed
        (RUNS, OVERRUNS_MIN + 1, False),
        (20, OVERRUNS_MIN, False),  # no need to wait for more
        (20, OVERRUNS_MIN - 1, None),
    ],
)
def test_a_cost_is_confirmed_refuted_or_not_settled_yet(runs: int, overruns: int, settled: bool | None) -> None:
    said = confirm("walk", 150_000, runs, overruns)
    assert (None if said is None else not said) is settled


def test_what_is_refuted_says_the_numbers() -> None:
    assert confirm("walk", 150_000, 100, 20) == (
        "20 of the first 100 jobs of loop walk (a share of 0.2) took longer than the 150us it was admitted for"
    )


@pytest.mark.parametrize(
    ("usable", "executors", "others"),
    [({0, 1}, [1], [0]), ({0, 1, 2, 3}, [2], [0, 1, 3]), ({1}, [1], [1]), ({0, 1}, [0, 1], [0, 1])],
)
def test_the_watch_stays_on_the_executors_core_where_it_can_get_ahead_of_it(usable, executors, others) -> None:
    assert watch_cores(usable, executors, real_time=True) == executors
    assert watch_cores(usable, executors, real_time=False) == others
