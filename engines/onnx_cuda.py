"""ONNX Runtime's CUDA execution provider: the engine between TensorRT and the CPU.

For models that TensorRT refuses, and where it is not installed. Inputs and outputs are bound on device memory and its
work goes onto our stream; the copies from and to the slot stand around it there. The provider is read back, and no node
may fall back to the CPU: what can't run on the GPU is refused at load, never run elsewhere silently.

It has never been run by us on a GPU (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Sequence
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

from taktd.drivers.cuda import CudaBlock, CudaDevice
from taktd.drivers.cuda_ranges import NOT_REGISTERED, RegisteredRange, RegisteredRanges
from taktd.drivers.fault import DeviceFault
from taktd.engines.engine import BoundRun, EngineSpec, Shapes, Tensor
from taktd.engines.errors import DeviceFailure, EngineFailure, ModelRefused
from taktd.engines.onnx_session import RUNTIME_VERSION
from taktd.engines.tensors import TensorSpec, size_bytes
from taktd.engines.timeouts import RUN_TIMEOUT_NS, WARM_TIMEOUT_NS

__all__ = ["PROVIDER", "OnnxCudaEngine", "WarmOnnxCudaEngine"]

PROVIDER: Final = "CUDAExecutionProvider"
WARM_RUNS: Final = 5  # the provider chooses its convolution algorithms in the first
Named = Sequence[tuple[TensorSpec, int, tuple[int, ...]]]  # (tensor, device address, dimensions)


def _batched(spec: TensorSpec, size: int) -> tuple[int, ...]:
    return (spec.dims[0] * size, *spec.dims[1:]) if size > 1 else spec.dims


class OnnxCudaEngine:
    """A loaded session on our stream. Raises ``ModelRefused``: no such provider, or not all of the model runs on it."""

    def __init__(self, spec: EngineSpec, device: CudaDevice, *, urgency: int = 0, timeout_ns: int) -> None:
        self.spec = spec
        self._device = device
        self._timeout_ns = timeout_ns
        self._stream = device.stream(urgency)
        try:
            self._session = _open(spec.path, device.index, self._stream.handle)
        except BaseException:
            self._stream.close()
            raise

    def warm(self) -> WarmOnnxCudaEngine:
        """Raises ``DeviceFailure``, ``EngineFailure``."""
        try:
            engine = WarmOnnxCudaEngine(
                self.spec, self._device, self._session, self._stream, max(self._timeout_ns, WARM_TIMEOUT_NS)
            )
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault
        for size in range(1, self.spec.max_batch + 1):
            batch = engine.batch(size)
            for _ in range(WARM_RUNS):
                batch.run_bound()
            batch.close()
        engine.timeout_ns = self._timeout_ns
        return engine


def _load_libraries() -> str:
    """Loads CUDA's libraries and cuDNN where pip has put them (NVIDIA's wheels), beside those that the system's loader
    finds by itself. What can't be loaded, in the loader's words; "" where nothing is missing that is needed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        getattr(onnxruntime, "preload_dlls", lambda: None)()  # since 1.21; it prints
    return "; ".join(line for line in said.getvalue().splitlines() if line.startswith("Failed to load"))


