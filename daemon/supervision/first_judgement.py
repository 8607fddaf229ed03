"""Admission at start: of all devices when every executor has loaded, or of those that have when others take long.

An engine may take minutes to be built, and a GPU's device nodes may appear long after a boot. Whoever can serve does so
meanwhile, for the others as stand-in too; the rest is judged, together with them, when it is there. Called by the
supervisor whenever an executor has loaded or failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from taktd.daemon.certification.certification import Judgement, NotAdmitted
from taktd.daemon.logbook import log
from taktd.daemon.supervision.devices import START_PATIENCE_NS
from taktd.daemon.supervision.gpu_twins import twins
from taktd.daemon.supervision.member import Member, Schedule
from taktd.ipc import _core

if TYPE_CHECKING:
    from taktd.daemon.supervisor import Supervisor


class FirstJudgement:
    """Gives each member of the running configuration its first schedule. One has none: it has not been judged."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._began_ns = _core.now()
        self._again: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Judges whoever has to be and can be. Raises NotAdmitted where nothing is served yet that could go on."""
        members = {name: device.member for name, device in self._supervisor.devices.items()}
        waiting = {name: m for name, m in members.items() if m.schedule is None and m.process.pid}
        new = {name: m for name, m in waiting.items() if m.process.loaded_message}
        try:
            self._refuse_twins(members, waiting)
            if new and not self._waits([m for m in members.values() if m.schedule is None and m not in new.values()]):
                self._judge(members, new)
        except NotAdmitted as refusal:
            if not self._supervisor.announced:
                raise
            self._turn_away({name: m for name, m in waiting.items() if name in new or m.gpu is not None}, refusal)

    def _refuse_twins(self, members: Mapping[str, Member], waiting: Mapping[str, Member]) -> None:
        gpus = {n: m.plan.device.gpu.device for n, m in waiting.items() if m.plan.device.gpu and m.gpu is not None}
        if same := twins((m for m in members.values() if m.process.pid), gpus):
            raise NotAdmitted(same)

    def _judge(self, members: Mapping[str, Member], new: Mapping[str, Member]) -> None:
        known = {name: m for name, m in members.items() if name in new or m.schedule is not None}
        for name, judged in self._supervisor.judge_for(self._supervisor.configuration)(known).items():
            _tell(name, judged)
            if name in new:
                known[name].serve(Schedule.of(judged))
            else:
                known[name].schedule = Schedule.of(judged)
        self._supervisor.watch.certify(new)

    def _waits(self, missing: list[Member]) -> bool:
        """Whether to wait for the others: a while, unless each of them has said that it takes longer."""
        left_ns = self._began_ns + START_PATIENCE_NS - _core.now()
        if not missing or left_ns <= 0 or all(m.process.tries or m.progress for m in missing):
            return False
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(left_ns / 1e9, self._supervisor.judge_first)
        return True

    def _turn_away(self, new: Mapping[str, Member], refusal: NotAdmitted) -> None:
        """They came late and don't fit: who serves goes on, and their loops stay with their stand-ins."""
        for name, member in new.items():
            log("error", f"device {name} is not taken into service: {refusal}", event="refused", device=name)
            member.process.keep = False
            member.process.drain()


def _tell(name: str, judged: Judgement) -> None:
    for warning in judged.warnings:
        log("warning", warning, device=name)
    for loop, why in judged.shed.items():
        log("warning", f"loop {loop} is not served, it does not fit: {why}", device=name, loop=loop)
    for loop, why in judged.standby_reason.items():
        log("warning", f"loop {loop}: its stand-in on {name} is not certified: {why}", device=name, loop=loop)
    if judged.reason:
        log("warning", f"device {name} is not certified: {judged.reason}", device=name)
