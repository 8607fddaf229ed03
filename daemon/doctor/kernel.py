"""Checks of the kernel: preemption, isolation, interrupts, real-time throttling, clock, virtual machines."""

from __future__ import annotations

import re
from typing import Final

from taktd.daemon.doctor.finding import Finding, Level, Subject
from taktd.daemon.doctor.tree import Tree, format_cores, parse_cores

CMDLINE: Final = "/proc/cmdline"
CPU: Final = "/sys/devices/system/cpu"

# Below this share of time for real-time work, even a loop that uses half a core is throttled in its bad periods.
RT_SHARE_MIN_PPM: Final = 900_000
# Stolen time since boot above which a hypervisor is said to be busy.
STEAL_MAX_PPM: Final = 1_000

PROC_MISSING: Final = "mount -t proc proc /proc"
SYS_MISSING: Final = "mount -t sysfs sysfs /sys"
ASK_WITH_CORES: Final = "taktctl doctor --cores LIST   (or give a device `cores:` in the configuration)"
EXTLINUX: Final = "/boot/extlinux/extlinux.conf"

# How a kernel says what it was built for, in /proc/version, best first.
_PREEMPTION: Final = ("PREEMPT_RT", "PREEMPT_DYNAMIC", "PREEMPT_LAZY", "PREEMPT")


def boot_option(tree: Tree, name: str) -> str | None:
    """The value of a kernel command line option ("" for one without a value), None if it isn't given; the last wins."""
    found = None
    for word in (tree.text(CMDLINE) or "").split():
        key, _, value = word.partition("=")
        if key == name:
            found = value
    return found


def kernel_config(tree: Tree, option: str) -> str | None:
    """The build option in /boot/config-RELEASE: "y", "m", "n" if it is off; None where there is no such file."""
    release = tree.text("/proc/sys/kernel/osrelease") or ""
    text = tree.text(f"/boot/config-{release}") if release else None
    if text is None:
        return None
    match = re.search(rf"^{re.escape(option)}=(\S+)$", text, re.MULTILINE)
    return match[1] if match else "n"


def preemption(tree: Tree, subject: Subject) -> Finding:
    why = "a kernel that can't be preempted lets a system call of any program delay the executor by milliseconds"
    release = tree.text("/proc/sys/kernel/osrelease") or "unknown release"
    version = tree.text("/proc/version") or tree.text("/proc/sys/kernel/version") or ""
    model = next((word for word in _PREEMPTION if re.search(rf"\b{word}\b", version)), "")
    if not version:
        return Finding("preemption", "unknown", "/proc/version is missing", why, PROC_MISSING)
    if model == "PREEMPT_RT" or tree.text("/sys/kernel/realtime") == "1":
        evidence = f"{release}: PREEMPT_RT"
        if subject.gpu and not is_jetson(tree):
            return Finding(
                "preemption",
                "warning",
                evidence + ", with a GPU configured",
                "NVIDIA's driver for x86 refuses to build on PREEMPT_RT; a mainline kernel with preempt=full is enough",
                "apt install linux-image-amd64",
            )
        return Finding("preemption", "ok", evidence, why)
    if model in ("PREEMPT_DYNAMIC", "PREEMPT_LAZY"):
        chosen = boot_option(tree, "preempt")
        if chosen == "full":
            return Finding("preemption", "ok", f"{release}: {model}, preempt=full", why)
        evidence = f"{release}: {model}, preempt={chosen or 'not given on the kernel command line'}"
        return Finding("preemption", "warning", evidence, why, _boot_with(tree, "preempt=full"))
    if model == "PREEMPT":
        return Finding("preemption", "ok", f"{release}: PREEMPT", why)
    return Finding(
        "preemption",
        "fail",
        f"{release}: built without kernel preemption ({version.strip()[:80]})",
        why,
        _preemptible(tree, subject),
    )


def _preemptible(tree: Tree, subject: Subject) -> str:
    """The command that brings a kernel that can be preempted, and that the GPU's driver runs with."""
    if is_jetson(tree):
        return "apt install nvidia-l4t-rt-kernel && systemctl reboot   (from NVIDIA's rt-kernel repository)"
    if subject.gpu:
        return f"apt install linux-image-amd64 && {_boot_with(tree, 'preempt=full')}"
    return "apt install linux-image-rt-amd64 && systemctl reboot"


