"""`python -m taktd.daemon.gateway`: the process that speaks gRPC and ZeroMQ; for the executors one more lane client.

Started and watched by the supervisor (gateway_process.py), which tells it over one inherited socket what to serve; when
that socket ends it ends too. It can be flooded, crash and restart: control loops have their own lanes and don't notice.

Messages from the supervisor: `configure` (addresses, limits), `model` for each model (with its statistics page), and
again when it is another version, `model.gone`, `unloaded` (what a gateway before this one was told by its clients),
`serve`, `state` whenever readiness changes, `stop`. To it: `ready` with the doors, `failed`, `counters` each second.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import uvloop

from taktd.daemon.execution.link import ExecutorLink, LinkClosed
from taktd.daemon.front_doors.lane_backend import LaneBackend
from taktd.daemon.front_doors.listeners import DoorRefused, Doors
from taktd.daemon.front_doors.memory_guard import LOOK_S, MemoryGuard
from taktd.daemon.front_doors.version_change import activate
from taktd.daemon.health.loop_tap import LoopTap
from taktd.daemon.limits import Charges
from taktd.daemon.own_process import resident_bytes, threads
from taktd.ipc.client import Lane, Node, connect
from taktd.ipc.errors import TaktError
from taktd.ipc.inference import Model, TensorSpec

COUNTERS_S: Final = 1.0
OPEN_S_MAX: Final = 2.0
ATTACH_US_MAX: Final = 2_000_000
CONNECT_US_MAX: Final = 5_000_000
EXIT_FAILED: Final = 3
HUNG_UP: Final = (errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)

if TYPE_CHECKING:
    from taktd.daemon.config.configuration import Limits

Message = dict[str, Any]


def limits_from(numbers: dict[str, int]) -> Limits:
    """What the supervisor's configuration said, already judged there."""
    return cast("Limits", SimpleNamespace(**numbers))


def model_from(told: Message) -> Model:
    """A model as the supervisor describes it."""
    sides = [
        tuple(TensorSpec(t["name"], t["dtype"], tuple(t["dims"]), tuple(t["open"])) for t in told[side])
        for side in ("inputs", "outputs")
    ]
    return Model(
        told["name"], told["version"], told["platform"], sides[0], sides[1], told["dynamic"], told["max_batch"],
        tuple(told["preferred"]), told["max_delay_ns"],
    )  # fmt: skip


def keep_off(cores: list[int]) -> bool:
    """Leave the executors' cores to them, where there are others. Whether no executor can be on ours."""
    others = os.sched_getaffinity(0) - set(cores)
    if others and cores:
        # All threads there are, gRPC's too; later ones inherit it.
        for thread in threads():
            with suppress(OSError):
                os.sched_setaffinity(thread, others)
    return bool(others and cores)


