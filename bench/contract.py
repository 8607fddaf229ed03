"""A 1 kHz loop with the Go1 policy beside four clients that saturate the device with best effort: who makes whom late?

    python bench/contract.py [--seconds 60] [--rounds 4]

Prints JSON; exit code 1 where a promise was not kept. As root the executor has core 1 at SCHED_FIFO 80, the loop's
client core 0 at 70; best effort's clients are ordinary processes on core 0. Rounds go by turns: best effort alone on
the device, then beside the loop, so both meet the same machine.

- `misses`: the loop's jobs that were late or not run, by cause. `blocked_by`, and `overrun` where a best-effort job
  did it, are the schedule's fault and must be 0. `machine` and `wakeup` are not: beside them, in the same seconds and
  on the client's core, `bare` is a loop of clock_nanosleep at the same rate, and how often it woke so late that its
  job, had it had one, would have missed.
- `best_effort.kept_ppm`: its rate beside the loop, as a share of what the loop's reservation (C / T) leaves of its rate
  alone; at least 850000.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from run import ROBOTS, save, save_policy

from taktd.daemon.benchmark import quantiles, read_rights, take_core_and_priority, without_gc
from taktd.daemon.control_client import ask
from taktd.daemon.direct import open_direct
from taktd.daemon.foreground import Foreground, end_with_parent
from taktd.ipc import Detached, connect
from taktd.ipc._core import now, tick_next

PERIOD_NS: Final = 1_000_000
CLIENTS: Final = 4
WORK_NS: Final = 220_000  # what a best-effort job shall take; at most 300 µs
KEPT_PPM_MIN: Final = 850_000
ALONE_S_MAX: Final = 3.0
SETTLE_S: Final = 0.3
READY: Final = "ready"
CLIENT_PRIORITY: Final = 70
MISSED_TOLD: Final = 20


def save_work(path: Path) -> int:
    """A chain of matrix products that takes about WORK_NS; returns what it takes in the middle, ns."""
    size, layers, took = 96, 4, 0
    for _ in range(4):
        rng = np.random.default_rng(1)
        weight = numpy_helper.from_array((rng.normal(size=(size, size)) / size**0.5).astype(np.float32), "w")
        names = ["x", *(f"h{i}" for i in range(layers - 1)), "y"]
        nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in pairwise(names)]
        shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in ("x", "y")]
        save(helper.make_graph(nodes, "work", shapes[:1], shapes[1:], [weight]), path)
        direct = open_direct(str(path))
        times = []
        for _ in range(200):
            begun = now()
            direct.run()
            times.append(now() - begun)
        took = sorted(times)[100]
        if 0.8 * WORK_NS < took <= 1.1 * WORK_NS:
            break
        layers = max(1, round(layers * WORK_NS / took))
    return took


# ---- processes beside the loop ----


def saturate(socket: str) -> None:
    with connect(socket) as node, node.attach("work", wait="block") as lane:
        try:
            lane.infer(timeout_us=10_000_000)
            print(READY, flush=True)
            while True:
                lane.infer(timeout_us=10_000_000)
        except Detached:
            pass


def beat_alone(slack_ns: int) -> None:
    """Until SIGTERM: how late clock_nanosleep wakes; says so as JSON."""
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    late_ns: list[int] = []
    index, release_ns, missed, skipped = 0, 0, 0, 0
    while not ended:
        index, release_ns, missed = tick_next(index, release_ns, PERIOD_NS)
        late_ns.append(now() - release_ns)
        skipped += missed
    late_ns.sort()
    over = sum(1 for late in late_ns if late > slack_ns) + skipped
    print(json.dumps({"beats": len(late_ns) + skipped, "too_late": over, "p50_us": late_ns[len(late_ns) // 2] / 1000,
                      "p99_us": late_ns[len(late_ns) * 99 // 100] / 1000, "max_us": late_ns[-1] / 1000}))  # fmt: skip


def beside(*words: str, core: int, priority: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--core", str(core), "--priority", str(priority), "--as", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)


@contextmanager
def saturated(socket: str, core: int) -> Iterator[None]:
    """From when every client has had its first answer."""
    clients = [beside("client", socket, core=core) for _ in range(CLIENTS)]
    try:
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline().strip() != READY:
                raise RuntimeError("a client of best effort ended before its first answer; see its standard error")
        yield
    finally:
        for client in clients:
            client.terminate()
        for client in clients:
            client.communicate()


# ---- the measurement ----


class Loop:
    """What the loop's client has seen."""

    def __init__(self) -> None:
        self.jobs = self.skipped = 0
        self.misses: Counter[str] = Counter()
        self.by_best_effort = 0
        self.missed: list[dict[str, Any]] = []  # the first of them
        self.round_trips_ns = array("q")

    def run(self, socket: str, seconds: float) -> None:
        with connect(socket) as node, node.attach("walk", wait="block", kind="loop") as lane, without_gc():
            until_ns = now() + int(seconds * 1e9)
            for tick in lane.ticks():
                if now() >= until_ns:
                    return
                self.skipped += tick.missed
                self.jobs += 1
                reply = lane.infer(timeout_us=1_000_000)
                if reply.ok:
                    self.round_trips_ns.append(round(reply.total_us * 1000))
                if not reply.ok or reply.late:
                    self.misses[reply.cause or "none"] += 1
                    self.by_best_effort += reply.cause == "overrun" and reply.cause_detail != 0
                    if len(self.missed) < MISSED_TOLD:
                        self.missed.append({
                            "status": reply.status, "cause": reply.cause, "lane": reply.cause_detail,
                            "queued_us": round(reply.queued_us), "run_us": round(reply.run_us),
                            "late_us": (reply.ended_ns - reply.deadline_ns) // 1000,
                        })  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs, "client_skipped": self.skipped, "misses": dict(self.misses),
            "overrun_by_best_effort": self.by_best_effort, "first_missed": self.missed,
            **quantiles(self.round_trips_ns),
        }  # fmt: skip


