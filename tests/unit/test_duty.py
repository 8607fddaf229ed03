"""An executor stays below the kernel's real-time share by many small breaks, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktd.daemon.execution.duty import BURST_NS, DutyLimiter, real_time_share_ppm

SHARE = 950_000


def test_no_throttle_no_breaks() -> None:
    duty = DutyLimiter(None)
    assert not duty.update(10**12, 0)


def test_awake_without_a_break_has_to_yield_until_the_debt_is_paid() -> None:
    duty = DutyLimiter(SHARE)
    duty.update(1, 0)
    assert not duty.update(1 + BURST_NS, 0)
    assert duty.update(3 + BURST_NS, 0)
    assert duty.update(4 + BURST_NS, 1_000_000), "a short sleep pays only a part"
    assert not duty.update(4 + BURST_NS + 9_000_000, 10_000_000)


@given(st.lists(st.tuples(st.integers(1, 5_000_000), st.booleans()), min_size=500, max_size=500))
def test_whoever_sleeps_when_told_stays_below_the_share(steps: list[tuple[int, bool]]) -> None:
    duty = DutyLimiter(SHARE)
    now_ns, slept_ns = 1, 0
    duty.update(now_ns, slept_ns)
    for length_ns, idle in steps:
        now_ns += length_ns
        if duty.yielding or idle:
            slept_ns += length_ns
        duty.update(now_ns, slept_ns)
    awake_ns = now_ns - slept_ns
    assert awake_ns * 1_000_000 <= now_ns * SHARE + 2 * BURST_NS * 1_000_000


@pytest.mark.parametrize(
    ("runtime", "period", "share"),
    [("950000", "1000000", 950_000), ("-1", "1000000", None), ("1000000", "1000000", None)],
)
def test_the_share_is_read_from_the_kernel(tmp_path: Path, runtime: str, period: str, share: int | None) -> None:
    (tmp_path / "sched_rt_runtime_us").write_text(runtime + "\n")
    (tmp_path / "sched_rt_period_us").write_text(period + "\n")
    assert real_time_share_ppm(tmp_path) == share


def test_a_kernel_that_does_not_say_does_not_throttle(tmp_path: Path) -> None:
    assert real_time_share_ppm(tmp_path) is None
