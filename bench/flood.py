"""Does a gRPC flood that saturates the gateway make a 1 kHz loop miss? Short blocks by turns, in one run.

    python bench/flood.py [--blocks 40] [--seconds 1] [--seed N]

Prints JSON. Three kinds of block, their order drawn anew in each round:

- `quiet`: the loop alone;
- `flood`: two processes keep 16 calls of the policy in flight each, which saturates the gateway;
- `echo`: the same two processes ask a bare grpcio server of the same size instead. It has nothing to do with taktd:
  what an ordinary program does to the loop that is as busy on the same core, with as many threads and sockets.

As root the executor has the last core at SCHED_FIFO 80; the loop's client has the first one at 70, and everything else
(gateway, echo, flood) is ordinary and there too. A beat is missed where the answer was late or none (`by_cause` has
taktd's word for why), and `skipped` where the client itself came so late that its beat had gone. What taktd answers for
is `blocked_by`, `overrun`, `late_release`, `handover`; `machine` and `wakeup` are a core that was taken away or came
late: compare them with `echo`, and with `bare`, a clock_nanosleep loop of the same rate on the client's core, which ran
all the time.

`queued_us`, `run_us`: from a job's release to its start, and on the device; answered jobs only. A job of the flood may
run before one of the loop, as long as admission says.

`compared`: for two kinds the difference of missed shares, round by round: its mean, the range that 95 % of 10 000
resamplings of the rounds give, in how many rounds it was more and less, and `p` of a sign test.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import random
import sys
import tempfile
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import grpc
import numpy as np
from contract import beside
from front_doors import ECHO, METHOD, ROOT, go1, grpc_echo, model_request, wait_for

sys.path.insert(0, str(ROOT))

from taktd.daemon.benchmark import take_core_and_priority, without_gc
from taktd.ipc import Lane
from tests.running import Running

KINDS = ("quiet", "flood", "echo")
PERIOD_NS = 1_000_000
CLIENT_PRIORITY = 70
PROCESSES = 2
IN_FLIGHT = 16
SETTLE_S = 0.1
RESAMPLINGS = 10_000
OURS = ("blocked_by", "overrun", "late_release", "handover")
YAML = """\
devices: {{cpu0: {{driver: cpu, cores: [{core}]}}}}
models: {{policy: {{path: {policy}}}}}
loops: {{walk: {{model: policy, period: 1ms}}}}
admission: {{on_refusal: uncertified}}
grpc: {{rights: infer}}
"""


class Block:
    """What one block of the loop saw."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.beats = self.skipped = 0
        self.causes: Counter[str] = Counter()
        self.queued_us = array("d")
        self.run_us = array("d")
        self.calls = 0

    @property
    def missed(self) -> int:
        return self.skipped + sum(self.causes.values())

    def run(self, lane: Lane, seconds: float) -> None:
        until = time.monotonic() + seconds
        for tick in lane.ticks():
            if tick.index:  # the beats between two blocks are nobody's
                self.skipped += tick.missed
                self.beats += tick.missed
            self.beats += 1
            reply = lane.infer(timeout_us=1_000_000)
            if not reply.ok or reply.late:
                self.causes[reply.cause or "none"] += 1
            if reply.ok:
                self.queued_us.append(reply.queued_us)
                self.run_us.append(reply.run_us)
            if time.monotonic() >= until:
                return


def flooding(
    core: int, targets: dict[str, tuple[str, str, bytes]], gates: dict[str, Any], idle: Any, answered: Any
) -> None:
    """One process of the flood, on and off by its gates; until it is killed."""
    take_core_and_priority(core, 0)
    calls = {kind: grpc.insecure_channel(address).unary_unary(method) for kind, (address, method, _) in targets.items()}
    pending: list[Any] = []
    while True:
        kind = next((kind for kind, gate in gates.items() if gate.is_set()), None)
        waiting = [call for call in pending if not call.done()]
        answered.value += len(pending) - len(waiting)
        if kind is None:
            pending = waiting
            if not pending:
                idle.set()
                time.sleep(0.002)
                continue
        else:
            idle.clear()
            pending = waiting + [calls[kind].future(targets[kind][2]) for _ in range(IN_FLIGHT - len(waiting))]
        pending[0].exception()


