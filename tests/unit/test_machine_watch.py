"""What the daemon does with the machine it runs on: watches it, holds its idle states, tells journald in fields."""

from __future__ import annotations

import re
import shutil
import struct
from pathlib import Path

import pytest

from taktd.daemon import journal
from taktd.daemon.doctor.gpu import GpuReader, GpuReadings
from taktd.daemon.doctor.preconditions import Lost
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.doctor.watch import SETTLED_LOOKS, MachineWatch
from taktd.daemon.logbook import log
from taktd.daemon.supervision import idle_latency
from tests.fakes.nvml import FakeGpu, FakeNvml, NVMLError

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


def test_what_is_lost_is_not_back_because_a_configuration_was_taken_over(machine: Path) -> None:
    heard = Heard()
    cores = {"cpu0": frozenset({3}), "cpu1": frozenset({2})}
    watch = MachineWatch(cores, heard, tree=Tree(machine))
    watch.certify()
    (machine / GOVERNOR).write_text("powersave")
    watch.look()
    watch.follow(cores | {"cpu2": frozenset({3})})
    watch.certify()
    watch.look()
    assert heard.changes == [("cpu0", ["governor"])], "a new device rests on what is"
    watch.certify(["cpu0"])
    watch.look()
    assert heard.changes[1:] == [("cpu0", [])], "it was measured anew, as the machine is now"


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


GPUS = {"gpu0": "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfe00", "gpu1": "GPU-b"}
CORES = {"cpu0": frozenset({1}), "gpu0": frozenset({3}), "gpu1": frozenset({2})}


class TwoGpus:
    """A machine with two cards, watched through the reader that the daemon uses."""

    def __init__(self, machine: Path) -> None:
        self.cards = FakeGpu(), FakeGpu(uuid="GPU-b", bus="00000000:02:00.0")
        self.nvml = FakeNvml(*self.cards)
        self.heard = Heard()
        self.asked = 0
        self.opened = dict(GPUS)
        self._reader = GpuReader(lambda: self.nvml)
        self.watch = MachineWatch(
            CORES, self.heard, opened=lambda: self.opened, tree=Tree(machine), read_gpus=self._read
        )
        self.watch.certify()
        self.watch.look()

    def _read(self) -> GpuReadings:
        self.asked += 1
        return self._reader()


def test_gpus_are_asked_once_a_look_and_opened_once_for_all(machine: Path) -> None:
    gpus = TwoGpus(machine)
    for _ in range(3):
        gpus.watch.look()
    assert gpus.asked == 4, "not for a certificate, and not once for each device"
    assert gpus.nvml.init_count == 1
    assert gpus.heard.changes == []


def test_where_no_device_is_a_gpu_nvml_is_not_asked(machine: Path) -> None:
    gpus = TwoGpus(machine)
    gpus.watch.follow({"cpu0": frozenset({1})})
    gpus.watch.look()
    assert gpus.asked == 1


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("throttle_reasons", 0x40, "gpu_throttling"), ("clock_mhz", 210, "gpu_clock"),
        ("persistence", 0, "gpu_persistence"), ("processes", [4711], "gpu_users"),
    ],
)  # fmt: skip
def test_what_one_gpu_loses_revokes_the_certificate_of_its_device_alone(
    machine: Path, field: str, value: object, name: str
) -> None:
    gpus = TwoGpus(machine)
    setattr(gpus.cards[1], field, value)
    gpus.watch.look()
    gpus.watch.look()
    assert gpus.heard.changes == [("gpu1", [name])]


def test_a_card_is_watched_once_it_is_opened_and_while_its_executor_is_dead(machine: Path) -> None:
    gpus = TwoGpus(machine)
    gpus.opened = {}
    gpus.cards[1].throttle_reasons = 0x40
    gpus.watch.look()
    assert gpus.heard.changes == [("gpu1", ["gpu_throttling"])]
    gpus.cards[1].throttle_reasons = 0
    later = MachineWatch(CORES, heard := Heard(), opened=lambda: gpus.opened, tree=Tree(machine), read_gpus=gpus._read)
    later.certify()
    later.look()
    gpus.cards[0].throttle_reasons = 0x40
    later.look()
    assert heard.changes == [], "whose card it is nobody knows yet"
    gpus.cards[0].throttle_reasons = 0
    gpus.opened = dict(GPUS)
    later.look()
    gpus.cards[0].throttle_reasons = 0x40
    later.look()
    assert heard.changes == [("gpu0", ["gpu_throttling"])]


def test_a_card_that_answers_no_more_is_lost_and_the_other_is_not(machine: Path) -> None:
    gpus = TwoGpus(machine)
    gpus.nvml.lost = {0}
    gpus.watch.look()
    assert gpus.heard.changes == [("gpu0", ["gpu_present"])]


def test_clocks_that_float_give_no_certificate_back_before_they_have_stayed(machine: Path) -> None:
    gpus = TwoGpus(machine)
    for clock_mhz in (210, 1560, 210, *[1560] * SETTLED_LOOKS):
        gpus.cards[0].clock_mhz = clock_mhz
        gpus.watch.look()
    assert gpus.heard.changes == [("gpu0", ["gpu_clock"]), ("gpu0", [])]


def test_a_driver_that_is_exchanged_is_a_loss_until_it_is_opened_anew(
    machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gpus = TwoGpus(machine)
    gpus.nvml.failing = NVMLError(9, "Driver Not Loaded")
    gpus.watch.look()
    assert gpus.heard.changes == [("gpu0", ["gpu_present"]), ("gpu1", ["gpu_present"])]
    assert "Driver Not Loaded" in capfd.readouterr().err
    gpus.nvml.failing = None
    for _ in range(SETTLED_LOOKS):
        gpus.watch.look()
    assert gpus.heard.changes[2:] == [("gpu0", []), ("gpu1", [])]
    assert gpus.nvml.init_count == 2


def test_without_nvidia_ml_py_it_is_said_once_and_nothing_is_lost(
    machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    reader = GpuReader(lambda: None)
    watch = MachineWatch(CORES, heard, opened=lambda: GPUS, tree=Tree(machine), read_gpus=reader)
    watch.certify()
    watch.look()
    watch.look()
    assert heard.changes == []
    assert capfd.readouterr().err.count("nvidia-ml-py is not installed") == 1


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
    fields = dict(
        line.split("=", 1)
        for line in journal.entry("it is", 4, "ready", {"loop": "go1", "restart_in_ms": 100, "peer-uid": 7})
    )
    assert fields["MESSAGE"] == "it is"
    assert fields["PRIORITY"] == "4"
    assert fields["MESSAGE_ID"] == journal.MESSAGE_IDS["ready"]
    assert fields["TAKT_LOOP"] == "go1"
    assert fields["TAKT_PEER_UID"] == "7"
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name in fields)


def test_an_entry_about_several_loops_is_found_by_each_of_them() -> None:
    entry = journal.entry("m", 5, "handover", {"loop": ("balance", "walk"), "lane": ()})
    assert [line for line in entry if line.startswith("TAKT_L")] == ["TAKT_LOOP=balance", "TAKT_LOOP=walk"]


def test_outside_the_journal_several_loops_are_one_word(capfd: pytest.CaptureFixture[str]) -> None:
    log("notice", "m", loop=("balance", "walk"), lane=(), cause="died")
    assert capfd.readouterr().err == "taktd: m [loop=balance,walk cause=died]\n"


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
