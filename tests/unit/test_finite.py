"""NaN and infinity: found in every type that has them, nowhere else; forbidden, flagged or let pass."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktd.engines.engine import EngineSpec, Tensor
from taktd.engines.errors import EngineFailure, FailureKind
from taktd.engines.finite import GuardedEngine, all_finite, guarded, make_nan
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.onnx_cpu import OnnxCpuEngine, WarmOnnxCpuEngine
from taktd.engines.tensors import DTYPES, DType
from tests import models

BY_NAME = {dtype.name: dtype for dtype in DTYPES}
PEERS = {
    "FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP8E4M3FN": ml_dtypes.float8_e4m3fn,
    "FP8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "FP8E5M2": ml_dtypes.float8_e5m2,
    "FP8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_every_bit_pattern_is_judged_as_by_another_implementation(name: str) -> None:
    dtype, peer = BY_NAME[name], PEERS[name]
    bits = np.arange(1 << dtype.bits, dtype=f"uint{dtype.bits}")
    expected = np.isfinite(bits.view(peer).astype(np.float32))
    test = all_finite(dtype)
    assert test is not None
    raw = bits.view(dtype.numpy)
    assert [test(raw[i : i + 1]) for i in range(len(raw))] == expected.tolist()
    assert test(raw[expected])
    assert not test(raw)


@given(place=st.integers(0, 99), bad=st.sampled_from([np.nan, np.inf, -np.inf]), name=st.sampled_from(["FP32", "FP64"]))
def test_one_bad_number_anywhere_is_found(place: int, bad: float, name: str) -> None:
    test = all_finite(BY_NAME[name])
    assert test is not None
    values = np.full(100, np.finfo(BY_NAME[name].numpy).max, BY_NAME[name].numpy)
    assert test(values)
    values[place] = bad
    assert not test(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_is_made_nan_is_found_and_integers_are_left(dtype: DType) -> None:
    values = np.zeros(8, dtype.numpy)
    make_nan(values, dtype)
    test = all_finite(dtype)
    assert not values.any() if test is None else not test(values)


# ---- engines ----


def division(path: Path) -> WarmOnnxCpuEngine:
    """y = x / x and z = x: NaN for 0."""
    from onnx import helper

    nodes = [helper.make_node("Div", ["x", "x"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    tensors = [models.value(name, models.FP32, ("N", 4)) for name in "xyz"]
    found = inspect_model(models.save(path, nodes, tensors[:1], tensors[1:]), {})
    inputs, outputs = specs_from_json(found["inputs"]), specs_from_json(found["outputs"])
    return OnnxCpuEngine(EngineSpec("m", str(path), inputs, outputs, 4)).warm()


class Slot:
    def __init__(self) -> None:
        self.x, self.y, self.z = (np.ones((1, 4), np.float32) for _ in range(3))
        self.inputs = [Tensor(self.x.ctypes.data, (1, 4))]
        self.outputs = [Tensor(a.ctypes.data, (1, 4)) for a in (self.y, self.z)]


def test_without_a_policy_the_engine_is_itself(tmp_path: Path) -> None:
    engine = division(tmp_path / "m.onnx")
    assert guarded(engine, {}) is engine
    assert guarded(engine, {"y": "allow"}) is engine


def test_forbidden_is_a_failure_of_its_kind_in_every_kind_of_run(tmp_path: Path) -> None:
    engine, slot = guarded(division(tmp_path / "m.onnx"), {"y": "forbid", "z": "flag"}), Slot()
    run = engine.bind(slot.inputs, slot.outputs)
    run()
    slot.x[0, 2] = 0
    others = Slot()
    batch = engine.batch(2)
    for bad in (
        run,
        lambda: engine.run_shaped(slot.inputs, slot.outputs),
        lambda: batch.run(
            [[others.x.ctypes.data], [slot.x.ctypes.data]],
            [[s.y.ctypes.data, s.z.ctypes.data] for s in (others, slot)],
        ),
    ):
        with pytest.raises(EngineFailure, match="'y' has NaN") as raised:
            bad()
        assert raised.value.kind is FailureKind.NOT_FINITE
        assert not raised.value.sticky
    slot.x[:] = 1
    run()
    batch.run_bound()


def test_flagged_is_counted_and_answered(tmp_path: Path) -> None:
    told: list[str] = []
    engine, slot = guarded(division(tmp_path / "m.onnx"), {"y": "flag"}, told.append), Slot()
    assert isinstance(engine, GuardedEngine)
    run = engine.bind(slot.inputs, slot.outputs)
    assert not run()
    assert engine.run_shaped(slot.inputs, slot.outputs)[1] is False
    assert not engine.flagged
    slot.x[:] = 0
    assert run()
    assert engine.run_shaped(slot.inputs, slot.outputs)[1] is True
    assert engine.flagged == {"y": 2}
    assert told == ["output 'y' of model 'm' has NaN or infinity in it"] * 2
    for _ in range(10):
        run()
    assert (engine.flagged["y"], len(told)) == (12, 5)


def test_in_a_batch_each_member_is_flagged_by_itself(tmp_path: Path) -> None:
    engine, good, bad = guarded(division(tmp_path / "m.onnx"), {"y": "flag"}), Slot(), Slot()
    bad.x[0, 3] = 0
    flagged = engine.batch(2).run(
        [[slot.x.ctypes.data] for slot in (good, bad)], [[s.y.ctypes.data, s.z.ctypes.data] for s in (good, bad)]
    )
    assert flagged == [False, True]


def test_what_a_run_holds_is_given_back_through_the_guard(tmp_path: Path) -> None:
    engine, slot, closed = division(tmp_path / "m.onnx"), Slot(), []

    class Holding:
        spec = engine.spec
        run_shaped, batch = engine.run_shaped, engine.batch

        def bind(self, *tensors: object) -> object:
            def run() -> None: ...

            run.close = lambda: closed.append("run")  # type: ignore[attr-defined]
            return run

        def close(self) -> None:
            closed.append("engine")

    outer = guarded(Holding(), {"y": "forbid"})  # type: ignore[arg-type]
    outer.bind(slot.inputs, slot.outputs).close()  # type: ignore[attr-defined]
    outer.close()  # type: ignore[attr-defined]
    assert closed == ["run", "engine"]
