"""A process that the supervisor keeps: started, told what to serve, watched, started again when it dies.

What an executor and the gateway have in common; what each serves is executor_process.py's and gateway_process.py's
business. A pause before a restart grows only while the process dies before it is ready; one that had served is started
again at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, ClassVar, Final

from taktd.daemon.child_process import child_environment, python_command
from taktd.daemon.execution.link import ExecutorLink, LinkClosed
from taktd.daemon.logbook import log

PAUSE_FIRST_NS: Final = 100_000_000
PAUSE_NS_MAX: Final = 10_000_000_000
OUTBOX_MESSAGES_MAX: Final = 4096

Message = dict[str, Any]


class State(Enum):
    """Where a process is in its life."""

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


class KeptProcess(ABC):
    """One process of ours over all its restarts. Belongs to the event loop's thread.

    A kind of process says its module, how it is asked to end, and what happens where a method here has no body.
    """

    module: ClassVar[str]
    farewell: ClassVar[Message]
    environment: ClassVar[Mapping[str, str]] = {}
    """Added to a child's usual one."""

    def __init__(self, name: str, fields: Mapping[str, str]) -> None:
        """name, fields: of its lines in the log."""
        self._name, self._fields = name, dict(fields)
        self.state = State.STOPPED
        self.restarts = 0
        self.tries = 0  # starts in a row that ended before it was ready
        self.error = ""  # why it is not ready, "" while it is
        self.keep = True  # it is started again when it dies
        self.stopped = asyncio.Event()
        self.stopped.set()
        self._failure = ""  # what it said about its end
        self._process: subprocess.Popen[bytes] | None = None  # None also for one that another supervisor started
        self._pid: int | None = None
        self._pidfd = -1
        self._link: ExecutorLink | None = None
        self._outbox: deque[tuple[Message, list[int]]] = deque()
        self._pause: asyncio.TimerHandle | None = None

    # ---- what each kind does ----

    @abstractmethod
    def _began(self) -> None:
        """It runs and waits to be told what to serve."""

    @abstractmethod
    def _take(self, message: Message) -> None:
        """It has said something."""

    @abstractmethod
    def _died(self, was_ready: bool, why: str, pause_ns: int | None) -> None:
        """It is gone. pause_ns: until it is started again; None: it is not, or not by us."""

    # ---- what is known of it ----

    @property
    def pid(self) -> int | None:
        """The process's id while it lives."""
        return self._pid

    @property
    def pidfd(self) -> int:
        """Refers to the process while it lives, -1 else. Stays ours."""
        return self._pidfd

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def restarting(self) -> bool:
        """It is dead and will be started again."""
        return self.state is State.PAUSING

    @property
    def failure(self) -> str:
        """What it said itself when it could not serve, "" if it died without a word."""
        return self._failure

    def _step(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    # ---- life ----

    def start(self) -> None:
        """Start the process and tell it what to serve."""
        self._pause = None
        self._failure = ""
        self._step(Event.START)
        self.stopped.clear()
        link, theirs = ExecutorLink.pair()
        try:
            self._process = subprocess.Popen(
                [*python_command(self.module), "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), cwd="/",
                env={**child_environment(os.environ), **self.environment},
                # Ctrl-C in a terminal is for the supervisor, which then ends its children in order.
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            link.close()
            self._ended(f"can't be started: {error.strerror or error}")
            return
        finally:
            theirs.close()
        self._watch(self._process.pid, os.pidfd_open(self._process.pid), link)
        self._began()

    def _watch(self, pid: int, pidfd: int, link: ExecutorLink) -> None:
        self._pid, self._pidfd, self._link = pid, pidfd, link
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, self._exited)
        loop.add_reader(link.fileno(), self.hear)

    def drain(self) -> None:
        """Let it finish what is pending and exit; `stopped` is set when it is gone."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._step(Event.DRAIN)
        if self.state is State.STOPPED:
            self.stopped.set()
        else:
            self.send(self.farewell)

    def kill(self) -> None:
        """SIGKILL. Safe against a recycled pid: a pidfd never means another process."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _exited(self) -> None:
        """The pidfd fired: its memory is torn down, and nothing it did can change any more."""
        # What it said before it died is still in the socket.
        self.hear()
        how = "has ended"  # all that is known of a process that is not our child
        if self._process is not None:
            code = self._process.wait()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd, self._process, self._pid = -1, None, None
        self._close_link()
        self._ended(self._failure or how)

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
        was_ready, draining = self.state is State.READY, self.state is State.DRAINING
        pause_ns = None
        self._step(Event.DIED)
        self.error = "" if draining else why
        if not draining:
            self.tries = 0 if was_ready else self.tries + 1
            if self.keep:
                pause_ns = 0 if was_ready else min(PAUSE_FIRST_NS << min(self.tries - 1, 20), PAUSE_NS_MAX)
                self._pause = asyncio.get_running_loop().call_later(pause_ns / 1e9, self._again)
            else:
                self._step(Event.DRAIN)
        if pause_ns is None:
            self.stopped.set()
        self._died(was_ready, self.error, pause_ns)

    def _again(self) -> None:
        self.restarts += 1
        self.start()

    def _serves(self) -> bool:
        """It has said that it serves; False where it is to end all the same."""
        self._step(Event.READY)
        if self.state is not State.READY:
            return False
        self.tries, self.error = 0, ""
        return True

    # ---- messages ----

    def send(self, message: Message, descriptors: Sequence[int] = (), *, may_drop: bool = False) -> None:
        """Send, or keep until there is room (may_drop: or not). Descriptors stay the caller's. To nobody: nothing."""
        if self._link is None:
            return
        if not self._outbox:
            try:
                self._link.send(message, descriptors)
                return
            except LinkClosed:
                return  # the pidfd tells the rest
            except BlockingIOError:
                if may_drop:
                    return
                asyncio.get_running_loop().add_writer(self._link.fileno(), self._writable)
        if may_drop:
            return
        if len(self._outbox) >= OUTBOX_MESSAGES_MAX:
            log("error", f"{self._name} does not listen; it is ended", pid=self.pid, **self._fields)
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
        while self._link is not None:
            try:
                received = self._link.receive()
            except LinkClosed:
                self._close_link()
                return
            if received is None:
                return
            message, descriptors = received
            _close_all(descriptors)  # it has none to give
            self._take(message)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