class Gateway:
    """One run, from `configure` to the end of the link."""

    def __init__(self, link: ExecutorLink) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._opened = asyncio.Event()  # the doors are open, or can't be opened
        self._attacher = ThreadPoolExecutor(1, "attach")  # attaching waits; one at a time
        self._changer = ThreadPoolExecutor(1, "change")
        self._node: Node | None = None
        self._lanes_path = ""
        self._backend: LaneBackend | None = None
        self._doors: Doors | None = None
        self._taps: dict[str, LoopTap] = {}
        self._node_name = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = False

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        self._loop.add_reader(self._link.fileno(), self._readable)
        await self._stop.wait()
        self._loop.remove_reader(self._link.fileno())
        if self._tasks:
            # gRPC's start can't be cancelled: its own threads would find their futures gone.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._opened.wait(), OPEN_S_MAX)
        for task in self._tasks:
            task.cancel()
        for tap in self._taps.values():
            tap.close()
        if self._doors is not None:
            await self._doors.close()
        if self._backend is not None:
            self._backend.close()
        for waits in (self._attacher, self._changer):
            waits.shutdown(wait=False, cancel_futures=True)
        if self._node is not None:
            self._node.close()
        return EXIT_FAILED if self.failed else 0

    # ---- the supervisor ----

    def _readable(self) -> None:
        while not self._stop.is_set():
            try:
                received = self._link.receive()
            except LinkClosed:
                self._stop.set()
                return
            if received is None:
                return
            self._take(*received)

    def _take(self, message: Message, descriptors: list[int]) -> None:
        op = message["op"]
        if op == "configure":
            self._configure(message)
        elif op == "model" and self._backend is not None:
            self._backend.add(model_from(message), (descriptors[0], message["block"]), message["uids"], message["gids"])
        elif op == "unloaded" and self._backend is not None:
            self._backend.set_unloaded(message["names"])
        elif op == "model.gone" and self._backend is not None:
            self._backend.remove(message["name"])
        elif op == "serve":
            task = self._loop.create_task(self._serve())
            self._tasks.add(task)
        elif op == "state" and self._backend is not None:
            self._backend.set_state(message["ready"], message["reasons"])
        elif op == "lane" and self._doors is not None:
            self._tap(message, descriptors[0])
        elif op == "event" and self._doors is not None:
            self._doors.publish(message["topic"], message["event"])
        elif op == "stop":
            self._stop.set()

    def _tap(self, message: Message, memfd: int) -> None:
        """The lane that a loop with `publish: true` has now."""
        assert self._doors is not None
        if old := self._taps.pop(message["loop"], None):
            old.close()
        node, publish = self._node_name, self._doors.publish

        def complete(topic: str, event: Message, tensors: list[bytes]) -> None:
            publish(topic, {"node": node, **event}, tensors)

        self._taps[message["loop"]] = LoopTap(message["loop"], message["layout"], memfd, complete)

    def _say(self, message: Message) -> None:
        try:
            self._link.send(message)
        except (LinkClosed, BlockingIOError):
            pass  # it is gone, which the reader notices; or busy, then it gets the next one

    def _configure(self, message: Message) -> None:
        apart = keep_off(message["executor_cores"])
        limits = limits_from(message["limits"])
        self._node_name = message["node"]
        self._lanes_path = message["lanes"]
        self._backend = LaneBackend(
            message["node"],
            message["version"],
            Charges(limits),
            limits.gateway_lanes,
            self._attach,
            spins=apart,
            activate=self._activate,
        )
        self._doors = Doors(self._backend, message, limits)
        self._runtime = Path(message["runtime"])

    async def _activate(self, model: str, version: int) -> None:
        """As taktctl model activate; in a thread of its own, since it takes as long as loading an engine."""
        await self._loop.run_in_executor(self._changer, activate, self._runtime, model, version)

    async def _serve(self) -> None:
        assert self._doors is not None
        assert self._backend is not None
        try:
            doors = await self._doors.open()
        except DoorRefused as refused:
            self._say({"op": "failed", "error": str(refused)})
            self.failed = True
            self._stop.set()
            return
        finally:
            self._opened.set()
        self._say({"op": "ready", "doors": doors})
        self._guard(MemoryGuard(self._backend.charges.limits, resident_bytes()))
        changed = self._backend.changed
        while True:
            changed.clear()
            self._say({"op": "counters", **self._counters()})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), COUNTERS_S)

    def _guard(self, guard: MemoryGuard) -> None:
        if complaint := guard.complaint():
            self._say({"op": "failed", "error": complaint})
            os._exit(EXIT_FAILED)
        self._loop.call_later(LOOK_S, self._guard, guard)

    def _counters(self) -> Message:
        assert self._backend is not None
        assert self._doors is not None
        left_out = sum(tap.left_out for tap in self._taps.values())
        counters = {**self._backend.counters(), **self._doors.counters()}
        return {**counters, "completions_left_out": left_out, "rss_bytes": resident_bytes()}

    # ---- lanes ----

    async def _attach(self, model: str) -> Lane:
        """A lane of the model; taken in a thread, since it waits for the executor."""
        return await self._loop.run_in_executor(self._attacher, self._attach_now, model)

    def _attach_now(self, model: str) -> Lane:
        for last in (False, True):
            try:
                if self._node is None:
                    self._node = connect(self._lanes_path, timeout_us=CONNECT_US_MAX)
                return self._node.attach(model, wait="block", kind="model", timeout_us=ATTACH_US_MAX)
            except TaktError as error:
                # A connection to a supervisor that is gone; its successor has another one. Not for an executor that is
                # not ready: the lanes that there are live on this connection.
                if last or error.errno not in HUNG_UP:
                    raise
                if self._node is not None:
                    self._node.close()
                self._node = None
        raise AssertionError("unreachable")


async def _run(descriptor: int) -> int:
    link = ExecutorLink(socket.socket(fileno=descriptor))
    return await Gateway(link).run()


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="taktd.daemon.gateway", description="Started by taktd, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    code = uvloop.run(_run(parser.parse_args().control_fd))
    sys.stdout.flush()
    # gRPC's own threads have nothing left to do; waiting for them would only delay the end.
    os._exit(code)


if __name__ == "__main__":
    main()
