"""The gateway's lanes as its requests see them, over a lane that a test answers by hand."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from taktd.daemon.front_doors import lane_pool
from taktd.daemon.front_doors.lane_backend import LaneBackend
from taktd.daemon.front_doors.lane_pool import Job, LanePool, PooledLane
from taktd.ipc.client import Lane
from taktd.ipc.errors import NotFound
from taktd.ipc.inference import Answer, Model, Refusal, Request, Tensor, TensorSpec

FIXED = Model(
    "m", "1", "onnx", (TensorSpec("x", "FP32", (2,), (False,)),), (TensorSpec("y", "FP32", (2,), (False,)),), False
)
DYNAMIC = Model(
    "m", "1", "onnx", (TensorSpec("x", "FP32", (8,), (True,)),), (TensorSpec("y", "UINT4", (8,), (True,)),), True
)


class ByHand:
    """A lane of four slots. `finish()` ends the oldest job; its descriptor is one end of a socket pair."""

    def __init__(self, outputs: dict[str, Any], shape: tuple[int, ...] = ()) -> None:
        import socket

        self.bell, self._rung = socket.socketpair()
        self.slot_count = 4
        self.inputs = {"x": np.zeros(2, np.float32)}
        self.outputs = outputs
        self.input_specs = {"x": ("FP32", (2,))}
        self._shape = shape
        self.out: deque[int] = deque()
        self.ended: set[int] = set()
        self.sequence = 0
        self.cancelled: list[int] = []
        self.asked = 0
        self.announces = False

    def fileno(self) -> int:
        self.announces = True
        return self._rung.fileno()

    def unwatch(self) -> None:
        self.announces = False

    def submit(self, deadline_ns: int) -> int:
        self.sequence += 1
        self.out.append(self.sequence)
        return self.sequence

    def finish(self) -> None:
        self.ended.add(next(s for s in self.out if s not in self.ended))
        if self.announces:
            self.bell.send(b"!")

    def wait(self, sequence: int, timeout_us: float) -> Any:
        self.asked += 1
        if self.announces:
            self._rung.setblocking(False)
            try:
                self._rung.recv(16)
            except BlockingIOError:
                pass
        if not self.out:
            raise NotFound("nothing is pending")
        found = next((s for s in self.out if s in self.ended and sequence in (0, s)), None)
        if found is None:
            return SimpleNamespace(pending=True)
        self.out.remove(found)
        return SimpleNamespace(
            pending=False, sequence=found, ok=True, status="ok", started_ns=2000, ended_ns=3000, submitted_ns=1000,
            path="primary", cause="", late=False,
        )  # fmt: skip

    def cancel(self, sequence: int) -> None:
        self.cancelled.append(sequence)

    def output_shape(self, name: str) -> tuple[int, ...]:
        return self._shape

    def close(self) -> None:
        self.bell.close()
        self._rung.close()


class Nobody:
    def lane_lost(self, model: str, error: str) -> None: ...

    def attach_failed(self, model: str, error: str) -> None:
        raise AssertionError(error)


def attaching(lane: ByHand) -> Callable[[str], Awaitable[Lane]]:
    async def attach(model: str) -> Lane:
        return cast("Lane", lane)

    return attach


def job(pool: LanePool, done: list[Any], priority: int = 0) -> Job:
    tensor = Tensor("x", "FP32", (2,), np.ones(2, np.float32).tobytes())
    request = Request("m", "", "", [tensor], (), 0, priority=priority)
    return Job(request, [tensor], None, lambda answer: answer, done.append, pool)


def run(model: Model, lane: ByHand, scene: Callable[[LanePool], Awaitable[None]], spins: bool = False) -> None:
    async def main() -> None:
        pool = LanePool(model, attaching(lane), 1, Nobody(), spins)
        await scene(pool)
        pool.close()

    asyncio.run(main())


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_outputs_of_four_bits_have_the_shape_that_they_have_and_not_the_largest() -> None:
    lane = ByHand({"y": np.array([0x21, 0x03], np.uint8)}, (3,))
    pooled = PooledLane(cast("Lane", lane), DYNAMIC, lambda *_: None)
    reply: Any = SimpleNamespace(started_ns=1, ended_ns=2, path="", cause="", late=False)
    request = cast("Any", SimpleNamespace(request=SimpleNamespace(arrival_ns=0), wanted=None))
    [output] = pooled.answer(request, reply).outputs
    assert (output.dtype, output.shape, bytes(output.data)) == ("UINT4", (3,), b"\x21\x03")
    lane.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes when a test says so: `now_ns`."""
    clock = SimpleNamespace(now_ns=1_000_000)
    monkeypatch.setattr(lane_pool, "_core", SimpleNamespace(now=lambda: clock.now_ns))
    return clock


def test_a_short_job_is_looked_for_in_each_turn_and_the_descriptor_is_left_alone(clock: SimpleNamespace) -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        done: list[Any] = []
        pool.start(job(pool, done))  # attaches
        while not lane.out:
            await turns(1)
        for number in range(1, 4):
            assert not lane.announces
            pool.start(job(pool, done))  # two at a time
            lane.finish()
            await turns(2)
            assert len(done) == number
            assert isinstance(done[-1], Answer)
        lane.finish()
        await turns(2)
        asked = lane.asked
        await turns()
        assert lane.asked == asked, "nobody looks where nothing is out"

    run(FIXED, lane, scene, spins=True)


