"""Admission by hand: sets small enough to check on paper, one for each pitfall, and what follows from a refusal."""

from __future__ import annotations

import pytest

from taktd.daemon.admission import (
    AUTO,
    OFF,
    BestEffort,
    InvalidLoop,
    admit,
    decide,
    feasible,
    first_failing,
    longest_dispatch_ns,
    never_fits_ns,
    utilization_ppm,
)
from taktd.daemon.schedule.demand import Demand, Effort, Undecided
from taktd.daemon.schedule.job import FIRM, HARD, SOFT, Task

MS = 1_000_000


def loops(*sets: tuple[int, ...]) -> list[Task]:
    """(period, deadline, cost[, jitter[, criticality]]) each, in configuration order."""
    tasks = []
    for order, numbers in enumerate(sets):
        period, deadline, cost, jitter, criticality = (*numbers, 0, FIRM)[:5] if len(numbers) < 5 else numbers
        tasks.append(Task(f"loop{order}", period, deadline, jitter, cost, criticality, order))
    return tasks


# ---- the test itself ----


def test_equality_is_enough() -> None:
    # h(4) + b(4) = 1 + 3 = 4: exactly in time. `<` instead of `≤` would refuse it.
    assert feasible(loops((4, 4, 1), (8, 8, 4)))
    assert not feasible(loops((4, 4, 1), (8, 8, 5)))


def test_full_utilisation_without_blocking_is_admitted() -> None:
    assert admit(loops((2, 2, 1), (4, 4, 1), (4, 4, 1)), OFF).admitted
    assert utilization_ppm(loops((2, 2, 1), (4, 4, 1), (4, 4, 1))) == 1_000_000


def test_a_blocker_is_told_by_its_deadline_and_not_by_its_period() -> None:
    # loop1 has the longer period but the earlier deadline: it never blocks loop0, it comes before it.
    assert first_failing(loops((6, 6, 2), (12, 4, 3))) is None
    # loop1 has the shorter period and the later deadline: at t = 5 it is blocking.
    assert first_failing(loops((20, 5, 3), (10, 8, 4))) == 5


def test_blocking_is_the_longest_one_and_never_a_sum() -> None:
    # b(4) = max(3 - 1, 4 - 1) = 3: 1 + 3 = 4. As a sum it would be 5.
    assert feasible(loops((10, 4, 1), (40, 40, 3), (40, 40, 4)))


def test_a_running_job_blocks_for_one_unit_less_than_its_cost() -> None:
    assert feasible(loops((10, 4, 2), (40, 40, 3)))
    assert not feasible(loops((10, 4, 2), (40, 40, 4)))


def test_the_longest_best_effort_dispatch_blocks_too() -> None:
    assert feasible(loops((10, 4, 2)), dispatch_ns=3)
    assert first_failing(loops((10, 4, 2)), dispatch_ns=4) == 4


def test_jitter_shortens_the_first_deadline() -> None:
    # Released 2 late, loop0 has 3 of its 5 left, and loop1 runs 2 of them.
    assert feasible(loops((10, 5, 1, 2), (20, 20, 3)))
    assert first_failing(loops((10, 5, 1, 3), (20, 20, 3))) == 2


def test_a_jittered_loop_is_not_counted_twice() -> None:
    # From t = D - J = 4 on loop1 is demand (2 + 2 = 4); as a blocker besides it would need 5.
    assert first_failing(loops((10, 4, 2), (12, 6, 2, 2))) is None


def test_the_step_of_the_search_does_not_pass_the_smallest_deadline() -> None:
    # Only t = 2 fails: demand 1 and blocking 2; everything after it passes.
    assert first_failing(loops((50, 2, 1), (50, 50, 3))) == 2


def test_a_failure_late_in_the_horizon_is_found() -> None:
    # By h(t): 7 of 7 at t = 7 pass, the first t that fails is 17.
    tasks = loops((7, 7, 3), (10, 10, 5), (70, 70, 4))
    demand = Demand(tasks)
    failing = [t for t in range(7, 140) if demand.demand(t) + demand.blocking(t) > t and demand.last_instant(t) == t]
    assert first_failing(tasks) == (failing[0] if failing else None)


def test_a_cost_that_does_not_fit_alone_is_refused() -> None:
    verdict = admit(loops((10, 5, 4, 2)), OFF)
    assert verdict.refusal is not None
    assert (verdict.refusal.at_ns, verdict.refusal.missing_ns) == (3, 1)
    assert (verdict.refusal.nearest_deadline_ns, verdict.refusal.nearest_period_ns) == (6, None)


