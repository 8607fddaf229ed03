"""What can go wrong with a device, as a closed set. The caller decides by kind; the text is for people.

*Sticky* means: the context is broken, every later call of this process on that device fails. Only a new process helps.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["DeviceFault", "FaultKind"]


class FaultKind(Enum):
    OUT_OF_MEMORY = "out-of-memory"
    LAUNCH_FAILED = "launch-failed"  # illegal address, assertion, bad instruction: what ran was wrong
    LAUNCH_TIMEOUT = "launch-timeout"  # it ran too long: by the driver's watchdog, or by ours
    ECC = "ecc"
    DEVICE_LOST = "device-lost"
    DEVICE_BUSY = "device-busy"  # in exclusive use, or not permitted to us
    DRIVER_MISSING = "driver-missing"
    DRIVER_MISMATCH = "driver-mismatch"  # library and kernel module differ: upgraded under a running system
    NO_DEVICE = "no-device"
    NOT_SUPPORTED = "not-supported"
    INVALID_USE = "invalid-use"  # a defect of ours


class DeviceFault(Exception):
    """What happened on which device, and what to do. ``code`` is the driver's own number, 0 if there is none."""

    def __init__(self, kind: FaultKind, what: str, *, hint: str, sticky: bool = False, code: int = 0) -> None:
        super().__init__(f"{what}. {hint}" if hint else what)
        self.kind = kind
        self.sticky = sticky
        self.code = code
        self.hint = hint