def is_jetson(tree: Tree) -> bool:
    return tree.exists("/etc/nv_tegra_release") or "Jetson" in (tree.text("/proc/device-tree/model") or "")


def isolation(tree: Tree, subject: Subject) -> Finding:
    why = "on a core that others use, each of their system calls, timers and page faults can delay a job"
    isolated = parse_cores(tree.text(f"{CPU}/isolated"))
    online = parse_cores(tree.text(f"{CPU}/online"))
    ticks_off = parse_cores(tree.text(f"{CPU}/nohz_full"))
    callbacks_off = parse_cores(boot_option(tree, "rcu_nocbs"))
    if not online:
        return Finding("isolation", "unknown", f"{CPU}/online is missing", why, SYS_MISSING)
    if not subject.cores:
        last = max(online)
        level: Level = "ok" if isolated else "warning"
        return Finding(
            "isolation",
            level,
            f"the configuration names no cores; isolated: {format_cores(isolated) or 'none'} of {format_cores(online)}",
            why,
            "" if isolated else _edit(subject, f"give a device `cores: [{last}]`"),
        )
    gone = subject.cores - online
    if gone:
        return Finding(
            "isolation",
            "fail",
            f"cores {format_cores(gone)} are not online (online: {format_cores(online)})",
            "an executor can't run on a core that isn't there",
            _edit(subject, f"`cores:` may name {format_cores(online)}"),
        )
    if not subject.cores <= isolated:
        cores = format_cores(subject.cores)
        return Finding(
            "isolation",
            "warning",
            f"executor cores {cores}; isolated: {format_cores(isolated) or 'none'}",
            why,
            _boot_with(tree, f"isolcpus=managed_irq,domain,{cores} nohz_full={cores} rcu_nocbs={cores}"),
        )
    missing = [
        name for name, cores in (("nohz_full", ticks_off), ("rcu_nocbs", callbacks_off)) if not subject.cores <= cores
    ]
    evidence = f"executor cores {format_cores(subject.cores)} are isolated"
    if missing:
        cores = format_cores(subject.cores)
        return Finding(
            "isolation",
            "warning",
            f"{evidence}, but without {' and '.join(missing)}",
            "the timer tick and deferred kernel work still interrupt these cores",
            _boot_with(tree, " ".join(f"{name}={cores}" for name in missing)),
        )
    return Finding("isolation", "ok", f"{evidence}, without tick and RCU callbacks", why)


def interrupts(tree: Tree, subject: Subject) -> Finding:
    why = "a device's interrupt runs before any program, whatever its priority"
    if not subject.cores:
        return Finding("interrupts", "unknown", "the configuration names no cores", why, ASK_WITH_CORES)
    names = {
        match[1]: match[2].split()[-1]
        for match in re.finditer(r"^\s*(\d+):(.*\S)\s*$", tree.text("/proc/interrupts") or "", re.MULTILINE)
    }
    hits: list[str] = []
    numbers = [name for name in tree.names("/proc/irq") if name.isdigit()]
    for number in numbers:
        allowed = tree.text(f"/proc/irq/{number}/effective_affinity_list") or tree.text(
            f"/proc/irq/{number}/smp_affinity_list"
        )
        # An interrupt nobody has claimed has no line in /proc/interrupts and never fires.
        if number in names and parse_cores(allowed) & subject.cores:
            hits.append(f"{number} ({names[number]})")
    if not numbers:
        return Finding("interrupts", "unknown", "/proc/irq is missing", why, PROC_MISSING)
    balancer = any(process.command and process.command[0].endswith("irqbalance") for process in tree.processes())
    cores = format_cores(subject.cores)
    if hits:
        shown = ", ".join(hits[:6]) + (f" and {len(hits) - 6} more" if len(hits) > 6 else "")
        other = format_cores(parse_cores(tree.text(f"{CPU}/online")) - subject.cores)
        mend = (
            f"echo 'IRQBALANCE_BANNED_CPULIST={cores}' >>/etc/default/irqbalance && systemctl restart irqbalance"
            if balancer
            else f'for i in /proc/irq/*/smp_affinity_list; do echo {other or 0} >"$i"; done 2>/dev/null'
        )
        return Finding("interrupts", "warning", f"served by cores {cores}: {shown}", why, mend)
    if balancer:
        banned = re.search(
            r"^\s*IRQBALANCE_BANNED_CPU(?:LIST|S)=\"?([^\"\n]+)",
            tree.text("/etc/default/irqbalance") or "",
            re.MULTILINE,
        )
        if not banned:
            return Finding(
                "interrupts",
                "warning",
                f"none on cores {cores} now, but irqbalance runs and may move some there",
                why,
                f"echo 'IRQBALANCE_BANNED_CPULIST={cores}' >>/etc/default/irqbalance && systemctl restart irqbalance",
            )
    return Finding("interrupts", "ok", f"none of {len(numbers)} interrupts is served by cores {cores}", why)


