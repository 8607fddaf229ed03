"""Real-time rights of an executor: taken where permitted, and told where not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from taktd.daemon.own_process import threads
from taktd.ipc import _core

__all__ = ["Rights", "leave_rights", "move_to", "take_rights"]


@dataclass(slots=True)
class Rights:
    """What this process really has, read back, and a sentence for each thing it asked for and did not get."""

    policy: str = "other"
    priority: int = 0
    affinity: list[int] = field(default_factory=list)
    mlocked: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def real_time(self) -> bool:
        return self.policy == "fifo" and self.mlocked

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def move_to(cores: list[int]) -> None:
    """Pins the calling thread (empty: not), as far as it may, with the rights it has. take_rights() says what came of
    it."""
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def leave_rights() -> None:
    """Every thread of this process is an ordinary one from here on: what is left to do is nobody's hurry.

    To take leave, a process frees all its memory, for some 10 ms, at the priority of whichever thread is the last one.
    """
    for thread in threads():
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def take_rights(cores: list[int], priority: int, helpers: Iterable[int] = ()) -> Rights:
    """Pins this thread to ``cores`` (empty: anywhere), asks for SCHED_FIFO and locked memory; never raises for a
    refusal. ``helpers``: threads that an engine has started before, which get what this one gets."""
    rights = Rights()
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            present = sorted(os.sched_getaffinity(0))
            rights.notes.append(f"core affinity {cores} refused ({error.strerror}): this process may use {present}")
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError as error:
        rights.notes.append(
            f"SCHED_FIFO {priority} refused ({error.strerror}): grant CAP_SYS_NICE or raise RLIMIT_RTPRIO"
        )
    for thread in helpers:
        with suppress(OSError):  # it may have ended meanwhile
            os.sched_setaffinity(thread, os.sched_getaffinity(0))
            os.sched_setscheduler(thread, os.sched_getscheduler(0), os.sched_getparam(0))
    locked = _core.lock_memory()
    if locked:
        rights.notes.append(f"memory not locked ({os.strerror(locked)}): grant CAP_IPC_LOCK or raise RLIMIT_MEMLOCK")
    policy = os.sched_getscheduler(0)
    rights.policy = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}.get(policy, str(policy))
    rights.priority = os.sched_getparam(0).sched_priority
    rights.affinity = sorted(os.sched_getaffinity(0))
    if cores and set(rights.affinity) < set(cores):  # those that are not there the kernel leaves out in silence
        rights.notes.append(f"of the cores {sorted(cores)} this process may use {rights.affinity} only")
    rights.mlocked = locked == 0
    return rights
