"""How long this thread has had no core although it wanted one: preempted, throttled, or stopped by a hypervisor."""

from __future__ import annotations

from taktd.ipc import _core

__all__ = ["Awake"]


class Awake:
    """Compares the clock with the thread's own one and with the time that its server has slept of its own will."""

    __slots__ = ("_cpu_ns", "_now_ns", "_server", "_slept_ns")

    def __init__(self, server: _core.Server) -> None:
        self._server = server
        self._now_ns = self._cpu_ns = self._slept_ns = 0
        self.away_ns()

    def away_ns(self) -> int:
        """ns without a core since the last call; two system calls' worth of work."""
        now_ns, cpu_ns, slept_ns = _core.now(), _core.thread_cpu_ns(), self._server.slept_ns()
        away_ns = now_ns - self._now_ns - (cpu_ns - self._cpu_ns) - (slept_ns - self._slept_ns)
        self._now_ns, self._cpu_ns, self._slept_ns = now_ns, cpu_ns, slept_ns
        return max(0, away_ns)
