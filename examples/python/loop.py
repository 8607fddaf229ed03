"""A complete control loop in Python, paced by the loop's own period.

    python loop.py LOOP [SECONDS]

Each cycle it writes an observation into shared memory, lets taktd run the policy, and uses the action if it came in
time; else it acts safely on its own. At the end it says how the cycles went. Ctrl-C ends it early.
"""

from __future__ import annotations

import gc
import sys
import time

import numpy as np

from taktd.ipc import Busy, Lane, TaktError, connect


def observe(lane: Lane, cycle: int) -> None:
    """The sensors. A real robot reads them here; this one makes numbers up, for any tensors."""
    for tensor in lane.inputs.values():
        tensor[...] = cycle % 100 / 100 if tensor.dtype == np.float32 else 0


def act(lane: Lane) -> None:
    """The actuators. Outputs lie where the engine wrote them, until the next reply."""
    for tensor in lane.outputs.values():
        tensor.sum()


def act_safely() -> None:
    """What the robot does when no action came: brake, hold, whatever is safe. Here: nothing."""


def run(lane: Lane, seconds: float) -> None:
    cycles = missed = late = unanswered = 0
    round_trips_us: list[float] = []
    end = time.monotonic() + seconds
    gc.freeze()
    gc.disable()  # a collection takes longer than a cycle
    try:
        for tick in lane.ticks(None if lane.period_ns else 1000):
            missed += tick.missed
            cycles += 1
            began_ns = time.monotonic_ns()
            try:
                observe(lane, tick.index)
                reply = lane.infer()
            except Busy:  # no answer to any of the jobs before: an executor is being replaced
                act_safely()
                unanswered += 1
                round_trips_us.append(float("inf"))
            else:
                if reply.ok and not reply.late:
                    act(lane)
                else:
                    act_safely()
                    late += reply.ok
                    unanswered += not reply.ok
                round_trips_us.append((time.monotonic_ns() - began_ns) / 1000)
            if time.monotonic() >= end:
                break
    except KeyboardInterrupt:
        pass
    finally:
        gc.enable()
    print(f"cycles {cycles}, missed {missed}, late {late}, without answer {unanswered}")
    if round_trips_us:
        p50, p99, p999 = np.percentile(round_trips_us, [50, 99, 99.9], method="higher")
        print(f"round trip p50 {p50:.0f} us, p99 {p99:.0f} us, p99.9 {p999:.0f} us")


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((__doc__ or "").strip())
        return 0
    if len(sys.argv) < 2:
        print((__doc__ or "").split("\n")[2].strip(), file=sys.stderr)
        return 2
    try:
        with connect() as node, node.attach(sys.argv[1]) as lane:
            run(lane, float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)
    except TaktError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
