"""`python -m taktd.daemon.shadow.runner`: a model's next version, run on copies of the jobs that loops have done.

Started and watched by the supervisor (shadow_process.py), which tells it over one inherited socket what to run and
which lanes to look at; when that socket ends it ends too. It reads the lanes' memory beside the loops and writes to
none of it. It runs only when nobody else wants its core (SCHED_IDLE), where there are others not on the executors'
cores, and rests after each run as long as that took.

Messages from the supervisor: `configure`, `lane` with a loop's memory, `lane.gone`, `stop`. To it: `ready` with what
verification said, `failed`, and `seen` twice a second.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import numpy as np

from taktd.daemon.execution.link import ExecutorLink, LinkClosed
from taktd.daemon.shadow.comparison import Comparison
from taktd.daemon.shadow.lane_sampler import LaneSampler, Sampled
from taktd.engines.engine import EngineSpec
from taktd.engines.errors import EngineFailure, ModelRefused
from taktd.engines.factory import computes_the_model, engine_opener
from taktd.engines.finite import guarded
from taktd.engines.inspect import specs_from_json
from taktd.engines.tensors import TensorSpec
from taktd.engines.verify import Bench, Rules, expect, verify
from taktd.ipc import _core

TELL_NS: Final = 500_000_000
REST_NS_MIN: Final = 1_000_000  # so often a lane is looked at, at most
REST_NS_MAX: Final = 50_000_000
EXIT_FAILED: Final = 3

Message = dict[str, Any]


class Runner:
    """One run, from `configure` to the end of the link."""

    def __init__(self, link: ExecutorLink, plan: Message) -> None:
        """Loads, warms and verifies the version. Raises ModelRefused, EngineFailure."""
        self._link = link
        model = plan["model"]
        inspection = model["inspection"]
        spec = EngineSpec(
            model["name"], model["path"], specs_from_json(inspection["inputs"]), specs_from_json(inspection["outputs"]),
            1, inspection["digest"],
        )  # fmt: skip
        rules = Rules(**model["verify"])
        engine = engine_opener(plan["driver"])(spec).warm()
        self.verified: Message = {}
        self.notes: list[str] = []
        if computes_the_model(plan["driver"]):
            expected = expect(spec, rules)
            if expected.note:
                self.notes.append(expected.note)
            else:
                self.verified = verify(engine, expected, model["non_finite"])
        engine = guarded(engine, model["non_finite"])
        self._spec = spec
        self._bench = Bench(spec, engine.bind)
        self._comparison = Comparison(spec.outputs, rules)
        self._lanes: dict[str, LaneSampler] = {}
        self._torn = 0  # on lanes that are gone
        self._rest_ns = REST_NS_MIN
        self.over = False

    def serve(self) -> None:
        """Until told to stop, or nobody is there any more. Raises LinkClosed."""
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        due_ns = _core.now()
        while not self.over:
            poll.poll(self._rest_ns / 1e6)
            while (received := self._link.receive()) is not None:
                self._take(*received)
            busy_ns = 0
            for lane in self._lanes.values():
                if (sampled := lane.sample()) is not None:
                    busy_ns += self._run(sampled)
            self._rest_ns = min(REST_NS_MAX, max(REST_NS_MIN, busy_ns))
            if (now_ns := _core.now()) >= due_ns:
                due_ns = now_ns + TELL_NS
                self._tell()

    def _take(self, message: Message, descriptors: list[int]) -> None:
        op = message["op"]
        if op in ("lane", "lane.gone") and (old := self._lanes.pop(message["loop"], None)):
            self._torn += old.torn
            old.close()
        if op == "lane":
            self._lanes[message["loop"]] = LaneSampler(message["layout"], descriptors[0])
        self.over |= op == "stop"

    def _run(self, sampled: Sampled) -> int:
        """ns that it took."""
        woken_ns = _core.now()
        expected = [_values(raw, t) for raw, t in zip(sampled.outputs, self._spec.outputs, strict=True)]
        self._bench.put([_values(raw, t) for raw, t in zip(sampled.inputs, self._spec.inputs, strict=True)])
        switches, began_ns = _core.switched_out(), _core.now()
        try:
            self._bench.run_bound()
        except EngineFailure as failure:
            self._comparison.failing(str(failure))
            return _core.now() - woken_ns
        ended_ns = _core.now()
        self._comparison.ran(ended_ns - began_ns, undisturbed=_core.switched_out() == switches)
        self._comparison.compare(sampled.sequence, self._bench.outputs(), expected)
        return _core.now() - woken_ns

    def _tell(self) -> None:
        torn = self._torn + sum(lane.torn for lane in self._lanes.values())
        with suppress(BlockingIOError):  # the next one says more
            self._link.send({"op": "seen", "torn": torn, **self._comparison.as_json()})

    def close(self) -> None:
        self._tell()
        for lane in self._lanes.values():
            lane.close()
        self._bench.close()


def _values(raw: bytes, tensor: TensorSpec) -> Any:
    flat = np.frombuffer(raw, np.uint8)
    return flat if tensor.dtype.bits < 8 else flat.view(tensor.dtype.numpy).reshape(tensor.dims)


def stand_aside(cores: list[int]) -> None:
    """Runs only where and when nobody else wants to."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def _messages(link: ExecutorLink) -> Iterator[tuple[Message, list[int]]]:
    """What comes, waiting for it. Raises LinkClosed."""
    while True:
        if (received := link.receive()) is not None:
            yield received
        else:
            select.select([link.fileno()], [], [])


def run(link: ExecutorLink) -> int:
    """The exit code."""
    plan, _ = next(_messages(link))
    if plan["op"] != "configure":
        return 0  # told to stop before it began
    stand_aside(plan["cores"])
    try:
        runner = Runner(link, plan)
    except (ModelRefused, EngineFailure) as error:
        link.send({"op": "failed", "error": str(error)})
        return EXIT_FAILED
    link.send({"op": "ready", "verified": runner.verified, "notes": runner.notes})
    runner.serve()
    runner.close()
    return 0


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="taktd.daemon.shadow.runner", description="Started by taktd, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    link = ExecutorLink(socket.socket(fileno=parser.parse_args().control_fd))
    try:
        return run(link)
    except LinkClosed:
        return 0


if __name__ == "__main__":
    sys.exit(main())
