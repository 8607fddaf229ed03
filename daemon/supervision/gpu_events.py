"""XIDs: what NVIDIA's driver reports about a GPU beside any CUDA call. For the supervisor alone, at most once a second.

A card can be lost, or its memory broken, while no job runs, or while one hangs. NVML tells by events; ``XidWatch.poll``
collects them without waiting. What follows (the device's executor is fenced, its loops go to their stand-ins) is the
caller's. NVML calls take locks in the driver: never from an executor.

The numbers are from NVIDIA's "XID errors": only those after which work on the card can't be trusted are fatal; others
are an application's own fault (13, 31, 43, …) and show in that process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["FATAL_XIDS", "XidEvent", "XidWatch"]

FATAL_XIDS: Final = {
    48: "uncorrectable ECC error",
    62: "internal micro-controller halt",
    64: "ECC page retirement failed",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    109: "context switch time-out",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    154: "recovery action needed",
}
EVENTS_MAX: Final = 64  # of one poll


@dataclass(frozen=True, slots=True)
class XidEvent:
    uuid: str
    xid: int

    @property
    def fatal(self) -> bool:
        return self.xid in FATAL_XIDS

    @property
    def text(self) -> str:
        what = FATAL_XIDS.get(self.xid, "reported by the driver; see the kernel's log")
        return f"GPU {self.uuid}: XID {self.xid} ({what})"


class XidWatch:
    """Listens to the GPUs named by UUID. ``nvml``: nvidia-ml-py's module, or one that looks like it.

    Where NVML or its events are missing (Jetson has none) it hears nothing, and ``problem`` says why.
    """

    def __init__(self, nvml: Any, uuids: tuple[str, ...]) -> None:
        self.problem = ""
        self._nvml = nvml
        self._set: Any = None
        self._uuids: dict[str, Any] = {}
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.problem = f"NVML: {error}"
            return
        try:
            self._set = nvml.nvmlEventSetCreate()
            for uuid in uuids:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
                self._uuids[uuid] = handle
        except nvml.NVMLError as error:
            self.problem = f"NVML's events: {error}"
            self.close()

    def poll(self) -> list[XidEvent]:
        """What happened since the last poll. Does not wait."""
        nvml = self._nvml
        found: list[XidEvent] = []
        while self._set is not None and len(found) < EVENTS_MAX:
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, 0)
                found.append(XidEvent(_text(nvml.nvmlDeviceGetUUID(data.device)), int(data.eventData)))
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    # A driver that is unloaded or upgraded under us answers this way from now on.
                    self.problem = f"NVML's events: {error}"
                    self.close()
                break
        return found

    def close(self) -> None:
        if self._set is not None:
            handles, self._set = self._set, None
            for call in (lambda: self._nvml.nvmlEventSetFree(handles), self._nvml.nvmlShutdown):
                try:
                    call()
                except self._nvml.NVMLError:
                    pass  # the driver is gone, and the set with it


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
