"""What a model is, and why some models are refused."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from taktd.engines.errors import ModelRefused
from taktd.engines.inspect import inspect_model
from tests import models


def refusal(path: Path, shapes: dict[str, list[int]] | None = None) -> str:
    with pytest.raises(ModelRefused) as caught:
        inspect_model(path, shapes or {})
    assert all(caught.value.refusal.values()), "what, found, allowed and hint must all say something"
    return str(caught.value)


def test_a_policy_is_fixed_and_bound_in_place(tmp_path: Path) -> None:
    found = inspect_model(models.mlp(tmp_path / "m.onnx"), {})
    assert [(t["name"], t["dtype_name"], t["dims"], t["bindable"]) for t in (*found["inputs"], *found["outputs"])] == [
        ("obs", "FP32", [1, 48], True),
        ("actions", "FP32", [1, 12], True),
    ]
    assert not found["dynamic"]
    assert not found["batch"]


def test_an_open_batch_dimension_counts_one_and_allows_batching(tmp_path: Path) -> None:
    found = inspect_model(models.mlp(tmp_path / "m.onnx", batch="N"), {})
    assert found["inputs"][0]["dims"] == [1, 48]
    assert found["outputs"][0]["dims"] == [1, 12]
    assert found["dynamic"]
    assert found["batch"]


def test_declared_shapes_are_the_maximum_of_inputs_and_outputs(tmp_path: Path) -> None:
    found = inspect_model(models.mlp(tmp_path / "m.onnx", batch="N"), {"obs": [8, 48]})
    assert found["inputs"][0]["dims"] == [8, 48]
    assert found["outputs"][0]["dims"] == [8, 12]
    assert not found["batch"], "a job is a batch of its own already"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"obs": [8, 47]}, "does not fit the model"),
        ({"obs": [8]}, "does not fit the model"),
        ({"nonsense": [1]}, "does not have"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, shapes: dict[str, list[int]], words: str) -> None:
    assert words in refusal(models.mlp(tmp_path / "m.onnx", batch="N"), shapes)


def test_an_open_dimension_behind_the_first_must_be_declared(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", ("N", "M"))
    assert "open dimensions" in refusal(path)
    assert inspect_model(path, {"x": [2, 3]})["outputs"][0]["dims"] == [2, 3]


def test_an_output_that_depends_on_values_needs_a_declared_maximum(tmp_path: Path) -> None:
    node = helper.make_node("NonZero", ["x"], ["y"])
    path = models.save(
        tmp_path / "m.onnx",
        [node],
        [models.value("x", models.FP32, (8,))],
        [models.value("y", models.INT64, (1, None))],
    )
    assert "depends on the values" in refusal(path)
    found = inspect_model(path, {"y": [1, 8]})
    assert found["data_dependent"]
    assert found["outputs"][0]["dims"] == [1, 8]


def test_strings_are_refused_by_name(tmp_path: Path) -> None:
    text = refusal(models.identity(tmp_path / "m.onnx", (1,), TensorProto.STRING))
    assert "'x'" in text
    assert "STRING" in text
    assert "FP32" in text


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path / "none.onnx")


def test_a_file_cut_anywhere_is_refused_or_still_a_model(tmp_path: Path) -> None:
    whole = models.mlp(tmp_path / "m.onnx", (48, 64, 12)).read_bytes()
    cut = tmp_path / "cut.onnx"
    for size in range(0, len(whole), 1024):
        cut.write_bytes(whole[:size])
        refusal(cut)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(os.urandom(4096))
    refusal(path)


def test_an_unknown_operator_is_refused_with_the_runtimes_words(tmp_path: Path) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"])
    path = models.save(
        tmp_path / "m.onnx", [node], [models.value("x", models.FP32, (1,))], [models.value("y", models.FP32, (1,))]
    )
    assert "Frobnicate" in refusal(path)


def test_a_cycle_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Add", ["a", "x"], ["b"])]
    path = models.save(
        tmp_path / "m.onnx", nodes, [models.value("x", models.FP32, (1,))], [models.value("b", models.FP32, (1,))]
    )
    refusal(path)


def test_a_dimension_that_no_machine_can_hold_is_refused(tmp_path: Path) -> None:
    assert "too many bytes" in refusal(models.identity(tmp_path / "m.onnx", (2**31 - 1, 4)))
    assert "no machine" in refusal(models.identity(tmp_path / "n.onnx", (2**40,)))


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "link.bin", ""])
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    (tmp_path / "weights.bin").write_bytes(b"\0" * 4096)
    path = models.mlp(folder / "m.onnx", (48, 64, 12))
    (folder / "link.bin").symlink_to(tmp_path / "weights.bin")
    model = onnx.load(str(path))
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    path.write_bytes(model.SerializeToString())
    assert "inside" in refusal(path)


def test_external_data_beside_the_model_belongs_to_its_digest(tmp_path: Path) -> None:
    path = models.mlp(tmp_path / "a.onnx", (48, 640, 12))
    onnx.save_model(onnx.load(str(path)), str(path), save_as_external_data=True, location="w.bin", size_threshold=0)
    before = inspect_model(path, {})["digest"]
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "w.bin").write_bytes(bytes(data))
    assert inspect_model(path, {})["digest"] != before


def test_the_command_prints_json_alone_and_says_no_by_its_exit_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "taktd.engines.inspect"]
    good = subprocess.run([*command, str(models.mlp(tmp_path / "m.onnx"))], capture_output=True, check=False)
    assert good.returncode == 0
    assert json.loads(good.stdout)["inputs"][0]["name"] == "obs"
    bad = subprocess.run([*command, str(tmp_path / "none.onnx")], capture_output=True, check=False)
    assert bad.returncode == 1
    assert set(json.loads(bad.stdout)["error"]) == {"what", "found", "allowed", "hint"}


@pytest.mark.parametrize(
    ("operator", "inputs", "bindable"),
    [
        ("Identity", ["x"], True),
        ("Tanh", ["x"], True),
        ("Softmax", ["x"], False),
        ("CumSum", ["x", "zero"], False),
    ],
)
def test_only_listed_operators_read_a_clients_memory(
    tmp_path: Path, operator: str, inputs: list[str], bindable: bool
) -> None:
    path = models.save(
        tmp_path / "m.onnx",
        [helper.make_node(operator, inputs, ["y"])],
        [models.value("x", models.FP32, (8,))],
        [models.value("y", models.FP32, (8,))],
        {"zero": np.array(0, np.int64)},
    )
    found = inspect_model(path, {})
    assert found["inputs"][0]["bindable"] is bindable


def test_indices_and_what_is_sorted_are_copied_first(tmp_path: Path) -> None:
    assert not inspect_model(models.gather(tmp_path / "g.onnx"), {})["inputs"][0]["bindable"]
    found = inspect_model(models.topk(tmp_path / "t.onnx"), {})
    assert not found["inputs"][0]["bindable"]
    assert not any(t["bindable"] for t in found["outputs"]), "TopK sorts in its own output"


def test_a_cast_that_the_optimiser_removes_hides_nothing(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=models.INT64),
        helper.make_node("Gather", ["table", "c"], ["y"]),
    ]
    path = models.save(
        tmp_path / "m.onnx", nodes, [models.value("x", models.INT64, (4,))], [models.value("y", models.FP32, (4,))],
        {"table": np.arange(9, dtype=np.float32)},
    )  # fmt: skip
    assert not inspect_model(path, {})["inputs"][0]["bindable"]


def test_an_output_that_is_read_again_as_an_index_is_private(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "one"], ["i"]),
        helper.make_node("Gather", ["table", "i"], ["y"]),
    ]
    path = models.save(
        tmp_path / "m.onnx",
        nodes,
        [models.value("x", models.INT64, (4,))],
        [models.value("i", models.INT64, (4,)), models.value("y", models.FP32, (4,))],
        {"table": np.arange(9, dtype=np.float32), "one": np.array(1, np.int64)},
    )
    found = inspect_model(path, {})
    assert found["inputs"][0]["bindable"], "Add reads plain numbers"
    assert [t["bindable"] for t in found["outputs"]] == [False, False]


def test_a_full_scratch_folder_is_not_the_models_fault(tmp_path: Path) -> None:
    """A limit on file sizes looks like a full disk to whoever writes."""
    large = models.mlp(tmp_path / "large.onnx", (8, 512, 512, 4))
    size = large.stat().st_size // 2
    done = subprocess.run(
        [sys.executable, "-m", "taktd.engines.inspect", str(large), "--shapes", "{}"], capture_output=True, text=True,
        timeout=60, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip
    assert done.returncode != 0
    error = json.loads(done.stdout)["error"]
    assert "can't write its optimised graph" in error["what"]
    assert "bytes free in" in error["found"]
    assert "TMPDIR" in error["hint"]
