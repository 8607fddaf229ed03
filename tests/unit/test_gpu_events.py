"""XIDs as NVML tells them: collected without waiting, and nothing breaks where there are none."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from taktd.daemon.supervision.gpu_events import FATAL_XIDS, XidEvent, XidWatch
from tests.fakes.nvml import NVMLError


class Nvml:
    """The calls that XidWatch makes."""

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT = 10
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *, events: bool = True) -> None:
        self.queue: list[tuple[str, int]] = []
        self.registered: list[str] = []
        self.open_sets = self.open_count = 0
        self.gone = False
        self._events = events

    def nvmlInit(self) -> None:
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlEventSetCreate(self) -> object:
        self.open_sets += 1
        return object()

    def nvmlEventSetFree(self, eventSet: object) -> None:
        self.open_sets -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceRegisterEvents(self, handle: str, eventTypes: int, eventSet: object) -> None:
        if not self._events:
            raise NVMLError(3, "Not Supported")
        assert eventTypes == 8
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: object, timeoutms: int) -> SimpleNamespace:
        assert timeoutms == 0, "the supervisor does not wait"
        if self.gone:
            raise NVMLError(9, "Driver Not Loaded")
        if not self.queue:
            raise NVMLError(10, "Timeout")
        uuid, xid = self.queue.pop(0)
        return SimpleNamespace(device=uuid, eventType=8, eventData=xid)


def test_events_are_collected_by_gpu() -> None:
    nvml = Nvml()
    watch = XidWatch(nvml, ("GPU-a", "GPU-b"))
    assert nvml.registered == ["GPU-a", "GPU-b"]
    assert watch.poll() == []
    nvml.queue = [("GPU-b", 79), ("GPU-a", 31)]
    found = watch.poll()
    assert found == [XidEvent("GPU-b", 79), XidEvent("GPU-a", 31)]
    assert [e.fatal for e in found] == [True, False]
    assert "fallen off the bus" in found[0].text
    assert watch.poll() == []
    watch.close()
    assert nvml.open_count == nvml.open_sets == 0


def test_a_storm_of_events_is_bounded() -> None:
    nvml = Nvml()
    watch = XidWatch(nvml, ("GPU-a",))
    nvml.queue = [("GPU-a", 43)] * 1000
    assert len(watch.poll()) == 64


def test_where_there_are_no_events_it_says_so_and_leaves_nothing() -> None:
    nvml = Nvml(events=False)
    watch = XidWatch(nvml, ("GPU-a",))
    assert watch.poll() == []
    assert "Not Supported" in watch.problem
    assert nvml.open_count == nvml.open_sets == 0


def test_a_driver_that_goes_away_ends_the_watch() -> None:
    nvml = Nvml()
    watch = XidWatch(nvml, ("GPU-a",))
    nvml.gone = True
    assert watch.poll() == []
    assert "Driver Not Loaded" in watch.problem
    assert watch.poll() == []
    assert nvml.open_sets == 0


def test_the_names_are_nvidia_ml_pys() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [n for n in dir(Nvml) if n.startswith(("nvml", "NVML"))]
    text = (Path(__file__).parents[1] / "fakes" / "nvml_site" / "pynvml.py").read_text()
    names += re.findall(r"^(?:def )?(nvml\w+|NVML\w+)", text, re.MULTILINE)
    assert len(names) > 15
    assert [n for n in names if n != "NVMLError" and not hasattr(pynvml, n)] == []
    assert pynvml.NVML_ERROR_TIMEOUT == 10
    assert pynvml.nvmlEventTypeXidCriticalError == 8


def test_an_applications_own_fault_is_not_the_cards() -> None:
    assert not {13, 31, 43, 45, 68, 69} & set(FATAL_XIDS)
