"""The lanes that one executor serves or could serve, ledger by ledger, and the slow work on them between jobs.

A ledger is one device's lanes with the record of what was taken and done there. An executor owns its own device's
ledger and stands by for others': their lanes are mapped and bound as well, dormant, until the core says that the ledger
has passed to it. What the owner before had taken and not done is then done again.

Binding costs up to a millisecond a slot and happens between the jobs of other loops: adding, swapping and removing
lanes are *chores*, cut into steps that the executor takes in gaps. Nothing here decides when a job runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from taktd.daemon.execution.link import ExecutorLink
from taktd.daemon.execution.plan import queue_of, task_of
from taktd.daemon.execution.repetition import Repetition
from taktd.daemon.execution.rights import Rights
from taktd.daemon.execution.served_lane import ServedLane
from taktd.daemon.execution.setup import Prepared
from taktd.daemon.execution.switch_rule import Suspicion, switch_rule
from taktd.daemon.recording.record import Recorder
from taktd.daemon.schedule.cause import HANDOVER
from taktd.daemon.scheduler import Scheduler
from taktd.engines.engine import BatchRun
from taktd.engines.errors import EngineFailure
from taktd.engines.proof import proof
from taktd.ipc import _core

__all__ = ["DeviceBroken", "LaneTable", "Ledger"]

OWN: Final = 0  # the number of the executor's own device's ledger
EXPIRED, LOST = 1, 5
NO_PATH, PRIMARY, STAND_IN = 0, 1, 2
HANG_NS_DEFAULT: Final = 1_000_000_000  # whom nobody told is patient
PROOF_RUNS: Final = 3  # of an engine that is suspected
LONG_GAP_NS: Final = 3_000_000  # more than it takes to pass a ledger on
FRESH_NS: Final = 100_000  # a job has ended this recently
AFTER_A_JOB_NS_MAX: Final = 20_000_000  # no longer is the end of one waited for
FAILURES_TOLD: Final = 5  # failures of one lane that are reported with their text; the counters tell the rest
COST_HINT: Final = (
    "compare what its jobs take with its cost (taktctl loops --json: statistics.run, cost_ns). Where they need more, "
    "set loops.{loop}.budget, or have it measured anew: remove measurements/ in the state folder, restart taktd. Else "
    "free its core of other work"
)
INPUT_HINT: Final = "look at what the loop's client sends: the engine fails on it, and on nothing else"

Chore = Iterator[None]
"""Work outside the schedule, in steps of well under a millisecond each."""


class DeviceBroken(Exception):
    """This process can't use its device any more. The job is left to whoever takes the ledger over."""


@dataclass(slots=True)
class Ledger:
    """One device's ledger in this executor. Lane n of the ledger is lane ``base`` + n here."""

    device: str
    descriptor: int
    number: int  # in the core's server
    base: int
    path: int  # what a reply says: primary, or stand-in for another device
    loops: dict[int, dict[str, Any]] = field(default_factory=dict)  # by lane here
    owned: bool = False
    area: int = 0  # the output area of its present owner


