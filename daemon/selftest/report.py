"""What a self-test found: steps in order, each passed, failed or skipped, with its figures and its words.

And on what: whoever reads the report has neither the card nor the machine at hand.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from taktd.daemon.certification.measurements import processor
from taktd.daemon.doctor.gpu import find_nvml, read_gpus
from taktd.daemon.health.status import daemon_version
from taktd.drivers import _cuda
from taktd.drivers.cuda import CudaDevice
from taktd.drivers.cuda_probe import CudaInfo

__all__ = ["FAILED", "PASSED", "SKIPPED", "Report", "Step", "card", "described", "quantiles_us"]

PASSED: Final = "passed"
FAILED: Final = "failed"
SKIPPED: Final = "skipped"


@dataclass(slots=True)
class Step:
    name: str
    outcome: str = PASSED
    text: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        self.outcome, self.text = FAILED, text

    def skip(self, text: str) -> None:
        self.outcome, self.text = SKIPPED, text


@dataclass(slots=True)
class Report:
    device: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    card_before: dict[str, Any] = field(default_factory=dict)
    card_after: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """No step failed. A skipped one says why; it is no failure of this machine."""
        return all(step.outcome != FAILED for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "simulated": bool(self.device.get("simulated")),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "taktd": daemon_version(),
            "machine": {
                "system": platform.platform(),
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "architecture": platform.machine(),
                "processor": processor(),
                "scheduling": {os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}.get(os.sched_getscheduler(0), "other"),
                "kernel_module": _first_line("/proc/driver/nvidia/version"),
            },
            "device": self.device,
            "card": {"before": self.card_before, "after": self.card_after},
            "steps": [{"name": s.name, "outcome": s.outcome, "text": s.text, "figures": s.figures} for s in self.steps],
        }


def quantiles_us(times_ns: list[int]) -> dict[str, float]:
    """p50 … max of at least one time, in µs."""
    ordered = sorted(times_ns)
    last = len(ordered) - 1
    shares = (("p50_us", 500_000), ("p99_us", 990_000), ("p999_us", 999_000), ("max_us", 1_000_000))
    found = {name: ordered[min(last, len(ordered) * ppm // 1_000_000)] / 1000 for name, ppm in shares}
    return {**found, "runs": len(ordered)}


def described(info: CudaInfo, device: CudaDevice) -> dict[str, Any]:
    """Which card, what it can do, what drives it."""
    told = _cuda.device_info(info.index)
    return {
        "name": info.name,
        "uuid": info.uuid,
        "pci": info.pci,
        "compute": list(info.compute),
        "memory_bytes": info.memory_bytes,
        "integrated": info.integrated,
        "runtime": device.identity.runtime,
        **{name: bool(told[name]) for name in ("mem_ops", "host_register", "ecc", "watchdog")},
        "stream_priorities": list(_cuda.priority_range()),
        "simulated": info.name.startswith("Simulated GPU"),
    }


def card(uuid: str) -> dict[str, Any]:
    """Clocks, throttling and other processes of the card now, as NVML tells; ``problem``: why it does not."""
    nvml = find_nvml()
    if nvml is None:
        return {"problem": "nvidia-ml-py is not installed"}
    readings = read_gpus(nvml)
    for one in readings.gpus:
        if one.uuid.lower() == uuid.lower():
            return {"driver": readings.driver, **asdict(one), "throttled_by": list(one.throttled_by)}
    return {"driver": readings.driver, "problem": readings.problem or "NVML does not know this card"}


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""
