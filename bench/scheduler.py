"""What a decision of the scheduler costs: the fast case, and one event among 32 loops and 64 queued jobs.

    python bench/scheduler.py [--rounds N]

Prints JSON, ns. The cases run interleaved in short blocks, so that a slow second of the machine hits all of them. Each
percentile is over single events timed one by one (the cost of the timer, also given, is not taken off); `fast_ns` is
the best and the median of blocks of 1 000 jobs (submit + decide + finish), the loop around them included.

The crowd is there `CROWDS` times, with the same events in the same order. `event_ns` is over every event of all of
them, what the machine did included; `decision_ns` takes the median of each event's times, which is what the decision
itself costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

from taktd.daemon.schedule.job import START, WAIT, Queue, Task
from taktd.daemon.scheduler import Scheduler

MS = 1_000_000
LOOPS = 32
QUEUED = 64
BLOCK = 1_000
EVENTS_PER_ROUND = 400
CROWDS = 5

now = time.perf_counter_ns


def percentiles(samples: list[int]) -> dict[str, int]:
    samples.sort()
    return {name: samples[len(samples) * ppm // 1_000_000] for name, ppm in (("p50", 500_000), ("p99", 990_000))}


class FastCase:
    """One loop, nothing else: submit, decide, finish. passing_ns: from one job to the next; below a period all are
    early, as those of a client that asks again as soon as it has its answer."""

    def __init__(self, passing_ns: int = MS) -> None:
        self.passing_ns = passing_ns
        self.scheduler = Scheduler(max_dispatch_ns=300_000)
        self.scheduler.add_loop(0, Task("loop", MS, MS, 0, 50_000))
        self.scheduler.reset(0, 0)
        self.time_ns = MS
        self.sequence = 0

    def block(self) -> int:
        """ns per job."""
        submit, decide, finish = self.scheduler.submit, self.scheduler.decide, self.scheduler.finish
        time_ns, sequence, passing_ns = self.time_ns, self.sequence, self.passing_ns
        began = now()
        for _ in range(BLOCK):
            time_ns += passing_ns
            sequence += 1
            submit(0, sequence, 0, time_ns, 0, time_ns)
            decide(time_ns)
            finish(time_ns + 40_000)
        took = now() - began
        self.time_ns, self.sequence = time_ns, sequence
        return took // BLOCK


class Crowd:
    """32 loops and 8 best-effort lanes with 64 jobs queued; a job that ends is replaced by a new submission."""

    def __init__(self) -> None:
        self.random = Random(1)
        self.scheduler = Scheduler(max_dispatch_ns=MS, share_ppm=50_000)
        self.sequences = [0] * (LOOPS + 8)
        for lane in range(LOOPS):
            period = (10 + lane) * MS
            self.scheduler.add_loop(lane, Task(f"loop{lane}", period, period, MS, 100_000, lane % 3, lane))
            self.scheduler.reset(lane, 0)
        for lane in range(LOOPS, LOOPS + 8):
            self.scheduler.add_queue(lane, Queue(f"model{lane % 4}", (MS // 2, MS, 2 * MS)))
        self.time_ns = 100 * MS
        self.queued = 0
        while self.queued < QUEUED:
            self.submit(self.random.randrange(LOOPS + 8))
        self.running = self.settle()

    def submit(self, lane: int) -> None:
        self.sequences[lane] += 1
        deadline = self.time_ns + 200 * MS if lane >= LOOPS and self.random.random() < 0.5 else 0
        self.scheduler.submit(lane, self.sequences[lane], 0, self.time_ns, deadline, self.time_ns)
        self.queued += 1

    def settle(self) -> bool:
        """Until something runs or there is nothing to do."""
        while True:
            action = self.scheduler.decide(self.time_ns)
            if action.kind == START:
                self.queued -= len(action.jobs)
                return True
            if action.kind == WAIT:
                return False
            self.queued -= 1

    def event(self) -> tuple[str, int]:
        """One event and the decision that follows, timed."""
        self.time_ns += self.random.randint(1, 1_000_000)
        scheduler = self.scheduler
        if self.running:
            began = now()
            scheduler.finish(self.time_ns)
            action = scheduler.decide(self.time_ns)
            took = now() - began
            name = "finish_decide"
        else:
            lane = self.random.randrange(LOOPS)
            self.sequences[lane] += 1
            began = now()
            scheduler.submit(lane, self.sequences[lane], 0, self.time_ns, 0, self.time_ns)
            action = scheduler.decide(self.time_ns)
            took = now() - began
            self.queued += 1
            name = "submit_decide"
        self.running = action.kind == START
        if self.running:
            self.queued -= len(action.jobs)
        elif action.kind != WAIT:
            self.queued -= 1
            self.running = self.settle()
        self.refill()
        return name, took

    def refill(self) -> None:
        while self.queued < QUEUED:
            lane = self.random.randrange(LOOPS + 8) if self.random.random() < 0.5 else LOOPS + self.random.randrange(8)
            if self.running and self.random.random() < 0.5:
                self.timed_submit(lane)
            else:
                self.submit(lane)
        if not self.running:
            self.running = self.settle()

    samples: list[int]

    def timed_submit(self, lane: int) -> None:
        """A submission that arrives while something runs: decided as Wait."""
        self.sequences[lane] += 1
        began = now()
        self.scheduler.submit(lane, self.sequences[lane], 0, self.time_ns, 0, self.time_ns)
        action = self.scheduler.decide(self.time_ns)
        self.samples.append(now() - began)
        self.queued += 1
        if action.kind != WAIT:
            self.queued -= 1


def timer_ns(repeat: Callable[[], int] = now) -> int:
    samples = [now() - repeat() for _ in range(1_000)]
    return abs(sorted(samples)[500])


def measure(rounds: int) -> dict[str, Any]:
    fast, early, crowds = FastCase(), FastCase(50_000), [Crowd() for _ in range(CROWDS)]
    blocks: list[int] = []
    early_blocks: list[int] = []
    events: dict[str, list[list[int]]] = {"submit_decide_while_running": [[] for _ in crowds]}
    for crowd, samples in zip(crowds, events["submit_decide_while_running"], strict=True):
        crowd.samples = samples
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(rounds):
        blocks.append(fast.block())
        early_blocks.append(early.block())
        for number, crowd in enumerate(crowds):
            for _ in range(EVENTS_PER_ROUND):
                name, took = crowd.event()
                events.setdefault(name, [[] for _ in crowds])[number].append(took)
    by_event = {name: [took for one in samples for took in one] for name, samples in events.items()}
    decisions = [sorted(same)[CROWDS // 2] for samples in events.values() for same in zip(*samples, strict=True)]
    everything = [took for samples in by_event.values() for took in samples]
    blocks.sort()
    early_blocks.sort()
    return {
        "fast_ns": {"best": blocks[0], "median": blocks[len(blocks) // 2]},
        "fast_early_ns": {"best": early_blocks[0], "median": early_blocks[len(early_blocks) // 2]},
        "loops": LOOPS,
        "queued": QUEUED,
        "events": len(everything),
        "decision_ns": percentiles(decisions),
        "event_ns": percentiles(everything),
        "by_event_ns": {name: percentiles(samples) for name, samples in sorted(by_event.items()) if samples},
        "timer_ns": timer_ns(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    print(json.dumps(measure(parser.parse_args().rounds), indent=2))


if __name__ == "__main__":
    main()
