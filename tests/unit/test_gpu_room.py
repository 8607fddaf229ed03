"""Who makes room on a GPU before another engine is loaded there, and when that is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from taktd.daemon.handover.gpu_room import NoRoom, make_room
from taktd.daemon.supervision.devices import PassOverFailed

LOOPS = ("walk", "look")


class Stand:
    """An executor that may stand in for gpu0's loops."""

    def __init__(self, home: str, loops: tuple[str, ...] = (), *, ready: bool = True, synced: bool = True) -> None:
        self.home, self.ready, self.synced = home, ready, synced
        entries = [SimpleNamespace(loop=SimpleNamespace(name=name)) for name in loops]
        self.plan = SimpleNamespace(standby_of=lambda device: entries)

    def __str__(self) -> str:
        return f"executor {self.home}"


class House(dict[str, Any]):
    def __init__(self, *line: Stand, certified: bool = True, gpu: bool = True, serving: str = "gpu0") -> None:
        loops = [SimpleNamespace(name=name) for name in LOOPS]
        plan = SimpleNamespace(device=SimpleNamespace(gpu=object() if gpu else None), loops=loops)
        device = SimpleNamespace(
            name="gpu0", member=SimpleNamespace(plan=plan), certified=certified, serving=SimpleNamespace(home=serving),
            lanes=SimpleNamespace(synced=lambda member: member.synced),
        )  # fmt: skip
        super().__init__(gpu0=device)
        self.changing = False
        self.passed: list[tuple[str, str]] = []
        self.fails = False
        self._line = list(line)

    def line(self, device: Any) -> list[Stand]:
        return [Stand("gpu0", LOOPS), *self._line]

    async def pass_over(self, device: Any, to: Stand, cause: str) -> None:
        assert self.changing, "else the loops would be given back at once"
        if self.fails:
            raise PassOverFailed(f"{to} did not take over")
        self.passed.append((to.home, cause))


def made(house: House) -> list[tuple[str, str]]:
    asyncio.run(make_room(house, ["gpu0", "new"]))  # type: ignore[arg-type]
    return house.passed


def test_the_loops_go_to_the_first_that_can_take_all_of_them() -> None:
    part, tired, far = Stand("c", ("walk",)), Stand("d", LOOPS, ready=False), Stand("e", LOOPS, synced=False)
    assert made(House(part, tired, far, Stand("cpu0", LOOPS), Stand("cpu1", LOOPS))) == [("cpu0", "loading")]


def test_without_a_stand_in_what_was_promised_comes_first() -> None:
    with pytest.raises(NoRoom, match="no stand-in is ready for all of walk, look"):
        made(House(Stand("c", ("walk",))))


def test_what_was_not_promised_is_run_beside_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    house = House(certified=False)
    assert made(house) == []
    assert not house.changing
    assert "beside its loops" in capsys.readouterr().err


@pytest.mark.parametrize("house", [House(gpu=False), House(serving="cpu0")], ids=["a CPU", "with the stand-in already"])
def test_where_nothing_is_in_the_way_nothing_happens(house: House) -> None:
    assert made(house) == []


def test_a_stand_in_that_does_not_take_over_ends_the_change() -> None:
    house = House(Stand("cpu0", LOOPS))
    house.fails = True
    with pytest.raises(NoRoom, match="could not go to their stand-in: executor cpu0 did not take over"):
        made(house)
