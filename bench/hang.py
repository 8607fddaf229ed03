"""How soon a stopped executor is noticed: SIGSTOP of a ledger's owner to the SIGKILL by whoever is next. Prints JSON.

Two processes of the C core serve a lane as executors do, each SCHED_FIFO on a core of its own: no models and no
supervisor, so that nothing but the notice is measured. One witness per core tells when the core stood still (taken by a
hypervisor): what the watcher did not live through itself it does not count against the owner (ipc/core/hang.c).

    python bench/hang.py --count 60      (as root, two cores or more)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from taktd.daemon.benchmark import quantiles
from taktd.ipc import _core
from tests.fakes.members import Behaviour, Load, Members
from tests.fakes.raw_lane import Daemon

HANG_AFTER_NS: Final = 51_000_000  # a deadline of 1 ms and the 50 ms of a kernel that throttles real-time work
STEP_NS: Final = 1_000_000  # so often the watcher looks
SLEEP_S: Final = 0.000_5
STILL_NS: Final = 1_000_000  # from this on a witness was kept from waking up
OWNER, WATCHER, OURS, WITNESS = 70, 70, 60, 98
GIVE_UP_NS: Final = 5_000_000_000


def take_core(core: int, priority: int, pid: int = 0) -> None:
    """All threads of a process, or of this one."""
    for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        os.sched_setaffinity(int(thread), [core])
        os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(priority))


def witness(core: int) -> None:
    """Prints (from, to) of every span in which nothing ran here that should have, until SIGTERM."""
    take_core(core, WITNESS)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    spans, last = [], _core.now()
    print("here", flush=True)
    while not over:
        time.sleep(SLEEP_S)
        now = _core.now()
        if now - last > STILL_NS:
            spans.append((last, now))
        last = now
    print(json.dumps(spans), flush=True)


@dataclass(frozen=True)
class Notice:
    """One SIGSTOP with a job waiting: when the owner was killed for it, and when the next one had the ledger."""

    stopped_ns: int
    killed_ns: int
    taken_ns: int


def notice(owner_core: int, watcher_core: int, chance: random.Random) -> Notice | None:
    """None where it was not noticed in time."""
    daemon = Daemon(lanes=2)
    daemon.add(0)
    members = Members(daemon)
    try:
        load = Load(daemon.clients[0])
        owner = members.start(None)
        members.appoint(owner)
        owner.hear()
        watcher = members.start(Behaviour(hang_after_ns=HANG_AFTER_NS))
        members.appoint(watcher)
        take_core(owner_core, OWNER, owner.pid)
        take_core(watcher_core, WATCHER, watcher.pid)
        load.go(5)
        load.finish()
        time.sleep(0.02 + chance.random() * 0.01)
        take_core(watcher_core, OURS)
        owner.kill(signal.SIGSTOP)
        stopped_ns = _core.now()
        load.client.submit()
        load.client.ring_if_asked()
        killed_ns = 0
        while (now := _core.now()) < stopped_ns + GIVE_UP_NS:  # there is nothing to wait for it with
            state = members.state()
            if not killed_ns and state["fences"]:
                killed_ns = now
            if state["owner"] == watcher.number:
                return Notice(stopped_ns, killed_ns or now, now)
        return None
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        members.close()


def still_ns(notice: Notice, spans: list[list[int]]) -> int:
    """How long a core stood still between the stop and the kill, beyond what a sleep takes anyway."""
    inside = ((max(a, notice.stopped_ns), min(b, notice.killed_ns)) for a, b in spans)
    return sum(max(0, b - a - int(SLEEP_S * 1e9)) for a, b in inside)


def milliseconds(values: list[int]) -> dict[str, float | None]:
    """p50, p99 and maximum."""
    found = quantiles(array("q", values))
    return {
        name: None if (us := found[f"{name}_us"]) is None else round(us / 1000, 2) for name in ("p50", "p99", "max")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--witness", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.witness is not None:
        witness(arguments.witness)
        return 0
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2 or os.geteuid() != 0:
        print("needs two cores, and root for SCHED_FIFO on them", file=sys.stderr)
        return 2
    watcher_core, owner_core = usable[0], usable[-1]
    witnesses = [
        subprocess.Popen([sys.executable, __file__, "--witness", str(core)], stdout=subprocess.PIPE, text=True)
        for core in (watcher_core, owner_core)
    ]
    spans: list[list[list[int]]] = []
    try:
        for process in witnesses:
            assert process.stdout is not None
            process.stdout.readline()
        chance = random.Random(arguments.seed)
        found = [notice(owner_core, watcher_core, chance) for _ in range(arguments.count)]
    finally:
        for process in witnesses:
            process.terminate()
            spans.append(json.loads(process.communicate(timeout=30)[0]))
    print(json.dumps(result(arguments.seed, [one for one in found if one], spans, found.count(None)), indent=2))
    return 0


def result(seed: int, found: list[Notice], spans: list[list[list[int]]], missing: int) -> dict[str, Any]:
    bound_ns = HANG_AFTER_NS + 2 * STEP_NS
    rows = [
        {
            "noticed_ms": round((one.killed_ns - one.stopped_ns) / 1e6, 2),
            "taken_ms": round((one.taken_ns - one.stopped_ns) / 1e6, 2),
            "watcher_still_ms": round(still_ns(one, spans[0]) / 1e6, 2),
            "owner_still_ms": round(still_ns(one, spans[1]) / 1e6, 2),
        }
        for one in found
    ]
    undisturbed = [one for one in found if not still_ns(one, spans[0])]
    return {
        "seed": seed, "load": os.getloadavg()[0], "count": len(found), "not_noticed": missing,
        "bound_ms": bound_ns / 1e6,
        "noticed_ms": milliseconds([one.killed_ns - one.stopped_ns for one in found]),
        "noticed_while_the_watcher_ran_ms": {
            "count": len(undisturbed), **milliseconds([one.killed_ns - one.stopped_ns for one in undisturbed]),
        },
        "taken_ms": milliseconds([one.taken_ns - one.stopped_ns for one in found]),
        "beyond_the_bound": [row for row in rows if row["noticed_ms"] > bound_ns / 1e6],
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
