"""A CUDA device: its primary context, memory, streams, captured graphs and launches.

One object per process and device. TensorRT, ONNX Runtime and pycuda use the same primary context. Nothing here knows of
jobs or models. ``probe`` (``taktd.drivers.cuda_probe``) comes first, in a process that may die.

Prior art and what was left out: pycuda has neither graphs nor stream priorities nor flags of the primary context, so
those come from our C module (``_cuda.c``). cuda-python would have everything but depends on the toolkit's libraries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from taktd.drivers import _cuda
from taktd.drivers.cuda_fault import HINTS, fault_of
from taktd.drivers.cuda_memory import CudaMemory, Freed, open_memory
from taktd.drivers.device import Identity
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["CudaBlock", "CudaDevice", "CudaGraph", "CudaHostBlock", "CudaStream", "load_driver", "translated"]

FLAG_BYTES: Final = 64  # a cache line for itself
UPLOAD_NS: Final = 30_000_000_000  # a graph's first way to the device may load code, whatever a run may take later


@contextmanager
def translated() -> Iterator[None]:
    """The driver's errors inside become ``DeviceFault``."""
    try:
        yield
    except _cuda.Error as error:
        raise fault_of(error) from error


def load_driver() -> None:
    """Opens libcuda.so.1 and initialises it. Raises ``DeviceFault``: DRIVER_MISSING, NO_DEVICE, DRIVER_MISMATCH, …"""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # else the fastest is 0, and nvidia-smi counts otherwise
    try:
        _cuda.load()
    except OSError as error:
        kind = FaultKind.DRIVER_MISSING
        raise DeviceFault(kind, f"no usable CUDA driver: {error}", hint=HINTS[kind]) from error
    with translated():
        _cuda.init()


class CudaBlock:
    """Device memory."""

    def __init__(self, address: int, size: int, free: Freed) -> None:
        self.address = address
        self.size = size
        self._free: Freed | None = free

    def close(self) -> None:
        free, self._free = self._free, None
        if free is not None:
            free()


class CudaHostBlock(CudaBlock):
    """Pinned or registered host memory."""

    def __init__(self, host_address: int, address: int, size: int, free: Freed) -> None:
        super().__init__(address, size, free)
        self.host_address = host_address


class CudaGraph:
    """A captured, instantiated list of work, bound to its stream. Called: launches it and waits for its end.

    ``completion``: "flag" (the graph's last node writes into pinned memory, which the host watches) or "event".
    """

    def __init__(self, stream: CudaStream, exec_: int, event: int, flag: CudaHostBlock | None, timeout_ns: int) -> None:
        self.completion = "flag" if flag else "event"
        self.exec = exec_
        self._event = event
        self._flag = flag
        self._stream = stream
        address = flag.host_address if flag else 0
        self.launch: Callable[[], None] = _cuda.Launch(exec_, stream.handle, event, address, timeout_ns)
        """Raises ``_cuda.Error``: the hot path translates it itself."""

    def close(self) -> None:
        if self.exec:
            with translated():
                _cuda.destroy_exec(self.exec)
                if self._event:
                    _cuda.destroy_event(self._event)
            if self._flag:
                self._flag.close()
            self.exec = 0