def test_no_other_loop_is_named_for_one_whose_job_is_longer_than_its_deadline() -> None:
    verdict = admit(loops((20 * MS, 20 * MS, 30 * MS), (20 * MS, 20 * MS, 1 * MS)), OFF)
    assert verdict.refusal is not None
    assert (verdict.refusal.reason, verdict.refusal.loop) == ("alone", "loop0")
    assert verdict.refusal.text().startswith("a job of loop0 takes 30ms and has 20ms to its deadline; no longer")


def test_jitter_as_long_as_the_deadline_is_refused_and_not_divided_by() -> None:
    verdict = admit(loops((10, 5, 1, 5), (10, 10, 1)), OFF)
    assert verdict.refusal is not None
    assert verdict.refusal.nearest_deadline_ns == 6


@pytest.mark.parametrize(
    ("numbers", "field"),
    [((0, 1, 1), "period_ns"), ((5, 0, 1), "deadline_ns"), ((5, 5, 0), "cost_ns"), ((5, 5, 1, -1), "jitter_ns"),
     ((-5, -5, 1), "period_ns"), ((5, 6, 1), "deadline")],
)  # fmt: skip
def test_numbers_that_describe_no_loop_are_refused(numbers: tuple[int, ...], field: str) -> None:
    with pytest.raises(InvalidLoop, match=field):
        admit(loops(numbers), OFF)


def test_a_device_without_loops_is_admitted() -> None:
    verdict = admit([], AUTO)
    assert verdict.admitted
    assert (verdict.utilization_ppm, verdict.max_dispatch_ns, verdict.share_ppm) == (0, 10 * MS, 100_000)


# ---- refusals ----


def test_a_refusal_names_instant_jobs_and_what_would_fit() -> None:
    verdict = admit(loops((10 * MS, 10 * MS, 4 * MS), (20 * MS, 20 * MS, 15 * MS)), OFF)
    refusal = verdict.refusal
    assert refusal is not None
    assert not verdict.admitted
    assert refusal.at_ns == 10 * MS
    assert refusal.missing_ns == 9 * MS - 1
    assert [(job.loop, job.blocking) for job in refusal.jobs] == [("loop0", False), ("loop1", True)]
    assert refusal.loop == "loop1"
    assert (refusal.nearest_period_ns, refusal.nearest_deadline_ns) == (None, None)
    assert "loop0" in refusal.text()
    assert "loop1" in refusal.text()


def test_the_nearest_period_moves_the_deadline_along_where_they_were_equal() -> None:
    refusal = admit(loops((10, 10, 5), (10, 10, 6)), OFF).refusal
    assert refusal is not None
    # loop1 must end within its period beside one or two jobs of loop0: at 12, 5 + 5 + 6 = 16 ≤ 20, but blocking…
    assert refusal.nearest_period_ns == 12
    assert refusal.nearest_deadline_ns is None
    assert admit(loops((10, 10, 5), (12, 12, 6)), OFF).admitted
    assert not admit(loops((10, 10, 5), (11, 11, 6)), OFF).admitted


def test_the_nearest_deadline_is_given_where_it_alone_suffices() -> None:
    refusal = admit(loops((10, 10, 3), (20, 5, 3)), OFF).refusal
    assert refusal is None
    refusal = admit(loops((10, 5, 3), (20, 5, 3)), OFF).refusal
    assert refusal is not None
    assert refusal.nearest_deadline_ns == 6


def test_a_share_that_the_loops_do_not_leave_is_refused() -> None:
    verdict = admit(loops((10 * MS, 10 * MS, 9 * MS)), BestEffort("limits", 1, 200_000))
    assert verdict.refusal is not None
    assert verdict.refusal.reason == "share"
    assert verdict.refusal.missing_ns == 100 * MS
    assert verdict.refusal.nearest_period_ns == 11_250_000
    assert admit(loops((10 * MS, 10 * MS, 8 * MS)), BestEffort("limits", 1, 200_000)).admitted
    assert admit(loops((10 * MS, 10 * MS, 10 * MS)), BestEffort("limits", 1, 0)).admitted


def test_utilisation_above_one_fails_at_the_first_instant_that_does() -> None:
    refusal = admit(loops((2, 2, 1), (3, 3, 2)), OFF).refusal
    assert refusal is not None
    assert refusal.at_ns == 6
    assert refusal.missing_ns == 1


