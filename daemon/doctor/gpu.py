"""Checks of NVIDIA GPUs: driver and library, device nodes, persistence, clocks, throttling, other users, MPS.

What only the driver knows comes as readings, taken through NVML (nvidia-ml-py) by read_gpus; the checks themselves are
functions of the readings and the tree. NVML calls take locks in the driver and make latency spikes: at most once a
second, never from an executor.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from taktd.daemon.doctor.finding import Finding, Level, Subject
from taktd.daemon.doctor.power import python_program
from taktd.daemon.doctor.tree import Tree
from taktd.daemon.doctor.unit import NAME, Unit, enable, read_unit

# NVML's bits of nvmlDeviceGetCurrentClocksThrottleReasons that mean "slower than asked for".
# Idle (1), application clocks (2) and display clocks (256) are settings, not trouble.
THROTTLE_REASONS: Final = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_ERROR_DRIVER_NOT_LOADED: Final = 9
_ERROR_LIBRARY_NOT_FOUND: Final = 12
_ERROR_VERSION_MISMATCH: Final = 18
_LIBRARY_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu/nvidia",
)
_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_JETSON_NODES: Final = ("/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/nvhost-gpu")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment. None: this GPU or driver doesn't tell. Clocks in MHz, of the streaming multiprocessors."""

    index: int
    name: str
    persistence: bool | None
    clock_mhz: int | None
    clock_max_mhz: int | None
    throttle_reasons: int | None
    power_state: int | None
    processes: tuple[int, ...]
    compute_mode: int | None = None
    uuid: str = ""

    @property
    def throttled_by(self) -> tuple[str, ...]:
        bits = self.throttle_reasons or 0
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """All GPUs, or why there are none: error is NVML's number (0 fine), problem its text."""

    driver: str = ""
    gpus: tuple[GpuReading, ...] = ()
    error: int = 0
    problem: str = ""


def find_nvml() -> ModuleType | None:
    """nvidia-ml-py's module, None where it isn't installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_gpus(nvml: Any) -> GpuReadings:
    """Ask NVML about every GPU. nvml: nvidia-ml-py's module, or one that looks like it. Never raises its errors."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReadings(error=int(getattr(error, "value", -1)), problem=str(error))
    try:
        return _read_all(nvml)
    finally:
        _close(nvml)


class GpuReader:
    """Asks NVML again and again, and keeps it open meanwhile: opening it costs the driver more than the questions."""

    def __init__(self, find: Callable[[], Any | None] = find_nvml) -> None:
        """find: the module as for read_gpus, None where there is none; called at the first question."""
        self._find = find
        self._nvml: Any = None
        self._open = False

    def __call__(self) -> GpuReadings:
        """As read_gpus. After an error NVML is opened anew: the driver may have been exchanged."""
        if self._nvml is None and (found := self._find()) is None:
            return GpuReadings(error=-1, problem="nvidia-ml-py is not installed")
        self._nvml = self._nvml or found
        if not self._open:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                return GpuReadings(error=int(getattr(error, "value", -1)), problem=str(error))
            self._open = True
        readings = _read_all(self._nvml)
        if readings.problem:
            self.close()
        return readings

    def close(self) -> None:
        if self._open:
            self._open = False
            _close(self._nvml)