def rt_throttling(tree: Tree, subject: Subject) -> Finding:
    why = "the kernel stops all real-time work on a core for the rest of each period once this share is used up"
    runtime = tree.number("/proc/sys/kernel/sched_rt_runtime_us")
    period = tree.number("/proc/sys/kernel/sched_rt_period_us")
    if runtime is None or not period:
        return Finding("rt-throttling", "unknown", "/proc/sys/kernel/sched_rt_runtime_us is missing", why, PROC_MISSING)
    evidence = f"sched_rt_runtime_us {runtime} of {period}"
    mend = "echo 'kernel.sched_rt_runtime_us = -1' >/etc/sysctl.d/60-taktd.conf && sysctl --system"
    if runtime < 0:
        return Finding("rt-throttling", "ok", f"{evidence}: not throttled", why)
    if runtime == 0:
        return Finding("rt-throttling", "fail", f"{evidence}: no real-time work is allowed at all", why, mend)
    if runtime * 1_000_000 // period < RT_SHARE_MIN_PPM:
        return Finding("rt-throttling", "fail", evidence, why, mend)
    pause_ms = (period - runtime) // 1000
    return Finding(
        "rt-throttling",
        "warning",
        f"{evidence}: up to {pause_ms} ms of each {period // 1000} ms can be taken away",
        f"{why}; taktd stays below it, but gives a silent executor {pause_ms} ms more before it calls it hung",
        mend,
    )


def rt_group_scheduling(tree: Tree, subject: Subject) -> Finding:
    why = "with real-time group scheduling, a service's cgroup has no real-time time unless someone gives it some"
    built = kernel_config(tree, "CONFIG_RT_GROUP_SCHED")
    disabled = boot_option(tree, "rt_group_sched") == "0"
    version_1 = tree.number("/sys/fs/cgroup/cpu/cpu.rt_runtime_us")
    mend = _boot_with(tree, "rt_group_sched=0")
    if disabled or (version_1 is None and built == "n"):
        state = "switched off by rt_group_sched=0" if disabled else "not built in"
        return Finding("rt-groups", "ok", f"CONFIG_RT_GROUP_SCHED: {state}", why)
    if version_1 is None and built is None:
        ask = "modprobe configs; zgrep CONFIG_RT_GROUP_SCHED /proc/config.gz   (should say: is not set)"
        return Finding("rt-groups", "unknown", "no /boot/config of this kernel, and no cpu.rt_runtime_us", why, ask)
    if version_1 is None:
        return Finding("rt-groups", "fail", "CONFIG_RT_GROUP_SCHED=y, and no group's time can be set", why, mend)
    # A service gets a group of its own only if some unit asks for CPU accounting or weights; else it stays in the root.
    for name in ("takt.slice/taktd.service", "takt.slice"):
        granted = tree.number(f"/sys/fs/cgroup/cpu/{name}/cpu.rt_runtime_us")
        if granted is not None:
            level: Level = "ok" if granted else "fail"
            return Finding(
                "rt-groups", level, f"{name} has {granted} us of real-time time", why, "" if granted else mend
            )
    if version_1:
        return Finding("rt-groups", "ok", f"the service shares the root group's {version_1} us", why)
    return Finding("rt-groups", "fail", "the root group has no real-time time", why, mend)


