"""Checks of what the daemon's processes were given: policy, limits, capabilities, locked memory."""

from __future__ import annotations

import math
import re
from typing import Final

from taktd.daemon.doctor.finding import Finding, Subject
from taktd.daemon.doctor.power import is_taktd
from taktd.daemon.doctor.tree import Process, Tree, format_cores, parse_cores
from taktd.daemon.doctor.unit import DROP_INS, read_unit

CAP_IPC_LOCK: Final = 1 << 14
CAP_SYS_NICE: Final = 1 << 23
SCHED_FIFO: Final = 1


def executors(tree: Tree) -> list[Process]:
    return [process for process in tree.processes() if "taktd.daemon.executor" in process.command[:4]]


def capabilities(tree: Tree, subject: Subject) -> Finding:
    """What the running daemon may do; before it runs, what its unit would give it."""
    why = "without CAP_SYS_NICE and CAP_IPC_LOCK an executor gets no real-time priority and no locked memory"
    running = [process for process in tree.processes() if is_taktd(process.command) and subject.has(process.pid)]
    if not running:
        return _unit_rights(tree, why)
    lacking: list[str] = []
    for process in running:
        effective = _status_field(tree, process.pid, "CapEff")
        granted = int(effective, 16) if effective else 0
        limits = tree.text(f"/proc/{process.pid}/limits") or ""
        priority, memory = _limit(limits, "Max realtime priority"), _limit(limits, "Max locked memory")
        if not granted & CAP_SYS_NICE and (priority is None or priority < subject.priority):
            lacking.append(f"process {process.pid}: no CAP_SYS_NICE and RLIMIT_RTPRIO below {subject.priority}")
        if not granted & CAP_IPC_LOCK and memory is not None and memory < math.inf:
            lacking.append(f"process {process.pid}: no CAP_IPC_LOCK and a bounded RLIMIT_MEMLOCK")
    if lacking:
        return Finding(
            "rights",
            "fail",
            "; ".join(lacking[:4]),
            why,
            "systemctl restart taktd   (started by hand: prlimit --rtprio=95 --memlock=unlimited taktd ...)",
        )
    return Finding("rights", "ok", f"{len(running)} processes hold both capabilities, or limits that do as well", why)


def _unit_rights(tree: Tree, why: str) -> Finding:
    unit = read_unit(tree)
    if unit is None:
        missing = "taktd is not running, and there is no taktd.service"
        return Finding("rights", "unknown", missing, why, "apt install ./taktd_*.deb   (or start taktd by hand)")
    if {"CAP_SYS_NICE", "CAP_IPC_LOCK"} <= set(unit.words("AmbientCapabilities")):
        return Finding("rights", "ok", f"not running; {unit.path} grants both capabilities", why)
    culprit = unit.who_sets("AmbientCapabilities") or unit.path
    mend = "apt install --reinstall ./taktd_*.deb"
    if culprit.startswith(DROP_INS):
        mend = f"rm {culprit} && systemctl daemon-reload && systemctl restart taktd"
    elif culprit.startswith("/etc/"):
        mend = "systemctl revert taktd.service && systemctl restart taktd"
    return Finding("rights", "fail", f"by {culprit} the service doesn't get both capabilities", why, mend)


def real_time(tree: Tree, subject: Subject) -> Finding:
    """Whether each running executor really has its priority, its cores and its memory."""
    why = "an executor without real-time priority waits behind every other program; its times certify nothing"
    found = [process for process in executors(tree) if subject.has(process.pid)]
    if not found:
        return Finding("real-time", "unknown", "no executor is running", why, "systemctl start taktd")
    wrong: list[str] = []
    misplaced: list[str] = []
    for process in found:
        if process.policy != SCHED_FIFO:
            wrong.append(f"executor {process.pid} is not SCHED_FIFO (policy {process.policy})")
        if not int(re.sub(r"\D", "", _status_field(tree, process.pid, "VmLck") or "") or 0):
            wrong.append(f"executor {process.pid} has no locked memory")
        allowed = parse_cores(_status_field(tree, process.pid, "Cpus_allowed_list"))
        if subject.cores and not allowed <= subject.cores:
            misplaced.append(f"executor {process.pid} may run on cores {format_cores(allowed)}")
    if wrong or misplaced:
        return Finding(
            "real-time",
            "fail",
            "; ".join(wrong + misplaced),
            why,
            "journalctl -u taktd -g 'not real-time'   (says what was refused)"
            if wrong
            else "systemctl restart taktd   (executors have the cores of their start)",
        )
    listed = ", ".join(f"{process.pid}: FIFO {process.priority}" for process in found)
    return Finding("real-time", "ok", f"executors {listed}, memory locked", why)


def _status_field(tree: Tree, pid: int, name: str) -> str | None:
    match = re.search(rf"^{name}:\s*(.*)$", tree.text(f"/proc/{pid}/status") or "", re.MULTILINE)
    return match[1].strip() if match else None


def _limit(limits: str, name: str) -> float | None:
    """The soft limit, infinity where it is unlimited; None where it is not told."""
    match = re.search(rf"^{name}\s+(\d+|unlimited)", limits, re.MULTILINE)
    return None if match is None else math.inf if match[1] == "unlimited" else int(match[1])
