"""A model on a simulated device: outputs by a simple rule, time by a declared distribution.

Outputs are ``identity`` (an input's values, repeated or cut to the output's size, converted to its type), a
``constant``, or ``onnx``: the model is run on the CPU, and the declared time is waited out. A batch takes as long as a
single job. Every draw comes from the seed, the model's name and the number of runs before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from taktd.drivers.fault import DeviceFault
from taktd.drivers.sim import SimDevice
from taktd.engines.declared_cost import PPM, Cost
from taktd.engines.engine import BoundRun, EngineSpec, Shapes, Tensor, WarmEngine
from taktd.engines.errors import DeviceFailure, EngineFailure
from taktd.engines.finite import make_nan
from taktd.engines.memory import bytes_at, private_bytes, values_at
from taktd.engines.onnx_cpu import OnnxCpuEngine, WarmOnnxCpuEngine
from taktd.engines.tensors import TensorSpec, size_bytes

__all__ = ["PPM", "Cost", "SimulatedEngine", "SimulatedOptions", "WarmSimulatedEngine"]

WARM_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    cost: Cost
    outputs: Literal["identity", "constant", "onnx"] = "identity"
    constant: float = 0.0
    seed: int = 1

    @classmethod
    def of(cls, driver: Mapping[str, Any]) -> SimulatedOptions:
        """From the driver's part of a plan: ``{"cost": [[ppm, ns], …], "outputs", "constant", "seed"}``."""
        points = tuple((share, ns) for share, ns in driver["cost"])
        return cls(Cost(points), driver["outputs"], driver["constant"], driver["seed"])


class SimulatedEngine:
    """Raises ``ModelRefused`` where the outputs are the model's own and ONNX Runtime can't load it."""

    def __init__(self, spec: EngineSpec, device: SimDevice, options: SimulatedOptions) -> None:
        self.spec = spec
        self._device, self._options = device, options
        self._onnx = OnnxCpuEngine(spec) if options.outputs == "onnx" else None

    def warm(self) -> WarmSimulatedEngine:
        onnx = self._onnx.warm() if self._onnx is not None else None
        engine = WarmSimulatedEngine(self.spec, self._device, self._options, onnx)
        private = engine.batch(1)
        for _ in range(WARM_RUNS):
            private.run_bound()
        return engine


