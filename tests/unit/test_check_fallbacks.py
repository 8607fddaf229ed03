"""`taktctl check` over stand-ins and constants: what a start of taktd would refuse, it refuses, in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from taktd.daemon.certification.certification import Evidence, NotAdmitted, judge
from taktd.daemon.certification.cost_file import cost_document
from taktd.daemon.cli.check import check
from taktd.daemon.config.configuration import load
from tests import models

TIMES = {"p50_ns": 1_000_000, "p99_ns": 1_100_000, "p999_ns": 2_000_000, "max_ns": 9_000_000, "runs": 5000}
RIGHTS = {"policy": "fifo", "mlocked": True}


def configured(folder: Path, fallback: str, *, arm: str = "", more: str = "") -> Path:
    models.identity(folder / "a.onnx", (1, 4))
    models.identity(folder / "b.onnx", (1, 5))
    file = folder / "t.yaml"
    file.write_text(
        "devices:\n"
        "  sim0: {driver: sim, cost: {p50: 1ms, p99.9: 2ms, max: 9ms}}\n"
        "  cpu1: {driver: cpu, cores: [1]}\n"
        "models: {a: {path: a.onnx}, b: {path: b.onnx}, gone: {path: gone.onnx}}\n"
        "loops:\n"
        f"  walk: {{model: a, device: sim0, period: 20ms, deadline: 5ms, fallback: [{fallback}]{more}}}\n{arm}"
    )
    return file


def run(file: Path, *, cost_ns: int | None = None, options: tuple[str, ...] = ("--json",)) -> Result:
    arguments = [str(file), *options]
    if cost_ns is not None:
        times = {"batches": {"1": TIMES | {"p999_ns": cost_ns, "max_ns": max(cost_ns, TIMES["max_ns"])}}}
        model = {"digest": "", **times}
        costs = cost_document({"cpu1": {"dispatch_ns": 10_000, "models": {"a": model}}})
        (file.parent / "costs.json").write_text(json.dumps(costs))
        arguments += ["--costs", str(file.parent / "costs.json")]
    return CliRunner().invoke(check, arguments)


def answer(ended: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_stand_in_that_fits_is_counted_on_its_device(tmp_path: Path) -> None:
    ended = run(configured(tmp_path, "cpu1"), cost_ns=2_000_000)
    assert ended.exit_code == 0, ended.output
    device = answer(ended)["devices"]["cpu1"]
    assert [(one["name"], one["cost_ns"]) for one in device["loops"]] == [("walk", 2_610_000)]  # × 1.3, a dispatch
    assert device["stand_ins"] == {"walk": {"certified": True, "reason": ""}}
    shown = run(tmp_path / "t.yaml", cost_ns=2_000_000, options=("--wcrt",))
    assert "walk (stand-in)" in shown.stdout


def test_a_stand_in_that_does_not_fit_is_refused_in_the_words_of_the_daemon(tmp_path: Path) -> None:
    file = configured(tmp_path, "cpu1")
    ended = run(file, cost_ns=5_000_000)
    assert ended.exit_code == 1, ended.output
    refused = answer(ended)["devices"]["cpu1"]["stand_ins_refused"]
    times = {"1": TIMES | {"p999_ns": 5_000_000}}
    declared = {"1": {"p50_ns": 1_000_000, "p99_ns": 1_900_000, "p999_ns": 2_000_000}}
    measured, sim = (dict.fromkeys(("a", "b", "gone"), there) for there in (times, declared))
    evidence = {"sim0": Evidence(sim, 0, RIGHTS, True), "cpu1": Evidence(measured, 10_000, RIGHTS, True)}
    with pytest.raises(NotAdmitted) as daemon:
        judge(load(file), evidence, None)
    assert [f"device cpu1: {text}" for text in refused] == [str(daemon.value)]
    shown = run(file, cost_ns=5_000_000, options=()).stdout
    assert refused[0].split() == shown[shown.index("can't stand in") :].split()[: len(refused[0].split())]


def test_a_stand_in_is_judged_beside_the_loops_of_its_device(tmp_path: Path) -> None:
    arm = "  arm: {model: a, device: cpu1, period: 4ms, budget: 3ms}\n"
    assert run(configured(tmp_path, "hold", arm=arm), cost_ns=2_000_000).exit_code == 0
    ended = run(configured(tmp_path, "cpu1", arm=arm), cost_ns=2_000_000)
    assert ended.exit_code == 1, ended.output
    assert "can't stand in for loop walk" in answer(ended)["devices"]["cpu1"]["stand_ins_refused"][0]


def test_one_that_need_not_be_certified_is_accepted_and_shown(tmp_path: Path) -> None:
    file = configured(tmp_path, "cpu1", more=", fallback_uncertified: true")
    ended = run(file, cost_ns=5_000_000)
    assert ended.exit_code == 0, ended.output
    entry = answer(ended)["devices"]["cpu1"]["stand_ins"]["walk"]
    assert entry["certified"] is False
    assert "a job of walk takes 6.51ms and has 5ms" in entry["reason"]
    assert "would not be certified" in run(file, cost_ns=5_000_000, options=()).stdout
    assert answer(run(file))["devices"]["cpu1"]["stand_ins"]["walk"]["reason"] == "what a costs on cpu1 is not known"


def test_a_stand_in_whose_cost_nobody_knows_is_named_whatever_the_budget(tmp_path: Path) -> None:
    ended = run(configured(tmp_path, "hold", more=", budget: 2ms"))
    assert ended.exit_code == 0, ended.output
    ended = run(configured(tmp_path, "cpu1", more=", budget: 2ms"))
    assert ended.exit_code == 2, ended.output
    assert answer(ended)["valid"] is True
    error = answer(ended)["errors"][0]
    assert (error["key"], error["line"]) == ("loops.walk.fallback[0]", 6)
    assert "model a on cpu1" in error["what"]


def test_a_budget_below_the_middle_is_refused_as_at_a_start(tmp_path: Path) -> None:
    ended = run(configured(tmp_path, "hold", more=", budget: 500us"))
    assert ended.exit_code == 1, ended.output
    what = answer(ended)["errors"][0]["what"]
    assert "loops.walk.budget: 500us is less than the model a takes in the middle (p50 1ms)" in what


@pytest.mark.parametrize(
    ("fallback", "said"),
    [
        ("{device: cpu1, model: b}", "loops.walk.fallback[0]: model b can't stand in for a: found input x FP32[1, 5]"),
        ("{constant: {z: 0}}", "loops.walk.fallback[0].constant.z: no output is called that; allowed: y"),
        ("{constant: {y: [1, 2]}}", "loops.walk.fallback[0].constant.y: shape [2] does not fit"),
        ("{constant: {y: 1e39}}", "loops.walk.fallback[0].constant.y: found 1e+39; allowed in FP32"),
    ],
)
def test_what_only_the_models_tell_is_refused_too(tmp_path: Path, fallback: str, said: str) -> None:
    ended = run(configured(tmp_path, fallback, more=", fallback_uncertified: true" if "cpu1" in fallback else ""))
    assert ended.exit_code == 2, ended.output
    assert said in answer(ended)["errors"][0]["what"]


@pytest.mark.parametrize("broken", ["a", "b"])
def test_a_model_that_is_none_is_refused(tmp_path: Path, broken: str) -> None:
    file = configured(tmp_path, "hold")
    (tmp_path / f"{broken}.onnx").write_bytes(b"no network")
    ended = run(file)
    assert ended.exit_code == 2, ended.output
    assert f"model {broken} (" in answer(ended)["errors"][0]["what"]


def test_a_version_of_a_file_is_warned_about(tmp_path: Path) -> None:
    file = configured(tmp_path, "hold")
    file.write_text(file.read_text().replace("path: b.onnx", "path: b.onnx, version: latest"))
    ended = run(file)
    assert "models.b.path: is a file" in ended.stderr
    assert "remove `version`" in ended.stderr


def test_a_model_that_is_not_there_yet_is_warned_about_only(tmp_path: Path) -> None:
    file = configured(tmp_path, "{device: cpu1, model: gone}", more=", fallback_uncertified: true")
    ended = run(file)
    assert ended.exit_code == 0, ended.output
    assert "gone.onnx" in ended.stderr
