"""A process that ends before it is ready is started again and again, with pauses that grow, and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import psutil
import pytest

from taktd.daemon.supervision import kept_process
from taktd.daemon.supervision.kept_process import KeptProcess, State

FAILURES = 200
Callback = Callable[..., object]


class Failing(KeptProcess):
    """Its program ends at once, without a word."""

    module = "none"
    farewell: ClassVar[kept_process.Message] = {"op": "stop"}

    def __init__(self, failures: int) -> None:
        super().__init__("process x", {})
        self.pauses: list[float] = []
        self.enough = asyncio.Event()
        self.failures = failures

    def _began(self) -> None:
        self.send({"op": "configure"})

    def _take(self, message: kept_process.Message) -> None:
        raise AssertionError(message)

    def _died(self, was_ready: bool, why: str, pause_ns: int | None) -> None:
        assert not was_ready
        assert why == "exited with code 1"
        assert pause_ns is not None
        self.pauses.append(pause_ns / 1e9)
        if len(self.pauses) >= self.failures:
            self.enough.set()


class Hasty(asyncio.SelectorEventLoop):
    """Waits for nothing."""

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, **named: Any
    ) -> asyncio.TimerHandle:
        return super().call_later(0, callback, *args, **named)


def held() -> tuple[int, int, int]:
    gc.collect()
    process = psutil.Process()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(process.children())


def test_two_hundred_failing_starts_keep_their_back_off_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_process, "python_command", lambda module: ["/bin/false"])
    seen: list[tuple[int, int, int]] = []

    async def fail() -> Failing:
        process = Failing(FAILURES)
        seen.append(held())
        process.start()
        await process.enough.wait()
        assert (process.tries, process.restarts, process.state) == (FAILURES, FAILURES - 1, State.PAUSING)
        process.drain()
        await process.stopped.wait()
        seen.append(held())
        return process

    loop = Hasty()
    try:
        process = loop.run_until_complete(fail())
    finally:
        loop.close()
    assert process.pauses == [min(0.1 * 2**at, 10) for at in range(FAILURES)]
    assert seen[0] == seen[1]
