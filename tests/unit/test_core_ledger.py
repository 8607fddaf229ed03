"""What a successor makes of the ledger, whatever instruction its predecessor died at."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
from collections.abc import Iterator

import pytest

from taktd.ipc import _core
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon

# ledger.c: one page, then per lane 64 bytes and 64 slots of 128 bytes
LANE = 4096
SUBMIT_HEAD, NEXT_SEQUENCE, COMPLETION_TAIL = LANE + 8, LANE + 16, LANE + 24
SUBMITTED, ANSWERED = LANE + 48, LANE + 56
SLOTS, SLOT_BYTES = LANE + 64, 128
FREE, TAKEN, DONE = 0, 1, 2


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    it = Daemon(lanes=1)
    yield it
    it.close()


class Pages:
    """Bytes of the ledger and of the lane, to be put back piece by piece."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.ledger = mmap.mmap(daemon.ledger, os.fstat(daemon.ledger).st_size)
        self.lane = daemon.clients[0].map
        self.stats = mmap.mmap(daemon.stats, os.fstat(daemon.stats).st_size)

    def take(self) -> tuple[bytes, bytes, bytes]:
        return bytes(self.ledger), bytes(self.lane), bytes(self.stats)


def apply(target: mmap.mmap, after: bytes, at: int, size: int) -> None:
    target[at : at + size] = after[at : at + size]


def cursor_at(client: raw.RawLane, cursor: int) -> int:
    return int(client.header["cursors_offset"] + cursor)


@pytest.mark.parametrize("step", range(7))
def test_completion_is_published_and_counted_exactly_once(daemon: Daemon, step: int) -> None:
    """Dies after `step` of: image, DONE, ring entry, shared tail, ledger's tail, statistics, FREE."""
    client = daemon.add()
    pages = Pages(daemon)
    client.submit()
    daemon.server.poll(10)
    client.submit()
    [job] = daemon.server.poll(20)
    daemon.server.begin(0, job[2], 30)
    before = pages.take()
    daemon.server.complete(0, job[2], raw.OK, 0, 1, 0, 0, 40)
    after = pages.take()
    slot = SLOTS + job[2] * SLOT_BYTES
    stores = [
        lambda: (apply(pages.ledger, after[0], slot + 56, 72), apply(pages.ledger, after[0], ANSWERED, 8)),  # image
        lambda: pages.ledger.__setitem__(slice(slot, slot + 4), struct.pack("<I", DONE)),
        lambda: apply(pages.lane, after[1], client.header["completion_ring_offset"], 64),
        lambda: apply(pages.lane, after[1], cursor_at(client, raw.COMPLETION_TAIL), 8),
        lambda: apply(pages.ledger, after[0], COMPLETION_TAIL, 8),
        lambda: apply(pages.stats, after[2], 0, len(after[2])),
        lambda: apply(pages.ledger, after[0], slot, 4),
    ]
    daemon.die()
    pages.ledger[:] = before[0]
    client.words[:] = memoryview(before[1]).cast("Q")
    pages.stats[:] = before[2]
    for store in stores[: step + 1]:
        store()
    daemon.succeed()
    left = [(seq, slot) for seq, slot, _, _ in daemon.server.unfinished(0)]
    assert left == ([(1, 0), (2, 1)] if step == 0 else [(1, 0)])
    for _, slot_number in left:
        daemon.server.complete(0, slot_number, raw.OK, 0, 2, 0, 0, 50)
    done = client.completions()
    assert sorted(d["sequence"] for d in done) == [1, 2]
    assert {d["sequence"]: d["area"] for d in done} == {1: 1, 2: 1 if step == 0 else 0}
    counted = daemon.count()
    assert (counted["submitted"], counted["ok"], counted["run_us"]["count"]) == (2, 2, 1)
    client.submit()
    assert [job[1] for job in daemon.server.poll(60)] == [3]


