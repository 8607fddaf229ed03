"""How long a loop is without an answer when its executor is killed, stopped, or exchanged. Prints JSON and a table.

A 1 kHz loop with Go1's policy (from $TAKTD_ROBOTS or ../shared/robots, else a network of its sizes that is made here)
is served on the last core; its stand-in and the client have the first one, all SCHED_FIFO where permitted. The client
is a process of its own that keeps a journal of every answer; this process does the harm: SIGKILL at random instants
(the seed is printed), SIGSTOP, and reloads that exchange the policy. At the end the journal must be what the daemon
counted, every sequence number answered exactly once. What the figures mean is told in docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnx
import psutil
from run import ROBOTS, save_policy

from taktd.daemon.benchmark import quantiles, take_core_and_priority, without_gc
from taktd.daemon.control_client import AnswerNo, ask
from taktd.daemon.foreground import Foreground, end_with_parent
from taktd.ipc import connect

now: Final = time.monotonic_ns

PERIOD: Final = "1ms"
CLIENT_PRIORITY: Final = 70
ANSWER_US: Final = 10_000_000
KILLS, STOPS, SWAPS = 8, 2, 4
BACK_S: Final = 30.0  # until the primary must have its loop again
SETTLE_S: Final = 0.3
FIELDS: Final = (
    "sequence", "status", "path", "cause", "epoch", "submitted_ns", "started_ns", "ended_ns", "received_ns",
)  # fmt: skip
STATUSES: Final = ("ok", "expired", "refused", "invalid", "failed", "lost", "cancelled", "detached", "pending")
PATHS: Final = ("", "primary", "stand-in", "hold", "constant")
CAUSES: Final = ("", "blocked_by", "overrun", "late_release", "wakeup", "handover", "stale_input", "machine")


# ---- the client, in a process of its own ----


def keep_journal(socket: str, path: str) -> None:
    """Submits every period until SIGTERM; then writes FIELDS of each answer as 64-bit integers."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    journal = array("q")
    with connect(socket) as node, node.attach("walk", wait="block", kind="loop") as lane, without_gc():
        print("attached", flush=True)
        for _ in lane.ticks():
            if ended:
                break
            begun = now()
            reply = lane.infer(ANSWER_US)
            received = now()
            journal.extend((
                reply.sequence, STATUSES.index(reply.status), PATHS.index(reply.path), CAUSES.index(reply.cause),
                reply.epoch, begun, reply.started_ns, reply.ended_ns, received,
            ))  # fmt: skip
    Path(path).write_bytes(journal.tobytes())


@dataclass(frozen=True)
class Answer:
    sequence: int
    status: str
    path: str
    cause: str
    epoch: int
    submitted_ns: int
    started_ns: int
    ended_ns: int
    received_ns: int


def read_journal(path: Path) -> list[Answer]:
    values = array("q")
    values.frombytes(path.read_bytes())
    rows = zip(*(iter(values),) * len(FIELDS), strict=True)
    return [Answer(n, STATUSES[s], PATHS[p], CAUSES[c], epoch, *times) for n, s, p, c, epoch, *times in rows]


# ---- the harm ----


@dataclass
class Harm:
    """When what was done, CLOCK_MONOTONIC."""

    kills_ns: list[int] = field(default_factory=list)
    stops_ns: list[int] = field(default_factory=list)
    swaps_ns: list[tuple[int, int]] = field(default_factory=list)  # asked, done
    unsettled: int = 0
    others: int = 0  # deaths that were none of our doing
    refused: list[str] = field(default_factory=list)


def executor(environment: dict[str, str]) -> dict[str, Any]:
    return next(dict(e) for e in ask("status", environment)["executors"] if e["device"] == "cpu0")


def await_home(environment: dict[str, str], within_s: float, other_than: int = 0) -> int:
    """The primary's pid once it serves and its stand-in is ready again, 0 if that takes too long."""
    until = time.monotonic() + within_s
    while True:
        executors = {e["device"]: e for e in ask("status", environment)["executors"]}
        home = executors["cpu0"]
        # Its stand-in too: two deaths at once are another experiment.
        settled = home["served_by"] == "cpu0" and executors["cpu1"]["ready"] and not home["changing"]
        if settled and home["pid"] not in (None, other_than):
            return int(home["pid"])
        if time.monotonic() >= until:
            return 0
        time.sleep(0.02)


