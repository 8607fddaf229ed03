"""The one place where CUDA's error codes become ours.

Stickiness follows the driver API's documentation of ``CUresult``: errors of which it says that they leave the process
in an inconsistent state.
"""

from __future__ import annotations

from typing import Final

from taktd.drivers import _cuda
from taktd.drivers.fault import DeviceFault, FaultKind

__all__ = ["KINDS", "fault_of"]

_K = FaultKind

# CUresult → (kind, sticky)
KINDS: Final[dict[int, tuple[FaultKind, bool]]] = {
    2: (_K.OUT_OF_MEMORY, False),
    4: (_K.DEVICE_LOST, True),  # the driver is being shut down under us
    34: (_K.DRIVER_MISSING, False),  # the toolkit's stub library was loaded
    36: (_K.DRIVER_MISMATCH, False),  # the call needs a newer driver
    46: (_K.DEVICE_BUSY, False),  # in exclusive use
    100: (_K.NO_DEVICE, False),
    101: (_K.NO_DEVICE, False),  # no device of that number
    102: (_K.DEVICE_BUSY, False),  # a virtual GPU without a licence
    **dict.fromkeys((209, 221, 222, 223), (_K.NOT_SUPPORTED, False)),  # no code for this card
    **dict.fromkeys((214, 220, 226), (_K.ECC, True)),  # memory, NVLink, contained
    **dict.fromkeys((302, 303), (_K.DRIVER_MISMATCH, False)),  # a library of the driver's own is another version's
    304: (_K.DEVICE_BUSY, False),  # the system refused: a device node that we may not use any more
    **dict.fromkeys((700, 710, 714, 715, 716, 717, 718, 719, 721), (_K.LAUNCH_FAILED, True)),
    701: (_K.OUT_OF_MEMORY, False),  # too few registers or threads
    702: (_K.LAUNCH_TIMEOUT, True),
    709: (_K.DEVICE_LOST, True),  # the context was destroyed under us
    800: (_K.DEVICE_BUSY, False),
    801: (_K.NOT_SUPPORTED, False),
    802: (_K.DEVICE_BUSY, False),  # the fabric manager is not ready
    **dict.fromkeys((803, 804), (_K.DRIVER_MISMATCH, False)),
    **dict.fromkeys((805, 807, 808, 809), (_K.DEVICE_BUSY, False)),  # MPS does not answer, or has no room
    **dict.fromkeys((806, 810), (_K.DEVICE_LOST, True)),  # MPS died, or has ended us
    **dict.fromkeys((900, 901, 902, 903, 904, 905, 906, 907, 908), (_K.NOT_SUPPORTED, False)),  # capture
    909: (_K.LAUNCH_TIMEOUT, True),
    **dict.fromkeys((911, 999), (_K.DEVICE_LOST, True)),  # external device, unknown: what a card off the bus answers
}

HINTS: Final[dict[FaultKind, str]] = {
    _K.OUT_OF_MEMORY: "Use smaller shapes, fewer models on this device, or a smaller workspace.",
    _K.LAUNCH_FAILED: "The model or a plugin reads or writes outside its tensors; this process can't use the device any"
    " more.",
    _K.LAUNCH_TIMEOUT: "The engine took too long; this process can't use the device any more.",
    _K.ECC: "The card's memory has an uncorrectable error: see `nvidia-smi -q -d ECC`; reset or replace the card.",
    _K.DEVICE_LOST: "See the kernel's log for an XID; the card may need a reset or a reboot.",
    _K.DEVICE_BUSY: "Another process has it in exclusive use, or this user may not open /dev/nvidia*.",
    _K.DRIVER_MISSING: "Install NVIDIA's driver (libcuda.so.1); on Jetson it is part of JetPack.",
    _K.DRIVER_MISMATCH: "The driver was upgraded: reboot, or load the new kernel module.",
    _K.NO_DEVICE: "See `nvidia-smi -L`; device nodes may still be missing shortly after boot.",
    _K.NOT_SUPPORTED: "",
    _K.INVALID_USE: "",
}


def fault_of(error: _cuda.Error) -> DeviceFault:
    """Our fault for the driver's error. A code that is not in the table is a defect of ours (invalid handle, …)."""
    call, code = error.args
    if code == _cuda.TIMED_OUT:
        # What was launched still runs and may still write: nobody here may go on.
        kind, sticky, said = _K.LAUNCH_TIMEOUT, True, "the device did not finish in time"
    else:
        kind, sticky = KINDS.get(code, (_K.INVALID_USE, False))
        name, text = _cuda.error_name(code)
        said = f"{text or 'unknown error'} ({name or f'CUresult {code}'})"
    return DeviceFault(kind, f"{call}: {said}", hint=HINTS[kind], sticky=sticky, code=code)
