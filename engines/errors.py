"""What can go wrong with a model or an engine, told to the person who has to act."""

from __future__ import annotations

from enum import Enum
from typing import Final, TypedDict

from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["DeviceFailure", "EngineFailure", "FailureKind", "ModelRefused", "Refusal"]


class Refusal(TypedDict):
    """A refusal as it travels from the process that looked at the model to the person who configured it."""

    what: str
    found: str
    allowed: str
    hint: str


class ModelRefused(Exception):
    """The model can't be served: what is wrong, what was found, what is allowed, what to do."""

    def __init__(self, what: str, *, found: str, allowed: str, hint: str) -> None:
        super().__init__(f"{what}: found {found}; allowed: {allowed}. {hint}")
        self.refusal: Refusal = {"what": what, "found": found, "allowed": allowed, "hint": hint}


class FailureKind(Enum):
    """Why a run ended without a result, as a closed set: rules for switching go by it, people get the text."""

    ERROR = "error"  # the engine said no: bad indices, a result that does not fit, a defect
    OUT_OF_MEMORY = "out-of-memory"
    LAUNCH_FAILED = "launch-failed"
    LAUNCH_TIMEOUT = "launch-timeout"
    ECC = "ecc"
    DEVICE_LOST = "device-lost"
    DEVICE_UNUSABLE = "device-unusable"  # driver, rights or other users keep us from it: not the engine's doing
    NOT_FINITE = "not-finite"  # NaN or infinity in an output whose model forbids it


_OF_FAULT: Final[dict[FaultKind, FailureKind]] = {
    FaultKind.OUT_OF_MEMORY: FailureKind.OUT_OF_MEMORY,
    FaultKind.LAUNCH_FAILED: FailureKind.LAUNCH_FAILED,
    FaultKind.LAUNCH_TIMEOUT: FailureKind.LAUNCH_TIMEOUT,
    FaultKind.ECC: FailureKind.ECC,
    FaultKind.DEVICE_LOST: FailureKind.DEVICE_LOST,
    FaultKind.DEVICE_BUSY: FailureKind.DEVICE_UNUSABLE,
    FaultKind.DRIVER_MISSING: FailureKind.DEVICE_UNUSABLE,
    FaultKind.DRIVER_MISMATCH: FailureKind.DEVICE_UNUSABLE,
    FaultKind.NO_DEVICE: FailureKind.DEVICE_UNUSABLE,
    FaultKind.NOT_SUPPORTED: FailureKind.ERROR,
    FaultKind.INVALID_USE: FailureKind.ERROR,
}


class EngineFailure(Exception):
    """A run of an engine ended without a result. ``sticky``: so will every later one in this process."""

    def __init__(self, text: str, kind: FailureKind = FailureKind.ERROR, *, sticky: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.sticky = sticky


class DeviceFailure(EngineFailure):
    """The device under the engine failed; ``fault`` is its own word for it."""

    def __init__(self, fault: DeviceFault) -> None:
        super().__init__(str(fault), _OF_FAULT[fault.kind], sticky=fault.sticky)
        self.fault = fault
