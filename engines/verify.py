"""Does an engine compute what the model says? Compared with ONNX Runtime on the CPU before it serves.

``expect`` runs the model in a session with default options, on golden samples or on random inputs; ``verify`` runs the
engine on the same inputs and refuses it with numbers. Two steps, because the first makes threads and memory that must
be gone before a process takes real-time rights.

Golden samples are an .npz: for each input an array ``[n, *shape]``; an output that is there too is compared with what
the file says, the others with ONNX Runtime. Tolerances go by an output's type, unless configured.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from taktd.engines.difference import TOLERANCES, Rules, Values, difference
from taktd.engines.engine import BoundRun, EngineSpec, Tensor, WarmEngine
from taktd.engines.errors import EngineFailure, ModelRefused
from taktd.engines.finite import FORBID, Policy, all_finite
from taktd.engines.memory import Bytes, private_bytes, values_at
from taktd.engines.onnx_cpu import WarmOnnxCpuEngine
from taktd.engines.onnx_session import open_reference_session
from taktd.engines.tensors import TensorSpec

__all__ = ["RANDOM_SAMPLES", "TOLERANCES", "Bench", "Expectation", "Rules", "Sample", "expect", "verify"]

RANDOM_SAMPLES: Final = 4
SAMPLES_MAX: Final = 1000
SAMPLES_BYTES_MAX: Final = 1 << 30

Sample = list[Values]  # one array per tensor, raw where numpy lacks the type


@dataclass(slots=True)
class Expectation:
    """Inputs and what must come out. Empty with a ``note`` where nothing can be said."""

    rules: Rules
    source: str  # "golden" or "random"
    inputs: list[Sample] = field(default_factory=list)
    outputs: list[Sample] = field(default_factory=list)
    note: str = ""


class Bench:
    """An engine bound to private memory, run on sample after sample."""

    def __init__(self, spec: EngineSpec, bind: Callable[[list[Tensor], list[Tensor]], BoundRun]) -> None:
        self._memory: list[list[Bytes]] = [
            [private_bytes(t.bytes) for t in side] for side in (spec.inputs, spec.outputs)
        ]
        tensors = [
            [Tensor(m.ctypes.data, t.dims, shared=False) for m, t in zip(memory, side, strict=True)]
            for memory, side in zip(self._memory, (spec.inputs, spec.outputs), strict=True)
        ]
        self._inputs, self._outputs = (
            [values_at(t.address, s.dtype, s.dims) for t, s in zip(side, specs, strict=True)]
            for side, specs in zip(tensors, (spec.inputs, spec.outputs), strict=True)
        )
        self.run_bound = bind(*tensors)

    def run(self, sample: Sample) -> Sample:
        self.put(sample)
        self.run_bound()
        return self.outputs()

    def put(self, sample: Sample) -> None:
        for memory, values in zip(self._inputs, sample, strict=True):
            memory[...] = values

    def outputs(self) -> Sample:
        """Of the last run, copied."""
        return [values.copy() for values in self._outputs]

    def close(self) -> None:
        if hasattr(self.run_bound, "close"):
            self.run_bound.close()


def expect(spec: EngineSpec, rules: Rules) -> Expectation:
    """Runs the reference. Raises ``ModelRefused`` for samples that can't be used."""
    expectation = Expectation(rules, "golden" if rules.samples else "random")
    golden: dict[str, Values] = {}
    if rules.samples:
        golden = _golden(Path(rules.samples), spec)
        count = len(next(iter(golden.values())))
        expectation.inputs = [[golden[t.name][i] for t in spec.inputs] for i in range(count)]
    else:
        expectation.inputs = [_random(spec, seed) for seed in range(RANDOM_SAMPLES)]
    bench = Bench(spec, WarmOnnxCpuEngine(spec, open_reference_session(spec.path)).bind)
    try:
        for place, sample in enumerate(expectation.inputs):
            found = bench.run(sample)
            expectation.outputs.append(
                [golden[t.name][place] if t.name in golden else f for t, f in zip(spec.outputs, found, strict=True)]
            )
    except EngineFailure as failure:
        if rules.samples:
            raise ModelRefused(
                f"ONNX Runtime can't run model {spec.model!r} on its golden samples",
                found=str(failure), allowed="samples that the model accepts", hint=f"Check {rules.samples}.",
            ) from None  # fmt: skip
        expectation.inputs, expectation.outputs = [], []
        expectation.note = (
            f"model {spec.model} could not be verified: ONNX Runtime fails on random inputs ({failure}); "
            "give samples that it accepts (models.<name>.verify.samples)"
        )
    return expectation


def verify(engine: WarmEngine, expectation: Expectation, policies: Mapping[str, Policy]) -> dict[str, Any]:
    """``{"samples", "source", "worst": {output: largest difference}}``. Raises ``ModelRefused``, ``EngineFailure``."""
    spec = engine.spec
    worst = {t.name: 0.0 for t in spec.outputs}
    bench = Bench(spec, engine.bind)
    try:
        for place, (sample, expected) in enumerate(zip(expectation.inputs, expectation.outputs, strict=True)):
            for tensor, found, wanted in zip(spec.outputs, bench.run(sample), expected, strict=True):
                if policies.get(tensor.name) == FORBID:
                    _demand_finite(spec, tensor, found, place)
                difference = _compare(spec, tensor, found, wanted, place, expectation.rules)
                worst[tensor.name] = max(worst[tensor.name], difference)
    finally:
        bench.close()
    return {"samples": len(expectation.inputs), "source": expectation.source, "worst": worst}


