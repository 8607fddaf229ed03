"""What a warm TensorRT engine hands out: the run of one slot, of memory that the device can't reach, of a batch.

Made by ``taktd.engines.tensorrt`` alone. Nothing here asks the library for anything but what was captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from taktd.drivers import _cuda
from taktd.drivers.cuda import CudaBlock, CudaDevice, CudaGraph
from taktd.drivers.cuda_fault import fault_of
from taktd.drivers.cuda_ranges import RegisteredRange
from taktd.drivers.fault import DeviceFault
from taktd.engines.errors import DeviceFailure
from taktd.engines.tensors import TensorSpec, size_bytes

if TYPE_CHECKING:
    from taktd.engines.tensorrt import WarmTensorRtEngine

__all__ = ["BatchRun", "SlotRun", "StagedRun", "Work", "batched"]

Work = Callable[[], None]


def batched(spec: TensorSpec, size: int) -> tuple[int, ...]:
    """The dimensions of ``size`` jobs at once."""
    return (spec.dims[0] * size, *spec.dims[1:]) if size > 1 else spec.dims


def _released() -> None:
    raise RuntimeError("a run was called after its release")


class SlotRun:
    """One slot's run, called once a job."""

    __slots__ = ("_engine", "_graph", "_held", "_launch", "_work")

    def __init__(
        self, engine: WarmTensorRtEngine, held: list[RegisteredRange], work: Work, launch: Work, graph: CudaGraph | None
    ) -> None:
        self._engine = engine
        self._held = held
        self._work = work  # holds the context: what was captured uses its memory
        self._launch = launch
        self._graph = graph

    @property
    def completion(self) -> str:
        """How its end is noticed: "flag" or "event" of its graph; "" where it is enqueued plainly."""
        return self._graph.completion if self._graph is not None else ""

    def __call__(self) -> None:
        try:
            self._launch()
        except _cuda.Error as error:
            raise DeviceFailure(fault_of(error)) from error
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        """Gives the graph and the slot's pages back; must come before the slot is unmapped."""
        held, self._held = self._held, []
        try:
            if self._graph is not None and held:
                self._graph.close()
            self._engine.let_go(held)
        except DeviceFault as fault:
            if not fault.sticky:
                raise
        finally:
            self._work = self._launch = _released  # and with it the context, which keeps the engine

    def __del__(self) -> None:
        try:
            self.close()
        except DeviceFault:
            pass  # the device is gone, and its pages with it


class StagedRun:
    """A run on memory that the device does not reach: for verifying, and for jobs where a driver registers no lanes."""

    def __init__(self, run: SlotRun, moves: list[tuple[int, int, int]], before: int) -> None:
        self._run = run
        self._before, self._after = moves[:before], moves[before:]

    @property
    def completion(self) -> str:
        """As of a `SlotRun`."""
        return self._run.completion

    def __call__(self) -> None:
        for target, source, size in self._before:
            ctypes.memmove(target, source, size)
        self._run()
        for target, source, size in self._after:
            ctypes.memmove(target, source, size)

    def close(self) -> None:
        self._run.close()


class BatchRun:
    """``size`` jobs in one run: each member is copied straight between its slot and its part of the buffers."""

    def __init__(
        self, engine: WarmTensorRtEngine, size: int, context: Any, buffers: dict[str, CudaBlock], device: CudaDevice,
        timeout_ns: int,
    ) -> None:  # fmt: skip
        spec = engine.spec
        self.size = size
        self._engine = engine
        self._timeout_ns = timeout_ns
        self._inputs = [(buffers[t.name].address, t.bytes) for t in spec.inputs]
        self._outputs = [(buffers[t.name].address, t.bytes) for t in spec.outputs]
        self._enqueue: Work = lambda: engine.enqueue(context)
        self._graph = graph = engine.captured(self._enqueue, timeout_ns, by_flag=False)
        if graph is not None:
            self._enqueue = lambda: engine.stream.launch(graph)
        room = [size_bytes(t.dtype, batched(t, size)) for t in (*spec.inputs, *spec.outputs)]
        self._private = [device.allocate_host(max(1, n)) for n in room]
        for block in self._private:
            ctypes.memset(block.host_address, 0, block.size)
        parts = [
            [b.host_address + i * t.bytes for b, t in zip(self._private, self._specs, strict=True)] for i in range(size)
        ]
        count = len(spec.inputs)
        self._own = [p[:count] for p in parts], [p[count:] for p in parts]

    @property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return (*self._engine.spec.inputs, *self._engine.spec.outputs)

    def run_bound(self) -> None:
        """With its copies, since those are part of what a batch costs."""
        self.run(*self._own)

    def run(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        copy = self._engine.copy
        try:
            for member, addresses in enumerate(inputs):
                for (buffer, size), address in zip(self._inputs, addresses, strict=True):
                    copy(buffer + member * size, address, size)
            self._enqueue()
            for member, addresses in enumerate(outputs):
                for (buffer, size), address in zip(self._outputs, addresses, strict=True):
                    copy(address, buffer + member * size, size)
            self._engine.stream.finish(self._timeout_ns)
        except DeviceFault as fault:
            raise DeviceFailure(fault) from fault

    def close(self) -> None:
        private, self._private = self._private, []
        try:
            if self._graph is not None and private:
                self._graph.close()
            for block in private:
                block.close()
        except DeviceFault as fault:
            if not fault.sticky:
                raise
        finally:
            self._enqueue = _released

    def __del__(self) -> None:
        try:
            self.close()
        except (AttributeError, DeviceFault):
            pass  # never finished, or the device is gone
