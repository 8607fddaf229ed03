"""What the front doors ask for, done through lanes: models, inference, counts, within the limits. Part of the gateway.

Implements taktd.ipc.inference.Backend. Every request is charged to its principal from arrival to answer. The statistics
pages are read, no executor is asked.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from taktd.daemon.front_doors.lane_pool import Job, LanePool
from taktd.daemon.limits import Charges, LimitExceeded, Who
from taktd.daemon.logbook import log
from taktd.ipc import _core
from taktd.ipc.client import Lane
from taktd.ipc.inference import (
    Answer,
    Duration,
    Model,
    ModelCounts,
    Outcome,
    Principal,
    Refusal,
    Request,
    Rights,
    fit,
    wanted_outputs,
)

T = TypeVar("T")
Block = tuple[int, int]  # descriptor of a statistics page, block

UNLOADED: Final = "unloaded"  # the reason that Triton gives
UNLOAD_S_MAX: Final = 30.0  # for requests that there are to end
KNOWN_S_MAX: Final = 10.0  # from the supervisor's word that a version is served until we are told of it


async def _no_versions(model: str, version: int) -> None:
    raise Refusal(Outcome.UNSUPPORTED, f"model {model}: versions can't be changed here")


async def _within(seconds: float, awaited: Awaitable[None]) -> None:
    """As good as it gets: what takes longer goes on by itself."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(awaited, seconds)


def _batches(raw: Mapping[str, Any], max_batch: int) -> tuple[tuple[int, Duration], ...]:
    """Dispatches by size. The page counts those of two jobs or more; what else ran, ran alone."""
    alone = Duration(
        max(0, raw["run_us"]["count"] - raw["batched_jobs"]), max(0, raw["run_us"]["sum_ns"] - raw["batched_run_ns"])
    )
    several = tuple((min(size, max_batch), Duration(count, ns)) for size, count, ns in raw["batches"])
    return ((1, alone), *several) if alone.count else several