class CudaStream:
    """A stream that does not wait for the legacy default stream."""

    def __init__(self, device: CudaDevice, urgency: int) -> None:
        self._device = device
        least, greatest = _cuda.priority_range()  # a lower number is a higher priority
        self.handle = _cuda.create_stream(max(greatest, least - urgency))
        self._event = 0

    @property
    def priority(self) -> int:
        return _cuda.stream_priority(self.handle)

    def copy(self, target: int, source: int, size: int) -> None:
        with translated():
            _cuda.copy(target, source, size, self.handle)

    def fill(self, target: int, value: int, size: int) -> None:
        with translated():
            _cuda.fill(target, value, size, self.handle)

    def synchronize(self, timeout_ns: int) -> None:
        with translated():
            _cuda.synchronize(self.handle, timeout_ns)

    def capture(self, work: Callable[[], None], *, timeout_ns: int, by_flag: bool = True) -> CudaGraph:
        """What ``work`` puts on this stream, as a graph. Completion by flag where asked and supported, else by event.

        ``timeout_ns``: a launch that takes longer hangs.
        Raises ``DeviceFault`` (NOT_SUPPORTED if something in ``work`` can't be captured); the stream stays usable.
        """
        if by_flag and self._device.mem_ops:
            flag = self._device.allocate_host(FLAG_BYTES)
            try:
                return self._captured(work, timeout_ns, flag)
            except BaseException as error:
                flag.close()
                if not isinstance(error, DeviceFault) or error.sticky:
                    raise
                # The driver may not capture memory operations. If it is `work` that can't be captured, it fails again.
        return self._captured(work, timeout_ns, None)

    def _captured(self, work: Callable[[], None], timeout_ns: int, flag: CudaHostBlock | None) -> CudaGraph:
        with translated():
            _cuda.begin_capture(self.handle)
            try:
                work()
                if flag:
                    _cuda.write_value(self.handle, flag.address, 1)
            except BaseException:
                self._abandon_capture()
                raise
            graph = _cuda.end_capture(self.handle)
            try:
                exec_ = _cuda.instantiate(graph)
            finally:
                _cuda.destroy_graph(graph)
            _cuda.upload(exec_, self.handle)
            _cuda.synchronize(self.handle, max(timeout_ns, UPLOAD_NS))
            event = 0 if flag else _cuda.create_event(False)
        return CudaGraph(self, exec_, event, flag, timeout_ns)

    def _abandon_capture(self) -> None:
        try:
            _cuda.destroy_graph(_cuda.end_capture(self.handle))
        except _cuda.Error:
            pass  # an invalidated capture ends with an error, which is what was wanted

    def launch(self, graph: CudaGraph) -> None:
        """The graph as one piece of work among others on this stream."""
        with translated():
            _cuda.launch(graph.exec, self.handle)

    def finish(self, timeout_ns: int) -> None:
        """``synchronize``, spinning: for waits of microseconds."""
        with translated():
            if not self._event:
                self._event = _cuda.create_event(False)
            _cuda.finish(self._event, self.handle, timeout_ns)

    def timed(self, work: Callable[[], None], timeout_ns: int) -> int:
        """Runs ``work`` on this stream; how long the device took, in ns of its own clock."""
        with translated():
            start, end = _cuda.create_event(True), _cuda.create_event(True)
            try:
                _cuda.record(start, self.handle)
                work()
                _cuda.record(end, self.handle)
                _cuda.synchronize(self.handle, timeout_ns)
                return _cuda.elapsed_ns(start, end)
            finally:
                _cuda.destroy_event(start)
                _cuda.destroy_event(end)

    def close(self) -> None:
        if self.handle:
            with translated():
                if self._event:
                    _cuda.destroy_event(self._event)
                _cuda.destroy_stream(self.handle)
            self.handle = self._event = 0


class CudaDevice:
    """Device ``index`` of this process, its primary context current in the calling thread."""

    def __init__(self, index: int, memory: Callable[[int], CudaMemory] = open_memory) -> None:
        load_driver()
        self.index = index
        with translated():
            info = _cuda.device_info(index)
            version = _cuda.driver_version()
            self.context = _cuda.retain(index, True)
        try:
            self._memory = memory(index)
        except BaseException:
            _cuda.release(index)
            raise
        self.compute = (info["compute_major"], info["compute_minor"])
        self.pci = info["pci"]
        self.driver_version = version
        self.mem_ops = bool(info["mem_ops"])
        self.identity = Identity(
            "cuda",
            info["name"],
            info["uuid"],
            f"CUDA {version // 1000}.{version % 1000 // 10}, memory by {self._memory.source}",
            info["memory_bytes"],
            bool(info["integrated"] and info["map_host"]),
        )
        self._open = True

    def allocate(self, size: int) -> CudaBlock:
        address, free = self._memory.allocate(_checked(size))
        return CudaBlock(address, size, free)

    def allocate_host(self, size: int) -> CudaHostBlock:
        host, address, free = self._memory.allocate_pinned(_checked(size))
        return CudaHostBlock(host, address, size, free)

    def register(self, address: int, size: int) -> CudaHostBlock:
        def free() -> None:
            with translated():
                _cuda.unregister_host(address)

        with translated():
            _cuda.register_host(address, _checked(size))
            try:
                return CudaHostBlock(address, _cuda.device_address(address), size, free)
            except _cuda.Error:
                _cuda.unregister_host(address)
                raise

    def stream(self, urgency: int = 0) -> CudaStream:
        with translated():
            return CudaStream(self, urgency)

    def free_bytes(self) -> int:
        with translated():
            return _cuda.memory_info()[0]

    def close(self) -> None:
        if self._open:
            self._open = False
            self._memory.close()
            with translated():
                _cuda.release(self.index)


def _checked(size: int) -> int:
    if size < 1:
        raise DeviceFault(FaultKind.INVALID_USE, f"{size} bytes asked for: allowed 1 or more", hint="")
    return size
