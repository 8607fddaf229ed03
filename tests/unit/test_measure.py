"""Measuring a run: enough runs, within the cap, with pauses, without what the machine did."""

from __future__ import annotations

from pathlib import Path

import pytest

from taktd.engines.measure import (
    DUTY_BESIDE_PERCENT,
    DUTY_PERCENT,
    RUNS_STABLE,
    WITNESS_EVERY_NS,
    Measurement,
    measure,
)


class Machine:
    """A clock that moves only when something runs or pauses; switches the thread out when told to."""

    def __init__(self, cost_ns: int, switched_out_every: int = 0) -> None:
        self.now_ns = 1
        self.cost_ns = cost_ns
        self.every = switched_out_every
        self.runs = self.busy_ns = self.paused_ns = self.switches = 0

    def run(self) -> None:
        self.runs += 1
        cost_ns = self.cost_ns
        if self.every and self.runs % self.every == 0:
            self.switches += 1
            cost_ns += 50_000_000
        self.now_ns += cost_ns
        self.busy_ns += cost_ns

    def pause(self, ns: int) -> None:
        self.now_ns += ns
        self.paused_ns += ns

    def measure(self, cap_ns: int, pause_ns: int = 0, duty_percent: int = DUTY_PERCENT) -> Measurement:
        return measure(
            self.run, cap_ns=cap_ns, clock=lambda: self.now_ns, pause=self.pause, switches=lambda: self.switches,
            pause_ns=pause_ns, duty_percent=duty_percent,
        )  # fmt: skip


def test_a_fast_engine_is_run_until_its_tail_is_known() -> None:
    machine = Machine(37_000)
    found = machine.measure(2_000_000_000)
    assert len(found.times_ns) == RUNS_STABLE
    assert found.as_json()["p999_ns"] == 37_000


def test_the_cap_ends_a_slow_engine_and_a_very_slow_one_is_still_run() -> None:
    slow = Machine(20_000_000)
    assert len(slow.measure(2_000_000_000).times_ns) >= 70
    assert slow.now_ns < 2_100_000_000
    slower = Machine(300_000_000)
    assert len(slower.measure(2_000_000_000).times_ns) >= 5
    assert slower.now_ns <= 2_000_000_000 + 300_000_000
    very_slow = Machine(3_000_000_000)
    assert len(very_slow.measure(2_000_000_000).times_ns) == 3


@pytest.mark.parametrize("duty_percent", [DUTY_PERCENT, DUTY_BESIDE_PERCENT])
def test_the_duty_stays_below_the_kernels_throttle_and_below_what_others_leave(duty_percent: int) -> None:
    machine = Machine(37_000)
    machine.measure(2_000_000_000, duty_percent=duty_percent)
    assert machine.busy_ns * 100 <= (machine.busy_ns + machine.paused_ns + 10_000_000) * duty_percent


class Cooling(Machine):
    """A machine whose caches are somebody else's after each pause."""

    cold = False

    def pause(self, ns: int) -> None:
        super().pause(ns)
        self.cold = True

    def run(self) -> None:
        self.cost_ns, self.cold = (190_000 if self.cold else 37_000), False
        super().run()


def test_the_tail_is_that_of_runs_after_a_pause_where_a_loop_has_pauses() -> None:
    found = Cooling(37_000).measure(2_000_000_000, pause_ns=20_000_000).as_json()
    assert (found["p50_ns"], found["p99_ns"], found["p999_ns"]) == (37_000, 190_000, 190_000)
    assert found["runs"] >= 1_000, "within the cap"


@pytest.mark.parametrize("period_ns", [1_000_000, 5_000_000, 20_000_000, 50_000_000])
def test_no_more_than_one_job_in_a_hundred_that_comes_after_a_pause_takes_longer_than_the_tail(period_ns: int) -> None:
    """All of a loop's jobs come after a pause: what they take one in a hundred times must be in the p99.9."""

    class Uneven(Cooling):
        after_pause = 0

        def run(self) -> None:
            was_cold = self.cold
            super().run()
            if was_cold:
                self.after_pause += 1
                extra_ns = self.after_pause * 7_919 % 100 * 1_000  # 0 to 99 us, evenly
                self.now_ns += extra_ns
                self.busy_ns += extra_ns

    found = Uneven(6_000).measure(2_000_000_000, pause_ns=period_ns).as_json()
    assert found["p999_ns"] >= 190_000 + 98_000


