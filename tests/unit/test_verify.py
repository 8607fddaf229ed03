"""Verification before serving: what passes, what is refused with which numbers, which samples can be used."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktd.engines.engine import EngineSpec, Tensor, WarmEngine
from taktd.engines.errors import ModelRefused
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.memory import values_at
from taktd.engines.onnx_cpu import OnnxCpuEngine
from taktd.engines.verify import TOLERANCES, Rules, expect, verify
from tests import models


def spec_of(path: Path) -> EngineSpec:
    found = inspect_model(path, {})
    return EngineSpec("go1", str(path), specs_from_json(found["inputs"]), specs_from_json(found["outputs"]))


class Spoiled:
    """An engine that computes, and then lets ``spoil`` change its first output."""

    def __init__(self, engine: WarmEngine, spoil: Callable[[np.ndarray], None]) -> None:
        self.spec = engine.spec
        self._engine, self._spoil = engine, spoil
        self.run_shaped, self.batch = engine.run_shaped, engine.batch

    def bind(self, inputs: list[Tensor], outputs: list[Tensor]) -> Callable[[], None]:
        run = self._engine.bind(inputs, outputs)
        values = values_at(outputs[0].address, self.spec.outputs[0].dtype, outputs[0].dims)

        def spoiled() -> None:
            run()
            self._spoil(values)

        return spoiled


def policy(folder: Path) -> EngineSpec:
    return spec_of(models.mlp(folder / "m.onnx", (48, 32, 12)))


def check(spec: EngineSpec, spoil: Callable[[np.ndarray], None], **rules: object) -> dict[str, object]:
    policies = rules.pop("policies", {})
    return verify(
        Spoiled(OnnxCpuEngine(spec).warm(), spoil),
        expect(spec, Rules(**rules)),
        policies,  # type: ignore[arg-type]
    )


def add(amount: float) -> Callable[[np.ndarray], None]:
    def spoil(values: np.ndarray) -> None:
        values[0, 3] += amount

    return spoil


def test_the_same_engine_passes_and_says_how_far_off(tmp_path: Path) -> None:
    report = check(policy(tmp_path), lambda values: None)
    assert (report["samples"], report["source"]) == (4, "random")
    assert 0 <= report["worst"]["actions"] < 1e-5  # type: ignore[index]


def test_the_reference_leaves_no_thread_behind(tmp_path: Path) -> None:
    spec = policy(tmp_path)
    before = len(list(Path("/proc/self/task").iterdir())), threading.active_count()
    expect(spec, Rules())
    assert (len(list(Path("/proc/self/task").iterdir())), threading.active_count()) == before


def test_a_wrong_number_is_refused_with_its_place_and_both_values(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused) as refused:
        check(policy(tmp_path), add(0.5))
    said = refused.value.refusal
    assert "'go1'" in said["what"]
    assert re.search(r"in actions\[0, 3\] of sample 0, expected .*, 0\.5 apart", said["found"])
    assert said["allowed"] == "1e-05 + 0.001 x |expected|"


@pytest.mark.parametrize("amount", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_no_match_however_wide_the_tolerance(tmp_path: Path, amount: float) -> None:
    with pytest.raises(ModelRefused, match="does not compute"):
        check(policy(tmp_path), add(amount), rtol=1e6, atol=1e6)


def test_tolerances_are_the_configured_ones(tmp_path: Path) -> None:
    spec = policy(tmp_path)
    check(spec, add(0.01), atol=0.1)
    with pytest.raises(ModelRefused):
        check(spec, add(0.01), atol=0.001, rtol=0.0)


@given(off=st.floats(0, 1, width=32), atol=st.floats(0, 1, width=32))
def test_off_by_more_than_the_tolerance_is_refused_and_no_less(
    off: float, atol: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "identity.onnx"
    spec = spec_of(path if path.exists() else models.identity(path, (1, 4)))
    np.savez(path.with_suffix(".npz"), x=np.zeros((1, 1, 4), np.float32))
    passes = True
    try:
        check(spec, add(off), samples=str(path.with_suffix(".npz")), atol=atol, rtol=0.0)
    except ModelRefused:
        passes = False
    assert passes == (off <= atol)


def test_integers_are_compared_exactly(tmp_path: Path) -> None:
    spec = spec_of(models.identity(tmp_path / "m.onnx", (2, 4), models.INT64))
    check(spec, lambda values: None)
    with pytest.raises(ModelRefused, match=r"y\[0, 3\]"):
        check(spec, add(1))


def test_nan_that_the_model_itself_gives_matches_nan(tmp_path: Path) -> None:
    from onnx import helper

    node = helper.make_node("Sqrt", ["x"], ["y"])
    tensors = [models.value(name, models.FP32, (1, 8)) for name in "xy"]
    spec = spec_of(models.save(tmp_path / "m.onnx", [node], tensors[:1], tensors[1:]))
    check(spec, lambda values: None)
    with pytest.raises(ModelRefused, match="NaN or infinity in output 'y'"):
        check(spec, lambda values: None, policies={"y": "forbid"})


@pytest.mark.parametrize("dtype", [16, 17, 18, 19, 20])
def test_types_that_numpy_lacks(tmp_path: Path, dtype: int) -> None:
    spec = spec_of(models.identity(tmp_path / "m.onnx", (2, 4), dtype))
    check(spec, lambda values: None)


def test_tolerances_are_known_for_every_type_of_more_than_eight_bits() -> None:
    assert set(TOLERANCES) == {"FP64", "FP32", "FP16", "BF16", "COMPLEX64", "COMPLEX128"}


def test_random_inputs_that_the_model_refuses_are_a_note(tmp_path: Path) -> None:
    spec = spec_of(models.gather(tmp_path / "m.onnx", rows=1))  # index 1 is outside
    expectation = expect(spec, Rules())
    assert "could not be verified" in expectation.note
    assert "verify.samples" in expectation.note
    assert not expectation.inputs


# ---- golden samples ----


def golden(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "golden.npz", **arrays)
    return str(folder / "golden.npz")


def test_golden_results_count_before_the_reference(tmp_path: Path) -> None:
    spec = policy(tmp_path)
    obs = np.random.default_rng(7).standard_normal((3, 1, 48)).astype(np.float32)
    report = check(spec, lambda values: None, samples=golden(tmp_path, obs=obs))
    assert (report["samples"], report["source"]) == (3, "golden")
    wrong = np.ones((3, 1, 12), np.float32)
    with pytest.raises(ModelRefused, match="of sample 0"):
        check(spec, lambda values: None, samples=golden(tmp_path, obs=obs, actions=wrong))


OBS = np.zeros((2, 1, 48), np.float32)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({}, "no arrays"),
        ({"actions": np.zeros((2, 1, 12), np.float32)}, "input 'obs' is missing"),
        ({"obs": OBS, "extra": OBS}, "'extra' is no tensor"),
        ({"obs": OBS, "actions": np.zeros((3, 1, 12), np.float32)}, "sample counts [2, 3]"),
        ({"obs": np.zeros((0, 1, 48), np.float32)}, "sample counts [0]"),
        ({"obs": np.zeros((1001, 1, 48), np.float32)}, "sample counts [1001]"),
        ({"obs": np.float32(1)}, "sample counts [-1]"),
        ({"obs": np.zeros((2, 48), np.float32)}, "obs of float32[2, 48]"),
        ({"obs": np.zeros((2, 1, 48))}, "obs of float64[2, 1, 48]"),
    ],
)
def test_samples_that_do_not_fit(tmp_path: Path, arrays: dict[str, np.ndarray], found: str) -> None:
    with pytest.raises(ModelRefused, match="can't be used") as refused:
        expect(policy(tmp_path), Rules(samples=golden(tmp_path, **arrays)))
    assert found in refused.value.refusal["found"]
    assert "numpy.savez" in refused.value.refusal["hint"]


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\3\4" + b"\0" * 100])
def test_a_file_of_samples_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "golden.npz").write_bytes(content)
    with pytest.raises(ModelRefused, match="can't be used"):
        expect(policy(tmp_path), Rules(samples=str(tmp_path / "golden.npz")))
    with pytest.raises(ModelRefused, match="no such file"):
        expect(policy(tmp_path), Rules(samples=str(tmp_path / "none.npz")))


def test_objects_in_a_file_of_samples_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "golden.npz", obs=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelRefused, match="can't be used"):
        expect(policy(tmp_path), Rules(samples=str(tmp_path / "golden.npz")))


@pytest.mark.parametrize("cut", range(0, 100, 9))
def test_a_cut_or_damaged_file_of_samples(tmp_path: Path, cut: int) -> None:
    spec = policy(tmp_path)
    path = Path(golden(tmp_path, obs=OBS))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * cut // 100])
    with pytest.raises(ModelRefused, match="can't be used"):
        expect(spec, Rules(samples=str(path)))
    damaged = bytearray(whole)
    damaged[len(whole) * cut // 100] ^= 0xFF
    path.write_bytes(damaged)
    try:
        expect(spec, Rules(samples=str(path)))
    except ModelRefused as refused:
        assert "can't be used" in str(refused)  # noqa: PT017
