"""Checks of what the machine does to save power: governor, idle states, SMT, Jetson power mode."""

from __future__ import annotations

import re
from typing import Final

from taktd.daemon.doctor.finding import Finding, Level, Subject
from taktd.daemon.doctor.kernel import ASK_WITH_CORES, CPU, is_jetson
from taktd.daemon.doctor.tree import Tree, format_cores, parse_cores
from taktd.daemon.doctor.unit import enable

# An idle state that takes longer to leave delays the first job after a pause noticeably.
EXIT_LATENCY_MAX_US: Final = 20
DMA_LATENCY: Final = "/dev/cpu_dma_latency"


def watched_cores(tree: Tree, subject: Subject) -> frozenset[int]:
    """The executors' cores; every online core where the configuration names none."""
    return subject.cores or parse_cores(tree.text(f"{CPU}/online"))


def governor(tree: Tree, subject: Subject) -> Finding:
    why = "a core that was slowed down while idle computes the next job slowly, and measured times don't hold"
    cores = watched_cores(tree, subject)
    governors = {core: tree.text(f"{CPU}/cpu{core}/cpufreq/scaling_governor") for core in sorted(cores)}
    known = {core: name for core, name in governors.items() if name}
    if not known:
        return Finding(
            "governor",
            "unknown",
            f"no cpufreq for cores {format_cores(cores) or '(none known)'}: firmware or a host decides",
            why,
            "cpupower frequency-info   (what the firmware's setup or the host must hold fast)",
        )
    slow = {core: name for core, name in known.items() if name != "performance" and not _frequency_fixed(tree, core)}
    if slow:
        listed = ", ".join(f"core {core}: {name}" for core, name in slow.items())
        return Finding("governor", "fail", listed, why, "cpupower frequency-set -g performance")
    preferences = {core: tree.text(f"{CPU}/cpu{core}/cpufreq/energy_performance_preference") for core in sorted(known)}
    thrifty = {core: p for core, p in preferences.items() if p and p not in ("performance", "default", "0")}
    if thrifty:
        listed = ", ".join(f"core {core}: {p}" for core, p in thrifty.items())
        return Finding(
            "governor",
            "warning",
            f"performance, but energy_performance_preference is {listed}",
            why,
            "cpupower set --epp performance",
        )
    return Finding("governor", "ok", f"cores {format_cores(frozenset(known))}: performance", why)


def _frequency_fixed(tree: Tree, core: int) -> bool:
    """A core whose lowest allowed frequency is its highest has a fixed clock under any governor."""
    folder = f"{CPU}/cpu{core}/cpufreq"
    lowest, highest = tree.number(f"{folder}/scaling_min_freq"), tree.number(f"{folder}/scaling_max_freq")
    return lowest is not None and lowest == highest


def idle_states(tree: Tree, subject: Subject) -> Finding:
    why = "leaving a deep idle state takes tens to hundreds of microseconds, at the moment a job arrives"
    cores = watched_cores(tree, subject)
    deep: dict[int, str] = {}
    seen = False
    for core in sorted(cores):
        folder = f"{CPU}/cpu{core}/cpuidle"
        for state in tree.names(folder):
            latency = tree.number(f"{folder}/{state}/latency")
            if latency is None:
                continue
            seen = True
            if latency > EXIT_LATENCY_MAX_US and tree.text(f"{folder}/{state}/disable") in (None, "0"):
                deep[core] = f"{tree.text(f'{folder}/{state}/name') or state} ({latency} us)"
    if not seen:
        driver = tree.text(f"{CPU}/cpuidle/current_driver") or "none"
        level: Level = "ok" if driver == "none" and cores else "unknown"
        ask = (
            "" if level == "ok" else "cpupower idle-info   (what is allowed; the firmware's setup names them C-states)"
        )
        return Finding("idle-states", level, f"no idle states are listed (driver {driver})", why, ask)
    if not deep:
        return Finding(
            "idle-states", "ok", f"no state above {EXIT_LATENCY_MAX_US} us on cores {format_cores(cores)}", why
        )
    holder = dma_latency_holder(tree)
    if holder is not None:
        return Finding("idle-states", "ok", f"deep states exist, but process {holder} holds {DMA_LATENCY}", why)
    listed = ", ".join(f"core {core}: {state}" for core, state in list(deep.items())[:4])
    return Finding(
        "idle-states",
        "warning",
        f"allowed: {listed}",
        why,
        enable("cpu-dma-latency"),
    )