class LaneTable:
    """``lanes[index]`` for every lane that is bound; chores bring lanes in and out."""

    def __init__(
        self, server: _core.Server, link: ExecutorLink, plan: dict[str, Any], descriptors: list[int], prepared: Prepared
    ) -> None:
        """Maps and binds every lane of the plan: attaching is cheap afterwards, and nothing is bound late.

        ``descriptors``: ledger, statistics, journal; memory and wake-up socket of each loop's lane and of each lane of
        a model whose client is still there; then for each device it stands by for: ledger, statistics, the loops'
        lanes.
        """
        self.lanes: dict[int, ServedLane] = {}
        self.chores: deque[Chore] = deque()
        self.told = prepared.told  # log messages for the supervisor
        self._server = server
        self._scheduler = Scheduler()  # until schedule() brings the real one: nothing is scheduled before
        self._recorder = Recorder(server.record)
        self._costs: dict[str, Any] = {}
        self._link = link
        self._engines = prepared.engines
        self._proving = False  # an engine is being tried
        self._unfounded: dict[tuple[str, str], Repetition] = {}  # loop, hint → a suspicion that came to nothing
        self._models: dict[str, dict[str, Any]] = {model["name"]: model for model in plan["models"]}
        self._batches: dict[tuple[str, int], BatchRun] = {}
        for model in plan["models"]:
            for size in range(2, model.get("max_batch", 1) + 1):
                self._batches[model["name"], size] = self._engines[model["name"]].batch(size)
        own = Ledger(plan["device"], descriptors[0], 0, 0, PRIMARY)
        self.ledgers: dict[str, Ledger] = {own.device: own}
        given = iter(descriptors[3:])
        self._bring_in_all(own, [*plan["loops"], *plan.get("model_lanes", ())], given)
        for other in plan.get("standby", ()):
            ledger_fd = next(given)
            number, base = server.open_ledger(ledger_fd, next(given))
            ledger = self.ledgers[other["device"]] = Ledger(other["device"], ledger_fd, number, base, STAND_IN)
            self._bring_in_all(ledger, other["loops"], given)

    def _bring_in_all(self, ledger: Ledger, entries: Sequence[dict[str, Any]], descriptors: Iterator[int]) -> None:
        for entry in entries:
            for _ in self._bring_in(ledger, entry, next(descriptors), next(descriptors)):
                pass

    def schedule(self, scheduler: Scheduler, recorder: Recorder, costs: dict[str, Any]) -> None:
        """From now on lanes are scheduled, at the costs they were admitted for; loops without a cost were shed."""
        self._scheduler = scheduler
        self._recorder = recorder
        self._costs = costs
        self._keep_record(False)

    # ---- messages ----

    def handle(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """``lane.add``, ``lane.swap``, ``lane.remove``, ``lane.attached``, ``epoch``, ``hang_after``, ``release``,
        ``owner``."""
        ledger = self.ledgers[message["device"]] if "device" in message else next(iter(self.ledgers.values()))
        match message["op"]:
            case "lane.add":
                self.chores.append(self._added(ledger, message, descriptors))
            case "lane.swap":
                self.chores.append(self._swapped(ledger, message, descriptors))
            case "lane.remove":
                self.chores.append(self._removed(ledger, message["lane"], message.get("status")))
            case "lane.attached":
                self._attached(ledger, message["lane"])
            case "epoch":
                self._server.set_epoch(message["epoch"])
            case "hang_after":
                self._costs["hang_after_ns"] = message["hang_after_ns"]
                for one in self.ledgers.values():
                    self._server.set_hang_after(one.number, self._hang_after_ns(one))
            case "release":
                self.chores.append(self._released(ledger))
            case "owner":
                self._server.set_pidfd(ledger.number, message["member"], *descriptors)
            case other:
                raise ValueError(f"unknown message {other!r} from the supervisor")

    def _attached(self, ledger: Ledger, lane: int) -> None:
        index = ledger.base + lane
        # A client can be faster than this message: then the loop is known to have one, and what it has submitted stays.
        if ledger.owned and self._scheduler.knows(index) and not self._scheduler.attached(index):
            now_ns = _core.now()
            self._scheduler.reset(index, now_ns)
            self._recorder.reset(index, now_ns)

    def _added(self, ledger: Ledger, message: dict[str, Any], descriptors: list[int]) -> Chore:
        yield from self._bring_in(ledger, message, *descriptors)
        self._done(ledger, message["lane"], "add", 0)

    def _swapped(self, ledger: Ledger, message: dict[str, Any], descriptors: list[int]) -> Chore:
        """A loop's client is gone: its lane ends, a fresh one takes its place."""
        index = ledger.base + message["lane"]
        dropped = self._take_out(index)
        entry = ledger.loops[index] | {"layout": message["layout"], "attached": False}
        yield from self._bring_in(ledger, entry, *descriptors)
        self._done(ledger, message["lane"], "swap", dropped)

    def _removed(self, ledger: Ledger, lane: int, status: int | None) -> Chore:
        self._done(ledger, lane, "remove", self._take_out(ledger.base + lane, status))
        yield

    def _done(self, ledger: Ledger, lane: int, op: str, dropped: int) -> None:
        self._link.send({"op": "lane.done", "device": ledger.device, "lane": lane, "of": op, "dropped": dropped})

    # ---- in and out ----

    def _bring_in(self, ledger: Ledger, entry: dict[str, Any], memfd: int, wake_fd: int) -> Chore:
        index = ledger.base + entry["lane"]
        layout = entry["layout"]
        self._server.add(index, memfd, wake_fd, layout, entry["stats"], area=0, recover=True, dormant=True)
        name = entry.get("name", entry["model"])
        lane = ServedLane(self._server, index, name, layout, self._engines[entry["model"]], ledger.path)
        yield from lane.bind()
        if "name" in entry:
            ledger.loops[index] = entry
            lane.rule = switch_rule(entry.get("switch"))
        self.lanes[index] = lane
        if ledger.owned:
            self._activate(ledger, lane)

    def _take_out(self, index: int, status: int | None = None) -> int:
        """The client is gone, or is told that its lane ends (status): queued jobs never reach the device. Returns how
        many jobs were dropped."""
        lane = self.lanes.pop(index, None)
        if lane is None:
            return 0
        lane.close()
        if self._scheduler.knows(index):
            self._scheduler.remove(index)
            self._recorder.remove(index, _core.now())
        return self._server.remove(index, status)

    def ended(self, index: int, reason: int, now_ns: int) -> None:
        """The core has ended a lane whose client broke the protocol; the supervisor closes the connection."""
        if self._scheduler.knows(index):
            self._scheduler.reset(index, now_ns, attached=False)
            self._recorder.reset(index, now_ns, attached=False)
        ledger = self._ledger_of(index)
        self._link.send({"op": "lane.ended", "device": ledger.device, "lane": index - ledger.base, "reason": reason})

    def _ledger_of(self, index: int) -> Ledger:
        return max((one for one in self.ledgers.values() if one.base <= index), key=lambda one: one.base)

    def _lanes_of(self, ledger: Ledger) -> list[ServedLane]:
        return [lane for index, lane in self.lanes.items() if self._ledger_of(index) is ledger]

    # ---- ledgers ----

    @property
    def owns_all(self) -> bool:
        return all(ledger.owned for ledger in self.ledgers.values())

    def succession(self, number: int, what: str) -> None:
        """News of a ledger: it is ours now, or the supervisor asks us to let go of it."""
        ledger = next(one for one in self.ledgers.values() if one.number == number)
        if what == "asked":
            self.chores.append(self._released(ledger))
        else:
            self._took(ledger, what)

    def _took(self, ledger: Ledger, how: str) -> None:
        """Its lanes are served from where the owner before left them."""
        ledger.owned = True
        # It alternates: what the owner before may still be writing, or its GPU, is no answer of ours.
        state = _core.succession_state(ledger.descriptor)
        ledger.area = state["takeovers"] % 2
        now_ns = _core.now()
        self._scheduler.handover_ns = now_ns  # what was due before, and misses, missed because of it
        if ledger.number == OWN:
            self.chores.append(self._recorded())  # later: what waits for us is served first
        else:
            self._recorder.handover(now_ns, now_ns)
        resumed = lost = 0
        for lane in self._lanes_of(ledger):
            again, gone = self._activate(ledger, lane, EXPIRED if how == "clean" else LOST)
            resumed += again
            lost += gone
        self.told.append({
            "op": "took", "device": ledger.device, "how": how, "resumed": resumed, "lost": lost,
            "heard_us": (now_ns - state["since_ns"]) // 1000, "took_us": (_core.now() - state["since_ns"]) // 1000,
        })  # fmt: skip

    def _recorded(self) -> Chore:
        """The device's journal is ours from here on, and begins with what there is to know."""
        now_ns = _core.now()
        self._keep_record(True)
        self._recorder.state(self._scheduler, now_ns)
        self._recorder.handover(self._scheduler.handover_ns, now_ns)
        yield

    def _right_after_a_job(self, ledger: Ledger) -> bool:
        """Whether the gap before the next job is as long as it gets, or long in any case."""
        now_ns = _core.now()
        gap_ns = fresh_ns = LONG_GAP_NS
        for lane in self._lanes_of(ledger):
            loop = ledger.loops.get(lane.lane)
            if loop is not None and lane.ended_ns:
                fresh_ns = min(fresh_ns, now_ns - lane.ended_ns)
                if now_ns < lane.ended_ns + 2 * loop["period_ns"]:  # else it has no jobs at present
                    gap_ns = min(gap_ns, lane.ended_ns + loop["period_ns"] - lane.cost_ns - now_ns)
        return gap_ns >= LONG_GAP_NS or fresh_ns <= FRESH_NS

    def _released(self, ledger: Ledger) -> Chore:
        """Lets another executor have the ledger, in a gap between two jobs, so that it is there for the next one.

        What is queued all the same stays recorded in the ledger.
        """
        until_ns = _core.now() + AFTER_A_JOB_NS_MAX
        while not self._right_after_a_job(ledger) and _core.now() < until_ns:
            yield
        if not ledger.owned:
            return  # asked twice, or it has passed on already
        for lane in self._lanes_of(ledger):
            if self._scheduler.knows(lane.lane):
                self._scheduler.remove(lane.lane)
                self._recorder.remove(lane.lane, _core.now())
        ledger.owned = False
        if ledger.number == OWN:
            self._keep_record(False)
        self._server.hand_over(ledger.number)
        self.told.append({"op": "released", "device": ledger.device})
        yield

    def _keep_record(self, on: bool) -> None:
        """The journal belongs to the device: whoever serves that writes there, and nobody else."""
        self._recorder.write = self._server.record if on else _unrecorded
        self._server.keep_record(on)

    def _activate(self, ledger: Ledger, lane: ServedLane, too_late: int = LOST) -> tuple[int, int]:
        """Serves a lane from its ledger on. Returns how many jobs are done again, and for how many it is too late:
        they end with that status."""
        lane.take(ledger.area)
        self._server.set_area(lane.lane, ledger.area)
        self._server.activate(lane.lane)
        enlisted = self._enlist(ledger, lane)
        now_ns = _core.now()
        resumed = lost = 0
        for sequence, slot, deadline_ns, release_ns in sorted(self._server.unfinished(lane.lane)):
            if not enlisted or 0 < deadline_ns < now_ns:
                self._server.complete(lane.lane, slot, too_late, 0, NO_PATH, HANDOVER, 0, now_ns, deadline_ns)
                lost += 1
                continue
            job = self._scheduler.submit(lane.lane, sequence, slot, release_ns, deadline_ns, now_ns)
            self._recorder.submit(lane.lane, sequence, slot, release_ns, deadline_ns, now_ns)
            self._server.expect(lane.lane, slot, job.latest_start_ns)
            if any(self._server.shapes(lane.lane, slot)[i] != d for i, d in enumerate(lane.input_dims)):
                lane.shaped.add(slot)
            resumed += 1
        return resumed, lost

    def _enlist(self, ledger: Ledger, lane: ServedLane) -> bool:
        """Makes the lane known to the scheduler; False for a loop that was shed."""
        loop = ledger.loops.get(lane.lane)
        now_ns = _core.now()
        if loop is None:
            model = lane.engine.spec.model
            queue = queue_of(self._models[model], list(self._models).index(model), self._costs["queues"][model])
            self._scheduler.add_queue(lane.lane, queue)
            self._recorder.add(lane.lane, queue, now_ns)
            return True
        cost = self._costs["tasks"].get(loop["name"])
        if cost is None:
            return False
        # Their order in the configuration: a loop that came with a later change may have an earlier one's lane.
        task = task_of(loop, ledger.base + list(ledger.loops).index(lane.lane), cost)
        lane.cost_ns = task.cost_ns
        if task.on_late_run:
            self._server.runs_late(lane.lane)
        if task.clock:
            self._server.beats(lane.lane, task.phase_ns)
        self._scheduler.add_loop(lane.lane, task)
        self._recorder.add(lane.lane, task, now_ns)
        self._server.set_budget(lane.lane, task.cost_ns)
        if loop.get("attached"):
            self._scheduler.reset(lane.lane, now_ns)
            self._recorder.reset(lane.lane, now_ns)
        return True

    def join(self, member: int, rights: Rights) -> None:
        """Stands in line for every ledger; the core says when one has passed to this executor."""
        # Above this executor: that another one has died must be seen while this one is inside an engine.
        priority = rights.priority + 1 if rights.policy == "fifo" else 0
        for ledger in self.ledgers.values():
            self._server.join(ledger.number, member, priority, rights.affinity, self._hang_after_ns(ledger))

    def _hang_after_ns(self, ledger: Ledger) -> int:
        """How long its owner may have something to do without a sign of life."""
        return int(self._costs.get("hang_after_ns", {}).get(ledger.device, HANG_NS_DEFAULT))

    # ---- while serving ----

    def batch(self, model: str, size: int) -> BatchRun:
        return self._batches[model, size]

    def failed(self, lane: ServedLane, failure: EngineFailure, sequence: int = 0) -> None:
        """Counts a failure and reports the first few in words. Raises ``DeviceBroken`` if nothing will run any more."""
        lane.failures += 1
        if failure.sticky:
            raise DeviceBroken(f"loop {lane.name}: {failure}") from failure
        if lane.failures <= FAILURES_TOLD:
            self.told.append(_log("error", "engine-failed", lane, str(failure)[:1000]))
        if lane.rule is not None:
            self._follow(lane, lane.rule.failed(sequence, lane.last_ok, failure.kind), str(failure))

    def overran(self, lane: ServedLane, sequence: int) -> None:
        """A run took longer than it was admitted for; the machine may be to blame, and then a trial finds nothing."""
        if lane.rule is not None:
            self._follow(lane, lane.rule.overran(sequence), "")

    def _follow(self, lane: ServedLane, suspicion: Suspicion | None, detail: str) -> None:
        """The loop's rule for switching has come true. Raises ``DeviceBroken`` where another executor is in line.

        This process then ends: the next one has to prove itself before it gets the loops back.
        """
        ledger = self._ledger_of(lane.lane)
        if suspicion is None or ledger.number != OWN or not self._followed(ledger):
            return
        reason = f"loop {lane.name}: {suspicion.reason}" + (f": {detail}" if detail else "")
        if suspicion.certain:
            raise DeviceBroken(reason)
        if not self._proving:
            self._proving = True
            hint = INPUT_HINT if detail else COST_HINT.format(loop=lane.name)
            self.chores.append(self._tried(ledger, lane, reason, hint))

    def _followed(self, ledger: Ledger) -> bool:
        state = _core.succession_state(ledger.descriptor)
        return ledger.owned and state["successor"] not in (0, state["owner"])

    def _tried(self, ledger: Ledger, lane: ServedLane, reason: str, hint: str) -> Chore:
        """Was it the input, or is it the engine?"""
        try:
            yield from proof(lane.engine, PROOF_RUNS, lane.cost_ns, _core.now)
        except EngineFailure as failure:
            if self._followed(ledger):
                raise DeviceBroken(f"{reason}; on an input of our own: {failure}") from failure
        else:
            # A rule can come true ten times a second, for as long as a cost is too low or a client sends nonsense.
            times = self._unfounded.setdefault((lane.name, hint), Repetition()).came(_core.now())
            if times:
                again = f" ({times} times since this was told last)" if times > 1 else ""
                text = f"{reason}; well on an input of our own{again}\nto do: {hint}"
                self.told.append(_log("warning", "switch-unfounded", lane, text))
        finally:
            self._proving = False

    def alarm(self, index: int, kept: int, at_ns: int) -> None:
        """A loop's (m, k) promise was just broken."""
        lane = self.lanes[index]
        m, k = self._ledger_of(index).loops[index]["mk"]
        text = f"loop {lane.name}: {kept} of the last {k} jobs in time, promised {m}; at {at_ns} ns"
        self.told.append(_log("warning", "promise-broken", lane, text))

    def end(self, status: int) -> None:
        """Tells every client of a lane that is served here that it is over."""
        for ledger in self.ledgers.values():
            if ledger.owned:
                for lane in self._lanes_of(ledger):
                    lane.close()
                    self._server.remove(lane.lane, status)
        self.lanes.clear()


def _unrecorded(kind: int, lane: int, aux: int, a: int, b: int, t_ns: int) -> None:
    """Where the journal is another executor's."""


def _log(level: str, message_id: str, lane: ServedLane, text: str) -> dict[str, Any]:
    return {"op": "log", "level": level, "message_id": message_id, "text": text, "fields": {"loop": lane.name}}
