"""When an executor stays awake for a client that comes back soon."""

from __future__ import annotations

import pytest

from taktd.daemon.execution.closed_loop import ClosedLoop

WITHIN_NS = 400_000


def pays(client: ClosedLoop, *gaps_us: float) -> list[bool]:
    return [client.pays(int(gap_us * 1000), WITHIN_NS) for gap_us in gaps_us]


def test_whoever_has_come_back_soon_is_waited_for_and_whoever_has_not_is_not() -> None:
    client = ClosedLoop()
    assert pays(client, 10_000, 1000, 300, 200, 350) == [False, False, True, True, True]
    assert not any(pays(ClosedLoop(), 1000, 400, 1000, 10_000)), "a loop of 1 kHz is predicted, not waited for"


def test_whoever_pauses_is_waited_for_as_soon_as_it_is_back() -> None:
    assert pays(ClosedLoop(), 300, 300, 1600, 300, 300) == [True, True, False, True, True]


def test_after_each_wait_in_vain_it_has_to_come_back_soon_twice_as_often() -> None:
    client = ClosedLoop()
    pays(client, 300)
    for quick in (1, 2, 4, 8, 16, 32, 64, 64):
        assert pays(client, 600) == [False]
        assert pays(client, *[300] * quick) == [False] * quick
        assert pays(client, 300) == [True]
    assert pays(client, 300, 600, 300, 300) == [True, False, False, True], "a wait that paid is a new beginning"


def test_what_comes_late_without_being_waited_for_costs_nothing() -> None:
    client = ClosedLoop()
    assert pays(client, 300, 600, 600, 600, 300, 600, 300) == [True, False, False, False, False, False, True]


@pytest.mark.parametrize("gap_us", [0, -50])
def test_jobs_that_were_queued_are_no_return(gap_us: float) -> None:
    assert not any(pays(ClosedLoop(), *[gap_us] * 20))


def test_without_a_core_of_its_own_nobody_is_waited_for() -> None:
    client = ClosedLoop()
    assert not any(client.pays(100, 0) for _ in range(100))
