"""What the daemon does with the machine it runs on: watches it, holds its idle states, tells journald in fields."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest

from taktd.daemon import journal
from taktd.daemon.doctor.gpu import GpuReadings
from taktd.daemon.doctor.preconditions import Lost
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.doctor.watch import MachineWatch
from taktd.daemon.supervision import idle_latency

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "tests" / "fixtures" / "sysroots" / "good"
GOVERNOR = "sys/devices/system/cpu/cpu3/cpufreq/scaling_governor"


class Heard:
    def __init__(self) -> None:
        self.changes: list[tuple[str, list[str]]] = []

    def __call__(self, device: str, lost: tuple[Lost, ...]) -> None:
        self.changes.append((device, [loss.name for loss in lost]))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    shutil.copytree(GOOD, root, symlinks=True)
    return root


def test_a_loss_is_told_once_and_its_end_too(machine: Path) -> None:
    heard = Heard()
    watch = MachineWatch({"cpu0": frozenset({3}), "cpu1": frozenset({2})}, heard, tree=Tree(machine))
    watch.certify()
    watch.look()
    assert heard.changes == []
    (machine / GOVERNOR).write_text("powersave")
    watch.look()
    watch.look()
    assert heard.changes == [("cpu0", ["governor"])]
    (machine / GOVERNOR).write_text("performance")
    watch.look()
    assert heard.changes[1:] == [("cpu0", [])]


def test_a_device_that_is_not_pinned_rests_on_all_cores(machine: Path) -> None:
    heard = Heard()
    watch = MachineWatch({"cpu0": frozenset()}, heard, tree=Tree(machine))
    watch.certify()
    (machine / GOVERNOR).write_text("powersave")
    watch.look()
    assert heard.changes == [("cpu0", ["governor"])]


def test_nothing_is_lost_before_there_is_a_certificate(machine: Path) -> None:
    heard = Heard()
    watch = MachineWatch({"cpu0": frozenset({3})}, heard, tree=Tree(machine))
    (machine / GOVERNOR).write_text("powersave")
    watch.look()
    assert heard.changes == []


def test_gpus_are_asked_once_a_look_and_not_at_all_without_one(machine: Path) -> None:
    asked = 0

    def read() -> GpuReadings:
        nonlocal asked
        asked += 1
        return GpuReadings()

    watch = MachineWatch({"a": frozenset({3}), "b": frozenset({2})}, Heard(), tree=Tree(machine), read_gpus=read)
    watch.certify()
    watch.look()
    assert asked == 2


# ---- idle states ----


def test_the_bound_is_written_as_the_kernel_reads_it(tmp_path: Path) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    descriptor = idle_latency.hold({idle_latency.VARIABLE: "5"}, str(device))
    assert descriptor is not None
    assert struct.unpack("=i", device.read_bytes()) == (5,)


@pytest.mark.parametrize("text", ["", "-1", "fast", "99999999999"])
def test_without_a_usable_bound_nothing_is_held(tmp_path: Path, text: str) -> None:
    device = tmp_path / "cpu_dma_latency"
    device.touch()
    assert idle_latency.hold({idle_latency.VARIABLE: text}, str(device)) is None
    assert device.read_bytes() == b""


def test_a_device_that_is_not_ours_is_said_and_survived(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert idle_latency.hold({idle_latency.VARIABLE: "0"}, str(tmp_path / "absent")) is None
    assert "can't be held" in capfd.readouterr().err


# ---- journald ----


def test_ids_become_fields_that_journald_takes() -> None:
    fields = journal.fields(4, "ready", {"loop": "go1", "restart_in_ms": 100, "peer-uid": 7})
    assert fields["PRIORITY"] == "4"
    assert fields["MESSAGE_ID"] == journal.MESSAGE_IDS["ready"]
    assert fields["TAKT_LOOP"] == "go1"
    assert fields["TAKT_PEER_UID"] == "7"
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in fields)


def test_message_ids_are_distinct_and_documented() -> None:
    ids = list(journal.MESSAGE_IDS.values())
    assert len(set(ids)) == len(ids)
    documented = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [name for name, number in journal.MESSAGE_IDS.items() if number not in documented] == []


def test_every_event_that_is_logged_has_a_message_id() -> None:
    named = {
        event
        for folder in ("daemon", "engines", "drivers")
        for file in (ROOT / folder).rglob("*.py")
        for event in re.findall(r'\bevent="([a-z-]+)"', file.read_text(encoding="utf-8"))
    }
    assert "ready" in named
    assert named - set(journal.MESSAGE_IDS) == set()
