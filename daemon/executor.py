"""The process that owns one device and runs its jobs, one at a time.

``python -m taktd.daemon.executor --control-fd N``, started by the supervisor, which says over that socket what to
serve. One Python thread over the C core. ``Executor.serve`` is the whole real-time path: take what clients submitted,
ask the scheduler, do what it says. Between two jobs only bounded work happens: a control message, one step of a chore.

What it is not: the scheduler decides about time; the supervisor owns the lanes; the journal takes the records, and the
supervisor drains them. Nothing is loaded, imported or logged by I/O while it serves.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

from taktd.daemon.execution.awake import Awake
from taktd.daemon.execution.duty import DutyLimiter, real_time_share_ppm
from taktd.daemon.execution.grace import Estate, Grace, SupervisorLink
from taktd.daemon.execution.lane_table import DeviceBroken, LaneTable
from taktd.daemon.execution.link import LinkClosed
from taktd.daemon.execution.rights import leave_rights, take_rights
from taktd.daemon.execution.served_lane import ServedLane
from taktd.daemon.execution.setup import freeze, prepare
from taktd.daemon.execution.watch_thread import start_watch
from taktd.daemon.execution.witness import open_witness
from taktd.daemon.recording.record import Recorder
from taktd.daemon.schedule.cause import NONE
from taktd.daemon.schedule.job import EXPIRE, NEVER, START, Expire, Job, Wait
from taktd.daemon.scheduler import Scheduler
from taktd.engines.errors import DeviceFailure, EngineFailure, ModelRefused
from taktd.ipc import _core

__all__ = ["Executor", "main"]

EXIT_BROKEN: Final = 4  # the device failed for good in this process; another one may find it usable
EXIT_FAILED: Final = 3  # a model could not be served; the supervisor has been told which and why
DUTY_EVERY_NS: Final = 1_000_000  # how often the account of time awake is brought up to date
CONTROL_EVERY_NS: Final = 20_000_000  # a saturated executor looks at its control socket this often
CHORE_GAP_NS: Final = 500_000  # a step of a chore waits for a gap of this length
CHORE_PATIENCE_NS: Final = 100_000_000  # but no longer than this
COLD_NS: Final = 300_000  # after that long without a run, caches hold something else
WARM_LEAD_NS: Final = 200_000  # a warming run ends this long before a predicted release, if it takes its cost
SPIN_LEAD_NS: Final = 60_000  # awake this long before a predicted release: twice a wake-up's p99

DONE: Final = object()
YIELD_NS: Final = 2_000_000  # asleep this long at a time while it yields its core

OK, EXPIRED, FAILED, CANCELLED, DETACHED = 0, 1, 4, 6, 7
FLAG_OVERRUN, EARLY, NOT_FINITE = 2, 8, 32
ENTRY_SHAPES, ENTRY_CANCEL, ENTRY_UNRECORDED, ENTRY_ANSWERED, ENTRY_ENDED = 1, 2, 0x2000, 0x4000, 0x8000
NO_PATH, HOLD = 0, 3
WOKE_CONTROL, WOKE_SUCCESSION = 2, 16


class Executor:
    """Serves the lanes of one device until it is told to drain, or its supervisor is gone and no other one came."""

    def __init__(
        self, link: SupervisorLink, server: _core.Server, table: LaneTable, plan: dict[str, Any], costs: dict[str, Any],
        estate: Estate, *, throttled: bool,
    ) -> None:  # fmt: skip
        self.link = link
        self.estate = estate
        self.grace = Grace(link, estate, plan)
        self.server = server
        self.table = table
        self.lanes = table.lanes
        self.scheduler = Scheduler(costs["max_dispatch_ns"], costs["share_ppm"])
        self.recorder = Recorder(server.record)
        table.schedule(self.scheduler, self.recorder, costs)
        self.spin_ns: int = plan["spin_ns"]
        # Without cores of its own it might spin on the very core where the client has to wake up.
        self.closed_loop_ns = 2 * self.spin_ns if plan["cores"] else 0
        self.duty = DutyLimiter(real_time_share_ppm() if throttled else None)
        self.in_line = True  # some ledger is not ours, and may become so
        self.witness: _core.Witness | None = None
        self.draining = False
        self.stopped = False
        self._awake = Awake(server)
        self._control_due_ns = 0
        self._chore_since_ns = 0
        self._duty_due_ns = 0
        self._spin_until_ns = 0
        self._waited_for = (-1, -1)  # what the last recorded decision to wait said

    def watch_core(self, witness: _core.Witness | None) -> None:
        """From now on runs that took too long are put down to the machine where their core stood still."""
        self.witness = witness
        if witness is not None:
            self.server.set_witness(witness)

    # ---- the real-time path ----

    def serve(self) -> None:
        server, scheduler, duty = self.server, self.scheduler, self.duty
        poll, decide, clock = server.poll, scheduler.decide, _core.now
        while not self.stopped:
            now_ns = clock()
            if now_ns >= self._duty_due_ns:  # also where there is never a pause: that is when it matters
                self._duty_due_ns = now_ns + DUTY_EVERY_NS
                duty.update(now_ns, server.slept_ns())
                self._awake.away_ns()
            for entry in poll(now_ns):
                self._take(entry, now_ns)
            if self.in_line:
                self._succeed()
            action = decide(now_ns, duty.yielding)
            if action.kind == START:
                self._run(action.jobs, now_ns)
            elif action.kind == EXPIRE:
                self._give_up(action, now_ns)
            else:
                self._idle(action, now_ns)
            if now_ns >= self._control_due_ns:
                self._control(now_ns)

    def _take(self, entry: tuple[int, ...], now_ns: int) -> None:
        lane, sequence, slot, deadline_ns, release_ns, flags = entry
        if flags == 0:
            job = self.scheduler.submit(lane, sequence, slot, release_ns, deadline_ns, now_ns)
            self.server.expect(lane, slot, job.latest_start_ns)
        elif flags == ENTRY_CANCEL:
            cancelled = self.scheduler.cancel(lane, sequence, now_ns)
            self.recorder.cancel(lane, sequence, cancelled is not None, now_ns)
            if cancelled is not None:
                self._answer(cancelled, CANCELLED, NO_PATH, NONE, 0, now_ns)
        elif flags == ENTRY_ANSWERED:
            expired = self.scheduler.expired_elsewhere(lane, sequence, now_ns)
            self.recorder.expired_elsewhere(lane, sequence, expired is not None, now_ns)
            self.lanes[lane].shaped.discard(slot)
        elif flags == ENTRY_ENDED:
            self.table.ended(lane, deadline_ns, now_ns)
        else:
            if flags & ENTRY_SHAPES:
                self.lanes[lane].shaped.add(slot)
            if flags & ENTRY_UNRECORDED:
                self.recorder.submit(lane, sequence, slot, release_ns, deadline_ns, now_ns)
            job = self.scheduler.submit(lane, sequence, slot, release_ns, deadline_ns, now_ns)
            self.server.expect(lane, slot, job.latest_start_ns)

    def _run(self, jobs: tuple[Job, ...], now_ns: int) -> None:
        job = jobs[0]
        lane = self.lanes[job.lane]
        if len(jobs) > 1 or lane.shaped:
            self._run_general(jobs, now_ns)
            return
        status, flags = OK, lane.flags
        self.server.begin(
            job.lane, job.slot, now_ns, job.deadline_ns, job.arrival_ns + job.source.period_ns, 0, job.cost_ns
        )
        try:
            if lane.runs[job.slot]():
                flags |= NOT_FINITE
        except EngineFailure as failure:
            status = FAILED
            self.table.failed(lane, failure, job.sequence)
        ended_ns = self.server.end()
        if (ended_ns <= job.deadline_ns or not job.deadline_ns) and ended_ns - now_ns <= job.cost_ns:
            # In time and within its cost: nothing to explain, so the answer goes out before the books are kept.
            if job.early:
                flags |= EARLY
            self.server.complete(job.lane, job.slot, status, flags, lane.path, NONE, 0, ended_ns, job.deadline_ns)
            self._note(jobs, now_ns, ended_ns, 0)
        else:
            self._explain(jobs, now_ns, ended_ns)
            self._complete(job, status, flags, ended_ns)
            if job.overrun:
                self.table.overran(lane, job.sequence)
        if status == OK:
            lane.last_slot = job.slot
            lane.last_ok = job.sequence
        # Whoever comes back as fast as he can is worth waiting for awake, however he waits.
        if lane.closed_loop.pays(job.release_ns - lane.ended_ns, self.closed_loop_ns) and self.duty.at_ease:
            self._spin_until_ns = ended_ns + self.closed_loop_ns
        elif self.server.spins(job.lane):
            self._spin_until_ns = ended_ns + self.spin_ns
        lane.ended_ns = ended_ns

    def _note(self, jobs: tuple[Job, ...], started_ns: int, ended_ns: int, switched_out_ns: int) -> None:
        """The books of a dispatch: scheduler and record. Nothing is recorded during a run, so this keeps the order."""
        self.recorder.started(jobs, started_ns, self.duty.yielding)
        self.scheduler.finish(ended_ns, switched_out_ns)
        self.recorder.finish(ended_ns, switched_out_ns)

    def _explain(self, jobs: tuple[Job, ...], started_ns: int, ended_ns: int) -> None:
        """As ``_note``, for a dispatch that was late or too long: time without a core is the machine's doing."""
        away_ns = self._awake.away_ns() + (self.witness.absent_ns(ended_ns) if self.witness else 0)
        self._note(jobs, started_ns, ended_ns, min(away_ns, ended_ns - started_ns))

    def _complete(self, job: Job, status: int, flags: int, ended_ns: int) -> None:
        flags |= (EARLY if job.early else 0) | (FLAG_OVERRUN if job.overrun else 0)
        path = self.lanes[job.lane].path
        self.server.complete(
            job.lane, job.slot, status, flags, path, job.cause, job.cause_detail, ended_ns, job.deadline_ns
        )

    def _answer(self, job: Job, status: int, path: int, cause: int, detail: int, now_ns: int) -> None:
        self.server.complete(job.lane, job.slot, status, 0, path, cause, detail, now_ns, job.deadline_ns)

    def _give_up(self, expire: Expire, now_ns: int) -> None:
        """Answers a job that does not run: it can't make its deadline, or a newer input has taken its place."""
        job = expire.job
        assert job is not None
        self.recorder.expired(expire, now_ns, self.duty.yielding)
        status, path = expire.status, NO_PATH
        if status == OK:  # a stale input, and the loop holds the last answer meanwhile
            held = self.lanes[job.lane].hold(job.slot)
            status, path = (OK, HOLD) if held else (EXPIRED, NO_PATH)
        self._answer(job, status, path, expire.cause, expire.detail, now_ns)

    # ---- the rest: batches, shapes, waiting, upkeep ----

    def _run_general(self, jobs: tuple[Job, ...], now_ns: int) -> None:
        """A batch, or a job with shapes of its own."""
        status = OK
        tainted: Sequence[object] | None = None
        lanes = [self.lanes[job.lane] for job in jobs]
        for more, job in zip(range(len(jobs) - 1, -1, -1), jobs, strict=True):
            arrival_ns = job.arrival_ns + job.source.period_ns
            self.server.begin(job.lane, job.slot, now_ns, job.deadline_ns, arrival_ns, more, job.cost_ns)
        try:
            if len(jobs) > 1:
                tainted = self.table.batch(lanes[0].engine.spec.model, len(jobs)).run(
                    [lane.inputs_of(job.slot) for lane, job in zip(lanes, jobs, strict=True)],
                    [lane.outputs_of(job.slot) for lane, job in zip(lanes, jobs, strict=True)],
                )
            elif jobs[0].slot in lanes[0].shaped:
                lanes[0].shaped.discard(jobs[0].slot)
                tainted = (lanes[0].run_shaped(jobs[0].slot),)
            else:
                tainted = (lanes[0].runs[jobs[0].slot](),)
        except EngineFailure as failure:
            status = FAILED
            self.table.failed(lanes[0], failure)
        ended_ns = self.server.end()
        self._explain(jobs, now_ns, ended_ns)
        if len(jobs) > 1:
            self.server.batched(jobs[0].lane, len(jobs), ended_ns - now_ns)
        for number, (job, lane) in enumerate(zip(jobs, lanes, strict=True)):
            self._complete(job, status, lane.flags | (NOT_FINITE if tainted and tainted[number] else 0), ended_ns)

    def _idle(self, wait: Wait, now_ns: int) -> None:
        """Nothing to run: a step of a chore if there is a gap, else wait for the next event, spinning where that
        pays."""
        if self.draining:
            self._end()
            return
        until_ns = wait.until_ns
        predicted_ns = wait.spin_from_ns
        if self._waited_for != (until_ns, predicted_ns):  # to wait on for the same says nothing new
            self._waited_for = (until_ns, predicted_ns)
            self.recorder.waiting(until_ns, predicted_ns, now_ns, self.duty.yielding)
        if self.table.chores:
            gap_ns = min(until_ns or NEVER, predicted_ns or NEVER) - now_ns
            self._chore_since_ns = self._chore_since_ns or now_ns
            if gap_ns >= CHORE_GAP_NS or now_ns - self._chore_since_ns >= CHORE_PATIENCE_NS:
                self._chore()
                return
        yielding = self.duty.yielding
        spin_until_ns = 0 if yielding else self._spin_until_ns
        if predicted_ns and not yielding and self.spin_ns:
            awake_ns = self._expect(self.lanes[wait.lane], predicted_ns, now_ns)
            if awake_ns <= now_ns:
                spin_until_ns = self._spin_until_ns = predicted_ns + SPIN_LEAD_NS
            elif not until_ns or awake_ns < until_ns:
                until_ns = awake_ns
        if yielding and not until_ns:
            until_ns = now_ns + YIELD_NS
        elif yielding:
            until_ns = min(until_ns, now_ns + YIELD_NS)
        if self.table.chores:
            # No gap came up, and perhaps nobody submits any more: patience ends even so.
            patience_ns = self._chore_since_ns + CHORE_PATIENCE_NS
            until_ns = min(until_ns, patience_ns) if until_ns else patience_ns
        if not self._control_due_ns:
            return  # there is something to tell first
        if self.grace.due_ns:
            until_ns = min(until_ns, self.grace.due_ns) if until_ns else self.grace.due_ns
        woke = self.server.wait(until_ns, spin_until_ns)
        if woke & WOKE_CONTROL:
            self._control_due_ns = 0
        if woke & WOKE_SUCCESSION:
            self.in_line = True

    def _expect(self, lane: ServedLane, predicted_ns: int, now_ns: int) -> int:
        """When to be awake for a release that is predicted; warms the engine before, in time that no loop can need."""
        warm_ns = predicted_ns - WARM_LEAD_NS - lane.cost_ns
        if warm_ns - lane.ended_ns > COLD_NS:
            if now_ns < warm_ns:
                return warm_ns
            if now_ns + lane.cost_ns <= min(predicted_ns - SPIN_LEAD_NS, self.scheduler.next_release(now_ns)):
                lane.warm()
                lane.ended_ns = now_ns
        return predicted_ns - SPIN_LEAD_NS

    def _tell(self) -> None:
        """Engines' failures and broken promises, in words. Kept until now: nothing is sent on the real-time path."""
        for lane, kept, at_ns in self.scheduler.alarms:
            self.table.alarm(lane, kept, at_ns)
        self.scheduler.alarms.clear()
        for message in self.table.told:
            self.link.send(message)
        self.table.told.clear()

    def _succeed(self) -> None:
        """Takes over the ledgers that have passed to this executor, and lets go of those it is asked for."""
        for number, what in self.server.successions():
            self.table.succession(number, what)
            self._control_due_ns = 0  # there is something to tell
        self.in_line = not self.table.owns_all

    def _end(self) -> None:
        """Tells every client that its lane is over, and stops serving."""
        self.table.end(DETACHED)
        self.stopped = True

    def _chore(self) -> None:
        self._chore_since_ns = 0
        if next(self.table.chores[0], DONE) is DONE:
            self.table.chores.popleft()

    def _control(self, now_ns: int) -> None:
        """One message from the supervisor, if there is one, and what there is to tell it."""
        self._control_due_ns = now_ns + CONTROL_EVERY_NS
        if self.table.chores:  # a device that is never idle has no gaps
            self._chore_since_ns = self._chore_since_ns or now_ns
            if now_ns - self._chore_since_ns >= CHORE_PATIENCE_NS:
                self._chore()
        self._tell()
        received = self.link.receive()
        if self.link.lost:
            self._alone(now_ns)
            return
        if received is None:
            return
        self._control_due_ns = 0  # there may be more
        message, descriptors = received
        self.estate.follow(message, descriptors)
        if message["op"] == "drain":
            self.draining = True
        elif message["op"] == "adopted":
            self.grace.adopted()
        elif message["op"] == "record.state":
            self.recorder.state(self.scheduler, _core.now())
        else:
            self.table.handle(message, descriptors)
            self.in_line = not self.table.owns_all

    def _alone(self, now_ns: int) -> None:
        """The supervisor is gone. Its successor may come, and finds lanes as the last message left them."""
        self.server.set_control(-1)
        if self.draining or self.grace.over(now_ns):
            self._end()
        elif now_ns >= self.grace.due_ns and not self.table.chores:
            owned = [ledger.device for ledger in self.table.ledgers.values() if ledger.owned]
            if self.grace.step(now_ns, owned):
                self.server.set_control(self.link.fileno())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m taktd.daemon.executor", description="Started by taktd only.")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    # Who ends an executor is its supervisor; a terminal's Ctrl-C goes to the supervisor alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = SupervisorLink(socket.socket(fileno=arguments.control_fd))
    try:
        return _run(link)
    except LinkClosed:
        return 0
    finally:
        leave_rights()


