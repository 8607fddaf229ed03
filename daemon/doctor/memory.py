"""Checks of memory: swap and transparent huge pages."""

from __future__ import annotations

import re

from taktd.daemon.doctor.finding import Finding, Subject
from taktd.daemon.doctor.tree import Tree


def swap(tree: Tree, subject: Subject) -> Finding:
    why = "the executor's memory is locked, a client's is not: a page that was swapped out costs milliseconds to touch"
    table = tree.text("/proc/swaps")
    if table is None:
        return Finding("swap", "unknown", "/proc/swaps is missing", why, "swapon --show   (should say nothing)")
    devices = [line.split() for line in table.splitlines()[1:] if len(line.split()) >= 4]
    if not devices:
        return Finding("swap", "ok", "none", why)
    used_kib = sum(int(fields[3]) for fields in devices if fields[3].isdigit())
    names = ", ".join(fields[0] for fields in devices)
    compressed = all("zram" in fields[0] for fields in devices)
    mend = "swapoff -a && systemctl mask swap.target"
    if compressed:
        mend = "systemctl disable --now nvzramconfig 2>/dev/null; swapoff -a"
    return Finding("swap", "warning", f"{names}: {used_kib} KiB in use", why, mend)


def huge_pages(tree: Tree, subject: Subject) -> Finding:
    why = "the kernel stops a program to move its pages together; that shows as pauses of hundreds of microseconds"
    folder = "/sys/kernel/mm/transparent_hugepage"
    enabled = tree.text(f"{folder}/enabled")
    if enabled is None:
        return Finding("huge-pages", "ok", f"{folder} is missing: not built in", why)
    chosen = re.search(r"\[(\w+)\]", enabled)
    mode = chosen[1] if chosen else enabled
    if mode in ("never", "madvise"):
        return Finding("huge-pages", "ok", f"transparent huge pages: {mode}", why)
    return Finding(
        "huge-pages",
        "warning",
        f"transparent huge pages: {mode}",
        why,
        f"echo madvise >{folder}/enabled   (for good: transparent_hugepage=madvise on the kernel command line)",
    )
