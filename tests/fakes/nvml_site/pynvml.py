"""nvidia-ml-py for a daemon under test: one simulated GPU, whose fields the test writes into $FAKE_NVML as JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_spec = importlib.util.spec_from_file_location("fake_nvml", Path(__file__).parents[1] / "nvml.py")
assert _spec is not None
assert _spec.loader is not None
_fakes = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _fakes  # dataclasses look their module up
_spec.loader.exec_module(_fakes)

NVMLError = _fakes.NVMLError
_gpu = _fakes.FakeGpu()
_nvml = _fakes.FakeNvml(_gpu)


def nvmlSystemGetDriverVersion() -> str:
    """The first question of each reading: from here on the GPU is what the file says."""
    for name, value in json.loads(Path(os.environ["FAKE_NVML"]).read_text()).items():
        setattr(_gpu, name, value)
    return str(_nvml.nvmlSystemGetDriverVersion())


# ---- events: one XID a line in $FAKE_NVML.xids, of the one GPU ----

NVML_ERROR_TIMEOUT = 10
nvmlEventTypeXidCriticalError = 8
_told = 0


def nvmlEventSetCreate() -> object:
    return object()


def nvmlEventSetFree(eventSet: object) -> None:
    pass


def nvmlDeviceGetHandleByUUID(uuid: str) -> Any:
    if uuid != _gpu.uuid:
        raise NVMLError(6, "Not Found")
    return _gpu


def nvmlDeviceRegisterEvents(handle: Any, eventTypes: int, eventSet: object) -> None:
    """The fields of the simulated GPU are read at each question; an event set has none."""


def nvmlEventSetWait_v2(eventSet: object, timeoutms: int) -> SimpleNamespace:
    global _told
    file = Path(os.environ["FAKE_NVML"] + ".xids")
    xids = file.read_text().split() if file.exists() else []
    if _told >= len(xids):
        raise NVMLError(NVML_ERROR_TIMEOUT, "Timeout")
    _told += 1
    return SimpleNamespace(device=_gpu, eventType=nvmlEventTypeXidCriticalError, eventData=int(xids[_told - 1]))


def __getattr__(name: str) -> Any:
    return getattr(_nvml, name)