def signal_at_random(
    number: int, count: int, environment: dict[str, str], chance: random.Random, until_ns: int, harm: Harm
) -> list[int]:
    times: list[int] = []
    harmed = 0
    while len(times) < count and now() < until_ns:
        pid = await_home(environment, BACK_S, harmed)
        if not pid:
            harm.unsettled += 1
            break
        time.sleep(SETTLE_S + chance.random() * 0.1)
        if await_home(environment, 0.0, harmed) != pid:
            continue  # somebody was taken for hung meanwhile: on a machine that takes cores away it happens
        begun = now()
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has died of itself, or was taken for hung: not of our doing
            harm.others += 1
            continue
        times.append(begun)
        harmed = pid
    if harmed:
        await_home(environment, BACK_S, harmed)
    return times


def swap(daemon: Foreground, yamls: tuple[str, str], count: int, until_ns: int, harm: Harm) -> None:
    environment = dict(daemon.environment)
    file = daemon.runtime_folder.parent / "taktd.yaml"
    for index in range(count):
        if now() > until_ns or not await_home(environment, BACK_S):
            break
        begun = now()
        file.write_text(yamls[(index + 1) % 2], encoding="utf-8")
        try:
            ask("reload", environment)
        except AnswerNo as error:
            harm.refused.append(str(error))
        harm.swaps_ns.append((begun, now()))


# ---- what it did ----


def first(answers: list[Answer], after_ns: int, matches: Callable[[Answer], bool]) -> Answer | None:
    return next((a for a in answers if a.received_ns > after_ns and matches(a)), None)


def milliseconds(values: list[int]) -> dict[str, float | None]:
    """p50, p99 and maximum by nearest rank, in ms."""
    found = quantiles(array("q", values))
    names = {"p50_ms": "p50_us", "p99_ms": "p99_us", "max_ms": "max_us"}
    return {ms: None if (us := found[name]) is None else round(us / 1000, 3) for ms, name in names.items()}


def after_deaths(answers: list[Answer], times_ns: list[int]) -> dict[str, Any]:
    """What followed each signal. The next completion is the first good one of whoever is not dead: the stand-in."""
    next_ns: list[int] = []
    waited_ns: list[int] = []
    back_ns: list[int] = []
    not_ok: list[int] = []
    statuses: Counter[str] = Counter()
    each: list[list[float]] = []  # ms from the signal: first submission, the good one's, its start, end and arrival
    heard_ns: list[int] = []  # until the stand-in began a job of those that waited
    others = 0
    for at_ns in times_ns:
        ok = first(answers, at_ns, lambda a: a.status == "ok" and a.path == "stand-in")
        if ok is None:
            others += 1
            continue
        between = [a for a in answers if at_ns < a.received_ns <= ok.received_ns]
        bad = [a for a in between if a.status != "ok"]
        heard_ns.append(ok.started_ns - max(at_ns, between[0].submitted_ns))
        not_ok.append(len(bad))
        statuses.update(a.status for a in bad)
        next_ns.append(ok.received_ns - at_ns)
        steps = (between[0].submitted_ns, ok.submitted_ns, ok.started_ns, ok.ended_ns, ok.received_ns)
        each.append([round((ns - at_ns) / 1e6, 3) for ns in steps])
        # A job that was not there yet could not be answered: since when somebody waited.
        waited_ns.append(ok.received_ns - max(at_ns, min(a.submitted_ns for a in between)))
        home = first(answers, ok.received_ns, lambda a: a.path == "primary")
        if home is not None:
            back_ns.append(home.received_ns - at_ns)
    return {
        "count": len(times_ns), "without_stand_in": others, "to_next_completion": milliseconds(next_ns),
        "since_submitted": milliseconds(waited_ns), "until_begun": milliseconds(heard_ns),
        "not_ok_max": max(not_ok, default=0), "not_ok": dict(statuses),
        "not_ok_total": sum(not_ok),
        "each_ms": each, "new_primary_serves": milliseconds(back_ns),
    }  # fmt: skip


