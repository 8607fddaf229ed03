"""A ledger passes from one executor to another: real processes, real SIGKILL and SIGSTOP. Order and accounting only."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from taktd.ipc import _core
from tests.chance import seed
from tests.fakes import raw_lane as raw
from tests.fakes.members import Behaviour, Load, Member, Members
from tests.fakes.raw_lane import Daemon
from tests.real_time import may_have_real_time

MS = 1_000_000
SHORT = Behaviour(hang_after_ns=60 * MS)


@pytest.fixture
def daemon() -> Daemon:
    it = Daemon(lanes=2)
    it.add(0)
    return it


@pytest.fixture
def members(daemon: Daemon) -> Iterator[Members]:
    it = Members(daemon)
    yield it
    it.close()


@pytest.fixture
def load(members: Members) -> Load:
    return Load(members.daemon.clients[0])


def first(members: Members, behaviour: Behaviour | None = None) -> Member:
    """The first owner, serving."""
    owner = members.start(behaviour)
    members.appoint(owner)
    assert owner.hear() == "clean"
    return owner


def standby(members: Members, behaviour: Behaviour | None = None) -> Member:
    """A successor, waiting for the lock."""
    member = members.start(behaviour)
    members.appoint(member)
    return member


def test_deaths_at_random_points_lose_and_double_nothing(members: Members, load: Load) -> None:
    """FAULTS 4 for the core."""
    chance = random.Random(seed())
    owner = first(members)
    for _ in range(20):
        # With a run that takes its time most kills hit a job that was begun; without, everything around it.
        following = standby(members, Behaviour(run_ns=chance.choice((0, 200_000))))
        load.go(chance.randrange(1, 150))
        owner.kill()
        load.go(1)
        assert following.hear() == "died"
        assert owner.await_end() == signal.SIGKILL
        owner = following
    load.finish()
    state = members.state()
    assert (state["owner"], state["how"], state["takeovers"], state["fences"]) == (owner.number, "died", 21, 0)


def test_a_ledger_handed_over_between_two_jobs_loses_and_doubles_nothing(members: Members, load: Load) -> None:
    owner, other = first(members), members.start()
    for turn in range(20):
        load.go(20)
        members.appoint(other)
        _core.succession_ask_release(members.daemon.ledger, owner.number)
        load.go(20)
        assert owner.hear() == "asked"
        assert other.hear() == "clean", turn
        owner, other = other, owner
    load.finish()
    counts = members.daemon.count(0)
    assert counts["submitted"] == counts["ok"] == len(load.seen)
    assert members.state()["takeovers"] == 21


def test_answers_come_from_the_owners_area(members: Members, load: Load) -> None:
    owner = first(members)
    following = standby(members)
    load.go(5)
    load.finish()
    assert set(load.areas) == {owner.number % 2}
    owner.kill()
    assert following.hear() == "died"
    load.areas.clear()
    load.go(5)
    load.finish()
    assert set(load.areas) == {following.number % 2}


def test_of_two_who_wait_only_the_successor_takes_over(members: Members, load: Load) -> None:
    owner, idle, chosen = first(members), standby(members), standby(members)
    load.go(10)
    owner.kill()
    assert chosen.hear() == "died"
    assert members.state()["owner"] == chosen.number
    assert idle.hear(0.1) is None
    members.appoint(idle)
    chosen.kill()
    assert idle.hear() == "died"
    load.go(10)
    load.finish()


def test_one_who_dies_waiting_changes_nothing(members: Members, load: Load) -> None:
    owner = first(members)
    for _ in range(5):
        waiting = standby(members)
        load.go(10)
        waiting.kill()
        waiting.await_end()
    assert members.state()["owner"] == owner.number
    last = standby(members)
    owner.kill()
    assert last.hear() == "died"
    load.go(10)
    load.finish()


def test_a_successor_that_dies_while_taking_over_is_succeeded(members: Members, load: Load) -> None:
    owner = first(members)
    doomed = standby(members, Behaviour(dies_in_takeover=True))
    load.go(10)
    owner.kill()
    assert doomed.await_end() == signal.SIGKILL
    last = standby(members)
    assert last.hear() == "died"
    load.go(10)
    load.finish()


def test_a_death_is_known_as_such_after_the_lock_has_passed_through_other_hands(members: Members, load: Load) -> None:
    """The successor is changed at the moment of the death: whoever gets the lock first passes it on."""
    owner, former, chosen = first(members), members.start(), members.start()
    load.go(3)
    members.appoint(former)
    owner.kill()
    members.appoint(chosen)
    heard = former.hear(0.2), chosen.hear(0.2)
    if heard[0] is not None:  # it was quicker than we were: then it owns the ledger
        assert heard == ("died", None)
    else:
        assert (heard[1] or chosen.hear()) == "died"
    load.finish()


# ---- hangs ----


def test_a_stopped_owner_is_fenced_and_its_jobs_are_done(members: Members, load: Load) -> None:
    """FAULTS 5."""
    owner = first(members)
    following = standby(members, SHORT)
    load.go(10)
    owner.kill(signal.SIGSTOP)
    load.go(10)
    assert following.hear() == "hung"
    assert owner.await_end() == signal.SIGKILL
    load.finish()
    state = members.state()
    assert (state["how"], state["fences"], state["fenced"]) == ("hung", 1, 0)


def test_an_owner_stopped_in_its_sleep_is_fenced_when_somebody_needs_it(members: Members, load: Load) -> None:
    owner = first(members)
    following = standby(members, SHORT)
    load.go(3)
    load.finish()
    owner.kill(signal.SIGSTOP)
    assert following.hear(0.3) is None, "nobody waits for it"
    load.go(3)
    assert following.hear() == "hung"
    load.finish()


def test_an_endless_run_is_fenced(members: Members, load: Load) -> None:
    endless = Behaviour(run_ns=3600 * 10**9, budget_ns=20 * MS)
    owner = first(members, endless)
    following = standby(members, SHORT)
    load.client.submit()
    load.client.ring_if_asked()
    assert following.hear() == "hung"
    assert owner.await_end() == signal.SIGKILL
    load.finish()


THIEF = """
import os, sys, time
os.sched_setaffinity(0, [int(sys.argv[1])])
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(90))
print("here", flush=True)
end = time.monotonic_ns() + int(sys.argv[2])
while time.monotonic_ns() < end:
    pass
