"""A TensorRT engine on a CUDA device: bound once, captured once, launched with one call.

Discrete GPU: fixed device buffers, one execution context per batch size, one CUDA graph per slot. Graphs of one batch
size differ in their copy nodes alone, which go straight from and to the slot (its pages are registered): no staging
copy. Integrated GPU (Jetson): a context per slot, working on the slot where it lies; a tensor that is not ``bindable``
has a private buffer between, since an operator that follows it as an index, or sorts in its output, could be led astray
by who writes to it meanwhile, and would take this process's context with it. Where a model can't be captured, its work
is enqueued anew for each run, and ``notes`` says so.

Everything runs on one stream, one run at a time. What a context needs besides is one block of device memory that all
contexts share (``USER_MANAGED``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from taktd.drivers.cuda import CudaBlock, CudaDevice, CudaGraph
from taktd.drivers.cuda_fault import HINTS
from taktd.drivers.cuda_ranges import NOT_REGISTERED, RegisteredRange, RegisteredRanges
from taktd.drivers.fault import DeviceFault, FaultKind
from taktd.engines.engine import EngineSpec, Shapes, Tensor
from taktd.engines.errors import DeviceFailure, EngineFailure, FailureKind, ModelRefused
from taktd.engines.tensorrt_build import load_plugins
from taktd.engines.tensorrt_library import Library
from taktd.engines.tensorrt_runs import BatchRun, SlotRun, StagedRun, Work, batched
from taktd.engines.tensorrt_types import dtype_name
from taktd.engines.tensors import TensorSpec, size_bytes
from taktd.engines.timeouts import RUN_TIMEOUT_NS, WARM_TIMEOUT_NS

__all__ = ["TensorRtEngine", "WarmTensorRtEngine"]

WARM_RUNS: Final = 3
# What a capture that is not possible comes back as: the driver's no, in whichever words, or the library's.
_NO_GRAPH: Final = (FaultKind.NOT_SUPPORTED, FaultKind.INVALID_USE, FailureKind.ERROR)
_NO_MEMORY: Final = re.compile(r"out ?of ?memory", re.IGNORECASE)


def failure_of(device: CudaDevice, library: Library, what: str) -> EngineFailure:
    """Why the library gave nothing back: the device's own fault where it is one, else in the library's words."""
    said = library.log.errors()
    library.log.clear()  # so that nothing told now is taken for the reason of what fails later
    try:
        device.free_bytes()  # a broken context answers its fault to any call
    except DeviceFault as fault:
        return DeviceFailure(fault)
    if _NO_MEMORY.search(said):
        kind = FaultKind.OUT_OF_MEMORY
        return DeviceFailure(DeviceFault(kind, f"{what}: {said}", hint=HINTS[kind]))
    return EngineFailure(f"{what}: {said}")


class TensorRtEngine:
    """A plan, deserialised and checked against what was declared; nothing has run.

    Raises ``ModelRefused``: not this version's or card's plan, other tensors, types or shapes than declared;
    ``DeviceFailure``: no memory for it, or the device is broken, for which the plan is not to blame.
    """

    def __init__(
        self,
        spec: EngineSpec,
        device: CudaDevice,
        library: Library,
        plan: bytes,
        *,
        urgency: int = 0,
        timeout_ns: int = RUN_TIMEOUT_NS,
        plugins: Sequence[str] = (),
    ) -> None:
        self.spec = spec
        self._device = device
        self._library = library
        self._urgency = urgency
        self._timeout_ns = timeout_ns
        library.log.clear()
        self._runtime = library.made("Runtime")
        load_plugins(library, self._runtime.get_plugin_registry() if plugins else None, list(plugins))
        library.log.clear()  # of what it has to say about this plan alone
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            said = library.log.errors()
            failure = failure_of(device, library, f"the plan of model {spec.model!r} can't be loaded")
            if isinstance(failure, DeviceFailure):
                raise failure
            raise ModelRefused(
                f"the plan of model {spec.model!r} can't be used",
                found=said,
                allowed=f"a plan built by {library.name} on {device.identity.name}",
                hint="Delete it: it is built again from the ONNX file.",
            )
        self._warnings = library.log.warnings()
        self._check()

    def _check(self) -> None:
        engine, spec = self._engine, self.spec
        declared = {t.name: t for t in (*spec.inputs, *spec.outputs)}
        found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        if found != set(declared):
            raise self._refusal(
                "has other tensors than declared", ", ".join(sorted(found)), ", ".join(sorted(declared))
            )
        for name, tensor in declared.items():
            dtype = dtype_name(engine.get_tensor_dtype(name))
            if dtype != tensor.dtype.name:
                raise self._refusal(f"has tensor {name!r} of another type", dtype, tensor.dtype.name)
            where, form = engine.get_tensor_location(name).name, engine.get_tensor_format(name).name
            if where != "DEVICE":
                raise self._refusal(
                    f"reads sizes from tensor {name!r}", "a tensor that must lie on the host", "tensors of values"
                )
            if form != "LINEAR":
                raise self._refusal(f"has tensor {name!r} in another memory layout", form, "LINEAR")
        for tensor in spec.inputs:
            low, high = _range_of(engine, tensor.name)
            wanted = [batched(tensor, size) for size in {1, spec.max_batch}]
            if not all(_within(low, dims, high) for dims in wanted):
                raise self._refusal(
                    f"does not cover the shape of input {tensor.name!r}",
                    f"{list(low)} to {list(high)}",
                    " and ".join(str(list(dims)) for dims in wanted),
                )

    def _refusal(self, what: str, found: str, allowed: str) -> ModelRefused:
        hint = "Build it again with these shapes, or correct models.<name>.shapes."
        return ModelRefused(f"the plan of model {self.spec.model!r} {what}", found=found, allowed=allowed, hint=hint)

    def warm(self) -> WarmTensorRtEngine:
        """Allocates, makes a context per batch size, and runs each on zeros. Raises ``DeviceFailure``."""
        try:
            warm = WarmTensorRtEngine(
                self.spec, self._device, self._library, self._engine, self._urgency, self._timeout_ns, self._runtime
            )
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault
        if self._warnings:
            warm.note(f"of the plan of {self.spec.model!r} {self._library.name} says: {self._warnings}")
        try:
            warm.warm_up()
        except BaseException:
            warm.close()
            raise
        return warm


def _range_of(engine: Any, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The least and the most dimensions of an input that the engine was built for."""
    fixed = tuple(engine.get_tensor_shape(name))
    if -1 not in fixed:
        return fixed, fixed  # of what has no open dimension a profile need not say anything
    low, _, high = (tuple(shape) for shape in engine.get_tensor_profile_shape(name, 0))
    return low, high


