"""Recording and replay of many decisions. A benchmark, never a timed test.

    python bench/replay.py [--decisions N] [--json]

Drives a scheduler with three loops and two best-effort lanes (cancellations, expiries, batches), records it, replays it
here and in another process; and takes the time that recording adds to a job of the fast path.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from taktd.daemon.recording.record import Record, Recorder, Recording, read_recording, write_recording
from taktd.daemon.recording.replay import replay
from taktd.daemon.schedule.job import EXPIRE, START, Job, Queue, Task
from taktd.daemon.scheduler import Scheduler
from tests.recordings import sections_of

MS = 1_000_000
SLOTS = 4  # as a lane has: so many jobs a client can have in flight


def recorded(decisions: int, seed: int = 1) -> Recording:
    """A recording of at least so many decisions."""
    draw = random.Random(seed)
    records: list[Record] = []
    recorder = Recorder(lambda kind, lane, aux, a, b, t: records.append((t, kind, lane, aux, a, b)))
    scheduler = Scheduler(2 * MS, 100_000)
    for lane, (period, cost) in enumerate([(4 * MS, 500_000), (10 * MS, 2 * MS), (20 * MS, MS)]):
        scheduler.add_loop(lane, Task(f"loop{lane}", period, period, lane * 100_000, cost, order=lane))
    scheduler.add_queue(3, Queue("policy", (400_000, 600_000, 800_000), (2,)))
    scheduler.add_queue(4, Queue("vision", (1_500_000,)))
    recorder.state(scheduler, 0)
    now, ending, made = MS, 0, 0
    sequence = [0] * 5
    while made < decisions:
        now += draw.randint(1, 400_000)
        if ending and now >= ending:
            now, ending = ending, 0
            scheduler.finish(now)
            recorder.finish(now)
        elif draw.random() < 0.99:
            lane = draw.randrange(5)
            if scheduler.accounts(lane).queued >= SLOTS:
                continue
            sequence[lane] += 1
            deadline = now + draw.randint(MS, 9 * MS) if lane > 2 and draw.random() < 0.3 else 0
            scheduler.submit(lane, sequence[lane], 0, now, deadline, now)
            recorder.submit(lane, sequence[lane], 0, now, deadline, now)
        else:
            lane = draw.randrange(5)
            gone = scheduler.cancel(lane, sequence[lane], now)
            recorder.cancel(lane, sequence[lane], gone is not None, now)
        while True:
            action = scheduler.decide(now)
            recorder.decided(action, now)
            made += 1
            if action.kind == START:
                ending = now + draw.randint(action.jobs[0].cost_ns // 2, action.jobs[0].cost_ns)
            elif action.kind != EXPIRE:
                break
    return sections_of("sim0", records)


def cost_per_job_ns(jobs: int = 20_000, rounds: int = 20) -> int:
    """What submit, start, finish and wait cost to record into a real journal; the best of several rounds, CPU time."""
    import socket

    from taktd.ipc import _core

    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pages = _core.create_ledger(4), _core.create_stats(4), _core.create_journal(1 << 16)
    recorder = Recorder(_core.Server(*pages, control.fileno()).record)
    job = Job()
    job.lane, job.sequence, job.deadline_ns = 0, 1, 10**15
    started = (job,)
    best = 1 << 62
    gc.disable()
    for _ in range(rounds):
        begin = time.thread_time_ns()
        for number in range(jobs):
            recorder.submit(0, number, 1, 10**15, 0, 10**15)
            recorder.started(started, 10**15)
            recorder.finish(10**15)
            recorder.waiting(10**15, 10**15, 10**15)
        best = min(best, time.thread_time_ns() - begin)
    gc.enable()
    other.close()
    return best // jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        done = replay(read_recording(arguments.replay.read_bytes()))
        print(json.dumps({"decisions": done.decisions, "identical": done.difference is None}))
        return
    result: dict[str, Any] = {"record_ns_per_job": cost_per_job_ns()}
    recording = recorded(arguments.decisions)
    with tempfile.NamedTemporaryFile(suffix=".taktrec") as file:
        result["records"] = write_recording(file, recording)
        file.flush()
        result["bytes"] = file.tell()
        begin = time.perf_counter()
        done = replay(recording)
        result |= {"decisions": done.decisions, "identical": done.difference is None,
                   "replay_s": round(time.perf_counter() - begin, 2)}  # fmt: skip
        command = [sys.executable, __file__, "--replay", file.name]
        result["another_process"] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key}: {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
