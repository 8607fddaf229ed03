"""Where the watch runs: the thread of the C core that answers hopeless jobs while the executor is inside an engine.

It must get a core while the executor's thread holds its own: on another core where the process may use one, else on the
same one, a priority above it. Called once, before the executor serves.
"""

from __future__ import annotations

from collections.abc import Iterable

from taktd.daemon.execution.rights import Rights
from taktd.ipc import _core

__all__ = ["start_watch", "watch_cores"]


def watch_cores(usable: Iterable[int], executors: Iterable[int]) -> list[int]:
    """The cores to run on: those that are not the executor's, or its own where there are no others."""
    own = sorted(executors)
    return sorted(set(usable) - set(own)) or own


def start_watch(server: _core.Server, rights: Rights, usable: Iterable[int]) -> None:
    """usable: the cores that this process might use before it was pinned. What is refused becomes a note of rights."""
    cores = watch_cores(usable, rights.affinity)
    priority = rights.priority + 1 if rights.policy == "fifo" else 0
    try:
        server.watch(priority, cores)
    except OSError as error:
        rights.notes.append(
            f"the watch over long runs has no priority {priority} on cores {cores} ({error.strerror}): while a job "
            "runs, the answer to another that can't make its deadline any more may come late; raise RLIMIT_RTPRIO "
            "above the executor's priority"
        )
        server.watch(0, [])
