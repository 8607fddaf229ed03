"""``python -m taktd.drivers.cuda_probe PARENT ONLY``: which CUDA devices work, found out in a process that may die.

A driver that doesn't fit its kernel module, or a card that fell off the bus, can crash or hang whoever touches it. The
child opens each device, allocates, copies, and prints one JSON object; ``probe`` runs it and judges its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from taktd.drivers.cuda import CudaDevice, load_driver, translated
from taktd.drivers.cuda_memory import DirectMemory
from taktd.drivers.fault import DeviceFault, FaultKind
from taktd.drivers.ordinary import become_ordinary

__all__ = ["CudaInfo", "probe"]

TIMEOUT_S: Final = 30.0  # the first context on a machine without nvidia-persistenced takes seconds
COPY_NS: Final = 5_000_000_000


@dataclass(frozen=True, slots=True)
class CudaInfo:
    """One device, and what its check found (empty: it works)."""

    index: int
    name: str
    uuid: str
    pci: str
    memory_bytes: int
    compute: tuple[int, int]
    integrated: bool
    fault: str
    fault_kind: str = ""  # its FaultKind's value

    def raise_fault(self) -> None:
        """Raises ``DeviceFault`` if the check found one: who opens the device all the same meets it later."""
        if self.fault:
            raise DeviceFault(FaultKind(self.fault_kind), f"{self.name} (index {self.index}): {self.fault}", hint="")


def probe(only: str = "", timeout_s: float = TIMEOUT_S) -> list[CudaInfo]:
    """All devices. ``only``: the one to try out, by UUID, PCI address or index; others are listed and left alone, since
    loops may be served there. Empty: each is tried.

    Raises ``DeviceFault``: no driver, no device, or a driver that takes its process down.
    """
    command = [sys.executable, "-m", "taktd.drivers.cuda_probe", str(os.getpid()), only]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise DeviceFault(
            FaultKind.DEVICE_LOST,
            f"the CUDA driver did not answer within {timeout_s:g} s",
            hint="See the kernel's log; `nvidia-smi` probably hangs too.",
        ) from late
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise DeviceFault(
            FaultKind.DRIVER_MISMATCH,
            f"the CUDA driver crashed the process that looked at it ({name})",
            hint="Was the driver upgraded? Reboot, or load the kernel module that belongs to it.",
        )
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise DeviceFault(FaultKind.INVALID_USE, f"the CUDA probe failed: {lines[-1]}", hint="") from error
    if "error" in answer:
        told = answer["error"]
        raise DeviceFault(FaultKind(told["kind"]), told["what"], hint=told["hint"], code=told["code"])
    return [CudaInfo(**{**device, "compute": tuple(device["compute"])}) for device in answer["devices"]]


def _check(index: int) -> DeviceFault | None:
    """What is wrong with the device, None if it works."""
    try:
        device = CudaDevice(index, lambda _: DirectMemory())
        block, stream = device.allocate(4096), device.stream()
        stream.fill(block.address, 0, block.size)
        stream.synchronize(COPY_NS)
        stream.close()
        block.close()
        device.close()
    except DeviceFault as fault:
        return fault
    return None


def _described(index: int) -> CudaInfo:
    from taktd.drivers import _cuda

    with translated():
        info = _cuda.device_info(index)
    return CudaInfo(
        index,
        info["name"],
        info["uuid"],
        info["pci"],
        info["memory_bytes"],
        (info["compute_major"], info["compute_minor"]),
        bool(info["integrated"]),
        "",
    )


def _look(only: str) -> dict[str, Any]:
    from taktd.drivers import _cuda
    from taktd.drivers.cuda_selection import matches

    load_driver()
    devices = []
    for index in range(_cuda.device_count()):
        try:
            found, fault = _described(index), None
        except DeviceFault as unknown:  # it does not even say its name; others may
            found, fault = CudaInfo(index, "unknown card", "", "", 0, (0, 0), False, ""), unknown
        if fault is None and (not only or matches(found, only)):
            fault = _check(index)
        if fault is not None:
            found = replace(found, fault=str(fault), fault_kind=fault.kind.value)
        devices.append(asdict(found))
    return {"devices": devices}


def main() -> int:
    become_ordinary(int(sys.argv[1]))
    try:
        print(json.dumps(_look(sys.argv[2])), flush=True)
    except DeviceFault as fault:
        told = {"kind": fault.kind.value, "what": str(fault).removesuffix(f". {fault.hint}"), "hint": fault.hint}
        print(json.dumps({"error": {**told, "code": fault.code}}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # what a driver does when it takes leave says nothing about its devices
