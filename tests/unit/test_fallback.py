"""Fallbacks against the models themselves: tensors that differ, constants that don't fit."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from taktd.daemon.certification.cost_file import loop_costs
from taktd.daemon.config.configuration import Configuration, ConfigurationRefused, load
from taktd.daemon.supervision.fallback import constant_problem, fallback_problems, local_answer


def tensor(name: str, dims: list[int], dtype: int = 1, dtype_name: str = "FP32") -> dict[str, Any]:
    return {"name": name, "dims": dims, "dtype": dtype, "dtype_name": dtype_name}


def model(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs}


GO1 = model([tensor("obs", [1, 48])], [tensor("actions", [1, 12])])


def configured(folder: Path, fallback: str) -> Configuration:
    (folder / "t.yaml").write_text(
        "devices: {sim0: {driver: sim, cost: {p50: 1ms, p99.9: 2ms, max: 9ms}}, cpu1: {driver: cpu}}\n"
        "models: {go1: {path: a}, small: {path: b}}\n"
        f"loops: {{walk: {{model: go1, device: sim0, period: 20ms, fallback: [{fallback}]}}}}\n"
    )
    return load(folder / "t.yaml")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (GO1, ""),
        (model([tensor("x", [1, 48])], GO1["outputs"]), "found input x FP32[1, 48], needed obs FP32[1, 48]"),
        (model([tensor("obs", [1, 47])], GO1["outputs"]), "found input obs FP32[1, 47], needed obs FP32[1, 48]"),
        (model(GO1["inputs"], [tensor("actions", [1, 12], 10, "FP16")]), "found output actions FP16[1, 12]"),
        (model(GO1["inputs"], []), "it has 0 outputs, 1 are needed"),
    ],
)
def test_a_stand_in_has_the_loop_s_tensors(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    problems = fallback_problems(
        configured(tmp_path, "{device: cpu1, model: small}, hold"), {"go1": GO1, "small": other}
    )
    assert len(problems) == bool(said)
    if said:
        assert problems[0].startswith(f"loops.walk.fallback[0]: model small can't stand in for go1: {said}")


@pytest.mark.parametrize(
    ("constant", "problem"),
    [
        ("{actions: 0}", ""),
        ("{actions: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}", ""),
        ("{actions: [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11.5]]}", ""),
        ("{actions: [0, 1]}", "shape [2] does not fit; allowed: one number, or shape [1, 12]"),
        ("{actions: [[0], [1, 2]]}", "a ragged list"),
        ("{actions: 0, torque: 1}", ".torque: no output is called that; allowed: actions"),
    ],
)
def test_a_constant_fits_the_outputs(tmp_path: Path, constant: str, problem: str) -> None:
    problems = fallback_problems(configured(tmp_path, f"cpu1, {{constant: {constant}}}"), {"go1": GO1, "small": GO1})
    assert len(problems) == bool(problem)
    if problem:
        assert problems[0].startswith("loops.walk.fallback[1].constant.")
        assert problem in problems[0]


def test_integers_are_whole_and_within_their_type() -> None:
    outputs = model([], [tensor("mode", [2], 3, "INT8"), tensor("on", [1], 9, "BOOL")])
    assert constant_problem({"mode": (-128.0, 127.0), "on": 1.0}, outputs) == ""
    assert "from -128 to 127" in constant_problem({"mode": 128.0, "on": 1.0}, outputs)
    assert "found 0.5" in constant_problem({"mode": 0.5, "on": 1.0}, outputs)
    assert "from 0 to 1" in constant_problem({"mode": 0.0, "on": 2.0}, outputs)
    assert ".on: is missing" in constant_problem({"mode": 0.0}, outputs)


@pytest.mark.parametrize(
    ("dtype", "number", "fits", "beyond", "allowed"),
    [
        ("FP32", 1, 3.40282e38, 1e39, "numbers from -3.40282e+38 to 3.40282e+38"),
        ("FP16", 10, 65504.0, 65520.0, "numbers from -65504 to 65504"),
        ("BF16", 16, 3.38953e38, 3.4e38, "numbers from -3.38953e+38 to 3.38953e+38"),
    ],
)
def test_a_constant_that_a_float_can_t_hold_is_refused_and_never_infinite(
    tmp_path: Path, dtype: str, number: int, fits: float, beyond: float, allowed: str
) -> None:
    robot = model([], [tensor("torque", [2], number, dtype)])
    for sign in (1, -1):
        assert constant_problem({"torque": (0.0, sign * fits)}, robot) == ""
        problem = constant_problem({"torque": (0.0, sign * beyond)}, robot)
        assert problem == f".torque: found {sign * beyond:g}; allowed in {dtype}: {allowed}"
    bits = int.from_bytes(local(tmp_path, f"{{constant: {{torque: {fits!r}}}}}", robot)[16:20], "little")
    exponent = {"FP32": 0x7F800000, "FP16": 0x7C00, "BF16": 0x7F80}[dtype]
    assert bits & exponent != exponent  # all ones would be infinity


@pytest.mark.parametrize(
    ("values", "key", "found"),
    [(".nan", "y", ".nan"), ("[0, .inf]", "y[1]", ".inf"), ("[0, [high]]", "y[1][0]", "high"), ("1e999", "y", "1e999")],
)
def test_a_constant_that_is_no_number_is_named_once_with_its_output(
    tmp_path: Path, values: str, key: str, found: str
) -> None:
    with pytest.raises(ConfigurationRefused) as refused:
        configured(tmp_path, f"{{constant: {{x: 0, y: {values}}}}}")
    assert [(e.key, e.found) for e in refused.value.errors] == [
        (f"loops.walk.fallback[0].constant.{key}", f'"{found}"')
    ]
    assert "a finite" in refused.value.errors[0].allowed


def test_a_power_of_ten_needs_no_point(tmp_path: Path) -> None:
    loop = configured(tmp_path, "{constant: {y: [1e-4, -2.5E3, 1.0e-4]}}").loops["walk"]
    assert loop.fallback[0].constant == {"y": (0.0001, -2500.0, 0.0001)}


def test_a_cell_is_planned_with_declared_costs(tmp_path: Path) -> None:
    """check and simulate need neither a budget nor a measurement on a simulated device."""
    cost = loop_costs(configured(tmp_path, "hold"), {})["walk"]
    assert (cost.cost_ns, cost.shortest_ns) == (2_600_000, 1_000_000)


def local(folder: Path, fallback: str, model_: dict[str, Any] = GO1) -> bytes:
    return local_answer(configured(folder, fallback).loops["walk"], model_)


def test_what_the_client_answers_itself_travels_behind_the_attach(tmp_path: Path) -> None:
    assert local(tmp_path, "cpu1") == b""
    assert local(tmp_path, "cpu1, hold") == struct.pack("<II", 3, 0)
    assert local(tmp_path, "{constant: {actions: 2}}") == struct.pack("<IIIIf4x", 4, 0, 4, 0, 2.0)
    twelve = "{constant: {actions: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}}"
    assert local(tmp_path, twelve) == struct.pack("<IIII12f", 4, 0, 48, 0, *range(12))


def test_constants_have_the_output_s_type(tmp_path: Path) -> None:
    mixed = model([], [tensor("n", [3], 7, "INT64"), tensor("b", [2], 16, "BF16")])
    packed = local(tmp_path, "{constant: {n: -5, b: [1.5, 3.14159]}}", mixed)
    assert packed == struct.pack("<IIIIqIIHH4x", 4, 0, 8, 0, -5, 4, 0, 0x3FC0, 0x4049)
    tiny = model([], [tensor("f", [2], 17, "FP8E4M3FN")])
    assert "allowed: hold" in constant_problem({"f": 1.0}, tiny)