def _demand_finite(spec: EngineSpec, tensor: TensorSpec, found: Values, place: int) -> None:
    test = all_finite(tensor.dtype)
    if test is not None and not test(found):
        raise ModelRefused(
            f"the engine of model {spec.model!r} gives NaN or infinity in output {tensor.name!r}",
            found=f"in sample {place}", allowed="finite numbers: models.<name>.non_finite forbids others",
            hint="Look at the model's numbers in this precision, or at the samples.",
        )  # fmt: skip


def _compare(spec: EngineSpec, tensor: TensorSpec, found: Values, wanted: Values, place: int, rules: Rules) -> float:
    """The largest difference. Raises ``ModelRefused`` with the worst element."""
    apart = difference(tensor.dtype, found, wanted, rules)
    if apart.beyond and apart.at is not None:
        rtol, atol = rules.tolerance(tensor.dtype)
        raise ModelRefused(
            f"the engine of model {spec.model!r} does not compute what the model says",
            found=f"{apart.found!s} in {tensor.name}[{', '.join(str(i) for i in apart.at)}] of sample {place}, "
            f"expected {apart.expected!s}, {apart.by:.3g} apart",
            allowed=f"{atol:g} + {rtol:g} x |expected|",
            hint="A wrong plan or precision; widen models.<name>.verify rtol and atol only if you know why.",
        )
    return apart.absolute


# ---- samples ----


def _random(spec: EngineSpec, seed: int) -> Sample:
    chance = np.random.default_rng(seed)
    return [_random_values(chance, t) for t in spec.inputs]


def _random_values(chance: np.random.Generator, tensor: TensorSpec) -> Values:
    """Standard normal numbers; of integers 0 and 1, which every index and flag can be; of 8 bits and less 0."""
    dtype = tensor.dtype
    if dtype.name == "BF16":
        numbers = np.asarray(chance.standard_normal(tensor.dims), np.float32).reshape(-1)
        bits = numbers.view(np.uint32) >> 16
        return bits.astype(np.uint16).reshape(tensor.dims)
    if dtype.name in TOLERANCES:
        return np.asarray(chance.standard_normal(tensor.dims)).astype(dtype.numpy)
    if dtype.name.startswith("FP8") or dtype.bits < 8:
        return np.zeros(tensor.bytes if dtype.bits < 8 else tensor.dims, np.uint8)
    return np.asarray(chance.integers(0, 2, tensor.dims)).astype(dtype.numpy)


def _golden(path: Path, spec: EngineSpec) -> dict[str, Values]:
    """Arrays by tensor name, all of the same number of samples. Raises ``ModelRefused``."""
    arrays = _read_npz(path)
    known = {t.name: t for t in (*spec.inputs, *spec.outputs)}
    counts = {len(array) if array.ndim else -1 for array in arrays.values()}
    missing = [t.name for t in spec.inputs if t.name not in arrays]
    unknown = [name for name in arrays if name not in known]
    if missing or unknown:
        raise _unusable(
            path, f"input {missing[0]!r} is missing" if missing else f"{unknown[0]!r} is no tensor of the model",
            ", ".join(known),
        )  # fmt: skip
    if len(counts) != 1 or not 1 <= next(iter(counts)) <= SAMPLES_MAX:
        raise _unusable(path, f"sample counts {sorted(counts)}", f"one count for all arrays, 1 to {SAMPLES_MAX}")
    for name, array in arrays.items():
        tensor = known[name]
        shape = (tensor.bytes,) if tensor.dtype.bits < 8 else tensor.dims
        if array.shape[1:] != shape or array.dtype != np.dtype(
            "uint8" if tensor.dtype.bits < 8 else tensor.dtype.numpy
        ):
            raise _unusable(
                path, f"{name} of {array.dtype}{list(array.shape)}", f"{tensor.dtype.numpy}[n, {str(list(shape))[1:]}"
            )
    return arrays


def _read_npz(path: Path) -> dict[str, Values]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > SAMPLES_BYTES_MAX:
            raise _unusable(path, f"{size} bytes unpacked", f"at most {SAMPLES_BYTES_MAX}")
        with np.load(path, allow_pickle=False) as arrays:
            result: dict[str, Values] = {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise _unusable(path, (error.strerror or str(error)).lower(), "a readable .npz file") from None
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise _unusable(path, str(error)[:200], "an .npz file of plain arrays (numpy.savez)") from None
    if not result or not all(isinstance(array, np.ndarray) for array in result.values()):
        raise _unusable(path, "no arrays", "an array for each input")
    return result


def _unusable(path: Path, found: str, allowed: str) -> ModelRefused:
    return ModelRefused(
        f"the golden samples {path} can't be used", found=found, allowed=allowed,
        hint="Write them with numpy.savez(path, <input>=array of shape [n, ...], ...).",
    )  # fmt: skip