def best_effort_jobs(environment: dict[str, str]) -> int:
    return next(int(m["statistics"]["ok"]) for m in ask("models", environment)["models"] if m["name"] == "work")


def rate_during(environment: dict[str, str], action: Any) -> float:
    before, begun = best_effort_jobs(environment), now()
    action()
    return (best_effort_jobs(environment) - before) * 1e9 / (now() - begun)


def measure(seconds: float, rounds: int, cores: tuple[int, int]) -> dict[str, Any]:
    client_core, executor_core = cores
    with tempfile.TemporaryDirectory(prefix="taktd-bench-") as folder:
        policy = ROBOTS / "go1" / "policy.onnx"
        if not policy.is_file():
            policy = Path(folder) / "policy.onnx"
            save_policy(policy)
        work = Path(folder) / "work.onnx"
        took_ns = save_work(work)
        yaml = (
            f"devices: {{cpu0: {{driver: cpu, cores: [{executor_core}]}}}}\n"
            f"models: {{go1: {{path: {json.dumps(str(policy))}}}, work: {{path: {json.dumps(str(work))}}}}}\n"
            "loops: {walk: {model: go1, device: cpu0, period: 1ms}}\nadmission: {on_refusal: uncertified}\n"
        )
        with Foreground(yaml) as daemon:
            return serve_and_measure(daemon, seconds, rounds, client_core, took_ns)


def serve_and_measure(
    daemon: Foreground, seconds: float, rounds: int, client_core: int, took_ns: int
) -> dict[str, Any]:
    environment = dict(daemon.environment)
    cost_ns = int(next(entry["cost_ns"] for entry in ask("loops", environment)["loops"]))
    executor = ask("status", environment)["executors"][0]
    loop, alone, beside_loop = Loop(), [], []
    bare = beside("bare", str(PERIOD_NS - cost_ns), core=client_core, priority=CLIENT_PRIORITY)
    try:
        with saturated(daemon.lanes_socket, client_core):
            refused = take_core_and_priority(client_core, CLIENT_PRIORITY)
            for _ in range(rounds):
                alone.append(rate_during(environment, lambda: time.sleep(min(ALONE_S_MAX, seconds / rounds))))
                beside_loop.append(rate_during(environment, lambda: loop.run(daemon.lanes_socket, seconds / rounds)))
                time.sleep(SETTLE_S)
    finally:
        bare.terminate()
        said = bare.communicate()[0]
    left_ppm = 1_000_000 - cost_ns * 1_000_000 // PERIOD_NS
    kept_ppm = round(sum(beside_loop) / sum(alone) * 1_000_000 * 1_000_000 / left_ppm)
    result = {
        "seconds": seconds, "loop": {"cost_us": cost_ns / 1000, **loop.as_json()},
        "best_effort": {
            "job_us": took_ns / 1000, "alone_hz": round(sum(alone) / rounds, 1),
            "beside_loop_hz": round(sum(beside_loop) / rounds, 1), "left_ppm": left_ppm, "kept_ppm": kept_ppm,
        },
        "bare": json.loads(said), "executor": executor["rights"], "client": read_rights(),
        "certified": executor["certified"], "not_certified": executor["not_certified"], "refused": refused,
    }  # fmt: skip
    result["kept"] = {
        "blocked_by": loop.misses["blocked_by"] == 0, "overrun_by_best_effort": loop.by_best_effort == 0,
        "throughput": kept_ppm >= KEPT_PPM_MIN,
    }  # fmt: skip
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the loop beside best effort")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--priority", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--as", nargs=2, dest="role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        take_core_and_priority(arguments.core, arguments.priority)
        role, word = arguments.role
        if role == "client":
            saturate(word)
        else:
            beat_alone(int(word))
        return 0
    usable = sorted(os.sched_getaffinity(0))
    result = measure(arguments.seconds, arguments.rounds, (usable[0], usable[-1]))
    print(json.dumps(result, indent=2))
    return 0 if all(result["kept"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
