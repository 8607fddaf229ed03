"""All checks in the order in which a person reads them, and their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from taktd.daemon.doctor import kernel, memory, power, rights
from taktd.daemon.doctor.finding import AS_ROOT, LEVELS, Finding, Level, Subject
from taktd.daemon.doctor.gpu import GpuReadings, check_gpus
from taktd.daemon.doctor.tree import Tree, Unreadable, format_cores

Check = Callable[[Tree, Subject], Finding | None]

# (id for the report should the check not get far enough to give one, check)
CHECKS: Final[tuple[tuple[str, Check], ...]] = (
    ("preemption", kernel.preemption),
    ("isolation", kernel.isolation),
    ("interrupts", kernel.interrupts),
    ("governor", power.governor),
    ("idle-states", power.idle_states),
    ("smt", power.smt),
    ("rt-throttling", kernel.rt_throttling),
    ("rt-groups", kernel.rt_group_scheduling),
    ("rights", rights.capabilities),
    ("real-time", rights.real_time),
    ("swap", memory.swap),
    ("huge-pages", memory.huge_pages),
    ("clocksource", kernel.clocksource),
    ("virtual-machine", kernel.virtual_machine),
    ("jetson-power", power.jetson_power_mode),
)


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings about one machine. fit: nothing failed; what is unknown is not counted as failed."""

    subject: Subject
    findings: tuple[Finding, ...]

    @property
    def fit(self) -> bool:
        return all(finding.level != "fail" for finding in self.findings)

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "fit": self.fit,
            "cores": format_cores(self.subject.cores),
            "priority": self.subject.priority,
            "configuration": self.subject.source or None,
            "count": {level: self.count(level) for level in LEVELS},
            "findings": [finding.as_json() for finding in self.findings],
        }


def examine(tree: Tree, subject: Subject, readings: GpuReadings | None = None) -> Examination:
    """Run every check on the tree. A file that may not be read makes its check unknown, never the examination fail."""
    findings: list[Finding] = []
    for name, check in CHECKS:
        try:
            finding = check(tree, subject)
        except Unreadable as error:
            finding = Finding(name, "unknown", str(error), "this file is readable for root only", AS_ROOT)
        if finding is not None:
            findings.append(finding)
    try:
        findings += check_gpus(tree, subject, readings)
    except Unreadable as error:
        findings.append(Finding("gpu", "unknown", str(error), "this file is readable for root only", AS_ROOT))
    return Examination(subject, tuple(findings))