def clocksource(tree: Tree, subject: Subject) -> Finding:
    why = "every deadline is read off this clock; a slow one costs microseconds a reading, an unstable one jumps"
    folder = "/sys/devices/system/clocksource/clocksource0"
    current = tree.text(f"{folder}/current_clocksource")
    available = (tree.text(f"{folder}/available_clocksource") or "").split()
    if not current:
        return Finding("clocksource", "unknown", f"{folder}/current_clocksource is missing", why, SYS_MISSING)
    evidence = f"{current} (available: {' '.join(available) or 'not told'})"
    if current in ("tsc", "arch_sys_counter"):
        return Finding("clocksource", "ok", evidence, why)
    if current in ("kvm-clock", "hyperv_clocksource_tsc_page", "xen"):
        elsewhere = "virsh edit GUEST   (on the host, into <cpu>: <feature policy='require' name='invtsc'/>)"
        mend = f"echo tsc >{folder}/current_clocksource" if "tsc" in available else elsewhere
        return Finding("clocksource", "warning", evidence + ": a virtual machine's clock", why, mend)
    mend = f"echo tsc >{folder}/current_clocksource" if "tsc" in available else _boot_with(tree, "tsc=reliable")
    return Finding("clocksource", "fail", evidence, why, mend)


def virtual_machine(tree: Tree, subject: Subject) -> Finding:
    why = "a hypervisor takes cores away for as long as it likes, and no setting inside the guest shows or stops it"
    product = " ".join(
        filter(None, (tree.text(f"/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")))
    )
    guest = re.search(r"^flags\s*:.*\bhypervisor\b", tree.text("/proc/cpuinfo") or "", re.MULTILINE) is not None
    container = tree.text("/run/systemd/container")
    total, stolen = _cpu_time(tree)
    steal = f"{stolen * 100 / total:.2f} % of all time since boot was stolen" if total else "steal is not told"
    if guest:
        busy = total > 0 and stolen * 1_000_000 // total > STEAL_MAX_PPM
        return Finding(
            "virtual-machine",
            "fail" if busy else "warning",
            f"a guest of {tree.text('/sys/hypervisor/type') or product or 'an unnamed hypervisor'}; {steal}",
            why,
            "virsh vcpupin GUEST VCPU CORE   (on the host, for each core; by virsh edit <vcpusched scheduler='fifo'>)",
        )
    if container:
        return Finding(
            "virtual-machine",
            "warning",
            f"inside a container ({container}); {steal}",
            "what a container may set, and what others do on its cores, is decided outside",
            "apt install ./taktd_*.deb && taktctl doctor   (on the machine itself, not in a container)",
        )
    if not tree.exists("/proc/cpuinfo"):
        return Finding("virtual-machine", "unknown", "/proc/cpuinfo is missing", why, PROC_MISSING)
    return Finding("virtual-machine", "ok", f"no hypervisor{f' ({product})' if product else ''}", why)


def _cpu_time(tree: Tree) -> tuple[int, int]:
    """(all time, stolen time) since boot in ticks, over all cores; (0, 0) where /proc/stat doesn't tell."""
    match = re.search(r"^cpu\s+(.*)$", tree.text("/proc/stat") or "", re.MULTILINE)
    fields = [int(field) for field in match[1].split()] if match else []
    if len(fields) < 8:
        return 0, 0
    return sum(fields[:8]), fields[7]  # user nice system idle iowait irq softirq steal; guest time is in user


def _edit(subject: Subject, what: str) -> str:
    file = "" if subject.source.startswith("-") else subject.source
    return f"sensible-editor {file or '/etc/taktd/taktd.yaml'} && systemctl restart taktd   ({what})"


def _boot_with(tree: Tree, options: str) -> str:
    """The command that boots the kernel with more options: where GRUB starts it, and on a Jetson."""
    if tree.exists(EXTLINUX) or is_jetson(tree):
        return f"sed -i '/^ *APPEND /s/$/ {options}/' {EXTLINUX} && systemctl reboot"
    return f"sed -i 's/^GRUB_CMDLINE_LINUX=\"/&{options} /' /etc/default/grub && update-grub && systemctl reboot"