@pytest.mark.parametrize("step", range(6))
def test_submission_is_taken_and_counted_exactly_once(daemon: Daemon, step: int) -> None:
    """Dies after `step` of: slot TAKEN, next sequence, statistics, ledger's head, shared head."""
    client = daemon.add()
    pages = Pages(daemon)
    client.submit()
    daemon.server.poll(10)
    client.submit()
    before = pages.take()
    daemon.server.poll(20)
    after = pages.take()
    slot = SLOTS + SLOT_BYTES
    stores = [
        lambda: (apply(pages.ledger, after[0], SUBMITTED, 8), apply(pages.ledger, after[0], slot, SLOT_BYTES)),
        lambda: apply(pages.ledger, after[0], NEXT_SEQUENCE, 8),
        lambda: apply(pages.stats, after[2], 0, len(after[2])),
        lambda: apply(pages.ledger, after[0], SUBMIT_HEAD, 8),
        lambda: apply(pages.lane, after[1], cursor_at(client, raw.SUBMIT_HEAD), 8),
    ]
    daemon.die()
    pages.ledger[:] = before[0]
    client.words[:] = memoryview(before[1]).cast("Q")
    pages.stats[:] = before[2]
    for store in stores[:step]:
        store()
    daemon.succeed()
    known = [seq for seq, *_ in daemon.server.unfinished(0)] + [job[1] for job in daemon.server.poll(30)]
    assert known == [1, 2]
    assert client.u64(raw.SUBMIT_HEAD) == 2
    assert daemon.count()["submitted"] == 2
    for slot_number in (0, 1):
        daemon.server.complete(0, slot_number, raw.OK, 0, 2, 0, 0, 40)
    assert [d["sequence"] for d in client.completions()] == [1, 2]


def test_unfinished_job_keeps_its_times(daemon: Daemon) -> None:
    client = daemon.add()
    base = _core.now()
    daemon.server.poll(base)
    client.submit(submitted_ns=base + 10, deadline_ns=base + 500)
    client.submit(submitted_ns=base + 10)
    daemon.server.poll(base + 20)
    daemon.server.begin(0, 1, base + 30, base + 77)
    daemon.die()
    daemon.succeed()
    assert daemon.server.unfinished(0) == [(1, 0, base + 500, base + 10), (2, 1, base + 77, base + 10)]
    assert daemon.server.remove(0, raw.LOST) == 2


def test_entries_that_waited_for_the_successor_keep_their_release(daemon: Daemon) -> None:
    client = daemon.add()
    base = _core.now()
    daemon.server.poll(base)
    client.submit(submitted_ns=base + 10)
    daemon.server.poll(base + 20)
    daemon.die()
    client.submit(submitted_ns=base + 40)
    client.submit(submitted_ns=1)
    daemon.succeed()
    assert [job[4] for job in daemon.server.poll(base + 100)] == [base + 40, base + 10]


def serve_for_ever(daemon: Daemon) -> None:
    """The child: an executor that does nothing but take, begin and complete."""
    daemon.succeed(area=0)
    for _, slot, _, _ in daemon.server.unfinished(0):
        daemon.server.complete(0, slot, raw.OK, 0, 1, 0, 0, _core.now())
    while True:
        daemon.server.wait(0, 0)
        for _, _, slot, *_ in daemon.server.poll(_core.now()):
            daemon.server.begin(0, slot, _core.now())
            daemon.server.complete(0, slot, raw.OK, 0, 1, 0, 0, _core.now())


def test_nothing_is_lost_or_doubled_over_many_deaths(daemon: Daemon) -> None:
    """FAULTS 4 for the core: SIGKILL at random points; each sequence number completes once, in the lane's order."""
    client = daemon.add()
    daemon.die()
    chance = random.Random(20)
    seen: list[int] = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            try:
                serve_for_ever(daemon)
            finally:
                os._exit(1)
        goal = len(seen) + chance.randrange(1, 200)
        until = _core.now() + 10**10
        while len(seen) < goal and _core.now() < until:
            while client.sequence - len(seen) < 3:
                client.submit(submitted_ns=_core.now())
            client.ring_if_asked()
            os.sched_yield()
            seen += [d["sequence"] for d in client.completions()]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(seen) >= goal
    daemon.succeed()
    daemon.server.poll(_core.now())
    daemon.server.remove(0, raw.LOST)
    seen += [d["sequence"] for d in client.completions() if d["sequence"]]
    assert seen == list(range(1, client.sequence + 1))