class LaneBackend:
    """The gateway's models and everything that runs on them."""

    def __init__(
        self, node: str, version: str, charges: Charges, lanes_max: int, attach: Callable[[str], Awaitable[Lane]],
        spins: bool = False, activate: Callable[[str, int], Awaitable[None]] = _no_versions,
    ) -> None:  # fmt: skip
        """spins: no executor runs on our cores, so that a short job may be waited for by looking.

        activate: has the supervisor serve a version of a model; raises Refusal.
        """
        self._spins, self._activate = spins, activate
        self._changing = asyncio.Lock()
        self._unloaded: set[str] = set()
        self.changed = asyncio.Event()  # set when what is unloaded has changed
        self._reasons: Mapping[str, str] = {}
        self.node, self.version = node, version
        self.charges = charges
        self._lanes_max, self._attach = lanes_max, attach
        self._models: dict[str, Model] = {}
        self._described = asyncio.Event()  # set when a model is another one than before
        self._allowed: dict[str, tuple[frozenset[int], frozenset[int]]] = {}
        self._blocks: dict[str, Block] = {}
        self._pools: dict[str, LanePool] = {}
        self._ready = False
        self.refused: dict[str, int] = {}  # by status and code
        self.answered = 0
        self._answered_ms: dict[str, int] = {}  # when a model gave its last answer here: the protocol wants wall time
        self._complained: set[tuple[str, str]] = set()

    # ---- what the supervisor says ----

    def add(self, model: Model, block: Block, uids: Sequence[int], gids: Sequence[int]) -> None:
        """A model, or what it is from now on. uids, gids: who may use it where the peer is known; its `allow:`."""
        if (before := self._models.get(model.name)) is not None:
            model = replace(model, ready=before.ready, reason=before.reason)
            os.close(self._blocks[model.name][0])
        self._allowed[model.name] = (frozenset(uids), frozenset(gids))
        self._models[model.name] = model
        self._blocks[model.name] = block
        self._described.set()
        pool = self._pools.get(model.name)
        if pool is not None and not pool.follow(model):
            del self._pools[model.name]
            pool.close(f"model {model.name} has other tensors now")

    def remove(self, name: str) -> None:
        """It is not served any more."""
        if self._models.pop(name, None) is not None:
            os.close(self._blocks.pop(name)[0])
            del self._allowed[name]
            self._unloaded.discard(name)
            self._answered_ms.pop(name, None)
            self._described.set()
        if (pool := self._pools.pop(name, None)) is not None:
            pool.close(f"model {name} is not served any more")

    def set_state(self, ready: bool, reasons: Mapping[str, str]) -> None:
        """reasons: models that can't be reached now, and why."""
        self._ready, self._reasons = ready, reasons
        for name in self._models:
            self._show(name)

    def set_unloaded(self, names: Sequence[str]) -> None:
        """What was unloaded in the gateway before this one."""
        self._unloaded = set(names) & set(self._models)
        for name in self._unloaded:
            self._show(name)

    def _show(self, name: str) -> None:
        """Whether it is ready."""
        model = self._models[name]
        reason = UNLOADED if name in self._unloaded else self._reasons.get(name, "")
        if model.reason != reason:
            self._models[name] = replace(model, ready=not reason, reason=reason)

    def allows(self, model: str, uid: int, groups: frozenset[int]) -> bool:
        """Whether a user may use a model; root and the daemon's own user always may."""
        uids, gids = self._allowed.get(model, (frozenset(), frozenset()))
        return uid in (0, os.geteuid()) or uid in uids or not gids.isdisjoint(groups)

    # ---- Backend ----

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self._ready

    def models(self) -> Sequence[Model]:
        return list(self._models.values())

    def model(self, name: str, version: str) -> Model:
        model = self._models.get(name)
        if model is None:
            close = difflib.get_close_matches(name[:64], list(self._models), n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"there are: {', '.join(list(self._models)[:20]) or 'none'}"
            )
            raise Refusal(Outcome.UNKNOWN, f"no model is called {name[:64]!r}: {hint}")
        if version and version != model.version:
            text = f"model {name} has no version {version[:32]!r}: version {model.version} is served"
            raise Refusal(Outcome.UNKNOWN, text)
        return model

    def counts(self, name: str) -> Sequence[ModelCounts]:
        return [self._counts(n) for n in self._models if not name or n == name]

    def _counts(self, name: str) -> ModelCounts:
        raw: dict[str, Any] = dict(_core.stats_read(*self._blocks[name]))
        failed = sum(raw[s] for s in ("expired", "refused", "invalid", "failed", "lost", "cancelled", "detached"))
        queue, run, total = raw["queue_us"], raw["run_us"], raw["total_us"]
        return ModelCounts(
            name, self._models[name].version, raw["ok"], Duration(raw["ok"], total["sum_ns"]), Duration(failed, 0),
            Duration(queue["count"], queue["sum_ns"]), Duration(run["count"], run["sum_ns"]),
            _batches(raw, self._models[name].max_batch), self._answered_ms.get(name, 0),
        )  # fmt: skip

    async def infer(self, request: Request, principal: Principal, encode: Callable[[Answer], T]) -> T:
        future: asyncio.Future[T] | None = None
        early: list[T | Refusal] = []

        def done(result: T | Refusal) -> None:
            if future is None:
                early.append(result)
            elif future.done():
                pass  # cancelled
            elif isinstance(result, Refusal):
                future.set_exception(result)
            else:
                future.set_result(result)

        handle = self.start(request, principal, encode, done)
        if early:
            if isinstance(early[0], Refusal):
                raise early[0]
            return early[0]
        future = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            handle.cancel()
            raise

    def enter(self, principal: Principal) -> None:
        try:
            self.charges.charge("connections", principal.charged)
        except LimitExceeded as exceeded:
            refusal = Refusal(Outcome.FULL, str(exceeded))
            self._count(refusal)
            raise refusal from None

    def leave(self, principal: Principal) -> None:
        self.charges.release("connections", principal.charged)

    def start(
        self, request: Request, principal: Principal, encode: Callable[[Answer], T], done: Callable[[T | Refusal], None]
    ) -> Job:
        try:
            return self._start(request, principal, encode, done)
        except Refusal as refusal:
            self._count(refusal)
            raise

    def _count(self, refusal: Refusal) -> None:
        key = f"{refusal.outcome.status} {refusal.outcome.code}"
        self.refused[key] = self.refused.get(key, 0) + 1

    def _start(
        self, request: Request, principal: Principal, encode: Callable[[Answer], T], done: Callable[[T | Refusal], None]
    ) -> Job:
        model = self.model(request.model, request.version)
        if not (principal.rights.include(Rights.INFER) and principal.admits(model.name)):
            raise Refusal(
                Outcome.DENIED,
                f"{principal.name} may not use model {model.name}: allowed are those under "
                f"models.{model.name}.allow in the configuration",
            )
        if model.name in self._unloaded:
            text = f"model {model.name} was unloaded: load it again (RepositoryModelLoad, on a listener with admin)"
            raise Refusal(Outcome.UNKNOWN, text)
        inputs, wanted = fit(request, model), wanted_outputs(request, model)
        if request.deadline_ns and request.deadline_ns <= _core.now():
            raise Refusal(Outcome.EXPIRED, f"{model.name}: the deadline had passed when the request was read")
        size = sum([tensor.nbytes for tensor in inputs])
        who = principal.charged
        self._charge(who, size)

        def end(result: T | Refusal) -> None:
            self.charges.release("jobs", who)
            self.charges.release("job_memory", who, size)
            if isinstance(result, Refusal):
                self._count(result)
            else:
                self.answered += 1
                self._answered_ms[model.name] = time.time_ns() // 1_000_000
            done(result)

        pool = self._pools.get(model.name)
        if pool is None:
            pool = self._pools[model.name] = LanePool(model, self._attach, self._lanes_max, self, self._spins)
        job = Job(request, inputs, wanted, encode, end, pool)
        pool.start(job)
        return job

    def _charge(self, who: Who, size: int) -> None:
        try:
            self.charges.charge("jobs", who)
            try:
                self.charges.charge("job_memory", who, size)
            except LimitExceeded:
                self.charges.release("jobs", who)
                raise
        except LimitExceeded as exceeded:
            raise Refusal(Outcome.FULL, str(exceeded)) from None

    # ---- Backend: what is served ----

    async def load(self, name: str, version: int | None) -> None:
        self.model(name, "")
        async with self._changing:
            if version is not None and str(version) != self.model(name, "").version:
                await self._activate(name, version)
                await _within(KNOWN_S_MAX, self._serves(name, str(version)))
            self._unloaded.discard(name)
            self._show(name)
            self.changed.set()
        log("notice", f"gateway: model {name} is loaded, version {self.model(name, '').version}", model=name)

    async def unload(self, name: str) -> None:
        self.model(name, "")
        async with self._changing:
            self._unloaded.add(name)
            self._show(name)
            self.changed.set()
            if (pool := self._pools.get(name)) is not None:
                await _within(UNLOAD_S_MAX, pool.rest())
                self._pools.pop(name, None)
                pool.close(f"model {name} was unloaded")
        log("notice", f"gateway: model {name} is unloaded; loops go on", model=name)

    async def _serves(self, name: str, version: str) -> None:
        """Until we are told that it is that version. Raises Refusal: it is gone."""
        while self.model(name, "").version != version:
            self._described.clear()
            await self._described.wait()

    # ---- Watch ----

    def lane_lost(self, model: str, error: str) -> None:
        log("info", f"gateway: a lane of {model} ended: {error}", model=model)

    def attach_failed(self, model: str, error: str) -> None:
        if (model, error) not in self._complained and len(self._complained) < 1000:
            self._complained.add((model, error))
            log("warning", f"gateway: no (further) lane of {model}: {error}", model=model)

    # ---- itself ----

    def counters(self) -> dict[str, Any]:
        """For the supervisor's metrics."""
        pools = self._pools.values()
        return {
            "answered": self.answered, "refused": dict(self.refused),
            "jobs": self.charges.held("jobs"), "job_memory": self.charges.held("job_memory"),
            "waiting": sum(len(p.waiting) for p in pools), "lanes": sum(len(p.lanes) for p in pools),
            "unloaded": sorted(self._unloaded),
        }  # fmt: skip

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
