"""One executor as a process: started, watched, started again. What it serves is lanes.py's business.

The supervisor holds everything that must outlive an executor (its lanes, ledger, statistics and journal), so that a
restart continues where the dead one stopped.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from taktd.daemon.execution.link import ExecutorLink
from taktd.daemon.logbook import log
from taktd.daemon.supervision.kept_process import Event, KeptProcess, Message, State

__all__ = ["ExecutorProcess", "Message", "Watcher"]


class Watcher(Protocol):
    """Who is told what happens to an executor."""

    def configure(self, executor: ExecutorProcess) -> tuple[Message, list[int]]:
        """The configure message and its descriptors, asked for at each start."""

    def received(self, executor: ExecutorProcess, message: Message) -> None:
        """Any message but `loaded`, `ready` and `failed`."""

    def loaded(self, executor: ExecutorProcess, message: Message) -> None:
        """It has loaded and measured, and waits for `serve`."""

    def became_ready(self, executor: ExecutorProcess) -> None: ...

    def died(self, executor: ExecutorProcess, was_ready: bool) -> None: ...


class ExecutorProcess(KeptProcess):
    """The process behind one device, over all its restarts."""

    module = "taktd.daemon.executor"
    farewell: ClassVar[Message] = {"op": "drain"}

    def __init__(self, device: str, watcher: Watcher) -> None:
        super().__init__(f"executor {device}", {"device": device})
        self.device = device
        self.watcher = watcher
        self.loaded_message: Message = {}
        self.awaits_device = False  # it ended because its device can't be used now

    def start(self) -> None:
        self.awaits_device = False
        super().start()

    def drain(self) -> None:
        """One that still loads has nothing to finish, and hears nothing while it does: it ends at once, and what it
        builds with it."""
        loading = self.state is State.STARTING and not self.loaded_message
        super().drain()
        if loading:
            self.kill()

    def _began(self) -> None:
        message, descriptors = self.watcher.configure(self)
        self.send(message, descriptors)

    def adopt(self, pid: int, pidfd: int, link: ExecutorLink, loaded: Message) -> None:
        """A process that another supervisor started, and that serves. pidfd and link are ours from now on."""
        self._step(Event.ADOPTED)
        self.stopped.clear()
        self.loaded_message = loaded
        self._watch(pid, pidfd, link)
        self.send({"op": "adopted"})
        # In this order: readiness makes others look for whom to admit, and it must not be told to serve once more.
        self.watcher.loaded(self, loaded)
        self.watcher.became_ready(self)

    def _died(self, was_ready: bool, why: str, pause_ns: int | None) -> None:
        self.loaded_message = {}
        if why:
            more: dict[str, Any] = {} if pause_ns is None else {"restart_in_ms": pause_ns // 1_000_000}
            log("error", f"executor {self.device} {why}", event="executor-died", device=self.device, **more)
        self.watcher.died(self, was_ready)

    def _take(self, message: Message) -> None:
        op = message.get("op")
        if op == "loaded":
            self.loaded_message = message
            self.watcher.loaded(self, message)
        elif op == "ready":
            if self._serves():
                self.watcher.became_ready(self)
        elif op == "failed":
            self._failure = f"can't serve: {message.get('error')}"
            self.awaits_device = bool(message.get("device"))
        else:
            self.watcher.received(self, message)