def around_swaps(answers: list[Answer], swaps_ns: list[tuple[int, int]]) -> dict[str, Any]:
    """What happened from each request to its end, and from the last answer of the old one to the first of the new."""
    passing_ns: list[int] = []
    longest_ns: list[int] = []
    slowest_ns: list[int] = []
    missed: Counter[str] = Counter()
    during: list[Answer] = []
    for begun, done in swaps_ns:
        span = [a for a in answers if begun < a.received_ns < done]
        during += span
        longest_ns.append(max((b.received_ns - a.received_ns for a, b in pairwise(span)), default=0))
        slowest_ns.append(max((a.received_ns - a.submitted_ns for a in span), default=0))
        passing_ns += [b.ended_ns - a.ended_ns for a, b in pairwise(span) if a.epoch != b.epoch]
        for a in span:
            if a.status != "ok" or a.cause:
                phase = "before" if a.epoch == span[0].epoch else "after"
                missed[f"{phase} it passed: {a.status}, {a.cause or 'no cause'}"] += 1
    return {
        "count": len(swaps_ns), "took": milliseconds([done - begun for begun, done in swaps_ns]),
        "last_of_old_to_first_of_new": milliseconds(passing_ns),
        "longest_gap_between_answers": milliseconds(longest_ns),
        "slowest_answer": milliseconds(slowest_ns), "answers": len(during),
        "not_ok": dict(Counter(a.status for a in during if a.status != "ok")), "misses": dict(missed),
        "by_stand_in": sum(1 for a in during if a.path == "stand-in"),
    }  # fmt: skip


def accounts(answers: list[Answer], counted: dict[str, Any]) -> dict[str, Any]:
    """The client's journal against the daemon's counters."""
    sequences = Counter(a.sequence for a in answers)
    by_status = Counter(a.status for a in answers)
    highest = max(sequences, default=0)
    differ = {
        s: {"journal": by_status[s], "daemon": counted[s]} for s in STATUSES[:-1]
        if s in counted and counted[s] != by_status[s]
    }  # fmt: skip
    return {
        "jobs": len(answers), "submitted": counted["submitted"], "by_status": dict(by_status),
        "by_path": dict(Counter(a.path for a in answers)), "late_or_expired": counted["late"] + counted["expired"],
        "misses": counted["misses"], "without_an_answer": highest - len(sequences) + by_status["pending"],
        "answered_twice": sum(n - 1 for n in sequences.values()), "differ": differ,
    }  # fmt: skip


# ---- the run ----


def make_policies(folder: Path) -> tuple[tuple[Path, Path], str]:
    """Two versions of one policy: other bytes, the same numbers."""
    one, two = folder / "one.onnx", folder / "two.onnx"
    source, said = ROBOTS / "go1" / "policy.onnx", "Unitree Go1"
    if source.is_file():
        one.write_bytes(source.read_bytes())
    else:
        save_policy(one)
        said = "random weights in Go1's sizes"
    model = onnx.load(str(one))
    model.doc_string = "the second version"
    onnx.save(model, str(two))
    return (one, two), said


def yaml_of(policy: Path, cores: tuple[int, int], deadline: str) -> str:
    first_core, last_core = cores
    return (
        f"devices:\n  cpu0: {{driver: cpu, cores: [{last_core}]}}\n  cpu1: {{driver: cpu, cores: [{first_core}]}}\n"
        f"models: {{go1: {{path: {json.dumps(str(policy))}}}}}\n"
        f"loops: {{walk: {{model: go1, device: cpu0, period: {PERIOD}, deadline: {deadline}, fallback: [cpu1],\n"
        "  fallback_uncertified: true, probation: 0s}}\n"
        "admission: {on_refusal: uncertified}\ngrpc: off\nzmq: off\n"
    )