class WarmSimulatedEngine:
    def __init__(
        self, spec: EngineSpec, device: SimDevice, options: SimulatedOptions, onnx: WarmOnnxCpuEngine | None
    ) -> None:
        self.spec = spec
        self._device, self._options, self._onnx = device, options, onnx
        chance = random.Random(f"{options.seed} {spec.model}")
        cost = options.cost
        one = cost.points[0][1]
        self._cost_ns: Callable[[], int] = (
            (lambda: one) if len(cost.points) == 1 else (lambda: cost.at(chance.randint(1, PPM)))
        )

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> BoundRun:
        return self.bound(inputs, outputs)

    def bound(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, rehearsal: bool = False) -> BoundRun:
        """As ``bind``. ``rehearsal``: its runs are for nobody, and use up no fault."""
        targets = [
            (values_at(tensor.address, spec.dtype, tensor.dims), spec)
            for spec, tensor in zip(self.spec.outputs, outputs, strict=True)
        ]
        work = self._onnx.bind(inputs, outputs) if self._onnx else self._rule(inputs, targets)
        return self._timed(work, targets, rehearsal)

    def _rule(self, inputs: Sequence[Tensor], targets: list[tuple[npt.NDArray[Any], TensorSpec]]) -> BoundRun:
        if self._options.outputs == "constant" or not inputs:
            value = self._options.constant
            return lambda: _fill(targets, value)
        pairs = []
        for index, (target, to) in enumerate(targets):
            at = index % len(inputs)
            spec, tensor = self.spec.inputs[at], inputs[at]
            if spec.dtype.number == to.dtype.number:  # bytes are bytes, whatever they mean
                there = bytes_at(target.ctypes.data, target.nbytes)
                pairs.append((there, bytes_at(tensor.address, size_bytes(spec.dtype, tensor.dims))))
            else:
                pairs.append((target.reshape(-1), values_at(tensor.address, spec.dtype, tensor.dims).reshape(-1)))

        def work() -> None:
            for target, source in pairs:
                if source.size == target.size:
                    target[:] = source
                else:
                    # Repeated or cut: np.resize gives zeros for an empty source.
                    target[:] = np.resize(source, target.shape)

        return work

    def _timed(
        self, work: BoundRun, targets: list[tuple[npt.NDArray[Any], TensorSpec]], rehearsal: bool = False
    ) -> BoundRun:
        execute, cost_ns = self._device.run, self._cost_ns

        def run() -> None:
            try:
                spoil = execute(cost_ns(), work, rehearsal=rehearsal)
            except DeviceFault as fault:
                raise DeviceFailure(fault) from fault
            if spoil:
                for values, spec in targets:
                    make_nan(values, spec.dtype)

        return run

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        if self._onnx:
            return self._run_shaped_onnx(self._onnx, inputs, outputs)
        actual = []
        for index, (spec, room) in enumerate(zip(self.spec.outputs, outputs, strict=True)):
            dims = _followed(spec, inputs[index % len(inputs)].dims) if inputs else spec.dims
            if size_bytes(spec.dtype, dims) > size_bytes(spec.dtype, room.dims) or len(dims) != len(room.dims):
                raise EngineFailure(
                    f"output {spec.name!r} does not fit: found shape {list(dims)}, room for {list(room.dims)}"
                )
            actual.append(dims)
        self.bind(inputs, [Tensor(o.address, d, o.shared) for o, d in zip(outputs, actual, strict=True)])()
        return tuple(actual), False

    def _run_shaped_onnx(
        self, onnx: WarmEngine, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Shapes, bool]:
        result: tuple[Shapes, bool] = (), False

        def work() -> None:
            nonlocal result
            result = onnx.run_shaped(inputs, outputs)

        targets = [(values_at(o.address, s.dtype, o.dims), s) for s, o in zip(self.spec.outputs, outputs, strict=True)]
        self._timed(work, targets)()
        return result

    def batch(self, size: int) -> _PrivateRun:
        return _PrivateRun(self, size)


class _PrivateRun:
    """``size`` jobs over private memory, bound one by one, run as one."""

    def __init__(self, engine: WarmSimulatedEngine, size: int) -> None:
        spec = engine.spec
        if not 1 <= size <= spec.max_batch:
            raise ValueError(f"batch of {size} on model {spec.model!r}: allowed 1 to {spec.max_batch}")
        self.size = size
        self._spec = spec
        inputs = [(t, (t.dims[0] * size, *t.dims[1:]) if size > 1 else t.dims) for t in spec.inputs]
        outputs = [(t, (t.dims[0] * size, *t.dims[1:]) if size > 1 else t.dims) for t in spec.outputs]
        self._inputs = [private_bytes(size_bytes(t.dtype, dims)) for t, dims in inputs]
        self._outputs = [private_bytes(size_bytes(t.dtype, dims)) for t, dims in outputs]
        tensors = [
            [Tensor(m.ctypes.data, dims, shared=False) for m, (_, dims) in zip(memory, side, strict=True)]
            for memory, side in ((self._inputs, inputs), (self._outputs, outputs))
        ]
        self.run_bound = engine.bound(*tensors, rehearsal=True)
        self._run = engine.bind(*tensors)

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        for member, addresses in enumerate(inputs):
            for memory, tensor, address in zip(self._inputs, self._spec.inputs, addresses, strict=True):
                memory[member * tensor.bytes : (member + 1) * tensor.bytes] = bytes_at(address, tensor.bytes)
        self._run()
        for member, addresses in enumerate(outputs):
            for memory, tensor, address in zip(self._outputs, self._spec.outputs, addresses, strict=True):
                bytes_at(address, tensor.bytes)[:] = memory[member * tensor.bytes : (member + 1) * tensor.bytes]


def _fill(targets: list[tuple[npt.NDArray[Any], TensorSpec]], value: float) -> None:
    for target, _ in targets:
        target[...] = value


def _followed(spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The output's shape for an input's: what the model leaves open follows the input, where the ranks agree."""
    if len(dims) != len(spec.dims):
        return spec.dims
    return tuple(found if free else own for found, free, own in zip(dims, spec.symbolic, spec.dims, strict=True))