def _open(path: str, index: int, stream: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    wanted = {
        "device_id": str(index),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",  # FP32 means FP32, as with TensorRT
    }
    hint = "Install onnxruntime-gpu and the CUDA libraries it names (docs/gpu.md), or serve the model from the CPU."
    if PROVIDER not in onnxruntime.get_available_providers():
        raise ModelRefused(
            "this ONNX Runtime has no CUDA provider",
            found=", ".join(onnxruntime.get_available_providers()),
            allowed=PROVIDER,
            hint=hint,
        )
    lacking = _load_libraries()
    try:
        # Without its own second try, which runs elsewhere, prints to standard output, and forgets the reason.
        session = onnxruntime.InferenceSession(path, options, providers=[(PROVIDER, wanted)], enable_fallback=0)
    except Exception as error:  # its exception classes have no common base below Exception
        raise ModelRefused(
            "ONNX Runtime can't run the model on the GPU",
            found="; ".join(filter(None, (str(error).strip(), lacking))),
            allowed=f"a model whose every node ONNX Runtime {RUNTIME_VERSION} runs by {PROVIDER}",
            hint=hint,
        ) from error
    # A provider whose library does not load is left out with a line in the log and nothing else.
    if session.get_providers()[:1] != [PROVIDER]:
        raise ModelRefused(
            "ONNX Runtime fell back to another provider than asked",
            found="; ".join(filter(None, (", ".join(session.get_providers()), lacking))),
            allowed=PROVIDER,
            hint=hint,
        )
    session.disable_fallback()
    return session


class WarmOnnxCudaEngine:
    """Device buffers for the largest batch, one session, one stream."""

    def __init__(self, spec: EngineSpec, device: CudaDevice, session: Any, stream: Any, timeout_ns: int) -> None:
        self.spec = spec
        self.device = device
        self.stream = stream
        self.timeout_ns = timeout_ns
        self.notes: list[str] = []
        self._session = session
        self._tensors = (*spec.inputs, *spec.outputs)
        self._ranges = RegisteredRanges(device)
        self.buffers: dict[str, CudaBlock] = {}
        try:
            for tensor in self._tensors:
                size = size_bytes(tensor.dtype, _batched(tensor, spec.max_batch))
                self.buffers[tensor.name] = device.allocate(max(1, size))
        except BaseException:
            self.close()
            raise

    def binding(self, dims: dict[str, tuple[int, ...]], *, open_outputs: bool = False) -> Any:
        """The session bound to the buffers at these shapes; ``open_outputs``: their sizes are found by running."""
        binding, index = self._session.io_binding(), self.device.index
        for tensor in self.spec.inputs:
            there = self.buffers[tensor.name].address
            binding.bind_input(tensor.name, "cuda", index, tensor.dtype.number, dims[tensor.name], there)
        for tensor in self.spec.outputs:
            if open_outputs:
                binding.bind_output(tensor.name, "cuda", index)
            else:
                there = self.buffers[tensor.name].address
                binding.bind_output(tensor.name, "cuda", index, tensor.dtype.number, dims[tensor.name], there)
        return binding

    def execute(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            # It reports CUDA's errors as text of its own: whether the context is broken, the stream knows.
            self.stream.synchronize(self.timeout_ns)
            raise EngineFailure(str(error).strip()) from error

    def copy(self, target: int, source: int, size: int) -> None:
        if size:
            self.stream.copy(target, source, size)

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> BoundRun:
        """Raises ``DeviceFailure``."""
        pairs = list(zip(self._tensors, (*inputs, *outputs), strict=True))
        held: list[RegisteredRange] = []
        try:
            for spec, tensor in pairs:
                if not tensor.shared:
                    continue  # any memory: the driver copies it by a detour of its own
                pages = self._registered(tensor.address, max(1, size_bytes(spec.dtype, tensor.dims)))
                held += [pages] if pages is not None else []
        except DeviceFault as fault:
            for one in held:
                self._ranges.release(one)
            raise DeviceFailure(fault) from fault
        copies = [(self.buffers[s.name].address, t.address, size_bytes(s.dtype, t.dims)) for s, t in pairs]
        count = len(inputs)
        binding = self.binding({s.name: t.dims for s, t in pairs})
        return _SlotRun(self, binding, copies[:count], copies[count:], self._ranges, held)

    def _registered(self, address: int, size: int) -> RegisteredRange | None:
        try:
            return self._ranges.hold(address, size)
        except DeviceFault as fault:
            if fault.kind not in NOT_REGISTERED:
                raise
            text = f"the memory of lanes can't be registered ({fault}): the driver copies by a detour of its own"
            self.notes += [text] if text not in self.notes else []
            return None

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        try:
            return self._run_shaped(inputs, outputs)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def _run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        dims = {}
        for spec, tensor in zip(self.spec.inputs, inputs, strict=True):
            size, room = size_bytes(spec.dtype, tensor.dims), self.buffers[spec.name].size
            if size > room:
                raise EngineFailure(f"input {spec.name!r} does not fit: found {list(tensor.dims)}, room {room} bytes")
            dims[spec.name] = tensor.dims
            self.copy(self.buffers[spec.name].address, tensor.address, size)
        binding = self.binding(dims, open_outputs=True)
        self.execute(binding)
        actual = []
        for spec, tensor, value in zip(self.spec.outputs, outputs, binding.get_outputs(), strict=True):
            found = tuple(value.shape())
            size, room = size_bytes(spec.dtype, found), size_bytes(spec.dtype, tensor.dims)
            if size > room or len(found) != len(tensor.dims):
                raise EngineFailure(
                    f"output {spec.name!r} does not fit: found shape {list(found)}, room for {list(tensor.dims)}"
                )
            self.copy(tensor.address, value.data_ptr(), size)
            actual.append(found)
        self.stream.finish(max(self.timeout_ns, RUN_TIMEOUT_NS))
        return tuple(actual), False

    def batch(self, size: int) -> _BatchRun:
        """Raises ``DeviceFailure``."""
        if not 1 <= size <= self.spec.max_batch:
            raise ValueError(f"batch of {size} on model {self.spec.model!r}: allowed 1 to {self.spec.max_batch}")
        try:
            return _BatchRun(self, size)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        self._session = None
        for thing in (*self.buffers.values(), self.stream):
            try:
                thing.close()
            except DeviceFault as fault:
                if not fault.sticky:
                    raise
        self.buffers.clear()


class _SlotRun:
    def __init__(
        self, engine: WarmOnnxCudaEngine, binding: Any, before: list[tuple[int, int, int]],
        after: list[tuple[int, int, int]], ranges: RegisteredRanges, held: list[RegisteredRange],
    ) -> None:  # fmt: skip
        self._engine, self._binding = engine, binding
        self._before, self._after = before, after
        self._ranges, self._held = ranges, held

    def __call__(self) -> None:
        engine = self._engine
        try:
            for buffer, slot, size in self._before:
                engine.copy(buffer, slot, size)
            engine.execute(self._binding)
            for buffer, slot, size in self._after:
                engine.copy(slot, buffer, size)
            engine.stream.finish(engine.timeout_ns)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        """Gives the slot's pages back; must come before the slot is unmapped."""
        held, self._held = self._held, []
        for one in held:
            try:
                self._ranges.release(one)
            except DeviceFault as fault:
                if not fault.sticky:
                    raise

    def __del__(self) -> None:
        try:
            self.close()
        except DeviceFault:
            pass  # the device is gone, and its pages with it


class _BatchRun:
    """``size`` jobs in one run, each copied straight between its slot and its part of the buffers."""

    def __init__(self, engine: WarmOnnxCudaEngine, size: int) -> None:
        spec = engine.spec
        self.size = size
        self._engine = engine
        self._binding = engine.binding({t.name: _batched(t, size) for t in (*spec.inputs, *spec.outputs)})
        self._inputs = [(engine.buffers[t.name].address, t.bytes) for t in spec.inputs]
        self._outputs = [(engine.buffers[t.name].address, t.bytes) for t in spec.outputs]
        room = [(t, engine.device.allocate_host(max(1, t.bytes * size))) for t in (*spec.inputs, *spec.outputs)]
        self._private = [block for _, block in room]
        for block in self._private:
            ctypes.memset(block.host_address, 0, block.size)
        parts = [[block.host_address + i * t.bytes for t, block in room] for i in range(size)]
        count = len(spec.inputs)
        self._own = [p[:count] for p in parts], [p[count:] for p in parts]

    def run_bound(self) -> None:
        """With its copies, since those are part of what a batch costs."""
        self.run(*self._own)

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        engine = self._engine
        try:
            for member, addresses in enumerate(inputs):
                for (buffer, size), address in zip(self._inputs, addresses, strict=True):
                    engine.copy(buffer + member * size, address, size)
            engine.execute(self._binding)
            for member, addresses in enumerate(outputs):
                for (buffer, size), address in zip(self._outputs, addresses, strict=True):
                    engine.copy(address, buffer + member * size, size)
            engine.stream.finish(max(engine.timeout_ns, RUN_TIMEOUT_NS))
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        private, self._private = self._private, []
        for block in private:
            try:
                block.close()
            except DeviceFault as fault:
                if not fault.sticky:
                    raise

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, DeviceFault):
            pass  # never finished, or the device is gone
