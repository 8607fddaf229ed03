"""What an executor makes of its lanes: who goes first among equals, how long the others may be silent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from taktd.daemon.execution.lane_table import LaneTable
from taktd.daemon.execution.repetition import PAUSE_FIRST_NS
from taktd.daemon.execution.rights import Rights
from taktd.daemon.execution.setup import Prepared
from taktd.daemon.recording.record import Recorder
from taktd.daemon.schedule.job import START
from taktd.daemon.scheduler import Scheduler
from taktd.ipc import _core

MS = 1_000_000
TENSOR = {"dims": [1], "bytes": 4}


class Server:
    """Stands for the core's: remembers what it was told, has no lanes."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **_: Any) -> Any:
            self.told.append((name, *arguments))
            return {"unfinished": [], "open_ledger": (1, 8)}.get(name, 0)

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.told if call[0] == name]


class Engine:
    spec = SimpleNamespace(model="m", inputs=(), outputs=())

    def bind(self, inputs: object, outputs: object) -> Any:
        return lambda: None

    def batch(self, size: int) -> Any:
        return SimpleNamespace(run_bound=lambda: None)


def entry(name: str, lane: int) -> dict[str, Any]:
    return {
        "name": name, "model": "m", "lane": lane, "stats": 0, "period_ns": 10 * MS, "deadline_ns": 10 * MS,
        "jitter_ns": 0, "criticality": "firm", "on_late": "skip",
        "layout": {"slot_count": 3, "inputs": [TENSOR], "outputs": [TENSOR]},
    }  # fmt: skip


@pytest.fixture
def ledgers() -> Iterator[list[int]]:
    made = [_core.create_ledger(8), _core.create_ledger(8)]
    yield made
    for descriptor in made:
        os.close(descriptor)


def table_of(server: Server, ledgers: list[int], loops: list[dict[str, Any]], scheduler: Scheduler) -> LaneTable:
    standby = [{"device": "gpu0", "loops": [entry("other", 0)]}]
    plan = {"device": "cpu0", "models": [{"name": "m"}], "loops": loops, "standby": standby}
    descriptors = [ledgers[0], -1, -1, *[-1, -1] * len(loops), ledgers[1], -1, -1, -1]
    table = LaneTable(server, None, plan, descriptors, Prepared(Rights(), {"m": Engine()}, {}, 0))  # type: ignore[arg-type,dict-item]
    cost = {"cost_ns": MS, "shortest_ns": MS}
    tasks = {one["name"]: cost for one in (*loops, *standby[0]["loops"])}  # type: ignore[attr-defined]
    table.schedule(scheduler, Recorder(server.record), {"tasks": tasks, "hang_after_ns": {"gpu0": 7 * MS}})
    return table


def test_among_equals_the_order_of_the_configuration_decides_whatever_lanes_they_have(ledgers: list[int]) -> None:
    loops = [entry("first", 5), entry("second", 0), entry("third", 3)]  # as after some changes
    scheduler, server = Scheduler(), Server()
    table = table_of(server, ledgers, loops, scheduler)
    table.succession(0, "clean")
    for lane in (0, 3, 5):
        scheduler.submit(lane, 1, 0, 100, 0, 100)
    started = []
    for at_ns in (100, 200, 300):
        action = scheduler.decide(at_ns)
        assert action.kind == START
        started.append(action.jobs[0].source.task.name)
        scheduler.finish(at_ns + 50)
    assert started == ["first", "second", "third"]


def test_how_long_the_other_may_be_silent_follows_a_change_that_touches_nothing_else(ledgers: list[int]) -> None:
    server = Server()
    table = table_of(server, ledgers, [], Scheduler())
    table.join(4, Rights())
    assert [call[-1] for call in server.of("join")] == [1000 * MS, 7 * MS]
    table.handle({"op": "hang_after", "hang_after_ns": {"gpu0": 9 * MS}}, [])
    assert server.of("set_hang_after") == [(0, 1000 * MS), (1, 9 * MS)]


def test_a_ledger_is_let_go_of_right_after_a_job_where_the_next_one_comes_soon(ledgers: list[int]) -> None:
    server = Server()
    table = table_of(server, ledgers, [entry("walk", 0) | {"period_ns": MS}], Scheduler())
    table.succession(0, "clean")
    table.chores.clear()
    table.lanes[0].ended_ns = _core.now() - MS // 2
    table.handle({"op": "release", "device": "cpu0"}, [])
    assert next(table.chores[0], "done") != "done"
    assert server.of("hand_over") == []
    table.lanes[0].ended_ns = _core.now()
    next(table.chores[0])
    assert server.of("hand_over") == [(0,)]


def test_a_ledger_without_jobs_is_let_go_of_at_once(ledgers: list[int]) -> None:
    server = Server()
    table = table_of(server, ledgers, [entry("walk", 0)], Scheduler())
    table.succession(0, "clean")
    table.chores.clear()
    table.handle({"op": "release", "device": "cpu0"}, [])
    next(table.chores[0])
    assert server.of("hand_over") == [(0,)]


def test_a_rule_that_comes_true_again_and_again_is_told_once_with_what_to_do_and_then_counted(
    ledgers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"switch": {"failures": 0, "overruns": [8, 10]}}
    table = table_of(Server(), ledgers, [entry("walk", 0) | rule, entry("trot", 1) | rule], Scheduler())
    table.succession(0, "clean")
    table.chores.clear()
    table.told.clear()
    _core.succession_set(ledgers[0], 9)
    now_ns = _core.now()
    monkeypatch.setattr("taktd.daemon.execution.lane_table._core.now", lambda: now_ns)

    def overran(lane: int, sequence: int) -> None:
        table.overran(table.lanes[lane], sequence)
        while table.chores:
            if next(table.chores[0], "done") == "done":
                table.chores.popleft()

    for sequence in range(1, 1_001):
        for lane in (0, 1):
            overran(lane, sequence)
    assert [said["fields"]["loop"] for said in table.told] == ["walk", "trot"]
    assert "8 of the last 10 jobs ran beyond their cost; well on an input of our own\nto do: " in table.told[0]["text"]
    assert "loops.walk.budget" in table.told[0]["text"]
    now_ns += PAUSE_FIRST_NS
    for sequence in range(1_001, 1_009):
        overran(0, sequence)
    assert len(table.told) == 3
    assert "(125 times since this was told last)" in table.told[2]["text"]
