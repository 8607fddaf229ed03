"""ONNX Runtime on the CPU: the same bits as a plain run, on memory that somebody else owns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from taktd.engines.engine import EngineSpec, Tensor
from taktd.engines.errors import EngineFailure
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.onnx_cpu import OnnxCpuEngine, WarmOnnxCpuEngine
from tests import models


def warm(path: Path, shapes: dict[str, list[int]] | None = None, max_batch: int = 1) -> WarmOnnxCpuEngine:
    found = inspect_model(path, shapes or {})
    spec = EngineSpec("m", str(path), specs_from_json(found["inputs"]), specs_from_json(found["outputs"]), max_batch)
    return OnnxCpuEngine(spec).warm()


def plain(path: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feed)


def tensor(array: np.ndarray, dims: tuple[int, ...] | None = None) -> Tensor:
    return Tensor(array.ctypes.data, dims if dims is not None else array.shape)


def test_a_bound_run_reads_and_writes_the_given_memory(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx")
    engine = warm(path)
    obs = np.zeros((1, 48), np.float32)
    actions = np.zeros((1, 12), np.float32)
    run = engine.bind([tensor(obs)], [tensor(actions)])
    for seed in range(20):
        obs[:] = np.random.default_rng(seed).standard_normal((1, 48))
        run()
        assert np.array_equal(actions, plain(path, {"obs": obs})[0])


def test_a_tensor_that_may_not_be_bound_in_place_is_copied(tmp_path: Path) -> None:
    path = models.topk(tmp_path / "m.onnx")
    engine = warm(path)
    x = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    top, indices = np.zeros(64, np.float32), np.zeros(64, np.int64)
    engine.bind([tensor(x)], [tensor(top), tensor(indices)])()
    assert np.array_equal(top, np.sort(x)[::-1][:64])
    assert np.array_equal(x[indices], top)


def test_a_batch_gives_each_member_its_own_answer(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", batch="N")
    engine = warm(path, max_batch=4)
    inputs = [np.random.default_rng(s).standard_normal((1, 48)).astype(np.float32) for s in range(3)]
    outputs = [np.zeros((1, 12), np.float32) for _ in inputs]
    engine.batch(3).run([[i.ctypes.data] for i in inputs], [[o.ctypes.data] for o in outputs])
    together = plain(path, {"obs": np.concatenate(inputs)})[0]
    assert np.array_equal(np.concatenate(outputs), together)


def test_a_run_at_actual_shapes_says_what_came_out(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", batch="N")
    engine = warm(path, {"obs": [8, 48]})
    obs = np.random.default_rng(3).standard_normal((5, 48)).astype(np.float32)
    actions = np.zeros((8, 12), np.float32)
    assert engine.run_shaped([tensor(obs)], [tensor(actions)]) == (((5, 12),), False)
    assert np.array_equal(actions[:5], plain(path, {"obs": obs})[0])


def test_a_result_that_does_not_fit_fails_and_writes_nothing(tmp_path: Path) -> None:
    engine = warm(models.identity(tmp_path / "m.onnx", ("N",)), {"x": [8]})
    x, y = np.ones(8, np.float32), np.zeros(8, np.float32)
    with pytest.raises(EngineFailure, match=r"found shape \[8\], room for \[4\]"):
        engine.run_shaped([tensor(x)], [tensor(y, (4,))])
    assert not y.any()


def test_an_engine_that_throws_is_a_failure_with_its_words(tmp_path: Path) -> None:
    engine = warm(models.gather(tmp_path / "m.onnx", rows=10))
    x, y = np.full(64, 99, np.int64), np.zeros(64, np.float32)
    with pytest.raises(EngineFailure, match="indices"):
        engine.bind([tensor(x)], [tensor(y)])()


@pytest.mark.parametrize("dims", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_tensors_pass(tmp_path: Path, dims: tuple[int, ...]) -> None:
    engine = warm(models.identity(tmp_path / "m.onnx", dims))
    x, y = np.full(dims, 7, np.float32), np.zeros(dims, np.float32)
    engine.bind([tensor(x)], [tensor(y)])()
    assert np.array_equal(x, y)
