"""Lanes of one model for many requests: who waits, who is in which slot, what comes back. Part of the gateway.

Requests wait by priority, then in the order of their arrival, until a lane has a free slot; another lane is attached
when none has. One slot of each lane stays unused: the last reply's outputs live there until the next one comes. A
request that nobody wants any more leaves the queue at once, or is cancelled in its lane.

Prior art: connection pools, and io_uring's submission queue: never more in flight than there is room for, so that the
ring is never full and nothing is refused by the other side.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final, Protocol

import numpy as np

from taktd.ipc import _core
from taktd.ipc.client import Lane, Reply, Tensors
from taktd.ipc.errors import Denied, Detached, LimitReached, NotFound, TaktError
from taktd.ipc.inference import Answer, Model, Outcome, Refusal, Request, Tensor

LOOK_NS_MAX: Final = 200_000  # how long the gateway stays awake for a reply
WAKE_UP_NS: Final = 60_000  # of a sleeping core
RETRY_S: Final = 1.0  # after an attach that failed while other lanes serve
NO_PRIORITY: Final = 1 << 40

_REFUSALS: Final = {
    "expired": (Outcome.EXPIRED, "was not started: it could not make its deadline any more"),
    "refused": (Outcome.FULL, "was refused by the scheduler"),
    "invalid": (Outcome.INVALID, "was malformed"),
    "failed": (Outcome.FAILED, "failed in the engine"),
    "lost": (Outcome.LOST, "was lost with its executor; send it again"),
    "cancelled": (Outcome.CANCELLED, "was cancelled"),
    "detached": (Outcome.DETACHED, "lost its lane; send it again"),
}
_ATTACH_REFUSALS: Final[tuple[tuple[type[TaktError], Outcome], ...]] = (
    (NotFound, Outcome.UNKNOWN),
    (Denied, Outcome.DENIED),
    (LimitReached, Outcome.FULL),
)


class Job:
    """One request on its way. `done` gets what `encode` makes of the answer, or a Refusal, once.

    wanted: indices of the outputs; None is all.
    """

    __slots__ = ("_done", "encode", "ended", "expiry", "inputs", "lane", "pool", "request", "sequence", "wanted")

    def __init__(
        self, request: Request, inputs: list[Tensor], wanted: list[int] | None, encode: Callable[[Answer], Any],
        done: Callable[[Any], None], pool: LanePool,
    ) -> None:  # fmt: skip
        self.request, self.inputs, self.wanted, self.encode = request, inputs, wanted, encode
        self.pool, self._done = pool, done
        self.expiry: asyncio.TimerHandle | None = None
        self.lane: PooledLane | None = None  # None: waits
        self.sequence = 0
        self.ended = False

    def end(self, result: Any) -> None:
        """The answer as encoded, or a Refusal."""
        if not self.ended:
            self.ended = True
            self.inputs = []
            if self.expiry is not None:
                self.expiry.cancel()
            self._done(result)
            self.pool.ended.set()

    def refuse(self, outcome: Outcome, text: str, cause: str = "") -> None:
        self.end(Refusal(outcome, text, cause))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if not self.ended:
            self.end(Refusal(Outcome.CANCELLED, "the client does not wait any more"))
            self.pool.abandon(self)


class PooledLane:
    """One lane and the jobs in its slots.

    Its descriptor is rung only while somebody looks at it: each ring costs both sides a system call.
    """

    def __init__(self, lane: Lane, model: Model, replied: Callable[[PooledLane, Job, Reply], None]) -> None:
        self.lane, self.model, self._replied = lane, model, replied
        self.jobs: dict[int, Job] = {}
        self.capacity = lane.slot_count - 1
        self.descriptor = lane.fileno()
        self.watched = True
        self.look_until_ns = 0  # looked at in each turn of the event loop until then
        self.looking = False
        self._shapes = {name: dims for name, (_, dims) in lane.input_specs.items()}
        # Bytes of a slot's inputs, and of its outputs where shapes are fixed, by the identity of its views.
        self._inputs_of: dict[int, list[memoryview]] = {}
        self._outputs_of: dict[int, list[Tensor]] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self.jobs)

    def watch(self) -> None:
        """From now on the descriptor tells of replies. Those that have come already: see `take`."""
        self.watched = True
        self.lane.fileno()

    def unwatch(self) -> None:
        if self.watched:
            self.watched = False
            self.lane.unwatch()

    def submit(self, job: Job) -> None:
        """Copy the inputs into the next slot and hand it over. Raises Detached."""
        if self.model.dynamic:
            for spec, tensor in zip(self.model.inputs, job.inputs, strict=True):
                if self._shapes[spec.name] != tensor.shape:
                    self.lane.set_shape(spec.name, tensor.shape)
                    self._shapes[spec.name] = tensor.shape
                    self._inputs_of.clear()
        views = self.lane.inputs
        places = self._inputs_of.get(id(views))
        if places is None:
            places = self._inputs_of[id(views)] = [_bytes_of(views[spec.name]) for spec in self.model.inputs]
        for place, tensor in zip(places, job.inputs, strict=True):
            place[:] = tensor.data
        job.sequence = self.lane.submit(job.request.deadline_ns)
        job.lane = self
        self.jobs[job.sequence] = job

    def take(self, rung: bool) -> None:
        """Take every reply there is. rung: the descriptor said so. Raises Detached when the lane has ended."""
        if rung and not self.watched:
            self.watch()  # the ring of a reply that was looked for, or the lane's end
        if rung and not self.jobs:
            with suppress(NotFound):
                self.lane.wait(0, 0)  # asking makes the descriptor unreadable again
        while self.jobs:
            reply = self.lane.wait(0, 0)
            if reply.pending:
                return
            job = self.jobs.pop(reply.sequence, None)
            if job is not None:
                self._replied(self, job, reply)

    def answer(self, job: Job, reply: Reply) -> Answer:
        """Views on the outputs of the reply just taken."""
        views = self.lane.outputs
        if self.model.dynamic:
            outputs = self._outputs(views)
        else:
            known = self._outputs_of.get(id(views))
            if known is None:
                known = self._outputs_of[id(views)] = self._outputs(views)
            outputs = known
        if job.wanted is not None:
            outputs = [outputs[index] for index in job.wanted]
        queued_ns = max(0, (reply.started_ns or reply.ended_ns) - job.request.arrival_ns)
        run_ns = max(0, reply.ended_ns - reply.started_ns) if reply.started_ns else 0
        return Answer(self.model, outputs, reply.path, reply.cause, reply.late, queued_ns, run_ns)

    def _outputs(self, views: Tensors) -> list[Tensor]:
        outputs = []
        for spec in self.model.outputs:
            view = views[spec.name]
            # 4-bit tensors come packed, as a flat view, which does not tell their shape.
            shape = self.lane.output_shape(spec.name) if spec.bits < 8 else view.shape
            outputs.append(Tensor(spec.name, spec.dtype, shape, _bytes_of(view)))
        return outputs


def _bytes_of(view: np.ndarray[Any, Any]) -> memoryview:
    flat: Any = view.reshape(-1).view(np.uint8)
    return memoryview(flat)


class Watch(Protocol):
    """Who is told what happens to a pool's lanes."""

    def lane_lost(self, model: str, error: str) -> None: ...

    def attach_failed(self, model: str, error: str) -> None: ...


