"""The simulated CUDA driver, as tests see it: build it, load it, inject faults, read its trace.

In this process: `load()` once, then `Simulated()`. For other processes: `environment(folder)` makes them load it
(LD_LIBRARY_PATH) and share one control page that `Simulated(folder)` writes to.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "fake-cuda"
LIBRARY = FOLDER / "libcuda.so.1"
FAULTS_MAX, TRACE_MAX, CALLS_MAX = 16, 4096, 128
LIVE = ("memory", "bytes", "pinned", "registered", "stream", "event", "graph", "exec", "context")

OUT_OF_MEMORY, ECC, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, LAUNCH_FAILED, MISMATCH, UNKNOWN = 2, 214, 700, 702, 719, 803, 999


class Fault(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("armed", "call", "after", "error", "sticky", "times")]


class Control(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_char * 8),
        *((name, ctypes.c_uint32) for name in ("devices", "integrated", "mem_ops", "capture", "driver_version")),
        *((name, ctypes.c_uint32) for name in ("init_error", "crash_at_init", "lost", "hang", "lazy_queries")),
        *((name, ctypes.c_uint32) for name in ("compute_major", "compute_minor")),
        ("memory_bytes", ctypes.c_uint64),
        ("first_device", ctypes.c_uint32),
        ("eager", ctypes.c_uint32),
        ("faults", Fault * FAULTS_MAX),
    ]


class Observed(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_char * 8),
        ("calls", ctypes.c_uint32),
        ("live_kinds", ctypes.c_uint32),
        ("traced", ctypes.c_uint64),
        ("live", ctypes.c_int64 * len(LIVE)),
        ("priority", ctypes.c_int64),
        ("first_device_used", ctypes.c_int64),
        ("leaked", ctypes.c_int64),
        ("count", ctypes.c_uint64 * CALLS_MAX),
        ("trace", ctypes.c_uint16 * TRACE_MAX),
        ("names", (ctypes.c_char * 40) * CALLS_MAX),
    ]


def build() -> Path:
    """Compiles the library where it is out of date. Several test processes may come here at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-s", "-C", str(Path(__file__).parent), f"OUT={FOLDER}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated libcuda does not compile:\n{done.stdout}{done.stderr}")
    return LIBRARY


def load() -> ctypes.CDLL:
    """Makes it this process's libcuda.so.1: who opens that name from now on gets it."""
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    library.fake_cuda_control.restype = ctypes.POINTER(Control)
    library.fake_cuda_observed.restype = ctypes.POINTER(Observed)
    library.fake_cuda_sizes.restype = ctypes.c_size_t
    sizes = library.fake_cuda_sizes(0), library.fake_cuda_sizes(1)
    assert sizes == (ctypes.sizeof(Control), ctypes.sizeof(Observed)), "fake.h and simulated.py disagree"
    return library


def environment(folder: Path, **settings: int) -> dict[str, str]:
    """Variables for a process that shall find the simulated driver. `settings`: devices, integrated, driver, …"""
    build()
    return {
        "LD_LIBRARY_PATH": str(FOLDER),
        "FAKE_CUDA_CONTROL": str(folder / "control"),
        "FAKE_CUDA_OBSERVE": str(folder / "observed"),
        **{f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()},
    }


class Simulated:
    """The driver's two pages: of this process, or the control page of others."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        if folder is None:
            library = load()
            self.control: Control = library.fake_cuda_control().contents
            self._observed: Observed | None = library.fake_cuda_observed().contents
            self.reset = library.fake_cuda_defaults
        else:
            self.control = Control.from_buffer(_mapped(folder / "control", ctypes.sizeof(Control)))
            self._observed = None

    def observed(self, pid: int | None = None) -> Observed:
        if self._observed is not None:
            return self._observed
        assert self._folder is not None
        path = self._folder / f"observed.{pid}"
        return Observed.from_buffer(_mapped(path, ctypes.sizeof(Observed)))

    # ---- faults ----

    def inject(self, call: str, error: int, *, after: int = 0, sticky: bool = False, times: int = 0) -> None:
        """`call` answers `error` after so many good calls, so many times (0: for ever). "execute": on the device."""
        number = self.number(call)
        fault = next(f for f in self.control.faults if not f.armed)
        fault.call, fault.error, fault.after, fault.sticky, fault.times = number, error, after, int(sticky), times
        fault.armed = 1

    def heal(self) -> None:
        for fault in self.control.faults:
            fault.armed = 0
        self.control.lost = self.control.hang = 0

    def number(self, call: str) -> int:
        seen = self._observed or Simulated().observed()
        names = [bytes(n.value).decode() for n in seen.names[: seen.calls]]
        return names.index(call)

    # ---- what happened ----

    def names(self, seen: Observed | None = None) -> list[str]:
        seen = seen or self.observed()
        return [bytes(n.value).decode() for n in seen.names[: seen.calls]]

    def mark(self) -> int:
        return int(self.observed().traced)

    def calls_since(self, mark: int) -> list[str]:
        """The names of the calls since `mark`, at most the last 4096."""
        seen = self.observed()
        names = self.names(seen)
        start = max(mark, seen.traced - TRACE_MAX)
        return [names[seen.trace[i % TRACE_MAX]] for i in range(start, seen.traced)]

    def counts_since(self, mark: int) -> Counter[str]:
        return Counter(self.calls_since(mark))

    def live(self, pid: int | None = None) -> dict[str, int]:
        """What is allocated and not freed."""
        return dict(zip(LIVE, self.observed(pid).live, strict=True))

    def leaked(self, pid: int | None = None) -> int:
        return int(self.observed(pid).leaked)


def _mapped(path: Path, size: int) -> Any:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)
