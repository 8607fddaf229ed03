"""A control loop whose beat the daemon holds: `trigger: clock` in the configuration.

    python clocked_loop.py LOOP [SECONDS]

The sensors are slower than the loop: an observation comes when it comes, and each beat takes the newest. taktd runs the
policy at its phase in every period; this program acts on each answer, and safely where there was none (the observation
had become older than `max_age`, or the policy was late). Ctrl-C ends it early.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import numpy as np

from taktd.ipc import Lane, TaktError, connect

SENSOR_S = 0.05


def observe(lane: Lane, number: int) -> None:
    """The newest observation, written where the policy reads it. A real robot reads its sensors here."""
    for tensor in lane.inputs.values():
        tensor[...] = number % 100 / 100 if tensor.dtype == np.float32 else 0
    lane.submit()


def act(lane: Lane) -> None:
    """The actuators. Outputs lie where the engine wrote them, until the next reply."""
    for tensor in lane.outputs.values():
        tensor.sum()


def act_safely() -> None:
    """What the robot does when no action came: brake, hold, whatever is safe. Here: nothing."""


def run(lane: Lane, seconds: float) -> None:
    answers: Counter[str] = Counter()
    observations = 1
    observe(lane, 0)
    begun = observed = time.monotonic()
    try:
        for reply in lane.beats():
            if reply.ok and not reply.late:
                act(lane)
            else:
                act_safely()
            answers[f"{reply.status} {reply.path or reply.cause}".strip()] += 1
            now = time.monotonic()
            if now >= begun + seconds:
                break
            if now >= observed + SENSOR_S:
                observed = now
                observe(lane, observations)
                observations += 1
    except KeyboardInterrupt:
        pass
    print(f"{sum(answers.values())} beats from {observations} observations: {dict(answers)}")


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