def _run(link: SupervisorLink) -> int:
    plan, descriptors = _next_message(link, "configure")
    usable = os.sched_getaffinity(0)
    estate = Estate(plan, descriptors)
    try:
        prepared = prepare(plan, link.send)
        ledger_fd, stats_fd, journal_fd = descriptors[:3]
        server = _core.Server(ledger_fd, stats_fd, journal_fd, link.fileno())
        table = LaneTable(server, link, plan, descriptors, prepared)
    except (ModelRefused, EngineFailure) as error:
        # A device may still come: its nodes appear late after a boot, a driver is being upgraded.
        link.send({"op": "failed", "error": str(error), "device": isinstance(error, DeviceFailure)})
        return EXIT_FAILED
    beside = plan.get("prepare")
    if not beside:
        start_watch(server, prepared.rights, usable)
    estate.loaded = {"op": "loaded", "records": True, "relabels": True, **prepared.as_json()}
    link.send(estate.loaded)
    costs, _ = estate.serve, _ = _next_message(link, "serve")
    executor = Executor(link, server, table, plan, costs, estate, throttled=prepared.rights.policy == "fifo")
    freeze()
    member = plan.get("member")
    if member is None:  # alone: nobody else can serve this ledger
        member = os.getpid()
        _core.succession_set(ledger_fd, member)
    rights = prepared.rights
    if beside:
        # Asleep from here on, and awake at once when it is its turn.
        rights = take_rights(plan["cores"], plan["priority"], prepared.helpers)
        start_watch(server, rights, usable)
        table.told.append({"op": "rights", "rights": rights.as_json()})
    executor.watch_core(open_witness(rights))
    table.join(member, rights)
    link.send({"op": "ready"})
    try:
        executor.serve()
    except DeviceBroken as broken:
        link.send({
            "op": "log", "level": "error", "message_id": "device-broken", "fields": {},
            "text": f"{broken}: this process ends, its jobs go to whoever serves next",
        })  # fmt: skip
        # At once: a driver whose context is broken may take its time to take leave, and the jobs wait.
        os._exit(EXIT_BROKEN)
    leave_rights()  # the core belongs to whoever serves now
    return 0


def _next_message(link: SupervisorLink, op: str) -> tuple[dict[str, Any], list[int]]:
    """Waits for one message of the handshake. Raises ``LinkClosed``, also when it is told to drain instead: who does
    not serve yet has nothing to keep for another supervisor."""
    while (received := link.receive()) is None:
        if link.lost:
            raise LinkClosed
        select.select([link], [], [])
    if received[0]["op"] == "drain":
        raise LinkClosed
    if received[0]["op"] != op:
        raise ValueError(f"expected {op!r} from the supervisor, found {received[0]['op']!r}")
    return received


if __name__ == "__main__":
    sys.exit(main())
