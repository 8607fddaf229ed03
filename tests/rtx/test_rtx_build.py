"""The real parser and builder of TensorRT-RTX, on the CPU: it needs no GPU to build. `make test-rtx`.

What our build code asks of the library is asked here of the library itself, and its errors become ours. Nothing that is
built here runs: that takes an RTX card.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from taktd.engines.errors import ModelRefused
from taktd.engines.plan_build import PlanBuild
from taktd.engines.plan_cache import PlanCache, PlanIdentity
from taktd.engines.tensorrt_build import BuildRequest, build_plan
from taktd.engines.tensorrt_library import Library, find_library
from tests import models
from tests.conformance.test_engines import spec_of
from tests.fakes.tensorrt.dump_names import dump

ROOT = Path(__file__).resolve().parents[2]
ROBOTS = Path(os.environ.get("TAKTD_ROBOTS") or ROOT.parent / "shared" / "robots")
NAMES = ROOT / "tests" / "fakes" / "tensorrt" / "names"
SECOND = 1_000_000_000

pytestmark = [
    pytest.mark.rtx,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorrt_rtx") is None and importlib.util.find_spec("tensorrt_rtx_bindings") is None,
        reason="TensorRT-RTX is not in this environment: make test-rtx (a download of 95 MB)",
    ),
]


@pytest.fixture(scope="module")
def library() -> Library:
    return find_library("tensorrt_rtx")


def request_for(path: Path, max_batch: int = 1, shapes: dict[str, list[int]] | None = None) -> BuildRequest:
    from taktd.engines.gpu import GpuOptions, build_request

    return build_request(spec_of(path, shapes, max_batch), None, GpuOptions("", flavour="tensorrt_rtx"))


def build(library: Library, request: BuildRequest) -> tuple[bytes, list[tuple[str, int, int]]]:
    steps: list[tuple[str, int, int]] = []
    return build_plan(library, request, lambda *step: steps.append(step), lambda: False), steps


def quantized(path: Path) -> Path:
    """INT8 by Q/DQ pairs around a MatMul, as quantisation tools write them."""
    scale, zero = np.float32(0.05), np.int8(0)
    weights = np.random.default_rng(1).integers(-127, 127, (16, 8), np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "zero"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["wd"]),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    constants = {"scale": scale, "zero": zero, "w": weights}
    return models.save(path, nodes, [models.value("x", 1, (1, 16))], [models.value("y", 1, (1, 8))], constants)


def typed(path: Path, dtype: int) -> Path:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    return models.save(path, [node], [models.value("x", dtype, (1, 16))], [models.value("y", dtype, (1, 16))])


MAKERS: dict[str, Callable[[Path], Path]] = {
    "mlp": models.mlp,
    "demo": lambda _: ROOT / "daemon" / "demo" / "pendulum.onnx",
    "int8 by Q/DQ": quantized,
    "fp16": lambda path: typed(path, TensorProto.FLOAT16),
}


@pytest.mark.parametrize("name", MAKERS)
def test_it_builds(library: Library, tmp_path: Path, name: str) -> None:
    plan, steps = build(library, request_for(MAKERS[name](tmp_path / "m.onnx")))
    assert len(plan) > 1000
    assert len(steps) > 10, "the builder tells its progress"
    assert all(0 < step <= of for _, step, of in steps)


def test_go1_builds(library: Library) -> None:
    path = ROBOTS / "go1" / "policy.onnx"
    if not path.is_file():
        pytest.skip(f"no robot policies here: {path} (TAKTD_ROBOTS)")
    assert len(build(library, request_for(path))[0]) > 100_000


def test_a_batch_of_any_size_builds_with_its_profile(library: Library, tmp_path: Path) -> None:
    request = request_for(models.mlp(tmp_path / "m.onnx", batch="N"), 8)
    assert request.shapes == {"obs": [[1, 48], [8, 48], [8, 48]]}
    build(library, request)


def test_a_profile_that_contradicts_itself_is_refused(library: Library, tmp_path: Path) -> None:
    request = request_for(models.mlp(tmp_path / "m.onnx", batch="N"), 8)
    wrong = replace(request, shapes={"obs": [[4, 48], [2, 48], [8, 48]]})
    with pytest.raises((ModelRefused, ValueError, RuntimeError)):
        build(library, wrong)


def test_two_builds_of_one_model_need_not_be_the_same_bytes(library: Library, tmp_path: Path) -> None:
    """Why a plan is kept under what it was made from and not under its own hash."""
    request = request_for(models.mlp(tmp_path / "m.onnx"))
    first, second = (build(library, request)[0] for _ in range(2))
    assert abs(len(first) - len(second)) < len(first)


def test_the_node_without_a_kernel_is_named(library: Library, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", sizes=(4, 2))
    request = request_for(path)
    model = onnx.load(str(path))
    model.graph.node[0].op_type = "Teleport"
    model.graph.node[0].name = "beam"
    onnx.save(model, str(path))
    with pytest.raises(ModelRefused) as caught:
        build(library, request)
    assert "beam" in str(caught.value)
    assert "Teleport" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x08\x0a" * 100])
def test_a_file_that_is_no_model_is_refused(library: Library, tmp_path: Path, content: bytes) -> None:
    path = models.mlp(tmp_path / "m.onnx", sizes=(4, 2))
    request = request_for(path)
    path.write_bytes(content)
    with pytest.raises(ModelRefused):
        build(library, request)


def test_a_truncated_model_is_refused(library: Library, tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", sizes=(64, 64))
    request = request_for(path)
    whole = path.read_bytes()
    for length in range(1024, len(whole), 4096):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelRefused):
            build(library, request)


def test_a_constant_beyond_its_range_is_refused_in_the_parsers_own_words(library: Library, tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["c"], ["f"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "f"], ["y"])]
    tensors = [models.value("x", TensorProto.FLOAT, (4,))], [models.value("y", TensorProto.FLOAT, (4,))]
    path = models.save(tmp_path / "m.onnx", nodes, *tensors, {"c": np.array([1e300])})
    with pytest.raises(ModelRefused, match=r"would change: found .*1e\+300 is out of range. Clamping to"):
        build(library, request_for(path))


def test_a_64_bit_constant_is_kept(library: Library, tmp_path: Path) -> None:
    """Without a warning: this library's INT64 is 64 bits wide."""
    node = helper.make_node("Add", ["x", "c"], ["y"])
    tensors = [models.value("x", models.INT64, (4,))], [models.value("y", models.INT64, (4,))]
    path = models.save(tmp_path / "m.onnx", [node], *tensors, {"c": np.array([2**40])})
    assert build(library, request_for(path))[0]
    assert not [line for line in library.log.lines if "lamp" in line]


