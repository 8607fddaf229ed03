"""The demo's control program: simulates the cart in real time and asks taktd for a force, a thousand times a second.

A process of its own (`python -m taktd.daemon.demo.control JSON`), started by `show`, so that drawing never holds up a
tick. An ordinary client: what it does with `taktd.ipc` a robot's control program does. Standard output carries one JSON
object per line: {"kind": "frame", …} 25 times a second and one {"kind": "end", …}.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from taktd.daemon.benchmark import quantiles, read_rights, take_core_and_priority, without_gc
from taktd.daemon.demo.plant import CartPole
from taktd.daemon.direct import open_direct
from taktd.ipc import Busy, connect

PERIOD_S: Final = 0.001
FRAME_TICKS: Final = 40
TRACE_TICKS: Final = 10
DIRECT_TICKS: Final = 1
"""The network is also run in this process every so many ticks, on the same observation, after the lane's answer."""
UPRIGHT_RAD: Final = math.radians(12)
FALLEN_RAD: Final = math.radians(60)
STEADY_TICKS: Final = 500
"""It stands once it has stayed upright for so long."""
CATCH_UP_TICKS: Final = 200
"""After a longer pause of this process (it was stopped, the machine slept) simulated time stands still, too."""


@dataclass
class Plan:
    """What to do; comes as JSON on the command line."""

    seconds: float
    pushes: list[tuple[float, float]]
    """(when in s, force in N): each lasts for `push_s`."""
    push_s: float
    loop: str
    model_path: str
    core: int | None
    priority: int
    wait: str = "hybrid"


class Judge:
    """Decides whether the pendulum fell: it leaves ±60° after it stood, or it does not stand at the end."""

    def __init__(self) -> None:
        self.upright_ticks = 0
        self.stood_at_s: float | None = None
        self.toppled = False

    def see(self, cart: CartPole, elapsed_s: float) -> None:
        lean = abs(cart.lean_rad)
        self.upright_ticks = self.upright_ticks + 1 if lean < UPRIGHT_RAD else 0
        if self.stood_at_s is None and self.upright_ticks == STEADY_TICKS:
            self.stood_at_s = elapsed_s
        if self.stood_at_s is not None and lean > FALLEN_RAD:
            self.toppled = True

    @property
    def fell(self) -> bool:
        return self.toppled or self.stood_at_s is None or self.upright_ticks == 0

    def phase(self, pushed: bool) -> str:
        if pushed:
            return "pushed"
        if self.stood_at_s is None:
            return "swinging up"
        return "balanced" if self.upright_ticks else "recovering"


@dataclass
class Record:
    """What is kept of a run. Latencies are client-side round trips in ns, answered jobs only."""

    ticks: int = 0
    late: int = 0
    missed: int = 0
    unanswered: int = 0
    different: int = 0
    lane_ns: array[int] = field(default_factory=lambda: array("q"))
    direct_ns: array[int] = field(default_factory=lambda: array("q"))
    trace: list[tuple[float, float, float]] = field(default_factory=list)
    """(time s, lean rad, position m)"""


def say(kind: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"kind": kind, **fields}) + "\n").encode())


def drive(plan: Plan) -> tuple[Record, Judge]:
    """The control loop itself."""
    cart, judge, record = CartPole(), Judge(), Record()
    direct = open_direct(plan.model_path)
    now = time.monotonic_ns
    shown = 0
    last_tick = int(plan.seconds / PERIOD_S)
    with connect() as node, node.attach(plan.loop, wait=plan.wait) as lane:
        force = 0.0
        elapsed_ticks = 0
        for tick in lane.ticks():
            for _ in range(1 + min(tick.missed, CATCH_UP_TICKS)):
                elapsed_ticks += 1
                elapsed_s = elapsed_ticks * PERIOD_S
                push = next((n for at, n in plan.pushes if at <= elapsed_s < at + plan.push_s), 0.0)
                cart.advance(force, push, PERIOD_S)
                judge.see(cart, elapsed_s)
                if elapsed_ticks % TRACE_TICKS == 0:
                    record.trace.append((round(elapsed_s, 3), round(cart.lean_rad, 5), round(cart.position, 5)))
            record.ticks += 1
            record.missed += tick.missed

            if elapsed_ticks >= last_tick:
                break
            try:
                observation = lane.inputs["obs"]
            except Busy:  # every slot waits for its answer: the cart goes on with the force it has
                record.unanswered += 1
                record.late += 1
                continue
            cart.observe(observation)
            if record.ticks % DIRECT_TICKS == 0:
                direct.inputs["obs"][:] = observation
            begun = now()
            reply = lane.infer()
            ended = now()
            if reply.ok:
                force = float(lane.outputs["force"][0, 0])
                record.lane_ns.append(ended - begun)
            else:
                record.unanswered += 1
            record.late += reply.late or not reply.ok

            if record.ticks % DIRECT_TICKS == 0:
                begun = now()
                direct.run()
                record.direct_ns.append(now() - begun)
                record.different += reply.ok and float(direct.outputs["force"][0, 0]) != force
            if elapsed_ticks - shown >= FRAME_TICKS:
                shown = elapsed_ticks
                show_frame(cart, judge, record, elapsed_s, force, push)
    return record, judge


def show_frame(cart: CartPole, judge: Judge, record: Record, elapsed_s: float, force: float, push: float) -> None:
    recent = sorted(record.lane_ns[-250:])
    say(
        "frame",
        time_s=round(elapsed_s, 3),
        lean_rad=cart.lean_rad,
        position_m=cart.position,
        force_n=force,
        push_n=push,
        phase=judge.phase(push != 0.0),
        ticks=record.ticks,
        late=record.late,
        missed=record.missed,
        p50_us=recent[len(recent) // 2] / 1000 if recent else None,
        max_us=recent[-1] / 1000 if recent else None,
    )


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    refused = take_core_and_priority(plan.core, plan.priority)
    with without_gc():
        record, judge = drive(plan)
    result = {
        "ticks": record.ticks,
        "late": record.late,
        "missed": record.missed,
        "unanswered": record.unanswered,
        **quantiles(record.lane_ns),
        **{f"direct_{name}": value for name, value in quantiles(record.direct_ns).items()},
        "direct_runs": len(record.direct_ns),
        "different": record.different,
        "fell": judge.fell,
        "stood_at_s": judge.stood_at_s,
        "seconds": plan.seconds,
        "wait": plan.wait,
        "rt": read_rights() | {"refused": refused},
    }
    edges = np.geomspace(1e3, 1e8, 251)
    say(
        "end",
        result=result,
        plan=asdict(plan),
        trace=record.trace,
        edges_us=[round(float(e) / 1000, 4) for e in edges],
        lane_counts=np.histogram(np.frombuffer(record.lane_ns, np.int64), edges)[0].tolist() if record.lane_ns else [],
        direct_counts=np.histogram(np.frombuffer(record.direct_ns, np.int64), edges)[0].tolist(),
    )


if __name__ == "__main__":
    main()
