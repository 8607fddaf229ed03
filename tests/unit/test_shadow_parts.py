"""A sample of a lane counts only if nothing changed while it was copied; differences add up. No process here."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from taktd.daemon.doors.control_door import ControlError
from taktd.daemon.health.lane_view import COMPLETION, COMPLETION_TAIL, ENTRY_BYTES, LATE, LaneView
from taktd.daemon.health.loop_tap import LoopTap
from taktd.daemon.shadow.commands import Shadow
from taktd.daemon.shadow.comparison import Comparison
from taktd.daemon.shadow.lane_sampler import LaneSampler
from taktd.engines.difference import Rules
from taktd.engines.tensors import DTYPE_BY_NUMBER, TensorSpec
from taktd.ipc import _core

FP32 = 1
OK, FAILED = _core.STATUSES["ok"], _core.STATUSES["failed"]


class Lane:
    """The memory of a lane, written as client and executor would."""

    def __init__(self) -> None:
        kind, x, y = 1, ("x", FP32, (4,)), ("y", FP32, (2,))
        self.layout = _core.create_lane("walk", "m", kind, [x], [y], slot_count=4, dynamic=False, period_ns=10_000_000,
                                        deadline_ns=10_000_000, jitter_ns=0, epoch=1, trigger=0)  # fmt: skip
        self.memory = mmap.mmap(self.layout["fd"], self.layout["total_size"])
        self.jobs = 0

    def submit(self, sequence: int, slot: int) -> None:
        at = self.layout["submit_ring_offset"] + (sequence - 1) % self.layout["ring_entries"] * ENTRY_BYTES
        struct.pack_into("<Q16xI", self.memory, at, sequence, slot)

    def write(self, slot: int, values: list[float], tensor: str = "inputs", area: int = 0) -> None:
        offset = self.layout[tensor][0]["offset"]
        at = self.layout["slots_offset"] + slot * self.layout["slot_stride"]
        at += offset[area] if tensor == "outputs" else offset
        struct.pack_into(f"<{len(values)}f", self.memory, at, *values)

    def complete(self, sequence: int, slot: int, status: int = OK, flags: int = 0, area: int = 0) -> None:
        at = self.layout["completion_ring_offset"] + self.jobs % self.layout["ring_entries"] * ENTRY_BYTES
        COMPLETION.pack_into(self.memory, at, sequence, slot, status, flags, 1, 0, area, 1, 2, 3, 4, 0, 0)
        self.jobs += 1
        at = self.layout["cursors_offset"] + COMPLETION_TAIL
        self.memory[at : at + 8] = self.jobs.to_bytes(8, "little")

    def job(self, sequence: int, slot: int, area: int = 0, **more: int) -> None:
        self.write(slot, [sequence, 2, 3, 4])
        self.submit(sequence, slot)
        self.write(slot, [sequence, 9], "outputs", area)
        self.complete(sequence, slot, area=area, **more)


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane()
    yield made
    made.memory.close()
    os.close(made.layout["fd"])


@pytest.fixture
def sampler(lane: Lane) -> Iterator[LaneSampler]:
    made = LaneSampler(lane.layout, os.dup(lane.layout["fd"]))
    yield made
    made.close()


def test_a_job_is_read_once_with_what_it_was_answered(lane: Lane, sampler: LaneSampler) -> None:
    assert sampler.sample() is None
    for sequence, area in ((1, 0), (2, 1)):
        lane.job(sequence, slot=sequence % 2, area=area)
        found = sampler.sample()
        assert found is not None
        assert found.sequence == sequence
        assert struct.unpack("<4f", found.inputs[0]) == (sequence, 2, 3, 4)
        assert struct.unpack("<2f", found.outputs[0]) == (sequence, 9)
        assert sampler.sample() is None
    assert sampler.torn == 0


@pytest.mark.parametrize(
    "more",
    [{"status": FAILED}, {"flags": LATE}, {"slot": 4}, {"area": 2}, {"sequence": 0}],
    ids=lambda more: next(iter(more)),
)
def test_what_was_not_done_well_or_is_no_entry_is_not_looked_at(
    lane: Lane, sampler: LaneSampler, more: dict[str, int]
) -> None:
    lane.complete(**{"sequence": 1, "slot": 0, **more})
    assert sampler.sample() is None
    assert sampler.torn == 0


def between(do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """While the outputs are copied, after the inputs."""
    tensors, calls = LaneView._tensors, []

    def copying(self: LaneView, slot: int, places: list[tuple[int, int]]) -> list[bytes]:
        found = tensors(self, slot, places)
        calls.append(slot)
        if len(calls) == 2:
            do()
        return found

    monkeypatch.setattr(LaneView, "_tensors", copying)


@pytest.mark.parametrize(
    "change",
    [
        lambda lane: lane.submit(3, 0),
        lambda lane: lane.write(0, [7.0]),
        lambda lane: lane.complete(2, 1),
        lambda lane: [lane.complete(sequence, 1) for sequence in range(2, 10)],
    ],
    ids=["a later job in the slot", "other inputs", "a later reply", "the ring went round"],
)
def test_a_torn_sample_is_dropped_and_counted(
    lane: Lane, sampler: LaneSampler, monkeypatch: pytest.MonkeyPatch, change: Callable[[Lane], None]
) -> None:
    between(lambda: change(lane), monkeypatch)
    lane.job(1, slot=0)
    assert sampler.sample() is None
    assert sampler.torn == 1


def test_what_had_gone_by_before_it_came_is_not_sampled(lane: Lane) -> None:
    lane.job(1, slot=0)
    late = LaneSampler(lane.layout, os.dup(lane.layout["fd"]))
    assert late.sample() is None
    late.close()


def test_whoever_publishes_a_lane_looks_at_no_other_completions_than_who_runs_it_again(lane: Lane) -> None:
    published: list[tuple[int, list[bytes]]] = []

    async def look() -> None:
        tap = LoopTap("walk", lane.layout, os.dup(lane.layout["fd"]), lambda topic, event, tensors: (
            published.append((event["sequence"], tensors))))  # fmt: skip
        lane.job(1, slot=0, area=1)
        for more in ({"slot": 4}, {"area": 2}, {"sequence": 0}, {"slot": 2**32 - 1}):
            lane.complete(**{"sequence": 2, "slot": 0, **more})
        lane.job(6, slot=1, status=FAILED)
        tap._look()
        tap.close()

    asyncio.run(look())
    assert published == [(1, [struct.pack("<2f", 1, 9)]), (6, [])]


# ---- comparison ----


def outputs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPE_BY_NUMBER[FP32], (2,), (False,), True) for name in names]


def values(*numbers: float) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.float32)


def test_differences_add_up_per_output_and_per_job() -> None:
    comparison = Comparison(outputs("y", "z"), Rules())
    comparison.compare(1, [values(1, 2), values(3, 4)], [values(1, 2), values(3, 4)])
    comparison.compare(2, [values(1, 2.5), values(3, 4)], [values(1, 2), values(3, 4)])
    comparison.compare(3, [values(0, 0), values(3, np.nan)], [values(1, 2), values(3, 4)])
    comparison.failing("out of memory")
    told = json.loads(json.dumps(comparison.as_json(), allow_nan=False))
    assert (told["samples"], told["differing"], told["failed"], told["failure"]) == (4, 2, 1, "out of memory")
    y, z = told["outputs"]["y"], told["outputs"]["z"]
    assert (y["differing"], y["elements"], y["max_abs"], y["max_rel"], y["not_finite"]) == (2, 3, 2.0, 1.0, 0)
    assert y["worst"] == {"sequence": 3, "at": [1], "found": 0.0, "expected": 2.0}
    assert (z["differing"], z["not_finite"], z["max_abs"]) == (1, 1, 0.0)
    assert z["worst"] == {"sequence": 3, "at": [1], "found": "nan", "expected": 4.0}
    assert (y["rtol"], y["atol"]) == (1e-3, 1e-5)


def test_tolerances_are_those_of_verification() -> None:
    for rules, differing in ((Rules(), 1), (Rules(atol=1.0), 0), (Rules(rtol=0.5), 0)):
        comparison = Comparison(outputs("y"), rules)
        comparison.compare(1, [values(1, 2.5)], [values(1, 2)])
        assert comparison.differing == differing


def test_times_are_of_runs_that_nobody_disturbed() -> None:
    comparison = Comparison(outputs("y"), Rules())
    assert comparison.as_json()["times"] == {
        "runs": 0,
        "disturbed": 0,
        "p50_ns": 0,
        "p99_ns": 0,
        "p999_ns": 0,
        "max_ns": 0,
    }
    for duration_ns in range(1, 1001):
        comparison.ran(duration_ns, undisturbed=True)
    comparison.ran(10**9, undisturbed=False)
    times = comparison.as_json()["times"]
    assert times == {"runs": 1001, "disturbed": 1, "p50_ns": 500, "p99_ns": 990, "p999_ns": 999, "max_ns": 1000}


# ---- on a GPU ----


def on_a_gpu(role: str) -> Shadow:
    device = SimpleNamespace(name="gpu0", role=role, member=SimpleNamespace(plan=SimpleNamespace(
        device=SimpleNamespace(gpu=object()))))  # fmt: skip
    model = SimpleNamespace(name="go1", version="latest", path="/store/go1/1/model.onnx")
    loop = SimpleNamespace(name="walk", model="go1", device="gpu0")
    configuration = SimpleNamespace(models={"go1": model}, loops={"walk": loop})
    return Shadow(SimpleNamespace(configuration=configuration, devices={"gpu0": device}))  # type: ignore[arg-type]


def test_on_a_gpu_it_runs_only_while_the_loops_are_with_their_stand_in() -> None:
    with pytest.raises(ControlError, match="nothing else may run on a GPU"):
        on_a_gpu("primary")._wanted("go1")
    _, loops, device = on_a_gpu("stand-in")._wanted("go1")
    assert ([loop.name for loop in loops], device.name) == (["walk"], "gpu0")


def test_on_a_gpu_it_ends_when_the_primary_has_its_loops_back() -> None:
    shadow = on_a_gpu("stand-in")
    device = shadow._supervisor.devices["gpu0"]
    device.lanes = SimpleNamespace(loops={"walk": None})
    shadow._name, shadow._device, shadow._loops, shadow._path = "go1", "gpu0", ["walk"], "/store/go1/1/model.onnx"
    assert shadow._pointless() == ""
    device.role = "primary"  # type: ignore[misc]
    assert "nothing else may run on a GPU" in shadow._pointless()
    shadow._supervisor.configuration.models["go1"].path = "/store/go1/2/model.onnx"
    assert shadow._pointless() == "another version is served now"
