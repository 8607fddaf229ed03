"""The pace of `taktctl bench` and `make bench`, with a clock that only sleeps and jobs move."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from taktd.daemon.benchmark import BLOCK_NS, Load, Outcome, Pace, bench_lane, time_direct

MS = 1_000_000
PERIOD = 20 * MS


class World:
    """A clock, a lane and a model that is called directly; notes when each was asked."""

    def __init__(self, job_ns: int = MS, oversleep_ns: int = 0) -> None:
        self.at_ns = 1_234_567_891
        self.job_ns, self.oversleep_ns = job_ns, oversleep_ns
        self.longer_ns: dict[int, int] = {}
        self.chance = random.Random(1)
        self.lane_at: list[int] = []
        self.direct_at: list[int] = []
        self.slot_count = 4
        self.inputs: dict[str, np.ndarray] = {"x": np.zeros(2, np.float32)}

    def now(self) -> int:
        self.at_ns += 50
        return self.at_ns

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.at_ns += round(seconds * 1e9) + self.chance.randint(0, self.oversleep_ns)

    def infer(self, timeout_us: int) -> SimpleNamespace:
        self.lane_at.append(self.at_ns)
        self.at_ns += self.job_ns + self.longer_ns.get(len(self.lane_at), 0)
        return SimpleNamespace(ok=True, late=False, early=False, status="ok")

    def run(self) -> None:
        self.direct_at.append(self.at_ns)
        self.at_ns += 3 * MS

    def bench(self, seconds: float, period_ns: int = PERIOD, direct: bool = True) -> Outcome:
        pace = Pace(period_ns, self.now, self.sleep)
        return bench_lane(self, Load(seconds, period_ns), self if direct else None, pace=pace)  # type: ignore[arg-type]


@pytest.mark.parametrize("period_ns", [MS * 2, 7 * MS, PERIOD, 110 * MS])
def test_releases_stay_on_one_grid_over_all_blocks(period_ns: int) -> None:
    world = World(job_ns=MS // 2, oversleep_ns=100_000)
    world.run = lambda: world.direct_at.append(world.at_ns)  # type: ignore[method-assign]
    outcome = world.bench(4.0, period_ns)
    phases = [(at - world.lane_at[0]) % period_ns for at in world.lane_at[5:]]
    assert all(min(phase, period_ns - phase) < 110_000 for phase in phases)
    assert min(b - a for a, b in pairwise(world.lane_at)) > period_ns - 110_000
    assert outcome.missed == 0


def test_blocks_take_turns_and_lose_no_beat() -> None:
    world = World()
    outcome = world.bench(1.6)
    counted = sorted(world.lane_at[50:] + world.direct_at[50:])
    assert len(counted) == 80
    assert {round((b - a) / MS) for a, b in pairwise(counted)} == {20}
    assert (outcome.jobs, len(outcome.direct_ns), outcome.missed) == (40, 40, 0)
    assert outcome.as_json()["rate_hz"] == 50.0


def test_a_job_of_several_periods_misses_beats_and_the_next_waits_for_its_own() -> None:
    world = World()
    world.longer_ns = {53: 30 * MS, 58: 20 * MS}  # each lasts over one beat; the second at the end of a block
    outcome = world.bench(0.8, direct=False)
    assert outcome.missed == 2
    gaps = [b - a for a, b in pairwise(world.lane_at[50:])]
    assert all(abs(gap - round(gap / PERIOD) * PERIOD) < 1000 for gap in gaps)
    assert sorted({round(gap / PERIOD) for gap in gaps}) == [1, 2]


def test_a_long_direct_call_is_no_miss_of_the_lane() -> None:
    world = World()
    plain = world.run
    world.run = lambda: (plain(), setattr(world, "at_ns", world.at_ns + 70 * MS))[0]  # type: ignore[func-returns-value,method-assign]
    outcome = world.bench(3.0)
    assert outcome.direct_ns
    assert outcome.missed == 0
    gaps = [b - a for a, b in pairwise(world.lane_at)]
    assert min(gaps) > PERIOD - 1000


def test_who_wakes_nearer_to_the_next_beat_waits_for_it() -> None:
    world = World(oversleep_ns=35 * MS)
    outcome = world.bench(4.0, direct=False)
    assert outcome.missed > 20
    assert min(b - a for a, b in pairwise(world.lane_at)) >= PERIOD // 2


def test_without_a_period_jobs_follow_each_other() -> None:
    world = World()
    outcome = world.bench(0.5, 0, direct=False)
    assert {b - a for a, b in pairwise(world.lane_at[55:80])} <= {MS + 50 * n for n in range(1, 8)}
    assert outcome.missed == 0
    assert outcome.as_json()["rate_hz"] == pytest.approx(1000, rel=0.01)
    assert Pace(0).block_ns() == BLOCK_NS


def test_a_direct_case_has_the_same_pace() -> None:
    world = World()
    pace, taken = Pace(PERIOD, world.now, world.sleep), array("q")
    time_direct(world, pace, world.now() + 200 * MS, taken)  # type: ignore[arg-type]
    assert len(taken) in (9, 10)
    assert {round((b - a) / MS) for a, b in pairwise(world.direct_at)} == {20}