class LanePool:
    """All lanes of one model that the gateway holds."""

    def __init__(
        self, model: Model, attach: Callable[[str], Awaitable[Lane]], lanes_max: int, watch: Watch, spins: bool
    ) -> None:
        """spins: the executor runs on a core that we leave alone, so that waiting by looking does not hold it up."""
        self.model = model
        self._spins = spins
        self.lanes: list[PooledLane] = []
        self.waiting: list[tuple[int, int, Job]] = []
        self._attach, self._lanes_max, self._watch = attach, lanes_max, watch
        self._numbers = count()
        self._attaching: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._usual_ns = 0  # from submission to end, lately
        self.ended = asyncio.Event()  # set when a request has ended, or what it had in a lane is free again

    # ---- requests ----

    def start(self, job: Job) -> None:
        """Submit it, or let it wait."""
        lane = None if self.waiting else self._free_lane()
        if lane is None or not self._submit(lane, job):
            self._wait(job)

    def _look(self, lane: PooledLane) -> None:
        """Once a turn of the event loop, which does meanwhile what else there is to do and does not fall asleep: the
        way there and out again costs more than a short job takes."""
        self._take(lane)
        if not lane.jobs:
            lane.looking = False
        elif _core.now() < lane.look_until_ns:
            self._loop.call_soon(self._look, lane)
        else:
            lane.looking = False
            lane.watch()
            self._take(lane)

    def _free_lane(self) -> PooledLane | None:
        """The one with the fewest jobs: its replies are collected soonest."""
        best = None
        for lane in self.lanes:
            if lane.free and (best is None or lane.free > best.free):
                best = lane
        return best

    def _wait(self, job: Job) -> None:
        request = job.request
        until_ns = request.deadline_ns
        if request.max_age_ns:
            stale_ns = request.arrival_ns + request.max_age_ns
            until_ns = min(until_ns, stale_ns) if until_ns else stale_ns
        if until_ns:
            delay_s = max(0, until_ns - _core.now()) / 1e9
            job.expiry = self._loop.call_later(delay_s, self._expire, job)
        heapq.heappush(self.waiting, (request.priority or NO_PRIORITY, next(self._numbers), job))
        self._dispatch()

    def _expire(self, job: Job) -> None:
        if job.lane is None:
            job.refuse(Outcome.EXPIRED, f"{self.model.name}: the deadline passed while the request waited for a slot")
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """Out of the queue, now: a client that gives up again and again must not make it grow."""
        self.waiting = [entry for entry in self.waiting if entry[2] is not job]
        heapq.heapify(self.waiting)

    def abandon(self, job: Job) -> None:
        """It has ended for its client: take it out of the queue, or ask its lane not to run it."""
        if job.lane is None:
            self._forget(job)
        elif job.sequence in job.lane.jobs:
            try:
                job.lane.lane.cancel(job.sequence)
            except TaktError:
                pass  # it has ended, or its lane has: its reply is on the way

    def _dispatch(self) -> None:
        while self.waiting:
            lane = self._free_lane()
            if lane is None:
                self._grow()
                return
            job = heapq.heappop(self.waiting)[2]
            if job.ended:
                continue
            if not self._submit(lane, job):
                heapq.heappush(self.waiting, (0, next(self._numbers), job))

    def _submit(self, lane: PooledLane, job: Job) -> bool:
        """False: the lane has ended. The reply is looked for where it comes soon, else the descriptor tells of it."""
        looks = self._spins and self._usual_ns <= LOOK_NS_MAX
        try:
            if looks:
                lane.unwatch()
            elif not lane.watched:
                lane.watch()
            lane.submit(job)
        except Detached as error:
            self._lost(lane, str(error))
            return False
        except TaktError as error:
            job.refuse(Outcome.INVALID, f"{self.model.name}: {error}")
        if job.expiry is not None:
            job.expiry.cancel()
        if looks:
            lane.look_until_ns = _core.now() + min(LOOK_NS_MAX, 2 * self._usual_ns + WAKE_UP_NS)
            if not lane.looking:
                lane.looking = True
                self._loop.call_soon(self._look, lane)
        return True

    # ---- replies ----

    def _take(self, lane: PooledLane, rung: bool = False) -> None:
        """Every reply there is. rung: the descriptor said so."""
        try:
            lane.take(rung)
        except TaktError as error:
            self._lost(lane, str(error))
        self._dispatch()

    def _replied(self, lane: PooledLane, job: Job, reply: Reply) -> None:
        if job.ended:
            self.ended.set()
            return  # cancelled
        request = job.request
        if not reply.ok:
            outcome, text = _REFUSALS.get(reply.status, (Outcome.FAILED, f"ended with {reply.status}"))
            because = f" ({reply.cause})" if reply.cause else ""
            job.refuse(outcome, f"{self.model.name}: the job {text}{because}", reply.cause)
        elif request.max_age_ns and reply.started_ns > request.arrival_ns + request.max_age_ns:
            age_us = (reply.started_ns - request.arrival_ns) // 1000
            text = f"{self.model.name}: the input was {age_us} µs old when it was used; takt_max_age_us allows less"
            job.refuse(Outcome.EXPIRED, text, "stale_input")
        else:
            self._usual_ns += (reply.ended_ns - reply.submitted_ns - self._usual_ns) >> 3
            job.end(job.encode(lane.answer(job, reply)))

    # ---- lanes ----

    def _grow(self) -> None:
        """Attach one more, one at a time."""
        if self._attaching is None and self._retry is None and len(self.lanes) < self._lanes_max:
            self._attaching = self._loop.create_task(self._add_lane())

    async def _add_lane(self) -> None:
        try:
            lane = PooledLane(await self._attach(self.model.name), self.model, self._replied)
        except TaktError as error:
            self._attaching = None
            self._attach_failed(error)
            return
        self._attaching = None
        self.lanes.append(lane)
        self._loop.add_reader(lane.descriptor, self._take, lane, True)
        self._dispatch()

    def _attach_failed(self, error: TaktError) -> None:
        self._watch.attach_failed(self.model.name, str(error))
        if self.lanes:  # those there are go on; try again later
            self._retry = self._loop.call_later(RETRY_S, self._try_again)
            return
        outcome = next((o for kind, o in _ATTACH_REFUSALS if isinstance(error, kind)), Outcome.DETACHED)
        waiting, self.waiting = self.waiting, []
        for _, _, job in waiting:
            job.refuse(outcome, f"{self.model.name} can't be reached: {error}")

    def _try_again(self) -> None:
        self._retry = None
        self._dispatch()

    def _lost(self, lane: PooledLane, why: str) -> None:
        if lane not in self.lanes:
            return
        self.lanes.remove(lane)
        self._loop.remove_reader(lane.descriptor)
        self._watch.lane_lost(self.model.name, why)
        jobs, lane.jobs = lane.jobs, {}
        lane.lane.close()
        for job in jobs.values():
            job.refuse(Outcome.DETACHED, f"{self.model.name}: the lane of the job ended; send it again")
        self.ended.set()

    @property
    def busy(self) -> bool:
        """Some request has not ended."""
        return bool(self.waiting) or any(lane.jobs for lane in self.lanes)

    async def rest(self) -> None:
        """Until no request waits, and none is in a lane: not even one whose client has gone."""
        while self.busy:
            self.ended.clear()
            await self.ended.wait()

    def follow(self, model: Model) -> bool:
        """The model is described anew. False if its lanes are not good for it: then this pool is to be closed."""
        if (model.inputs, model.outputs, model.dynamic) != (self.model.inputs, self.model.outputs, self.model.dynamic):
            return False
        self.model = model
        for lane in self.lanes:
            lane.model = model
        return True

    def close(self, why: str = "taktd stops") -> None:
        """Refuse what waits and give the lanes back."""
        if self._attaching is not None:
            self._attaching.cancel()
        if self._retry is not None:
            self._retry.cancel()
        waiting, self.waiting = self.waiting, []
        for _, _, job in waiting:
            job.refuse(Outcome.DETACHED, why)
        for lane in list(self.lanes):
            self._lost(lane, why)