def measure(folder: Path, rounds: int, seconds: float, chance: random.Random) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    policy, name, shape = go1(folder)
    running = Running(folder, YAML.format(policy=policy, core=cores[-1]))
    running.start().await_ready()
    spawn = mp.get_context("spawn")
    children: list[Any] = []
    bare = None
    try:
        data = model_request("policy", name, np.zeros(shape, np.float32))
        address = f"unix:{running.runtime}/grpc.sock"
        reply_bytes = len(grpc.insecure_channel(address).unary_unary(METHOD)(data))
        echo_at = f"unix:{folder}/echo"
        children.append(spawn.Process(target=on_core, args=(cores[0], echo_at, reply_bytes), daemon=True))
        targets = {"flood": (address, METHOD, data), "echo": (echo_at, ECHO, data)}
        gates = {kind: spawn.Event() for kind in targets}
        idle = [spawn.Event() for _ in range(PROCESSES)]
        answered = [spawn.Value("Q", lock=False) for _ in range(PROCESSES)]
        for one, count in zip(idle, answered, strict=True):
            arguments = (cores[0], targets, gates, one, count)
            children.append(spawn.Process(target=flooding, args=arguments, daemon=True))
        for child in children:
            child.start()
        wait_for([folder / "echo"])
        for one in idle:
            one.wait()
        cost_ns = int(running.loop("walk")["cost_ns"])
        bare = beside("bare", str(PERIOD_NS - cost_ns), core=cores[0], priority=CLIENT_PRIORITY)
        notes = take_core_and_priority(cores[0], CLIENT_PRIORITY)
        blocks: list[list[Block]] = []
        with running.connect() as node, node.attach("walk", wait="block", kind="loop") as lane, without_gc():
            Block("quiet").run(lane, 1.0)
            for _ in range(rounds):
                order = list(KINDS)
                chance.shuffle(order)
                blocks.append([one_block(kind, lane, seconds, gates, idle, answered) for kind in order])
        bare.terminate()
        said = json.loads(bare.communicate()[0])
        return summary(blocks, seconds, chance) | {
            "cost_us": cost_ns / 1000, "bare": said, "notes": notes, "executor": running.executor("cpu0")["rights"],
        }  # fmt: skip
    finally:
        if bare is not None:
            bare.terminate()
        for child in children:
            child.kill()
        running.close()


def on_core(core: int, address: str, size: int) -> None:
    take_core_and_priority(core, 0)
    grpc_echo(address, size, "aio")


def one_block(
    kind: str, lane: Lane, seconds: float, gates: dict[str, Any], idle: list[Any], answered: list[Any]
) -> Block:
    block = Block(kind)
    if kind in gates:
        before = [count.value for count in answered]
        gates[kind].set()
        while any(count.value < begun + 2 * IN_FLIGHT for count, begun in zip(answered, before, strict=True)):
            time.sleep(0.01)
    calls = sum(count.value for count in answered)
    block.run(lane, seconds)
    block.calls = sum(count.value for count in answered) - calls
    if kind in gates:
        gates[kind].clear()
        for one in idle:
            one.wait()
    time.sleep(SETTLE_S)
    return block


# ---- what it says ----


def summary(rounds: list[list[Block]], seconds: float, chance: random.Random) -> dict[str, Any]:
    by_kind = {kind: [next(b for b in blocks if b.kind == kind) for blocks in rounds] for kind in KINDS}
    told: dict[str, Any] = {"rounds": len(rounds), "seconds": seconds}
    for kind, blocks in by_kind.items():
        causes: Counter[str] = sum((block.causes for block in blocks), Counter())
        beats = sum(block.beats for block in blocks)
        told[kind] = {
            "beats": beats, "missed_ppm": round(1e6 * sum(b.missed for b in blocks) / beats),
            "skipped": sum(block.skipped for block in blocks), "by_cause": dict(causes),
            "median_block_ppm": round(float(np.median([1e6 * b.missed / b.beats for b in blocks]))),
            "calls_per_s": round(sum(block.calls for block in blocks) / seconds / len(blocks)),
            **{what: middle_and_tail([getattr(block, what) for block in blocks]) for what in ("queued_us", "run_us")},
        }  # fmt: skip
    counts = {
        "missed": lambda block: block.missed, "ours": lambda block: sum(block.causes[cause] for cause in OURS),
        "machine_and_wakeup": lambda block: block.causes["machine"] + block.causes["wakeup"],
        "skipped": lambda block: block.skipped,
    }  # fmt: skip
    told["compared"] = {
        f"{a} - {b}": {what: compared(by_kind[a], by_kind[b], count, chance) for what, count in counts.items()}
        for a, b in (("flood", "quiet"), ("echo", "quiet"), ("flood", "echo"))
    }
    return told


def middle_and_tail(parts: list[array[float]]) -> dict[str, float]:
    together = np.concatenate([np.array(part) for part in parts])
    return {name: round(float(np.percentile(together, q)), 1) for name, q in (("p50", 50), ("p90", 90), ("p99", 99))}


def compared(first: list[Block], second: list[Block], count: Any, chance: random.Random) -> dict[str, Any]:
    """The difference of two kinds' shares, ppm of beats, round by round."""
    pairs = [(1e6 * count(a) / a.beats, 1e6 * count(b) / b.beats) for a, b in zip(first, second, strict=True)]
    differences = np.array([a - b for a, b in pairs])
    draws = np.random.default_rng(chance.randrange(1 << 32)).integers(0, len(pairs), (RESAMPLINGS, len(pairs)))
    means = np.sort(differences[draws].mean(axis=1))
    return {
        "ppm": round(float(differences.mean())),
        "95%": [round(float(means[int(RESAMPLINGS * q)])) for q in (0.025, 0.975)],
        "more_less": [int((differences > 0).sum()), int((differences < 0).sum())],
        "p": round(sign_test(int((differences > 0).sum()), int((differences < 0).sum())), 3),
    }


def sign_test(more: int, less: int) -> float:
    """How probable at least so uneven a count is where both are as likely; two-sided, ties left out."""
    n, k = more + less, min(more, less)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="of each kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one block")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.blocks, arguments.seconds, random.Random(arguments.seed))
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
