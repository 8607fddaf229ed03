"""What a change touches, when a primary has its loops back, when a change does worse: the parts without a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.certification.certification import Evidence, NotAdmitted, judge
from taktd.daemon.config.configuration import Configuration, load
from taktd.daemon.handover.probation import Count, worse
from taktd.daemon.supervision.device_plan import FallbackRefused, lane_signature, plans_of
from taktd.daemon.supervision.devices import RETURN_PAUSE_NS_MAX, return_pause_ns
from taktd.daemon.supervision.tensor_difference import as_a_change, tensor_difference

SECOND_NS = 1_000_000_000
YAML = """\
devices: {a: {driver: cpu, cores: [0]}, b: {driver: cpu, cores: [1]}, c: {driver: cpu}}
models: {m: {path: m.onnx}, s: {path: s.onnx}}
loops:
  x: {model: m, device: a, period: 10ms, fallback: [{device: b, model: s}]}
  y: {model: m, device: b, period: 10ms}
"""


def tensors(width: int) -> dict[str, Any]:
    def tensor(name: str) -> dict[str, Any]:
        return {"name": name, "dtype": 1, "dtype_name": "FP32", "dims": [1, width]}

    return {"digest": f"d{width}", "runtime": "r", "inputs": [tensor("x")], "outputs": [tensor("y")], "dynamic": False}


def configured(folder: Path, text: str = YAML) -> Configuration:
    (folder / "taktd.yaml").write_text(text)
    return load(folder / "taktd.yaml")


def inspected(m: int = 4, s: int = 4) -> dict[str, Any]:
    return {"m": tensors(m), "s": tensors(s)}


@pytest.mark.parametrize(
    ("old", "new", "touched"),
    [
        ("", "", set()),
        ("period: 10ms}\n", "period: 20ms}\n", {"b"}),
        ("period: 10ms, fallback", "period: 20ms, fallback", {"a", "b"}),
        ("{device: b, model: s}", "{device: c}", {"b", "c"}),
        ("device: a, period: 10ms", "device: a, period: 10ms, allow: {users: [x]}", set()),
        ("cores: [0]", "cores: [2]", {"a"}),
        ("device: a, period: 10ms", "device: a, period: 10ms, probation: 9s", set()),
    ],
)
def test_a_change_touches_the_executors_it_must(tmp_path: Path, old: str, new: str, touched: set[str]) -> None:
    before = plans_of(configured(tmp_path), inspected())
    after = plans_of(configured(tmp_path, YAML.replace(old, new) if old else YAML), inspected())
    assert {name for name, plan in after.items() if not before[name].serves_like(plan)} == touched


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),
        ({"dims": [1, 5]}, "input x is FP32[1, 4], and would be FP32[1, 5]"),
        ({"dtype_name": "FP16"}, "input x is FP32[1, 4], and would be FP16[1, 4]"),
        ({"name": "z"}, "input x, FP32[1, 4], would not be there any more"),
    ],
)
def test_what_differs_in_the_tensors_of_two_versions_is_told(change: dict[str, Any], told: str) -> None:
    old, new = tensors(4), tensors(4)
    new["inputs"][0] |= change
    assert tensor_difference(old, new, as_a_change) == told


def test_tensors_that_come_and_change_places_are_told() -> None:
    old, new = tensors(4), tensors(4)
    new["outputs"].append({**new["outputs"][0], "name": "z"})
    assert tensor_difference(old, new, as_a_change) == "output z, FP32[1, 4], would be new"
    old["outputs"].insert(0, new["outputs"][1])
    assert tensor_difference(old, new, as_a_change) == "outputs would come in another order: y, z"


def test_another_content_of_a_model_touches_whoever_runs_it(tmp_path: Path) -> None:
    before, after = plans_of(configured(tmp_path), inspected()), plans_of(configured(tmp_path), inspected(4, 4))
    assert all(before[name].serves_like(plan) for name, plan in after.items())
    other = inspected()
    other["s"]["digest"] = "other"
    assert not before["b"].serves_like(plans_of(configured(tmp_path), other)["b"])


def test_a_stand_in_with_other_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FallbackRefused, match=r"loops\.x\.fallback.*s can't stand in for m"):
        plans_of(configured(tmp_path), inspected(4, 5))


def test_a_lane_stays_while_its_layout_does(tmp_path: Path) -> None:
    loops = configured(tmp_path).loops
    same = configured(tmp_path, YAML.replace("model: m, device: a", "model: m, device: a, budget: 1ms")).loops
    other = configured(tmp_path, YAML.replace("period: 10ms, fallback", "period: 9ms, fallback")).loops
    signature = lane_signature(loops["x"], tensors(4))
    assert lane_signature(same["x"], tensors(4)) == signature
    assert lane_signature(other["x"], tensors(4)) != signature
    assert lane_signature(loops["x"], tensors(5)) != signature


@pytest.mark.parametrize(("deaths_s", "pause_ns"), [((), 0), ((99,), 0), ((10, 99), 0), ((70, 99), SECOND_NS)])
def test_one_death_in_a_minute_costs_no_pause(deaths_s: tuple[int, ...], pause_ns: int) -> None:
    assert return_pause_ns([s * SECOND_NS for s in deaths_s], 100 * SECOND_NS) == pause_ns


def test_pauses_grow_and_are_bounded() -> None:
    pauses = [return_pause_ns([SECOND_NS] * deaths, 2 * SECOND_NS) for deaths in range(40)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RETURN_PAUSE_NS_MAX


@pytest.mark.parametrize(
    ("before", "after", "bad"),
    [
        (Count(1000, 0, 0), Count(100, 0, 0), ""),
        (Count(1000, 0, 0), Count(100, 1, 0), "1 failures"),
        (Count(1000, 100, 0), Count(100, 15, 0), ""),
        (Count(1000, 0, 0), Count(100, 0, 8), ""),
        (Count(1000, 0, 0), Count(100, 0, 9), "9 misses in 100 jobs, 0 in 1000 before"),
        (Count(1000, 0, 500), Count(100, 0, 90), ""),
        (Count(), Count(10, 0, 4), "4 misses"),
    ],
)
def test_a_change_is_judged_by_what_came_before(before: Count, after: Count, bad: str) -> None:
    found = worse(before, after)
    assert found.startswith(bad)
    assert bool(found) == bool(bad)


# ---- admission of stand-ins ----


def evidence(cost_ns: int, standing_in_ns: int) -> dict[str, Evidence]:
    def measured(ns: int) -> dict[str, dict[str, int]]:
        return {"1": {"p50_ns": ns, "p99_ns": ns, "p999_ns": ns, "max_ns": ns, "runs": 100}}

    rights = {"policy": "fifo", "mlocked": True}
    models = {"m": measured(cost_ns), "s": measured(standing_in_ns)}
    return {name: Evidence(models, 0, rights, True) for name in ("a", "b", "c")}


def test_a_stand_in_is_admitted_at_its_own_cost(tmp_path: Path) -> None:
    judged = judge(configured(tmp_path), evidence(1_000_000, 2_000_000), None)["b"]
    assert judged.certified
    assert judged.standby_reason == {}
    assert judged.serve["tasks"]["x"]["cost_ns"] == 2_600_000
    # Its own as well: as a primary that waits for its loops it must not take a stand-in that overruns for a hung one.
    assert judged.serve["hang_after_ns"] == {"a": 10_000_000, "b": 10_000_000}


def test_a_stand_in_that_does_not_fit_is_refused_or_accepted_in_words(tmp_path: Path) -> None:
    too_slow = evidence(3_000_000, 6_000_000)
    with pytest.raises(NotAdmitted, match=r"(?s)device b: can't stand in for loop x.*fallback_uncertified"):
        judge(configured(tmp_path), too_slow, None)
    accepted = YAML.replace("model: s}]", "model: s}], fallback_uncertified: true")
    judged = judge(configured(tmp_path, accepted), too_slow, None)["b"]
    assert judged.certified, "its own loops keep their promise"
    assert set(judged.standby_reason) == {"x"}
    assert "x" in judged.serve["tasks"]


# ---- what happens where the file leaves on_refusal out ----


def without_rights(known: Evidence, **rights: Any) -> Evidence:
    return Evidence(known.measured, known.dispatch_ns, {**known.rights, **rights}, known.measured_real_time)


def test_with_real_time_rights_what_is_not_admitted_is_refused_if_nothing_else_is_asked_for(tmp_path: Path) -> None:
    too_slow = evidence(11_000_000, 1_000_000)
    with pytest.raises(NotAdmitted, match=r"(?s)device a: not admitted.*on_refusal to shed or uncertified"):
        judge(configured(tmp_path), too_slow, None)


@pytest.mark.parametrize("missing", [{"policy": "other"}, {"mlocked": False}])
def test_without_real_time_rights_it_is_served_and_nothing_is_claimed(tmp_path: Path, missing: dict[str, Any]) -> None:
    too_slow = {name: without_rights(known, **missing) for name, known in evidence(11_000_000, 1_000_000).items()}
    judged = judge(configured(tmp_path), too_slow, None)
    for device, loop in (("a", "x"), ("b", "y")):
        assert not judged[device].certified
        assert judged[device].reason.startswith("not admitted: ")
        assert loop in judged[device].serve["tasks"]


def test_each_device_goes_by_its_own_rights(tmp_path: Path) -> None:
    """a has none and serves what it can; b has them, and its loop doesn't fit: refused."""
    mixed = evidence(11_000_000, 1_000_000)
    mixed["a"] = without_rights(mixed["a"], policy="other")
    with pytest.raises(NotAdmitted, match="device b: not admitted") as refused:
        judge(configured(tmp_path), mixed, None)
    assert "device a" not in str(refused.value)
