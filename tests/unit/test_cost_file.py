"""The cost file, and `taktctl check` over configurations and cost files, good and bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from taktd.daemon.certification.cost_file import cost_document
from taktd.daemon.cli.check import check
from taktd.engines.model_file import content_digest
from tests import models

CONFIGURATION = """
devices:
  cpu0: {driver: cpu, best_effort: off}
models:
  go1: {path: go1.onnx}
loops:
  walk: {model: go1, period: 20ms, deadline: 5ms}
  arm: {model: go1, period: 10ms, budget: 1ms}
"""
TIMES = {"p50_ns": 100_000, "p99_ns": 110_000, "p999_ns": 150_001, "max_ns": 900_000, "runs": 5000}


def document(**changes: Any) -> dict[str, Any]:
    model = {"digest": "", "batches": {"1": {**TIMES, "switched_out": 3}}} | changes
    return cost_document({"cpu0": {"dispatch_ns": 10_000, "models": {"go1": model}}})


def run(folder: Path, costs: Any = None, configuration: str = CONFIGURATION, *options: str) -> Result:
    file = folder / "taktd.yaml"
    file.write_text(configuration)
    if not (folder / "go1.onnx").exists():
        models.identity(folder / "go1.onnx")
    arguments = [str(file), "--json", *options]
    if costs is not None:
        path = folder / "costs.json"
        path.write_text(costs if isinstance(costs, str) else json.dumps(costs))
        arguments += ["--costs", str(path)]
    return CliRunner().invoke(check, arguments)


def test_cost_is_p999_with_margin_rounded_up_and_dispatch(tmp_path: Path) -> None:
    ended = run(tmp_path, document())
    assert ended.exit_code == 0
    walk, arm = json.loads(ended.stdout)["devices"]["cpu0"]["loops"]
    assert walk["cost_ns"] == 195_002 + 10_000  # 150001 × 1.3 = 195001.3
    assert arm["cost_ns"] == 1_000_000  # a budget is taken as it is
    assert walk["wcrt_ns"] is None
    assert walk["margin_ns"] > 0


def test_exact_response_times_on_request(tmp_path: Path) -> None:
    answer = json.loads(run(tmp_path, document(), CONFIGURATION, "--wcrt").stdout)
    for loop in answer["devices"]["cpu0"]["loops"]:
        assert loop["wcrt_ns"] + loop["margin_ns"] == loop["deadline_ns"]


def test_a_loop_whose_cost_nobody_knows_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.exit_code == 2
    what = json.loads(ended.stdout)["errors"][0]["what"]
    assert "walk (model go1 on cpu0)" in what
    assert "arm" not in what


def test_a_refused_set_ends_with_1_and_says_what_would_fit(tmp_path: Path) -> None:
    crowded = CONFIGURATION.replace("budget: 1ms", "budget: 9.9ms")
    ended = run(tmp_path, document(), crowded)
    assert ended.exit_code == 1
    answer = json.loads(ended.stdout)
    assert answer["admitted"] is False
    refusal = answer["devices"]["cpu0"]["refusal"]
    assert (refusal["at_ns"], refusal["loop"]) == (5_000_000, "arm")
    shown = CliRunner().invoke(check, [str(tmp_path / "taktd.yaml"), "--costs", str(tmp_path / "costs.json")])
    assert shown.exit_code == 1
    assert "refused" in shown.stdout


def test_costs_of_another_engine_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "go1.onnx"
    models.identity(model, (1, 4))
    digest = content_digest(model, [])
    assert run(tmp_path, document(digest=digest)).exit_code == 0
    models.identity(model, (1, 5))
    ended = run(tmp_path, document(digest=digest))
    assert ended.exit_code == 2
    assert "another engine" in json.loads(ended.stdout)["errors"][0]["what"]


def test_costs_from_another_kind_of_device_are_refused(tmp_path: Path) -> None:
    costs = document()
    costs["devices"]["elsewhere"] = costs["devices"]["cpu0"] | {"driver": "cuda"}
    costs["devices"]["cpu0"]["driver"] = "cpu"
    assert run(tmp_path, costs).exit_code == 0, "a device that is not asked about is no matter"
    for driver, word in (("sim", "another engine (driver 'sim', the configuration says 'cpu')"), (1, "driver is '1'")):
        costs["devices"]["cpu0"]["driver"] = driver
        ended = run(tmp_path, costs)
        assert ended.exit_code == 2
        assert word in json.loads(ended.stdout)["errors"][0]["what"]


@pytest.mark.parametrize(
    ("costs", "word"),
    [
        ("", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no cost file"),
        ('{"format": "taktd-costs", "version": 2, "devices": {}}', "version 2"),
        ('{"format": "taktd-costs", "version": 1}', "devices"),
        (document(batches={}), "no batch size 1"),
        (document(batches={"01": TIMES}), "'01'"),
        (document(batches={"1": TIMES | {"p50_ns": 0}}), "p50_ns"),
        (document(batches={"1": TIMES | {"p99_ns": 1}}), "more than p99_ns"),
        (document(batches={"1": TIMES | {"runs": True}}), "runs"),
        (document(digest=None), "digest is missing"),
        (json.dumps(document()).replace("150001", "150001.5"), "150001.5"),
        (json.dumps(document()).replace("150001", "NaN"), "NaN"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_malformed_cost_file_is_refused_with_its_place(tmp_path: Path, costs: Any, word: str) -> None:
    ended = run(tmp_path, costs)
    assert ended.exit_code == 2
    what = json.loads(ended.stdout)["errors"][0]["what"]
    assert what.startswith(str(tmp_path / "costs.json"))
    assert word in what


def test_a_missing_cost_file_or_configuration_is_unusable_input(tmp_path: Path) -> None:
    run(tmp_path)
    file = str(tmp_path / "taktd.yaml")
    assert CliRunner().invoke(check, [file, "--costs", str(tmp_path / "none")]).exit_code == 2
    assert CliRunner().invoke(check, [str(tmp_path / "none.yaml"), "--json"]).exit_code == 2


def test_a_valid_configuration_without_costs_is_told_from_a_wrong_one(tmp_path: Path) -> None:
    ended = run(tmp_path)
    answer = json.loads(ended.stdout)
    assert answer["valid"] is True
    assert (answer["errors"][0]["key"], answer["errors"][0]["line"]) == ("loops.walk.budget", 7)
    assert "is valid, but" in ended.stderr


@pytest.mark.parametrize(
    ("configuration", "known", "code", "valid", "admitted"),
    [
        (CONFIGURATION, True, 0, True, True),
        (CONFIGURATION + "  leg: {model: go1, period: 200us, budget: 190us}\n", True, 1, True, False),
        (CONFIGURATION, False, 2, True, None),
        ("devices: 3\n", False, 2, False, None),
    ],
)
def test_the_answer_has_one_shape_whatever_it_is(
    tmp_path: Path, configuration: str, known: bool, code: int, valid: bool, admitted: bool | None
) -> None:
    ended = run(tmp_path, document() if known else None, configuration)
    answer = json.loads(ended.stdout)
    assert ended.exit_code == code, ended.output
    assert set(answer) == {"valid", "admitted", "devices", "errors"}
    assert (answer["valid"], answer["admitted"]) == (valid, admitted)
    assert bool(answer["errors"]) == (code == 2)
    assert bool(answer["devices"]) == (code < 2)


@pytest.mark.parametrize(("path", "what"), [("gone.onnx", "does not exist"), (".", "is a folder")])
def test_a_model_file_that_is_not_there_is_warned_about_with_its_place(tmp_path: Path, path: str, what: str) -> None:
    ended = run(tmp_path, document(), CONFIGURATION.replace("go1.onnx", path))
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["admitted"] is True
    assert what in ended.stderr
    assert "models.go1.path" in ended.stderr
    assert ":5" in ended.stderr


def test_cores_that_are_not_there_are_warned_about(tmp_path: Path) -> None:
    ended = run(tmp_path, document(), CONFIGURATION.replace("best_effort: off", "best_effort: off, cores: [4095]"))
    assert ended.exit_code == 0
    assert "4095" in ended.stderr
    assert json.loads(ended.stdout)["admitted"] is True
