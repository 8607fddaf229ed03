"""A client that rewrites its input while the engine reads it harms its own results and nothing else (FAULTS 12).

Each model runs in a child on memory that this process scribbles on all the while. The child must live. A canary binds
in place what must not be bound in place, and has to die: else the attack is too weak to prove anything.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from taktd.engines.bindable import READS_PLAIN_NUMBERS
from tests import models
from tests.models import FP32, INT64, value

VICTIM = """
import sys, time, mmap, ctypes, json
from pathlib import Path
import dataclasses
from taktd.engines.engine import EngineSpec, Tensor
from taktd.engines.inspect import inspect_model, specs_from_json
from taktd.engines.onnx_cpu import OnnxCpuEngine
path, fd, seconds, in_place = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "in-place"
found = inspect_model(Path(path), {})
spec = EngineSpec("m", path, specs_from_json(found["inputs"]), specs_from_json(found["outputs"]))
engine = OnnxCpuEngine(spec).warm()
memory = mmap.mmap(fd, 1 << 20)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
offset, tensors = 0, []
for t in (*spec.inputs, *spec.outputs):
    tensors.append(Tensor(base + offset, t.dims, shared=not in_place))
    offset += -(-t.bytes // 64) * 64
n = len(spec.inputs)
run = engine.bind(tensors[:n], tensors[n:])
print("attack", flush=True)
end = time.monotonic() + seconds
runs = failures = 0
from taktd.engines.errors import EngineFailure
while time.monotonic() < end:
    runs += 1
    try:
        run()
    except EngineFailure:
        failures += 1
print(runs, flush=True)
"""
SECONDS = 0.25
SIZE = 64

UNARY = (
    "Neg Abs Exp Log Sqrt Reciprocal Relu LeakyRelu Elu Selu Celu Sigmoid HardSigmoid Tanh Erf Gelu Softplus Softsign "
    "HardSwish Mish Sin Cos Floor Ceil Round Sign Transpose Clip Identity"
).split()
BINARY = "Add Sub Mul Div Min Max Sum Mean MatMul Gemm Equal Less Greater LessOrEqual GreaterOrEqual PRelu".split()


def square(path: Path, operator: str, operands: list[str], *, output: int = FP32, **attributes: Any) -> Path:
    """``y = operator(x, w…)`` on 64×64 matrices; ``x`` is the client's."""
    weights = {
        "w": np.ones((SIZE, SIZE), np.float32),
        "c": np.ones((SIZE, SIZE), np.bool_),
        "scale": np.array(0.5, np.float32),
        "zero": np.array(0, np.uint8),
        "starts": np.array([0], np.int64),
        "ends": np.array([SIZE], np.int64),
    }
    return models.save(
        path,
        [helper.make_node(operator, operands, ["y"], **attributes)],
        [value("x", FP32, (SIZE, SIZE))],
        [value("y", output, (SIZE, SIZE))],
        {k: weights[k] for k in operands if k != "x"},
    )


def build(name: str, path: Path) -> Path:
    """The model with one operator under attack."""
    boolean = ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual")
    if name in UNARY:
        return square(path, name, ["x"])
    if name in BINARY:
        return square(path, name, ["x", "w"], output=9 if name in boolean else FP32)
    table = {"table": np.arange(1000, dtype=np.float32)}
    match name:
        case "Where":
            return square(path, name, ["c", "x", "w"])
        case "Slice":
            return square(path, name, ["x", "starts", "ends"])
        case "QuantizeLinear":
            return square(path, name, ["x", "scale", "zero"], output=2)
        case "Cast":
            return square(path, name, ["x"], output=INT64, to=INT64)
        case "Concat":
            node = helper.make_node("Concat", ["x", "x"], ["y"], axis=0)
            return models.save(path, [node], [value("x", FP32, (8, 8))], [value("y", FP32, (16, 8))])
        case "Split":
            node = helper.make_node("Split", ["x"], ["y", "z"], axis=0, num_outputs=2)
            return models.save(
                path, [node], [value("x", FP32, (64, 8))], [value("y", FP32, (32, 8)), value("z", FP32, (32, 8))]
            )
        case "Conv":
            node = helper.make_node("Conv", ["x", "k"], ["y"], pads=[1, 1, 1, 1])
            return models.save(
                path, [node], [value("x", FP32, (1, 8, 16, 16))], [value("y", FP32, (1, 16, 16, 16))],
                {"k": np.ones((16, 8, 3, 3), np.float32)},
            )  # fmt: skip
        case "And" | "Or" | "Not":
            names = ["x"] if name == "Not" else ["x", "x"]
            return models.save(
                path, [helper.make_node(name, names, ["y"])], [value("x", 9, (4096,))], [value("y", 9, (4096,))]
            )
        case "DequantizeLinear":
            node = helper.make_node(name, ["x", "scale", "zero"], ["y"])
            return models.save(
                path, [node], [value("x", 2, (4096,))], [value("y", FP32, (4096,))],
                {"scale": np.array(0.5, np.float32), "zero": np.array(0, np.uint8)},
            )  # fmt: skip
        case "policy":
            return models.mlp(path)
        case "Gather":
            return models.gather(path)
        case "Gather behind Cast":
            nodes = [
                helper.make_node("Cast", ["x"], ["c"], to=INT64),
                helper.make_node("Gather", ["table", "c"], ["y"]),
            ]
            return models.save(path, nodes, [value("x", INT64, (64,))], [value("y", FP32, (64,))], table)
        case "TopK":
            return models.topk(path)
        case "Slice indices":
            node = helper.make_node("Slice", ["table", "x", "ends"], ["s"])
            reduce = helper.make_node("ReduceSum", ["s"], ["y"], keepdims=0)
            ends = {"ends": np.array([900], np.int64)}
            return models.save(path, [node, reduce], [value("x", INT64, (1,))], [value("y", FP32, ())], table | ends)
        case "NonZero":
            nodes = [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Shape", ["n"], ["y"])]
            return models.save(path, nodes, [value("x", FP32, (4096,))], [value("y", INT64, (2,))])
        case "Reshape operand":
            nodes = [
                helper.make_node("Reshape", ["table", "x"], ["r"]),
                helper.make_node("ReduceSum", ["r"], ["y"], keepdims=0),
            ]
            return models.save(path, nodes, [value("x", INT64, (1,))], [value("y", FP32, ())], table)
    raise AssertionError(f"no model for operator {name!r}: an operator joins the list together with one")


def attack(path: Path, how: str, seconds: float) -> tuple[int, str]:
    """Runs the victim on memory that changes all the time; returns its exit code and what it printed."""
    fd = os.memfd_create("attack")
    os.ftruncate(fd, 1 << 20)
    memory = np.frombuffer(mmap.mmap(fd, 1 << 20), np.int64)
    process = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(path), str(fd), str(seconds), how], pass_fds=[fd], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    while process.poll() is None:
        memory[:] = 0
        memory[:] = 1
        memory[:] = 1 << 40
        memory[:] = -(1 << 62)
        memory[:] = 0x7FC00000_7FC00000  # NaN twice
    os.close(fd)
    return process.returncode, first + process.stdout.read()


OPERATORS = sorted({op for domain, op in READS_PLAIN_NUMBERS if domain == ""} | {"Cast", "Identity", "policy"})
COPIED = ["Gather", "Gather behind Cast", "TopK", "Slice indices", "NonZero", "Reshape operand"]


@pytest.mark.parametrize("operator", [*OPERATORS, *COPIED])
def test_a_rewritten_operand_harms_nobody(tmp_path: Path, operator: str) -> None:
    code, printed = attack(build(operator, tmp_path / "m.onnx"), "as-a-lane", SECONDS)
    assert code == 0, f"the engine died of signal {signal.Signals(-code).name if code < 0 else code}"
    assert int(printed.split()[-1]) > 10, "the engine ran too rarely to be attacked"


def test_the_attack_is_strong_enough_to_kill_an_engine_that_trusts_its_input(tmp_path: Path) -> None:
    code, _ = attack(build("Gather", tmp_path / "m.onnx"), "in-place", 20)
    assert code == -signal.SIGSEGV
