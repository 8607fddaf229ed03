"""What measured times rest on, and what of it was lost since they were measured.

A loop is certified for the machine as it was when it was measured. capture() notes that state: a few small files, under
a millisecond, and the GPU readings it is handed; lost() compares two of them and knows nothing else. The supervisor
captures once a second at most, never from an executor, and revokes the certificate for what lost() names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from taktd.daemon.doctor.gpu import GpuReading, GpuReadings, library_version, other_users, stop
from taktd.daemon.doctor.kernel import CPU
from taktd.daemon.doctor.tree import Tree, Unreadable, parse_cores

SAMPLE_PERIOD_NS: Final = 1_000_000_000
# One step of NVIDIA's clocks; less is rounding.
GPU_CLOCK_STEP_MHZ: Final = 15


@dataclass(frozen=True, slots=True)
class CoreState:
    core: int
    online: bool
    governor: str  # "" where there is none
    frequency_min_khz: int  # 0 where it isn't told
    frequency_max_khz: int


@dataclass(frozen=True, slots=True)
class GpuState:
    index: int
    persistence: bool | None
    clock_mhz: int | None
    throttled_by: tuple[str, ...]
    others: frozenset[int] = frozenset()  # processes on it that are not taktd's


@dataclass(frozen=True, slots=True)
class Preconditions:
    cores: tuple[CoreState, ...]
    rt_runtime_us: int | None
    clocksource: str
    gpu_driver: str
    gpus: tuple[GpuState, ...]
    gpu_library: str = ""  # the version of libcuda's file: what a process that is started now gets


@dataclass(frozen=True, slots=True)
class Lost:
    """One precondition that no longer holds. name is a short id for events and metrics; mend is a command."""

    name: str
    subject: str  # "core 3", "gpu0", "kernel"
    was: str
    found: str
    mend: str

    def __str__(self) -> str:
        return f"{self.name} of {self.subject}: was {self.was}, now {self.found}; to mend: {self.mend}"


def capture(
    tree: Tree, cores: frozenset[int], readings: GpuReadings | None = None, gpu: str | None = None
) -> Preconditions:
    """The state of the machine now, for executors on these cores. A forbidden file counts as one that isn't there.

    gpu: UUID of the one whose readings count; None: all of them, "": none.
    """
    online = parse_cores(_text(tree, f"{CPU}/online")) or cores
    return Preconditions(
        cores=tuple(_core(tree, core, core in online) for core in sorted(cores)),
        rt_runtime_us=_number(tree, "/proc/sys/kernel/sched_rt_runtime_us"),
        clocksource=_text(tree, "/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        gpu_driver=readings.driver if readings else "",
        gpus=tuple(
            GpuState(one.index, one.persistence, one.clock_mhz, one.throttled_by, _others(tree, one))
            for one in (readings.gpus if readings else ())
            if gpu is None or one.uuid.lower() == gpu.lower()
        ),
        gpu_library="" if gpu == "" else library_version(tree),
    )


def ground(tree: Tree, cores: frozenset[int]) -> list[str]:
    """What execution times on these cores depend on and a reboot may change, as text; empty cores: on any core."""
    state = capture(tree, cores or parse_cores(_text(tree, f"{CPU}/online")))
    return [f"{c.core}: {c.governor} {c.frequency_min_khz}-{c.frequency_max_khz}" for c in state.cores]


def lost(certified: Preconditions, now: Preconditions) -> tuple[Lost, ...]:
    """What was fine when the certificate was given and is not any more, and what never is: a GPU that is slowed or that
    others use. What became better is no loss."""
    found: list[Lost] = []
    cores_now = {core.core: core for core in now.cores}
    for before in certified.cores:
        core = cores_now.get(before.core)
        if core is not None:
            found += _lost_on_core(before, core)
    if certified.clocksource != now.clocksource:
        folder = "/sys/devices/system/clocksource/clocksource0"
        mend = f"echo {certified.clocksource} >{folder}/current_clocksource"
        found.append(Lost("clocksource", "kernel", certified.clocksource, now.clocksource, mend))
    if _share(now.rt_runtime_us) < _share(certified.rt_runtime_us):
        mend = f"sysctl -w kernel.sched_rt_runtime_us={certified.rt_runtime_us}"
        found.append(Lost("rt_throttling", "kernel", str(certified.rt_runtime_us), str(now.rt_runtime_us), mend))
    if certified.gpu_library and now.gpu_library != certified.gpu_library:
        # Who runs goes on with what it has loaded; who is started again finds files that don't fit the module.
        found.append(
            Lost("gpu_library", "libcuda", certified.gpu_library, now.gpu_library or "gone", "systemctl reboot")
        )
    gpus_now = {gpu.index: gpu for gpu in now.gpus}
    for gpu_before in certified.gpus:
        gpu = gpus_now.get(gpu_before.index)
        if gpu is None:
            gone = f"gpu{gpu_before.index}"
            found.append(Lost("gpu_present", gone, "there", "not answering", "journalctl -k -g NVRM"))
        else:
            found += _lost_on_gpu(gpu_before, gpu)
    return tuple(found)


def _lost_on_core(before: CoreState, now: CoreState) -> list[Lost]:
    subject = f"core {before.core}"
    if before.online and not now.online:
        return [Lost("core_online", subject, "online", "offline", f"chcpu -e {before.core}")]
    found: list[Lost] = []
    if before.governor != now.governor:
        mend = f"cpupower -c {before.core} frequency-set -g {before.governor or 'performance'}"
        found.append(Lost("governor", subject, before.governor or "none", now.governor or "none", mend))
    for name, was, is_now in (
        ("frequency_min", before.frequency_min_khz, now.frequency_min_khz),
        ("frequency_max", before.frequency_max_khz, now.frequency_max_khz),
    ):
        if is_now < was:
            option = "-d" if name == "frequency_min" else "-u"
            mend = f"cpupower -c {before.core} frequency-set {option} {was}"
            found.append(Lost(name, subject, f"{was} kHz", f"{is_now} kHz", mend))
    return found


def _lost_on_gpu(before: GpuState, now: GpuState) -> list[Lost]:
    subject = f"gpu{before.index}"
    found: list[Lost] = []
    if before.persistence and now.persistence is False:
        found.append(Lost("gpu_persistence", subject, "on", "off", "systemctl restart nvidia-persistenced"))
    if now.throttled_by:
        mend = f"nvidia-smi -i {before.index} -q -d TEMPERATURE,POWER"
        found.append(Lost("gpu_throttling", subject, "not slowed", "slowed by " + ", ".join(now.throttled_by), mend))
    if (
        before.clock_mhz is not None
        and now.clock_mhz is not None
        and now.clock_mhz < before.clock_mhz - GPU_CLOCK_STEP_MHZ
    ):
        mend = f"nvidia-smi -i {before.index} -lgc {before.clock_mhz}"
        found.append(Lost("gpu_clock", subject, f"{before.clock_mhz} MHz", f"{now.clock_mhz} MHz", mend))
    if now.others:
        others = ", ".join(str(pid) for pid in sorted(now.others))
        found.append(Lost("gpu_users", subject, "taktd's alone", f"used by process {others}", stop(now.others)))
    return found


def _others(tree: Tree, gpu: GpuReading) -> frozenset[int]:
    try:
        return frozenset(pid for pid, _ in other_users(tree, gpu))
    except Unreadable:
        return frozenset()


def _share(runtime_us: int | None) -> int:
    """Real-time runtime in an order in which less is worse: unlimited (-1) above all, not told as unlimited."""
    return 1 << 62 if runtime_us is None or runtime_us < 0 else runtime_us


def _core(tree: Tree, core: int, online: bool) -> CoreState:
    folder = f"{CPU}/cpu{core}/cpufreq"
    return CoreState(
        core=core,
        online=online,
        governor=_text(tree, f"{folder}/scaling_governor"),
        frequency_min_khz=_number(tree, f"{folder}/scaling_min_freq") or 0,
        frequency_max_khz=_number(tree, f"{folder}/scaling_max_freq") or 0,
    )


def _text(tree: Tree, path: str) -> str:
    try:
        return tree.text(path) or ""
    except Unreadable:
        return ""


def _number(tree: Tree, path: str) -> int | None:
    try:
        return tree.number(path)
    except Unreadable:
        return None
