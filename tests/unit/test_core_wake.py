"""Waiting and being woken: nothing is missed, and who rings without end costs little."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from taktd.ipc import _core
from tests.fakes import raw_lane as raw
from tests.fakes.raw_lane import Daemon

SUBMISSIONS, CONTROL, TIMEOUT, HANGUP = 1, 2, 4, 8
MS = 1_000_000
IDLE_NS = 100 * MS
MARK = 60 * 1000 * MS  # far away: a test that waits this long has failed
SLOW_NS = 10_000 * MS  # a loop this slow stays scanned, however busy the machine that tests
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[os.uname().machine]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    it = Daemon(lanes=512)
    yield it
    it.close()


@pytest.fixture
def controlled() -> Iterator[tuple[Daemon, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    it = Daemon(control_fd=ours.fileno())
    with ours, theirs:
        yield it, theirs
        it.close()


def sleeping(client: raw.RawLane) -> bool:
    return client.u32(raw.DAEMON_SLEEPING) == 1


def put_to_rest(daemon: Daemon) -> int:
    """No lane has had entries for long enough: each is dormant now. Returns a time after that."""
    now = _core.now() + 2 * IDLE_NS
    assert daemon.server.poll(now) == []
    return now


def test_wait_times_out_and_says_so(daemon: Daemon) -> None:
    daemon.add()
    slept = daemon.server.slept_ns()
    until = _core.now() + 20 * MS
    assert daemon.server.wait(until, 0) == TIMEOUT
    assert _core.now() >= until
    assert daemon.server.slept_ns() - slept > 10 * MS
    slept = daemon.server.slept_ns()
    until = _core.now() + 2 * MS
    assert daemon.server.wait(until, until) == TIMEOUT  # spinning is not sleeping
    assert daemon.server.slept_ns() == slept
    assert daemon.server.wait(1, 0) == TIMEOUT


def test_submission_wakes_a_sleeper_and_the_flag_is_taken_back(daemon: Daemon) -> None:
    client = daemon.add()

    def submit() -> None:
        while not sleeping(client):
            time.sleep(0)
        client.submit()
        client.ring()

    thread = threading.Thread(target=submit)
    thread.start()
    assert daemon.server.wait(_core.now() + MARK, 0) == SUBMISSIONS
    thread.join()
    assert not sleeping(client)
    assert len(daemon.server.poll(_core.now())) == 1


def test_spinning_needs_no_doorbell(daemon: Daemon) -> None:
    client = daemon.add(period_ns=SLOW_NS)
    thread = threading.Timer(0.01, client.submit)
    thread.start()
    assert daemon.server.wait(_core.now() + MARK, _core.now() + MARK) == SUBMISSIONS
    thread.join()


def test_control_is_heard_beside_a_flood(controlled: tuple[Daemon, socket.socket]) -> None:
    daemon, supervisor = controlled
    client = daemon.add()
    client.submit()  # never taken: the ring always has something
    supervisor.send(b"drain")
    until = _core.now() + MARK
    while not daemon.server.wait(1, 0) & CONTROL:
        assert _core.now() < until
    assert daemon.server.wait(_core.now() + MARK, 0) & (CONTROL | SUBMISSIONS)


def test_hang_up_is_told_once(daemon: Daemon) -> None:
    client = daemon.add()
    client.wake.close()
    assert daemon.server.wait(_core.now() + MARK, 0) == HANGUP
    slept = daemon.server.slept_ns()
    assert daemon.server.wait(_core.now() + 20 * MS, 0) == TIMEOUT
    assert daemon.server.slept_ns() - slept > 10 * MS


def test_signal_ends_a_wait(daemon: Daemon) -> None:
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        threading.Timer(0.02, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)).start()
        assert daemon.server.wait(_core.now() + MARK, 0) == 0
        assert seen == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_second_thread_is_told_that_the_server_is_not_its_own(daemon: Daemon) -> None:
    client = daemon.add()
    thread = threading.Thread(target=daemon.server.wait, args=(_core.now() + MARK, 0))
    thread.start()
    while not sleeping(client):
        time.sleep(0)
    with pytest.raises(RuntimeError, match="belongs to one thread"):
        daemon.server.poll(1)
    client.submit()
    client.ring()
    thread.join()


def test_idle_lane_is_not_scanned_until_it_rings(daemon: Daemon) -> None:
    idle, busy = daemon.add(0), daemon.add(1)
    now = _core.now() + 2 * IDLE_NS
    busy.submit()
    assert len(daemon.server.poll(now)) == 1
    daemon.server.complete(1, 0, 0, 0, 1, 0, 0, now)
    now = put_to_rest(daemon)
    assert sleeping(idle)
    idle.submit()
    assert daemon.server.poll(now + 1) == []
    idle.ring()
    assert [job[0] for job in daemon.server.poll(now + 10 * MS)] == [0]
    assert not sleeping(idle)


def test_lane_that_submits_while_it_is_put_to_rest_is_kept(daemon: Daemon) -> None:
    client = daemon.add()
    client.submit()
    assert len(daemon.server.poll(_core.now() + 2 * IDLE_NS)) == 1
    assert not sleeping(client)


def test_slow_loop_stays_scanned_between_its_jobs(daemon: Daemon) -> None:
    client = daemon.add(period_ns=1000 * MS)
    now = put_to_rest(daemon)
    assert not sleeping(client)
    client.submit()
    assert len(daemon.server.poll(now)) == 1


def test_hundreds_of_idle_lanes_wake_one_by_one(daemon: Daemon) -> None:
    clients = [daemon.add(i, raw.MODEL) for i in range(300)]
    now = put_to_rest(daemon)
    assert all(sleeping(client) for client in clients)
    for client in clients:
        client.submit()
        client.ring()
    found: set[int] = set()
    for i in range(100):
        found |= {job[0] for job in daemon.server.poll(now + i * MS)}
    assert found == set(range(300))


def test_muted_lane_is_still_served(daemon: Daemon) -> None:
    abuser = daemon.add(period_ns=SLOW_NS)
    for _ in range(100):
        abuser.ring()
    slept = daemon.server.slept_ns()
    until = _core.now() + 15 * MS
    assert daemon.server.wait(until, 0) == TIMEOUT
    assert daemon.server.slept_ns() - slept > 5 * MS  # its descriptor is readable, and nobody cares
    thread = threading.Timer(0.002, abuser.submit)  # no doorbell at all
    thread.start()
    assert daemon.server.wait(_core.now() + MARK, 0) == SUBMISSIONS
    thread.join()


def ring_without_end(client: raw.RawLane) -> None:
    while True:
        try:
            client.wake.send(b"x" * 100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError:
            os._exit(0)


def test_doorbell_abuse_costs_a_bounded_share(daemon: Daemon) -> None:
    """FAULTS 13: a client rings as fast as it can; the executor sleeps nearly all the time and hears the others."""
    abuser, honest = daemon.add(0), daemon.add(1)
    child = os.fork()
    if child == 0:
        ring_without_end(abuser)
    try:
        cpu_ns, start_ns, served = time.process_time_ns(), _core.now(), 0
        while _core.now() - start_ns < 600 * MS:
            daemon.server.wait(_core.now() + 5 * MS, 0)
            honest.submit()
            honest.ring()
            assert daemon.server.wait(_core.now() + MARK, 0) & SUBMISSIONS
            for lane, _, slot, *_ in daemon.server.poll(_core.now()):
                daemon.server.complete(lane, slot, 0, 0, 1, 0, 0, _core.now())
                served += lane == 1
        share = (time.process_time_ns() - cpu_ns) / (_core.now() - start_ns)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert served == honest.sequence
    assert share < 0.3  # spinning on the readable descriptor would take all of it


def test_client_gets_a_byte_only_when_it_asks(daemon: Daemon) -> None:
    client = daemon.add()
    for waiting, received in ((0, False), (2, True)):
        client.u32(raw.CLIENT_WAITING, waiting)
        client.submit()
        [job] = daemon.server.poll(_core.now())
        daemon.server.complete(0, job[2], 0, 0, 1, 0, 0, _core.now())
        try:
            assert client.wake.recv(8, socket.MSG_DONTWAIT)
            assert received
        except BlockingIOError:
            assert not received
    for _ in range(2000):  # a client that never reads: the buffer fills up and nothing else happens
        client.submit()
        [job] = daemon.server.poll(_core.now())
        daemon.server.complete(0, job[2], 0, 0, 1, 0, 0, _core.now())
    assert len(client.completions()) <= 2002


def futex_wait(client: raw.RawLane, expected: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    at = client.header["cursors_offset"] + raw.COMPLETION_TAIL
    word = ctypes.c_uint32.from_buffer(client.map, at)
    libc.syscall(SYS_FUTEX, ctypes.byref(word), 0, expected, None, None, 0)
    del word


@pytest.mark.parametrize("end", ["completion", "detach"])
def test_blocked_client_is_woken(daemon: Daemon, end: str) -> None:
    client = daemon.add()
    client.submit()
    [job] = daemon.server.poll(_core.now())
    client.u32(raw.CLIENT_WAITING, 1)
    thread = threading.Thread(target=futex_wait, args=(client, 0))
    thread.start()
    time.sleep(0.01)  # the other order is covered by the word having changed
    if end == "completion":
        daemon.server.complete(0, job[2], 0, 0, 1, 0, 0, _core.now())
    else:
        daemon.server.remove(0, None)
    thread.join(20)
    assert not thread.is_alive()


def test_no_wake_up_is_lost_between_two_processes(daemon: Daemon) -> None:
    """The client rings only when told to, the executor sleeps after every job."""
    client = daemon.add()
    total = 20_000
    child = os.fork()
    if child == 0:
        lock = threading.Lock()  # its atomic exchange is the fence between "tail moved" and "do you sleep?"
        for _ in range(total):
            client.submit()
            with lock:
                pass
            if sleeping(client):
                client.ring()
            while client.u64(raw.COMPLETION_TAIL) < client.sequence:
                pass
        os._exit(0)
    done = 0
    while done < total:
        assert daemon.server.wait(_core.now() + MARK, 0) & SUBMISSIONS, f"lost after {done}"
        for _, _, slot, *_ in daemon.server.poll(_core.now()):
            daemon.server.complete(0, slot, 0, 0, 1, 0, 0, _core.now())
            done += 1
    os.waitpid(child, 0)
