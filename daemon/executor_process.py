"""One executor as a process: started, watched, started again. What it serves is lanes.py's business.

The supervisor holds everything that must outlive an executor (its lanes, ledger, statistics and journal), so that a
restart continues where the dead one stopped. A pause before a restart grows only while the executor dies before it is
ready; one that had served is started again at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, Final, Protocol

from taktd.daemon.child_process import child_environment, python_command
from taktd.daemon.executor_link import ExecutorLink, LinkClosed
from taktd.daemon.logbook import log

PAUSE_FIRST_NS: Final = 100_000_000
PAUSE_NS_MAX: Final = 10_000_000_000
OUTBOX_MESSAGES_MAX: Final = 4096

Message = dict[str, Any]


class State(Enum):
    """Where an executor is in its life."""

    STOPPED = "stopped"  # not started, or ended on request
    STARTING = "starting"  # loads, warms, measures
    READY = "ready"  # serves
    PAUSING = "pausing"  # died, waits to be started again
    DRAINING = "draining"  # told to finish what is pending and exit


class Event(Enum):
    START = "start"
    ADOPTED = "adopted"  # it served before we did
    READY = "ready"
    DIED = "died"
    DRAIN = "drain"


#: What each event does in each state; a pair that is not here can't happen, and says so if it does.
TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.STOPPED, Event.START): State.STARTING,
    (State.STOPPED, Event.ADOPTED): State.READY,
    (State.STOPPED, Event.DRAIN): State.STOPPED,
    (State.STARTING, Event.READY): State.READY,
    (State.STARTING, Event.DIED): State.PAUSING,
    (State.STARTING, Event.DRAIN): State.DRAINING,
    (State.READY, Event.DIED): State.PAUSING,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.PAUSING, Event.START): State.STARTING,
    (State.PAUSING, Event.DRAIN): State.STOPPED,
    (State.DRAINING, Event.READY): State.DRAINING,
    (State.DRAINING, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.DIED): State.STOPPED,
}


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


class ExecutorProcess:
    """The process behind one device, over all its restarts. Belongs to the event loop's thread."""

    def __init__(self, device: str, watcher: Watcher) -> None:
        self.device = device
        self.watcher = watcher
        self.state = State.STOPPED
        self.restarts = 0
        self.tries = 0  # starts in a row that ended before it was ready
        self.error = ""  # why it is not ready, "" while it is
        self.keep = True  # it is started again when it dies
        self.loaded_message: Message = {}
        self.stopped = asyncio.Event()
        self.stopped.set()
        self._failure = ""  # what it said about its end
        self.awaits_device = False  # it ended because its device can't be used now
        self._process: subprocess.Popen[bytes] | None = None  # None also for one that another supervisor started
        self._pid: int | None = None
        self._pidfd = -1
        self._link: ExecutorLink | None = None
        self._outbox: deque[tuple[Message, list[int]]] = deque()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._pid

    @property
    def pidfd(self) -> int:
        """Refers to the process while it lives, -1 else. Stays ours."""
        return self._pidfd

    @property
    def restarting(self) -> bool:
        """It is dead and will be started again."""
        return self.state is State.PAUSING

    @property
    def failure(self) -> str:
        """What the executor itself said when it could not serve, "" if it died without a word."""
        return self._failure

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def _step(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    # ---- life ----

    def start(self) -> None:
        """Start the process and tell it what to serve."""
        self._pause = None
        self._failure, self.awaits_device = "", False
        self._step(Event.START)
        self.stopped.clear()
        link, theirs = ExecutorLink.pair()
        try:
            self._process = subprocess.Popen(
                [*python_command("taktd.daemon.executor"), "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), cwd="/",
                env=child_environment(os.environ),
                # Ctrl-C in a terminal is for the supervisor, which then drains the executors in order.
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            link.close()
            self._ended(f"can't be started: {error.strerror or error}")
            return
        finally:
            theirs.close()
        self._watch(self._process.pid, os.pidfd_open(self._process.pid), link)
        message, descriptors = self.watcher.configure(self)
        self.send(message, descriptors)

    def adopt(self, pid: int, pidfd: int, link: ExecutorLink, loaded: Message) -> None:
        """A process that another supervisor started, and that serves. pidfd and link are ours from now on."""
        self._step(Event.ADOPTED)
        self.stopped.clear()
        self.loaded_message = loaded
        self._watch(pid, pidfd, link)
        self.send({"op": "adopted"})
        self.watcher.became_ready(self)
        self.watcher.loaded(self, loaded)

    def _watch(self, pid: int, pidfd: int, link: ExecutorLink) -> None:
        self._pid, self._pidfd, self._link = pid, pidfd, link
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._exited)
        loop.add_reader(link.fileno(), self._readable)

    def drain(self) -> None:
        """Let it finish what is pending and exit; `stopped` is set when it is gone."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._step(Event.DRAIN)
        if self.state is State.STOPPED:
            self.stopped.set()
        else:
            self.send({"op": "drain"})

    def kill(self) -> None:
        """SIGKILL. Safe against a recycled pid: a pidfd never means another process."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self) -> None:
        """The pidfd fired: its memory is torn down, and nothing it did can change any more."""
        # What it said before it died is still in the socket.
        self._readable()
        how = "has ended"  # all that is known of a process that is not our child
        if self._process is not None:
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        self._close()
        self._ended(self._failure or how)

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._close_link()
        self._process = self._pid = None
        self.loaded_message = {}

    def _close_link(self) -> None:
        if self._link is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._link.fileno())
        loop.remove_writer(self._link.fileno())
        self._link.close()
        self._link = None
        while self._outbox:
            _close_all(self._outbox.popleft()[1])

    def _ended(self, why: str) -> None:
        was_ready = self.state is State.READY
        draining = self.state is State.DRAINING
        self._step(Event.DIED)
        self.error = "" if draining else why
        if draining:
            self.stopped.set()
        else:
            self.tries = 0 if was_ready else self.tries + 1
            if not self.keep:
                log("error", f"executor {self.device} {why}", event="executor-died", device=self.device)
                self._step(Event.DRAIN)
                self.stopped.set()
                self.watcher.died(self, was_ready)
                return
            pause_ns = 0 if was_ready else min(PAUSE_FIRST_NS << min(self.tries - 1, 20), PAUSE_NS_MAX)
            log(
                "error", f"executor {self.device} {why}", event="executor-died", device=self.device,
                restart_in_ms=pause_ns // 1_000_000,
            )  # fmt: skip
            self._pause = asyncio.get_running_loop().call_later(pause_ns / 1e9, self._again)
        self.watcher.died(self, was_ready)

    def _again(self) -> None:
        self.restarts += 1
        self.start()

    # ---- messages ----

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send, or keep until there is room. Descriptors stay the caller's. To a process that is gone: nothing."""
        if self._link is None:
            return
        if not self._outbox:
            try:
                self._link.send(message, descriptors)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._link.fileno(), self._writable)
            except LinkClosed:
                return  # the pidfd tells the rest
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            log("error", f"executor {self.device} does not listen; it is stopped", device=self.device, pid=self.pid)
            self.kill()
            return
        self._outbox.append((message, [os.dup(descriptor) for descriptor in descriptors]))

    def _writable(self) -> None:
        assert self._link is not None
        while self._outbox:
            message, descriptors = self._outbox[0]
            try:
                self._link.send(message, descriptors)
            except BlockingIOError:
                return
            except LinkClosed:
                break
            _close_all(self._outbox.popleft()[1])
        asyncio.get_running_loop().remove_writer(self._link.fileno())

    def hear(self) -> None:
        """Whatever it has said by now is known from here on."""
        self._readable()

    def _readable(self) -> None:
        while self._link is not None:
            try:
                received = self._link.receive()
            except LinkClosed:
                self._close_link()
                return
            if received is None:
                return
            message, descriptors = received
            _close_all(descriptors)  # an executor has none to give
            self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        op = message.get("op")
        if op == "loaded":
            self.loaded_message = message
            self.watcher.loaded(self, message)
        elif op == "ready":
            self._step(Event.READY)
            if self.state is State.READY:
                self.tries, self.error = 0, ""
                self.watcher.became_ready(self)
        elif op == "failed":
            self._failure = f"can't serve: {message.get('error')}"
            self.awaits_device = bool(message.get("device"))
        else:
            self.watcher.received(self, message)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