def test_a_job_that_takes_longer_than_it_is_looked_for_is_told_of_by_the_descriptor(clock: SimpleNamespace) -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        done: list[Any] = []
        pool.start(job(pool, done))
        await turns()
        assert not lane.announces
        clock.now_ns += lane_pool.LOOK_NS_MAX
        await turns(2)
        assert lane.announces
        asked = lane.asked
        await turns()
        assert lane.asked == asked, "its descriptor rings"
        lane.finish()
        await turns()
        assert len(done) == 1

    run(FIXED, lane, scene, spins=True)


def test_a_reply_that_came_before_the_descriptor_was_watched_again_is_taken(clock: SimpleNamespace) -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})
    original = lane.fileno

    def fileno() -> int:
        if lane.out and not lane.announces:
            lane.finish()  # in the last moment, without a ring
        return original()

    lane.fileno = fileno  # type: ignore[method-assign]

    async def scene(pool: LanePool) -> None:
        done: list[Any] = []
        pool.start(job(pool, done))
        await turns()
        clock.now_ns += lane_pool.LOOK_NS_MAX
        await turns(2)
        assert lane.announces
        assert len(done) == 1

    run(FIXED, lane, scene, spins=True)


def test_where_executors_share_our_cores_the_descriptor_tells_of_replies() -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        done: list[Any] = []
        pool.start(job(pool, done))
        await turns()
        assert lane.announces
        pool.start(job(pool, done))
        for number in (1, 2):
            lane.finish()
            await turns()
            assert len(done) == number

    run(FIXED, lane, scene)


def test_a_ring_for_a_reply_that_was_taken_already_is_heard_once() -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        done: list[Any] = []
        pool.start(job(pool, done))
        await turns()
        lane.finish()
        pool.lanes[0].take(rung=False)
        lane.bell.send(b"!")
        await turns()
        asked = lane.asked
        await turns(20)
        assert lane.asked == asked, "the descriptor is quiet again"
        assert len(done) == 1

    run(FIXED, lane, scene)


def test_whoever_has_priority_is_taken_first_and_whoever_gave_up_is_not_taken() -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        order: list[str] = []
        jobs: dict[str, Job] = {}
        for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", 7), ("f", 2), ("g", 0)):
            jobs[name] = job(pool, [], priority)
            jobs[name]._done = lambda result, name=name: order.append(name)  # type: ignore[misc]
            pool.start(jobs[name])
            await turns()
        jobs["d"].cancel()
        jobs["a"].cancel()
        assert lane.cancelled == [1]
        while lane.out:
            lane.finish()
            await turns()
        assert order == ["d", "a", "b", "c", "f", "e", "g"]

    run(FIXED, lane, scene)


def test_a_pool_rests_when_the_last_job_has_left_its_lane_even_one_that_nobody_waits_for() -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        await pool.rest()  # nothing to wait for
        jobs = [job(pool, []) for _ in range(5)]  # three in slots, two wait
        for one in jobs:
            pool.start(one)
            await turns()
        rests = asyncio.ensure_future(pool.rest())
        jobs[0].cancel()  # in a slot: it is the lane's until it is answered
        jobs[4].cancel()
        for _ in range(4):
            await turns()
            assert not rests.done()
            lane.finish()
        await asyncio.wait_for(rests, 5)
        assert not lane.out
        assert all(one.ended for one in jobs)

    run(FIXED, lane, scene)


def test_a_pool_whose_lane_is_lost_rests() -> None:
    lane = ByHand({"y": np.ones(2, np.float32)})

    async def scene(pool: LanePool) -> None:
        given_up = job(pool, [])
        pool.start(given_up)
        await turns()
        given_up.cancel()
        rests = asyncio.ensure_future(pool.rest())
        await turns()
        assert not rests.done()
        pool.close()
        await asyncio.wait_for(rests, 5)

    run(FIXED, lane, scene)


def test_a_load_of_a_version_returns_when_the_supervisor_has_said_that_it_is_served() -> None:
    async def scene() -> None:
        asked: list[tuple[str, int]] = []

        async def activate(model: str, version: int) -> None:
            asked.append((model, version))

        backend = LaneBackend("n", "1", cast("Any", None), 1, attaching(cast("Any", None)), activate=activate)

        def told(version: str) -> None:
            block = os.open(os.devnull, os.O_RDONLY), 0
            backend.add(replace(FIXED, version=version), block, (), ())

        told("1")
        loads = asyncio.ensure_future(backend.load("m", 3))
        await turns()
        told("2")
        await turns()
        assert asked == [("m", 3)]
        assert not loads.done()
        told("3")
        await asyncio.wait_for(loads, 5)
        gone = asyncio.ensure_future(backend.load("m", 4))
        await turns()
        assert not gone.done()
        backend.remove("m")
        with pytest.raises(Refusal, match="no model is called 'm'"):
            await asyncio.wait_for(gone, 5)

    asyncio.run(scene())