print(time.monotonic_ns(), flush=True)
"""


@pytest.mark.skipif(not may_have_real_time(), reason="SCHED_FIFO is not permitted here: nothing can take a core away")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core to watch from beside the one that is taken")
def test_a_core_that_stands_still_is_no_hang_of_its_owner(members: Members, load: Load) -> None:
    """What a hypervisor does to a core, a process of the highest priority does to everything else on it."""
    watching, taken = sorted(os.sched_getaffinity(0))[:2]
    owner = first(members)
    following = standby(members, SHORT)
    pin(owner.pid, taken)
    pin(following.pid, watching)
    load.go(10)
    for _ in range(3):
        load.finish()
        with subprocess.Popen(
            [sys.executable, "-c", THIEF, str(taken), str(150 * MS)], stdout=subprocess.PIPE
        ) as thief:
            assert thief.stdout is not None
            assert thief.stdout.readline() == b"here\n"
            load.go(5)
    load.finish()
    state = members.state()
    assert (state["owner"], state["fences"]) == (owner.number, 0)


@pytest.mark.skipif(not may_have_real_time(), reason="SCHED_FIFO is not permitted here: nothing can take a core away")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core to serve on beside the one that is taken")
def test_what_the_watcher_did_not_live_through_is_not_counted_against_the_owner(members: Members, load: Load) -> None:
    """A machine that stood still, its watchers with it, has nobody killed for that time."""
    taken, serving = sorted(os.sched_getaffinity(0))[:2]
    owner = first(members)
    following = standby(members, SHORT)
    pin(owner.pid, serving)
    pin(following.pid, taken)
    load.go(10)
    load.finish()
    with subprocess.Popen([sys.executable, "-c", THIEF, str(taken), str(200 * MS)], stdout=subprocess.PIPE) as thief:
        assert thief.stdout is not None
        assert thief.stdout.readline() == b"here\n"
        owner.kill(signal.SIGSTOP)
        load.client.submit()
        load.client.ring_if_asked()
        over_ns = int(thief.stdout.readline())
    while not members.state()["fences"]:
        pass
    assert _core.now() > over_ns + SHORT.hang_after_ns // 2  # at once would mean that the time before was counted
    assert following.hear() == "hung"
    load.finish()


def pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), [core])


def test_runs_within_their_budget_are_no_hang(members: Members, load: Load) -> None:
    patient = Behaviour(run_ns=150 * MS, budget_ns=10**10)
    owner = first(members, patient)
    standby(members, SHORT)
    load.go(6)
    load.finish()
    assert (members.state()["owner"], members.state()["fences"]) == (owner.number, 0)


def test_a_busy_owner_is_no_hang(members: Members, load: Load) -> None:
    owner = first(members)
    standby(members, Behaviour(hang_after_ns=400 * MS))  # above what an ordinary process may be kept off its core here
    until_ns = _core.now() + 1000 * MS
    while _core.now() < until_ns:
        load.go(50)
    load.finish()
    assert (members.state()["owner"], members.state()["fences"]) == (owner.number, 0)


def test_a_client_that_never_rings_has_nobody_killed(members: Members, load: Load) -> None:
    """Its entry is found, since the owner is asked what it is waiting for."""
    owner = first(members)
    standby(members, Behaviour(hang_after_ns=400 * MS))
    load.go(1)
    load.finish()
    while not load.client.u32(raw.DAEMON_SLEEPING):
        os.sched_yield()
    load.client.submit()
    until_ns = _core.now() + 20_000 * MS
    while load.client.sequence != len(load.seen) and _core.now() < until_ns:
        os.sched_yield()
        load.collect()
    load.finish()
    assert (members.state()["owner"], members.state()["fences"]) == (owner.number, 0)


# ---- what may not be done ----


@pytest.fixture
def server(daemon: Daemon) -> Iterator[_core.Server]:
    daemon.die()
    daemon.server = _core.Server(daemon.ledger, daemon.stats, daemon.journal, -1)
    yield daemon.server
    daemon.close()


def map_lane(daemon: Daemon, *, lane: int = 0, dormant: bool = True) -> None:
    memfd, wake = (os.dup(fd) for fd in daemon.ends[0])
    daemon.server.add(lane, memfd, wake, daemon.layouts[0], 0, area=1, recover=True, dormant=dormant)


def test_only_the_owner_activates(daemon: Daemon, server: _core.Server) -> None:
    server.join(0, 7, 0, [], MS)
    map_lane(daemon)
    with pytest.raises(PermissionError):
        server.activate(0)
    with pytest.raises(PermissionError):
        map_lane(daemon, lane=1, dormant=False)
    with pytest.raises(PermissionError):
        server.hand_over(0)
    assert _core.succession_state(daemon.ledger)["owner"] == 0


def test_a_dormant_lane_is_mapped_and_nothing_else(daemon: Daemon, server: _core.Server) -> None:
    client = daemon.clients[0]
    client.submit()
    before = bytes(client.map)
    map_lane(daemon)
    assert server.slot_address(0, 0, 0, 0) > 0
    assert server.poll(_core.now()) == []
    assert server.unfinished(0) == []
    assert server.remove(0, raw.LOST) == 0
    assert bytes(client.map) == before


def test_a_released_lane_goes_on_where_it_was(daemon: Daemon, server: _core.Server) -> None:
    client = daemon.clients[0]
    map_lane(daemon, dormant=False)
    client.submit()
    [(_, _, slot, *_)] = server.poll(_core.now())
    assert server.release(0) == 1
    client.submit()
    assert server.poll(_core.now()) == []
    with pytest.raises(ValueError, match="no job is pending"):
        server.complete(0, slot, raw.OK, 0, 1, 0, 0, 1)
    server.set_area(0, 0)
    assert server.activate(0) == 1
    assert [job[:2] for job in server.unfinished(0)] == [(1, 0)]
    assert [job[1] for job in server.poll(_core.now())] == [2]
    for number in (0, 1):
        server.complete(0, number, raw.OK, 0, 1, 0, 0, 1)
    assert [(done["sequence"], done["area"]) for done in client.completions()] == [(1, 0), (2, 0)]


def test_a_further_ledger_has_lanes_of_its_own(daemon: Daemon, server: _core.Server) -> None:
    other = Daemon(lanes=3)
    client = other.add(2)
    other.die()
    ledger, base = server.open_ledger(other.ledger, other.stats)
    assert (ledger, base) == (1, 2)
    map_lane(daemon, dormant=False)
    memfd, wake = (os.dup(fd) for fd in other.ends[2])
    server.add(base + 2, memfd, wake, other.layouts[2], 2, area=1, recover=True)
    client.submit()
    daemon.clients[0].submit()
    jobs = sorted(server.poll(_core.now()))
    assert [job[:3] for job in jobs] == [(0, 1, 0), (4, 1, 0)]
    for job in jobs:
        server.complete(job[0], job[2], raw.OK, 0, 1, 0, 0, 1)
    assert [done["sequence"] for done in client.completions()] == [1]
    assert (other.count(2)["ok"], daemon.count(0)["ok"]) == (1, 1)
    daemon.server = other.server = server
    other.close()


def test_a_ledger_that_speaks_of_another_memory_is_not_believed(daemon: Daemon, server: _core.Server) -> None:
    """The lane was swapped for a fresh one and its owner died before it said so."""
    map_lane(daemon, dormant=False)
    daemon.clients[0].submit()
    server.poll(_core.now())
    server.release(0)
    server.remove(0, None)
    fresh = Daemon(lanes=1)
    client = fresh.add(0)
    memfd, wake = (os.dup(fd) for fd in fresh.ends[0])
    server.add(0, memfd, wake, fresh.layouts[0], 0, area=0, recover=True)
    assert server.unfinished(0) == []
    client.submit()
    assert [job[1] for job in server.poll(_core.now())] == [1]
    fresh.close()


def test_leaving_lets_go(daemon: Daemon, server: _core.Server) -> None:
    server.join(0, 7, 0, [], MS)
    map_lane(daemon)
    _core.succession_set(daemon.ledger, 7)
    assert server.wait(_core.now() + 20_000 * MS, 0) == 16
    assert server.successions() == [(0, "clean")]
    assert server.activate(0) == 0
    assert _core.succession_state(daemon.ledger)["owner"] == 7
    server.leave(0)
    assert _core.succession_state(daemon.ledger)["owner"] == 0
    with pytest.raises(ValueError, match="not joined"):
        server.leave(0)