def test_the_stand_in_is_held_to_the_names_of_this_library(library: Library) -> None:
    """Whose engines can't be loaded here: tests/conformance runs our code on a stand-in that has these names alone."""
    assert json.loads((NAMES / f"{library.version}.json").read_text()) == json.loads(json.dumps(dump()))


def test_other_types_than_declared_are_refused(library: Library, tmp_path: Path) -> None:
    request = replace(request_for(typed(tmp_path / "m.onnx", TensorProto.FLOAT16)), types={"x": "FP32", "y": "FP16"})
    with pytest.raises(ModelRefused, match="found FP16; allowed: FP32"):
        build(library, request)


def test_a_build_in_its_own_process_ends_in_the_cache(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx")
    identity = PlanIdentity("digest", "tensorrt_rtx", "any", (0, 0), 0, {})
    running = PlanBuild(request_for(path), identity, PlanCache(tmp_path / "cache"), limit_ns=120 * SECOND)
    plan = running.wait()
    assert plan.manifest["build_ns"] > 0
    assert running.progress.steps > 0
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".json", ".plan"]


def test_a_build_in_its_own_process_can_be_cancelled(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "m.onnx", sizes=(512, *[512] * 12, 12))
    identity = PlanIdentity("digest", "tensorrt_rtx", "any", (0, 0), 0, {})
    running = PlanBuild(request_for(path), identity, PlanCache(tmp_path / "cache"), limit_ns=120 * SECOND)
    while running.progress.step == 0:
        assert running.poll() is None
    running.cancel()
    with pytest.raises(ModelRefused, match="cancelled"):
        running.wait()
    assert list((tmp_path / "cache").iterdir()) == []
