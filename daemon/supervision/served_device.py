"""One device as the supervisor sees it: its lanes, its executor, who serves it now and since when, what is claimed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from taktd.daemon.certification.confirmation import confirm
from taktd.daemon.config.configuration import Loop
from taktd.daemon.config.durations import format_duration
from taktd.daemon.doctor.preconditions import Lost
from taktd.daemon.health import statistics
from taktd.daemon.logbook import log
from taktd.daemon.supervision.device_plan import Inspection
from taktd.daemon.supervision.executor_process import ExecutorProcess
from taktd.daemon.supervision.lanes import DeviceLanes
from taktd.daemon.supervision.member import Measured, Member, Schedule

PRIMARY: Final = "primary"
STAND_IN: Final = "stand-in"

#: Why the executor that serves a device changed: `start` is the first one, `return` takes a change back, `hand-back`
#: gives the loops to the primary again; `adopted` went on while taktd itself was started again after its death;
#: `loading` cleared a GPU for an engine that is loaded there.
CAUSES: Final = ("start", "died", "hung", "failed", "handover", "hand-back", "return", "adopted", "loading")


class ServedDevice:
    """A device over all its executors. member: the one of the configuration that runs; outgoing: the one before it,
    kept while a change is on probation."""

    def __init__(self, lanes: DeviceLanes) -> None:
        self.lanes = lanes
        self.name = lanes.name
        self._member: Member | None = None
        self.outgoing: Member | None = None
        self.serving: Member | None = None
        self.since_ns = 0
        self.why = ""
        self.reason = ""
        self.progress = ""  # of an executor of its own that does not serve yet: what it does, where that takes long
        self.switching = ""  # the cause, while we make it change
        self.switches: Counter[str] = Counter()
        self.confirmed: dict[str, str] = {}  # loop → "" when its C held in the first seconds, else why not
        self._counted: dict[str, tuple[int, int]] = {}  # loop → runs and overruns of other executors before
        self.revocations = 0
        self._lost: tuple[Lost, ...] = ()

    @property
    def member(self) -> Member:
        """The executor that the running configuration has for the device."""
        assert self._member is not None
        return self._member

    @member.setter
    def member(self, member: Member) -> None:
        self._member = member
        self.confirmed = {}
        self._counted = {loop.name: self._runs(loop.name) for loop in member.plan.loops}

    @property
    def doing(self) -> str:
        """Of its own executor, while that one does not serve: how far it is, or why not."""
        process = self.member.process
        return self.progress or process.error or ("ready" if process.ready else "loading")

    @property
    def process(self) -> ExecutorProcess:
        return self.member.process

    @property
    def inspections(self) -> Mapping[str, Inspection]:
        """Of the models that its executor has, and of those whose loops it stands in for."""
        return self.member.plan.inspections

    @property
    def measured(self) -> Measured:
        return self.member.measured

    @property
    def dispatch_ns(self) -> int:
        return self.member.dispatch_ns

    @property
    def schedule(self) -> Schedule | None:
        return self.member.schedule

    @property
    def recording_process(self) -> ExecutorProcess | None:
        """The executor that writes into the device's journal: one of its own, while it serves."""
        if self.serving is None:
            return None
        return self.serving.process if self.serving.home == self.name else self.process

    def took(self, member: Member, cause: str, now_ns: int, reason: str = "") -> None:
        """An executor serves the ledger from now on. reason: in words, where the one before gave up by itself."""
        self.serving, self.since_ns, self.why, self.reason = member, now_ns, cause, reason
        self.lanes.serving, self.lanes.served_once = member, True
        self.switches[cause] += 1

    def lost_executor(self, now_ns: int) -> None:
        """Whoever served is dead, and nobody else does yet."""
        self.serving = self.lanes.serving = None
        self.since_ns = now_ns

    @property
    def role(self) -> str:
        """Of the executor that serves; "" while nobody does."""
        if self.serving is None:
            return ""
        return PRIMARY if self.serving.home == self.name else STAND_IN

    # ---- what is claimed ----

    def served_loops(self) -> list[str]:
        """Names of the loops that are not shed."""
        shed = self.schedule.shed if self.schedule else {}
        return [loop.name for loop in self.member.plan.loops if loop.name not in shed]

    def served_by(self, loop: str) -> Member | None:
        """Who answers the loop now. Not whoever stands in for other loops of the device alone, nor if it was shed."""
        return self.serving if self.serving is not None and self.serving.answers(loop) else None

    def unanswered(self) -> str:
        """What of the device nobody answers, and why; "" where each of its admitted loops is answered.

        A device that has no loops is there for its models: somebody has to serve it.
        """
        if self.serving is None:
            return f"{self.name}: {self.doing}"
        # A change passes loops over before `member` is its executor: what the one that serves has, it answers.
        missing = [] if self.role == PRIMARY else [name for name in self.served_loops() if not self.served_by(name)]
        return f"{self.name}: {_listed(missing)} answered by nobody ({self.doing})" if missing else ""

    @property
    def certified(self) -> bool:
        """Admitted on measurements that hold for the machine as it is now, and served by its own executor."""
        schedule = self.schedule
        admitted = schedule is not None and schedule.certified
        claimed = admitted and not self._lost and not any(self.confirmed.values()) and not self._doubts()
        return claimed and self.role == PRIMARY and not self._misplaced()

    def _misplaced(self) -> str:
        """Why its executor is not where the configuration wants it, "" where it is."""
        asked, found = sorted(self.member.plan.device.cores), sorted(self.member.rights.get("affinity", ()))
        if not asked or not found or asked == found:
            return ""
        return f"its executor runs on the cores {found}, not on {asked}: see devices.{self.name}.cores"

    def _runs(self, loop: str) -> tuple[int, int]:
        counters = statistics.read(self.lanes.stats_fd, self.lanes.stats_block("loop", loop))
        return counters["run"]["count"], counters["overrun"]

    def confirm_costs(self) -> None:
        """Compares what loops were admitted for with their first jobs on this executor; each is settled once."""
        if self.schedule is None or self.role != PRIMARY:
            return
        for loop in self.member.plan.loops:
            name, task = loop.name, self.schedule.serve["tasks"].get(loop.name)
            if name in self.confirmed or task is None:
                continue
            runs, overruns = (now - before for now, before in zip(self._runs(name), self._counted[name], strict=True))
            said = confirm(name, task["cost_ns"], runs, overruns)
            if said is None:
                continue
            self.revocations += bool(said) and self.certified
            self.confirmed[name] = said
            if said:
                self._refute(loop, said)

    def _refute(self, loop: Loop, said: str) -> None:
        counters = statistics.read(self.lanes.stats_fd, self.lanes.stats_block("loop", loop.name))
        took = format_duration(round(counters["run"]["p99_us"] * 1000))
        if loop.budget_ns is None:
            self.member.refute(loop.model, said)
            hint = f"nothing if this was a disturbance: the next start measures anew. Or set loops.{loop.name}.budget"
        else:
            hint = f"raise loops.{loop.name}.budget"
        log(
            "warning", f"the cost of loop {loop.name} does not hold: {said}; {self.name} is not certified any more\n"
            f"to do: {hint}; its jobs took {took} at p99. `taktctl doctor` names what disturbs its core",
            device=self.name, loop=loop.name,
        )  # fmt: skip

    def _doubts(self) -> list[str]:
        """Why costs that its executor was admitted with do not hold, as was found by a taktd before this one."""
        return [
            self.member.refuted[loop.model]
            for loop in self.member.plan.loops
            if loop.budget_ns is None and loop.model in self.member.refuted
        ]

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What the measurements rested on and is no longer so; set by the supervisor, who watches the machine."""
        return self._lost

    @lost.setter
    def lost(self, lost: tuple[Lost, ...]) -> None:
        self.revocations += self.certified and bool(lost)
        self._lost = lost

    def not_certified(self) -> str:
        """Why it is not, "" where it is."""
        if self.schedule is None:
            return "not admitted yet"
        refuted = (
            [str(loss) for loss in self._lost] + [said for said in self.confirmed.values() if said] + self._doubts()
        )
        if self.schedule.reason or refuted:
            return self.schedule.reason or "; ".join(refuted)
        if misplaced := self._misplaced() if self.role == PRIMARY else "":
            return misplaced
        if self.role == STAND_IN:
            return f"its loops are served by their stand-in {self.serving.home}" if self.serving else ""
        return "" if self.role else "nobody serves it"

    def as_json(self) -> dict[str, Any]:
        """One entry of `status`."""
        serving = self.serving
        return self.member.as_json() | {
            "device": self.name, "progress": self.progress, "role": PRIMARY,
            "ready": self.process.ready and serving is not None,
            "certified": self.certified, "not_certified": self.not_certified(), "revocations": self.revocations,
            "served_by": serving.home if serving else None, "serving_pid": serving.process.pid if serving else None,
            "serving_role": self.role or None, "since_ns": self.since_ns, "why": self.why, "reason": self.reason,
            "switches": dict(self.switches), "changing": self.outgoing is not None or bool(self.switching),
            "lanes": len(self.lanes.lanes), "lanes_clearing": self.lanes.clearing,
        }  # fmt: skip

    def close(self) -> None:
        self.lanes.close()


def _listed(loops: list[str]) -> str:
    return f"loop {loops[0]} is" if len(loops) == 1 else f"loops {', '.join(loops)} are"
