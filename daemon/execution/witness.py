"""Whether this executor's core stood still while it ran: the witness (ipc/core/witness.c), where one is needed.

A guest's core may be taken away by its hypervisor at any time, and nothing that a thread can ask about itself tells.
On a machine of one's own no core stands still, and no system call a run is spent on asking.
"""

from __future__ import annotations

import re
from pathlib import Path

from taktd.daemon.execution.rights import Rights
from taktd.ipc import _core

__all__ = ["is_guest", "open_witness"]


def is_guest(root: Path = Path("/")) -> bool:
    """Whether this kernel runs above a hypervisor, as far as it says so."""
    try:
        flags = re.search(r"^flags\s*:.*\bhypervisor\b", (root / "proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        flags = None
    return bool(flags) or any((root / path).exists() for path in ("proc/device-tree/hypervisor", "sys/hypervisor/type"))


def open_witness(rights: Rights) -> _core.Witness | None:
    """A witness for a thread with these rights; ``None`` where it could say nothing: no real-time rights, several cores
    (it might sit on the other one), no hypervisor. What is refused becomes a note of rights."""
    if rights.policy != "fifo" or len(rights.affinity) != 1 or not is_guest():
        return None
    try:
        return _core.Witness(rights.priority + 1, rights.affinity)
    except OSError as error:
        rights.notes.append(
            f"no witness for core {rights.affinity[0]} at priority {rights.priority + 1} ({error.strerror}): where the "
            "hypervisor stops it, that counts as an overrun; raise RLIMIT_RTPRIO above the executor's priority"
        )
        return None
