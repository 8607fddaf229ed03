"""Statistics page and journal: one writer, one reader in another process, no lock."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taktd.ipc import _core
from taktd.ipc.stats import percentile
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon

RECORD = struct.Struct("<QHHIQQQ")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    it = Daemon()
    yield it
    it.close()


def run(daemon: Daemon, client: raw.RawLane, queue_ns: int, run_ns: int, **verdict: int) -> None:
    base = _core.now()
    client.submit(submitted_ns=base)
    [job] = daemon.server.poll(base)
    release = job[4]
    daemon.server.begin(0, job[2], release + queue_ns, verdict.get("deadline_ns", 0))
    daemon.server.complete(0, job[2], verdict.get("status", 0), verdict.get("flags", 0), 1, verdict.get("cause", 0), 0,
                           release + queue_ns + run_ns)  # fmt: skip


def test_jobs_are_counted_by_outcome_and_cause(daemon: Daemon) -> None:
    client = daemon.add(deadline_ns=10**12)
    run(daemon, client, 10, 20)
    run(daemon, client, 10, 20, flags=2 | 8)
    run(daemon, client, 10, 20, flags=4, deadline_ns=1, cause=2)
    run(daemon, client, 10, 20, status=raw.FAILED)
    client.submit()
    [job] = daemon.server.poll(_core.now())
    daemon.server.complete(0, job[2], raw.EXPIRED, 0, 0, 3, 0, _core.now())
    count = daemon.count()
    assert {k: v for k, v in count.items() if isinstance(v, int) and v} == {
        "submitted": 5, "ok": 3, "failed": 1, "expired": 1, "late": 1, "early": 1, "overrun": 1, "stand_in": 1,
    }  # fmt: skip
    assert {k: v for k, v in count["misses"].items() if v} == {"overrun": 1, "late_release": 1}
    assert [count[h]["count"] for h in ("queue_us", "run_us", "total_us")] == [4, 4, 4]  # type: ignore[literal-required]
    assert count["run_us"]["sum_ns"] == 80
    assert count["total_us"]["max_ns"] == 30


def test_dispatches_of_several_jobs_are_counted_by_their_size(daemon: Daemon) -> None:
    daemon.add()
    for size, run_ns in ((2, 5), (2, 6), (16, 7), (17, 8), (32, 9), (33, 10), (256, 11), (257, 12), (4096, 13)):
        daemon.server.batched(0, size, run_ns)
    count = daemon.count()
    assert count["batches"] == [
        (2, 2, 11), (16, 1, 7), (32, 2, 17), (64, 1, 10), (256, 1, 11), (2**32 - 1, 2, 25),
    ]  # fmt: skip
    assert count["batched_jobs"] == 2 + 2 + 16 + 17 + 32 + 33 + 256 + 257 + 4096
    assert count["batched_run_ns"] == 22 + 16 * 7 + 17 * 8 + 32 * 9 + 330 + 256 * 11 + 257 * 12 + 4096 * 13
    with pytest.raises(ValueError, match="two jobs or more"):
        daemon.server.batched(0, 1, 5)
    with pytest.raises(ValueError):
        daemon.server.batched(9, 2, 5)


@given(st.integers(min_value=0, max_value=2**37 - 1))
def test_histogram_keeps_two_digits(value: int) -> None:
    daemon = Daemon()
    client = daemon.add()
    run(daemon, client, 0, value)
    [(upper, count)] = daemon.count()["run_us"]["buckets"]
    daemon.close()
    assert count == 1
    assert value <= upper <= value + value // 64


def test_histogram_ends_in_its_last_bucket(daemon: Daemon) -> None:
    client = daemon.add()
    for value in (2**37 - 1, 2**37, 2**60):
        run(daemon, client, 0, value)
    hist = daemon.count()["run_us"]
    assert hist["buckets"] == [(2**37 - 1, 3)]
    assert hist["max_ns"] == 2**60


def test_percentiles_come_from_the_page(daemon: Daemon) -> None:
    client = daemon.add()
    for value in range(1, 101):
        run(daemon, client, 0, value * 1000)
    hist = daemon.count()["run_us"]
    for q in (0.5, 0.9, 0.99):
        assert percentile(hist, q) == pytest.approx(q * 100_000, rel=1 / 60)  # type: ignore[arg-type]


def test_block_numbers_are_checked(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="there are 8"):
        _core.stats_read(daemon.stats, 8)
    with pytest.raises(OSError, match="Protocol"):
        _core.stats_read(daemon.journal, 0)
    with pytest.raises(OSError, match="Protocol"):
        _core.Server(daemon.stats, daemon.stats, daemon.journal, -1)
    for make, wrong in ((_core.create_ledger, 4097), (_core.create_stats, 0), (_core.create_journal, 100)):
        with pytest.raises(OSError, match="Invalid"):
            make(wrong)


def records(data: bytes) -> list[tuple[int, ...]]:
    return list(RECORD.iter_unpack(data))


def test_journal_is_read_in_order(daemon: Daemon) -> None:
    for i in range(10):
        daemon.server.record(3, i, 2**32 - 1, i, 2**64 - 1, i * 7)
    data, cursor, lost = _core.journal_read(daemon.journal, 0)
    assert (cursor, lost) == (10, 0)
    assert records(data) == [(i * 7, 3, i, 2**32 - 1, i, 2**64 - 1, i + 1) for i in range(10)]
    assert _core.journal_read(daemon.journal, cursor) == (b"", 10, 0)


def test_journal_says_what_was_overwritten(daemon: Daemon) -> None:
    for i in range(1000):  # the ring holds 256
        daemon.server.record(0, 0, 0, i, 0, 0)
    data, cursor, lost = _core.journal_read(daemon.journal, 3)
    assert (cursor, lost) == (1000, 1000 - 256 - 3)
    assert [r[4] for r in records(data)] == list(range(744, 1000))
    assert _core.journal_read(daemon.journal, 5000)[1] == 1000  # a cursor of another journal


def test_journal_goes_on_under_a_successor(daemon: Daemon) -> None:
    daemon.server.record(0, 0, 0, 1, 0, 0)
    daemon.die()
    daemon.succeed()
    daemon.server.record(0, 0, 0, 2, 0, 0)
    assert [(r[4], r[6]) for r in records(_core.journal_read(daemon.journal, 0)[0])] == [(1, 1), (2, 2)]


def test_journal_reader_never_sees_half_a_record(daemon: Daemon) -> None:
    """A writer in another process laps the reader all the time; what is read is whole, what is not is counted."""
    total = 300_000
    child = os.fork()
    if child == 0:
        for i in range(total):
            daemon.server.record(i & 0xFFFF, i & 0xFFFF, i, i, i, i)
        os._exit(0)
    cursor = lost = seen = 0
    while cursor < total:
        data, cursor, missed = _core.journal_read(daemon.journal, cursor)
        lost += missed
        for t_ns, kind, lane, aux, a, b, number in records(data):
            assert (t_ns, kind, lane, aux, b, number) == (a, a & 0xFFFF, a & 0xFFFF, a, a, a + 1)
            seen += 1
    os.waitpid(child, 0)
    assert seen + lost == total