def measure(arguments: argparse.Namespace, cores: tuple[int, int]) -> dict[str, Any]:
    harm, chance = Harm(), random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="taktd-bench-") as name:
        folder = Path(name)
        policies, said = make_policies(folder)
        yamls = (yaml_of(policies[0], cores, "1ms"), yaml_of(policies[1], cores, "1ms"))
        log = Path(arguments.log) if arguments.log else None
        with Foreground(yamls[0], timeout_s=60.0, log=log) as daemon:
            environment = dict(daemon.environment)
            await_home(environment, BACK_S)
            journal = Path(arguments.journal or folder / "journal")
            client = subprocess.Popen(
                [sys.executable, __file__, "--as", daemon.lanes_socket, str(journal), "--core", str(cores[0])],
                stdout=subprocess.PIPE, preexec_fn=end_with_parent,
            )  # fmt: skip
            assert client.stdout is not None
            try:
                client.stdout.readline()  # it is attached
                begun_ns, span_ns = now(), int(arguments.seconds * 1e9)
                kills, stops, swaps = (begun_ns + span_ns * percent // 100 for percent in (60, 80, 100))
                harm.kills_ns = signal_at_random(signal.SIGKILL, arguments.kills, environment, chance, kills, harm)
                harm.stops_ns = signal_at_random(signal.SIGSTOP, arguments.stops, environment, chance, stops, harm)
                swap(daemon, yamls, arguments.swaps, swaps, harm)
                await_home(environment, BACK_S)
            finally:
                client.terminate()
                client.wait(30)
            loop = next(entry for entry in ask("loops", environment)["loops"] if entry["name"] == "walk")
            rights = {e["device"]: e["rights"].get("policy") for e in ask("status", environment)["executors"]}
        answers = read_journal(journal)
    return {
        "seed": arguments.seed, "policy": said, "cost_us": loop["cost_ns"] / 1000, "rights": rights,
        "cpus": psutil.cpu_count(), "load": os.getloadavg()[0], "throttle": throttled(),
        "kills": after_deaths(answers, harm.kills_ns), "stops": after_deaths(answers, harm.stops_ns),
        "swaps": around_swaps(answers, harm.swaps_ns) | {"refused": harm.refused}, "unsettled": harm.unsettled,
        "other_deaths": harm.others,
        "accounts": accounts(answers, loop["statistics"]), "switches": loop["switches"],
    }  # fmt: skip


def throttled() -> bool:
    try:
        return int(Path("/proc/sys/kernel/sched_rt_runtime_us").read_text()) >= 0
    except OSError:
        return False


def table(result: dict[str, Any]) -> str:
    """For docs/performance.md."""
    kills, stops, swaps, books = (result[key] for key in ("kills", "stops", "swaps", "accounts"))

    def row(what: str, times: dict[str, float | None]) -> str:
        return f"| {what} | " + " | ".join("–" if v is None else f"{v:.1f}" for v in times.values()) + " |"

    lines = ["| what | p50 ms | p99 ms | max ms |", "| --- | ---: | ---: | ---: |"]
    for name, found in (("SIGKILL", kills), ("SIGSTOP", stops)):
        lines += [
            row(f"{name} ({found['count']}×) to the next completion, by the stand-in", found["to_next_completion"]),
            row(f"{name}: a submitted job waits for it", found["since_submitted"]),
            row(f"{name}: the stand-in begins it after", found["until_begun"]),
            row(f"{name}: until the new primary serves", found["new_primary_serves"]),
        ]
    lines += [
        row(f"hot swap ({swaps['count']}×), from the request to done", swaps["took"]),
        row("hot swap: last completion of the old to the first of the new", swaps["last_of_old_to_first_of_new"]),
        row("hot swap: longest gap between two answers", swaps["longest_gap_between_answers"]),
    ]
    facts = {
        "answers not ok for one kill, at most": kills["not_ok_max"], "jobs": books["jobs"],
        "jobs without an answer": books["without_an_answer"], "answered twice": books["answered_twice"],
        "statuses counted otherwise by the daemon": len(books["differ"]),
        "answers around hot swaps": swaps["answers"], "of those missed": swaps["misses"] or 0,
    }  # fmt: skip
    return "\n".join([*lines, "", *(f"- {what}: {value}" for what, value in facts.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=45.0, help="no more harm is done after that")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--stops", type=int, default=STOPS)
    parser.add_argument("--swaps", type=int, default=SWAPS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--log", help="keep the daemon's log there")
    parser.add_argument("--journal", help="keep the client's journal there: FIELDS as 64-bit integers")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--as", nargs=2, dest="role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        take_core_and_priority(arguments.core, CLIENT_PRIORITY)
        keep_journal(*arguments.role)
        return 0
    print(f"seed {arguments.seed}", file=sys.stderr)
    usable = sorted(os.sched_getaffinity(0))
    result = measure(arguments, (usable[0], usable[-1]))
    print(json.dumps(result, indent=2))
    print(table(result), file=sys.stderr)
    books = result["accounts"]
    return 0 if not (books["without_an_answer"] or books["answered_twice"] or books["differ"]) else 1


if __name__ == "__main__":
    sys.exit(main())
