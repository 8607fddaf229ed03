"""When a primary that lives is switched away from, and that an engine is tried before it is blamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from taktd.daemon.execution.switch_rule import SwitchRule, switch_rule
from taktd.engines.engine import EngineSpec, Tensor
from taktd.engines.errors import EngineFailure, FailureKind
from taktd.engines.proof import proof
from taktd.engines.tensors import DTYPE_BY_NUMBER, TensorSpec

ERROR, LAUNCH, NAN = FailureKind.ERROR, FailureKind.LAUNCH_FAILED, FailureKind.NOT_FINITE


def test_so_many_failures_in_a_row_and_not_one_less() -> None:
    rule = SwitchRule(3, 0, 0)
    assert [rule.failed(n, 0, LAUNCH) for n in (1, 2)] == [None, None]
    found = rule.failed(3, 0, LAUNCH)
    assert found is not None
    assert found.certain
    assert found.reason == "3 runs in a row failed"


def test_a_good_run_between_begins_anew() -> None:
    rule = SwitchRule(2, 0, 0)
    assert rule.failed(1, 0, ERROR) is None
    assert rule.failed(3, 2, ERROR) is None  # the second one was good
    assert rule.failed(9, 2, ERROR) is not None, "jobs that did not run are no good runs"


def test_what_was_not_followed_comes_again_after_as_many_more() -> None:
    rule = SwitchRule(3, 0, 0)
    found = [n for n in range(1, 13) if rule.failed(n, 0, ERROR)]
    assert found == [3, 6, 9, 12]


@pytest.mark.parametrize("kind", list(FailureKind))
def test_only_what_no_input_brings_about_is_certain(kind: FailureKind) -> None:
    found = SwitchRule(1, 0, 0).failed(1, 0, kind)
    assert found is not None
    assert found.certain is (kind not in (ERROR, NAN))


def test_m_of_the_last_k_jobs_beyond_their_cost() -> None:
    rule = SwitchRule(0, 3, 5)
    assert not any(rule.overran(n) for n in (1, 2, 6, 8)), "three of six are not three of five"
    found = rule.overran(10)
    assert found is not None
    assert not found.certain
    assert not any(rule.overran(n) for n in (11, 12)), "it begins anew"
    assert rule.overran(13) is not None


def test_each_half_can_be_switched_off() -> None:
    rule = SwitchRule(0, 0, 0)
    assert not any(rule.failed(n, 0, LAUNCH) or rule.overran(n) for n in range(1, 100))
    assert switch_rule(None) is None
    assert switch_rule({"failures": 1, "overruns": [1, 1]}) is not None


class Engine:
    """Takes what it is told, or fails."""

    def __init__(self, run: Callable[[], None]) -> None:
        spec = TensorSpec("x", DTYPE_BY_NUMBER[1], (4,), (False,), True)
        self.spec = EngineSpec("m", "m.onnx", (spec,), (spec,))
        self.run = run

    def bind(self, inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], None]:
        assert not inputs[0].shared
        return self.run


def tried(run: Callable[[], None], limit_ns: int = 0) -> int:
    times = iter(range(0, 10_000, 100))
    return sum(1 for _ in proof(Engine(run), 3, limit_ns, lambda: next(times)))  # type: ignore[arg-type]


def test_a_proof_is_so_many_runs_of_which_the_fastest_counts() -> None:
    assert tried(lambda: None, 100) == 3
    with pytest.raises(EngineFailure, match="fastest of 3 runs"):
        tried(lambda: None, 99)


def test_a_run_that_fails_is_no_proof() -> None:
    def fail() -> None:
        raise EngineFailure("no")

    with pytest.raises(EngineFailure, match="no"):
        tried(fail)
