"""What a check answers, and for whom it was asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["ok", "warning", "fail", "unknown"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "fail", "unknown")

AS_ROOT: Final = "sudo taktctl doctor"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. evidence is what was read, and where; mend is a command, "" only where the level is ok.

    The command mends what is wrong, or shows what is not known; a remark may stand in brackets behind it.
    """

    check: str
    level: Level
    evidence: str
    why: str
    mend: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "check": self.check,
            "level": self.level,
            "evidence": self.evidence,
            "why": self.why,
            "mend": self.mend,
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """What taktd is asked to do on the machine.

    cores: where executors run; empty where the configuration doesn't say. priority: the executors' SCHED_FIFO
    priority. gpu: a device of the configuration is a GPU. user: whom the daemon runs as. processes: the daemon's and
    its executors' pids, where it could be asked: no other taktd's are judged then; None: not known.
    """

    cores: frozenset[int] = frozenset()
    priority: int = 80
    gpu: bool = False
    user: str = "taktd"
    source: str = ""  # where this was read, for the report
    processes: frozenset[int] | None = None

    def has(self, pid: int) -> bool:
        """Whether a process of a taktd is one to judge."""
        return self.processes is None or pid in self.processes
