"""For the package tests: asks a loop at its period, re-attaches where its lane ended, tells what it saw.

Usage: client.py LOOP SECONDS   Ends after that, or at SIGTERM, with one JSON object: answers, ok, late, attached (how
often), gap_ms (the longest time between two good answers), last_second (good answers in the second before the end),
statuses, error (the first refusal, ""), lanes (for each, in order: seconds between its first and its last good answer,
and gap_ms as above within it).
"""

import json
import signal
import sys
import time
from collections import Counter, deque

from taktd.ipc import Detached, NotConnected, TaktError, connect

ANSWER_US = 10_000_000  # patience: what the daemon answers counts, not when this program gives up


def main() -> None:
    name, until = sys.argv[1], time.monotonic() + float(sys.argv[2])

    def end(*_: object) -> None:
        nonlocal until
        until = 0.0

    signal.signal(signal.SIGTERM, end)
    statuses: Counter[str] = Counter()
    late = attached = 0
    last = gap = 0.0
    recent: deque[float] = deque(maxlen=5000)
    lanes: list[dict[str, float]] = []
    error = ""
    while time.monotonic() < until:
        try:
            with connect(timeout_us=500_000) as node, node.attach(name, wait="hybrid") as lane:
                attached += 1
                first = previous = 0.0
                lanes.append({"seconds": 0.0, "gap_ms": 0.0})
                for _ in lane.ticks():
                    for view in lane.inputs.values():
                        view[...] = 0
                    reply = lane.infer(timeout_us=ANSWER_US)
                    now = time.monotonic()
                    statuses[reply.status] += 1
                    late += reply.late
                    if reply.ok:
                        gap = max(gap, now - last) if last else 0.0
                        last = now
                        recent.append(now)
                        first = first or now
                        told = lanes[-1]
                        told["seconds"] = round(now - first, 3)
                        told["gap_ms"] = max(told["gap_ms"], round((now - (previous or now)) * 1000, 1))
                        previous = now
                    elif reply.status == "detached":
                        raise Detached("the lane ended")
                    if now > until:
                        break
        except (Detached, NotConnected):
            continue
        except TaktError as refused:
            error = error or f"{type(refused).__name__}: {refused}"
            if last == 0.0:
                break
            time.sleep(0.01)  # taken or not there for the moment: the loop's old client is being cleared away
    ended = time.monotonic()
    print(
        json.dumps(
            {
                "answers": sum(statuses.values()),
                "ok": statuses["ok"],
                "late": late,
                "attached": attached,
                "gap_ms": round(gap * 1000, 1),
                "last_second": sum(moment > ended - 1 for moment in recent),
                "statuses": dict(statuses),
                "error": error,
                "lanes": lanes,
            }
        )
    )


if __name__ == "__main__":
    main()