def test_near_full_utilisation_of_coprime_periods_is_answered_without_a_search_to_their_product() -> None:
    primes = (9_999_991, 10_000_019, 10_000_079, 10_000_103, 10_000_121)
    effort = Effort(100_000)
    tasks = loops(*((p, p, p // 5) for p in primes))
    assert feasible(tasks, effort=effort)


def test_what_can_not_be_proven_is_not_admitted() -> None:
    tasks = loops((10, 10, 3), (20, 20, 5))
    assert feasible(tasks)
    with pytest.raises(Undecided):
        feasible(tasks, effort=Effort(5))
    # The same set with hardly any effort to judge it: refused, and the refusal does not claim a miss.
    refusal = admit(tasks, OFF, scale=10**7).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.missing_ns, refusal.exact) == ("horizon", 0, False)
    assert "can't be proven" in refusal.text()


# ---- best effort ----


def test_auto_gives_the_longest_dispatch_and_what_share_is_left() -> None:
    tasks = loops((10 * MS, 4 * MS, 2 * MS), (20 * MS, 20 * MS, 14 * MS // 10))
    verdict = admit(tasks, AUTO)
    assert verdict.max_dispatch_ns == 2 * MS + 1
    assert verdict.share_ppm == 100_000
    assert feasible(tasks, verdict.max_dispatch_ns)
    assert not feasible(tasks, verdict.max_dispatch_ns + 1)


def test_auto_is_capped_and_off_is_nothing() -> None:
    tasks = loops((1000 * MS, 1000 * MS, MS))
    assert admit(tasks, AUTO).max_dispatch_ns == 10 * MS
    assert (admit(tasks, OFF).max_dispatch_ns, admit(tasks, OFF).share_ppm) == (0, 0)
    assert longest_dispatch_ns(loops((4, 4, 2), (4, 4, 2)), 100, Effort(10_000)) == 0


def test_best_effort_for_which_no_gap_can_exist_is_told_from_its_cost() -> None:
    tasks = loops((10 * MS, 10 * MS, MS), (30 * MS, 30 * MS, MS))
    assert never_fits_ns(tasks, 2 * MS) == 10 * MS
    assert never_fits_ns(tasks, 12 * MS) == 12 * MS + 1


# ---- response times ----


def test_response_time_by_hand() -> None:
    # loop0: blocked by 3 - 1 of loop1, then 2: 4. loop1: waits for one job of loop0: 2 + 3 = 5.
    verdict = admit(loops((10, 10, 2), (20, 20, 3)), OFF, wcrt=True)
    assert [loop.wcrt_ns for loop in verdict.loops] == [4, 5]
    assert [loop.margin_ns for loop in verdict.loops] == [6, 15]


def test_response_time_has_the_jitter_of_its_own_release() -> None:
    verdict = admit(loops((10, 10, 2, 3), (20, 20, 4)), OFF, wcrt=True)
    assert verdict.loops[0].wcrt_ns == 3 + 3 + 2


def test_ties_count_by_criticality_and_then_by_configuration_order() -> None:
    alike = admit(loops((10, 10, 2), (10, 10, 3)), OFF, wcrt=True)
    assert [loop.wcrt_ns for loop in alike.loops] == [4, 5]
    hard = admit(loops((10, 10, 2), (10, 10, 3, 0, HARD)), OFF, wcrt=True)
    assert [loop.wcrt_ns for loop in hard.loops] == [5, 4]


# ---- what follows ----


def test_refuse_starts_nothing_and_uncertified_everything() -> None:
    tasks = loops((10, 10, 5), (10, 10, 6))
    refused, bold = decide(tasks, "refuse", OFF), decide(tasks, "uncertified", OFF)
    assert (refused.start, refused.served) == (False, ())
    assert (bold.start, bold.certified, bold.served) == (True, False, ("loop0", "loop1"))
    assert bold.verdict.refusal is not None


def test_shed_leaves_out_the_least_critical_that_do_not_fit() -> None:
    tasks = loops((10, 10, 3, 0, SOFT), (10, 10, 4, 0, HARD), (10, 10, 4, 0, FIRM), (10, 10, 2, 0, SOFT))
    outcome = decide(tasks, "shed", OFF)
    # hard 4, firm 4, then soft in order: 3 does not fit any more, 2 does.
    assert outcome.served == ("loop1", "loop2", "loop3")
    assert [name for name, _ in outcome.shed] == ["loop0"]
    assert outcome.certified
    assert "loop0" in outcome.shed[0][1].text()


def test_the_verdict_as_json_has_what_check_promises() -> None:
    answer = admit(loops((10, 10, 5), (10, 10, 6)), OFF).as_json()
    assert set(answer["loops"][0]) == {
        "name", "period_ns", "deadline_ns", "jitter_ns", "cost_ns", "wcrt_ns", "margin_ns"}  # fmt: skip
    assert {"at_ns", "missing_ns", "jobs", "nearest_period_ns", "nearest_deadline_ns"} <= set(answer["refusal"])
    assert answer["utilization_ppm"] == 1_100_000
