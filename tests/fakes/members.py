"""Executors that share one ledger, each a real process that can be killed or stopped at any instruction.

The processes are forks of the test: they take, begin and complete jobs and know nothing of engines or schedules.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass, field

from taktd.ipc import _core
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon, RawLane

WOKE_SUCCESSION = 16
PATIENCE_S = 30
CALM_NS = 20_000_000_000  # a hang that no test waits for


@dataclass
class Behaviour:
    """What a member does besides serving."""

    hang_after_ns: int = CALM_NS
    run_ns: int = 0  # how long its engine takes
    budget_ns: int = 0
    dies_in_takeover: bool = False  # after the first lane


@dataclass
class Member:
    """One of the processes, as the test sees it."""

    number: int
    pid: int
    pidfd: int
    news: int  # reading end: a line per event
    status: int | None = None
    heard: bytes = b""

    def hear(self, patience_s: float = PATIENCE_S) -> str | None:
        """Its next event: "ready", or what its successions() said. None: nothing in that time, or it is dead."""
        while b"\n" not in self.heard:
            if not select.select([self.news], [], [], patience_s)[0]:
                return None
            more = os.read(self.news, 4096)
            if not more:
                return None
            self.heard += more
        line, _, self.heard = self.heard.partition(b"\n")
        return line.decode()

    def kill(self, number: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def await_end(self) -> int:
        """The signal that ended it."""
        if self.status is None:
            assert select.select([self.pidfd], [], [], PATIENCE_S)[0], f"member {self.number} lives on"
            _, self.status = os.waitpid(self.pid, 0)
        return os.WTERMSIG(self.status)


@dataclass
class Members:
    """The ledger of one `Daemon`, whose lanes were added before, and those who take turns at it."""

    daemon: Daemon
    all: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.daemon.die()

    def start(self, behaviour: Behaviour | None = None) -> Member:
        """A new member, ready: its lanes are mapped, it waits for its turn."""
        reader, writer = os.pipe()
        number = len(self.all) + 1
        pid = os.fork()
        if pid == 0:
            try:
                self._serve(number, writer, behaviour or Behaviour())
            finally:
                os._exit(1)
        os.close(writer)
        member = Member(number, pid, os.pidfd_open(pid), reader)
        self.all.append(member)
        assert member.hear() == "ready"
        return member

    def appoint(self, member: Member) -> None:
        _core.succession_set(self.daemon.ledger, member.number)

    def state(self) -> _core.Succession:
        return _core.succession_state(self.daemon.ledger)

    def close(self) -> None:
        for member in self.all:
            if member.status is None:
                with contextlib.suppress(ProcessLookupError):
                    member.kill()
                member.await_end()
            os.close(member.pidfd)
            os.close(member.news)
        self.daemon.close()

    # ---- in the child ----

    def _serve(self, number: int, writer: int, behaviour: Behaviour) -> None:
        daemon = self.daemon
        server = daemon.server = _core.Server(daemon.ledger, daemon.stats, daemon.journal, -1)
        for lane in daemon.layouts:
            memfd, wake = (os.dup(fd) for fd in daemon.ends[lane])
            server.add(lane, memfd, wake, daemon.layouts[lane], lane, area=number % 2, recover=True, dormant=True)
            server.set_budget(lane, behaviour.budget_ns)
        server.join(0, number, 0, [], behaviour.hang_after_ns)
        for other in self.all:
            if other.status is None:
                server.set_pidfd(0, other.number, os.dup(other.pidfd))
        os.write(writer, b"ready\n")
        while True:
            if server.wait(0, 0) & WOKE_SUCCESSION:
                for _, what in server.successions():
                    if what == "asked":
                        server.hand_over(0)
                    else:
                        self._take_over(server, behaviour)
                    os.write(writer, what.encode() + b"\n")
            for lane, _, slot, *_ in server.poll(_core.now()):
                run(server, lane, slot, behaviour)

    def _take_over(self, server: _core.Server, behaviour: Behaviour) -> None:
        for lane in self.daemon.layouts:
            server.activate(lane)
            if behaviour.dies_in_takeover:
                os.kill(os.getpid(), signal.SIGKILL)
            for _, slot, _, _ in sorted(server.unfinished(lane)):
                run(server, lane, slot, behaviour)


def run(server: _core.Server, lane: int, slot: int, behaviour: Behaviour) -> None:
    started_ns = _core.now()
    server.begin(lane, slot, started_ns)
    while _core.now() < started_ns + behaviour.run_ns:
        pass
    server.complete(lane, slot, raw.OK, 0, 1, 0, 0, server.end())


@dataclass
class Load:
    """A client that keeps some jobs in flight and writes down each completion."""

    client: RawLane
    in_flight: int = 3
    seen: list[int] = field(default_factory=list)
    areas: list[int] = field(default_factory=list)

    def collect(self) -> None:
        for done in self.client.completions():
            assert done["status"] == raw.OK
            self.seen.append(done["sequence"])
            self.areas.append(done["area"])

    def go(self, jobs: int) -> None:
        """Until that many more have completed."""
        goal = len(self.seen) + jobs
        until_ns = _core.now() + PATIENCE_S * 10**9
        while len(self.seen) < goal and _core.now() < until_ns:
            while self.client.sequence - len(self.seen) < self.in_flight:
                self.client.submit(submitted_ns=_core.now())
            self.client.ring_if_asked()
            os.sched_yield()
            self.collect()
        assert len(self.seen) >= goal, f"{len(self.seen)} of {self.client.sequence} jobs completed"

    def finish(self) -> None:
        """Until nothing is in flight; then each job has completed exactly once, in order."""
        until_ns = _core.now() + PATIENCE_S * 10**9
        while len(self.seen) < self.client.sequence and _core.now() < until_ns:
            self.client.ring_if_asked()
            os.sched_yield()
            self.collect()
        assert self.seen == list(range(1, self.client.sequence + 1))