def _read_all(nvml: Any) -> GpuReadings:
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        gpus = [_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        return GpuReadings(driver=driver, gpus=tuple(gpu for gpu in gpus if gpu is not None))
    except nvml.NVMLError as error:
        return GpuReadings(error=int(getattr(error, "value", -1)), problem=str(error))


def _close(nvml: Any) -> None:
    with contextlib.suppress(nvml.NVMLError):  # the driver is gone, and what there was to close with it
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> GpuReading | None:
    """None for a card that is counted but doesn't answer any more; the others do."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return None

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None  # not supported by this GPU, or not known to this version of the library

    persistence = ask("nvmlDeviceGetPersistenceMode")
    users: set[int] = set()
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        users.update(int(process.pid) for process in ask(name) or ())
    return GpuReading(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "GPU"),
        persistence=None if persistence is None else bool(persistence),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        throttle_reasons=ask("nvmlDeviceGetCurrentClocksThrottleReasons"),
        power_state=ask("nvmlDeviceGetPerformanceState"),
        processes=tuple(sorted(users)),
        compute_mode=ask("nvmlDeviceGetComputeMode"),
        uuid=_text(ask("nvmlDeviceGetUUID") or ""),
    )


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def check_gpus(tree: Tree, subject: Subject, readings: GpuReadings | None) -> list[Finding]:
    """All GPU checks. readings None: NVML was not asked (a recorded tree, or nvidia-ml-py is missing)."""
    module = tree.text("/sys/module/nvidia/version") or _proc_driver_version(tree)
    jetson = tree.exists("/etc/nv_tegra_release")
    if module is None and not jetson and not subject.gpu and not (readings and readings.gpus):
        return [Finding("gpu", "ok", "no NVIDIA driver is loaded, and no GPU is configured", "no loop needs one")]
    findings = [_driver(tree, subject, module, readings, jetson), _nodes(tree, subject, jetson)]
    if jetson:
        return findings  # an integrated GPU has no persistence mode; its clocks belong to the power mode
    if readings is None or not readings.gpus:
        reason = readings.problem if readings and readings.problem else "nvidia-ml-py wasn't asked or is missing"
        findings.append(
            Finding(
                "gpu-state",
                "unknown",
                reason,
                "persistence, clocks and other users are known to the driver only",
                "apt install nvidia-smi && nvidia-smi -q -d CLOCK,PERFORMANCE",
            )
        )
    else:
        for gpu in readings.gpus:
            findings += [_persistence(gpu), _clocks(gpu), _users(tree, gpu)]
    findings.append(_mps(tree))
    return findings


def library_version(tree: Tree) -> str:
    """The version of the driver's library on the disk, by where its link points; "" where there is none."""
    for folder in _LIBRARY_FOLDERS:
        match = re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", tree.link(f"{folder}/libcuda.so.1") or "")
        if match:
            return match[1]
    return ""


def _proc_driver_version(tree: Tree) -> str | None:
    match = re.search(r"Kernel Module\D*?\s(\d+\.\d+(?:\.\d+)?)", tree.text("/proc/driver/nvidia/version") or "")
    return match[1] if match else None


def _driver(tree: Tree, subject: Subject, module: str | None, readings: GpuReadings | None, jetson: bool) -> Finding:
    why = "after an upgrade of the driver's files, nothing can open the GPU until the module is reloaded"
    libraries: set[str] = set()
    for folder in _LIBRARY_FOLDERS:
        for name in tree.names(folder):
            match = re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", name)
            if match and match[1] != "1.1":  # Tegra's own, which carries no driver version
                libraries.add(match[1])
    pending = "; a reboot is pending" if tree.exists("/run/reboot-required") else ""
    if jetson and module is None:
        release = (tree.text("/etc/nv_tegra_release") or "").splitlines()[0][:60]
        return Finding("gpu-driver", "ok", f"Jetson {release}{pending}", why)
    if readings is not None and readings.error == _ERROR_VERSION_MISMATCH:
        return Finding(
            "gpu-driver",
            "fail",
            f"module {module or 'unknown'}, libraries differ: {readings.problem}{pending}",
            why,
            "systemctl reboot",
        )
    if module is None:
        level: Level = "fail" if subject.gpu else "warning"
        return Finding(
            "gpu-driver",
            level,
            f"the nvidia module is not loaded{pending}",
            "without the driver the GPU's loops run on their stand-in only",
            "modprobe nvidia",
        )
    if libraries and module not in libraries:
        return Finding(
            "gpu-driver",
            "fail",
            f"module {module}, library {', '.join(sorted(libraries))}{pending}",
            why,
            "systemctl reboot",
        )
    if not libraries:
        return Finding("gpu-driver", "warning", f"module {module}, no libcuda.so found", why, "apt install libcuda1")
    level = "warning" if pending else "ok"
    return Finding(
        "gpu-driver", level, f"module and library {module}{pending}", why, "systemctl reboot" if pending else ""
    )


def _nodes(tree: Tree, subject: Subject, jetson: bool) -> Finding:
    why = "the daemon runs without root: it opens the GPU only if the device nodes let its user or groups"
    wanted = _JETSON_NODES if jetson else _NODES
    numbered = [f"/dev/{name}" for name in tree.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    missing = [path for path in wanted if not tree.exists(path)]
    if not jetson and not numbered:
        missing.append("/dev/nvidia0")
    if missing:
        level: Level = "fail" if subject.gpu or jetson else "warning"
        return Finding(
            "gpu-nodes",
            level,
            f"missing: {', '.join(missing)}",
            why,
            "ls -l /dev/nv*"
            if jetson
            else "nvidia-modprobe -u -c 0   (at each boot: systemctl enable nvidia-persistenced)",
        )
    unit = read_unit(tree)
    if subject.gpu and unit is not None and (policy := _allows_none(unit)):
        return Finding("gpu-nodes", "fail", policy, why, enable("gpu"))
    groups = _groups_of(tree, subject.user, unit)
    closed: list[str] = []
    for path in (*wanted, *numbered):
        status = tree.status(path)
        # In a recorded tree a plain file stands for the node; its mode says nothing.
        if status is None or not stat.S_ISCHR(status.st_mode):
            continue
        group_may = status.st_mode & 0o060 == 0o060 and status.st_gid in groups
        if not group_may and status.st_mode & 0o006 != 0o006:
            closed.append(f"{path} ({stat.filemode(status.st_mode)}, group {status.st_gid})")
    mode = re.search(r"^DeviceFileMode:\s*(\d+)", tree.text("/proc/driver/nvidia/params") or "", re.MULTILINE)
    group = re.search(r"^DeviceFileGID:\s*(\d+)", tree.text("/proc/driver/nvidia/params") or "", re.MULTILINE)
    if mode and int(mode[1]) & 0o006 != 0o006 and not (group and int(group[1]) in groups):
        closed.append(f"the driver makes nodes with mode {int(mode[1]):04o}, group {group[1] if group else 'root'}")
    if closed:
        mend = f"usermod -aG video,render {subject.user} && systemctl restart taktd"
        if unit is not None and "video" not in unit.words("SupplementaryGroups"):
            mend = enable("gpu")
        return Finding("gpu-nodes", "fail", "; ".join(closed), why, mend)
    return Finding("gpu-nodes", "ok", f"{len(wanted) + len(numbered)} nodes are there and open to {subject.user}", why)


def _allows_none(unit: Unit) -> str:
    """How the unit keeps NVIDIA's nodes from the service whatever their groups, "" where it doesn't."""
    policy = (unit.words("DevicePolicy") or ["auto"])[-1]
    allowed = unit.words("DeviceAllow")
    if policy == "auto" and not allowed:
        return ""
    if any(re.match(r"(/dev/|char-)(nvidia|nvhost|nvmap)|char-\*", word) for word in allowed):
        return ""
    return f"{NAME} has DevicePolicy={policy} and allows no node of NVIDIA's"


def _groups_of(tree: Tree, user: str, unit: Unit | None) -> frozenset[int]:
    """Ids of the groups that /etc/passwd and /etc/group give the user, and of those that the unit adds."""
    groups: set[int] = set()
    given = set(unit.words("SupplementaryGroups")) if unit is not None else set()
    groups.update(int(name) for name in given if name.isdigit())
    for line in (tree.text("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) >= 4 and fields[0] == user and fields[3].isdigit():
            groups.add(int(fields[3]))
    for line in (tree.text("/etc/group") or "").splitlines():
        fields = line.split(":")
        if len(fields) == 4 and fields[2].isdigit() and (user in fields[3].split(",") or fields[0] in given):
            groups.add(int(fields[2]))
    return frozenset(groups)


def _persistence(gpu: GpuReading) -> Finding:
    why = "without persistence the driver unloads when the last user closes the GPU, and opening it takes seconds"
    check = f"gpu{gpu.index}-persistence"
    if gpu.persistence is None:
        return Finding(check, "unknown", f"{gpu.name}: not told", why, f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE")
    if gpu.persistence:
        return Finding(check, "ok", f"{gpu.name}: on", why)
    return Finding(check, "fail", f"{gpu.name}: off", why, "systemctl enable --now nvidia-persistenced")


def _clocks(gpu: GpuReading) -> Finding:
    why = "a GPU whose clocks float runs the first job after a pause at a fraction of its speed"
    check = f"gpu{gpu.index}-clocks"
    if gpu.clock_mhz is None or gpu.throttle_reasons is None:
        untold = f"{gpu.name}: clocks or throttle reasons are not told"
        return Finding(check, "unknown", untold, why, f"nvidia-smi -i {gpu.index} -q -d CLOCK,PERFORMANCE")
    evidence = f"{gpu.name}: {gpu.clock_mhz} of {gpu.clock_max_mhz or '?'} MHz"
    if gpu.throttled_by:
        return Finding(
            check,
            "fail",
            f"{evidence}, slowed by {', '.join(gpu.throttled_by)}",
            why,
            f"nvidia-smi -i {gpu.index} -q -d TEMPERATURE,POWER   (cool it, or lock lower clocks: nvidia-smi -lgc)",
        )
    # NVML doesn't tell whether clocks are locked; an idle GPU that stays in a working state shows that they are.
    idle = bool(gpu.throttle_reasons & 1)
    if idle and gpu.power_state is not None and gpu.power_state > 2:
        top = gpu.clock_max_mhz or gpu.clock_mhz
        return Finding(
            check,
            "warning",
            f"{evidence}, power state P{gpu.power_state} while idle: not locked",
            why,
            f"nvidia-smi -i {gpu.index} -lgc {top * 4 // 5}   (lost at reboot: put it into a unit)",
        )
    return Finding(check, "ok", f"{evidence}, not slowed", why)


def other_users(tree: Tree, gpu: GpuReading) -> list[tuple[int, str]]:
    """Processes on the GPU that are not taktd's, with their command lines, "" where those can't be seen."""
    commands = [(pid, tuple((tree.text(f"/proc/{pid}/cmdline") or "").split("\0"))) for pid in gpu.processes]
    return [(pid, " ".join(command).strip()) for pid, command in commands if not _is_ours(tree, pid, command)]


def stop(pids: Iterable[int]) -> str:
    """The command that takes others off a GPU. Not EXCLUSIVE_PROCESS: taktd's own second executor couldn't open it."""
    listed = " ".join(map(str, sorted(pids)))
    return f"kill {listed}   (what would start them again: systemctl status {listed})"


def _is_ours(tree: Tree, pid: int, command: tuple[str, ...]) -> bool:
    """Whether a process runs a module of taktd (a daemon's, an engine's build, taktctl) or belongs to its service."""
    if re.fullmatch(r"taktd(\.\w+)+|(.*/)?(taktd|taktctl)", python_program(command)):
        return True
    return any(line.endswith(f"/{NAME}") for line in (tree.text(f"/proc/{pid}/cgroup") or "").splitlines())


def _users(tree: Tree, gpu: GpuReading) -> Finding:
    why = "two programs' kernels on one GPU have no worst case: nothing else may run beside an admitted loop"
    check = f"gpu{gpu.index}-users"
    found = other_users(tree, gpu)
    others = [f"{pid} ({command[:40] or 'unknown'})" for pid, command in found]
    if others:
        return Finding(
            check,
            "fail",
            f"{gpu.name}: {', '.join(others)}",
            why,
            stop(pid for pid, _ in found),
        )
    return Finding(check, "ok", f"{gpu.name}: none beside taktd", why)


def _mps(tree: Tree) -> Finding:
    why = "under the multi-process service another program's kernels run beside the loop's"
    for process in tree.processes():
        if process.command and "nvidia-cuda-mps" in process.command[0]:
            return Finding(
                "gpu-mps",
                "warning",
                f"process {process.pid}: {process.command[0]}",
                why,
                "echo quit | nvidia-cuda-mps-control",
            )
    return Finding("gpu-mps", "ok", "not running", why)