def dma_latency_holder(tree: Tree) -> int | None:
    """The process id of the taktd process that holds /dev/cpu_dma_latency open, None if none does."""
    for process in tree.processes():
        if not is_taktd(process.command):
            continue
        folder = f"/proc/{process.pid}/fd"
        if any(tree.link(f"{folder}/{name}") == DMA_LATENCY for name in tree.names(folder)):
            return process.pid
    return None


def is_taktd(command: tuple[str, ...]) -> bool:
    """Whether argv is one of the daemon's processes (not taktctl)."""
    return bool(re.fullmatch(r"taktd\.daemon(?!\.cli\b)(\.\w+)*|(.*/)?taktd", python_program(command)))


def python_program(command: tuple[str, ...]) -> str:
    """What an interpreter of Python was told to run: the module behind -m, or the script; "" for any other argv."""
    words = iter(command)
    if not re.fullmatch(r"(.*/)?python[\d.]*", next(words, "")):
        return ""
    for word in words:
        if re.fullmatch(r"-[A-Za-z]*m", word):
            return next(words, "")
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-"):
            return word
    return ""


def smt(tree: Tree, subject: Subject) -> Finding:
    why = "two threads of one core share its units: what runs on the sibling changes how long a job takes"
    if not subject.cores:
        active = tree.text(f"{CPU}/smt/active")
        if active == "0":
            return Finding("smt", "ok", "off", why)
        return Finding("smt", "unknown", "the configuration names no cores", why, ASK_WITH_CORES)
    shared: dict[int, str] = {}
    told = False
    for core in sorted(subject.cores):
        siblings = tree.text(f"{CPU}/cpu{core}/topology/thread_siblings_list")
        told = told or siblings is not None
        others = (parse_cores(siblings) - {core}) & parse_cores(tree.text(f"{CPU}/online"))
        if others:
            shared[core] = format_cores(others)
    if not told:
        return Finding("smt", "unknown", f"{CPU}/cpu*/topology is missing", why, "lscpu -e=CPU,CORE,ONLINE")
    if shared:
        listed = ", ".join(f"core {core} shares with {others}" for core, others in shared.items())
        first = next(iter(shared.values()))
        return Finding(
            "smt",
            "warning",
            listed,
            why,
            f"chcpu -d {first}   (or for all cores: echo off >{CPU}/smt/control)",
        )
    return Finding("smt", "ok", f"cores {format_cores(subject.cores)} have no sibling online", why)


def jetson_power_mode(tree: Tree, subject: Subject) -> Finding | None:
    """Jetson only (None elsewhere): the power mode bounds clocks and cores below what the module can do."""
    why = "a Jetson's power mode caps clocks and switches cores off; clocks float below the cap unless they are held"
    model = tree.text("/proc/device-tree/model") or ""
    if not is_jetson(tree):
        return None
    status = tree.text("/var/lib/nvpmodel/status") or ""
    found = re.search(r"pmode:(\d+)", status)
    if not found:
        missing = f"{model or 'Jetson'}: /var/lib/nvpmodel/status is missing"
        return Finding("jetson-power", "unknown", missing, why, "nvpmodel -q && jetson_clocks --show")
    mode = int(found[1])
    names = {
        int(number): name
        for number, name in re.findall(
            r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", tree.text("/etc/nvpmodel.conf") or ""
        )
    }
    name = names.get(mode, f"mode {mode}")
    highest = next((number for number, title in names.items() if title.startswith("MAXN")), 0)
    if mode != highest:
        return Finding(
            "jetson-power",
            "warning",
            f"{model}: {name}, not {names.get(highest, f'mode {highest}')}",
            why,
            f"nvpmodel -m {highest} && jetson_clocks",
        )
    online = parse_cores(tree.text(f"{CPU}/online"))
    floating = [core for core in sorted(online) if not _frequency_fixed(tree, core)]
    if floating:
        listed = format_cores(tuple(floating))
        return Finding(
            "jetson-power", "warning", f"{model}: {name}, clocks of cores {listed} float", why, "jetson_clocks"
        )
    return Finding("jetson-power", "ok", f"{model}: {name}, clocks held", why)