def test_best_effort_is_measured_back_to_back() -> None:
    machine = Cooling(37_000)
    found = machine.measure(2_000_000_000).as_json()
    assert (found["p50_ns"], found["p99_ns"]) == (37_000, 37_000)
    assert machine.paused_ns < machine.now_ns // 4


def test_runs_that_were_switched_out_are_counted_and_left_out() -> None:
    found = Machine(37_000, switched_out_every=10).measure(500_000_000)
    assert found.switched_out > 0
    assert found.as_json()["max_ns"] == 37_000


def test_if_all_runs_were_switched_out_their_times_are_all_there_is() -> None:
    found = Machine(37_000, switched_out_every=1).measure(1_000_000_000)
    assert found.switched_out == len(found.times_ns)
    assert found.as_json()["p50_ns"] == 50_037_000


class Guest(Machine):
    """A machine whose core a hypervisor takes away in every 100th run: no switch is counted, only a timer is late."""

    STOLEN_NS = 5_000_000

    def __init__(self, cost_ns: int) -> None:
        super().__init__(cost_ns)
        self.due_ns = self.absence_ns = 0

    def run(self) -> None:
        super().run()
        self.absence_ns = 0
        if self.runs % 100 == 0:
            self.now_ns += self.STOLEN_NS
            self.absence_ns = max(0, self.now_ns - self.due_ns) if self.due_ns else 0

    def expect(self, due_ns: int) -> None:
        self.due_ns = due_ns

    def over(self) -> None:
        self.due_ns = 0

    def absent_ns(self, now_ns: int) -> int:
        assert now_ns == self.now_ns
        return self.absence_ns


def test_runs_during_which_the_core_stood_still_are_counted_and_left_out() -> None:
    guest = Guest(200_000)
    found = measure(
        guest.run,
        cap_ns=2_000_000_000,
        clock=lambda: guest.now_ns,
        pause=guest.pause,
        switches=lambda: 0,
        witness=guest,
    )
    assert found.times_ns[-1] == 200_000
    assert found.switched_out == guest.runs // 100


def test_the_witness_that_looks_at_long_runs_does_not_make_them_unfit() -> None:
    """It goes first on the same core, so each look of its own switches the thread out; so few runs were left once."""

    class Watched(Cooling):
        due_ns = 0

        def run(self) -> None:
            begun_ns = self.now_ns
            super().run()
            if self.due_ns and self.now_ns >= self.due_ns >= begun_ns:
                self.switches += (self.now_ns - self.due_ns) // 100_000 + 1
            if self.runs % 97 == 0:
                self.switches += 3  # somebody else
                self.now_ns += 70_000

        def expect(self, due_ns: int) -> None:
            self.due_ns = due_ns

        def over(self) -> None:
            self.due_ns = 0

        def absent_ns(self, now_ns: int) -> int:
            return 0

    watched = Watched(37_000)
    found = measure(
        watched.run, cap_ns=2_000_000_000, clock=lambda: watched.now_ns, pause=watched.pause,
        switches=lambda: watched.switches, pause_ns=20_000_000, witness=watched,
    )  # fmt: skip
    assert found.as_json()["p999_ns"] == 190_000
    assert found.switched_out == watched.runs // 97


def test_the_witness_looks_as_often_as_measuring_believes() -> None:
    header = (Path(__file__).parents[2] / "ipc/core/server.h").read_text(encoding="utf-8")
    assert f"TAKT_WITNESS_EVERY_NS = {WITNESS_EVERY_NS}," in header


def test_a_run_that_is_long_by_itself_is_left_in() -> None:
    class Slow(Guest):
        def absent_ns(self, now_ns: int) -> int:
            return 0

    slow = Slow(200_000)
    found = measure(
        slow.run, cap_ns=2_000_000_000, clock=lambda: slow.now_ns, pause=slow.pause, switches=lambda: 0, witness=slow
    )
    assert found.times_ns[-1] == 200_000 + Slow.STOLEN_NS
    assert found.switched_out == 0


def test_a_quantile_is_a_measured_value_that_enough_runs_did_not_exceed() -> None:
    found = Measurement(tuple(range(1, 1001)), 0)
    assert found.quantile_ns(500_000) == 500
    assert found.quantile_ns(999_000) == 999
    assert found.quantile_ns(999_001) == 1000
    assert Measurement((7,), 0).quantile_ns(1) == 7
