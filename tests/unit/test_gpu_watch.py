"""What a GPU's driver reports beside any job: heard by NVML and in the kernel's log, acted upon once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taktd.daemon.supervision.gpu_watch import GpuWatch
from taktd.daemon.supervision.kernel_log import KernelLog
from tests.unit.test_gpu_events import Nvml

CARD = {"uuid": "GPU-a", "pci": "0000:01:00.0"}


class Member:
    def __init__(self, home: str, card: dict[str, str] | None, ready: bool = True) -> None:
        self.home, self.gpu, self.ready = home, card, ready
        self.fenced: list[str] = []

    def fence(self, why: str) -> None:
        self.fenced.append(why)


class House(dict[str, Any]):
    """The devices, as far as the watch looks at them."""

    def __init__(self, *members: Member) -> None:
        super().__init__({member.home: SimpleNamespace(member=member) for member in members})
        self.members = set(members)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    file = tmp_path / "kmsg"
    file.write_text("NVRM: Xid (PCI:0000:01:00): 79, what was before\n")
    return file


def look(watch: GpuWatch) -> None:
    asyncio.run(watch.look())


def watching(house: House, kernel: Path, nvml: Nvml | None) -> GpuWatch:
    return GpuWatch(house, find=lambda: nvml, kernel_log=KernelLog(kernel))  # type: ignore[arg-type]


def test_a_fatal_xid_ends_the_executor_of_that_card_and_no_other(kernel: Path) -> None:
    nvml = Nvml()
    one, other, cpu = Member("gpu0", CARD), Member("gpu1", {"uuid": "GPU-b", "pci": "0000:02:00.0"}), Member("c", None)
    watch = watching(House(one, other, cpu), kernel, nvml)
    look(watch)
    assert nvml.registered == ["GPU-a", "GPU-b"]
    nvml.queue = [("GPU-a", 79), ("GPU-b", 31)]
    look(watch)
    assert one.fenced == ["GPU GPU-a: XID 79 (fallen off the bus)"]
    assert other.fenced == cpu.fenced == []


def test_its_end_closes_what_it_listens_to(kernel: Path) -> None:
    open_before = set(os.listdir("/proc/self/fd"))
    watch = watching(House(Member("gpu0", CARD)), kernel, Nvml())
    look(watch)
    assert watch._kernel_log is not None

    async def begin_and_end() -> None:
        task = asyncio.create_task(watch.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(begin_and_end())
    assert watch._kernel_log.xids() == []
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_what_both_sources_tell_is_one_fault(kernel: Path) -> None:
    nvml, member = Nvml(), Member("gpu0", CARD)
    watch = watching(House(member), kernel, nvml)
    look(watch)
    nvml.queue = [("GPU-a", 48)]
    with kernel.open("a") as log:
        log.write("3,1,2,-;NVRM: Xid (PCI:0000:01:00): 48, pid=7, DBE\n")
    look(watch)
    look(watch)
    assert len(member.fenced) == 1


def test_without_nvml_the_kernels_log_is_enough(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    member = Member("gpu0", CARD)
    watch = watching(House(member), kernel, None)
    look(watch)
    look(watch)
    assert member.fenced == [], "what was logged before is not news"
    assert capsys.readouterr().err.count("nvidia-ml-py is not installed; the kernel's log is read") == 1
    with kernel.open("a") as log:
        log.write("6,1,2,-;usb 1-1: new device\n3,2,3,-;NVRM: Xid (PCI:0000:09:00): 79\n3,2,3,-;NVRM: Xid (PCI:00")
    look(watch)
    assert member.fenced == [], "another card's"
    with kernel.open("a") as log:
        log.write("00:01:00): 119, pid=1, Timeout after 6s of waiting for RPC response from GPU0 GSP!\n")
    look(watch)
    assert member.fenced == ["GPU GPU-a: XID 119 (GSP does not answer)"]


def test_an_executor_that_is_dead_already_is_not_ended_again(kernel: Path) -> None:
    nvml, member = Nvml(), Member("gpu0", CARD)
    watch = watching(House(member), kernel, nvml)
    look(watch)
    member.gpu, member.ready = None, False
    nvml.queue = [("GPU-a", 79)]
    look(watch)
    assert member.fenced == []


def test_where_there_is_no_gpu_nobody_is_asked(tmp_path: Path) -> None:
    def find() -> Any:
        raise AssertionError("NVML was looked for")

    watch = GpuWatch(House(Member("cpu0", None)), find=find)  # type: ignore[arg-type]
    look(watch)


def test_a_driver_that_is_exchanged_is_listened_to_again(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, member = Nvml(), Member("gpu0", CARD)
    watch = watching(House(member), kernel, nvml)
    look(watch)
    nvml.gone = True
    look(watch)
    nvml.gone = False
    monkeypatch.setattr("taktd.daemon.supervision.gpu_watch.AGAIN_NS", 0)
    watch._due_ns = 0
    nvml.queue = [("GPU-a", 79)]
    look(watch)
    assert len(member.fenced) == 1


def test_a_log_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "nothing")
    assert "No such file" in log.problem
    assert log.xids() == []