def _within(low: tuple[int, ...], dims: tuple[int, ...], high: tuple[int, ...]) -> bool:
    return len(low) == len(dims) and all(a <= d <= b for a, d, b in zip(low, dims, high, strict=True))


class WarmTensorRtEngine:
    """Device buffers, contexts and their stream. ``close`` gives all of it back; the bound runs first."""

    def __init__(
        self, spec: EngineSpec, device: CudaDevice, library: Library, engine: Any, urgency: int, timeout_ns: int,
        runtime: Any,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.notes: list[str] = []
        self.captures = True  # False: what is bound from then on is enqueued anew for each run, to compare
        self.ranges = RegisteredRanges(device)
        self._device = device
        self._library = library
        self._engine = engine
        self._runtime = runtime  # must outlive the engine
        self._timeout_ns = timeout_ns
        self._in_place = device.identity.shares_memory
        self._contexts: dict[int, Any] = {}
        self._open: list[Any] = []  # blocks, stream
        self._tensors = (*spec.inputs, *spec.outputs)
        try:
            self.stream = device.stream(urgency)
            self._open.append(self.stream)
            self._scratch = self._block(int(engine.device_memory_size_v2))
            self._buffers = {
                t.name: self._block(size_bytes(t.dtype, batched(t, spec.max_batch))) for t in self._tensors
            }
        except BaseException:
            self.close()
            raise

    def _block(self, size: int) -> CudaBlock:
        block = self._device.allocate(max(1, size))
        self._open.append(block)
        return block

    # ---- contexts ----

    def _context(
        self, dims: dict[str, tuple[int, ...]], addresses: dict[str, int], *, shapes_vary: bool = False
    ) -> Any:
        """A context with all shapes and addresses set, ready to be enqueued."""
        context = self._library.context_of(self._engine, shapes_vary=shapes_vary)
        if context is None:
            raise self._failure(f"no execution context for {self.spec.model!r}")
        context.set_device_memory(self._scratch.address, self._scratch.size)
        if not context.set_optimization_profile_async(0, self.stream.handle):
            raise self._failure(f"profile 0 of {self.spec.model!r}")
        self._shape(context, dims)
        self._point(context, addresses)
        return context

    def _point(self, context: Any, addresses: dict[str, int]) -> None:
        for tensor in self._tensors:
            if not context.set_tensor_address(tensor.name, addresses[tensor.name]):
                raise self._failure(f"address of {tensor.name!r}")

    def _shape(self, context: Any, dims: dict[str, tuple[int, ...]]) -> None:
        for tensor in self.spec.inputs:
            low, high = _range_of(self._engine, tensor.name)
            wanted = dims[tensor.name]
            if not _within(low, wanted, high) or not context.set_input_shape(tensor.name, wanted):
                raise EngineFailure(
                    f"input {tensor.name!r} has a shape that the engine was not built for: found {list(wanted)}, "
                    f"allowed {list(low)} to {list(high)}"
                )

    def _batch_context(self, size: int) -> Any:
        if size not in self._contexts:
            dims = {t.name: batched(t, size) for t in self.spec.inputs}
            self._contexts[size] = self._context(dims, {n: b.address for n, b in self._buffers.items()})
        return self._contexts[size]

    def enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self.stream.handle):
            raise self._failure(f"{self.spec.model!r} can't be enqueued")

    def _failure(self, what: str) -> EngineFailure:
        return failure_of(self._device, self._library, what)

    def warm_up(self) -> None:
        """Raises ``DeviceFailure``, ``EngineFailure``."""
        try:
            for block in self._buffers.values():
                self.stream.fill(block.address, 0, block.size)
            for size in range(1, self.spec.max_batch + 1):
                for _ in range(WARM_RUNS):
                    self.enqueue(self._batch_context(size))
                self.stream.synchronize(max(self._timeout_ns, WARM_TIMEOUT_NS))
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    # ---- runs ----

    def bind(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> SlotRun | StagedRun:
        """A run over one slot. Costs a capture (milliseconds); ``release`` of the run gives its pages and graph back.

        Raises ``DeviceFailure``.
        """
        held: list[RegisteredRange] = []
        pairs: list[tuple[TensorSpec, Tensor]] = []
        moves: list[tuple[int, int, int]] = []
        before = 0  # how many of them are of inputs
        try:
            for place, (spec, tensor) in enumerate(zip(self._tensors, (*inputs, *outputs), strict=True)):
                size = max(1, size_bytes(spec.dtype, tensor.dims))
                pages = self._registered(tensor, size) if tensor.shared else None
                if pages is not None:
                    held.append(pages)
                    pairs.append((spec, tensor))
                    continue
                # Any memory: it goes through pinned memory of ours.
                staging = self.ranges.adopt(self._device.allocate_host(size))
                held.append(staging)
                pairs.append((spec, Tensor(staging.start, tensor.dims, shared=False)))
                into = place < len(inputs)
                before += into
                moves.append((staging.start, tensor.address, size) if into else (tensor.address, staging.start, size))
            work = self._slot_in_place(pairs, held) if self._in_place else self._slot_by_copies(pairs)
            run = SlotRun(self, held, work, *self._capture(work))
            return StagedRun(run, moves, before) if moves else run
        except DeviceFault as fault:
            self.let_go(held)
            raise DeviceFailure(fault) from fault
        except BaseException:
            self.let_go(held)
            raise

    def _registered(self, tensor: Tensor, size: int) -> RegisteredRange | None:
        """Its pages, where the device reaches them; None where the driver will not have them, which is noted."""
        try:
            return self.ranges.hold(tensor.address, size)
        except DeviceFault as fault:
            if fault.kind not in NOT_REGISTERED:
                raise
            self.note(f"the memory of lanes can't be registered ({fault}): each job is copied once more, by the CPU")
            return None

    def let_go(self, held: list[RegisteredRange]) -> None:
        for one in held:
            self.ranges.release(one)

    def _slot_by_copies(self, pairs: list[tuple[TensorSpec, Tensor]]) -> Work:
        context, count = self._batch_context(1), len(self.spec.inputs)
        copies = [(self._buffers[s.name].address, t.address, size_bytes(s.dtype, t.dims)) for s, t in pairs]

        def work() -> None:
            for buffer, slot, size in copies[:count]:
                if size:
                    self.stream.copy(buffer, slot, size)
            self.enqueue(context)
            for buffer, slot, size in copies[count:]:
                if size:
                    self.stream.copy(slot, buffer, size)

        return work

    def _slot_in_place(self, pairs: list[tuple[TensorSpec, Tensor]], held: list[RegisteredRange]) -> Work:
        addresses: dict[str, int] = {}
        before: list[tuple[int, int, int]] = []
        after: list[tuple[int, int, int]] = []
        count = len(self.spec.inputs)
        for index, ((spec, tensor), registered) in enumerate(zip(pairs, held, strict=True)):
            there = registered.device_address(tensor.address)
            addresses[spec.name] = there
            if tensor.shared and not spec.bindable:
                buffer, size = self._buffers[spec.name].address, size_bytes(spec.dtype, tensor.dims)
                addresses[spec.name] = buffer
                if index < count:
                    before.append((buffer, there, size))
                else:
                    after.append((there, buffer, size))
        # A context's first run allocates, which can't be captured. It runs on the buffers: the slot is the client's.
        context = self._context(
            {s.name: t.dims for s, t in pairs[:count]}, {n: b.address for n, b in self._buffers.items()}
        )
        self.enqueue(context)
        self.stream.synchronize(max(self._timeout_ns, WARM_TIMEOUT_NS))
        self._point(context, addresses)

        def work() -> None:
            for to, source, size in before:
                self.copy(to, source, size)
            self.enqueue(context)
            for to, source, size in after:
                self.copy(to, source, size)

        return work

    def _capture(self, work: Work) -> tuple[Work, CudaGraph | None]:
        """(what runs it and waits, raising ``_cuda.Error``; its graph)."""
        graph = self.captured(work, self._timeout_ns) if self.captures else None
        if graph is not None:
            return graph.launch, graph

        def plainly() -> None:
            work()
            self.stream.finish(self._timeout_ns)

        return plainly, None

    def captured(self, work: Work, timeout_ns: int, *, by_flag: bool = True) -> CudaGraph | None:
        """``work`` as a graph; None where it can't be one, which is noted. Raises what has other reasons."""
        try:
            return self.stream.capture(work, timeout_ns=timeout_ns, by_flag=by_flag)
        except (DeviceFault, EngineFailure) as fault:
            if fault.sticky or fault.kind not in _NO_GRAPH:
                raise
            self.note(f"not captured into a graph ({fault}): its work is enqueued anew for each run")
            return None

    def note(self, text: str) -> None:
        """Something that whoever runs this should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        """At shapes of its own: enqueued, not captured. Never builds anything."""
        try:
            return self._run_shaped(inputs, outputs)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def _run_shaped(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Shapes, bool]:
        if 0 not in self._contexts:
            dims = {t.name: t.dims for t in self.spec.inputs}
            addresses = {n: b.address for n, b in self._buffers.items()}
            self._contexts[0] = self._context(dims, addresses, shapes_vary=True)
        context = self._contexts[0]
        self._shape(context, {s.name: t.dims for s, t in zip(self.spec.inputs, inputs, strict=True)})
        actual: list[tuple[int, ...]] = []
        for spec, tensor in zip(self.spec.outputs, outputs, strict=True):
            found = tuple(int(d) for d in context.get_tensor_shape(spec.name))
            room = size_bytes(spec.dtype, tensor.dims)
            if -1 in found or len(found) != len(tensor.dims) or size_bytes(spec.dtype, found) > room:
                raise EngineFailure(
                    f"output {spec.name!r} does not fit: found shape {list(found)}, room for {list(tensor.dims)}"
                )
            actual.append(found)
        for spec, tensor in zip(self.spec.inputs, inputs, strict=True):
            self.copy(self._buffers[spec.name].address, tensor.address, size_bytes(spec.dtype, tensor.dims))
        self.enqueue(context)
        for spec, tensor, found in zip(self.spec.outputs, outputs, actual, strict=True):
            self.copy(tensor.address, self._buffers[spec.name].address, size_bytes(spec.dtype, found))
        self.stream.finish(max(self._timeout_ns, RUN_TIMEOUT_NS))
        return tuple(actual), False

    def copy(self, target: int, source: int, size: int) -> None:
        if size:
            self.stream.copy(target, source, size)

    def batch(self, size: int) -> BatchRun:
        """Raises ``DeviceFailure``."""
        if not 1 <= size <= self.spec.max_batch:
            raise ValueError(f"batch of {size} on model {self.spec.model!r}: allowed 1 to {self.spec.max_batch}")
        try:
            # A batch takes longer than the one job that the time-out is for.
            timeout_ns = self._timeout_ns if size == 1 else max(self._timeout_ns, RUN_TIMEOUT_NS)
            return BatchRun(self, size, self._batch_context(size), self._buffers, self._device, timeout_ns)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        """Waits for what runs, if the device still answers, and gives everything back, the engine's weights too."""
        self._contexts.clear()
        self._engine = self._runtime = None
        for thing in reversed(self._open):
            try:
                thing.close()
            except DeviceFault as fault:
                if not fault.sticky:  # a broken context takes everything with it
                    raise
        self._open.clear()
