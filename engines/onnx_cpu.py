"""ONNX Runtime on the CPU, in the caller's thread, on memory the caller owns.

Inputs and outputs are bound once per slot (``IOBinding``), so that a run is one call. A tensor that is not ``bindable``
goes through private memory when the slot is shared with a client (``taktd.engines.bindable`` says why).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

from taktd.engines.engine import BoundRun, EngineSpec, Shapes, Tensor
from taktd.engines.errors import EngineFailure
from taktd.engines.memory import Bytes, bytes_at, private_bytes
from taktd.engines.onnx_session import open_session
from taktd.engines.tensors import TensorSpec, size_bytes

__all__ = ["OnnxCpuEngine", "WarmOnnxCpuEngine"]

WARM_RUNS: Final = 20  # the arena has settled after two; the rest is for caches and the allocator's own pages


class OnnxCpuEngine:
    """A loaded session that has not run yet. Raises ``ModelRefused`` if ONNX Runtime can't load the model."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._session = open_session(spec.path)

    def warm(self) -> WarmOnnxCpuEngine:
        """Runs every batch size at its declared shapes on zeros, until memory is allocated and touched."""
        engine = WarmOnnxCpuEngine(self.spec, self._session)
        for size in range(1, self.spec.max_batch + 1):
            private = engine.batch(size)  # its memory lives as long as this name does
            for _ in range(WARM_RUNS if size == 1 else 2):
                private.run_bound()
        return engine


class WarmOnnxCpuEngine:
    """A session that has run. Holds no reference to any slot; the bound runs do."""

    def __init__(self, spec: EngineSpec, session: Any) -> None:
        self.spec = spec
        # The wrappers of the Python API cost a microsecond a run for checks that binding has already made.
        self._raw = session._sess
        self._session = session

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> BoundRun:
        binding = self._session.io_binding()
        copies_in: list[tuple[Bytes, Bytes]] = []
        copies_out: list[tuple[Bytes, Bytes]] = []
        for tensor_spec, tensor in zip(self.spec.inputs, inputs, strict=True):
            address = tensor.address
            if tensor.shared and not tensor_spec.bindable:
                size = size_bytes(tensor_spec.dtype, tensor.dims)
                private = private_bytes(size)
                copies_in.append((private, bytes_at(address, size)))
                address = private.ctypes.data
            _bind_input(binding, tensor_spec, tensor.dims, address)
        for tensor_spec, tensor in zip(self.spec.outputs, outputs, strict=True):
            address = tensor.address
            if tensor.shared and not tensor_spec.bindable:
                size = size_bytes(tensor_spec.dtype, tensor.dims)
                private = private_bytes(size)
                copies_out.append((bytes_at(address, size), private))
                address = private.ctypes.data
            _bind_output(binding, tensor_spec, tensor.dims, address)
        return self._bound(binding, copies_in, copies_out)

    def _bound(
        self, binding: Any, copies_in: list[tuple[Bytes, Bytes]], copies_out: list[tuple[Bytes, Bytes]]
    ) -> BoundRun:
        execute: Callable[[Any, Any], None] = self._raw.run_with_iobinding
        raw_binding = binding._iobinding

        def run() -> None:
            try:
                execute(raw_binding, None)
            except Exception as error:
                raise EngineFailure(str(error).strip()) from error

        if not copies_in and not copies_out:
            return run

        def run_with_copies() -> None:
            for private, slot in copies_in:
                private[:] = slot
            run()
            for slot, private in copies_out:
                slot[:] = private

        return run_with_copies

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        binding = self._session.io_binding()
        private: list[Bytes] = []
        for tensor_spec, tensor in zip(self.spec.inputs, inputs, strict=True):
            address = tensor.address
            if tensor.shared and not tensor_spec.bindable:
                size = size_bytes(tensor_spec.dtype, tensor.dims)
                copy = private_bytes(size)
                copy[:] = bytes_at(address, size)
                private.append(copy)
                address = copy.ctypes.data
            _bind_input(binding, tensor_spec, tensor.dims, address)
        for tensor_spec in self.spec.outputs:
            binding.bind_output(tensor_spec.name)  # its size is known only afterwards: ONNX Runtime allocates
        try:
            self._raw.run_with_iobinding(binding._iobinding, None)
        except Exception as error:
            raise EngineFailure(str(error).strip()) from error
        actual = []
        for tensor_spec, tensor, value in zip(self.spec.outputs, outputs, binding.get_outputs(), strict=True):
            dims = tuple(value.shape())
            size = size_bytes(tensor_spec.dtype, dims)
            room = size_bytes(tensor_spec.dtype, tensor.dims)
            if size > room or len(dims) != len(tensor.dims):
                raise EngineFailure(
                    f"output {tensor_spec.name!r} does not fit: found shape {list(dims)}, room for {list(tensor.dims)}"
                )
            bytes_at(tensor.address, size)[:] = bytes_at(value.data_ptr(), size)
            actual.append(dims)
        return tuple(actual), False

    def batch(self, size: int) -> _PrivateRun:
        return _PrivateRun(self, size)


class _PrivateRun:
    """A run of ``size`` jobs over private memory. Keep it as long as ``run_bound``: the memory goes with it."""

    def __init__(self, engine: WarmOnnxCpuEngine, size: int) -> None:
        spec = engine.spec
        if not 1 <= size <= spec.max_batch:
            raise ValueError(f"batch of {size} on model {spec.model!r}: allowed 1 to {spec.max_batch}")
        self.size = size
        inputs = [(t, (t.dims[0] * size, *t.dims[1:]) if size > 1 else t.dims) for t in spec.inputs]
        outputs = [(t, (t.dims[0] * size, *t.dims[1:]) if size > 1 else t.dims) for t in spec.outputs]
        self._inputs = [private_bytes(size_bytes(t.dtype, dims)) for t, dims in inputs]
        self._outputs = [private_bytes(size_bytes(t.dtype, dims)) for t, dims in outputs]
        self.run_bound = engine.bind(
            [Tensor(m.ctypes.data, dims, shared=False) for m, (_, dims) in zip(self._inputs, inputs, strict=True)],
            [Tensor(m.ctypes.data, dims, shared=False) for m, (_, dims) in zip(self._outputs, outputs, strict=True)],
        )
        self._input_bytes = [t.bytes for t in spec.inputs]
        self._output_bytes = [t.bytes for t in spec.outputs]

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        for member, addresses in enumerate(inputs):
            for memory, size, address in zip(self._inputs, self._input_bytes, addresses, strict=True):
                ctypes.memmove(memory.ctypes.data + member * size, address, size)
        self.run_bound()
        for member, addresses in enumerate(outputs):
            for memory, size, address in zip(self._outputs, self._output_bytes, addresses, strict=True):
                ctypes.memmove(address, memory.ctypes.data + member * size, size)


def _bind_input(binding: Any, spec: TensorSpec, dims: tuple[int, ...], address: int) -> None:
    binding.bind_input(spec.name, "cpu", 0, spec.dtype.number, dims, address)


def _bind_output(binding: Any, spec: TensorSpec, dims: tuple[int, ...], address: int) -> None:
    binding.bind_output(spec.name, "cpu", 0, spec.dtype.number, dims, address)
