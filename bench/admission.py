"""How long a verdict takes: 64 loops, and sets made to be hard. A benchmark, never a timed test.

    python bench/admission.py [--json]

Times are of one `admit` call with best effort `auto`, so with margins, longest dispatch and, where refused, the
search for the nearest period and deadline.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

from taktd.daemon.admission import AUTO, OFF, BestEffort, Verdict, admit
from taktd.daemon.schedule.job import Task

MS = 1_000_000
US = 1_000


def drawn(draw: random.Random, count: int, utilization_ppm: int, *, coprime: bool = False) -> list[Task]:
    """UUniFast in integers: count loops whose costs add up to the utilisation (but for rounding)."""
    rest, shares = utilization_ppm * 1000, []
    for left in range(count - 1, 0, -1):
        following = int(rest * draw.random() ** (1 / left))
        shares.append(rest - following)
        rest = following
    shares.append(rest)
    tasks = []
    for index, share in enumerate(shares):
        # Without preemption the longest job must fit into the shortest deadline: periods within a factor of eight.
        period = draw.choice((50, 80, 100, 125, 200, 250, 400)) * MS
        if coprime:
            period += draw.randrange(1, MS)
        cost = max(1, period * share // 10**9)
        deadline = draw.randint(max(cost, period * 8 // 10), period)
        jitter = draw.choice((0, 0, (deadline - cost) // 20))
        tasks.append(Task(f"loop{index}", period, deadline, jitter, cost, order=index))
    return tasks


def hard_sets() -> dict[str, tuple[list[Task], BestEffort]]:
    """Sets at which a naive search would never come back."""
    primes = (9_999_991, 10_000_019, 10_000_079, 10_000_103, 10_000_121)
    tight = [Task(f"p{n}", p, p, 0, p // 5, order=n) for n, p in enumerate(primes)]
    return {
        "coprime, U = 0.9999999, D = T": (tight, AUTO),
        "coprime, U = 0.9999999, D < T": (
            [Task(f"p{n}", p, p - 3, 0, p // 5 - (n == 0), order=n) for n, p in enumerate(primes)], AUTO),
        "coprime, U just above 1": (
            [Task(f"p{n}", p, p, 0, p // 5 + 1, order=n) for n, p in enumerate(primes)], AUTO),
        "coprime, U = 0.99999, best effort 1 ms": (
            [Task(f"p{n}", p, p, 0, p // 5 - 20, order=n) for n, p in enumerate(primes)],
            BestEffort("limits", MS, 0)),
        "last loop must slow down to U ≈ 1": (
            [Task("a", 9_999_991, 9_999_991, 0, 5_000_000, order=0),
             Task("b", 10_000_019, 9_000_000, 0, 1_000_000, order=1),
             Task("c", 10_000_079, 10_000_079, 0, 4_500_000, order=2)], OFF),
        "periods from 20 us to 1 h, U = 0.98": (
            [Task("fast", 20 * US, 20 * US, 0, 9 * US, order=0),
             Task("slow", 3600 * 1000 * MS, 3600 * 1000 * MS, 0, 10 * US, order=1),
             Task("odd", 20_011, 20_011, 0, 10_600, order=2)], OFF),
        "256 loops, coprime, U = 0.9": (drawn(random.Random(9), 256, 900_000, coprime=True), AUTO),
    }  # fmt: skip


def timed(call: Callable[[], Verdict]) -> tuple[float, Verdict]:
    start = time.perf_counter_ns()
    verdict = call()
    return (time.perf_counter_ns() - start) / MS, verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for utilization in (500_000, 700_000, 900_000, 950_000, 990_000):
        for coprime in (False, True):
            times, admitted = [], 0
            for seed in range(20):
                tasks = drawn(random.Random(seed), 64, utilization, coprime=coprime)
                took, verdict = timed(lambda tasks=tasks: admit(tasks, AUTO))  # type: ignore[misc]
                times.append(took)
                admitted += verdict.admitted
            name = f"64 loops, U = {utilization / 1e6}{', coprime periods' if coprime else ''}"
            rows.append({"set": name, "p50_ms": statistics.median(times), "max_ms": max(times), "admitted": admitted,
                         "of": 20})  # fmt: skip
    for name, (tasks, rule) in hard_sets().items():
        took, verdict = timed(lambda tasks=tasks, rule=rule: admit(tasks, rule))  # type: ignore[misc]
        rows.append({"set": name, "p50_ms": took, "max_ms": took, "admitted": int(verdict.admitted), "of": 1,
                     "reason": verdict.refusal.reason if verdict.refusal else None})  # fmt: skip
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in rows:
        times = f"p50 {row['p50_ms']:8.1f} ms  max {row['max_ms']:8.1f} ms"
        print(f"{row['set']:45} {times}  admitted {row['admitted']}/{row['of']}  {row.get('reason') or ''}")


if __name__ == "__main__":
    main()
