"""Who may take a device's loops next, as the supervisor says it in the ledger."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taktd.daemon.supervision import devices
from taktd.daemon.supervision.devices import Devices, PassOverFailed


class House(Devices):
    """A GPU's loop with two stand-ins; who is appointed is kept in ``next``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gpu: bool = True) -> None:
        super().__init__(Path("/nowhere"), SimpleNamespace(devices_changed=lambda: None))  # type: ignore[arg-type]
        self.next: list[int] = []
        monkeypatch.setattr(devices._core, "succession_set", lambda ledger, member: self.next.append(member))
        self.primary, self.first, self.second = (
            self._executor(number, home, gpu=gpu and home == "gpu0")
            for number, home in ((1, "gpu0"), (2, "cpu0"), (3, "cpu1"))
        )
        loop = SimpleNamespace(fallback=[SimpleNamespace(kind="device", device=name) for name in ("cpu0", "cpu1")])
        self.primary.plan.loops = [loop]
        lanes = SimpleNamespace(closed=False, ledger_fd=0, synced=lambda member: member.ready, left=lambda member: None)
        self.device: Any = SimpleNamespace(
            name="gpu0", switching="", lanes=lanes, _member=self.primary, member=self.primary, outgoing=None,
            serving=self.first, switches=Counter(died=1), lost_executor=lambda now_ns: None,
        )  # fmt: skip
        stand_ins = {m.home: SimpleNamespace(member=m) for m in (self.first, self.second)}
        self._devices = {"gpu0": self.device, **stand_ins}  # type: ignore[dict-item]

    def _executor(self, number: int, home: str, *, gpu: bool) -> Any:
        plan = SimpleNamespace(device=SimpleNamespace(gpu=object() if gpu else None), loops=[])
        process = SimpleNamespace(restarting=True, error="", pidfd=-1)
        return _Executor(
            id=number, home=home, plan=plan, process=process, devices=("gpu0",), ready=home != "gpu0", progress="",
            deaths_ns=[],
        )  # fmt: skip


class _Executor(SimpleNamespace):
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return f"executor {self.home}"


def test_nobody_is_next_while_a_dead_executors_gpu_may_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output area is off limits until its pidfd fires, and the next but one would answer there."""
    house = House(monkeypatch)
    house._dying.add(house.primary)
    house.choose(house.device)
    assert house.next == [0]
    house.member_died(house.primary, was_ready=True)  # the pidfd has fired
    assert house.next[-1] == house.second.id


def test_a_dead_executor_of_a_cpu_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, gpu=False)
    house._dying.add(house.primary)
    house.choose(house.device)
    assert house.next == [house.second.id]


def test_loops_are_not_passed_on_either(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    house._dying.add(house.primary)
    monkeypatch.setattr(devices, "SYNC_S_MAX", 0.01)
    with pytest.raises(PassOverFailed, match="executor gpu0 is dead and not gone: its GPU may write over answers"):
        asyncio.run(house.pass_over(house.device, house.second, "handover"))
    assert house.second.id not in house.next
